"""A DenoiseActor in this process, on a Tensor Store that may be away or full."""

import threading
import time
from pathlib import Path

import torch

from spotlight_core.arrays import arrays_digest, payload_digest
from spotlight_core.config import DataConfig, FleetConfig, OdeConfig, RunConfig, TinyModelConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup, Start
from spotlight_core.executor.actors import DenoiseActor
from spotlight_core.executor.commits import StoreAway
from spotlight_core.executor.messages import CommittedState, Message, NodeSetup
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

STEPS = 8
REQUEST = GenerationRequest(
    id="1/rollout/p/0",
    kind="rollout",
    prompts=(Prompt(occurrence="p", text='A sign that reads "42"'),),
    seeds=(0, 3),
    policy=PolicyVersion(label="base", number=0, digest="unused"),
    fidelity=Fidelity(denoise_steps=STEPS, reused_steps=(3,)),
)


class MemoryStore:
    """Commits by ref.  ``trouble`` is raised instead of an answer; puts wait while ``open`` is not
    set, gets while ``readable`` is not."""

    def __init__(self) -> None:
        self.payloads: dict[str, bytes] = {}
        self.trouble: StoreAway | SpotlightError | None = None
        self.open = threading.Event()
        self.open.set()
        self.readable = threading.Event()
        self.readable.set()
        self.asked: list[int] = []

    def put(self, lease: str, request: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        self.asked.append(next_denoise_step)
        assert self.open.wait(20)
        if self.trouble is not None:
            raise self.trouble
        ref = f"{request}@{next_denoise_step}"
        self.payloads[ref] = payload
        return ref, payload_digest(payload)

    def get(self, ref: str, digest: str) -> bytes:
        assert self.readable.wait(20)
        if self.trouble is not None:
            raise self.trouble
        if ref not in self.payloads:
            raise SpotlightError(f"no commit {ref}", "recompute it")
        return self.payloads[ref]


def save_weights(path: Path) -> Path:
    torch.manual_seed(0)
    TinyQwenImage(build_transformer()).save_weights(path)
    return path


def bare_digest(weights: Path) -> str:
    """What ``REQUEST`` gives without any actor."""
    engine = DenoiseEngine(
        build_model(TinyModelConfig(weights=weights), "rollout"), OdeConfig(denoise_steps=STEPS), 0
    )
    generated = engine.generate(REQUEST)
    assert isinstance(generated, Generated)
    return arrays_digest(generated.arrays)


def make_actor(
    folder: Path,
    weights: Path,
    points: tuple[ProgressPoint, ...] = (),
    commit_every: int = 0,
    store: MemoryStore | None = None,
    rank: int = 0,
) -> tuple[DenoiseActor, list[float]]:
    """The actor, and the times at which it would have killed its node."""
    config = RunConfig(
        name="test",
        iterations=1,
        model=TinyModelConfig(weights=weights),
        data=DataConfig(prompts=folder),
        sampler=OdeConfig(denoise_steps=STEPS),
        fleet=FleetConfig(commit_every_steps=commit_every),
    )
    setup = NodeSetup(
        node="spot-0",
        incarnation=1,
        pool="spot",
        gpus=1,
        epoch=1,
        config=config.model_dump_json(),
        weights=folder / "published",
        nodes=folder / "nodes",
        store="unused",
        points=points,
    )
    (folder / "nodes").mkdir(exist_ok=True)
    deaths: list[float] = []
    return DenoiseActor(setup, rank, store or MemoryStore(), die=lambda: deaths.append(time.time())), deaths


def start(lease: str, commit: CommittedState | None = None, request: GenerationRequest = REQUEST) -> Start:
    return Start(
        group=SPGroup(node="spot-0", incarnation=1),
        lease=lease,
        request=request,
        from_denoise_step=0 if commit is None else commit.next_denoise_step,
        state_ref=None if commit is None else commit.ref,
        state_digest=None if commit is None else commit.digest,
    )


def run(actor: DenoiseActor, lease: str, commit: CommittedState | None = None) -> list[Message]:
    return list(actor.generate(start(lease, commit)))


def point(event: str, denoise_step: int, seconds_left: float | None = None) -> ProgressPoint:
    return ProgressPoint(
        iteration=1,
        phase="rollout",
        node="spot-0",
        event=event,  # type: ignore[arg-type]
        nth_request=1,
        denoise_step=denoise_step,
        seconds_left=seconds_left,
    )
