"""The exploration section: how candidate seeds of the next batch are chosen, scored and selected."""

from typing import Annotated, Literal

from pydantic import Field

from spotlight_core.config.section import Section

Selection = Literal["top_bottom", "variance_max", "top_only", "random"]


class NoExplorationConfig(Section):
    type: Literal["none"] = "none"
    """Plain seeds."""


class ExplorationSection(Section):
    """What all ways to explore share."""

    selection: Selection = "top_bottom"
    """Which explored seeds are rolled out: as many of the best as of the worst, those whose rewards vary
    most, the best alone, or any."""
    seeds_per_request: int = Field(16, ge=1)
    """Micro-batch of an exploration request."""
    unexplored_prompts: int = Field(1, ge=0)
    """Prompts of a batch that keep plain seeds, to measure what exploration brings."""
    audit_every: int = Field(4, ge=0)
    """Iterations between audits of the rank correlation; 0 for never."""


class FixedArmConfig(ExplorationSection):
    type: Literal["fixed_arm"]
    """Explore the same number of seeds at the same effective steps every iteration."""
    seeds_per_prompt: int = Field(32, ge=2, le=4096)
    """Candidate seeds d explored for each prompt."""
    effective_steps: int = Field(8, ge=1)
    """Denoise steps computed per candidate; the others reuse the last velocity."""


ExplorationConfig = Annotated[NoExplorationConfig | FixedArmConfig, Field(discriminator="type")]
