"""One rank of a profile: ``python -m spotlight_core.profiling.rank FOLDER RANK``.

``FOLDER`` holds ``recipe.json``, the rendezvous and ``task.json``: which degrees and rows, how often.  All
ranks take part in the degrees above their number; the first one says what it measured, a JSON line each.
An error of our own is said by the rank that meets it.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from spotlight_core.arrays import Arrays
from spotlight_core.child_process import Answers, told
from spotlight_core.config import RunConfig
from spotlight_core.diffusion.engine import Broken, DenoiseEngine, Paused
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.policy import load_policy_weights, policy_weights
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup
from spotlight_core.parallel.communicator import Communicator
from spotlight_core.parallel.mesh import Mesh
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.reshard import hand_over
from spotlight_core.profiling.plan import ProfilePlan
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.copy import NodeWeights
from spotlight_core.weights.sleep import SleepingModules
from spotlight_core.weights.store import WeightStore

POLICY = PolicyVersion(label="old", number=0, digest="")


class Rank:
    """See the module's text."""

    def __init__(self, folder: Path, rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        self._plan = ProfilePlan.read(folder)
        self._config = RunConfig.model_validate_json((folder / "recipe.json").read_bytes())
        self._rank, self._say = rank, say
        self._copies = folder / "node" / "weights"  # in memory, and gone with the rendezvous
        torch.set_num_threads(self._config.services.torch_threads)
        began = time.perf_counter()
        self._model = build_model(self._config.model, "rollout")
        self._build_seconds = time.perf_counter() - began
        self._engine = DenoiseEngine(self._model, self._config.sampler, self._config.rng_seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._mesh = Mesh(NodeRendezvous.join(folder / "node", rank), self._config.elastic, device)
        self._generation = 0

    def ready(self) -> None:
        """The model is built."""
        self._say({"ready": self._rank, "build_seconds": self._build_seconds})

    def measure(self) -> None:
        """Everything this rank takes part in, in the order that all of them have."""
        for degree in self._plan.degrees:
            for rows in self._plan.rows:
                for _ in range(self._plan.repeats):
                    self._generation += 1  # also of groups that this rank is not in: all have to agree
                    if self._rank < degree:
                        self._measure_steps(degree, rows)
        if self._rank < 2 <= max(self._plan.degrees):
            self._measure_changes()
        if self._rank == 0:
            for rows in self._plan.rows:
                for _ in range(self._plan.repeats):
                    self._measure_reused_steps(rows)
            self._measure_weights()
            self._measure_sleep()
            self._say({"tokens": self._model.latent_shape_SC[0]})

    def _measure_steps(self, degree: int, rows: int) -> None:
        """Denoise steps of one request, the first of which also builds what others find ready."""
        communicator = self._communicator(degree) if degree > 1 else None
        began, boundaries = self._denoise(self._request(rows), communicator)
        if self._rank == 0:
            steps = [later - earlier for earlier, later in pairwise(boundaries)]
            launch = max(0.0, boundaries[0] - began - min(steps))
            self._say({"degree": degree, "rows": rows, "steps": steps, "launch": launch})

    def _measure_reused_steps(self, rows: int) -> None:
        """Denoise steps that all reuse the velocity of the first one."""
        request = self._request(rows, reused_steps=tuple(range(1, self._plan.steps)))
        _, boundaries = self._denoise(request, None)
        self._say({"reused": [later - earlier for earlier, later in pairwise(boundaries)]})

    def _denoise(
        self, request: GenerationRequest, communicator: Communicator | None
    ) -> tuple[float, list[float]]:
        """When a request began, and its boundaries on the rank that leads."""
        boundaries: list[float] = []

        def boundary(denoise_step: int, make_state: Callable[[], Arrays]) -> bool:
            boundaries.append(time.perf_counter())
            return False

        began = time.perf_counter()
        outcome = self._engine.generate(request, boundary=boundary, communicator=communicator)
        if isinstance(outcome, Broken):
            raise outcome.error
        return began, boundaries

    def _measure_changes(self) -> None:
        """From one group to the next, and a request's state to a rank that joins."""
        outcome = self._engine.generate(
            self._request(self._plan.rows[0]), boundary=lambda step, state: step == 1
        )
        if not isinstance(outcome, Paused):
            raise TypeError("a request of two denoise steps let go at none")
        for _ in range(self._plan.repeats):
            self._generation += 1
            began = time.perf_counter()
            communicator = self._communicator(2)
            communicator.broadcast(torch.zeros(1), 0)
            regrouped = time.perf_counter()
            hand_over(outcome.state if self._rank == 0 else None, (0,), communicator)
            communicator.broadcast(torch.zeros(1), 0)
            if self._rank == 0:
                self._say({"regroup": regrouped - began, "reshard": time.perf_counter() - regrouped})

    def _measure_weights(self) -> None:
        """A policy version to the Weight Store and back into the model, and from the node's own copy."""
        transformer = self._model.transformer
        with tempfile.TemporaryDirectory() as folder:
            store = WeightStore(Path(folder))
            copies = NodeWeights(self._copies, store)
            for _ in range(self._plan.repeats):
                began = time.perf_counter()
                policy = store.publish("old", 0, policy_weights(transformer))
                published = time.perf_counter()
                load_policy_weights(transformer, store.load(policy))
                loaded = time.perf_counter()
                copies.load(policy)  # the first rank of a node pulls it and leaves a copy
                there = time.perf_counter()
                load_policy_weights(transformer, copies.load(policy))
                copied = time.perf_counter()
                self._say({"publish": published - began, "load": loaded - published, "copy": copied - there})

    def _measure_sleep(self) -> None:
        """The model's weights off the GPU, and back."""
        sleeping = SleepingModules(self._model.modules())
        for _ in range(self._plan.repeats):
            began = time.perf_counter()
            sleeping.sleep()
            asleep = time.perf_counter()
            sleeping.wake()
            self._say({"sleep": asleep - began, "wake": time.perf_counter() - asleep})

    def _communicator(self, degree: int) -> Communicator:
        ranks = tuple(range(degree))
        return self._mesh.communicator(
            SPGroup(node="profile", incarnation=1, ranks=ranks, generation=self._generation)
        )

    def _request(self, rows: int, reused_steps: tuple[int, ...] = ()) -> GenerationRequest:
        return GenerationRequest(
            id=f"profile/{rows}",
            kind="evaluate",
            prompts=(Prompt(occurrence="profile", text='A sign that says "42"'),),
            seeds=tuple(range(rows)),
            policy=POLICY,
            fidelity=Fidelity(denoise_steps=self._plan.steps, reused_steps=reused_steps),
        )


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    answers = Answers()
    try:
        one = Rank(folder, rank, answers.give)
        one.ready()
        answers.requests.readline()  # all ranks are there
        one.measure()
    except SpotlightError as error:
        answers.give(told(error))
        return
    answers.give({"done": rank})


if __name__ == "__main__":
    main()
