"""JPEG-size reward: images that compress well score high.  Needs no model: for trying things out."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from spotlight_core.types import PromptRow

QUALITY = 95


class JpegSizeReward:
    """``1 - bytes of the JPEG / bytes of the pixels``, at least 0 (compressibility, arXiv 2305.13301)."""

    name = "jpeg_size"

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score in 0..1 for each image; the prompts do not matter."""
        return [max(0.0, 1.0 - _jpeg_bytes(image) / image.nbytes) for image in images]


def _jpeg_bytes(image: np.ndarray) -> int:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell()
