"""Golden images: what passes, and that every kind of broken scorer is found and named."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.config import (
    ClipScoreRewardConfig,
    FunctionRewardConfig,
    GenEvalRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    PickScoreRewardConfig,
    RewardConfig,
    RewardPart,
    TemplateRewardConfig,
    WeightedRewardConfig,
)
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import Reward, build_reward
from spotlight_core.rewards.ocr import DetectOcrReward, TextLine
from spotlight_core.rewards.selftest import (
    GOLDEN,
    WORDS,
    golden_images,
    golden_pictures,
    golden_words,
    self_test,
)
from spotlight_core.types import PromptRow


@pytest.mark.parametrize(
    "config",
    [
        OcrRewardConfig(),
        OcrRewardConfig(detect=True),
        TemplateRewardConfig(type="template"),
        JpegSizeRewardConfig(type="jpeg_size"),
    ],
    ids=["ocr", "ocr with detect", "template", "jpeg_size"],
)
def test_rewards_pass(config: RewardConfig) -> None:
    self_test(build_reward(config))


def test_rewards_of_models_pass(tiny_clip: Path, tiny_mask2former: Path) -> None:
    clip = str(tiny_clip)
    self_test(build_reward(ClipScoreRewardConfig(type="clip_score", path=clip)))
    self_test(build_reward(PickScoreRewardConfig(type="pickscore", path=clip, processor=clip)))
    config = GenEvalRewardConfig(type="geneval", detector=str(tiny_mask2former), classifier=clip)
    self_test(build_reward(config))


def test_golden_images_have_the_sizes_that_their_readers_take() -> None:
    assert golden_images().shape == (len(GOLDEN), 16, 32, 3)
    assert golden_words().shape == (len(WORDS), 256, 256, 3)
    assert golden_pictures().shape == (2, 256, 256, 3)
    assert not np.array_equal(*golden_pictures())


def test_a_weighted_reward_is_tested_part_by_part(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(image, prompt):\n    return 7\n")
    parts = (
        RewardPart(weight=1.0, reward=JpegSizeRewardConfig(type="jpeg_size")),
        RewardPart(weight=1.0, reward=FunctionRewardConfig(type="function", file=file)),
    )
    with pytest.raises(ScorerError, match=r"mine\.py:score answered 7"):
        self_test(build_reward(WeightedRewardConfig(type="weighted", parts=parts)))
    self_test(build_reward(WeightedRewardConfig(type="weighted", parts=parts[:1])))


class _Scorer:
    """Answers what it is told to, in turn; an empty answer raises."""

    def __init__(self, name: str, *answers: list[float], probes: tuple[float, ...] = (0.1, 0.2)) -> None:
        self.name, self._answers, self._probes = name, list(answers), list(probes)

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if not answer:
            raise RuntimeError("no engine")
        return answer

    def probes(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> dict[str, list[float]]:
        return {"CLIP": self._probes}


@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        (_Scorer("mine", []), "reward mine failed on golden images .RuntimeError: no engine"),
        (_Scorer("mine", [0.5] * 3), "for 4 images"),
        (_Scorer("mine", [float("nan")] * 4), "for 4 images"),
        (_Scorer("mine", [0.5] * 4, [0.6] * 4), "two scores"),
        (_Scorer("ocr", [0.5] * 4), "clean text 0.50"),
        (_Scorer("ocr", [1.0] * 4), "wrong text 1.00"),
        (_Scorer("clip_score", [0.2, 1.2]), "which is not in 0 to 1"),
        (_Scorer("pickscore", [0.8, -4.5]), "which is not in -4 to 4"),
        (_Scorer("geneval", [1.5, 0.0]), "which is not in -15 to 1"),
        (_Scorer("pickscore", [0.8, 0.9], [0.8, 0.8]), "two scores"),
        (_Scorer("clip_score", [0.2, 0.2], probes=(0.2, 0.2)), "the CLIP of reward clip_score answered"),
        (_Scorer("geneval", [0.0, 0.0], probes=(0.2, float("nan"))), "to two different images"),
    ],
)
def test_a_broken_scorer_is_found(scorer: Reward, problem: str) -> None:
    with pytest.raises(ScorerError, match=problem):
        self_test(scorer)


class _Blind:
    """Reads the same in every image."""

    def __init__(self, text: str) -> None:
        self._line = TextLine(text=text, confidence=0.9, box_xyxy=(0.0, 0.0, 9.0, 9.0))

    def read(self, image: np.ndarray) -> Sequence[TextLine]:
        return [self._line]


@pytest.mark.parametrize(
    ("text", "problem"), [("xyz", "clean text 0.0"), (" ".join(WORDS), "wrong text 1.00")]
)
def test_a_reader_that_reads_nonsense_or_everything_is_found(text: str, problem: str) -> None:
    with pytest.raises(ScorerError, match=f"reward ocr scored .*{problem}"):
        self_test(DetectOcrReward(_Blind(text)))


def test_images_that_a_reward_cannot_take_are_an_error() -> None:
    class Picky:
        name = "mine"

        def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
            raise BadInputError(f"images of {images.shape[1]} rows", "send others")

    with pytest.raises(BadInputError, match="images of 16 rows"):
        self_test(Picky())
