"""SimExecutor: commands take effect in virtual time, under the very scheduler that runs live.

Progress inside a request is closed form: no event per denoise step.  What a request *computes* is
behind ``Work``: nothing in a simulation, real latents in the local executor.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from spotlight_core.costs import CostModel
from spotlight_core.errors import FleetError
from spotlight_core.events import (
    Abandon,
    Acquire,
    Alarm,
    Asleep,
    Cancelled,
    Command,
    Committed,
    Drain,
    Event,
    Failed,
    Finished,
    Load,
    Lost,
    NodeJoined,
    Notice,
    Offered,
    Phase,
    PhaseChanged,
    RankCause,
    RankLost,
    Regroup,
    Regrouped,
    Release,
    ReleaseRank,
    SetTimer,
    Settle,
    Sleep,
    SPGroup,
    Start,
    Started,
    Submitted,
    Timer,
    WeightsLoaded,
    Yield,
)
from spotlight_core.market.availability import ProgressMarket, Since
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.market.replay import ReplayWatcher, Strike
from spotlight_core.simulator.ranks import VirtualRanks
from spotlight_core.simulator.running import Running, Submission
from spotlight_core.simulator.virtual_time import Calendar
from spotlight_core.simulator.work import NoWork, Work
from spotlight_core.types import GenerationRequest


class SimExecutor:
    """Executor and client in one: virtual nodes, virtual clock, the same words as live."""

    def __init__(
        self,
        costs: CostModel,
        *,
        work: Work | None = None,
        commit_every_steps: int = 0,
        grace_seconds: float = 30.0,
        gpus_per_node: int = 1,
    ) -> None:
        self.calendar = Calendar()
        self._costs = costs
        self._work = work or NoWork()
        self._commit_every_steps = commit_every_steps
        self._grace_seconds = grace_seconds
        self._gpus_per_node = gpus_per_node
        self._running: dict[str, Running] = {}
        self._queued: dict[SPGroup, Running] = {}
        self._waiting: dict[str, Submission] = {}
        self._market = ProgressMarket(())
        self._offered: dict[str, str] = {}  # pool of each node that comes by offer
        self._since: dict[str, Since | None] = {}
        self._watchers: dict[tuple[str, int], ReplayWatcher] = {}
        self._incarnations: dict[str, int] = {}
        self._present: set[str] = set()
        self._ranks = VirtualRanks(gpus_per_node)
        self._seq = 0

    # -- the world ----------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """An event that happens now."""
        self.calendar.add(self.calendar.now, event)

    def call_at(self, at: float, action: Callable[[], None]) -> None:
        self.calendar.add(at, action)

    def join(self, node: str, pool: str, at: float = 0.0) -> None:
        """A node asks for its machine at ``at`` and joins after the boot."""
        self._join(node, pool, at, None)

    def offer(self, node: str, pool: str, at: float = 0.0) -> None:
        """The market has a machine for ``node`` from ``at`` on; it joins when it is acquired."""
        self._offered[node] = pool
        self.calendar.add(at, Offered(node=node, pool=pool))

    def _join(self, node: str, pool: str, at: float, since: Since | None) -> None:
        incarnation = self._incarnations.get(node, 0) + 1
        self._incarnations[node] = incarnation
        self._present.add(node)
        points = self._market.points_of(node, since)
        self._watchers[node, incarnation] = ReplayWatcher(points, self._grace_seconds)
        gpus = self._gpus_per_node
        joined = NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=gpus, started_at=at)
        self.calendar.add(at + self._costs.boot_seconds, joined)

    def lose_rank(self, node: str, incarnation: int, rank: int, cause: RankCause) -> None:
        """A rank's process is gone now; what its group has in flight is held by the ranks that are left."""
        leases = [
            running
            for running in self._running.values()
            if (running.start.group.node, running.start.group.incarnation) == (node, incarnation)
            and rank in running.start.group.ranks
        ]
        # What waits first: the end of the one before must not begin it on a broken group.
        for running in sorted(leases, key=lambda one: self._queued.get(one.start.group) is not one):
            step = running.last_boundary(self.calendar.now)
            is_queued = self._queued.get(running.start.group) is running
            if step and not is_queued and running.start.group.degree > 1:
                self._commit(running, step, released=True, held=True)
            else:
                self._drop(running.start.lease)
        self.post(RankLost(node=node, incarnation=incarnation, rank=rank, cause=cause))

    def replay(self, points: Sequence[ProgressPoint]) -> None:
        """Follow a progress-keyed availability trace; to be said before any node joins."""
        self._market = ProgressMarket(points)

    def events(self) -> Iterator[Event]:
        while (what := self.calendar.pop()) is not None:
            if not isinstance(what, Event):
                what()
                continue
            if isinstance(what, Lost):
                self._end_leases_of(what.node, what.incarnation)
            if isinstance(what, PhaseChanged):
                self._return_nodes(what)
            self._seq += 1
            yield what.stamped(self.calendar.now, self._seq, 0)

    @property
    def spot_gpus(self) -> int:
        """GPUs of the spot nodes that have asked for a machine and not lost it."""
        return self._gpus_per_node * sum(name.startswith("spot") for name in self._present)

    # -- the client's side --------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        submission = Submission(requests)
        self._waiting.update(dict.fromkeys(submission.occasions, submission))
        self.post(Submitted(requests=tuple(requests)))
        return submission

    def change_phase(self, phase: Phase, iteration: int) -> None:
        self.post(PhaseChanged(phase=phase, iteration=iteration))

    def cancel(self, requests: Sequence[str], reason: str) -> None:
        self.post(Cancelled(requests=tuple(requests), reason=reason))

    # -- commands -----------------------------------------------------------------------------------

    def execute(self, command: Command) -> None:
        match command:
            case Start():
                self._start(command)
            case Yield():
                self._yield(command)
            case Abandon():
                self._drop(command.lease)
                self.post(Failed(lease=command.lease, error="abandoned", fault="nobody"))
            case Load() | Acquire() | Drain() | Release() | Regroup() | ReleaseRank() | Sleep():
                self._care(command)
            case SetTimer():
                self.calendar.add(command.at, Timer(id=command.id))
            case Settle():
                submission = self._waiting.pop(command.request, None)
                if submission is not None:
                    submission.occasions[command.request].succeed(command.ref)
            case Alarm():
                raise FleetError(command.detail, "the simulation stops here")

    def _care(self, command: Load | Acquire | Drain | Release | Regroup | ReleaseRank | Sleep) -> None:
        """What concerns a node and not a request."""
        match command:
            case Load(group=group) if not self._ranks.is_formed(group):
                pass  # as live: word of why is on the way
            case Load(group=group, policy=policy):
                loaded = WeightsLoaded(group=group, policy=policy, digest=policy.digest)
                seconds = self._costs.load_seconds + self._wake(group)
                self.calendar.add(self.calendar.now + seconds, loaded)
            case Acquire():
                self._join(command.node, command.pool, self.calendar.now, self._since.get(command.node))
            case Drain(node=node, incarnation=incarnation):
                left = self._grace_seconds
                self.post(Notice(node=node, incarnation=incarnation, seconds_left=left, source="fleet"))
            case Release():
                self._lose(command.node, command.incarnation, "released")
            case Regroup(node=node, incarnation=incarnation, generation=generation, groups=groups):
                regrouped = Regrouped(
                    node=node, incarnation=incarnation, generation=generation, groups=groups
                )
                self._ranks.regroup(command)
                self.calendar.add(self.calendar.now + self._costs.regroup_seconds, regrouped)
            case ReleaseRank():
                self.lose_rank(command.node, command.incarnation, command.rank, "revoked")
            case Sleep(node=node, incarnation=incarnation):
                self._ranks.sleep((node, incarnation))
                asleep = Asleep(node=node, incarnation=incarnation)
                self.calendar.add(self.calendar.now + self._costs.sleep_seconds, asleep)

    def _wake(self, group: SPGroup) -> float:
        """Seconds until the group's ranks have their weights again."""
        return self._costs.wake_seconds if self._ranks.wake(group) else 0.0

    def _start(self, start: Start) -> None:
        running = Running(
            start=start,
            begun=0.0,
            step_seconds=self._costs.denoise_step_seconds(len(start.request.seeds), start.group.degree),
        )
        self._running[start.lease] = running
        if any(other.start.group == start.group and other is not running for other in self._running.values()):
            self._queued[start.group] = running
        else:
            # One that was handed over early begins at once: its launch is over by then.
            launched = self._costs.launch_seconds + self._wake(start.group)
            self._begin(running, self.calendar.now + launched)

    def _begin(self, running: Running, at: float) -> None:
        running.begun = at
        start = running.start
        steps = start.request.fidelity.denoise_steps
        running.entries.append(self.calendar.add(running.begun, Started(lease=start.lease)))
        if self._commit_every_steps:
            for step in range(start.from_denoise_step + 1, steps):
                if step % self._commit_every_steps == 0:
                    commit = partial(self._commit, running, step, released=False)
                    running.entries.append(self.calendar.add(running.at_step(step), commit))
        self._follow_trace(running)
        running.entries.append(self.calendar.add(running.at_step(steps), partial(self._finish, running)))

    def _finish(self, running: Running) -> None:
        start = running.start
        if self._running.pop(start.lease, None) is None:
            return
        ref, digest = self._work.finish(start)
        self.post(Finished(lease=start.lease, request=start.request.id, ref=ref, digest=digest))
        self._begin_queued(start.group)

    def _begin_queued(self, group: SPGroup) -> None:
        waiting = self._queued.pop(group, None)
        if waiting is not None:
            self._begin(waiting, self.calendar.now)

    def _commit(self, running: Running, denoise_step: int, *, released: bool, held: bool = False) -> None:
        start = running.start
        if start.lease not in self._running:
            return
        ref, digest = self._work.commit(start, denoise_step)
        self.post(
            Committed(
                lease=start.lease,
                request=start.request.id,
                next_denoise_step=denoise_step,
                ref=ref,
                digest=digest,
                released=released,
                held=held,
            )
        )
        if released:
            self._drop(start.lease)

    def _yield(self, command: Yield) -> None:
        running = self._running.get(command.lease)
        if running is None or self._queued.get(command.group) is running:
            return  # what waits for its turn has nothing to commit: it is abandoned
        steps = running.start.request.fidelity.denoise_steps
        for step in range(running.start.from_denoise_step + 1, steps):
            due = running.at_step(step)
            # A hair of tolerance: the boundary at which a notice arrived is the one to stop at.
            if due >= self.calendar.now - 1e-9:
                # A reused step takes no time: who lets go has passed it.
                while step + 1 < steps and running.at_step(step + 1) == due:
                    step += 1
                if due <= command.by:
                    commit = partial(self._commit, running, step, released=True, held=command.hold)
                    self.calendar.add(due, commit)
                return

    def _drop(self, lease: str) -> None:
        running = self._running.pop(lease, None)
        if running is None:
            return
        for entry in running.entries:
            self.calendar.remove(entry)
        if self._queued.get(running.start.group) is running:
            del self._queued[running.start.group]
        else:
            self._begin_queued(running.start.group)

    def _lose(self, node: str, incarnation: int, cause: str) -> None:
        self._present.discard(node)
        if node in self._offered and not self._market.away(node):
            self.calendar.add(self.calendar.now, lambda: self._offer_again(node))
        self.post(Lost(node=node, incarnation=incarnation, cause=cause, stopped_at=self.calendar.now))

    def _end_leases_of(self, node: str, incarnation: int) -> None:
        key = (node, incarnation)
        gone = [
            lease
            for lease, running in self._running.items()
            if (running.start.group.node, running.start.group.incarnation) == key
        ]
        for group in [group for group in self._queued if (group.node, group.incarnation) == key]:
            del self._queued[group]  # first, so that ending the one before does not begin it
        for lease in gone:
            self._drop(lease)

    # -- a progress-keyed trace ---------------------------------------------------------------------

    def _follow_trace(self, running: Running) -> None:
        """Arm the trace's point for this request, if there is one."""
        start = running.start
        if start.group.ranks[0] != 0:  # one rank follows the trace: what it strikes is the node
            return
        watcher = self._watchers[start.group.node, start.group.incarnation]
        watcher.begin(start.request)
        for step in (0, *range(start.from_denoise_step + 1, start.request.fidelity.denoise_steps)):
            strike = watcher.at(step)
            if strike is not None:
                act = partial(self._strike, strike, start.group)
                at = running.at_step(max(step, start.from_denoise_step))
                running.entries.append(self.calendar.add(at, act))
                return

    def _offer_again(self, node: str) -> None:
        self.post(Offered(node=node, pool=self._offered[node]))

    def _strike(self, strike: Strike, group: SPGroup) -> None:
        self._market.struck(group.node)
        if strike.event == "kill":
            self._lose(group.node, group.incarnation, "killed")
        else:
            left = strike.seconds_left
            self.post(Notice(node=group.node, incarnation=group.incarnation, seconds_left=left))

    def _return_nodes(self, event: PhaseChanged) -> None:
        since = self._market.since(event.phase, event.iteration)
        for node in self._market.returns(event.phase, event.iteration):
            if node in self._present:
                continue
            self._since[node] = since
            if node in self._offered:
                self._offer_again(node)
            else:
                self._join(node, "spot", self.calendar.now, since)
