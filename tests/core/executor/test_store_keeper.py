"""The keeper in this process: what it acknowledged outlives it, and lost leases commit no more."""

from pathlib import Path

import pytest

from spotlight_core.arrays import payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.executor.store_keeper import NewestCommit, StoreKeeper
from tests.core.commits import payload

MEMORY_BYTES = 2**20


def test_another_keeper_serves_what_one_acknowledged(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    ref, digest = keeper.put("1.1", "0/rollout/p/0", 4, payload())
    assert digest == payload_digest(payload())
    assert StoreKeeper(str(tmp_path), MEMORY_BYTES).get(ref, digest) == payload()


def test_a_fence_tells_the_last_commits_and_refuses_more(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    keeper.put("1.1", "a", 2, payload(1))
    ref, digest = keeper.put("1.1", "a", 4, payload(2))
    newest = NewestCommit(next_denoise_step=4, ref=ref, digest=digest)
    assert keeper.fence({"1.1": "a", "1.2": "b"}) == {"1.1": newest}
    with pytest.raises(SpotlightError, match=r"lease 1\.1 is over"):
        keeper.put("1.1", "a", 6, payload(3))
    assert keeper.get(ref, digest) == payload(2)
    again, _ = keeper.put("1.3", "a", 6, payload(3))
    assert keeper.fence({"1.3": "a"})["1.3"].ref == again


def test_a_settled_request_leaves_nothing(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    ref, digest = keeper.put("1.1", "a", 2, payload())
    kept, kept_digest = keeper.put("1.2", "b", 2, payload())
    keeper.discard(["a", "never seen"])
    with pytest.raises(SpotlightError):
        keeper.get(ref, digest)
    assert keeper.get(kept, kept_digest) == payload()
    assert keeper.fence({"1.1": "a"}) == {}
    assert keeper.usage().commits == 1


def test_another_keeper_knows_the_last_commits_and_the_fenced_leases(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    keeper.put("1.1", "0/a", 2, payload(1))
    ref, digest = keeper.put("1.1", "0/a", 4, payload(2))
    another = StoreKeeper(str(tmp_path), MEMORY_BYTES, fenced=["1.1"])
    with pytest.raises(SpotlightError, match=r"lease 1\.1 is over"):
        another.put("1.1", "0/a", 6, payload(3))
    newest = NewestCommit(next_denoise_step=4, ref=ref, digest=digest)
    assert another.fence({"1.2": "0/a"}) == {"1.2": newest}


def test_a_late_commit_of_a_lower_step_is_not_the_last_one(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    ref, digest = keeper.put("1.2", "0/a", 6, payload(1))
    keeper.put("1.1", "0/a", 4, payload(2))
    newest = NewestCommit(next_denoise_step=6, ref=ref, digest=digest)
    assert keeper.fence({"1.2": "0/a"}) == {"1.2": newest}


def test_a_damaged_last_commit_is_passed_over(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    ref, digest = keeper.put("1.1", "0/a", 2, payload(1))
    damaged, _ = keeper.put("1.1", "0/a", 4, payload(2))
    (tmp_path / damaged).write_bytes(b"no safetensors")
    newest = NewestCommit(next_denoise_step=2, ref=ref, digest=digest)
    assert StoreKeeper(str(tmp_path), MEMORY_BYTES).fence({"1.1": "0/a"}) == {"1.1": newest}


def test_what_is_forgotten_with_its_iteration_is_nobodys_last_commit(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    keeper.put("1.1", "0/a", 2, payload())
    keeper.forget_before(1)
    assert keeper.fence({"1.1": "0/a"}) == {}


def test_what_still_runs_for_a_settled_request_commits_no_more(tmp_path: Path) -> None:
    keeper = StoreKeeper(str(tmp_path), MEMORY_BYTES)
    keeper.put("1.1", "0/a", 2, payload(1))
    keeper.discard(["0/a"], ["1.1"])
    with pytest.raises(SpotlightError, match=r"lease 1\.1 is over"):
        keeper.put("1.1", "0/a", 4, payload(1))
    assert keeper.fence({"1.2": "0/a"}) == {}, "its namesake begins from noise"
