"""What the executor knows of one node: its ranks, the groups that they form, and the leases under way."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from spotlight_core.events import NodeKey, SPGroup, Start
from spotlight_core.executor.messages import HeldState
from spotlight_core.executor.node_log import NodeLife

Cut = dict[Start, list["asyncio.Task[None]"]]


@dataclass(slots=True, kw_only=True)
class Place:
    """A rank and the process behind it, None while there is none."""

    rank: int
    actor: Any
    last_lease: str | None = None


@dataclass(slots=True, kw_only=True)
class Node:
    """A node, its ranks, and the groups that they form now.

    Of each lease under way: the last commit that was told (``told``), who reads the stream of each of its
    ranks (``readers``), and what each survivor holds of it since its group broke (``held``), which is told
    with the loss of a rank.
    """

    life: NodeLife
    scheduler: Any
    places: dict[int, Place]
    groups: dict[tuple[int, ...], SPGroup] = field(default_factory=dict)
    leases: dict[str, Start] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    readers: dict[str, dict[int, "asyncio.Task[None]"]] = field(default_factory=dict)
    held: dict[str, dict[int, HeldState]] = field(default_factory=dict)

    @property
    def key(self) -> NodeKey:
        return self.life.node, self.life.incarnation

    def members(self, group: SPGroup) -> list[Place]:
        """The places of a group's ranks, the leader's first; none when it is no more, or lacks a process."""
        places = [self.places[rank] for rank in group.ranks if rank in self.places]
        there = self.groups.get(group.ranks) == group and all(place.actor is not None for place in places)
        return places if there else []

    def regroup(self, generation: int, groups: Iterable[tuple[int, ...]]) -> None:
        """Form these groups; those of the same ranks stay what they are."""
        name, incarnation = self.key
        self.groups = {
            ranks: self.groups.get(ranks)
            or SPGroup(node=name, incarnation=incarnation, ranks=ranks, generation=generation)
            for ranks in groups
        }

    def held_by_survivors(self, start: Start) -> HeldState | None:
        """What the first survivor of a lease's group holds, who leads on; forgotten with this."""
        held = self.held.pop(start.lease, {})
        return next((held[rank] for rank in start.group.ranks if rank in held), None)

    def end(self, lease: str) -> None:
        """Nothing more comes of a lease."""
        self.leases.pop(lease, None)
        self.readers.pop(lease, None)

    def cut_by(self, rank: int) -> "Cut":
        """The leases that the end of a rank cuts off, and who reads the streams of their other ranks."""
        cut: Cut = {}
        for start in self.leases.values():
            if rank in start.group.ranks:
                readers = self.readers.get(start.lease, {})
                cut[start] = [reader for other, reader in readers.items() if other != rank]
        return cut
