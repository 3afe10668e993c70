"""DenoiseActor: one per node and GPU; it holds a policy, denoises one request at a time, and yields.

    generate ─► denoise thread ─► engine ─┬─ boundary between two steps: yield? abandon? trace? commit?
        ▲                                 └─ messages ─► the stream that the executor reads
    yield_lease, abandon, stop: other threads of the same actor, so that they arrive in mid-request

The class is plain: ``executor.ray`` wraps it, tests run it in process.  torch is imported after the
start record is written, since a node is paid for from its first second.
"""

import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from spotlight_core.config import RunConfig
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Start
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.processes import NODE_VARIABLE
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.market.replay import ReplayWatcher
from spotlight_core.types import PolicyVersion

SIGN_OF_LIFE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSetup:
    """What an actor is made from.

    ``config`` is the resolved recipe as JSON; ``points`` its node's trace; ``gpu`` the one that it has
    here, None on a machine without; ``gpus`` what is paid for.
    """

    node: str
    incarnation: int
    pool: str
    gpus: int
    gpu: str | None = None
    config: str
    weights: Path
    nodes: Path
    points: tuple[ProgressPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """Denoising began, or still goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """The replayed trace takes the node back in ``seconds_left``."""

    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """State before ``next_denoise_step`` as safetensors bytes; ``released``: nothing follows."""

    next_denoise_step: int
    payload: bytes
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedResult:
    """The result as safetensors bytes, and the digest of the arrays that were in memory."""

    payload: bytes
    digest: str


Message = Began | Noticed | CommittedState | FinishedResult


class _Orders:
    """What other threads want of one lease."""

    def __init__(self) -> None:
        self.yielding = False
        self.abandoned = False
        self._changed = threading.Condition()

    def give(self, *, yielding: bool = False, abandoned: bool = False) -> None:
        with self._changed:
            self.yielding |= yielding
            self.abandoned |= abandoned
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until an order was given, ``seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.yielding or self.abandoned, timeout=seconds)


def kill_own_node() -> None:
    """SIGKILL this node's raylet, its other children and this process: no goodbye to anyone."""
    raylet = psutil.Process(os.getppid())
    if raylet.environ().get(NODE_VARIABLE) != os.environ.get(NODE_VARIABLE):
        os.kill(os.getpid(), signal.SIGKILL)  # the raylet is gone already: our parent is somebody else
    children = raylet.children(recursive=True)
    raylet.kill()
    for child in children:
        if child.pid != os.getpid():
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


class DenoiseActor:
    """See the module's text."""

    def __init__(self, setup: ActorSetup, die: Callable[[], None] = kill_own_node) -> None:
        self._log = NodeLog(folder=setup.nodes)
        self._life = NodeLife(
            node=setup.node,
            incarnation=setup.incarnation,
            pool=setup.pool,
            gpus=setup.gpus,
            started_at=time.time(),
            stopped_at=None,
        )
        self._log.start(setup.node, setup.incarnation, setup.pool, setup.gpus, self._life.started_at)
        config = RunConfig.model_validate_json(setup.config)

        import torch

        from spotlight_core.diffusion.engine import DenoiseEngine
        from spotlight_core.diffusion.models import build_model
        from spotlight_core.weights.store import WeightStore

        torch.set_num_threads(config.services.torch_threads)
        self._engine = DenoiseEngine(
            build_model(config.model, "rollout"),
            config.sampler,
            config.rng_seed,
            record_means=config.loss.type == "grpo_guard",
        )
        self._weights = WeightStore(setup.weights)
        self._commit_every = config.fleet.commit_every_steps
        self._watcher = ReplayWatcher(setup.points, config.fleet.grace_seconds)
        self._die = die
        self._orders: defaultdict[str, _Orders] = defaultdict(_Orders)
        self._present: str | None = None
        # One thread for all denoising: a request at a time, and always the same thread-local state.
        self._denoiser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")

    def started_at(self) -> float:
        """Wall-clock seconds of the start record; answering says that the node is ready."""
        return self._life.started_at

    def load(self, policy: PolicyVersion) -> str:
        """Run ``policy`` from now on; the digest is of the weights that are in the model after it.

        Raises:
            SpotlightError: the version's file is missing or damaged.
        """
        return self._denoiser.submit(self._load, policy).result()

    def generate(self, start: Start, state: bytes | None) -> Iterator[Message]:
        """Denoise a request from the start or from a committed ``state``; its messages as they come.

        The last is a ``FinishedResult`` or a released ``CommittedState``; an abandoned lease ends
        without either.  Errors of the request are raised after the messages before them.
        """
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        work = self._denoiser.submit(self._denoise, start, state, messages.put)
        work.add_done_callback(lambda _: messages.put(None))
        while (message := messages.get()) is not None:
            yield message
        work.result()

    def yield_lease(self, lease: str) -> None:
        """Commit at the next boundary and let go.  A lease that has ended ignores it."""
        self._orders[lease].give(yielding=True)

    def abandon(self, lease: str) -> None:
        """Stop at the next boundary; nobody waits for the work."""
        self._orders[lease].give(abandoned=True)

    def stop(self) -> float:
        """Abandon what runs, write the stop record, and return its wall-clock seconds."""
        if self._present is not None:
            self.abandon(self._present)
        return self._log.stop(self._life, time.time(), "node")

    # -- on the denoise thread ------------------------------------------------------------------------

    def _load(self, policy: PolicyVersion) -> str:
        import torch

        from spotlight_core.diffusion.policy import load_policy_weights, policy_weights
        from spotlight_core.weights.digest import weights_digest

        transformer = self._engine.model.transformer
        weights = self._weights.load(policy)
        load_policy_weights(transformer, weights)
        held = policy_weights(transformer)
        # In the precision of the rollout, which may have fewer bits than what was published.
        confirmed = {
            name: weights[name] if torch.equal(tensor.cpu(), weights[name].to(tensor.dtype)) else tensor
            for name, tensor in held.items()
        }
        return weights_digest(confirmed)

    def _denoise(self, start: Start, payload: bytes | None, emit: Callable[[Message], None]) -> None:
        from spotlight_core.arrays import Arrays, arrays_digest, from_bytes, to_bytes
        from spotlight_core.diffusion.engine import Paused

        orders, self._present = self._orders[start.lease], start.lease
        self._watcher.begin(start.request)

        said_at = time.monotonic()

        def boundary(denoise_step: int, make_state: Callable[[], Arrays]) -> bool:
            nonlocal said_at
            if time.monotonic() - said_at > SIGN_OF_LIFE_SECONDS:
                said_at = time.monotonic()
                emit(Began())
            self._strike(denoise_step, orders, emit)
            if orders.abandoned or orders.yielding:
                return True
            if self._commit_every and denoise_step % self._commit_every == 0:
                state = to_bytes(make_state())
                emit(CommittedState(next_denoise_step=denoise_step, payload=state, released=False))
            return False

        try:
            emit(Began())
            # No boundary comes before step 0: what strikes there finds nothing to commit.
            self._strike(0, orders, emit, hold=False)
            outcome = self._engine.generate(
                start.request,
                from_denoise_step=start.from_denoise_step,
                state=None if payload is None else from_bytes(payload),
                boundary=boundary,
            )
            if isinstance(outcome, Paused):
                if not orders.abandoned:
                    state = to_bytes(outcome.state)
                    step = outcome.next_denoise_step
                    emit(CommittedState(next_denoise_step=step, payload=state, released=True))
            else:
                emit(FinishedResult(payload=to_bytes(outcome.arrays), digest=arrays_digest(outcome.arrays)))
        finally:
            self._present = None
            self._orders.pop(start.lease, None)

    def _strike(
        self, denoise_step: int, orders: _Orders, emit: Callable[[Message], None], hold: bool = True
    ) -> None:
        """Let the replayed trace act before ``denoise_step``."""
        strike = self._watcher.at(denoise_step)
        if strike is None:
            return
        if strike.event == "kill":
            self._die()
            raise SpotlightError("the replayed trace kills this node", "resume the request elsewhere")
        emit(Noticed(seconds_left=strike.seconds_left))
        if hold:
            orders.wait(strike.seconds_left)
