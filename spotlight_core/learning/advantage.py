"""Group-relative advantages: how much better a trajectory is than its siblings (GRPO, arXiv 2402.03300).

A group holds the K trajectories of one prompt *occurrence*: texts repeat, groups do not.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from spotlight_core.config import AdvantageConfig

EPSILON = 1e-4  # added to the std, as in the public trainers


def group_advantages(rewards: Sequence[np.ndarray], config: AdvantageConfig) -> list[np.ndarray]:
    """``(R - mean) / (std + 1e-4)`` of each group, clipped; fp64 arrays shaped like ``rewards``.

    The mean is the group's; the std is the group's, the whole iteration's (``global``), or 1 (``none``,
    Dr. GRPO, arXiv 2503.20783).  A group without variance gives exact zeros.

    Raises:
        ValueError: a reward that is not finite (a failed scorer must never get this far).
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    for number, group in enumerate(groups):
        if not np.isfinite(group).all():
            raise ValueError(f"rewards of group {number} are not finite: {group.tolist()}")
    everywhere = _std(np.concatenate(groups), config) if groups else 0.0
    return [_advantages(group, everywhere, config) for group in groups]


def has_variance(rewards: np.ndarray) -> bool:
    """Whether a group's rewards differ: exactly, since the mean of equal numbers may differ from them."""
    return bool(np.max(rewards) > np.min(rewards))


def combined_advantages(
    parts: Sequence[Mapping[str, np.ndarray]], weights: Mapping[str, float], config: AdvantageConfig
) -> list[np.ndarray]:
    """The weighted sum of each reward's own advantages, clipped: rewards of any scale weigh alike.

    ``parts`` holds the scores of each group by reward name; ``weights`` says what each is worth.
    """
    each = {name: group_advantages([group[name] for group in parts], config) for name in weights}
    return [
        np.clip(
            sum(weight * each[name][number] for name, weight in weights.items()), -config.clip, config.clip
        )
        for number in range(len(parts))
    ]


def _advantages(group: np.ndarray, everywhere: float, config: AdvantageConfig) -> np.ndarray:
    if not has_variance(group):
        return np.zeros_like(group)
    scale = {"group": _std(group, config), "global": everywhere, "none": 1.0 - EPSILON}[config.std]
    return np.clip((group - group.mean()) / (scale + EPSILON), -config.clip, config.clip)


def _std(rewards: np.ndarray, config: AdvantageConfig) -> float:
    return float(np.std(rewards, ddof=1 if config.std_kind == "sample" and len(rewards) > 1 else 0))
