"""Rank processes of a node for elastic groups: ``python -m tests.benchmarks.workers ROLE ...``.

A worker says ``ready`` once it has booted, then answers each line that it is told with one of its own.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

PAIR = (0, 1)


def request(name: str, denoise_steps: int = 2) -> GenerationRequest:
    """A small request of one row."""
    return GenerationRequest(
        id=name,
        kind="rollout",
        prompts=(Prompt(occurrence=name, text='A ticket that reads "42"'),),
        seeds=(0,),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=Fidelity(denoise_steps=denoise_steps),
    )


class Worker:
    """A worker's process, as its parent has it."""

    def __init__(self, role: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.workers", role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Say a line; its answer is for ``answer``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line of the worker."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return line.strip()

    def cpu_seconds(self) -> float:
        """What it has computed: where its wall time is much longer, it waited for a busy machine."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """Kill it, as a machine goes."""
        self._process.kill()
        self._process.wait()


def ask(workers: Sequence[Worker], line: str) -> None:
    """Tell all of them the same at once, and wait for their answers."""
    for worker in workers:
        worker.tell(line)
    for worker in workers:
        worker.answer()


# -- in the workers' processes ----------------------------------------------------------------------


def forward(meeting: Path, rank: int) -> Callable[[str], None]:
    """Boots as a rank; ``<generation>``: the first forwards of the pair."""
    import torch

    from spotlight_core.config import OdeConfig, TinyModelConfig
    from spotlight_core.diffusion.engine import DenoiseEngine
    from spotlight_core.diffusion.models import build_model
    from spotlight_core.parallel.rendezvous import NodeRendezvous

    torch.set_num_threads(1)
    engine = DenoiseEngine(build_model(TinyModelConfig(), "rollout"), OdeConfig(denoise_steps=2), 0)
    rendezvous = NodeRendezvous.join(meeting, rank)

    def run(line: str) -> None:
        engine.generate(request("bench"), communicator=rendezvous.communicator(PAIR, int(line)))

    return run


def holder(meeting: Path, slot: int, published: Path, version: str, shapes: str) -> Callable[[str], None]:
    """Boots with parameters of ``shapes`` (fp32, by name), for the weights of ``version``, in a slot.

    ``pull``: has the weights from the run's folder.  ``load``: from the node's copy, where there is one.
    ``take``: is rank 1 from now on.  ``<generation>``: a first collective of the pair.
    """
    import torch

    from spotlight_core.config import TinyModelConfig
    from spotlight_core.diffusion.models import build_model
    from spotlight_core.parallel.rendezvous import NodeRendezvous
    from spotlight_core.weights.copy import NodeWeights
    from spotlight_core.weights.store import WeightStore

    torch.set_num_threads(1)
    build_model(TinyModelConfig(), "rollout")
    policy = PolicyVersion(**json.loads(version))
    rendezvous = NodeRendezvous.join(meeting, slot)
    store = WeightStore(published)
    copies = NodeWeights(meeting / "weights", store)
    # What the version's weights go into is there since the boot, as a model's parameters are.
    parameters = {name: torch.zeros(shape) for name, shape in json.loads(shapes).items()}

    def fill(weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def run(line: str) -> None:
        match line:
            case "pull":
                fill(store.load(policy))
            case "load":
                fill(copies.load(policy))
            case "take":
                rendezvous.take(PAIR[1])
            case generation:
                rendezvous.communicator(PAIR, int(generation)).all_reduce(torch.zeros(1))

    return run


def main(arguments: Sequence[str]) -> None:
    """Boot, then do what each line says."""
    role, meeting, rank, *rest = arguments
    if role == "forward":
        run = forward(Path(meeting), int(rank))
    else:
        run = holder(Path(meeting), int(rank), Path(rest[0]), *rest[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        run(line.strip())
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
