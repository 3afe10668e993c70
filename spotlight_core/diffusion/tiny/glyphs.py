"""Training images of the embedded model: short strings drawn in a monospaced font, 16 x 32, grey."""

from functools import cache
from importlib import util
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from spotlight_core.errors import BadInputError

HEIGHT, WIDTH = 16, 32
FONT_SIZE = 13
ALPHABET = "0123456789"
MAX_CHARACTERS = 4


@cache
def font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans Mono as shipped inside matplotlib, so that every machine draws the same pixels."""
    package = util.find_spec("matplotlib")  # found, not imported: only its font file is wanted
    if package is None or package.origin is None:
        raise BadInputError("the embedded model's font ships inside matplotlib", "pip install matplotlib")
    path = Path(package.origin).parent / "mpl-data/fonts/ttf/DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), FONT_SIZE)


def check_text(text: str) -> str:
    """``text`` if the embedded model can draw it; BadInputError otherwise."""
    if not 1 <= len(text) <= MAX_CHARACTERS or set(text) - set(ALPHABET):
        raise BadInputError(
            f'the embedded model cannot draw "{text}"',
            f"quote 1 to {MAX_CHARACTERS} of the characters {ALPHABET} in each prompt",
        )
    return text


def draw(text: str, shift_x: int = 0, shift_y: int = 0) -> np.ndarray:
    """``text`` in black on white, centred, then shifted by whole pixels: fp32 ``[16, 32]`` in [-1, 1]."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font())
    x = (WIDTH - (right - left)) / 2 - left
    y = (HEIGHT - (bottom - top)) / 2 - top
    # Rounded before the shift: halves round to even, and shifts of 1 would move by 0 or 2 pixels.
    pen.text((round(x) + shift_x, round(y) + shift_y), text, fill=0, font=font())
    return np.asarray(image, dtype=np.float32) / 127.5 - 1.0
