"""The tiny pipelines, saved once."""

from pathlib import Path

import pytest
import torch

from tests.core.parallel.families import saved


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved(tmp_path_factory.mktemp("pipelines"))
