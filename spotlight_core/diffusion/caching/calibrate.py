"""Effective steps through caching, decided once: TeaCache (arXiv 2411.19108) as a table, not at run time.

TeaCache watches the timestep-modulated input of the first block and skips a denoise step while it has
changed little.  A preview must be the same on all ranks, in any batch and on every node, so the watching
is done here, over full trajectories of calibration prompts, and what it decides is written down.

What a skipped step reuses is the whole last *velocity*, guidance included, where TeaCache adds the last
residual of the blocks to the new latents: so a table is on the same axis as ``Fidelity.reused_steps``, and
engine, costs and previews need nothing new.

Shape legend: B batch (seeds of a prompt), S latent tokens, C channels per token, P prompts, T denoise
steps from the second on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from spotlight_core.config import SamplerConfig
from spotlight_core.diffusion.caching.fit import (
    HIGHEST_DEGREE,
    fit_polynomial,
    given_polynomial,
    rescaled,
)
from spotlight_core.diffusion.caching.signal import ModulatedInput, relative_l1, signal
from spotlight_core.diffusion.caching.table import StepTable, schedules
from spotlight_core.diffusion.engine import DenoiseEngine
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

FEWEST_STEPS = 3  # the first and the last are always computed


def calibrate(
    model: DiffusionModel,
    prompts: Sequence[str],
    sampler: SamplerConfig,
    fidelity: Fidelity,
    *,
    seeds: Sequence[int] = (0, 1),
    rng_seed: int = 0,
    highest_degree: int = HIGHEST_DEGREE,
    polynomial: Sequence[float] | None = None,
    thresholds: Sequence[float] | None = None,
) -> StepTable:
    """Run the ``prompts`` in full and say which denoise steps a cheaper trajectory can skip.

    Each prompt is a batch of its ``seeds``, under the recipe's ``sampler`` and a ``fidelity`` without
    reused steps.  ``polynomial`` (highest power first) is taken instead of a fit; ``thresholds`` instead of
    every one at which the decision changes.

    Raises:
        BadInputError: fewer than two prompts or three denoise steps, a fidelity that cannot be denoised, a
            transformer of no known family, a velocity or its signal that never changes.
        TrainingError: latents that are not finite.
        ValueError: a fidelity that reuses steps already; see ``fit_polynomial`` and ``schedules``.
    """
    _check(prompts, fidelity)
    signals, changes = [], []
    with signal(model) as modulated:
        recorder = _Recorder(model, modulated)
        engine = DenoiseEngine(recorder, sampler, rng_seed)
        for index, prompt in enumerate(prompts):
            recorder.begin()
            engine.generate(_request(index, prompt, seeds, fidelity))
            signals.append(recorder.mean(recorder.signals, "modulated input"))
            changes.append(recorder.mean(recorder.changes, "velocity"))
    signal_PT, change_PT = np.stack(signals), np.stack(changes)
    fit = (
        fit_polynomial(signal_PT, change_PT, highest_degree)
        if polynomial is None
        else given_polynomial(polynomial, signal_PT, change_PT)
    )
    signal_T = signal_PT.mean(axis=0)
    distances = [float(distance) for distance in rescaled(fit.polynomial, signal_T)]
    return StepTable(
        transformer=type(model.transformer).__name__,
        sigmas=_floats(engine.sampler_for(fidelity).sigmas),
        sde_steps=fidelity.sde_steps,
        rows=len(prompts) * len(seeds),
        signal=_floats(signal_T),
        velocity_change=_floats(change_PT.mean(axis=0)),
        polynomial=fit.polynomial,
        fit_error=fit.error,
        identity_error=fit.identity_error,
        notes=fit.notes,
        schedules=schedules(distances, thresholds),
    )


class _Recorder:
    """The model as it is, but for images, which nobody looks at; it notes how velocities change."""

    def __init__(self, model: DiffusionModel, modulated: ModulatedInput) -> None:
        self.transformer: nn.Module = model.transformer
        self.latent_shape_SC = model.latent_shape_SC
        self._model = model
        self._modulated = modulated
        self.begin()

    def begin(self) -> None:
        """Forget the trajectory before."""
        self.signals: list[torch.Tensor] = []
        self.changes: list[torch.Tensor] = []
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None

    def mean(self, recorded: Sequence[torch.Tensor], what: str) -> np.ndarray:
        """Over rows: fp64 ``[T]``."""
        means_T = torch.stack(list(recorded)).double().mean(dim=1).numpy()
        wrong = ~np.isfinite(means_T) | (means_T <= 0)
        if wrong.any():
            step = int(wrong.argmax()) + 1
            raise BadInputError(
                f"the relative change of the {what} at denoise step {step} is {means_T[step - 1]}",
                "calibrate with trained weights",
            )
        return means_T

    def modules(self) -> Sequence[nn.Module]:
        return self._model.modules()

    def encode(self, prompts: Sequence[str]) -> TextEmbeddings:
        return self._model.encode(prompts)

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        v_BSC = self._model.velocity(x_BSC, sigma_B, text)
        modulated = self._modulated.take()
        if self._before is not None:
            self.signals.append(relative_l1(modulated, self._before[0]))
            self.changes.append(relative_l1(v_BSC, self._before[1]))
        self._before = modulated, v_BSC
        return v_BSC

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        return np.zeros((len(x_BSC), 0, 0, 3), np.uint8)

    def sigmas(self, denoise_steps: int, shift: float | None) -> np.ndarray:
        return self._model.sigmas(denoise_steps, shift)


def _check(prompts: Sequence[str], fidelity: Fidelity) -> None:
    if fidelity.reused_steps:
        raise ValueError(f"a calibration runs in full: it reuses no steps {fidelity.reused_steps}")
    if len(prompts) < 2:
        raise BadInputError(
            f"{len(prompts)} calibration prompts leave none to judge the fit by", "give at least 2"
        )
    if fidelity.denoise_steps < FEWEST_STEPS:
        raise BadInputError(
            f"of {fidelity.denoise_steps} denoise steps none can be skipped",
            f"give at least {FEWEST_STEPS}: the first and the last are always computed",
        )


def _request(index: int, prompt: str, seeds: Sequence[int], fidelity: Fidelity) -> GenerationRequest:
    name = f"calibration-{index}"
    return GenerationRequest(
        id=name,
        kind="explore",
        prompts=(Prompt(occurrence=name, text=prompt),),
        seeds=tuple(seeds),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=fidelity,
    )


def _floats(numbers: np.ndarray) -> tuple[float, ...]:
    return tuple(float(number) for number in numbers)
