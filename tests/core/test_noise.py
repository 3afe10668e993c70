"""The noise is Philox 4x64-10 keyed by sha256 of names: recomputed here from the definition."""

import hashlib

import numpy as np
import pytest
import torch

from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise, seed_noise
from spotlight_core.philox import named_generator

MASK = (1 << 64) - 1


def key_of(*names: str | int) -> int:
    text = "\x1f".join(str(name) for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def philox_4x64_10(key: int, blocks: int) -> list[int]:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), counter from 1 as in NumPy."""
    output: list[int] = []
    for counter in range(1, blocks + 1):
        c0, c1, c2, c3 = counter, 0, 0, 0
        k0, k1 = key & MASK, key >> 64
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & MASK, (low >> 64) ^ c3 ^ k1, low & MASK
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        output += [c0, c1, c2, c3]
    return output


def test_raw_bits_are_philox_keyed_by_the_hash_of_the_names() -> None:
    raw = named_generator("order", 7, 3).bit_generator.random_raw(12)
    assert raw.tolist() == philox_4x64_10(key_of("order", 7, 3), blocks=3)


@pytest.mark.parametrize(
    ("rng_seed", "occurrence", "seed", "denoise_step"),
    [(0, "0/0", 0, INITIAL_NOISE), (1, "12/3", 31, 4), (0, "held-out-399", 5, 9)],
)
def test_seed_noise_is_the_normal_stream_of_its_own_key(
    rng_seed: int, occurrence: str, seed: int, denoise_step: int
) -> None:
    key = key_of("noise", rng_seed, occurrence, seed, denoise_step)
    expected = np.random.Generator(np.random.Philox(key=key)).standard_normal((8, 64), dtype=np.float32)
    noise = seed_noise(rng_seed, occurrence, seed, denoise_step, (8, 64))
    assert noise.dtype == np.float32
    np.testing.assert_array_equal(noise, expected)


def test_noise_is_pinned_to_known_values() -> None:
    """A change of key derivation or of NumPy's normals would silently change every trajectory."""
    noise = seed_noise(0, "0/0", 0, INITIAL_NOISE, (2, 2))
    assert noise.tobytes().hex() == "14e028bf8575bdbfd450763fe3e94cbf"


def test_batch_noise_does_not_depend_on_who_shares_the_batch() -> None:
    occurrences, seeds = ["2/1", "2/1", "5/0"], [4, 9, 4]
    whole = batch_noise(3, occurrences, seeds, 6, (8, 64))
    assert whole.shape == (3, 8, 64)
    assert whole.dtype == torch.float32
    for row, (occurrence, seed) in enumerate(zip(occurrences, seeds, strict=True)):
        assert torch.equal(whole[row], torch.from_numpy(seed_noise(3, occurrence, seed, 6, (8, 64))))


def test_every_name_changes_the_noise() -> None:
    named = [(0, "0/0", 0, -1), (1, "0/0", 0, -1), (0, "0/1", 0, -1), (0, "0/0", 1, -1), (0, "0/0", 0, 0)]
    arrays = [seed_noise(*names, (8, 64)) for names in named]
    for index, array in enumerate(arrays):
        for other in arrays[:index]:
            assert abs(float(np.corrcoef(array.ravel(), other.ravel())[0, 1])) < 0.2
            assert not np.array_equal(array, other)


def test_noise_is_standard_normal() -> None:
    noise = batch_noise(0, ["0/0"] * 200, range(200), INITIAL_NOISE, (8, 64)).numpy().astype(np.float64)
    count = noise.size  # 102,400: the mean's standard error is 1/320, that of the variance sqrt(2)/320
    assert abs(noise.mean()) < 4 / np.sqrt(count)
    assert abs(noise.var() - 1.0) < 4 * np.sqrt(2 / count)
