"""A small run in virtual time, shared by the parity tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.costs import CostModel
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.events import Command, Event
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.philox import named_generator
from spotlight_core.recipes import load_recipe
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.phases import SimPhases, run_in_virtual_time, simulate_iterations
from spotlight_core.types import GenerationRequest, IterationReport, PolicyVersion, RunState

COSTS = CostModel(
    denoise_step_fixed_seconds=0.003,
    denoise_step_per_row_seconds=0.0005,
    launch_seconds=0.001,
    load_seconds=0.02,
    score_seconds_per_image=0.004,
    train_seconds=1.0,
    boot_seconds=0.5,
)
PREEMPTIONS = (
    ProgressPoint(iteration=1, phase="rollout", node="spot-0", event="notice", nth_request=1, denoise_step=2),
    ProgressPoint(iteration=2, phase="rollout", node="spot-1", event="kill", nth_request=1, denoise_step=3),
    ProgressPoint(iteration=2, phase="rollout", node="spot-0", event="return"),
    ProgressPoint(iteration=3, phase="explore", node="spot-0", event="notice", nth_request=1, denoise_step=1),
)


def small_recipe(*overrides: str) -> RunConfig:
    return load_recipe(
        "quickstart",
        [
            "iterations=4",
            "data.prompts_per_iteration=4",
            "data.seeds_per_prompt=2",
            "sampler.denoise_steps=5",
            "exploration.seeds_per_prompt=8",
            "exploration.effective_steps=4",
            "exploration.seeds_per_request=4",
            "exploration.audit_every=4",
            *overrides,
        ],
    )


def synthetic_rewards(request: GenerationRequest) -> list[float]:
    """A reward that depends on prompt and seed alone, so that exploration agrees with rollout."""
    occurrence = request.prompt.occurrence
    return [float(named_generator("reward", occurrence, seed).random()) for seed in request.seeds]


@dataclass
class VirtualRun:
    words: list[Event | Command] = field(default_factory=list)
    reports: list[IterationReport] = field(default_factory=list)
    scheduler: RequestScheduler | None = None


Rewards = Callable[[GenerationRequest], Any]


def virtual_run(
    config: RunConfig,
    executor: SimExecutor,
    rewards: Rewards = synthetic_rewards,
    costs: CostModel = COSTS,
) -> VirtualRun:
    run = VirtualRun()
    for index in range(config.fleet.reserved_nodes):
        executor.join(f"reserved-{index}", "reserved")
    for index in range(config.fleet.spot_nodes):
        executor.join(f"spot-{index}", "spot")
    prompts = read_prompts(config.data.prompts, "train")
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))
    state = RunState(
        iteration=0,
        policy=PolicyVersion(label="base", number=0, digest="base"),
        batch=planner.plain(0, 0),
        sampler_position=0,
    )
    phases = SimPhases(planner, executor, costs, rewards)
    run.scheduler = RequestScheduler(SchedulingRules(lease_seconds=60, max_attempts=5))
    run_in_virtual_time(
        simulate_iterations(phases, state, config.iterations, run.reports.append),
        run.scheduler,
        executor,
        run.words.append,
    )
    return run


@pytest.fixture
def preempted_run() -> VirtualRun:
    executor = SimExecutor(COSTS)
    executor.replay(PREEMPTIONS)
    return virtual_run(small_recipe(), executor)
