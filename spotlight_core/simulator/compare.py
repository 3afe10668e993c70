"""What two recorded runs would cost on nodes of their own, in simulated node-time.

A laptop's seconds say little about a fleet: all nodes share its cores.  So each run's recipe is
simulated with one measured cost model, and dollars are iterations x seconds x price:

    usd = iterations to target  x  simulated seconds per iteration  x  USD per second of the fleet

which splits the ratio of two runs into the contributions of its three factors, exactly.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.costs import CostModel
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import BadInputError
from spotlight_core.scheduling.order import build_order
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.phases import SimPhases, run_in_virtual_time, simulate_iterations
from spotlight_core.types import IterationReport, PolicyVersion, RunState

WARM_UP_ITERATIONS = 2  # the first explores nothing before it, and nodes still load weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCost:
    """Simulated node-time and dollars of a run up to its target."""

    run: str
    iterations: int
    seconds_per_iteration: float
    usd_per_hour: float

    @property
    def usd(self) -> float:
        return self.iterations * self.seconds_per_iteration * self.usd_per_hour / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``run`` against ``baseline``: dollars and how much of the ratio each factor brings."""

    run: SimulatedCost
    baseline: SimulatedCost

    @property
    def usd_ratio(self) -> float:
        return self.run.usd / self.baseline.usd

    @property
    def iterations_factor(self) -> float:
        return self.run.iterations / self.baseline.iterations

    @property
    def seconds_factor(self) -> float:
        return self.run.seconds_per_iteration / self.baseline.seconds_per_iteration

    @property
    def price_factor(self) -> float:
        return self.run.usd_per_hour / self.baseline.usd_per_hour


def iterations_to_target(records: list[dict[str, Any]], target: float) -> int | None:
    """Finished iterations at the first of two successive evaluations at or above ``target``."""
    scores = [
        (record["iteration"] + 1, record["evaluation"]["score"])
        for record in records
        if record.get("evaluation") is not None
    ]
    for (iteration, score), (_, following) in pairwise(scores):
        if score >= target and following >= target:
            return int(iteration)
    return None


def simulated_seconds_per_iteration(config: RunConfig, costs: CostModel, iterations: int = 8) -> float:
    """Mean virtual seconds of an iteration in the steady state, on the recipe's fleet, no preemptions."""
    fleet = config.fleet
    # One more than are timed: the last iteration explores nothing.
    config = config.model_copy(update={"iterations": WARM_UP_ITERATIONS + iterations + 1})
    executor = SimExecutor(costs, gpus_per_node=fleet.gpus_per_node)
    for index in range(fleet.reserved_nodes):
        executor.join(f"reserved-{index}", "reserved")
    for index in range(fleet.spot_nodes):
        executor.join(f"spot-{index}", "spot")
    prompts = read_prompts(config.data.prompts, "train")
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))
    phases = SimPhases(planner, executor, costs, lambda request: [0.5] * len(request.seeds))
    state = RunState(
        iteration=0,
        policy=PolicyVersion(label="base", number=0, digest="simulated-base"),
        batch=planner.plain(0, 0),
        sampler_position=0,
    )
    ends: list[float] = []

    def note(report: IterationReport) -> None:
        ends.append(executor.calendar.now)

    scheduler = RequestScheduler(SchedulingRules.of(fleet), build_order(fleet.order))
    run_in_virtual_time(
        simulate_iterations(phases, state, WARM_UP_ITERATIONS + iterations, note),
        scheduler,
        executor,
        lambda word: None,
    )
    return (ends[-1] - ends[WARM_UP_ITERATIONS - 1]) / iterations


def simulated_cost(
    run: str, config: RunConfig, records: list[dict[str, Any]], costs: CostModel
) -> SimulatedCost:
    """The run's dollars up to its target.

    Raises:
        BadInputError: the run never held its target for two successive evaluations, or from the start.
    """
    crossed = iterations_to_target(records, config.evaluation.target)
    if crossed is None:
        raise BadInputError(
            f"run {run} never held its target {config.evaluation.target:g} for two evaluations",
            "train it longer or lower evaluation.target",
        )
    if crossed == 0:
        raise BadInputError(
            f"the base model of run {run} holds the target {config.evaluation.target:g} already",
            "compare runs that have something to learn, or raise evaluation.target",
        )
    fleet, prices = config.fleet, config.prices
    return SimulatedCost(
        run=run,
        iterations=crossed,
        seconds_per_iteration=simulated_seconds_per_iteration(config, costs),
        usd_per_hour=fleet.gpus_per_node
        * (fleet.reserved_nodes * prices["reserved"] + fleet.spot_nodes * prices.get("spot", 0.0)),
    )
