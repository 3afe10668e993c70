"""Rewards on drawn digits and on hand-worked distances."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spotlight_core.config import (
    FunctionRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    RewardConfig,
    TemplateRewardConfig,
)
from spotlight_core.diffusion.tiny.glyphs import draw
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import Reward, build_reward, grey_share
from spotlight_core.rewards.ocr import OcrReward, levenshtein, text_score
from tests.core.rewards.prompts import rows

READERS: dict[str, RewardConfig] = {
    "ocr": OcrRewardConfig(),
    "template": TemplateRewardConfig(type="template"),
}


@pytest.fixture(scope="module", params=sorted(READERS))
def reader(request: pytest.FixtureRequest) -> Reward:
    return build_reward(READERS[request.param])


def _images(*texts: str, shift_y: int = 0) -> np.ndarray:
    grey = np.stack([((draw(text, shift_y=shift_y) + 1) * 127.5).round().astype(np.uint8) for text in texts])
    return np.repeat(grey[..., None], 3, axis=-1)


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("407", "470", 2), ("12", "123", 1)],
)
def test_levenshtein(left: str, right: str, distance: int) -> None:
    assert levenshtein(left, right) == distance
    assert levenshtein(right, left) == distance


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("407", "407", 1.0),
        ("x407y", "407", 1.0),  # a substring
        ("4O7", "407", 2 / 3),
        ("", "407", 0.0),
        ("999999", "407", 0.0),  # the distance is capped at the target's length
        (" Op En ", "OPEN", 1.0),
    ],
)
def test_text_score(read: str, target: str, score: float) -> None:
    assert text_score(read, target) == pytest.approx(score)


@pytest.mark.parametrize("shift_y", [-1, 0, 1])
def test_clean_digits_score_one(reader: Reward, shift_y: int) -> None:
    rng = np.random.default_rng(7)
    texts = ["".join(rng.choice(list("0123456789"), size=length)) for length in (2, 3, 4) for _ in range(12)]
    texts += ["11", "000", "8888", "1717"]
    prompts = rows(*(f'A "{text}"' for text in texts))
    assert reader.score(_images(*texts, shift_y=shift_y), prompts) == [1.0] * len(texts)


def test_wrong_characters_cost_their_share(reader: Reward) -> None:
    scores = reader.score(_images("407", "4071", "52"), rows('A "417"', 'A "4925"', 'A "52"'))
    assert scores == pytest.approx([2 / 3, 1 / 4, 1.0])


def test_blank_and_noisy_images_score_low(reader: Reward) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, 16, 32, 3), dtype=np.uint8)
    assert reader.score(np.full((1, 16, 32, 3), 255, np.uint8), rows('A "407"')) == [0.0]
    assert np.mean(reader.score(noise, rows(*['A "4071"'] * 8))) < 0.3


def test_scores_do_not_depend_on_the_neighbours(reader: Reward) -> None:
    texts = ["12", "345", "6789", "407"]
    prompts = rows(*(f'A "{text}"' for text in ("13", "345", "9789", "047")))
    together = reader.score(_images(*texts), prompts)
    assert together == [
        reader.score(_images(text), [prompt])[0] for text, prompt in zip(texts, prompts, strict=True)
    ]


def test_a_prompt_without_target_is_an_error_not_a_zero(reader: Reward) -> None:
    with pytest.raises(BadInputError, match="no quoted target"):
        reader.score(_images("12"), rows("no quotes"))


def test_ocr_reads_what_is_drawn_with_and_without_a_charset() -> None:
    assert OcrReward("0123456789").read(_images("407", "9921")) == ["407", "9921"]
    unrestricted = OcrReward("").read(_images("407"))
    assert unrestricted == ["407"]
    assert set(OcrReward("17").read(_images("4071"))[0]) <= {"1", "7"}
    with pytest.raises(BadInputError, match="does not know"):
        OcrReward("0\u0000")


def test_template_ignores_where_ocr_would_forgive() -> None:
    template = build_reward(READERS["template"])
    assert template.score(_images("4075"), rows('A "407"'))[0] < 1.0


def test_jpeg_size_is_the_share_saved() -> None:
    flat, noisy = (
        np.full((16, 32, 3), 200, np.uint8),
        np.random.default_rng(0).integers(0, 256, (16, 32, 3), np.uint8),
    )
    reward = build_reward(JpegSizeRewardConfig(type="jpeg_size"))
    buffer = io.BytesIO()
    Image.fromarray(flat).save(buffer, "JPEG", quality=95)
    scores = reward.score(np.stack([flat, noisy]), rows("", ""))
    assert scores[0] == 1 - len(buffer.getvalue()) / 1536
    assert 0.0 <= scores[1] < scores[0]


def _function(tmp_path: Path, source: str, name: str = "score") -> RewardConfig:
    file = tmp_path / "mine.py"
    file.write_text(source)
    return FunctionRewardConfig(type="function", file=file, name=name)


def test_a_function_of_your_own(tmp_path: Path) -> None:
    source = "def bright(image, prompt):\n    return float(image.mean()) / 255 * (prompt == 'a')\n"
    reward = build_reward(_function(tmp_path, source, "bright"))
    images = np.full((2, 4, 4, 3), 51, np.uint8)
    assert reward.score(images, rows("a", "b")) == [pytest.approx(0.2), 0.0]
    assert reward.name == "mine.py:bright"


@pytest.mark.parametrize("answer", ["None", "float('nan')", "-0.1", "1.5", "'high'"])
def test_a_function_that_answers_nonsense_is_named(tmp_path: Path, answer: str) -> None:
    reward = build_reward(_function(tmp_path, f"def score(image, prompt):\n    return {answer}\n"))
    with pytest.raises(ScorerError, match=r"mine\.py:score"):
        reward.score(np.zeros((1, 4, 4, 3), np.uint8), rows("a"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = 1\n", "no function 'score'"),
        ("def score(:\n", "cannot be imported"),
        ("1 / 0\n", "cannot be imported"),
    ],
)
def test_a_broken_reward_file_is_bad_input(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem):
        build_reward(_function(tmp_path, source))


def test_a_missing_reward_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no reward file"):
        build_reward(FunctionRewardConfig(type="function", file=tmp_path / "none.py"))


def test_grey_share_counts_between_ink_and_paper() -> None:
    values = np.array([0, 25, 26, 128, 152, 153, 200, 255], np.uint8)  # -1, -.804, -.796, .004, .192, .2, ...
    image = np.repeat(values.reshape(1, 2, 4, 1), 3, axis=-1)
    assert grey_share(image) == 3 / 8


def test_template_refuses_images_of_another_size() -> None:
    template = build_reward(READERS["template"])
    with pytest.raises(BadInputError, match="16 x 32 pixels, these are 32 x 32"):
        template.score(np.zeros((1, 32, 32, 3), np.uint8), rows('A "407"'))


def test_an_accent_is_the_same_however_it_is_encoded() -> None:
    assert text_score("café", "cafe\u0301") == 1.0
    assert text_score("cafe", "café") == 0.75
