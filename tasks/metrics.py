"""What an iteration is measured by: names and arithmetic of the tracked metrics, in one place.

``explore/*`` describes the batch that this iteration trained on (explored one iteration earlier);
only ``explore/overlap_share`` is about the exploration that ran beside this iteration's training.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from spotlight_core.batches import Scores, audited_pairs
from spotlight_core.exploration.audit import spearman
from spotlight_core.market.billing import Segment
from spotlight_core.market.ledger import CostLedger
from spotlight_core.types import Batch, Evaluation, GenerationRequest, TrajectoryGroup


def exploration_metrics(
    batch: Batch,
    requests: Sequence[GenerationRequest],
    groups: Sequence[TrajectoryGroup],
    scores: Scores,
) -> dict[str, float]:
    """What selection brought: group std of selected and of plain seeds, rank correlation when audited.

    The std is the population's, as in the advantage.  ``explore/rank_correlation`` is absent without
    an audit and where one side is constant; ``explore/audits_skipped`` counts the latter.
    """
    explored = [planned for planned in batch.prompts if planned.explored]
    metrics = {"explore/seeds": _mean([len(planned.explored) for planned in explored]) or 0.0}
    for name, chosen in (("std_selected", True), ("std_unexplored", False)):
        std = _mean([float(np.std(group.rewards)) for group in groups if group.explored is chosen])
        if std is not None:
            metrics[f"explore/{name}"] = std
    metrics |= selection_metrics(batch)
    pairs = audited_pairs(batch, requests, scores)
    if pairs is not None:
        correlation = spearman(*pairs)
        metrics["explore/audits_skipped"] = float(correlation is None)
        if correlation is not None:
            metrics["explore/rank_correlation"] = correlation
    return metrics


def selection_metrics(batch: Batch) -> dict[str, float]:
    """What selecting extremes does to the objective; empty where nothing was explored.

    ``explore/reward_selected`` and ``_unselected``: mean exploration rewards.  ``explore/levels``: how many
    different rewards a prompt's candidates have.  ``explore/tied_share``: of the explored prompts, those of
    which an unselected seed had the reward of a selected one, so that its index decided.
    """
    explored = [planned for planned in batch.prompts if planned.explored]
    if not explored:
        return {}
    chosen = [[s.reward for s in p.explored if s.seed in p.seeds] for p in explored]
    left = [[s.reward for s in p.explored if s.seed not in p.seeds] for p in explored]
    metrics = {
        "explore/reward_selected": float(np.mean([reward for rewards in chosen for reward in rewards])),
        "explore/levels": float(np.mean([len({s.reward for s in p.explored}) for p in explored])),
        "explore/tied_share": float(
            np.mean([bool(set(taken) & set(rest)) for taken, rest in zip(chosen, left, strict=True)])
        ),
    }
    unselected = _mean([reward for rewards in left for reward in rewards])
    return metrics if unselected is None else {**metrics, "explore/reward_unselected": unselected}


def diversity_metrics(
    groups: Sequence[TrajectoryGroup], images: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """How much the images of a group differ, selected and plain: std over seeds, mean over pixels, of 1.

    ``images`` by request, uint8 ``[K, ...]``.
    """
    metrics = {}
    for name, explored in (("selected", True), ("unexplored", False)):
        stds = [
            float(np.std(images[group.request_id] / 255.0, axis=0).mean())
            for group in groups
            if group.explored is explored
        ]
        mean = _mean(stds)
        if mean is not None:
            metrics[f"explore/diversity_{name}"] = mean
    return metrics


def part_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean score of each of several rewards over the batch; empty for one reward."""
    names = dict.fromkeys(name for group in groups for name in group.parts)
    return {
        f"reward/{name}": float(np.mean([score for group in groups for score in group.parts[name]]))
        for name in names
    }


def cost_metrics(ledger: CostLedger, now: float) -> dict[str, float]:
    """Dollars, GPU-hours and preemptions since the run began, up to ``now``."""
    hours = ledger.gpu_hours(now)
    return {
        "cost/usd_total": ledger.usd(now),
        "cost/usd_reserved": ledger.usd(now, "reserved"),
        "cost/usd_spot": ledger.usd(now, "spot"),
        **{f"gpu_hours/{use}": hours[use] for use in ("useful", "idle", "lost")},
        "spot/preemptions": float(len(ledger.preemptions)),
        "spot/requests_resumed": float(ledger.resumed_requests),
        "spot/requests_recomputed": float(ledger.recomputed_requests),
        "spot/denoise_steps_lost": float(ledger.denoise_steps_lost),
    }


def evaluation_metrics(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    return {
        "val/score": evaluation.score,
        "val/held_out": evaluation.held_out,
        "val/grey_share": evaluation.grey_share,
        "val/images": float(evaluation.images),
    }


def overlap_share(
    segments: Iterable[Segment], windows: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """The share of an iteration's exploration, in node-seconds, that ran while training did."""
    if "explore" not in windows or "train" not in windows:
        return {}
    exploration = [part for part in segments if part.activity == "explore"]
    total = sum(_common(part, windows["explore"]) for part in exploration)
    if total <= 0:
        return {}
    return {"explore/overlap_share": sum(_common(part, windows["train"]) for part in exploration) / total}


def remainder_seconds(windows: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """How long exploration went on after training had ended."""
    if "explore" not in windows or "train" not in windows:
        return {}
    return {"seconds/remainder": max(0.0, windows["explore"][1] - windows["train"][1])}


def _common(part: Segment, window: tuple[float, float]) -> float:
    return max(0.0, min(part.end, window[1]) - max(part.start, window[0]))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
