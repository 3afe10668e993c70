"""The GPU's measurements: what of them runs anywhere, and the whole where there is a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.measure import build_stack, measure, step_times

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_hooks_without_a_group_leave_the_forward_as_it_is() -> None:
    stack = build_stack(torch.device("cpu"), torch.float32, blocks=2, heads=2, channels=128)
    (step,) = step_times(stack, {"tiny": 4}, rounds=2).values()
    assert step.keys() == {"stock_ms", "ours_ms", "ours_over_stock"}
    assert min(step.values()) > 0


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.measure"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout) == {"skipped": "no GPU"}


@needs_gpu
def test_everything_is_measured_on_a_gpu() -> None:
    found = measure()
    assert all(step["stock_ms"] > 0 for step in found["step"].values())
    assert found["sleep"]["freed_gb"] > 0
    assert found["copy"]["pageable_gb_s"] > 0
