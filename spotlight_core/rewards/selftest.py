"""Golden images: a scorer proves itself before the first iteration, not after the last."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from spotlight_core.diffusion.tiny.glyphs import draw, font
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import Reward
from spotlight_core.rewards.ocr import DetectOcrReward
from spotlight_core.rewards.weighted import WeightedReward
from spotlight_core.types import PromptRow

GOLDEN = ("40", "176", "2583", "9940")
_WRONG = {"40": "17", "176": "902", "2583": "4017", "9940": "2583"}  # no character in its place
WORDS = ("Spotlight", "Café 42")
_WORD_PIXELS, _WORD_FONT = 256, 40
_STOP_SIGN = PromptRow(
    text="a photo of a stop sign",
    metadata={"tag": "single_object", "include": [{"class": "stop sign", "count": 1}]},
)
# Loose bounds that no working scorer leaves: PickScore is at most exp(logit_scale) / 26 = 3.9.
_RANGES = {"geneval": (-15.0, 1.0), "clip_score": (0.0, 1.0), "pickscore": (-4.0, 4.0)}


def golden_images() -> np.ndarray:
    """The golden strings as drawn in pretraining: uint8 ``[4, 16, 32, 3]``."""
    grey = np.stack([((draw(text) + 1.0) * 127.5).round().astype(np.uint8) for text in GOLDEN])
    return np.repeat(grey[..., None], 3, axis=-1)


def golden_words() -> np.ndarray:
    """Two words in black on white, in different places: uint8 ``[2, 256, 256, 3]``."""
    images = []
    for row, word in enumerate(WORDS):
        image = Image.new("RGB", (_WORD_PIXELS, _WORD_PIXELS), "white")
        place = (16, 60 + 80 * row)
        ImageDraw.Draw(image).text(place, word, fill="black", font=font().font_variant(size=_WORD_FONT))
        images.append(np.asarray(image))
    return np.stack(images)


def golden_pictures() -> np.ndarray:
    """A red disc on grass and a plain white page: uint8 ``[2, 256, 256, 3]``."""
    image = Image.new("RGB", (_WORD_PIXELS, _WORD_PIXELS), (60, 140, 60))
    ImageDraw.Draw(image).ellipse((64, 64, 192, 192), fill=(200, 20, 20))
    return np.stack([np.asarray(image), np.full((_WORD_PIXELS, _WORD_PIXELS, 3), 255, np.uint8)])


def self_test(reward: Reward) -> None:
    """Score golden images: every reward answers finite numbers, the same ones twice.

    Rewards that read text must tell right from wrong, models must tell images apart, a judge must grade.
    A weighted reward is tested part by part.

    Raises:
        ScorerError: the reward raises, answers nonsense, or fails its golden images.
        BadInputError: it cannot take them for a reason of the recipe's.
    """
    if isinstance(reward, WeightedReward):
        for part in reward.rewards.values():
            self_test(part)
        return
    kind = "ocr with detect" if isinstance(reward, DetectOcrReward) else reward.name
    _TESTS.get(kind, _is_steady)(reward)


def _is_steady(reward: Reward) -> None:
    _twice(reward, golden_images(), _quoting(GOLDEN))


def _reads_digits(reward: Reward) -> None:
    _reads(
        reward,
        golden_images(),
        GOLDEN,
        [_WRONG[text] for text in GOLDEN],
        "install the versions of constraints.txt, and keep the digits in reward.characters",
    )


def _reads_words(reward: Reward) -> None:
    _reads(reward, golden_words(), WORDS, WORDS[::-1], "install the versions of constraints.txt")


def _reads(
    reward: Reward, images: np.ndarray, texts: Sequence[str], wrong_texts: Sequence[str], remedy: str
) -> None:
    right = _twice(reward, images, _quoting(texts))
    wrong = _scores(reward, images, _quoting(wrong_texts))
    if min(right) < 1.0 or max(wrong) > 0.5:
        raise ScorerError(
            f"reward {reward.name} scored clean text {min(right):.2f} and wrong text {max(wrong):.2f}", remedy
        )


def _tells_apart(reward: Any) -> None:
    images, prompts = golden_pictures(), [_STOP_SIGN, _STOP_SIGN]
    scores = _twice(reward, images, prompts)
    low, high = _RANGES[reward.name]
    if not all(low <= score <= high for score in scores):
        raise ScorerError(
            f"reward {reward.name} scored golden images {scores}, which is not in {low:g} to {high:g}",
            "check that reward's models are the ones its type needs",
        )
    for model, answers in _guarded(reward, lambda: reward.probes(images, prompts)).items():
        if len(set(answers)) == 1 or not np.isfinite(answers).all():
            raise ScorerError(
                f"the {model} of reward {reward.name} answered {answers} to two different images",
                "check that its weights are whole",
            )


def _judges(reward: Any) -> None:
    """Past its cache, which would answer the second time by itself."""
    image, prompt = golden_pictures()[0], "a red disc on grass"
    grades = [_guarded(reward, lambda: reward.judge(image, prompt)) for _ in range(2)]
    if grades[0] != grades[1]:
        raise ScorerError(
            f"reward {reward.name} graded one image {grades[0]:g} and {grades[1]:g}",
            "serve the model without sampling: it is asked with temperature 0",
        )


_TESTS: dict[str, Callable[[Any], None]] = {
    "ocr": _reads_digits,
    "ocr with detect": _reads_words,
    "template": _reads_digits,
    "geneval": _tells_apart,
    "clip_score": _tells_apart,
    "pickscore": _tells_apart,
    "vlm_judge": _judges,
}


def _quoting(texts: Sequence[str]) -> list[PromptRow]:
    return [PromptRow(text=f'A "{text}"') for text in texts]


def _twice(reward: Reward, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
    scores = _scores(reward, images, prompts)
    if scores != _scores(reward, images, prompts):
        raise ScorerError(f"reward {reward.name} gave one image two scores", "make it deterministic")
    return scores


def _scores(reward: Reward, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
    scores = _guarded(reward, lambda: reward.score(images, prompts))
    if len(scores) != len(images) or not np.isfinite(scores).all():
        raise ScorerError(
            f"reward {reward.name} answered {scores} for {len(images)} images",
            "return one finite number an image",
        )
    return scores


def _guarded(reward: Reward, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (ScorerError, BadInputError):
        raise
    except Exception as error:  # whatever a scorer raises must name the scorer
        raise ScorerError(
            f"reward {reward.name} failed on golden images ({type(error).__name__}: {error})",
            "fix the scorer",
        ) from error
