"""What holds live, local and simulated together: the same decisions from the same code."""

import json

import numpy as np

from spotlight_core.diffusion.engine import DenoiseEngine
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from spotlight_core.events import Event, Start, encode
from spotlight_core.executor.local import LocalExecutor
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from tests.parity.conftest import COSTS, PREEMPTIONS, VirtualRun, small_recipe, virtual_run


def words(run: VirtualRun) -> list[dict[str, object]]:
    """The run's words without digests and refs, which name contents and not decisions."""
    return [
        {
            key: value
            for key, value in json.loads(encode(word)).items()
            if key not in ("digest", "ref", "state_digest")
        }
        for word in run.words
    ]


def decisions(run: VirtualRun) -> list[object]:
    return [report.decision for report in run.reports]


def test_the_simulation_is_deterministic(preempted_run: VirtualRun) -> None:
    executor = SimExecutor(COSTS)
    executor.replay(PREEMPTIONS)
    again = virtual_run(small_recipe(), executor)
    assert words(again) == words(preempted_run)


def test_preemptions_happen_and_change_no_decision(preempted_run: VirtualRun) -> None:
    assert preempted_run.scheduler is not None
    assert preempted_run.scheduler.counters.resumed == 2
    assert preempted_run.scheduler.counters.recomputed == 1
    undisturbed = virtual_run(small_recipe(), SimExecutor(COSTS))
    assert decisions(preempted_run) == decisions(undisturbed)
    assert len(decisions(undisturbed)) == 4


def test_an_event_log_replays_to_identical_commands(preempted_run: VirtualRun) -> None:
    scheduler = RequestScheduler(SchedulingRules(lease_seconds=60, max_attempts=5))
    replayed: list[object] = []
    for word in preempted_run.words:
        if isinstance(word, Event):
            replayed += [word, *scheduler.decide(word)]
    assert replayed == preempted_run.words


def test_local_and_simulated_runs_take_the_same_decisions_and_images_do_not_depend_on_preemption() -> None:
    config = small_recipe()
    engine = DenoiseEngine(TinyQwenImage.from_pretrained(), config.sampler, config.rng_seed)

    disturbed = LocalExecutor(engine, costs=COSTS)
    disturbed.replay(PREEMPTIONS)
    local = virtual_run(config, disturbed)

    simulated_executor = SimExecutor(COSTS)
    simulated_executor.replay(PREEMPTIONS)
    assert words(local) == words(virtual_run(config, simulated_executor))

    calm = LocalExecutor(engine, costs=COSTS)
    virtual_run(config, calm)
    assert calm.results.keys() == disturbed.results.keys()
    resumed = [w for w in local.words if isinstance(w, Start) and w.from_denoise_step > 0]
    assert len(resumed) == 2
    for request, arrays in calm.results.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, disturbed.results[request][name], err_msg=request)
