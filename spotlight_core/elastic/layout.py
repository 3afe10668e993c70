"""Which ranks of a node denoise together: the policy that the request scheduler asks.

A layout is a node's ranks in SP groups, ordered tuples that share no rank.  A policy turns the ranks that
are there, and the groups that they form now, into the groups that they should form: groups that can stay
do, and in a group that changes the ranks that were in it come first, since they hold its latents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

Groups = tuple[tuple[int, ...], ...]


class NodeLayout(Protocol):
    """A policy for one node at a time; pure, so that a recorded run replays to the same groups."""

    def groups(self, ranks: Sequence[int], current: Groups) -> Groups:
        """The groups that ``ranks``, in this order of preference, should form.

        ``current`` are the groups of now, perhaps with ranks that are gone.  A rank that can be in no group
        of the fewest ranks that hold a request is left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedDegree:
    """Groups of ``degree`` ranks, and smaller ones, ``min_degree`` at least, of what is left over.

    No rank is left out that could work: five ranks at degree 4 and at least 2 are groups of 3 and 2.
    """

    degree: int
    min_degree: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_degree <= self.degree:
            raise ValueError(f"degree {self.degree} with at least {self.min_degree}")

    def groups(self, ranks: Sequence[int], current: Groups) -> Groups:
        return arranged(self.degrees(len(ranks)), ranks, current)

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Degrees of the groups of a node with this many ranks: the fewest groups that use most ranks."""
        most = max((self._usable(ranks, groups) for groups in range(ranks + 1)), default=0)
        count = next(groups for groups in range(ranks + 1) if self._usable(ranks, groups) == most)
        degrees = []
        for following in reversed(range(count)):
            degrees.append(min(self.degree, most - following * self.min_degree))
            most -= degrees[-1]
        return tuple(degrees)

    def _usable(self, ranks: int, groups: int) -> int:
        return min(ranks, groups * self.degree) if groups * self.min_degree <= ranks else 0


def arranged(degrees: Sequence[int], ranks: Sequence[int], current: Groups) -> Groups:
    """Groups of these degrees over ``ranks``, with as little change as there can be.

    Whole groups of a wanted degree stay; what is left of others is joined, the largest part first, and
    filled up with ranks that were in no group and then with those of the smallest parts.
    """
    there = set(ranks)
    whole = [group for group in current if there.issuperset(group)]
    wanted = sorted(degrees, reverse=True)
    kept: list[tuple[int, ...]] = []
    for group in reversed(whole):
        if len(group) in wanted:
            wanted.remove(len(group))
            kept.insert(0, group)
    taken = {rank for group in kept for rank in group}
    parts = [tuple(rank for rank in group if rank in there and rank not in taken) for group in current]
    parts = sorted((part for part in parts if part), key=len, reverse=True)
    grouped = {rank for part in parts for rank in part}
    new = [rank for rank in ranks if rank not in taken and rank not in grouped]
    formed = []
    for degree in wanted:
        members: tuple[int, ...] = ()
        while len(members) < degree:
            free = degree - len(members)
            if not members and parts:
                source = parts.pop(0)
            elif new:
                source, new = tuple(new[:free]), new[free:]
            else:
                source = parts.pop(next(i for i, part in enumerate(parts) if len(part) == len(parts[-1])))
            members += source[:free]
            if source[free:]:
                parts.append(source[free:])
                parts.sort(key=len, reverse=True)
        formed.append(members)
    return tuple(kept + formed)


def changed_groups(current: Groups, wanted: Groups) -> tuple[Groups, Groups]:
    """The groups that end, and those that are formed; a group that is in both layouts does neither."""
    stays = set(current) & set(wanted)
    return _without(current, stays), _without(wanted, stays)


def _without(groups: Iterable[tuple[int, ...]], stays: set[tuple[int, ...]]) -> Groups:
    return tuple(group for group in groups if group not in stays)
