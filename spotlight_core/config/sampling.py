"""The sampler section: how trajectories are denoised, and which of their steps are trained."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spotlight_core.config.section import Section


class FixedWindowConfig(Section):
    type: Literal["fixed"]
    """The same SDE steps always."""
    first: int = Field(0, ge=0)
    """First SDE step."""
    end: int = Field(ge=1)
    """Step after the last SDE step."""


class RandomWindowConfig(Section):
    type: Literal["random"]
    """A window for each group and iteration, drawn from the run's seed."""
    size: int = Field(2, ge=1)
    """SDE steps in the window."""
    first: int = Field(0, ge=0)
    """First step that a window may hold."""
    end: int | None = Field(None, ge=1)
    """Step after the last that a window may hold; the last denoise step when absent."""


class ProgressiveWindowConfig(Section):
    type: Literal["progressive"]
    """MixGRPO's sliding window (arXiv 2507.21802): the same for all groups, it moves as the run goes on."""
    size: int = Field(4, ge=1)
    """SDE steps in the window."""
    stride: int = Field(1, ge=1)
    """Steps that it moves by; after the last place it starts again."""
    iterations_per_move: int = Field(25, ge=1)
    """Iterations at the first place."""
    decay: float = Field(0.0, ge=0)
    """Later places are left sooner: ``iterations_per_move * exp(-decay * max(first - threshold, 0))``."""
    threshold: int = Field(0, ge=0)
    """Place from which the decay begins."""


WindowConfig = Annotated[
    FixedWindowConfig | RandomWindowConfig | ProgressiveWindowConfig, Field(discriminator="type")
]


class SamplerSection(Section):
    """What all samplers share."""

    denoise_steps: int = Field(10, ge=2, le=1000)
    """Denoise steps S of a rollout."""
    shift: float | None = Field(None, ge=1e-2, le=100)
    """Shift of the noise schedule; the model's own schedule at its resolution when absent."""


class OdeConfig(SamplerSection):
    type: Literal["ode"] = "ode"
    """Deterministic Euler steps; only losses that need no log-probabilities."""


class SdeSection(SamplerSection):
    """What all stochastic samplers share.  The last denoise step is always an ODE step."""

    noise_level: float = Field(0.7, ge=0, le=10)
    """The noise level; at 0 every step is an ODE step, which is never scored."""
    window: WindowConfig | None = None
    """Which steps are stochastic and trained, the others being ODE steps; all but the last when absent."""

    @model_validator(mode="after")
    def _window_inside(self) -> "SdeSection":
        last = self.denoise_steps - 1
        window = self.window
        first, end = 0, last
        if isinstance(window, FixedWindowConfig):
            first, end = window.first, window.end
        elif isinstance(window, RandomWindowConfig):
            first, end = window.first, last if window.end is None else window.end
        size = 1 if window is None or isinstance(window, FixedWindowConfig) else window.size
        if not (0 <= first < end <= last and size <= end - first):
            raise ValueError(
                f"a window of {size} in [{first}, {end}) must lie inside [0, {last}): "
                "the last denoise step is always an ODE step"
            )
        return self

    @property
    def trained_per_sample(self) -> int:
        """SDE steps T that are recorded and trained in one trajectory."""
        if not self.noise_level:
            return 0
        if self.window is None:
            return self.denoise_steps - 1
        window = self.window
        return window.end - window.first if isinstance(window, FixedWindowConfig) else window.size


class FlowSdeConfig(SdeSection):
    type: Literal["flow_sde"]
    """Flow-GRPO's SDE (arXiv 2505.05470)."""


class DanceSdeConfig(SdeSection):
    type: Literal["dance_sde"]
    """DanceGRPO's SDE (arXiv 2505.07818): the diffusion is the noise level itself."""
    noise_level: float = Field(0.3, ge=0, le=10)
    """The paper's eta; at 0 every step is an ODE step, which is never scored."""


class CpsConfig(SdeSection):
    type: Literal["cps"]
    """Coefficients-preserving sampling (arXiv 2509.05952): no noise is left over in the image."""
    noise_level: float = Field(0.8, ge=0, le=1)
    """Share of the noise that is renewed, as a sine; at 0 every step is an ODE step, never scored."""


SdeConfig = FlowSdeConfig | DanceSdeConfig | CpsConfig
SamplerConfig = Annotated[OdeConfig | FlowSdeConfig | DanceSdeConfig | CpsConfig, Field(discriminator="type")]
