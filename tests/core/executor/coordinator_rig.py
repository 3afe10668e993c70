"""A coordinator whose cloud is pretended: everything is real but the nodes, which answer at once.

Run as a module it is the coordinator's process with these parts.  Files in the run's folder make parts
of it fail: ``bad-parts``, ``bad-start``, ``dead-head``.
"""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from spotlight_core.arrays import to_bytes
from spotlight_core.child_process import python_path
from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.events import (
    Alarm,
    Cancelled,
    Command,
    Event,
    Finished,
    Lost,
    NodeJoined,
    PhaseChanged,
    Settle,
    SPGroup,
    Start,
    Submitted,
    Word,
)
from spotlight_core.executor.client import CoordinatorClient, find
from spotlight_core.executor.coordinator import Coordinator
from spotlight_core.executor.coordinator_process import main
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.parts import Parts
from spotlight_core.executor.processes import spawn
from spotlight_core.executor.results import Results
from spotlight_core.executor.submission import Submission
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

RIG = "tests.core.executor.coordinator_rig"
GROUP = SPGroup(node="reserved-0", incarnation=1)


def request(name: str, kind: Kind = "rollout", seeds: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        kind=kind,
        prompts=(Prompt(occurrence="p0", text='A sign "7"', metadata={"tag": "count", "include": [1]}),),
        seeds=seeds,
        policy=PolicyVersion(label="old", number=0, digest="d"),
        fidelity=Fidelity(denoise_steps=4, reused_steps=(1,), sde_steps=(0, 2)),
    )


class Straight:
    """Starts each request at once; exploration waits until it is cancelled; ``alarm`` raises one."""

    def __init__(self) -> None:
        self._leases = 0

    def decide(self, event: Event) -> list[Command]:
        match event:
            case Submitted():
                return [command for each in event.requests for command in self._begin(each, event.epoch)]
            case Finished():
                return [Settle(request=event.request, outcome="done", ref=event.ref)]
            case Cancelled():
                return [
                    Settle(request=name, outcome="cancelled", detail=event.reason) for name in event.requests
                ]
        return []

    def _begin(self, each: GenerationRequest, epoch: int) -> list[Command]:
        if each.kind == "explore":
            return []
        if each.id == "alarm":
            return [Alarm(detail="two results of alarm differ")]
        self._leases += 1
        return [Start(group=GROUP, lease=f"{epoch}.{self._leases}", request=each)]


class Nodes:
    """Executes a start by finishing it: the result holds the request's seeds."""

    def __init__(self, inbox: Inbox) -> None:
        self.results = Results()
        self._inbox = inbox

    def execute(self, command: Command) -> None:
        if isinstance(command, Start):
            name = command.request.id
            self.results.begin(name, name)
            self.results.put(name, name, to_bytes({"seeds": np.array(command.request.seeds, dtype=np.int64)}))
            self._inbox.post(Finished(lease=command.lease, request=name, ref=name, digest="d"))


class Fleet:
    """Two nodes; ``phases`` is what ``observe`` saw."""

    def __init__(self, folder: Path, inbox: Inbox) -> None:
        self._folder = folder
        self._inbox = inbox
        self.phases: list[tuple[str, int]] = []

    def start(self) -> None:
        if (self._folder / "bad-start").exists():
            raise BadInputError("services.ray_port = 1: the port is in use", "free it")
        for node, pool in (("reserved-0", "reserved"), ("spot-0", "spot")):
            self._inbox.post(NodeJoined(node=node, incarnation=1, pool=pool, gpus=1, started_at=0.0))

    def alive(self) -> bool:
        return not (self._folder / "dead-head").exists()

    def close(self) -> None:
        for node in ("reserved-0", "spot-0"):
            self._inbox.post(Lost(node=node, incarnation=1, cause="shutdown", stopped_at=1.0))

    def observe(self, word: Word) -> None:
        if isinstance(word, PhaseChanged):
            self.phases.append((word.phase, word.iteration))


def build(config: RunConfig, folder: Path, run_id: str, inbox: Inbox) -> Parts:
    if (folder / "bad-parts").exists():
        raise BadInputError("fleet.trace = 'x' is no trace", "name another")
    nodes, fleet = Nodes(inbox), Fleet(folder, inbox)

    def sizes() -> Mapping[str, float]:
        return {"results_bytes": nodes.results.bytes_held()}

    return Parts(
        decider=Straight(),
        nodes=nodes,
        fleet=fleet,
        results=nodes.results,
        observe=fleet.observe,
        sizes=sizes,
    )


# -- its process -----------------------------------------------------------------------------------


def submit(
    coordinator: Coordinator, requests: Sequence[GenerationRequest], deadline_seconds: float | None = None
) -> Submission:
    """Queue requests in this process; call it from the event loop that will read the results."""
    submission = Submission(requests, asyncio.get_running_loop())
    coordinator.queue(requests, submission, deadline_seconds)
    return submission


def run_folder(path: Path) -> Path:
    """A folder that a coordinator can be started in."""
    path.mkdir()
    recipe = RunConfig.model_validate({"name": "mini", "iterations": 3, "data": {"prompts": "prompts"}})
    (path / "recipe.json").write_text(recipe.model_dump_json())
    return path


def start(folder: Path, epoch: int, *options: str) -> "subprocess.Popen[bytes]":
    return spawn(
        [sys.executable, "-m", RIG, str(folder), "--epoch", str(epoch), *options],
        f"rig-{os.getpid()}",
        folder / "logs" / "coordinator.log",
        {"PYTHONPATH": python_path()},
    )


def connect(folder: Path, epoch: int, process: "subprocess.Popen[bytes]") -> CoordinatorClient:
    return CoordinatorClient(find(folder / "coordinator.json", epoch, process), process)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    code = main(build=build)
    logging.shutdown()
    os._exit(code)
