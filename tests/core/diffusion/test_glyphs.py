"""Drawn strings move by the pixels that were asked for."""

import numpy as np
import pytest

from spotlight_core.diffusion.tiny.glyphs import check_text, draw
from spotlight_core.errors import BadInputError


def _ink(image: np.ndarray) -> tuple[int, int]:
    rows, columns = np.where(image < 0)
    return int(rows.min()), int(columns.min())


@pytest.mark.parametrize("text", ["40", "407", "4071"])
def test_shifts_are_whole_pixels(text: str) -> None:
    row, column = _ink(draw(text))
    for shift in (-1, 0, 1):
        assert _ink(draw(text, shift_y=shift))[0] == row + shift
    if len(text) < 4:
        assert _ink(draw(text, shift_x=1))[1] == column + 1


def test_range_and_shape() -> None:
    image = draw("8888")
    assert image.shape == (16, 32)
    assert image.dtype == np.float32
    assert image.min() == -1.0
    assert image.max() == 1.0


@pytest.mark.parametrize("text", ["", "12345", "4a", "4 7"])
def test_what_the_model_cannot_draw_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="cannot draw"):
        check_text(text)
