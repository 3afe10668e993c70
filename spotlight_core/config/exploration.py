"""The exploration section: how candidate seeds of the next batch are chosen, scored and selected."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from spotlight_core.config.section import NO_FILE, Section

Selection = Literal["top_bottom", "variance_max", "top_only", "random"]


class NoExplorationConfig(Section):
    type: Literal["none"] = "none"
    """Plain seeds."""


class ExplorationSection(Section):
    """What all ways to explore share."""

    when: Literal["beside_training", "before_rollout"] = "beside_training"
    """On spot GPUs beside training, with the weights before it; or on all of them after it, with the new
    ones, while everything else waits."""
    selection: Selection = "top_bottom"
    """Which explored seeds are rolled out: as many of the best as of the worst, those whose rewards vary
    most, the best alone, or any."""
    steps: Path | None = None
    """A table of steps that `spotlight calibrate` wrote: which ones previews skip; by a rule when absent."""
    seeds_per_request: int = Field(16, ge=1)
    """Micro-batch of an exploration request."""
    unexplored_prompts: int = Field(1, ge=0)
    """Prompts of a batch that keep plain seeds, to measure what exploration brings."""
    audit_every: int = Field(4, ge=0)
    """Iterations between audits of the rank correlation; 0 for never."""
    correlation_floor: float = Field(0.0, ge=0, lt=1)
    """Mean rank correlation of the last audits below which more steps are computed, and in the end
    nothing is explored; 0 for never."""

    @field_validator("steps", mode="before")
    @classmethod
    def _no_steps(cls, value: Any) -> Any:
        return None if value == NO_FILE else value


class FixedArmConfig(ExplorationSection):
    type: Literal["fixed_arm"]
    """Explore the same number of seeds at the same effective steps every iteration."""
    seeds_per_prompt: int = Field(32, ge=2, le=4096)
    """Candidate seeds d explored for each prompt."""
    effective_steps: int = Field(8, ge=1)
    """Denoise steps computed per candidate; the others reuse the last velocity."""


class SupplyConfig(Section):
    """What a bandit may count on where its choice must not depend on time."""

    train_seconds: float = Field(gt=0)
    """Seconds of a training."""
    spot_gpus: float = Field(ge=0)
    """Spot GPUs beside it."""
    seconds_per_step: float = Field(gt=0)
    """GPU-seconds of one denoise step of one candidate."""
    seconds_per_image: float = Field(0.0, ge=0)
    """GPU-seconds of all else that a candidate takes: decoding, scoring."""


class BanditConfig(ExplorationSection):
    """A bandit chooses among arms that fit the spot GPUs' time beside training."""

    type: Literal["ucb", "ucb_paper", "thompson"]
    """UCB whose unseen arms start from those near them; the paper's UCB, which tries each arm first; or
    Thompson sampling."""
    correlation_floor: float = Field(0.6, ge=0, lt=1)
    """Mean rank correlation of the last audits below which more steps are computed, and in the end
    nothing is explored; 0 for never."""
    seeds_per_prompt: tuple[Annotated[int, Field(ge=2, le=4096)], ...] | None = None
    """Choices of candidate seeds d: multiples of the trained ones when absent."""
    effective_steps: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Choices of computed denoise steps: .8 of the rollout's and all of them when absent; the paper's
    UCB takes five from .6 on."""
    bonus: float = Field(0.5, ge=0)
    """UCB's weight of what is not known (the paper's beta)."""
    window: int = Field(8, ge=1)
    """Observations of an arm that count: older ones are of another policy."""
    spot: Literal["expected", "current"] = "expected"
    """Spot GPUs that are counted on: a low quantile of what the fleet's history makes of the training's
    time, or as many as there are now."""
    spot_quantile: float = Field(0.25, ge=0, le=1)
    """That quantile."""
    supply: SupplyConfig | None = None
    """Fixed figures instead of measured ones: what decisions = "planned" asks for."""


ExplorationConfig = Annotated[
    NoExplorationConfig | FixedArmConfig | BanditConfig, Field(discriminator="type")
]
