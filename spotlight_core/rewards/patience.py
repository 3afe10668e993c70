"""How long a scorer process may stay silent before it is taken for hung, derived from the recipe."""

import math

from spotlight_core.config import RewardConfig, VlmJudgeRewardConfig, WeightedRewardConfig
from spotlight_core.config.rewards import ScorerModelSection

REQUEST_SECONDS = 120.0  # a scorer that is silent this long is taken for hung and restarted
LOAD_SECONDS = 3600.0  # weights of several GB may have to be downloaded before the first answer
LONGEST_WAIT_SECONDS = 60.0  # a judge's own wait between two attempts, whatever its endpoint asks for
CONNECT_SECONDS = 10.0


def request_seconds(config: RewardConfig, images: int) -> float:
    """For one request of ``images`` images or frames.

    A judge makes its attempts by itself: the limit leaves room for all of them, so that its own error
    comes before the kill.
    """
    if isinstance(config, WeightedRewardConfig):
        return sum(request_seconds(part.reward, images) for part in config.parts)
    if isinstance(config, VlmJudgeRewardConfig):
        return REQUEST_SECONDS + judge_seconds(config) * math.ceil(images / config.concurrency)
    return REQUEST_SECONDS


def judge_seconds(config: VlmJudgeRewardConfig) -> float:
    """The longest that a judge tries for one image: every attempt, and every wait between two."""
    # An answer that keeps coming is cut off at the timeout, and its last silence may last as long again.
    attempt = min(CONNECT_SECONDS, config.timeout_seconds) + 2.0 * config.timeout_seconds
    return config.attempts * attempt + (config.attempts - 1) * LONGEST_WAIT_SECONDS


def start_seconds(config: RewardConfig) -> float:
    """For loading and the self-test."""
    if isinstance(config, WeightedRewardConfig):
        return sum(start_seconds(part.reward) for part in config.parts)
    if isinstance(config, ScorerModelSection):
        return LOAD_SECONDS
    if isinstance(config, VlmJudgeRewardConfig):
        return REQUEST_SECONDS + 3 * judge_seconds(config)  # the list of models, and the golden image twice
    return REQUEST_SECONDS
