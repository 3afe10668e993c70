"""Scoring one request: images or videos, one reward or several."""

from collections.abc import Sequence

import numpy as np

from spotlight_core.errors import ScorerError
from spotlight_core.rewards.base import Reward
from spotlight_core.rewards.scored import Scored
from spotlight_core.rewards.weighted import WeightedReward
from spotlight_core.types import PromptRow


def score_request(reward: Reward, images: np.ndarray, prompts: Sequence[PromptRow]) -> Scored:
    """Score uint8 images ``[B, height, width, 3]`` or videos ``[B, frames, height, width, 3]``.

    The score of a video is the mean over its frames of the image reward.  The k-th frames of all
    videos are one batch, so a request of videos has the batch size and the memory of one of images.

    Raises:
        ScorerError: the reward answers another number of scores, or one that is not finite.
    """
    if images.ndim == 4:
        return _scored(reward, images, prompts)
    frames = [_scored(reward, images[:, k], prompts) for k in range(images.shape[1])]
    return Scored(
        scores=_mean([frame.scores for frame in frames]),
        parts={name: _mean([frame.parts[name] for frame in frames]) for name in frames[0].parts},
    )


def _scored(reward: Reward, images: np.ndarray, prompts: Sequence[PromptRow]) -> Scored:
    images = np.ascontiguousarray(images)
    if isinstance(reward, WeightedReward):
        parts = reward.parts(images, prompts)
        for name, scores in parts.items():
            _check(name, scores, prompts)
        scores = reward.combined(parts)
    else:
        parts, scores = {}, reward.score(images, prompts)
    _check(reward.name, scores, prompts)
    return Scored(
        scores=tuple(map(float, scores)),
        parts={name: tuple(map(float, values)) for name, values in parts.items()},
    )


def _check(name: str, scores: Sequence[float], prompts: Sequence[PromptRow]) -> None:
    if len(scores) != len(prompts) or not np.isfinite(scores).all():
        raise ScorerError(
            f"reward {name} answered {scores} for {len(prompts)} images", "return one finite number an image"
        )


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.mean(np.asarray(rows, dtype=np.float64), axis=0))
