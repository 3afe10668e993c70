"""Images that an iteration shows to people."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Images with their prompts and rewards, for people to look at: uint8 ``[B, H, W, 3]``."""

    images: np.ndarray
    prompts: tuple[str, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, images: np.ndarray, prompts: Sequence[str], scores: Sequence[float]) -> "Gallery":
        """Of images, or of videos ``[B, F, H, W, 3]``, which show their middle frame."""
        stills = images if images.ndim == 4 else images[:, images.shape[1] // 2]
        return cls(images=stills, prompts=tuple(prompts), scores=tuple(scores))
