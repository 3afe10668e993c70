"""The denoise engine: one request from noise to images, stoppable between any two denoise steps.

A request stopped at step n and resumed from its state, here or on another node, gives bit for bit
what an uninterrupted one gives: the state holds fp32 latents, the last velocity (a reused step may
come next) and the window recorded so far; noise is a function of names.

The ranks of an SP group run the same request side by side.  Each has the whole latents, and takes every
step by itself but for the transformer's forward, which they share: whoever is left has it all.

Shape legend: B batch (seeds of the request), S sequence, C channel, T trained denoise steps,
F frames.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import torch

from spotlight_core.arrays import Arrays
from spotlight_core.config import SamplerConfig
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise
from spotlight_core.diffusion.samplers import Sampler, build_sampler
from spotlight_core.diffusion.samplers.ode import OdeSampler
from spotlight_core.diffusion.samplers.sde import SdeSampler
from spotlight_core.errors import BadInputError, SpotlightError, TrainingError
from spotlight_core.parallel.communicator import Communicator, GroupBrokenError
from spotlight_core.parallel.reshard import hand_over
from spotlight_core.parallel.sequence import SequenceParallel
from spotlight_core.types import Fidelity, GenerationRequest

Boundary = Callable[[int, Callable[[], Arrays]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """A request that let go before ``next_denoise_step``; ``state`` is what ``generate`` resumes from."""

    next_denoise_step: int
    state: Arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """The group of a request broke; this rank still has the state before ``next_denoise_step``.

    None where the step that broke was the first: the request can only begin anew.
    """

    next_denoise_step: int
    state: Arrays | None
    error: GroupBrokenError


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A finished request.

    ``arrays``: ``images`` uint8 ``[B, height, width, 3]`` and ``x0`` fp32 ``[B, S, C]``; where SDE
    steps were recorded also ``x_TBSC`` fp32 ``[T + 1, B, S, C]`` (latents before each trained step,
    and after the last), ``logp_TB`` fp32 ``[T, B]`` and, where asked for, ``mean_TBSC`` ``[T, B, S, C]``.
    ``images`` of a video model are ``[B, F, height, width, 3]``.
    """

    arrays: Arrays


@dataclass(slots=True, kw_only=True)
class _Trajectory:
    """What moves from step to step."""

    x_BSC: torch.Tensor
    v_BSC: torch.Tensor | None = None
    window: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    means: list[np.ndarray] = field(default_factory=list)

    def state(self) -> Arrays:
        arrays = {"x_BSC": self.x_BSC.numpy()}
        if self.v_BSC is not None:
            arrays["v_BSC"] = self.v_BSC.numpy()
        return arrays | self.recorded()

    def recorded(self) -> Arrays:
        if not self.log_probs:
            return {}
        arrays = {"x_TBSC": np.stack(self.window), "logp_TB": np.stack(self.log_probs)}
        return arrays | ({"mean_TBSC": np.stack(self.means)} if self.means else {})

    @classmethod
    def restored(cls, state: Arrays) -> "_Trajectory":
        velocity = state.get("v_BSC")
        return cls(
            # Copies: arrays from a shared store or from bytes may be read-only or freed under us.
            x_BSC=torch.from_numpy(np.array(state["x_BSC"])),
            v_BSC=None if velocity is None else torch.from_numpy(np.array(velocity)),
            window=[np.array(x) for x in state.get("x_TBSC", ())],
            log_probs=[np.array(log_prob) for log_prob in state.get("logp_TB", ())],
            means=[np.array(mean) for mean in state.get("mean_TBSC", ())],
        )


