"""Commits come back bit for bit, and never damaged."""

from pathlib import Path

import numpy as np
import pytest

from spotlight_core.arrays import arrays_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.tensor_store import TensorStore

REQUEST = "3/rollout/a prompt/with slashes/0"


def state() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x_BSC = generator.standard_normal((2, 8, 64), dtype=np.float32)
    x_BSC[0, 0, :4] = [np.float32(1e-42), -0.0, np.inf, np.nan]
    return {"x_BSC": x_BSC, "logp_TB": generator.standard_normal((3, 2), dtype=np.float32)}


def test_a_commit_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    store, before = TensorStore(tmp_path), state()
    ref, digest = store.put(REQUEST, 4, before)
    after = store.get(ref, digest)
    assert digest == arrays_digest(before)
    assert sorted(after) == sorted(before)
    for name, array in before.items():
        assert after[name].dtype == np.float32
        assert after[name].tobytes() == array.tobytes()


def test_only_whole_files_are_left(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    store.put(REQUEST, 4, state())
    store.put(REQUEST, 4, state())
    store.put(REQUEST, 5, state())
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "4.safetensors",
        "5.safetensors",
    ]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_commit_is_refused(tmp_path: Path, damage: str) -> None:
    store = TensorStore(tmp_path)
    ref, digest = store.put(REQUEST, 4, state())
    path = tmp_path / ref
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:20])
    else:
        path.unlink()
    with pytest.raises(SpotlightError, match=path.name):
        store.get(ref, digest)


def test_another_commit_under_the_ref_is_refused(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    ref, _ = store.put(REQUEST, 4, state())
    with pytest.raises(SpotlightError, match="instead of 000000000000"):
        store.get(ref, "0" * 64)


def test_discard_forgets_one_request(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    first, first_digest = store.put(REQUEST, 4, state())
    second, second_digest = store.put("another", 4, state())
    store.discard(REQUEST)
    store.discard(REQUEST)
    assert arrays_digest(store.get(second, second_digest)) == second_digest
    with pytest.raises(SpotlightError):
        store.get(first, first_digest)
