"""The node's copies of policy versions: pulled once, whole, aligned, and the same on every rank."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from spotlight_core.errors import SpotlightError
from spotlight_core.types import PolicyVersion
from spotlight_core.weights.aligned import ALIGNMENT, map_aligned, write_aligned
from spotlight_core.weights.copy import NodeWeights
from spotlight_core.weights.digest import weights_digest
from spotlight_core.weights.store import WeightStore


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(7, 5, generator=generator),
        "layer.bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "a.scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(11, generator=generator).to(torch.float16).expand(2, 11).t(),
        "nothing": torch.empty(0, 4),
        "steps": torch.arange(5),
    }


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "published")


def node(tmp_path: Path, store: WeightStore) -> NodeWeights:
    return NodeWeights(tmp_path / "node", store)


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


def test_an_aligned_file_is_safetensors_and_maps_at_64_bytes(tmp_path: Path) -> None:
    weights = some_weights()
    write_aligned(weights, tmp_path / "w")
    mapped = map_aligned(tmp_path / "w")
    check_equal(mapped, weights)
    assert {tensor.data_ptr() % ALIGNMENT for tensor in mapped.values() if tensor.numel()} == {0}
    stock = load_file(tmp_path / "w")
    check_equal({name: stock[name] for name in weights}, weights)
    with pytest.raises(FileExistsError):
        write_aligned(weights, tmp_path / "w")


def test_no_weights_at_all_are_a_file_too(tmp_path: Path) -> None:
    write_aligned({}, tmp_path / "w")
    assert map_aligned(tmp_path / "w") == {}


def test_a_dtype_that_weights_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"c is torch\.complex64"):
        write_aligned({"c": torch.zeros(1, dtype=torch.complex64)}, tmp_path / "w")


@pytest.mark.parametrize("damaged", [b"", b"\x05", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_none_is_told(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "w").write_bytes(damaged)
    with pytest.raises(SafetensorError):
        map_aligned(tmp_path / "w")


def test_a_cut_file_is_told(tmp_path: Path) -> None:
    write_aligned(some_weights(), tmp_path / "w")
    whole = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(whole[:-8])
    with pytest.raises(SafetensorError):
        map_aligned(tmp_path / "w")


def test_the_first_rank_pulls_and_the_others_need_no_store(tmp_path: Path, store: WeightStore) -> None:
    policy = store.publish("old", 1, some_weights())
    check_equal(node(tmp_path, store).load(policy), some_weights())
    store.path(policy).unlink()
    check_equal(node(tmp_path, store).load(policy), some_weights())


def test_a_damaged_copy_is_replaced_from_the_store(tmp_path: Path, store: WeightStore) -> None:
    policy = store.publish("old", 1, some_weights())
    copies = node(tmp_path, store)
    copies.load(policy)
    whole = bytearray(copies.path(policy).read_bytes())
    whole[-1] ^= 1
    copies.path(policy).write_bytes(whole)
    check_equal(copies.load(policy), some_weights())
    check_equal(map_aligned(copies.path(policy)), some_weights())


def test_neither_copy_nor_version_is_an_error(tmp_path: Path, store: WeightStore) -> None:
    with pytest.raises(SpotlightError, match="old-7"):
        node(tmp_path, store).load(PolicyVersion(label="old", number=7, digest="d"))
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["lock"]


def test_old_versions_go_and_who_maps_one_keeps_it(tmp_path: Path, store: WeightStore) -> None:
    copies = node(tmp_path, store)
    policies = [store.publish("old", number, some_weights(number)) for number in range(4)]
    first = copies.load(policies[0])
    mapped = node(tmp_path, store).load(policies[0])
    for policy in policies[1:]:
        copies.load(policy)
    there = [copies.path(policy).exists() for policy in policies]
    assert there == [False, False, True, True]
    check_equal(first, some_weights(0))
    check_equal(mapped, some_weights(0))


def test_the_same_number_with_other_weights_is_another_copy(tmp_path: Path, store: WeightStore) -> None:
    copies = node(tmp_path, store)
    former = store.publish("old", 1, some_weights(0))
    copies.load(former)
    policy = store.publish("old", 1, some_weights(1))
    check_equal(copies.load(policy), some_weights(1))
    assert weights_digest(copies.load(former)) == former.digest


def test_what_a_killed_publisher_left_is_swept(tmp_path: Path, store: WeightStore) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "old-1-abc.tmp").write_bytes(b"half")
    node(tmp_path, store)
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["lock"]


def test_without_room_for_a_copy_the_weights_come_from_the_store(
    tmp_path: Path, store: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spotlight_core.weights.copy.write_aligned", full)
    policy = store.publish("old", 1, some_weights())
    copies = node(tmp_path, store)
    check_equal(copies.load(policy), some_weights())
    assert not copies.path(policy).exists()
    assert "No space left" in caplog.text


def _load(folder: Path, policy: PolicyVersion, answers: "multiprocessing.SimpleQueue[str]") -> None:
    copies = NodeWeights(folder / "node", WeightStore(folder / "published"))
    answers.put(weights_digest(copies.load(policy)))


def test_ranks_that_load_at_once_all_hold_the_version(tmp_path: Path, store: WeightStore) -> None:
    policy = store.publish("old", 1, {"w": torch.randn(1 << 18)})
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_load, args=(tmp_path, policy, answers)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert {answers.get() for _ in ranks} == {policy.digest}
    assert len(list((tmp_path / "node").glob("*.safetensors"))) == 1
