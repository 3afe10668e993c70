"""A run's folder, for tests of what is kept in it."""

from pathlib import Path

import pytest

from tasks.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder
