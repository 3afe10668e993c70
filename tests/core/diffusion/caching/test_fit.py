"""The rescaling polynomial: what is fitted, and when it is not taken."""

import numpy as np
import pytest

from spotlight_core.diffusion.caching.fit import IDENTITY, fit_polynomial, given_polynomial, rescaled

SIGNAL = np.stack([np.linspace(0.1, 0.9, 9) + 0.01 * prompt for prompt in range(3)])


def test_a_polynomial_is_found_again() -> None:
    change = 2 * SIGNAL**2 + 0.5 * SIGNAL + 0.1
    fit = fit_polynomial(SIGNAL, change)
    np.testing.assert_allclose(rescaled(fit.polynomial, SIGNAL), change, rtol=1e-9)
    assert fit.error < 1e-9 < 0.1 < fit.identity_error
    assert fit.notes == ()
    assert len(fit_polynomial(SIGNAL, change, 2).polynomial) == 3
    assert len(fit_polynomial(SIGNAL, change, 1).polynomial) == 2


def test_prompts_that_contradict_each_other_leave_the_identity() -> None:
    """In-sample every polynomial beats the identity; on the prompt left out none does."""
    tilts = np.array([[1.0], [-1.0]])
    change = SIGNAL[:2] + 0.3 * tilts * (SIGNAL[:2] - 0.5)
    fit = fit_polynomial(SIGNAL[:2], change)
    assert fit.polynomial == IDENTITY
    assert fit.error == fit.identity_error
    assert len(fit.notes) == 1
    assert "the identity is taken" in fit.notes[0]


def test_a_signal_that_never_varies_leaves_the_identity() -> None:
    signal = np.full((2, 5), 0.25)
    fit = fit_polynomial(signal, np.linspace(0.1, 0.5, 10).reshape(2, 5))
    assert fit.polynomial == IDENTITY
    assert "by inf" in fit.notes[0]


def test_what_is_negative_counts_as_no_distance_and_is_told() -> None:
    assert rescaled((1.0, -0.5), np.array([0.25, 0.75])).tolist() == [0.0, 0.25]
    fit = given_polynomial((1, -0.45), SIGNAL, SIGNAL)
    assert fit.polynomial == (1.0, -0.45)
    assert fit.identity_error == 0
    assert [note.split(":")[0] for note in fit.notes] == [
        f"the given polynomial misses the changes by {fit.error:.3g}, the identity by 0",
        "the polynomial is negative at 4 of 9 steps",
    ]
    falling = given_polynomial((-1.0, 1.0), SIGNAL, 1 - SIGNAL)
    assert falling.notes == ("the polynomial falls between 8 of 8 neighbouring signals",)


def test_a_fit_needs_a_prompt_to_be_judged_by() -> None:
    with pytest.raises(ValueError, match="1 prompts"):
        fit_polynomial(SIGNAL[:1], SIGNAL[:1])
    with pytest.raises(ValueError, match="degree 5"):
        fit_polynomial(SIGNAL, SIGNAL, 5)
