"""What decides in a run: which nodes there are, and what each of them does next."""

from spotlight_core.config import RunConfig
from spotlight_core.drive import Together
from spotlight_core.elastic.build import build_layout
from spotlight_core.market.fleet import FleetPlanner, FleetRules
from spotlight_core.scheduling.order import build_order
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler


def build_decider(config: RunConfig, *, speedup: float = 1.0) -> Together:
    """The deciders of a run, live or simulated; the planner of nodes first, then who gives them work.

    ``speedup``: how fast the market's time passes when its trace is played faster than it happened.
    """
    fleet = config.fleet
    return Together(
        FleetPlanner(FleetRules.of(fleet, speedup=speedup)),
        RequestScheduler(
            SchedulingRules.of(fleet, sleep=config.elastic.sleep),
            build_order(fleet.order),
            build_layout(config),
        ),
    )
