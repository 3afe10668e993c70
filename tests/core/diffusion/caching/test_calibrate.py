"""Calibration on the embedded model, and what its tables do to a trajectory."""

import numpy as np
import pytest
import torch

from spotlight_core.config import FlowSdeConfig, OdeConfig
from spotlight_core.diffusion.caching import StepTable
from spotlight_core.diffusion.caching.calibrate import calibrate
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

PROMPTS = ['A "407"', 'A "9"', 'A "12"', 'A "8861"']
STEPS = 20
ODE, FULL = OdeConfig(denoise_steps=STEPS), Fidelity(denoise_steps=STEPS)


@pytest.fixture(scope="module")
def model() -> TinyQwenImage:
    return TinyQwenImage.from_pretrained()


@pytest.fixture(scope="module")
def table(model: TinyQwenImage) -> StepTable:
    return calibrate(model, PROMPTS, ODE, FULL)


def _x0(model: TinyQwenImage, reused: tuple[int, ...]) -> np.ndarray:
    request = GenerationRequest(
        id="r",
        kind="explore",
        prompts=(Prompt(occurrence="unseen", text='A "305"'),),
        seeds=(7, 8),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=Fidelity(denoise_steps=STEPS, reused_steps=reused),
    )
    outcome = DenoiseEngine(model, ODE, rng_seed=1).generate(request)
    assert isinstance(outcome, Generated)
    return outcome.arrays["x0"]


def test_the_embedded_model_has_several_counts(table: StepTable) -> None:
    assert len(table.effective_steps) >= 3
    assert (table.effective_steps[0], table.effective_steps[-1]) == (2, STEPS)
    assert (table.transformer, table.rows) == ("QwenImageTransformer2DModel", 8)
    assert table.fit_error < table.identity_error
    thresholds = [schedule.threshold for schedule in table.schedules]
    assert thresholds == sorted(thresholds, reverse=True)


def test_the_engine_takes_every_schedule_and_drifts_with_what_is_skipped(
    model: TinyQwenImage, table: StepTable
) -> None:
    full = _x0(model, ())
    drift = {
        count: float(np.abs(_x0(model, table.reused_steps(count)) - full).mean()) for count in (5, 10, 20)
    }
    assert drift[5] > drift[10] > drift[20] == 0


def test_a_calibration_says_the_same_again(model: TinyQwenImage, table: StepTable) -> None:
    assert calibrate(model, PROMPTS, ODE, FULL) == table
    assert calibrate(model, PROMPTS, ODE, FULL, rng_seed=1) != table


def test_what_is_measured_does_not_depend_on_how_rows_are_batched(model: TinyQwenImage) -> None:
    both = calibrate(model, PROMPTS[:2], ODE, FULL, seeds=(3, 4))
    apart = [calibrate(model, PROMPTS[:2], ODE, FULL, seeds=(seed,)) for seed in (3, 4)]
    for name in ("signal", "velocity_change"):
        mean = np.mean([getattr(each, name) for each in apart], axis=0)
        np.testing.assert_allclose(getattr(both, name), mean, rtol=1e-4)


def test_stochastic_steps_are_calibrated_as_they_are_rolled_out(
    model: TinyQwenImage, table: StepTable
) -> None:
    sde = FlowSdeConfig(type="flow_sde", denoise_steps=STEPS)
    noisy = calibrate(model, PROMPTS[:2], sde, Fidelity(denoise_steps=STEPS, sde_steps=(0, 5)))
    assert noisy.sde_steps == (0, 5)
    assert min(noisy.signal[:5]) > max(table.signal[:5])  # fresh noise moves the latents


def test_a_given_polynomial_and_grid_take_the_fits_place(model: TinyQwenImage, table: StepTable) -> None:
    given = calibrate(model, PROMPTS, ODE, FULL, polynomial=(1, 0), thresholds=(0.15, 0.25))
    assert given.polynomial == (1.0, 0.0)
    assert given.fit_error == given.identity_error == table.identity_error
    assert given.signal == table.signal
    assert {schedule.threshold for schedule in given.schedules} <= {0.0, 0.15, 0.25}


def test_calibrations_that_cannot_be(model: TinyQwenImage) -> None:
    with pytest.raises(BadInputError, match="1 calibration prompts leave none to judge the fit by: give at"):
        calibrate(model, PROMPTS[:1], ODE, FULL)
    with pytest.raises(BadInputError, match="of 2 denoise steps none can be skipped: give at least 3"):
        calibrate(model, PROMPTS, ODE, Fidelity(denoise_steps=2))
    with pytest.raises(ValueError, match=r"it reuses no steps \(3,\)"):
        calibrate(model, PROMPTS, ODE, Fidelity(denoise_steps=STEPS, reused_steps=(3,)))


def test_a_velocity_that_never_moves_is_refused(model: TinyQwenImage) -> None:
    class Still(TinyQwenImage):
        def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
            return torch.ones_like(super().velocity(x_BSC, sigma_B, text))

    with pytest.raises(BadInputError, match=r"change of the velocity at denoise step 1 is 0\.0: calibrate"):
        calibrate(Still(model.transformer), PROMPTS, ODE, FULL)
