"""The state of a request passes from the ranks that hold it to all of a new group, through no store."""

import json
import math
from collections.abc import Iterator

import numpy as np
import torch

from spotlight_core.arrays import Arrays
from spotlight_core.parallel.communicator import Communicator


def shard_sizes(length: int, degree: int) -> tuple[int, ...]:
    """How ``length`` items are spread over ``degree`` ranks: evenly, the first ones take one more."""
    return tuple(length // degree + (rank < length % degree) for rank in range(degree))


def hand_over(state: Arrays | None, holders: tuple[int, ...], communicator: Communicator) -> Arrays:
    """The whole state on every rank of the group; collective.

    ``holders``: ranks within the group that hold equal copies, and give ``state``; the others give
    None.  Each holder sends an equal share of the bytes.  Holders get their own arrays back.

    Raises:
        ValueError: no holders, or a rank that holds a state and is not one or the reverse; holders
            whose arrays differ in name, dtype or shape.
        GroupBrokenError: the group broke.
    """
    try:
        return _hand_over(state, holders, communicator)
    except ValueError:
        communicator.abort()  # the others wait for this rank's part
        raise


def _hand_over(state: Arrays | None, holders: tuple[int, ...], communicator: Communicator) -> Arrays:
    if not holders or (state is not None) != (communicator.rank in holders):
        there = "a" if state is not None else "no"
        raise ValueError(f"rank {communicator.rank} has {there} state and the holders are {holders}")
    own = None if state is None else _layout(state)
    layout = _common_layout(own, holders[0], communicator)
    if own is not None and own != layout:
        raise ValueError(f"rank {communicator.rank} holds {own!r} and rank {holders[0]} {layout!r}")
    entries = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in json.loads(layout)]
    total = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in entries)
    shares = dict(zip(holders, shard_sizes(total, len(holders)), strict=True))
    part = np.empty(0, np.uint8)
    if state is not None:
        before = sum(shares[holder] for holder in holders[: holders.index(communicator.rank)])
        part = _slice(state, before, before + shares[communicator.rank])
    shapes = [(shares.get(rank, 0),) for rank in range(communicator.size)]
    parts = communicator.all_gather(torch.from_numpy(part), shapes)
    if state is not None:
        return state
    return dict(_arrays(np.concatenate([parts[holder].numpy() for holder in holders]), entries))


def _layout(state: Arrays) -> bytes:
    """Names, dtypes and shapes, in name order."""
    return json.dumps([(name, state[name].dtype.str, state[name].shape) for name in sorted(state)]).encode()


def _common_layout(own: bytes | None, source: int, communicator: Communicator) -> bytes:
    """What rank ``source`` says the state looks like: its length first, since the others cannot know it."""
    length = communicator.broadcast(torch.tensor([len(own or b"")]), source)
    text = own if communicator.rank == source else None
    given = np.frombuffer(text, np.uint8) if text is not None else np.zeros(int(length), np.uint8)
    return communicator.broadcast(torch.from_numpy(given.copy()), source).numpy().tobytes()


def _slice(state: Arrays, start: int, stop: int) -> np.ndarray:
    """Bytes ``start`` to ``stop`` of all arrays end to end, in name order."""
    pieces, place = [np.empty(0, np.uint8)], 0
    for name in sorted(state):
        array = state[name]
        if place < stop and place + array.nbytes > start:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            pieces.append(flat[max(0, start - place) : stop - place])
        place += array.nbytes
    return np.concatenate(pieces)


def _arrays(
    flat: np.ndarray, entries: list[tuple[str, np.dtype, tuple[int, ...]]]
) -> Iterator[tuple[str, np.ndarray]]:
    place = 0
    for name, dtype, shape in entries:
        size = dtype.itemsize * math.prod(shape)
        # A copy of its own is aligned for its dtype.
        yield name, flat[place : place + size].copy().view(dtype).reshape(shape)
        place += size
