"""Several rewards at once, videos, and how long a scorer may take."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.config import (
    ClipScoreRewardConfig,
    FunctionRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    RewardPart,
    VlmJudgeRewardConfig,
    WeightedRewardConfig,
)
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import build_reward
from spotlight_core.rewards.patience import (
    LOAD_SECONDS,
    REQUEST_SECONDS,
    judge_seconds,
    request_seconds,
    start_seconds,
)
from spotlight_core.rewards.scored import Scored
from spotlight_core.rewards.scoring import score_request
from spotlight_core.rewards.weighted import WeightedReward
from spotlight_core.types import PromptRow

ROWS = [PromptRow(text="a"), PromptRow(text="b")]


def _weighted(tmp_path: Path, brightness: float, size: float) -> WeightedRewardConfig:
    file = tmp_path / "bright.py"
    file.write_text("def score(image, prompt):\n    return float(image.mean()) / 255 * (prompt == 'a')\n")
    return WeightedRewardConfig(
        type="weighted",
        parts=(
            RewardPart(weight=brightness, reward=FunctionRewardConfig(type="function", file=file)),
            RewardPart(weight=size, reward=JpegSizeRewardConfig(type="jpeg_size")),
        ),
    )


def test_the_weighted_sum_and_its_parts(tmp_path: Path) -> None:
    images = np.full((2, 16, 16, 3), 51, np.uint8)
    reward = build_reward(_weighted(tmp_path, brightness=2.0, size=-0.5))
    assert isinstance(reward, WeightedReward)
    (small, same) = build_reward(JpegSizeRewardConfig(type="jpeg_size")).score(images, ROWS)
    assert small == same > 0.0
    assert reward.parts(images, ROWS) == {"function": [0.2, 0.0], "jpeg_size": [small, small]}
    assert reward.score(images, ROWS) == [0.4 - 0.5 * small, -0.5 * small]
    assert score_request(reward, images, ROWS) == Scored(
        scores=(0.4 - 0.5 * small, -0.5 * small),
        parts={"function": (0.2, 0.0), "jpeg_size": (small, small)},
    )


def test_a_part_that_cannot_be_built_is_bad_input(tmp_path: Path) -> None:
    config = _weighted(tmp_path, 1.0, 1.0)
    (tmp_path / "bright.py").unlink()
    with pytest.raises(BadInputError, match="no reward file"):
        build_reward(config)


def test_a_video_scores_the_mean_of_its_frames(tmp_path: Path) -> None:
    frames = np.zeros((2, 3, 16, 16, 3), np.uint8)
    frames[0] += np.array([51, 102, 255], np.uint8)[:, None, None, None]
    single = build_reward(_weighted(tmp_path, 1.0, 0.0).parts[0].reward)
    assert score_request(single, frames, ROWS).scores == pytest.approx(((0.2 + 0.4 + 1.0) / 3, 0.0))
    weighted = build_reward(_weighted(tmp_path, 2.0, 1.0))
    assert isinstance(weighted, WeightedReward)
    scored = score_request(weighted, frames, ROWS)
    by_frame = [weighted.parts(np.ascontiguousarray(frames[:, k]), ROWS) for k in range(3)]
    for name in ("function", "jpeg_size"):
        assert scored.parts[name] == pytest.approx(np.mean([parts[name] for parts in by_frame], axis=0))
    assert scored.scores == pytest.approx(
        [2.0 * a + b for a, b in zip(scored.parts["function"], scored.parts["jpeg_size"], strict=True)]
    )


class _Shapes:
    """Remembers what it was given."""

    name = "shapes"

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        assert images.flags.c_contiguous
        self.shapes.append(images.shape)
        return [0.5] * len(prompts)


def test_frames_are_scored_in_batches_of_the_request() -> None:
    reward = _Shapes()
    assert score_request(reward, np.zeros((2, 5, 4, 6, 3), np.uint8), ROWS).scores == (0.5, 0.5)
    assert reward.shapes == [(2, 4, 6, 3)] * 5


class _Answers:
    def __init__(self, *answers: float) -> None:
        self.name, self._answers = "mine", list(answers)

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        return self._answers


@pytest.mark.parametrize("answers", [(0.5,), (0.5, float("nan")), (0.5, float("inf")), (0.1, 0.2, 0.3)])
def test_scores_are_one_finite_number_an_image(answers: tuple[float, ...]) -> None:
    with pytest.raises(ScorerError, match=r"reward mine answered .* for 2 images"):
        score_request(_Answers(*answers), np.zeros((2, 4, 4, 3), np.uint8), ROWS)


def test_how_long_a_scorer_may_be_silent() -> None:
    judge = VlmJudgeRewardConfig(
        type="vlm_judge", url="http://127.0.0.1:1", model="m", timeout_seconds=30, attempts=3, concurrency=4
    )
    # Three attempts of 10 seconds to connect and twice 30 of silence, and two waits of a minute.
    assert judge_seconds(judge) == 3 * 70 + 2 * 60
    assert request_seconds(judge, images=4) == REQUEST_SECONDS + 330
    assert request_seconds(judge, images=9) == REQUEST_SECONDS + 3 * 330
    ocr, clip = OcrRewardConfig(), ClipScoreRewardConfig(type="clip_score")
    assert request_seconds(ocr, images=100) == start_seconds(ocr) == REQUEST_SECONDS
    assert start_seconds(clip) == LOAD_SECONDS
    both = WeightedRewardConfig(
        type="weighted",
        parts=(RewardPart(weight=1.0, reward=judge), RewardPart(weight=1.0, reward=clip)),
    )
    assert request_seconds(both, images=4) == 2 * REQUEST_SECONDS + 330
    assert start_seconds(both) == REQUEST_SECONDS + 3 * 330 + LOAD_SECONDS
