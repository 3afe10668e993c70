"""Benchmarks: ``bench_<name>.py`` measures one figure, ``baselines/<name>.json`` says what it should be.

A bench module has ``measure() -> Measurement`` and nothing that runs on import.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured figure.  ``details`` are further figures to print, by name."""

    value: float
    unit: str
    details: Mapping[str, float | str] = field(default_factory=dict)
