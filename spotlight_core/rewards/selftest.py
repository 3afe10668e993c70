"""Golden images: a scorer proves itself before the first iteration, not after the last."""

import numpy as np

from spotlight_core.diffusion.tiny.glyphs import draw
from spotlight_core.errors import ScorerError
from spotlight_core.rewards.base import Reward

GOLDEN = ("40", "176", "2583", "9940")
_WRONG = {"40": "17", "176": "902", "2583": "4017", "9940": "2583"}  # no character in its place
_READS_TEXT = ("ocr", "template")


def golden_images() -> np.ndarray:
    """The golden strings as drawn in pretraining: uint8 ``[4, 16, 32, 3]``."""
    grey = np.stack([((draw(text) + 1.0) * 127.5).round().astype(np.uint8) for text in GOLDEN])
    return np.repeat(grey[..., None], 3, axis=-1)


def self_test(reward: Reward) -> None:
    """Score the golden images; rewards that read text must tell right from wrong.

    Raises:
        ScorerError: the reward raises, answers non-finite or changing scores, or misreads clean digits.
    """
    images = golden_images()
    right = _scores(reward, images, [f'A "{text}"' for text in GOLDEN])
    if right != _scores(reward, images, [f'A "{text}"' for text in GOLDEN]):
        raise ScorerError(f"reward {reward.name} gave one image two scores", "make it deterministic")
    if reward.name not in _READS_TEXT:
        return
    wrong = _scores(reward, images, [f'A "{_WRONG[text]}"' for text in GOLDEN])
    if min(right) < 1.0 or max(wrong) > 0.5:
        raise ScorerError(
            f"reward {reward.name} scored clean digits {min(right):.2f} and wrong ones {max(wrong):.2f}",
            "install the versions of constraints.txt, and keep the digits in reward.characters",
        )


def _scores(reward: Reward, images: np.ndarray, prompts: list[str]) -> list[float]:
    try:
        scores = reward.score(images, prompts)
    except ScorerError:
        raise
    except Exception as error:  # whatever a scorer raises must name the scorer
        raise ScorerError(
            f"reward {reward.name} failed on golden images ({type(error).__name__}: {error})",
            "fix the scorer",
        ) from error
    if len(scores) != len(images) or not np.isfinite(scores).all():
        raise ScorerError(
            f"reward {reward.name} answered {scores} for {len(images)} images",
            "return one finite number an image",
        )
    return scores
