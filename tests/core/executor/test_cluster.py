"""What the cluster refuses before it starts anything."""

import os
import socket
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.processes import run_processes


def test_a_port_in_use_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run_id, environment = f"test-port-{os.getpid()}", dict(os.environ)
        cluster = RayCluster(run_id, tmp_path / "ray", port)
        with pytest.raises(BadInputError, match=str(port)) as refused:
            cluster.start_head()
    assert refused.value.exit_code == 2
    assert not (tmp_path / "ray").exists()
    assert run_processes(run_id) == []
    assert dict(os.environ) == environment
    cluster.stop()


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ray").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="belongs to another user"):
        RayCluster("test-link", tmp_path / "ray").start_head()
    assert list((tmp_path / "elsewhere").iterdir()) == []
