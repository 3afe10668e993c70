"""One rank's place in one generation of a group: who else is in it, and whether it still stands."""

import os
import time
from collections.abc import Callable

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.parallel.processes import is_alive
from spotlight_core.parallel.table import (
    BOOTS,
    ENDED,
    GENERATION,
    LEFT,
    LEFT_LOST,
    LOST,
    PID,
    START,
    NodeTable,
)

SPINS = 100
PAUSE_SECONDS = 100e-6
PROCESS_CHECK_SECONDS = 0.03
MOURNING_SECONDS = 0.5  # a killed process closes its connections some moments before it is seen gone


class Membership:
    """What a communicator of any kind asks before and while it waits.

    A group of one has nobody to wait for and is broken by its own ``leave`` only: a rank alone keeps
    its generation when another process takes its place.
    """

    def __init__(self, table: NodeTable, rank: int, ranks: tuple[int, ...], generation: int) -> None:
        """``rank`` enters ``generation`` in the group ``ranks``.

        Raises:
            BadInputError: ranks that the node does not have, twice the same, or without this one.
            GroupBrokenError: a member is not there, or is in a newer generation or out of this one.
        """
        if rank not in ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(table.slots)):
            raise BadInputError(
                f"rank {rank} cannot be in the group {ranks} of a node with {table.slots} slots",
                "name each of the node's ranks at most once, and this one",
            )
        self.table, self.ranks, self.generation = table, ranks, generation
        self.rank = ranks.index(rank)
        self._words = table.words
        self._own = table.slot(rank)
        self._left = False
        self._looked_at = time.monotonic()
        self._slots = {member: table.slot(member) for member in ranks}
        self.others = tuple(slot for member, slot in self._slots.items() if member != rank)
        self._boots = {slot: self._words[slot + BOOTS] for slot in self._slots.values()}
        absent = tuple(member for member, slot in self._slots.items() if not self._words[slot + PID])
        if absent:
            raise GroupBrokenError(f"ranks {absent} of group {ranks} have not joined", absent)
        self.check()
        self._words[self._own + GENERATION] = max(generation, self._words[self._own + GENERATION])

    def check_ended(self) -> None:
        """Raise GroupBrokenError when the group was ended, left by a member, or has lost one."""
        if self._left:
            raise self._broken("was left by this rank")
        if len(self.ranks) == 1:
            return
        words, generation = self._words, self.generation
        for slot, boots in self._boots.items():
            if words[slot + BOOTS] != boots or words[slot + LOST] == boots:
                raise self._broken("has lost a member")
            if words[slot + ENDED] >= generation or words[slot + LEFT] >= generation:
                raise self._broken("was ended")

    def check(self) -> None:
        """``check_ended``, and that no member went on to a newer generation or died.

        Processes are looked at every ``PROCESS_CHECK_SECONDS``.
        """
        self.check_ended()
        if len(self.ranks) > 1 and self._is_outlived():
            raise self._broken("is older than the one a member is in")
        self._check_processes()

    def _is_outlived(self) -> bool:
        return any(self._words[slot + GENERATION] > self.generation for slot in self._slots.values())

    def _check_processes(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= PROCESS_CHECK_SECONDS and len(self.ranks) > 1:
            self._looked_at = now
            if self._dead():
                raise self._broken("has lost a member")
            if not self.table.owner_lives():
                raise self._broken("is on a node whose owner is gone")

    def wait(self, word: int, at_least: int) -> None:
        """Return when a word of the table has reached a value; raises as ``check`` does while it has not."""
        words = self._words
        if words[word] < at_least:
            self.wait_until(lambda: words[word] >= at_least)

    def wait_until(self, reached: Callable[[], bool], outlived_seconds: float = 0.0) -> None:
        """Return when ``reached()`` is true; raises as ``check`` does while it is not.

        ``outlived_seconds``: how long a member may be in a newer generation already, where what it sent
        before takes time to arrive.
        """
        turns, began = 0, time.monotonic()
        while not reached():
            self.check_ended()
            self._check_processes()
            if self._is_outlived() and time.monotonic() - began >= outlived_seconds:
                if reached():  # what the member did before it went on; now all of that is to be seen
                    return
                self.check()
            turns += 1
            if turns < SPINS:
                os.sched_yield()
            else:
                time.sleep(PAUSE_SECONDS)

    def is_out(self, slot: int) -> bool:
        """Whether the member of a slot is in this generation no more, or this rank has left it as broken."""
        words, boots = self._words, self._boots[slot]
        if self._left or words[slot + BOOTS] != boots or words[slot + LOST] == boots:
            return True
        if max(words[slot + ENDED], words[slot + LEFT]) >= self.generation:
            return True
        return not is_alive(words[slot + PID], words[slot + START])

    def leave(self, lost: tuple[int, ...] = ()) -> None:
        """Tell the others that this rank is in this generation no more; ``lost``: whom it took for gone."""
        self._left = True
        if len(self.ranks) > 1 and self._words[self._own + LEFT] < self.generation:
            self._words[self._own + LEFT_LOST] = sum(1 << member for member in lost)
            self._words[self._own + LEFT] = self.generation

    def mourn(self, error: Exception) -> GroupBrokenError:
        """What to raise when a connection broke: the group, with whoever is seen gone within moments."""
        until = time.monotonic() + MOURNING_SECONDS
        while time.monotonic() < until:
            try:
                self.check()
            except GroupBrokenError as broken:
                return broken
            time.sleep(PROCESS_CHECK_SECONDS / 2)
        return self._broken(f"lost a connection ({error})")

    def _dead(self) -> tuple[int, ...]:
        return tuple(member for member in self.ranks if not self.table.rank_lives(member))

    def _lost(self) -> tuple[int, ...]:
        """Everyone whom this rank, the owner or another member knows to be gone."""
        words, lost = self._words, set(self._dead())
        for member, slot in self._slots.items():
            if words[slot + BOOTS] != self._boots[slot] or words[slot + LOST] == self._boots[slot]:
                lost.add(member)
            elif words[slot + LEFT] == self.generation:
                # Of itself a rank knows better: they mean the process that was here before.
                others = set(self.ranks) - {self.ranks[self.rank]}
                lost.update(other for other in others if words[slot + LEFT_LOST] >> other & 1)
        return tuple(sorted(lost))

    def _broken(self, what: str) -> GroupBrokenError:
        lost = self._lost()
        self.leave(lost)
        return GroupBrokenError(f"group {self.ranks} of generation {self.generation} {what}", lost)
