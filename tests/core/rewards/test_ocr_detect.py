"""OCR that finds its lines: reading order, real renderings, and PaddleOCR's answers as recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from spotlight_core.config import OcrRewardConfig
from spotlight_core.diffusion.tiny.glyphs import font
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import build_reward
from spotlight_core.rewards.ocr import DetectOcrReward, RapidReader, TextLine, reading_order
from spotlight_core.rewards.paddle import PaddleReader, parse_page
from spotlight_core.types import PromptRow


def _line(text: str, left: float, top: float, height: float = 20.0, confidence: float = 0.9) -> TextLine:
    return TextLine(text=text, confidence=confidence, box_xyxy=(left, top, left + 50.0, top + height))


def _page(*words: tuple[int, int, str], size: int = 34) -> np.ndarray:
    image = Image.new("RGB", (256, 256), "white")
    pen = ImageDraw.Draw(image)
    for left, top, text in words:
        pen.text((left, top), text, fill="black", font=font().font_variant(size=size))
    return np.asarray(image)


@pytest.fixture(scope="module")
def reader() -> RapidReader:
    return RapidReader()


def _rows(*targets: str) -> list[PromptRow]:
    return [PromptRow(text=f'A sign that reads "{target}"') for target in targets]


def test_reading_order_is_by_row_and_then_by_column() -> None:
    lines = [_line("d", 80, 100), _line("b", 90, 12), _line("a", 10, 17), _line("c", 5, 104)]
    assert [line.text for line in reading_order(lines)] == ["a", "b", "c", "d"]


def test_a_row_is_measured_by_its_lower_piece() -> None:
    # A headline 60 high beside two small lines at its top and its bottom: three rows by the small ones.
    lines = [_line("head", 0, 0, 60), _line("low", 100, 45, 12), _line("high", 100, 3, 12)]
    assert [line.text for line in reading_order(lines)] == ["high", "head", "low"]
    stairs = [_line(text, 200 - 60 * step, 9 * step) for step, text in enumerate("abc")]
    assert [line.text for line in reading_order(stairs)] == ["b", "a", "c"]


class _Fixed:
    """A reader that has read these lines."""

    def __init__(self, *lines: TextLine) -> None:
        self._lines = lines

    def read(self, image: np.ndarray) -> Sequence[TextLine]:
        return self._lines


def test_all_lines_of_positive_confidence_count() -> None:
    lines = (_line("world", 0, 50, confidence=0.01), _line("Hello", 0, 0), _line("xxx", 0, 25, confidence=0))
    reward = DetectOcrReward(_Fixed(*lines))
    images = np.zeros((3, 8, 8, 3), np.uint8)
    assert reward.read(images[:1]) == ["Hello world"]
    # Case and spaces do not count, and neither does what is around a substring.
    assert reward.score(images, _rows("Hello World", "oWo", "low!")) == [1.0, 1.0, 1 - min(8, 4) / 4]


def test_real_lines_are_found_and_read_in_order(reader: RapidReader) -> None:
    page = _page((140, 40, "two"), (20, 40, "one"), (20, 120, "three"))
    reward = DetectOcrReward(reader)
    assert reward.read(page[None]) == ["one two three"]
    assert reward.score(np.stack([page, page]), _rows("Two Three", "thrxe")) == [1.0, 1.0 - min(8, 5) / 5]


def test_letters_beyond_ascii(reader: RapidReader) -> None:
    reward = DetectOcrReward(reader)
    page = _page((20, 60, "Café Noël"))
    assert reward.score(page[None], _rows("café noël")) == [1.0]
    # One wrong letter of eight: the plain e.
    assert reward.score(page[None], _rows("cafe noël")) == [0.875]


def test_a_chinese_character(reader: RapidReader) -> None:
    image = Image.new("RGB", (256, 256), "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle((60, 80, 130, 120), outline="black", width=8)  # a box and a stroke through it
    pen.rectangle((91, 60, 99, 160), fill="black")
    reward = DetectOcrReward(reader)
    assert reward.read(np.asarray(image)[None]) == ["中"]
    assert reward.score(np.asarray(image)[None], _rows("中")) == [1.0]


def test_a_page_without_text_scores_zero(reader: RapidReader) -> None:
    blank = np.full((1, 256, 256, 3), 255, np.uint8)
    assert DetectOcrReward(reader).read(blank) == [""]
    assert DetectOcrReward(reader).score(blank, _rows("407")) == [0.0]


def test_scores_do_not_depend_on_the_neighbours(reader: RapidReader) -> None:
    pages = np.stack([_page((20, 60, "Open")), _page((20, 100, "Closed"))])
    reward, rows = DetectOcrReward(reader), _rows("Opem", "Closet")
    assert reward.score(pages, rows) == [reward.score(pages[k : k + 1], rows[k : k + 1])[0] for k in range(2)]


def test_a_prompt_without_target_is_an_error_not_a_zero(reader: RapidReader) -> None:
    with pytest.raises(BadInputError, match="no quoted target"):
        DetectOcrReward(reader).score(np.zeros((1, 64, 64, 3), np.uint8), [PromptRow(text="no quotes")])


def test_the_recipe_chooses_the_reader() -> None:
    reward = build_reward(OcrRewardConfig(detect=True))
    assert isinstance(reward, DetectOcrReward)
    assert reward.read(_page((20, 60, "Exit"))[None]) == ["Exit"]


# As PaddleOCR 3 answers: a dict a page, corners as arrays, and more keys beside.
RECORDED: dict[str, Any] = {
    "input_path": None,
    "page_index": None,
    "dt_polys": [],
    "rec_texts": ["World", "Hello"],
    "rec_scores": [0.97, 0.99],
    "rec_polys": [
        np.array([[10, 60], [90, 61], [90, 80], [10, 79]], dtype=np.int16),
        np.array([[10, 10], [90, 10], [90, 30], [10, 30]], dtype=np.int16),
    ],
    "rec_boxes": np.array([[10, 60, 90, 80], [10, 10, 90, 30]], dtype=np.int16),
}


def test_a_recorded_paddle_page() -> None:
    world, hello = parse_page(RECORDED)
    assert world == TextLine(text="World", confidence=0.97, box_xyxy=(10.0, 60.0, 90.0, 80.0))
    assert hello.box_xyxy == (10.0, 10.0, 90.0, 30.0)


def test_paddle_gets_bgr_and_its_lines_are_put_in_order() -> None:
    seen: list[np.ndarray] = []

    def predict(image: np.ndarray) -> list[Mapping[str, Any]]:
        seen.append(image)
        return [RECORDED]

    image = np.zeros((1, 4, 4, 3), np.uint8)
    image[..., 0] = 200
    reward = DetectOcrReward(PaddleReader(predict))
    assert reward.score(image, _rows("hello world")) == [1.0]
    assert seen[0][0, 0].tolist() == [0, 0, 200]
    assert seen[0].flags.c_contiguous


def test_a_paddle_page_without_text_is_empty() -> None:
    assert parse_page({"rec_texts": [], "rec_scores": [], "rec_polys": []}) == []


@pytest.mark.parametrize(
    "page",
    [
        {"rec_texts": ["a"], "rec_scores": [0.5]},
        {"rec_texts": ["a", "b"], "rec_scores": [0.5], "rec_polys": [[[0, 0], [1, 1]]]},
        {"rec_texts": ["a"], "rec_scores": ["high"], "rec_polys": [[[0, 0], [1, 1]]]},
    ],
)
def test_a_paddle_page_of_another_shape_is_an_error(page: dict[str, Any]) -> None:
    with pytest.raises(ScorerError, match="PaddleOCR's answer cannot be read"):
        parse_page(page)
    with pytest.raises(ScorerError, match="0 pages"):
        PaddleReader(lambda image: []).read(np.zeros((4, 4, 3), np.uint8))


def test_a_missing_paddle_says_what_to_install() -> None:
    from importlib import util

    if util.find_spec("paddleocr") is not None:
        pytest.skip("paddleocr is installed here")
    with pytest.raises(BadInputError, match=r"pip install 'spotlight-rl\[paddleocr\]'"):
        build_reward(OcrRewardConfig(engine="paddleocr", detect=True))
