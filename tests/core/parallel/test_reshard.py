"""A state passes from those who hold it to all of a group."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.arrays import Arrays, arrays_digest
from spotlight_core.parallel.communicator import Communicator, GroupBrokenError
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.reshard import hand_over, shard_sizes

RANKS = 4
_generations = count(1)
Run = Callable[[Callable[[Communicator], Arrays]], list[Arrays]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a function on four ranks, threads of this process."""
    node = NodeRendezvous.create(tmp_path_factory.mktemp("reshard") / "node", RANKS)
    ranks = [NodeRendezvous.join(Path(node.path), rank) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:

        def run(function: Callable[[Communicator], Arrays]) -> list[Arrays]:
            generation = next(_generations)
            communicators = [rank.communicator(tuple(range(RANKS)), generation) for rank in ranks]
            futures = [pool.submit(function, communicator) for communicator in communicators]
            return [future.result() for future in futures]

        yield run
    for rank in ranks:
        rank.close()
    node.close()


def make_state(seed: int) -> Arrays:
    """Arrays as an engine keeps them, of odd shapes and several dtypes."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [tuple(rng.integers(0, 6, rng.integers(0, 4))) for _ in range(4)]
    dtypes = (np.float32, np.float64, np.uint8, np.int64)
    arrays = zip("xvwz", shapes, dtypes, strict=True)
    return {f"{name}_BSC": rng.normal(0, 9, shape).astype(dtype) for name, shape, dtype in arrays}


@given(length=st.integers(0, 1000), degree=st.integers(1, 16))
def test_shards_cover_the_whole_and_differ_by_one_at_most(length: int, degree: int) -> None:
    sizes = shard_sizes(length, degree)
    assert (len(sizes), sum(sizes)) == (degree, length)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("holders", [(0,), (2,), (3, 1), (0, 1, 2), (0, 1, 2, 3)])
def test_every_rank_ends_with_the_whole_state(run: Run, holders: tuple[int, ...]) -> None:
    for seed in range(6):
        state = make_state(seed)

        def mine(communicator: Communicator, state: Arrays = state) -> Arrays:
            return hand_over(state if communicator.rank in holders else None, holders, communicator)

        results = run(mine)
        assert {arrays_digest(found) for found in results} == {arrays_digest(state)}
        assert all(array.flags.writeable for found in results for array in found.values())


def test_an_empty_state_passes_too(run: Run) -> None:
    assert run(lambda own: hand_over({} if own.rank == 1 else None, (1,), own)) == [{}] * RANKS


def test_each_holder_sends_an_equal_share(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x_BSC": np.arange(1001, dtype=np.uint8)}
    sent: dict[int, int] = {}

    class Counted:
        def __init__(self, inner: Communicator) -> None:
            self.rank, self.size, self.generation = inner.rank, inner.size, inner.generation
            self.all_to_all, self.all_reduce = inner.all_to_all, inner.all_reduce
            self.broadcast, self.abort, self._gather = inner.broadcast, inner.abort, inner.all_gather

        def all_gather(self, part: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
            sent[self.rank] = part.numel()
            return self._gather(part, shapes)

    run(lambda own: hand_over(state if own.rank in (1, 3) else None, (1, 3), Counted(own)))
    assert sent == {0: 0, 1: 501, 2: 0, 3: 500}


def test_holders_that_differ_in_shape_end_the_group(run: Run) -> None:
    def mine(communicator: Communicator) -> Arrays:
        state = {"x_BSC": np.zeros(3 + communicator.rank, np.float32)}
        return hand_over(state if communicator.rank < 2 else None, (0, 1), communicator)

    def described(communicator: Communicator) -> Arrays:
        try:
            return mine(communicator)
        except (ValueError, GroupBrokenError) as error:
            return {type(error).__name__: np.array(str(error))}

    words = run(described)
    assert [list(word) for word in words] == [
        ["GroupBrokenError"],
        ["ValueError"],
        *[["GroupBrokenError"]] * 2,
    ]
    assert re.match("rank 1 holds .* and rank 0", str(words[1]["ValueError"]))


@pytest.mark.parametrize(("holders", "gives"), [((), False), ((1,), True), ((0,), False)])
def test_a_rank_that_gives_what_it_should_not_is_named(
    run: Run, holders: tuple[int, ...], gives: bool
) -> None:
    def mine(communicator: Communicator) -> Arrays:
        with pytest.raises((ValueError, GroupBrokenError)):
            hand_over(
                {"x_BSC": np.zeros(1)} if gives and communicator.rank == 0 else None, holders, communicator
            )
        return {}

    run(mine)
