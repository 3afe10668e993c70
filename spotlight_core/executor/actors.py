"""DenoiseActor: one per GPU of a node; it holds a policy, denoises one request at a time, and yields.

    generate ─► fetch the state ─► denoise thread ─► engine ─ boundary between two steps: yield? trace?
        ▲           (prefetched)         │                     commit? (the store answers in the background)
        └── messages: the stream that the executor reads ◄─────┘
    yield_lease, abandon: other threads of the same actor, so that they arrive in mid-request

The denoise thread goes from one request to the next: what comes before a request and after it is done
in the threads of their streams.

The class is plain: ``node_scheduler`` wraps it, tests run it in process.  torch is imported when an
actor is made, so that who only makes them need not hold it.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from queue import Empty
from typing import TYPE_CHECKING

import psutil

from spotlight_core.arrays import Arrays, SafetensorError, arrays_digest, from_bytes, to_bytes
from spotlight_core.config import RunConfig
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Start
from spotlight_core.executor.commits import CommitStore, Committer, LeaseCommits, StoreAway
from spotlight_core.executor.leases import Lease, Leases
from spotlight_core.executor.messages import (
    Began,
    Dropped,
    FinishedResult,
    Message,
    NodeSetup,
    Noticed,
)
from spotlight_core.executor.node_log import NodeLog, keep_warnings
from spotlight_core.executor.processes import NODE_VARIABLE
from spotlight_core.market.replay import ReplayWatcher, Strike
from spotlight_core.types import PolicyVersion

if TYPE_CHECKING:
    from spotlight_core.diffusion.engine import Generated, Paused

LOG = logging.getLogger(__name__)

SIGN_OF_LIFE_SECONDS = 10.0


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

    def __init__(
        self, setup: NodeSetup, rank: int, store: CommitStore, die: Callable[[], None] = kill_own_node
    ) -> None:
        keep_warnings(setup.warnings)
        self._node = setup.node, setup.incarnation
        self._log = NodeLog(folder=setup.nodes)
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
        self._store = store
        self._committer = Committer(store, config.fleet.commit_every_steps)
        # One rank follows the node's trace: what it strikes is the node.
        points = setup.points if rank == 0 else ()
        self._watcher = ReplayWatcher(points, config.fleet.grace_seconds)
        self._die = die
        self._leases = Leases()
        # One thread for all denoising: a request at a time, and always the same thread-local state.
        self._denoiser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")

    def ready(self) -> None:
        """Answering says that the model is built."""

    def until_stopped(self) -> None:
        """Never answers: who waits for it learns of the actor's death at once."""
        threading.Event().wait()

    def load(self, policy: PolicyVersion) -> str:
        """Run ``policy`` from now on; the digest is of the weights that are in the model after it.

        Raises:
            SpotlightError: the version's file is missing or damaged.
        """
        return self._denoiser.submit(self._load, policy).result()

    def generate(self, start: Start, after: str | None = None) -> Iterator[Message]:
        """Denoise a request from the start or from its commit; its messages as they come.

        It begins when the requests before it have ended; ``after`` names the lease that it comes
        behind, whose call may arrive later than this one.  The last message is a ``FinishedResult``,
        a ``Dropped``, an ``UnstoredState`` or a released ``CommittedState``; an abandoned lease ends
        without any.  Errors of the request are raised after the messages before them.
        """
        lease = self._leases.get(start.lease)
        if lease is None:
            return
        try:
            self._leases.wait_behind(after)
            yield from self._messages(start, lease)
        finally:
            self._leases.end(lease)

    def yield_lease(self, name: str) -> None:
        """Commit at the next boundary and let go.  A lease that has ended ignores it."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.give_up()

    def abandon(self, name: str) -> None:
        """Stop at the next boundary, or do not begin; nobody waits for the work."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.abandon()

    # -- on the thread of a lease's stream ------------------------------------------------------------

    def _messages(self, start: Start, lease: Lease) -> Iterator[Message]:
        commits = self._committer.of(start, lease)
        state: Future[Arrays | None] = Future()
        # In line before its state is there: the store may be away for longer than who is behind waits.
        work = self._denoiser.submit(self._denoise, start, lease, state, commits)
        lease.runs(work, state)
        self._leases.lined_up(lease)
        dropped = self._fetch(start, state)
        if dropped is not None:
            yield dropped
            return
        while (message := lease.messages.get()) is not None:
            yield message
        commits.settle()
        yield from _rest(lease)
        try:
            outcome = work.result()
        except CancelledError:  # abandoned while it was queued, or waited for its state
            return
        yield from self._outcome(lease, commits, outcome)

    def _fetch(self, start: Start, state: "Future[Arrays | None]") -> Dropped | None:
        """Give ``state`` what the request goes on from; cancelled, and what to tell, when there is none."""
        fetched: Arrays | None = None
        try:
            if not state.cancelled() and start.state_ref is not None:
                fetched = from_bytes(self._store.get(start.state_ref, start.state_digest or ""))
        except (SpotlightError, SafetensorError) as error:
            # Whatever the commit is worth, the request can begin anew.
            state.cancel()
            return Dropped(error=str(error), commit_lost=True)
        except StoreAway as error:
            state.cancel()
            return Dropped(error=f"the Tensor Store is away: {error}")
        except BaseException:  # the denoise thread must not wait for it
            state.cancel()
            raise
        with contextlib.suppress(InvalidStateError):  # abandoned meanwhile
            state.set_result(fetched)
        return None

    def _outcome(
        self, lease: Lease, commits: LeaseCommits, outcome: "Generated | Paused | None"
    ) -> Iterator[Message]:
        from spotlight_core.diffusion.engine import Paused

        if lease.abandoned or outcome is None:  # past its last boundary too: nobody would take the result
            return
        if isinstance(outcome, Paused):
            yield commits.last(outcome.next_denoise_step, outcome.state)
        else:
            yield FinishedResult(payload=to_bytes(outcome.arrays), digest=arrays_digest(outcome.arrays))

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

    def _denoise(
        self, start: Start, lease: Lease, fetched: "Future[Arrays | None]", commits: LeaseCommits
    ) -> "Generated | Paused | None":
        state = fetched.result()  # CancelledError when there is none
        if lease.abandoned:
            return None
        self._watcher.begin(start.request)
        said_at = time.monotonic()

        def boundary(denoise_step: int, make_state: Callable[[], Arrays]) -> bool:
            nonlocal said_at
            if time.monotonic() - said_at > SIGN_OF_LIFE_SECONDS:
                said_at = time.monotonic()
                lease.messages.put(Began())
            strike = self._watcher.at(denoise_step)
            if strike is not None and strike.event == "kill":
                # With what is under way at this boundary, and that may be a commit.
                commits.offer(denoise_step, make_state)
            self._suffer(strike, start, denoise_step, lease)
            if lease.let_go:
                return True
            commits.offer(denoise_step, make_state)
            # An order may have come while the store kept this thread waiting.
            return lease.let_go

        lease.messages.put(Began())
        # No boundary comes before the first step: what strikes there finds nothing to commit.
        self._suffer(self._watcher.at(0), start, 0, lease, hold=False)
        return self._engine.generate(
            start.request, from_denoise_step=start.from_denoise_step, state=state, boundary=boundary
        )

    def _suffer(
        self, strike: Strike | None, start: Start, denoise_step: int, lease: Lease, hold: bool = True
    ) -> None:
        """Let the replayed trace act before ``denoise_step``."""
        if strike is None:
            return
        if strike.event == "kill":
            self._log.strike(*self._node, time.time(), start.lease, start.request.id, denoise_step)
            self._die()
            raise SpotlightError("the replayed trace kills this node", "resume the request elsewhere")
        lease.messages.put(Noticed(seconds_left=strike.seconds_left))
        if hold:
            lease.wait(strike.seconds_left)


def _rest(lease: Lease) -> Iterator[Message]:
    """What a commit has said after the end of the denoising."""
    while True:
        try:
            message = lease.messages.get_nowait()
        except Empty:
            return
        if message is not None:
            yield message
