"""GPUs that come and go by themselves under any schedule: nothing is lost, done twice, or left waiting."""

import random
from collections import Counter

import pytest

from spotlight_core.deciders import build_decider
from spotlight_core.elastic.layout import FixedDegree
from spotlight_core.events import (
    Committed,
    Event,
    RankNotice,
    RankReady,
    Regroup,
    Regrouped,
    Settle,
    Start,
    Word,
)
from spotlight_core.market.audit import audit
from spotlight_core.market.audit_promises import Evidence
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.phases import run_in_virtual_time
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from tests.parity.conftest import COSTS, small_recipe

STEPS, REQUESTS, SECONDS = 10, 40, 1.5
POLICIES = [PolicyVersion(label="old", number=number, digest=f"d{number}") for number in (1, 2)]


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        id=f"0/rollout/{number}/0",
        kind="rollout",
        prompts=(Prompt(occurrence=str(number), text='A sign "12"'),),
        seeds=(0, 1),
        policy=POLICIES[number % 7 == 0],
        fidelity=Fidelity(denoise_steps=STEPS, reused_steps=(3, 7)[: number % 3]),
    )


class Market:
    """Takes and gives back single GPUs, and whole nodes, at random moments."""

    def __init__(self, executor: SimExecutor, seed: int, gpus: int) -> None:
        self.executor, self.draws, self.gpus = executor, random.Random(seed), gpus
        self.away: set[int] = set()
        for _ in range(self.draws.randint(1, 12)):
            executor.call_at(self.draws.uniform(0.55, SECONDS), self.act)

    def act(self) -> None:
        rank = self.draws.randrange(self.gpus)
        match self.draws.choice(["notice", "died", "hung", "back", "back", "node", "restart"]):
            case "notice":
                left = self.draws.choice([0.001, 0.01, 5.0])
                self.executor.post(RankNotice(node="spot-0", incarnation=1, ranks=(rank,), seconds_left=left))
                self.away.add(rank)
                self.executor.call_at(self.executor.calendar.now + left, lambda: self.take(rank))
            case "died" | "hung" as cause:
                if rank not in self.away:
                    self.executor.lose_rank("spot-0", 1, rank, cause)
                    self.away.add(rank)
                    later = self.executor.calendar.now + self.draws.choice([0.001, 0.02, 0.3])
                    self.executor.call_at(later, lambda: self.back(rank))
            case "restart":
                for one in range(self.gpus):
                    if one not in self.away:
                        self.executor.lose_rank("spot-0", 1, one, "restarted")
                        self.away.add(one)
                        later = self.executor.calendar.now + self.draws.choice([0.02, 0.3])
                        self.executor.call_at(later, lambda one=one: self.back(one))
            case "back" if self.away:
                self.back(self.draws.choice(sorted(self.away)))
            case "node" if self.draws.random() < 0.3:
                self.executor._lose("spot-1", 1, "killed")

    def take(self, rank: int) -> None:
        if rank in self.away:
            self.executor.lose_rank("spot-0", 1, rank, "revoked")

    def back(self, rank: int) -> None:
        if rank in self.away:
            self.away.discard(rank)
            self.executor.post(RankReady(node="spot-0", incarnation=1, rank=rank))


def play(seed: int) -> list[Word]:
    draws = random.Random(seed)
    gpus, degree = draws.randint(1, 4), draws.choice([1, 2, 3, 4])
    layout = FixedDegree(degree, draws.choice([1, 1, min(2, degree, gpus)]))
    executor = SimExecutor(COSTS, commit_every_steps=draws.choice([0, 2, 4]), gpus_per_node=gpus)
    executor.join("spot-0", "spot")
    executor.join("spot-1", "spot")
    executor.join("reserved-0", "reserved")
    Market(executor, seed, gpus)
    words: list[Word] = []

    async def client() -> None:
        executor.change_phase("rollout", 0)
        submission = executor.submit([request(number) for number in range(REQUESTS)])
        for occasion in submission.occasions.values():
            await occasion

    rules = SchedulingRules(
        lease_seconds=20, max_attempts=30, max_node_failures=30, prefetch=draws.random() < 0.5
    )
    scheduler = RequestScheduler(rules, layout=layout)
    run_in_virtual_time(client(), scheduler, executor, words.append)
    return words


def check(words: list[Word]) -> None:
    settled = Counter(word.request for word in words if isinstance(word, Settle))
    assert len(settled) == REQUESTS
    assert set(settled.values()) == {1}
    assert {word.outcome for word in words if isinstance(word, Settle)} == {"done"}
    report = audit(words, Evidence(finished=False, commit_every_steps=0, lives=(), strikes={}))
    logged = [verdict for verdict in report.verdicts if "ledger" not in verdict.said]
    broken = [breach for verdict in logged for breach in verdict.breaches]
    assert not broken, broken[:3]


def test_no_request_is_lost_or_done_twice_whatever_ranks_do() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        words = play(seed)
        check(words)
        seen.update(type(word).__name__ for word in words)
        seen["held"] += sum(isinstance(word, Committed) and word.held for word in words)
        seen["pairs"] += sum(isinstance(word, Start) and word.group.degree > 1 for word in words)
    assert min(seen["held"], seen["pairs"], seen["Regroup"], seen["RankLost"]) > 100, seen


@pytest.mark.soak
def test_nor_over_thousands_of_schedules() -> None:
    for seed in range(1000, 8000):
        check(play(seed))


def test_a_recorded_log_of_groups_replays_to_identical_commands() -> None:
    config = small_recipe("fleet.gpus_per_node=2", "elastic.sp_degree=2")
    executor = SimExecutor(COSTS, commit_every_steps=2, gpus_per_node=2)
    for node, pool in (("reserved-0", "reserved"), ("spot-0", "spot")):
        executor.offer(node, pool)
    Market(executor, seed=5, gpus=2)
    words: list[Word] = []

    async def client() -> None:
        executor.change_phase("rollout", 0)
        for occasion in executor.submit([request(number) for number in range(10)]).occasions.values():
            await occasion

    run_in_virtual_time(client(), build_decider(config), executor, words.append)
    decider = build_decider(config)
    replayed: list[Word] = []
    for word in words:
        if isinstance(word, Event):
            replayed += [word, *decider.decide(word)]
    assert replayed == words
    assert any(isinstance(word, Regroup) for word in words)
    assert any(isinstance(word, Regrouped) for word in words)
