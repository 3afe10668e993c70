"""What a scorer answers for one batch of images."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One score for each image; with several rewards their weighted sum, and each one's in ``parts``."""

    scores: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
