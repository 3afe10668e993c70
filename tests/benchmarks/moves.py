"""How long work takes to go on: on another node after a notice or a kill, or in a restarted process.

A reserved and a spot node; the one that does not denoise is idle and holds the same weights, so that
what is measured is the move and not a queue.  Seconds by the coordinator's clock.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from spotlight_core.events import Committed, Lost, NodeJoined, Notice, RankReady, SPGroup, Start, Started
from tests.core.executor.rig import Rig, live_rig, make_requests, wait_until

TRIALS = int(os.environ.get("SPOTLIGHT_TRIALS", "30"))
STEPS = 60
ROWS = 8
BOOT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds of the trials: until the work went on elsewhere, and until a process was restarted."""

    moved: list[float]
    restarted: list[float]

    def details(self, what: str) -> dict[str, float | str]:
        return {
            "trials": str(len(self.moved)),
            f"{what} to Started elsewhere, median ms": 1e3 * median(self.moved),
            f"{what} to Started elsewhere, p95 ms": 1e3 * p95(self.moved),
            "restart of the worker process, median s": median(self.restarted),
            "restart of the worker process, p95 s": p95(self.restarted),
            "p95 over p95": p95(self.restarted) / p95(self.moved),
        }

    @property
    def ratio(self) -> float:
        return median(self.restarted) / median(self.moved)


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


class StepClock:
    """Called inside a DenoiseActor: writes the wall-clock end of each denoise step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, actor: object) -> None:
        engine, advance = actor._engine, actor._engine._advance  # type: ignore[attr-defined]
        file = self.path.open("a", buffering=1)

        def timed(*arguments: object) -> None:
            advance(*arguments)
            file.write(f"{time.time()}\n")

        engine._advance = timed


@contextmanager
def moving_rig(run_id: str) -> Iterator[Rig]:
    with (
        tempfile.TemporaryDirectory() as folder,
        # A node that is killed so often on purpose is not to be let go for it.
        live_rig(
            Path(folder), run_id, steps=STEPS, patient=False, spot_nodes=1, max_node_failures=1000
        ) as rig,
    ):
        rig.begin_phase("rollout", 0)
        warm_up = make_requests(rig.policy, 0, 4, STEPS, ROWS)
        rig.run(warm_up)
        yield rig


def notice_trial(rig: Rig, trial: int) -> float:
    """Seconds from a notice to Started elsewhere, less the rest of the denoise step that was running."""
    steps = rig.folder / f"steps-{trial}"

    def take(start: Start) -> None:
        group = start.group
        rig.executor.give_notice(group.node, group.incarnation, 30.0, "bench")

    clock = StepClock(steps)
    moved = _trial(rig, trial, take, clock)
    told = rig.of_kind(Notice)[0].at
    ends = [float(line) for line in steps.read_text().splitlines()]
    rest = min((end - told for end in ends if end > told), default=0.0)
    return moved - told - rest


def kill_trial(rig: Rig, trial: int) -> float:
    """Seconds from the SIGKILL of a whole node to Started elsewhere."""
    killed_at = 0.0

    def take(start: Start) -> None:
        nonlocal killed_at
        killed_at = rig.inbox.clock.now()
        rig.cluster.kill_node(start.group.node, start.group.incarnation)

    return _trial(rig, trial, take) - killed_at


def restart_trial(rig: Rig) -> float:
    """Seconds from the SIGKILL of an idle DenoiseActor to its successor's readiness, before any load."""
    rig.words.clear()
    name, incarnation = rig.executor.nodes()[0]
    (process,) = rig.actors(f"{name}-{incarnation}", "DenoiseActor")
    killed_at = rig.inbox.clock.now()
    process.kill()
    ready: RankReady = rig.wait(RankReady, 1, BOOT_SECONDS)[0]
    return ready.at - killed_at


def _trial(rig: Rig, trial: int, take: Callable[[Start], None], clock: StepClock | None = None) -> float:
    """One request, whose node is taken at its second commit; when it was Started again."""
    both = rig.executor.nodes()
    if clock is not None:
        import ray

        groups = [SPGroup(node=node, incarnation=incarnation) for node, incarnation in both]
        ray.get([rig.actor(group).__ray_call__.remote(clock) for group in groups])
    # Both hold the weights: those of a node that came since are loaded by these.
    rig.run(make_requests(rig.policy, 2 * trial + 1, 4, STEPS, ROWS))
    rig.words.clear()

    def when_committed() -> None:
        assert wait_until(lambda: len(rig.of_kind(Committed)) >= 2, 60)
        threading.Thread(target=take, args=(rig.of_kind(Start)[0],)).start()

    rig.run(make_requests(rig.policy, 2 * trial + 2, 1, STEPS, ROWS), when_committed)
    _, again = rig.wait(Start, 2)[:2]
    (started,) = [word for word in rig.of_kind(Started) if word.lease == again.lease]
    rig.wait(Lost, 1)
    rig.wait(NodeJoined, 1, BOOT_SECONDS)
    assert wait_until(lambda: len(rig.executor.nodes()) == 2, 10)
    return float(started.at)
