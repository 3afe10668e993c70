"""How much of an iteration waits for exploration: the paper's configuration in the simulator, and a live run.

Exposed: from the end of training to the next rollout, less publishing, minus the same without exploration.
The simulated one is the paper's OCR-1280: 4 reserved and 8 spot GPUs, 32 prompts × 16 seeds, 20 steps at
SP 2, 840 s of training; the bandit may choose what fits.  The live one trains for some seconds on one core
while one spot node explores on the other.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import psutil

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.costs import CostModel, StepCost
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.deciders import build_decider
from spotlight_core.events import PhaseChanged, Settle, Word
from spotlight_core.iteration import IterationReport
from spotlight_core.journal import read_words
from spotlight_core.philox import named_generator
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.phases import SimPhases, run_in_virtual_time, simulate_iterations
from spotlight_core.types import Decision, GenerationRequest, PolicyVersion, PromptRow, RunState
from tests.benchmarks import Measurement

ITERATIONS, SKIPPED = 12, 2  # the first trainings are not known yet, and the last iteration explores nothing
STEP_SECONDS = 0.8  # GPU-seconds of a row's step: 680 s of rollout on 12 GPUs, as in the paper
COSTS = CostModel(
    denoise_step_fixed_seconds=0.0,
    denoise_step_per_row_seconds=STEP_SECONDS,
    sharded=(StepCost(tokens=1, degree=2, fixed_seconds=0.0, per_row_seconds=STEP_SECONDS / 2),),
    launch_seconds=0.1,
    load_seconds=3.0,
    score_seconds_per_image=0.05,
    train_seconds=840.0,
    boot_seconds=45.0,
)
LIVE = (
    "iterations=6",
    "evaluation.every=100",
    "evaluation.images=16",
    "evaluation.final_images=16",
    "fleet.spot_nodes=1",
    "loss.timesteps_per_sample=10",
    "optimizer.timesteps_per_forward=1",
    "optimizer.samples_per_forward=4",
)
EXPLORING = ("exploration.seeds_per_prompt=16", "exploration.audit_every=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds between training and the next rollout, by iteration, and of whole iterations."""

    waits: Sequence[float]
    iterations: Sequence[float]


def waits_of(words: Iterable[Word]) -> Waits:
    """From the phases in a journal: publishing is no part of the wait."""
    waits, rollouts, trained = [], [], None
    for word in words:
        if not isinstance(word, PhaseChanged):
            continue
        if word.phase == "rollout":
            rollouts.append(word.at)
        elif word.phase == "remainder":
            trained = word.at
        elif word.phase == "publish" and trained is not None:
            waits.append(word.at - trained)
            trained = None
    whole = [later - earlier for earlier, later in pairwise(rollouts)]
    return Waits(waits=waits[SKIPPED:-1], iterations=whole[SKIPPED:])


# -- simulated ---------------------------------------------------------------------------------------


def paper(exploration: dict[str, object]) -> RunConfig:
    """OCR-1280."""
    return RunConfig.model_validate(
        {
            "name": "paper",
            "iterations": ITERATIONS,
            "decisions": "live",
            "data": {"prompts": ".", "prompts_per_iteration": 32, "seeds_per_prompt": 16},
            "sampler": {"type": "flow_sde", "denoise_steps": 20},
            "exploration": exploration,
            "elastic": {"sp_degree": 2},
            "fleet": {"reserved_nodes": 2, "spot_nodes": 4, "gpus_per_node": 2, "commit_every_steps": 4},
        }
    )


