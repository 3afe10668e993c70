"""What a process says and sets of how its CPU computes."""

import torch

from spotlight_core.diffusion.cpu import cpu_capability, use_threads


def test_threads_are_as_many_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        for count in (3, 1):
            use_threads(count)
            assert torch.get_num_threads() == count
    finally:
        use_threads(before)


def test_the_instruction_set_is_one_of_torchs() -> None:
    assert cpu_capability() in {"DEFAULT", "NO AVX", "AVX2", "AVX512", "NEON", "SVE256"}
