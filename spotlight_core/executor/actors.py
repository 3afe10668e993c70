"""DenoiseActor: one per GPU of a node; it holds a policy, denoises one request at a time, and yields.

Alone, or as a rank of an SP group, all of which get each of its leases: the first rank leads, and is told
and tells all there is; the others take part, and speak only when the group breaks.

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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from queue import Empty
from typing import TYPE_CHECKING

from spotlight_core.arrays import Arrays, SafetensorError, arrays_digest, from_bytes, to_bytes
from spotlight_core.config import RunConfig
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup, Start
from spotlight_core.executor.commits import CommitStore, Committer, LeaseCommits, StoreAway
from spotlight_core.executor.groups import HELD, HeldStates, Meeting
from spotlight_core.executor.leases import Lease, Leases
from spotlight_core.executor.messages import (
    Began,
    Dropped,
    FinishedResult,
    HeldState,
    Message,
    NodeSetup,
    Noticed,
)
from spotlight_core.executor.node_log import NodeLog, keep_warnings
from spotlight_core.executor.processes import kill_own_node, kill_own_process
from spotlight_core.market.replay import ReplayWatcher, Strike
from spotlight_core.parallel.communicator import Communicator, GroupBrokenError
from spotlight_core.types import PolicyVersion

if TYPE_CHECKING:
    from spotlight_core.diffusion.engine import Broken, Generated, Paused

LOG = logging.getLogger(__name__)

SIGN_OF_LIFE_SECONDS = 10.0


class DenoiseActor:
    """See the module's text."""

    def __init__(
        self,
        setup: NodeSetup,
        rank: int,
        store: CommitStore,
        die: Callable[[], None] = kill_own_node,
        end: Callable[[], None] = kill_own_process,
    ) -> None:
        keep_warnings(setup.warnings)
        self._node = setup.node, setup.incarnation
        self._log = NodeLog(folder=setup.nodes)
        config = RunConfig.model_validate_json(setup.config)

        import torch

        from spotlight_core.diffusion.engine import DenoiseEngine
        from spotlight_core.diffusion.models import build_model
        from spotlight_core.weights.copy import NodeWeights
        from spotlight_core.weights.sleep import SleepingModules
        from spotlight_core.weights.store import WeightStore

        torch.set_num_threads(config.services.torch_threads)
        self._engine = DenoiseEngine(
            build_model(config.model, "rollout"),
            config.sampler,
            config.rng_seed,
            record_means=config.loss.type == "grpo_guard",
        )
        self._sleeping = SleepingModules(self._engine.model.modules())
        store_of_weights = WeightStore(setup.weights)
        self._weights = (
            store_of_weights
            if setup.rendezvous is None
            else NodeWeights(setup.rendezvous / "weights", store_of_weights)
        )
        self._store = store
        self._committer = Committer(store, config.fleet.commit_every_steps)
        # One rank follows the node's trace: what it strikes is the node.
        points = setup.points if rank == 0 else ()
        self._watcher = ReplayWatcher(points, config.fleet.grace_seconds)
        self._die, self._end = die, end
        self._rank = rank
        self._meeting = None if setup.rendezvous is None else Meeting(setup.rendezvous, rank, config.elastic)
        self._held = HeldStates()
        self._leases = Leases()
        # One thread for all denoising: a request at a time, and always the same thread-local state.
        self._denoiser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")

    def ready(self) -> None:
        """Answering says that the model is built."""

    def become(self, rank: int) -> None:
        """Take the place of a rank whose process is gone: what a standby is there for."""
        if self._meeting is not None:
            self._meeting.become(rank)
        self._rank = rank

    def until_stopped(self) -> None:
        """Never answers: who waits for it learns of the actor's death at once."""
        threading.Event().wait()

    def load(self, policy: PolicyVersion) -> str:
        """Run ``policy`` from now on; the digest is of the weights that are in the model after it.

        Raises:
            SpotlightError: the version's file is missing or damaged.
        """
        return self._denoiser.submit(self._load, policy).result()

    def sleep(self) -> None:
        """Let the weights go until there is work, or a version to load; behind what runs now."""
        self._denoiser.submit(self._sleeping.sleep).result()

    def generate(self, start: Start, after: str | None = None) -> Iterator[Message]:
        """Denoise a request from the start or from its commit; its messages as they come.

        It begins when the requests before it have ended; ``after`` names the lease that it comes
        behind, whose call may arrive later than this one.  The last message is a ``FinishedResult``,
        a ``Dropped``, an ``UnstoredState``, a ``HeldState`` or a released ``CommittedState``; an abandoned
        lease ends without any, and so does one on a rank that does not lead.  Errors of the request are
        raised after the messages before them.
        """
        lease = self._leases.get(start.lease)
        if lease is None:
            return
        try:
            self._leases.wait_behind(after)
            yield from self._messages(start, lease)
        finally:
            self._leases.end(lease)

    def yield_lease(self, name: str, hold: bool = False) -> None:
        """Commit at the next boundary, or ``hold`` the state here, and let go.  A lease that has ended
        ignores it."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.give_up(hold)

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
        yield from self._outcome(start, lease, commits, outcome)

    def _fetch(self, start: Start, state: "Future[Arrays | None]") -> Dropped | None:
        """Give ``state`` what the request goes on from; cancelled, and what to tell, when there is none."""
        fetched: Arrays | None = None
        try:
            if state.cancelled() or start.state_ref is None or self._rank != start.group.ranks[0]:
                pass  # nothing to go on from, or the leader hands it over
            elif start.state_ref.startswith(HELD):
                fetched = self._held.take(start.state_ref, start.state_digest or "")
            else:
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
        self, start: Start, lease: Lease, commits: LeaseCommits, outcome: "Generated | Paused | Broken | None"
    ) -> Iterator[Message]:
        from spotlight_core.diffusion.engine import Broken, Paused

        if lease.abandoned or outcome is None:  # past its last boundary too: nobody would take the result
            return
        leads = self._rank == start.group.ranks[0]
        if isinstance(outcome, Broken):
            digest = "" if outcome.state is None else self._held.keep(start.lease, outcome.state)
            yield HeldState(next_denoise_step=outcome.next_denoise_step, digest=digest, broken=True)
        elif isinstance(outcome, Paused) and (lease.hold or not leads):
            digest = self._held.keep(start.lease, outcome.state)
            if leads:
                yield HeldState(next_denoise_step=outcome.next_denoise_step, digest=digest, broken=False)
        elif isinstance(outcome, Paused):
            yield commits.last(outcome.next_denoise_step, outcome.state)
        else:
            yield FinishedResult(payload=to_bytes(outcome.arrays), digest=arrays_digest(outcome.arrays))

    # -- on the denoise thread ------------------------------------------------------------------------

    def _load(self, policy: PolicyVersion) -> str:
        import torch

        from spotlight_core.diffusion.policy import load_policy_weights, policy_weights
        from spotlight_core.weights.digest import weights_digest

        self._sleeping.wake()
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
    ) -> "Generated | Paused | Broken | None":
        try:
            return self._denoise_with_group(start, lease, fetched, commits)
        except (SpotlightError, CancelledError):
            raise
        except Exception:
            if start.group.degree > 1:
                # The others cannot go on with this rank, and a new process can.
                LOG.exception("rank %d failed in mid denoise step", self._rank)
                self._end()
            raise

    def _denoise_with_group(
        self, start: Start, lease: Lease, fetched: "Future[Arrays | None]", commits: LeaseCommits
    ) -> "Generated | Paused | Broken | None":
        state = fetched.result()  # CancelledError when there is none
        if lease.abandoned:
            return None
        self._sleeping.wake()
        communicator = None
        if start.group.degree > 1:
            from spotlight_core.diffusion.engine import Broken

            try:
                communicator = self._communicator(start.group)
            except GroupBrokenError as error:
                return Broken(next_denoise_step=0, state=None, error=error)
        if self._rank != start.group.ranks[0]:
            return self._engine.generate(
                start.request, from_denoise_step=start.from_denoise_step, communicator=communicator
            )
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
            start.request,
            from_denoise_step=start.from_denoise_step,
            state=state,
            boundary=boundary,
            communicator=communicator,
        )

    def _communicator(self, group: SPGroup) -> "Communicator":
        if self._meeting is None:
            raise SpotlightError(
                f"{group.node} has no rendezvous, and its ranks {group.ranks} are to work together",
                "start the node with elastic.sp_degree above 1",
            )
        return self._meeting.communicator(group)

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
