"""Published policy versions: whole, named, and known by digest."""

import hashlib
from pathlib import Path

import pytest
import torch

from spotlight_core.errors import SpotlightError
from spotlight_core.types import PolicyVersion
from spotlight_core.weights.digest import weights_digest
from spotlight_core.weights.store import WeightStore


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"b": torch.full((2,), value), "a": torch.arange(6.0).reshape(2, 3).t()}


def test_digest_is_sha256_in_name_order_over_contiguous_bytes() -> None:
    a = torch.arange(6.0).reshape(2, 3).t().contiguous()
    expected = hashlib.sha256(
        b"a(3, 2)torch.float32"
        + a.numpy().tobytes()
        + b"b(2,)torch.float32"
        + torch.ones(2).numpy().tobytes()
    ).hexdigest()
    assert weights_digest(_weights(1.0)) == expected


def test_publish_and_load(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    policy = store.publish("old", 3, _weights(1.0))
    assert policy == PolicyVersion(label="old", number=3, digest=weights_digest(_weights(1.0)))
    assert store.path(policy) == tmp_path / "weights" / "old-3.safetensors"
    loaded = WeightStore(tmp_path / "weights").load(policy)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in _weights(1.0).items()
    }
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["old-3.safetensors"]


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first = store.publish("old", 1, _weights(1.0))
    second = store.publish("old", 1, _weights(2.0))
    assert store.load(second)["b"].tolist() == [2.0, 2.0]
    with pytest.raises(SpotlightError, match=r"old-1 is [0-9a-f]{12}"):
        store.load(first)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    policy = store.publish("ema", 2, _weights(1.0))
    store.path(policy).write_bytes(b"\x00" * 20)
    with pytest.raises(SpotlightError, match="cannot read policy version ema-2"):
        store.load(policy)
    store.path(policy).unlink()
    with pytest.raises(SpotlightError, match="cannot read policy version ema-2"):
        store.load(policy)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    (tmp_path / "old-1.safetensors").mkdir()  # the rename cannot replace a folder
    with pytest.raises(OSError, match="old-1"):
        store.publish("old", 1, _weights(1.0))
    assert [path.name for path in tmp_path.iterdir()] == ["old-1.safetensors"]


def test_prune_keeps_what_is_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    versions = [store.publish("old", number, _weights(float(number))) for number in range(3)]
    removed = store.prune(keep=versions[2:])
    assert [path.name for path in removed] == ["old-0.safetensors", "old-1.safetensors"]
    assert store.load(versions[2])["b"].tolist() == [2.0, 2.0]
