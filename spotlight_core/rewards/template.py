"""Template reward: share of the target's characters that look most like themselves.

Each position of the image is compared with all ten drawn digits, by normalised cross-correlation
over small shifts; a character counts when the right digit wins.  It shares no code and no weights
with OCR, so a policy that fools the one does not fool the other.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from spotlight_core.data.prompts import quoted_target
from spotlight_core.diffusion.tiny.glyphs import ALPHABET, HEIGHT, WIDTH, check_text, draw, font
from spotlight_core.errors import BadInputError
from spotlight_core.types import PromptRow

SHIFTS = tuple((dy, dx) for dy in (-1, 0, 1) for dx in (-2, -1, 0, 1, 2))
MIN_CORRELATION = 0.3  # below it a position holds no digit, whichever template comes first
_MARGIN = 2


class TemplateReward:
    """Nearest drawn digit at each position of a 16 x 32 image."""

    name = "template"

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """Share of agreeing characters, 0..1, for each image and its prompt's quoted target.

        Raises:
            BadInputError: images of another size; a target that the embedded model cannot draw.
        """
        if images.shape[1:3] != (HEIGHT, WIDTH):
            raise BadInputError(
                f"the template reward compares images of {HEIGHT} x {WIDTH} pixels, these are "
                f"{images.shape[1]} x {images.shape[2]}",
                "use the ocr reward with detect = true",
            )
        targets = [check_text(quoted_target(prompt.text)) for prompt in prompts]
        return [_agreement(image, target) for image, target in zip(images, targets, strict=True)]


def _agreement(image_HW3: np.ndarray, target: str) -> float:
    grey_HW = image_HW3.mean(axis=2) / 127.5 - 1.0
    padded = np.pad(grey_HW, _MARGIN, constant_values=1.0)
    agreeing = 0
    for position, (first, end) in enumerate(_cells(len(target))):
        height = grey_HW.shape[0]
        windows = np.stack(
            [
                padded[
                    _MARGIN + dy : _MARGIN + dy + height, _MARGIN + dx + first : _MARGIN + dx + end
                ].ravel()
                for dy, dx in SHIFTS
            ]
        )
        correlations = _unit_rows(windows) @ _templates(target, position).T
        best = correlations.max(axis=0)
        winner = int(best.argmax())
        agreeing += ALPHABET[winner] == target[position] and best[winner] >= MIN_CORRELATION
    return agreeing / len(target)


def _cells(length: int) -> list[tuple[int, int]]:
    """Pixel columns of each character of a centred string of ``length``: half-open ranges."""
    advance = font().getlength("0")
    left = (WIDTH - advance * length) / 2
    edges = [min(max(round(left + advance * index), 0), WIDTH) for index in range(length + 1)]
    return list(pairwise(edges))


@lru_cache(maxsize=4096)
def _templates(target: str, position: int) -> np.ndarray:
    """Unit rows ``[10, pixels]``: the cell of ``position`` with each digit in the target's place.

    The neighbours stay the target's, since glyphs overlap their cells by a pixel.
    """
    first, end = _cells(len(target))[position]
    drawn = [draw(target[:position] + digit + target[position + 1 :]) for digit in ALPHABET]
    return _unit_rows(np.stack([image[:, first:end].ravel() for image in drawn]))


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows with mean 0 and norm 1; constant rows become 0, which correlates with nothing."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.divide(centred, norm, out=np.zeros_like(centred), where=norm > 1e-6)