def simulated(config: RunConfig) -> tuple[Waits, list[Decision], dict[int, float]]:
    """Waits, decisions, and by iteration the share of its exploration that was finished."""
    executor = SimExecutor(
        COSTS,
        gpus_per_node=config.fleet.gpus_per_node,
        commit_every_steps=config.fleet.commit_every_steps,
    )
    for pool, count in (("reserved", config.fleet.reserved_nodes), ("spot", config.fleet.spot_nodes)):
        for index in range(count):
            executor.offer(f"{pool}-{index}", pool)
    prompts = [PromptRow(text=f'A sign that reads "{number}"') for number in range(500)]
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))

    def rewards(request: GenerationRequest) -> list[float]:
        draws = named_generator("reward", request.id)
        return [float(draws.uniform()) for _ in request.seeds]

    phases = SimPhases(planner, executor, COSTS, rewards)
    policy = PolicyVersion(label="base", number=0, digest="simulated-base")
    state = RunState(iteration=0, policy=policy, batch=planner.plain(0, 0), sampler_position=0)
    words: list[Word] = []
    decisions: list[Decision] = []

    def note(report: IterationReport) -> None:
        decisions.append(report.decision)

    run_in_virtual_time(
        simulate_iterations(phases, state, ITERATIONS, note), build_decider(config), executor, words.append
    )
    done = [word.request for word in words if isinstance(word, Settle) and word.outcome == "done"]
    finished: dict[int, float] = {}
    for decision in decisions:
        if decision.arm is not None:
            seeds = decision.arm[0] * (len(decision.selected) - config.exploration.unexplored_prompts)  # type: ignore[union-attr]
            ran = sum(name.startswith(f"{decision.iteration}/explore/") for name in done)
            finished[decision.iteration] = ran * config.exploration.seeds_per_request / seeds  # type: ignore[union-attr]
    return waits_of(words), decisions, finished


# -- live --------------------------------------------------------------------------------------------


def pin(run: Path, stop: threading.Event) -> None:
    """Keep the spot nodes' processes of a run on the second core, and all else on the first."""
    while not stop.wait(0.5):
        for process in psutil.process_iter():
            try:
                named = " ".join([*process.cmdline(), *process.environ().values()])
                if str(run) in named or "SPOTLIGHT" in " ".join(process.environ()):
                    spot = "spot-" in process.environ().get("SPOTLIGHT_NODE", "")
                    process.cpu_affinity([1 if spot else 0])
            except (psutil.Error, OSError):
                continue


def live(folder: Path, *overrides: str) -> Waits:
    """A real run of the quickstart, whose training takes a while."""
    options = [part for override in (*LIVE, *overrides) for part in ("--override", override)]
    command = [sys.executable, "-m", "flows.cli", "train", "quickstart", "--trace", "none"]
    stop = threading.Event()
    pinning = threading.Thread(target=pin, args=(folder, stop), daemon=True)
    pinning.start()
    try:
        subprocess.run([*command, "--runs", str(folder), *options], check=True, stdout=subprocess.DEVNULL)
    finally:
        stop.set()
        pinning.join()
    return waits_of(read_words(folder / "quickstart/journal.jsonl"))


def measure() -> Measurement:
    bandit = {"type": "ucb", "seeds_per_prompt": [24, 32], "effective_steps": [12, 16, 20]}
    exploring = bandit | {"unexplored_prompts": 4, "seeds_per_request": 2, "audit_every": 0}
    with_, decisions, finished = simulated(paper(exploring))
    without, _, _ = simulated(paper({"type": "none"}))
    exposed = fmean(with_.waits) - fmean(without.waits)
    arms = [decision.arm for decision in decisions if decision.arm is not None]
    completed = [share for iteration, share in finished.items() if iteration < ITERATIONS]
    details: dict[str, float | str] = {
        "simulated: iteration, s": fmean(with_.iterations),
        "simulated: exposed, s": exposed,
        "simulated: arms (seeds, effective steps) of 16 trained seeds": str(sorted(set(arms))),
        "simulated: share of the plan completed": min(completed),
    }
    if os.cpu_count() and (os.cpu_count() or 1) > 1:
        with tempfile.TemporaryDirectory() as name:
            explored = live(Path(name) / "a", *EXPLORING)
            plain = live(Path(name) / "b", "exploration.type=none")
        live_exposed = fmean(explored.waits) - fmean(plain.waits)
        details |= {
            "live: iteration, s": fmean(explored.iterations),
            "live: exposed, s": live_exposed,
            "live: exposed share of the iteration": live_exposed / fmean(explored.iterations),
            "live: seeds explored of 8 trained": "16, all of them completed (planned decisions)",
        }
    return Measurement(value=exposed / fmean(with_.iterations), unit="of an iteration", details=details)
