"""The polynomial that rescales the signal to the change of the velocity (arXiv 2411.19108, equation 7).

Shape legend: P calibration prompts, T denoise steps from the second on.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IDENTITY = (1.0, 0.0)
HIGHEST_DEGREE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``polynomial`` has the highest power first; see ``StepTable`` for the others.

    ``error`` is that on prompts which the polynomial has not seen, but where it was given.
    """

    polynomial: tuple[float, ...]
    error: float
    identity_error: float
    notes: tuple[str, ...] = ()


def fit_polynomial(signal_PT: np.ndarray, change_PT: np.ndarray, highest_degree: int = HIGHEST_DEGREE) -> Fit:
    """The polynomial of degree 1 to ``highest_degree`` that does best on prompts left out of its fit.

    In-sample no such polynomial is worse than the identity, so each degree is judged by leaving out one
    prompt after the other.  Where even the best is worse than the identity, the identity is taken, with a
    note.  The published polynomials are no default: they predict the change of the blocks' residual, at
    their own schedules, ours that of the velocity.

    Raises:
        ValueError: fewer than two prompts, or a degree outside 1..4.
    """
    if len(signal_PT) < 2 or not 1 <= highest_degree <= HIGHEST_DEGREE:
        raise ValueError(f"{len(signal_PT)} prompts, degree {highest_degree}: no fit to judge")
    identity_error = _error(IDENTITY, signal_PT, change_PT)
    errors = {degree: _held_out(signal_PT, change_PT, degree) for degree in range(1, highest_degree + 1)}
    degree = min(errors, key=lambda each: errors[each])
    polynomial = _polyfit(signal_PT, change_PT, degree)
    if polynomial is None or errors[degree] > identity_error:
        note = (
            f"the best polynomial misses the changes of prompts it has not seen by {errors[degree]:.3g}, "
            f"the identity by {identity_error:.3g}: the identity is taken"
        )
        return Fit(polynomial=IDENTITY, error=identity_error, identity_error=identity_error, notes=(note,))
    notes = _shape_notes(polynomial, signal_PT.mean(axis=0))
    return Fit(polynomial=polynomial, error=errors[degree], identity_error=identity_error, notes=notes)


def given_polynomial(polynomial: Sequence[float], signal_PT: np.ndarray, change_PT: np.ndarray) -> Fit:
    """How a polynomial from elsewhere does on these prompts; taken even where the identity does better."""
    taken = tuple(float(coefficient) for coefficient in polynomial)
    error, identity_error = (_error(each, signal_PT, change_PT) for each in (taken, IDENTITY))
    notes = _shape_notes(taken, signal_PT.mean(axis=0))
    if error > identity_error:
        said = f"the given polynomial misses the changes by {error:.3g}, the identity by {identity_error:.3g}"
        notes = (said, *notes)
    return Fit(polynomial=taken, error=error, identity_error=identity_error, notes=notes)


def rescaled(polynomial: Sequence[float], signal: np.ndarray) -> np.ndarray:
    """The polynomial of the signal, any shape; 0 where it is negative, as no distance is."""
    return np.maximum(np.polyval(polynomial, signal), 0.0)


def _error(polynomial: Sequence[float], signal_PT: np.ndarray, change_PT: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean((rescaled(polynomial, signal_PT) - change_PT) ** 2)))


def _held_out(signal_PT: np.ndarray, change_PT: np.ndarray, degree: int) -> float:
    """The error on each prompt of the polynomial of the others; infinite where there is none."""
    squares = []
    for prompt in range(len(signal_PT)):
        others = np.arange(len(signal_PT)) != prompt
        polynomial = _polyfit(signal_PT[others], change_PT[others], degree)
        if polynomial is None:
            return float("inf")
        squares.append(_error(polynomial, signal_PT[prompt], change_PT[prompt]) ** 2)
    return float(np.sqrt(np.mean(squares)))


def _polyfit(signal_PT: np.ndarray, change_PT: np.ndarray, degree: int) -> tuple[float, ...] | None:
    """None where the signals do not determine a polynomial of that degree."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.RankWarning)
        try:
            return tuple(float(each) for each in np.polyfit(signal_PT.ravel(), change_PT.ravel(), degree))
        except np.exceptions.RankWarning:
            return None


def _shape_notes(polynomial: Sequence[float], signal_T: np.ndarray) -> tuple[str, ...]:
    """What keeps a polynomial from being a rescaling of the signals it was made for."""
    rising = np.polyval(polynomial, np.sort(signal_T))
    notes = []
    if below := int((rising < 0).sum()):
        notes.append(f"the polynomial is negative at {below} of {len(signal_T)} steps: taken as 0")
    if falls := int((np.diff(rising) < 0).sum()):
        notes.append(f"the polynomial falls between {falls} of {len(signal_T) - 1} neighbouring signals")
    return tuple(notes)