class DenoiseEngine:
    """Runs generation requests on one model, under the recipe's sampler."""

    def __init__(
        self, model: DiffusionModel, sampler: SamplerConfig, rng_seed: int, *, record_means: bool = False
    ) -> None:
        """``record_means`` also keeps the mean of each SDE step, for a loss that regulates by it."""
        self.model = model
        self._config = sampler
        self._rng_seed = rng_seed
        self._record_means = record_means
        self._sequence: SequenceParallel | None = None

    @overload
    def generate(
        self,
        request: GenerationRequest,
        *,
        from_denoise_step: int = 0,
        state: Arrays | None = None,
        boundary: Boundary = ...,
    ) -> Generated | Paused: ...

    @overload
    def generate(
        self,
        request: GenerationRequest,
        *,
        from_denoise_step: int = 0,
        state: Arrays | None = None,
        boundary: Boundary = ...,
        communicator: Communicator | None,
    ) -> Generated | Paused | Broken | None: ...

    def generate(
        self,
        request: GenerationRequest,
        *,
        from_denoise_step: int = 0,
        state: Arrays | None = None,
        boundary: Boundary = lambda step, state: False,
        communicator: Communicator | None = None,
    ) -> Generated | Paused | Broken | None:
        """Denoise ``request``, from the start or from a committed ``state`` before ``from_denoise_step``.

        ``boundary(next_denoise_step, make_state)`` is called between two denoise steps; when it
        returns True the request stops and its state is returned.  ``make_state()`` gives the state
        without stopping, for periodic commits.

        With a ``communicator`` this rank is one of a group that all denoise ``request``.  Its first rank
        leads: it alone has ``state``, is asked at boundaries and returns the result, for which the others
        return None.  ``Paused`` and ``Broken`` come back on every rank that is left.

        Raises:
            BadInputError: a fidelity that cannot be denoised (step 0 reused, SDE steps out of range, a
                stochastic preview over another number of steps than the rollout's).
            ValueError: a start step without its state, or the reverse.
            TrainingError: latents that are not finite.
        """
        sampler, steps = self.sampler_for(request.fidelity), request.fidelity.denoise_steps
        self._share(communicator)
        ended = from_denoise_step
        trajectory: _Trajectory | None = None
        try:
            _check_start(communicator, from_denoise_step, steps, state)
            with torch.inference_mode():
                if communicator is not None and from_denoise_step:
                    state = hand_over(state, (0,), communicator)
                trajectory = self._start(request) if state is None else _Trajectory.restored(state)
                text = self.model.encode([prompt.text for prompt in request.row_prompts])
                for denoise_step in range(from_denoise_step, steps):
                    self._advance(request, sampler, trajectory, text, denoise_step)
                    ended = denoise_step + 1
                    if ended < steps and _lets_go(communicator, boundary, ended, trajectory):
                        return Paused(next_denoise_step=ended, state=trajectory.state())
        except GroupBrokenError as error:
            kept = state if trajectory is None else trajectory.state() if ended else None
            return Broken(next_denoise_step=ended if kept else 0, state=kept, error=error)
        except SpotlightError:
            raise  # what is wrong with the request is wrong on every rank
        except BaseException:
            if communicator is not None:
                communicator.abort()  # the others wait for this rank
            raise
        finally:
            self._share(None)
        # Nobody waits for anybody any more: what fails from here on leaves the group whole.
        _check_finite(trajectory.x_BSC, request)
        if communicator is not None and communicator.rank:
            return None
        with torch.inference_mode():
            images = self.model.decode(trajectory.x_BSC)
        return Generated(arrays={"images": images, "x0": trajectory.x_BSC.numpy()} | trajectory.recorded())

    def _share(self, communicator: Communicator | None) -> None:
        """Let the group, or nobody, have a part in every forward from now on."""
        if communicator is not None and communicator.size > 1 and self._sequence is None:
            self._sequence = SequenceParallel(self.model.transformer)
        if self._sequence is not None:
            self._sequence.use(communicator)

    def sampler_for(self, fidelity: Fidelity) -> Sampler:
        """The recipe's sampler where there are SDE steps, else the ODE over the same kind of schedule.

        Raises:
            BadInputError: a fidelity that cannot be denoised.
        """
        _check_reuse(fidelity)
        sigmas = self.model.sigmas(fidelity.denoise_steps, self._config.shift)
        if fidelity.sde_steps is None:
            return OdeSampler(sigmas)
        first, end = fidelity.sde_steps
        if fidelity.denoise_steps != self._config.denoise_steps:
            raise BadInputError(
                f"a stochastic trajectory of {fidelity.denoise_steps} denoise steps shares no noise with the "
                f"rollout's {self._config.denoise_steps}",
                "keep the rollout's denoise_steps and lower effective_steps instead",
            )
        if not 0 <= first < end < fidelity.denoise_steps:
            raise BadInputError(
                f"SDE steps [{first}, {end}) are not inside [0, {fidelity.denoise_steps - 1})",
                "the last denoise step is always an ODE step",
            )
        return build_sampler(self._config, sigmas)

    def _start(self, request: GenerationRequest) -> _Trajectory:
        return _Trajectory(x_BSC=self._noise(request, INITIAL_NOISE))

    def _noise(self, request: GenerationRequest, denoise_step: int) -> torch.Tensor:
        shape = self.model.latent_shape_SC
        return batch_noise(
            self._rng_seed,
            [prompt.occurrence for prompt in request.row_prompts],
            request.seeds,
            denoise_step,
            shape,
        )

    def _advance(
        self,
        request: GenerationRequest,
        sampler: Sampler,
        trajectory: _Trajectory,
        text: TextEmbeddings,
        denoise_step: int,
    ) -> None:
        """One denoise step, in place on ``trajectory``."""
        if trajectory.v_BSC is None or denoise_step not in request.fidelity.reused_steps:
            sigma_B = torch.full((len(request.seeds),), float(sampler.sigmas[denoise_step]))
            trajectory.v_BSC = self.model.velocity(trajectory.x_BSC, sigma_B, text)
        first, end = request.fidelity.sde_steps or (0, 0)
        noise = self._noise(request, denoise_step) if first <= denoise_step < end else None
        x_BSC = trajectory.x_BSC
        x_next_BSC, log_prob_B = sampler.step(x_BSC, trajectory.v_BSC, denoise_step, noise)
        if log_prob_B is not None:
            if not trajectory.window:
                trajectory.window.append(x_BSC.numpy())
            trajectory.window.append(x_next_BSC.numpy())
            trajectory.log_probs.append(log_prob_B.numpy())
            if self._record_means and isinstance(sampler, SdeSampler):
                steps_B = torch.full((len(x_BSC),), denoise_step)
                trajectory.means.append(sampler.mean(x_BSC, trajectory.v_BSC, steps_B).numpy())
        trajectory.x_BSC = x_next_BSC


