"""What exploration may count on: spot GPUs beside training, and what its work takes, as the run saw it."""

from collections.abc import Callable

from spotlight_core.config import BanditConfig, RunConfig
from spotlight_core.exploration.capacity import NodeSpan, expected_gpus, gpus_at
from spotlight_core.exploration.planner import BanditPlanner, ExplorationPlanner, Supply
from spotlight_core.market.ledger import CostLedger
from tasks.accounts import LiveLedger

HISTORY_SECONDS = 6 * 3600.0  # a market's habits change over a day


class MeasuredSupply:
    """Asked once an iteration, before training; None before the first rollout and training."""

    def __init__(
        self,
        config: RunConfig,
        planner: ExplorationPlanner,
        ledger: LiveLedger,
        now: Callable[[], float],
        seconds_per_image: Callable[[], float | None],
    ) -> None:
        self._config = config
        self._planner = planner
        self._ledger = ledger
        self._now = now
        self._seconds_per_image = seconds_per_image

    def __call__(self) -> Supply | None:
        exploration, planner = self._config.exploration, self._planner
        if not isinstance(exploration, BanditConfig) or not isinstance(planner, BanditPlanner):
            return None
        seconds = planner.train_seconds
        if seconds is None:
            return None
        now = self._now()
        return self._ledger.read(lambda ledger: self._of(ledger, exploration, now, seconds))

    def _of(self, ledger: CostLedger, exploration: BanditConfig, now: float, window: float) -> Supply | None:
        pace = ledger.denoise_steps_per_second("rollout")
        if not pace:
            return None
        spans = [
            NodeSpan(start=bill.started_at, end=bill.stopped_at, gpus=bill.gpus)
            for bill in ledger.bills
            if bill.pool == "spot"
        ]
        if exploration.spot == "current":
            gpus = float(gpus_at(spans, now))
        else:
            gpus = expected_gpus(spans, now, window, exploration.spot_quantile, HISTORY_SECONDS)
        degree = self._config.elastic.sp_degree
        together = degree if isinstance(degree, int) else 1
        return Supply(
            spot_gpus=gpus,
            seconds_per_step=together / (pace * self._config.data.seeds_per_prompt),
            seconds_per_image=self._seconds_per_image() or 0.0,
        )
