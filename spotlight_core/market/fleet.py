"""Which nodes to rent, and when to let on-demand ones go: a pure decider over the fleet's words.

    offer ──► Acquire ──► booting ──► joined ──► leaving ──► gone
      ▲          (at once, or after      │         (Notice, or our own Drain)
      │           back-off or storm)     └────────────────────► gone (killed, silent)
      └── remembered while it waits

Too few GPUs for ``on_demand_after_seconds`` rent on-demand nodes, which need no offer; enough spot and
reserved ones for as long let them go.  Nothing else waits for a decision made here: requests go to
whatever nodes there are.  Time is ``event.at``; a wait is a timer whose id begins with ``fleet/``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from spotlight_core.config.fleet import FleetConfig
from spotlight_core.events import (
    Acquire,
    BootFailed,
    Command,
    Drain,
    Event,
    Lost,
    NodeJoined,
    Notice,
    Offered,
    SetTimer,
    Timer,
    Withdrawn,
)
from spotlight_core.market.backoff import Backoff, BackoffRules, Storm, storm_size

TIMERS = "fleet/"
State = Literal["absent", "booting", "joined", "leaving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """What the planner goes by; see ``FleetConfig`` for the recipe's part of it."""

    spot_nodes: int
    gpus_per_node: int = 1
    min_rollout_gpus: int = 0
    on_demand_nodes: int = 0
    on_demand_after_seconds: float = 60.0
    grace_seconds: float = 30.0
    backoff: BackoffRules = field(default_factory=BackoffRules)

    @classmethod
    def of(cls, config: FleetConfig, *, speedup: float = 1.0) -> "FleetRules":
        """The rules of a recipe; ``speedup``: how fast the market's time passes in a sped-up trace.

        All that waits for the market is in its time: a wait that is not would outlast what it waits for.
        """
        return cls(
            spot_nodes=config.spot_nodes,
            gpus_per_node=config.gpus_per_node,
            min_rollout_gpus=config.min_rollout_gpus,
            on_demand_nodes=config.on_demand_nodes,
            on_demand_after_seconds=config.on_demand_after_seconds / speedup,
            grace_seconds=config.grace_seconds,
            backoff=BackoffRules().sped_up(speedup),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """What the planner knows: node names by state, and what it waits for (seconds of event time).

    ``waiting``: offered nodes, and when each may be rented.  ``gpus`` that have joined; ``short_since``:
    since when they are too few; ``enough_since``: since when spot and reserved ones alone suffice.  None
    where it is not so.
    """

    booting: tuple[str, ...]
    joined: tuple[str, ...]
    leaving: tuple[str, ...]
    waiting: dict[str, float]
    gpus: int
    wanted_gpus: int
    short_since: float | None
    enough_since: float | None
    storm_until: float


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    pool: str
    backoff: Backoff
    state: State = "absent"
    offered: bool = False
    incarnation: int = 0
    gpus: int = 0
    joined_at: float = 0.0
    told: bool = False  # somebody gave notice to this life, so its end is no fault of the node's

    @property
    def serves(self) -> bool:
        return self.state in ("booting", "joined")


@dataclass(slots=True)
class FleetPlanner:
    """Event in, commands out; see the module's text."""

    rules: FleetRules
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _storm: Storm = field(init=False)
    _short_since: float | None = None
    _enough_since: float | None = None
    _wake: tuple[float, str] = (math.inf, "")  # the earliest timer that is set
    _over: bool = False

    def __post_init__(self) -> None:
        self._storm = Storm(self.rules.backoff, storm_size(self.rules.spot_nodes))

    def decide(self, event: Event) -> list[Command]:
        """Take one event, return the commands it causes, in order."""
        handler = _HANDLERS.get(type(event))
        # Most events are not about nodes; a look at the whole fleet for each would be felt in a busy one.
        if handler is None or (isinstance(event, Timer) and not event.id.startswith(TIMERS)):
            return []
        handler(self, event)
        return [] if self._over else self._review(event)

    def snapshot(self) -> FleetSnapshot:
        """The planner's knowledge now, for displays and metrics."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.name)

        def named(state: State) -> tuple[str, ...]:
            return tuple(node.name for node in nodes if node.state == state)

        return FleetSnapshot(
            booting=named("booting"),
            joined=named("joined"),
            leaving=named("leaving"),
            waiting={
                node.name: self._not_before(node) for node in nodes if node.offered and node.state == "absent"
            },
            gpus=self._gpus("joined"),
            wanted_gpus=self.rules.min_rollout_gpus,
            short_since=self._short_since,
            enough_since=self._enough_since,
            storm_until=self._storm.until,
        )

    # -- what happens to nodes ------------------------------------------------------------------------

    def _node(self, name: str, pool: str) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            node = _Node(name=name, pool=pool, backoff=Backoff(self.rules.backoff))
            self._nodes[name] = node
        return node

    def _life(self, word: Notice | Lost) -> _Node | None:
        """The node if the word is about its present life; a late word of a former one changes nothing."""
        node = self._nodes.get(word.node)
        there = node is not None and node.state in ("joined", "leaving")
        return node if node is not None and there and node.incarnation == word.incarnation else None

    def _offered(self, event: Offered) -> None:
        node = self._node(event.node, event.pool)
        # A market may have the next machine while the former one is still in its grace.
        if not node.serves:
            node.pool, node.offered = event.pool, True

    def _withdrawn(self, event: Withdrawn) -> None:
        self._node(event.node, event.pool).offered = False

    def _joined(self, event: NodeJoined) -> None:
        node = self._node(event.node, event.pool)
        node.pool, node.state, node.offered, node.told = event.pool, "joined", False, False
        node.incarnation, node.gpus, node.joined_at = event.incarnation, event.gpus, event.at

    def _boot_failed(self, event: BootFailed) -> None:
        node = self._node(event.node, event.pool)
        if node.state == "booting":
            node.state = "absent"
            node.backoff.failed(event.at)

    def _noticed(self, event: Notice) -> None:
        node = self._life(event)
        if node is None:
            return
        node.state = "leaving"
        if not node.told and event.source != "fleet" and node.pool == "spot":
            self._storm.taken(event.at)
        node.told = True

    def _lost(self, event: Lost) -> None:
        if event.cause == "shutdown":
            self._over = True
        node = self._life(event)
        if node is None:
            return
        life = event.at - node.joined_at
        taken = event.cause in ("killed", "silent")
        if taken and not node.told and node.pool == "spot":
            self._storm.taken(event.at)
        if event.cause == "released" and not node.told:
            node.backoff.failed(event.at)  # let go for its failures
        else:
            node.backoff.ended(event.at, life, faulty=taken and not node.told)
        node.state, node.told = "absent", False

    def _woken(self, event: Timer) -> None:
        # One that an earlier wait has overtaken is not replaced when it fires, or timers would pile up.
        if event.id == self._wake[1]:
            self._wake = (math.inf, "")

    # -- decisions ------------------------------------------------------------------------------------

    def _review(self, event: Event) -> list[Command]:
        wakes: list[float] = []
        commands = self._take_up_offers(event.at, wakes)
        commands += self._rent_on_demand(event.at, wakes)
        commands += self._let_on_demand_go(event.at, wakes)
        earliest = min(wakes, default=math.inf)
        # A timer that is overdue is not trusted to come: without a next one a wait would have no end.
        if earliest < self._wake[0] or self._wake[0] <= event.at < earliest < math.inf:
            self._wake = (earliest, f"{TIMERS}{event.epoch}.{event.seq}")
            commands.append(SetTimer(id=self._wake[1], at=earliest))
        return commands

    def _not_before(self, node: _Node) -> float:
        storm = self._storm.until if node.pool == "spot" else 0.0
        return max(node.backoff.not_before, storm)

    def _acquire(self, node: _Node) -> Command:
        node.state, node.offered, node.gpus = "booting", False, self.rules.gpus_per_node
        return Acquire(node=node.name, pool=node.pool)

    def _take_up_offers(self, at: float, wakes: list[float]) -> list[Command]:
        commands: list[Command] = []
        for node in self._nodes.values():
            if not node.offered or node.state != "absent":
                continue
            if at >= self._not_before(node):
                commands.append(self._acquire(node))
            else:
                wakes.append(self._not_before(node))
        return commands

    def _gpus(self, state: State) -> int:
        return sum(node.gpus for node in self._nodes.values() if node.state == state)

    def _rent_on_demand(self, at: float, wakes: list[float]) -> list[Command]:
        # Those that boot are not rented twice, but they end no shortage: a boot may fail again and again.
        missing = self.rules.min_rollout_gpus - self._gpus("joined")
        if missing <= 0 or not self.rules.on_demand_nodes:
            self._short_since = None
            return []
        if self._short_since is None:
            self._short_since = at
        due = self._short_since + self.rules.on_demand_after_seconds
        if at < due:
            wakes.append(due)
            return []
        missing -= self._gpus("booting")
        commands: list[Command] = []
        for index in range(self.rules.on_demand_nodes):
            node = self._node(f"on-demand-{index}", "on_demand")
            if missing <= 0 or node.state != "absent":
                continue
            if at < self._not_before(node):
                wakes.append(self._not_before(node))
                continue
            commands.append(self._acquire(node))
            missing -= node.gpus
        return commands

    def _let_on_demand_go(self, at: float, wakes: list[float]) -> list[Command]:
        # Those that boot serve nobody yet, and may not come.
        there = [node for node in self._nodes.values() if node.state == "joined"]
        rented = [node for node in there if node.pool == "on_demand"]
        gpus = sum(node.gpus for node in there) - sum(node.gpus for node in rented)
        if not rented or gpus < self.rules.min_rollout_gpus:
            self._enough_since = None
            return []
        if self._enough_since is None:
            self._enough_since = at
        due = self._enough_since + self.rules.on_demand_after_seconds
        if at < due:
            wakes.append(due)
            return []
        commands: list[Command] = []
        for node in rented:
            node.state = "leaving"
            commands.append(Drain(node=node.name, incarnation=node.incarnation))
        return commands


_HANDLERS: dict[type[Event], Callable[[FleetPlanner, Any], None]] = cast(
    Any,
    {
        Offered: FleetPlanner._offered,
        Withdrawn: FleetPlanner._withdrawn,
        NodeJoined: FleetPlanner._joined,
        BootFailed: FleetPlanner._boot_failed,
        Notice: FleetPlanner._noticed,
        Lost: FleetPlanner._lost,
        Timer: FleetPlanner._woken,
    },
)
