"""What each reward wants of a prompt, checked when the prompts are loaded and not when an image is scored."""

from collections.abc import Iterable

from spotlight_core.config import RewardConfig, RunConfig, SingleRewardConfig, WeightedRewardConfig
from spotlight_core.data.prompts import RowCheck, quoted_target
from spotlight_core.types import PromptRow


def single_rewards(config: RewardConfig) -> tuple[SingleRewardConfig, ...]:
    """The rewards that are scored under this section."""
    if isinstance(config, WeightedRewardConfig):
        return tuple(part.reward for part in config.parts)
    return (config,)


def row_checks(config: RunConfig) -> tuple[RowCheck, ...]:
    """The checks of every reward of the recipe, the held-out one included."""
    return reward_checks([config.reward, config.evaluation.held_out_reward])


def reward_checks(rewards: Iterable[RewardConfig]) -> tuple[RowCheck, ...]:
    """The checks of these rewards, each once."""
    types = {single.type for reward in rewards for single in single_rewards(reward)}
    return tuple(check for name, check in _CHECKS.items() if name in types)


def _has_target(row: PromptRow) -> None:
    quoted_target(row.text)


def _has_clauses(row: PromptRow) -> None:
    from spotlight_core.rewards.geneval_metadata import check_metadata

    check_metadata(row.metadata)


_CHECKS: dict[str, RowCheck] = {"ocr": _has_target, "template": _has_target, "geneval": _has_clauses}