def _check_start(
    communicator: Communicator | None, denoise_step: int, steps: int, state: Arrays | None
) -> None:
    has_state = denoise_step > 0 and (communicator is None or communicator.rank == 0)
    if has_state != (state is not None) or not 0 <= denoise_step < steps:
        raise ValueError(
            f"cannot start at denoise step {denoise_step} of {steps} with state={state is not None}"
        )


def _lets_go(
    communicator: Communicator | None, boundary: Boundary, denoise_step: int, trajectory: _Trajectory
) -> bool:
    """What the leader is told at the boundary, on all ranks."""
    if communicator is None:
        return boundary(denoise_step, trajectory.state)
    try:
        answer = communicator.rank == 0 and boundary(denoise_step, trajectory.state)
    except SpotlightError:
        communicator.abort()  # wrong on the leader alone, whose answer the others wait for
        raise
    return bool(communicator.broadcast(torch.tensor([answer], device=trajectory.x_BSC.device), 0))


def _check_finite(x_BSC: torch.Tensor, request: GenerationRequest) -> None:
    """Latents of NaN would be drawn as a black image, which some rewards like best."""
    if not bool(torch.isfinite(x_BSC).all()):
        raise TrainingError(
            f"policy {request.policy.name} draws latents that are not finite (request {request.id})",
            "its weights have diverged or are damaged: lower optimizer.lr, or take an earlier checkpoint",
        )


def _check_reuse(fidelity: Fidelity) -> None:
    outside = [step for step in fidelity.reused_steps if not 1 <= step < fidelity.denoise_steps]
    if outside:
        raise BadInputError(
            f"denoise step {outside[0]} of {fidelity.denoise_steps} cannot reuse a velocity",
            "reuse steps from 1 to the last; step 0 has nothing to reuse",
        )
