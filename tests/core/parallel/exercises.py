"""Random collectives whose results every rank can work out by itself."""

import numpy as np
import torch

from spotlight_core.parallel.communicator import Communicator

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensor(
    seed: int, number: int, source: int, target: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """What ``source`` sends to ``target`` in a round."""
    rng = np.random.default_rng([seed, number, source, target])
    return torch.from_numpy(rng.normal(0, 50, shape)).to(dtype)


def _shape(rng: np.random.Generator, largest: int) -> tuple[int, ...]:
    return tuple(int(size) for size in rng.integers(0, largest, int(rng.integers(0, 4))))


def exercise(communicator: Communicator, seed: int, number: int) -> str:
    """One collective of a kind, dtype and shapes drawn from the round; what came out wrong, or nothing."""
    rng = np.random.default_rng([seed, number])
    size, rank = communicator.size, communicator.rank
    kind = ("all_to_all", "all_gather", "all_reduce", "broadcast")[int(rng.integers(4))]
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    # Now and then a message that no outbox has room for yet.
    largest = 160 if rng.random() < 0.02 else 9
    shapes = [[_shape(rng, largest) for _ in range(size)] for _ in range(size)]

    def sent(source: int, target: int, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor(seed, number, source, target, shape, dtype)

    if kind == "all_to_all":
        parts = [sent(rank, target, shapes[rank][target]) for target in range(size)]
        found = communicator.all_to_all(parts, [shapes[source][rank] for source in range(size)])
        expected = [sent(source, rank, shapes[source][rank]) for source in range(size)]
    elif kind == "all_gather":
        found = communicator.all_gather(sent(rank, 0, shapes[rank][0]), [row[0] for row in shapes])
        expected = [sent(source, 0, shapes[source][0]) for source in range(size)]
    elif kind == "all_reduce":
        shape = shapes[0][0]
        found = [communicator.all_reduce(sent(rank, 0, shape))]
        total = sent(0, 0, shape)
        for source in range(1, size):
            total += sent(source, 0, shape)
        expected = [total]
    else:
        source = int(rng.integers(size))
        found = [communicator.broadcast(sent(rank, 0, shapes[0][0]), source)]
        expected = [sent(source, 0, shapes[0][0])]
    agree = all(
        mine.dtype == other.dtype and mine.shape == other.shape and torch.equal(mine, other)
        for mine, other in zip(found, expected, strict=True)
    )
    return "" if agree else f"{kind} of {dtype} gave {found} instead of {expected}"
