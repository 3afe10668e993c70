"""The fleet's decisions: what is rented when, and never twice."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spotlight_core import events as ev
from spotlight_core.config import FleetConfig
from spotlight_core.market.fleet import FleetPlanner, FleetRules

RULES = FleetRules(spot_nodes=2)
FLOOR = FleetRules(spot_nodes=2, min_rollout_gpus=2, on_demand_nodes=2, on_demand_after_seconds=10.0)


def offered(node: str, at: float, pool: str = "spot") -> ev.Offered:
    return ev.Offered(node=node, pool=pool, at=at, seq=int(at * 1000))


def joined(node: str, at: float, pool: str = "spot", incarnation: int = 1, gpus: int = 1) -> ev.NodeJoined:
    return ev.NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=gpus, started_at=at, at=at)


def lost(node: str, at: float, cause: str = "killed", incarnation: int = 1) -> ev.Lost:
    return ev.Lost(node=node, incarnation=incarnation, cause=cause, stopped_at=at, at=at, seq=int(at * 1000))


def notice(node: str, at: float, source: str = "trace", incarnation: int = 1) -> ev.Notice:
    return ev.Notice(node=node, incarnation=incarnation, seconds_left=30.0, source=source, at=at)


def boot_failed(node: str, at: float, pool: str = "spot") -> ev.BootFailed:
    return ev.BootFailed(node=node, pool=pool, error="x", at=at, seq=int(at * 1000))


def told(planner: FleetPlanner, events: Iterable[ev.Event]) -> list[ev.Command]:
    return [command for event in events for command in planner.decide(event)]


def rented(commands: Iterable[ev.Command]) -> list[str]:
    return [command.node for command in commands if isinstance(command, ev.Acquire)]


def fires(commands: Iterable[ev.Command]) -> ev.Timer:
    """The one timer that was set, as it fires."""
    (timer,) = [command for command in commands if isinstance(command, ev.SetTimer)]
    return ev.Timer(id=timer.id, at=timer.at)


def test_an_offer_is_taken_up_at_once_and_only_once() -> None:
    planner = FleetPlanner(RULES)
    assert planner.decide(offered("spot-0", 0.0)) == [ev.Acquire(node="spot-0", pool="spot")]
    assert planner.decide(offered("spot-0", 0.5)) == []
    assert planner.decide(joined("spot-0", 1.0)) == []
    assert planner.decide(offered("spot-0", 2.0)) == []
    assert planner.snapshot().joined == ("spot-0",)


def test_the_next_machine_is_offered_while_the_former_one_is_in_its_grace() -> None:
    planner = FleetPlanner(RULES)
    told(planner, [offered("spot-0", 0.0), joined("spot-0", 1.0), notice("spot-0", 100.0)])
    assert planner.decide(offered("spot-0", 100.0)) == []
    assert planner.decide(lost("spot-0", 110.0, "released")) == [ev.Acquire(node="spot-0", pool="spot")]


def test_failed_boots_and_short_lives_double_the_wait_and_a_long_life_forgives() -> None:
    planner = FleetPlanner(RULES)
    planner.decide(offered("spot-0", 0.0))
    assert planner.decide(boot_failed("spot-0", 5.0)) == []  # whether it is still there, the market says
    commands = planner.decide(offered("spot-0", 5.0))
    assert fires(commands).at == 6.0
    assert planner.snapshot().waiting == {"spot-0": 6.0}
    assert rented(planner.decide(fires(commands))) == ["spot-0"]
    told(planner, [joined("spot-0", 7.0), lost("spot-0", 20.0)])
    assert fires(planner.decide(offered("spot-0", 20.5))).at == 22.0
    assert rented(planner.decide(ev.Timer(id="fleet/late", at=22.5))) == ["spot-0"]
    told(planner, [joined("spot-0", 23.0, incarnation=2), lost("spot-0", 400.0, incarnation=2)])
    assert rented(planner.decide(offered("spot-0", 400.0))) == ["spot-0"]


def test_the_wait_has_a_cap() -> None:
    planner = FleetPlanner(RULES)
    planner.decide(offered("spot-0", 0.0))
    at = 0.0
    for _ in range(12):
        timer = fires(told(planner, [boot_failed("spot-0", at), offered("spot-0", at)]))
        wait, at = timer.at - at, timer.at
        assert rented(planner.decide(timer)) == ["spot-0"]
    assert wait == 300.0


def test_a_boot_that_was_billed_is_one_failure() -> None:
    planner = FleetPlanner(RULES)
    planner.decide(offered("spot-0", 0.0))
    life = {"incarnation": 1, "gpus": 1, "started_at": 1.0, "stopped_at": 5.0}
    planner.decide(replace(boot_failed("spot-0", 5.0), **life))
    assert fires(planner.decide(offered("spot-0", 5.0))).at == 6.0


def test_an_offer_that_is_withdrawn_is_not_taken_up() -> None:
    planner = FleetPlanner(RULES)
    withdrawn = ev.Withdrawn(node="spot-0", pool="spot", at=5.5)
    told(planner, [offered("spot-0", 0.0), boot_failed("spot-0", 5.0)])
    timer = fires(planner.decide(offered("spot-0", 5.0)))
    assert planner.decide(withdrawn) == []
    assert planner.snapshot().waiting == {}
    assert planner.decide(timer) == []
    assert rented(planner.decide(offered("spot-0", 7.0))) == ["spot-0"]
    # So is the next machine's, while the former one is in its grace.
    told(planner, [joined("spot-0", 8.0), notice("spot-0", 400.0), offered("spot-0", 400.0), withdrawn])
    assert planner.decide(lost("spot-0", 410.0, "released")) == []


def test_on_demand_nodes_stand_in_for_a_spot_node_whose_boot_keeps_failing() -> None:
    planner = FleetPlanner(FleetRules(spot_nodes=1, min_rollout_gpus=1, on_demand_nodes=1))
    at, commands = 0.0, list[ev.Command]()
    while not rented(commands) or at < 60.0:
        commands = planner.decide(offered("spot-0", at))
        if not rented(commands):  # not before its back-off is over
            at = max(c.at for c in commands if isinstance(c, ev.SetTimer))
            commands = planner.decide(ev.Timer(id="fleet/due", at=at))
        assert rented(commands) == ["spot-0"]
        at += 10.0
        commands = planner.decide(boot_failed("spot-0", at))
    assert rented(commands) == ["on-demand-0"]
    # One that boots is not rented twice.
    assert at < 90.0
    assert planner.snapshot().gpus == 0
    assert rented(planner.decide(ev.Timer(id="fleet/due", at=at + 100.0))) == []
    # One that fails to boot has no second wait beside its back-off.
    assert rented(planner.decide(boot_failed("on-demand-0", at + 101.0, "on_demand"))) == []
    assert rented(planner.decide(ev.Timer(id="fleet/due", at=at + 102.0))) == ["on-demand-0"]


def test_a_node_let_go_for_its_failures_waits_and_one_that_was_told_does_not() -> None:
    planner = FleetPlanner(RULES)
    told(planner, [offered("spot-0", 0.0), joined("spot-0", 1.0), lost("spot-0", 90.0, "released")])
    assert rented(planner.decide(offered("spot-0", 90.0))) == []
    told(planner, [offered("spot-1", 0.0), joined("spot-1", 1.0), notice("spot-1", 2.0)])
    planner.decide(lost("spot-1", 3.0, "released"))
    assert rented(planner.decide(offered("spot-1", 3.0))) == ["spot-1"]


def test_new_spot_nodes_wait_out_a_storm_and_longer_while_it_goes_on() -> None:
    planner = FleetPlanner(FleetRules(spot_nodes=6))
    names = [f"spot-{index}" for index in range(6)]
    told(planner, [offered(name, 0.0) for name in names])
    told(planner, [joined(name, 1.0) for name in names])
    told(planner, [notice(name, 500.0) for name in names[:2]])
    told(planner, [lost(name, 505.0, "released") for name in names[:2]])
    assert planner.snapshot().storm_until == 0.0
    told(planner, [lost(names[2], 510.0)])
    assert planner.snapshot().storm_until == 540.0
    assert fires(planner.decide(offered(names[0], 511.0))).at == 540.0
    assert rented(planner.decide(offered("reserved-0", 512.0, "reserved"))) == ["reserved-0"]
    told(planner, [lost(name, 530.0) for name in names[3:]])
    assert planner.snapshot().storm_until == 590.0
    assert rented(planner.decide(ev.Timer(id="fleet/x", at=540.0))) == []
    assert rented(planner.decide(ev.Timer(id="fleet/y", at=590.0))) == [names[0]]


def test_on_demand_nodes_stand_in_for_spot_and_go_when_it_is_back() -> None:
    planner = FleetPlanner(FLOOR)
    told(planner, [offered("reserved-0", 0.0, "reserved"), joined("reserved-0", 1.0, "reserved")])
    commands = told(planner, [offered("spot-0", 2.0), joined("spot-0", 3.0), notice("spot-0", 50.0)])
    assert fires(commands[-1:]).at == 60.0
    assert planner.decide(fires(commands[-1:])) == [ev.Acquire(node="on-demand-0", pool="on_demand")]
    told(planner, [joined("on-demand-0", 65.0, "on_demand"), lost("spot-0", 70.0, "released")])
    told(planner, [offered("spot-0", 80.0)])
    commands = planner.decide(joined("spot-0", 90.0, incarnation=2))
    assert fires(commands).at == 100.0
    assert planner.decide(fires(commands)) == [ev.Drain(node="on-demand-0", incarnation=1)]
    assert planner.decide(notice("on-demand-0", 100.5, "fleet")) == []
    assert planner.decide(lost("on-demand-0", 101.0, "released")) == []


def test_as_many_on_demand_nodes_as_are_missing_and_no_more_than_allowed() -> None:
    planner = FleetPlanner(FleetRules(spot_nodes=0, min_rollout_gpus=5, on_demand_nodes=8, gpus_per_node=2))
    commands = told(planner, [offered("reserved-0", 0.0, "reserved")])
    assert rented(planner.decide(fires(commands[-1:]))) == ["on-demand-0", "on-demand-1"]
    few = FleetPlanner(FleetRules(spot_nodes=0, min_rollout_gpus=9, on_demand_nodes=2))
    commands = told(few, [offered("reserved-0", 0.0, "reserved")])
    assert rented(few.decide(fires(commands[-1:]))) == ["on-demand-0", "on-demand-1"]


def test_the_end_of_the_run_ends_all_planning() -> None:
    planner = FleetPlanner(FLOOR)
    told(planner, [offered("spot-0", 0.0), joined("spot-0", 1.0), lost("spot-0", 2.0, "shutdown")])
    assert planner.decide(offered("spot-0", 3.0)) == []
    assert planner.decide(ev.Timer(id="fleet/0.0", at=1e6)) == []


def test_rules_are_the_recipes_and_a_sped_up_market_forgets_as_fast() -> None:
    rules = FleetRules.of(FleetConfig(spot_nodes=7, min_rollout_gpus=3, on_demand_nodes=2), speedup=60.0)
    assert (rules.spot_nodes, rules.min_rollout_gpus, rules.on_demand_nodes) == (7, 3, 2)
    assert (rules.backoff.most_seconds, rules.backoff.storm_seconds) == (5.0, 0.5)
    assert rules.on_demand_after_seconds == 1.0


class World:
    """Boots what is acquired, loses what it likes, fires timers when they are due, and keeps the books."""

    def __init__(self, rules: FleetRules) -> None:
        self.rules = rules
        self.planner = FleetPlanner(rules)
        self.at, self.seq = 0.0, 0
        self.timers: list[tuple[float, str]] = []
        self.state: dict[str, str] = {}
        self.lives: dict[str, int] = {}
        self.offers: set[str] = set()

    def tell(self, event: ev.Event) -> None:
        self.seq += 1
        for command in self.planner.decide(event.stamped(self.at, self.seq, 1)):
            match command:
                case ev.SetTimer():
                    assert command.at > self.at
                    assert command.id.startswith("fleet/")
                    self.timers.append((command.at, command.id))
                case ev.Acquire():
                    self.acquire(command)
                case ev.Drain():
                    assert self.state[command.node] == "joined"
                    assert command.node.startswith("on-demand-")
                    self.state[command.node] = "leaving"
                case _:
                    raise AssertionError(command)

    def acquire(self, command: ev.Acquire) -> None:
        assert command.node not in self.state, "two lives of one node"
        self.state[command.node] = "booting"
        if command.pool == "spot":
            assert command.node in self.offers
            self.offers.discard(command.node)
        else:
            count = sum(name.startswith("on-demand-") for name in self.state)
            assert count <= self.rules.on_demand_nodes
            assert command.node in {f"on-demand-{index}" for index in range(self.rules.on_demand_nodes)}

    def pass_time(self, seconds: float) -> None:
        end = self.at + seconds
        while self.timers and min(self.timers)[0] <= end:
            self.timers.sort()
            self.at, name = self.timers.pop(0)
            self.tell(ev.Timer(id=name))
        self.at = end

    def act(self, what: str, node: str) -> None:
        state = self.state.get(node)
        pool = "on_demand" if node.startswith("on-demand") else "spot"
        life = {"node": node, "incarnation": self.lives.get(node, 0)}
        if what == "offer" and pool == "spot":
            self.offers |= {node} if state in (None, "leaving") else set()
            self.tell(ev.Offered(node=node, pool=pool))
        elif what == "boot" and state == "booting":
            self.lives[node] = self.lives.get(node, 0) + 1
            self.state[node] = "joined"
            joined = {"node": node, "incarnation": self.lives[node], "pool": pool}
            self.tell(ev.NodeJoined(**joined, gpus=self.rules.gpus_per_node, started_at=self.at))
        elif what == "fail" and state == "booting":
            del self.state[node]
            self.tell(ev.BootFailed(node=node, pool=pool, error="x"))
        elif what == "withdraw" and pool == "spot":
            self.offers.discard(node)
            self.tell(ev.Withdrawn(node=node, pool=pool))
        elif what == "notice" and state in ("joined", "leaving"):
            self.state[node] = "leaving"
            self.tell(ev.Notice(**life, seconds_left=5.0, source="aws"))
        elif what in ("killed", "silent", "released") and state in ("joined", "leaving"):
            del self.state[node]
            self.tell(ev.Lost(**life, cause=what, stopped_at=self.at))
        elif what == "late":
            self.tell(ev.Lost(node=node, incarnation=-1, cause="killed", stopped_at=self.at))

    @property
    def serving(self) -> int:
        return self.rules.gpus_per_node * sum(state != "leaving" for state in self.state.values())


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["offer", "withdraw", "boot", "fail", "notice", "killed", "silent", "released", "late", "wait"]
        ),
        st.sampled_from(["spot-0", "spot-1", "on-demand-0", "on-demand-1", "on-demand-2"]),
        st.floats(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=steps, floor=st.integers(0, 3), most=st.integers(0, 3), gpus=st.integers(1, 2))
def test_any_market(steps: list[tuple[str, str, float]], floor: int, most: int, gpus: int) -> None:
    world = World(
        FleetRules(
            spot_nodes=2,
            gpus_per_node=gpus,
            min_rollout_gpus=floor,
            on_demand_nodes=most,
            on_demand_after_seconds=10.0,
        )
    )
    for what, node, seconds in steps:
        world.pass_time(seconds)
        world.act(what, node)
    # Long enough for every back-off, with nothing else happening: the floor is held, or all is rented.
    world.tell(ev.Lost(node="nobody", incarnation=0, cause="killed", stopped_at=0.0))
    world.pass_time(700.0)
    leaving = sum(state == "leaving" and name.startswith("on-demand") for name, state in world.state.items())
    rented = sum(name.startswith("on-demand") for name in world.state)
    assert world.serving >= floor or rented == most
    assert leaving <= most
    # Every offer was taken up, unless the node is still there.
    assert all(node in world.state for node in world.offers)
