"""Ranks are killed or stopped in the middle of a collective; a standby takes the place of each."""

import queue
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from spotlight_core.parallel.watchdog import Watchdog
from tests.core.parallel.ranks import Node, RankProcess, rounds, running_node, take, until_broken

RANKS, HUNG_SECONDS = (0, 1, 2, 3), 2.0
SPARES = range(4, 8)
_generations = count(1)


@dataclass
class Ward:
    """A node under watch, with a standby in a spare slot."""

    node: Node
    verdicts: "queue.Queue[tuple[int, str]]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._spare = 0
        self.standby = self._boot_standby()
        self.watchdog = Watchdog(self.node.rendezvous, HUNG_SECONDS, self._hung, self._died)
        self.watchdog.start()

    def _boot_standby(self) -> RankProcess:
        self._spare += 1
        return self.node.boot(SPARES[self._spare % len(SPARES)])

    def _hung(self, rank: int) -> None:
        self.node.ranks[rank].signal(signal.SIGKILL)
        self.verdicts.put((rank, "hung"))

    def _died(self, rank: int) -> None:
        self.verdicts.put((rank, "died"))

    def replace(self, rank: int) -> None:
        """The standby becomes the rank, and another one boots."""
        self.node.ranks[rank].end()
        self.standby.wait_until_joined()
        self.standby.ask(take, rank)
        self.standby.slot = rank
        self.node.ranks[rank], self.standby = self.standby, self._boot_standby()

    def close(self) -> None:
        """Stop watching before the processes are ended."""
        self.watchdog.stop()
        self.standby.end()


@pytest.fixture(scope="module")
def ward() -> Iterator[Ward]:
    with running_node(ranks=len(RANKS), slots=len(RANKS) + len(SPARES)) as node:
        ward = Ward(node)
        yield ward
        ward.close()


def strike(ward: Ward, kind: str, victim: int, verdict: str, delay: float) -> list[float]:
    """Take one rank away after ``delay`` seconds; returns when each survivor knew, in seconds after it."""
    generation = next(_generations)
    for rank in RANKS:
        ward.node.ranks[rank].begin(until_broken, kind, RANKS, generation, generation)
    time.sleep(delay)
    struck = time.monotonic()
    ward.node.ranks[victim].signal(signal.SIGKILL if verdict == "died" else signal.SIGSTOP)
    survivors = tuple(rank for rank in RANKS if rank != victim)
    words = [ward.node.ranks[rank].answer() for rank in survivors]
    assert [word.get("difference", "") for word in words] == [""] * len(words)
    assert {word["lost"] for word in words} == {(victim,)}
    assert ward.verdicts.get(timeout=10) == (victim, verdict)
    ward.replace(victim)
    regrouped = next(_generations)
    answers = ward.node.ask(survivors, rounds, kind, survivors, regrouped, regrouped, 3)
    assert answers == [""] * 3
    return [word["at"] - struck for word in words]


def trials(ward: Ward, number: int) -> dict[str, list[float]]:
    """Kills at random moments, every third one a stop; the slowest survivor's seconds, by verdict."""
    rng = random.Random(0)
    slowest: dict[str, list[float]] = {"died": [], "hung": []}
    for trial in range(number):
        verdict = "hung" if trial % 3 == 2 else "died"
        seconds = strike(ward, "shm", rng.choice(RANKS), verdict, rng.uniform(0.0, 0.15))
        slowest[verdict].append(max(seconds))
    return slowest


def tell(slowest: dict[str, list[float]], show: Callable[[str], None]) -> None:
    """Print what the survivors measured."""
    for verdict, seconds in slowest.items():
        show(f"{verdict}: noticed after {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s")


@pytest.mark.slow
def test_twenty_ranks_die_or_hang_and_their_groups_go_on(ward: Ward) -> None:
    slowest = trials(ward, 20)
    tell(slowest, print)
    # How soon is promised where the machine is ours (the soak); here only that it is no timeout.
    assert max(slowest["died"]) < 10
    assert min(slowest["hung"]) > HUNG_SECONDS / 2  # the last beat may be a while before the stop
    assert max(slowest["hung"]) < 20


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_ranks_die_or_hang_each_noticed_in_time(ward: Ward) -> None:
    slowest = trials(ward, 200)
    tell(slowest, print)
    assert max(slowest["died"]) < 1.0
    assert max(slowest["hung"]) < HUNG_SECONDS + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["died", "hung"])
def test_a_rank_that_is_lost_breaks_its_gloo_group(ward: Ward, verdict: str) -> None:
    seconds = strike(ward, "gloo", 1, verdict, 0.1)
    tell({verdict: seconds}, print)


def test_a_returned_rank_is_not_let_into_a_generation_of_its_predecessor(ward: Ward) -> None:
    generation = next(_generations)
    assert ward.node.ask(RANKS, rounds, "shm", RANKS, generation, 0, 3) == [""] * 4
    ward.node.ranks[2].signal(signal.SIGKILL)
    assert ward.verdicts.get(timeout=10) == (2, "died")
    ward.replace(2)
    for rank in RANKS:
        (word,) = ward.node.ask([rank], until_broken, "shm", RANKS, generation, 0)
        assert (word["rounds"], word["lost"]) == (0, () if rank == 2 else (2,))
    newer = next(_generations)
    assert ward.node.ask(RANKS, rounds, "shm", RANKS, newer, 0, 3) == [""] * 4
