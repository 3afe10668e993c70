"""What each preemption did to the work in flight, told from the journal and the nodes' own logs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotlight_core import events as ev
from spotlight_core.events import NodeKey, Word
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.node_records import Strike
from spotlight_core.market.preemptions import Interrupted, Outcome, Preemption
from spotlight_core.market.prices import PriceBook


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRequest:
    """A request that was in flight.  ``denoise_step`` it had reached, None where nobody knows.

    Its work up to ``saved_denoise_step`` was safe.  ``exact``: the lost denoise steps are known, since
    none was lost or the node said how far it was; else they are estimated by pace.  It went on at
    ``resumed_at`` (seconds on the coordinator's clock) on ``resumed_on`` from ``from_denoise_step``.
    """

    request: str
    kind: str
    outcome: Outcome
    denoise_step: float | None
    saved_denoise_step: int
    denoise_steps_lost: float
    exact: bool
    lost_gpu_seconds: float
    lost_usd: float
    resumed_on: str | None
    resumed_at: float | None
    from_denoise_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPreemption:
    """One life of a node taken away.  ``source`` told, None where nobody did."""

    at: float
    iteration: int | None
    phase: str | None
    node: str
    incarnation: int
    pool: str
    cause: str
    source: str | None
    stopped_at: float | None
    requests: tuple[ExplainedRequest, ...]
    denoise_steps_lost: float
    exact: bool
    lost_gpu_seconds: float
    lost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Every preemption of a run; ``began`` is its first billed second, ``lives`` how many nodes it had."""

    began: float
    lives: int
    preemptions: tuple[ExplainedPreemption, ...]

    @property
    def denoise_steps_lost(self) -> float:
        return sum(one.denoise_steps_lost for one in self.preemptions)

    @property
    def exact(self) -> bool:
        return all(one.exact for one in self.preemptions)

    @property
    def lost_gpu_seconds(self) -> float:
        return sum(one.lost_gpu_seconds for one in self.preemptions)

    @property
    def lost_usd(self) -> float:
        return sum(one.lost_usd for one in self.preemptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """Where the run was when it learned of a preemption."""

    phase: ev.PhaseChanged | None
    source: str | None


def explain(words: Iterable[Word], prices: PriceBook, strikes: Mapping[str, Strike]) -> Explanation:
    """The preemptions of a journal's words, in order; ``strikes`` by lease, from ``read_strikes``.

    Raises:
        BadInputError: a node's pool has no price.
    """
    ledger = CostLedger(prices)
    lengths: dict[str, int] = {}
    scenes: dict[NodeKey, _Scene] = {}
    phase: ev.PhaseChanged | None = None
    for word in words:
        ledger.apply(word)
        match word:
            case ev.PhaseChanged():
                phase = word
            case ev.Start(request=request):
                lengths[request.id] = request.fidelity.denoise_steps
            case ev.Notice() if word.source != "fleet":
                scenes.setdefault((word.node, word.incarnation), _Scene(phase=phase, source=word.source))
            case ev.Lost():
                scenes.setdefault((word.node, word.incarnation), _Scene(phase=phase, source=None))
    case = _Case(prices=prices, strikes=strikes, scenes=scenes, ledger=ledger, lengths=lengths)
    pools = {(bill.node, bill.incarnation): bill.pool for bill in ledger.bills}
    return Explanation(
        began=min((bill.started_at for bill in ledger.bills), default=0.0),
        lives=len(ledger.bills),
        preemptions=tuple(
            case.preemption(one, pools[one.node, one.incarnation])
            for one in ledger.preemptions
            if (one.node, one.incarnation) in pools
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is known once the journal has been read."""

    prices: PriceBook
    strikes: Mapping[str, Strike]
    scenes: Mapping[NodeKey, _Scene]
    ledger: CostLedger
    lengths: Mapping[str, int]

    def preemption(self, one: Preemption, pool: str) -> ExplainedPreemption:
        usd_per_second = self.prices.usd_per_hour(pool) / 3600.0
        requests = tuple(self._request(item, one.at, usd_per_second) for item in one.in_flight)
        # Work that came to the node after its notice and died with it belongs to no request in flight then.
        other = one.denoise_steps_lost - sum(item.denoise_steps_lost for item in one.in_flight)
        scene = self.scenes[one.node, one.incarnation]
        return ExplainedPreemption(
            at=one.at,
            iteration=None if scene.phase is None else scene.phase.iteration,
            phase=None if scene.phase is None else scene.phase.phase,
            node=one.node,
            incarnation=one.incarnation,
            pool=pool,
            cause=one.cause,
            source=scene.source,
            stopped_at=one.stopped_at,
            requests=requests,
            denoise_steps_lost=sum(item.denoise_steps_lost for item in requests) + max(0.0, other),
            exact=all(item.exact for item in requests) and other <= 1e-9,
            lost_gpu_seconds=one.lost_gpu_seconds,
            lost_usd=one.lost_gpu_seconds * usd_per_second,
        )

    def _request(self, item: Interrupted, at: float, usd_per_second: float) -> ExplainedRequest:
        saved, strike = item.saved_denoise_step, self.strikes.get(item.lease)
        lost = 0.0
        if strike is not None:  # the node wrote it down, so no time of the ledger's has to tell
            lost = float(max(0, strike.denoise_step - saved))
        elif item.lost_gpu_seconds:
            lost = self._estimate(item)
        # Whatever ended by itself was at no step that anybody wrote down.
        known = item.outcome not in ("finished", "dropped")
        return ExplainedRequest(
            request=item.request,
            kind=item.kind,
            outcome=item.outcome,
            denoise_step=saved + lost if known else None,
            saved_denoise_step=saved,
            denoise_steps_lost=lost,
            exact=strike is not None or not item.lost_gpu_seconds,
            lost_gpu_seconds=item.lost_gpu_seconds,
            lost_usd=item.lost_gpu_seconds * usd_per_second,
            resumed_on=item.node if known else None,
            resumed_at=None if item.waited_seconds is None or not known else at + item.waited_seconds,
            from_denoise_step=item.from_denoise_step or 0,
        )

    def _estimate(self, item: Interrupted) -> float:
        """By the pace at the loss; at a run's beginning there was none yet, and the whole run's serves."""
        if item.denoise_steps_lost:
            return item.denoise_steps_lost
        left = self.lengths.get(item.request, 0) - item.saved_denoise_step
        return min(float(left), item.lost_gpu_seconds * self.ledger.denoise_steps_per_second(item.kind))
