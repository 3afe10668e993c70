"""Words of a journal as a ledger reads them, by hand."""

from spotlight_core import events as ev
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.prices import PriceBook
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

PRICES = PriceBook({"reserved": 10.08, "spot": 2.87})
POLICY = PolicyVersion(label="old", number=0, digest="d")


def request(name: str, kind: Kind = "rollout") -> GenerationRequest:
    prompt = Prompt(occurrence="0/0", text='"1"')
    fidelity = Fidelity(denoise_steps=10)
    return GenerationRequest(
        id=name, kind=kind, prompts=(prompt,), seeds=(1,), policy=POLICY, fidelity=fidelity
    )


def joined(node: str, at: float, pool: str = "spot", incarnation: int = 0, gpus: int = 1) -> ev.NodeJoined:
    return ev.NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=gpus, at=at, started_at=at)


def lost(node: str, at: float, cause: str = "killed", incarnation: int = 0) -> ev.Lost:
    return ev.Lost(node=node, incarnation=incarnation, cause=cause, at=at, stopped_at=at)


def boot_failed(
    node: str, started_at: float, stopped_at: float, incarnation: int = 0, gpus: int = 1
) -> ev.BootFailed:
    """A boot that failed and was billed all the same."""
    life = {"started_at": started_at, "stopped_at": stopped_at, "incarnation": incarnation, "gpus": gpus}
    return ev.BootFailed(node=node, pool="spot", error="x", at=stopped_at, **life)


def start(lease: str, work: GenerationRequest, node: str, step: int = 0, incarnation: int = 0) -> ev.Start:
    group = ev.SPGroup(node=node, incarnation=incarnation)
    return ev.Start(group=group, lease=lease, request=work, from_denoise_step=step)


def tick(at: float) -> ev.Timer:
    return ev.Timer(id="tick", at=at)


def finished(lease: str, at: float) -> ev.Finished:
    return ev.Finished(lease=lease, request="r", ref="ref", digest="d", at=at)


def committed(lease: str, at: float, step: int, released: bool) -> ev.Committed:
    return ev.Committed(
        lease=lease, request="r", next_denoise_step=step, ref="ref", digest="d", released=released, at=at
    )


def phase(name: ev.Phase, at: float, epoch: int = 0) -> ev.PhaseChanged:
    return ev.PhaseChanged(phase=name, iteration=0, at=at, epoch=epoch)


def told(ledger: CostLedger, now: float) -> list[tuple[str, str, float, float, str | None]]:
    return [(part.node, part.activity, part.start, part.end, part.request) for part in ledger.segments(now)]
