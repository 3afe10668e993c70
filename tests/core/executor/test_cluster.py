"""What the cluster refuses before it starts anything."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.arrays import arrays_digest, to_bytes
from spotlight_core.errors import BadInputError
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.processes import run_processes
from spotlight_core.executor.results import Results


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


def test_the_first_result_of_a_request_is_kept() -> None:
    results, first, second = Results(), {"x": np.zeros(1)}, {"x": np.ones(1)}
    results.put("a", to_bytes(first))
    results.put("a", to_bytes(second))
    assert arrays_digest(results.take("a")) == arrays_digest(first)
    results.put("a", to_bytes(second))
    with pytest.raises(KeyError):
        results.take("a")
