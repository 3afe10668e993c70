"""One thread, and every family's tiny pipeline, saved once."""

from pathlib import Path

import pytest
import torch

from tests.core.diffusion.models.tiny_pipelines import FAMILIES, save_pipeline


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {family: save_pipeline(family, root / family) for family in FAMILIES}
