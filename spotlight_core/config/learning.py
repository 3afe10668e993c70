"""The learning sections: loss, advantage, optimizer, trainer, average."""

from typing import Annotated, Literal

from pydantic import Field

from spotlight_core.config.section import Section


class NftConfig(Section):
    type: Literal["nft"] = "nft"
    """DiffusionNFT (arXiv 2509.16117)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the implicit positive and negative policies."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the squared velocity distance to the base model."""
    old_decay: Literal[0, 1, 2] = 1
    """How the rollout policy follows the trained one: 0 at once, 1 and 2 as in the paper's code."""
    timesteps_per_sample: int = Field(4, ge=1)
    """Training noise levels drawn for each sample in an update."""


class PolicyGradientSection(Section):
    """What the losses on log-probabilities share."""

    clip_low: float = Field(1e-3, gt=0, lt=1)
    """Lower clip range of the ratio."""
    clip_high: float = Field(1e-3, gt=0, lt=1)
    """Upper clip range of the ratio."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight beta of the KL to the base model."""
    kl_form: Literal["per_time", "per_step"] = "per_time"
    """per_step is the exact KL of one denoise step; per_time is that times -dt, as in Flow-GRPO."""
    importance_correction: Literal["none", "truncated"] = "none"
    """Where rollout and training differ in precision the old log-probabilities are computed again in
    the trainer; truncated weighs the loss with the ratio of the two, at most ``importance_cap``."""
    importance_cap: float = Field(2.0, ge=1)
    """Largest weight of the truncated correction."""


class GrpoConfig(PolicyGradientSection):
    type: Literal["grpo"]
    """Flow-GRPO (arXiv 2505.05470)."""


class GrpoGuardConfig(PolicyGradientSection):
    type: Literal["grpo_guard"]
    """GRPO-Guard (arXiv 2510.22319): ratios regulated across denoise steps; with flow_sde only."""
    clip_low: float = Field(2e-6, gt=0, lt=1)
    """Lower clip range of the ratio."""
    clip_high: float = Field(2e-6, gt=0, lt=1)
    """Upper clip range of the ratio."""


LossConfig = Annotated[NftConfig | GrpoConfig | GrpoGuardConfig, Field(discriminator="type")]


class AdvantageConfig(Section):
    std: Literal["group", "global", "none"] = "group"
    """Divide by the std of the group, of the whole iteration, or not at all (Dr. GRPO)."""
    std_kind: Literal["population", "sample"] = "population"
    """Divisor of the variance: K or K - 1; 6 % apart at K = 8."""
    rewards: Literal["sum", "normalise_each"] = "sum"
    """Several rewards: advantages of the weighted sum, or the weighted sum of each reward's advantages."""
    clip: float = Field(5.0, gt=0)
    """Advantages are clipped to plus and minus this."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: float = Field(3e-4, gt=0)
    """AdamW learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly to ``lr``."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW betas."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon; lower it when the gradient RMS nears it."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm clip."""
    updates_per_iteration: int = Field(2, ge=1)
    """Optimizer steps per iteration; the batch is split among them by prompt group."""
    samples_per_forward: int = Field(16, ge=1)
    """Trajectories in one forward and backward, gradients accumulate; fixed, since sums depend on it."""
    timesteps_per_forward: int = Field(1, ge=1)
    """Trained timesteps of a trajectory stacked in one forward and backward."""
    kl_ceiling: float | None = Field(None, gt=0)
    """Skip the rest of an iteration's updates when the approximate KL to the rollout policy exceeds it."""


class TrainerConfig(Section):
    ranks: int = Field(1, ge=1, le=64)
    """Processes of the trainer on a reserved node, one per GPU, sharded with FSDP2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" is cuda where there is a GPU, else cpu; each rank has the GPU of its number."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for a third more time."""


class EmaConfig(Section):
    decay: float = Field(0.9, ge=0, lt=1)
    """Largest decay of the exponential moving average."""
    interval: int = Field(1, ge=1)
    """Optimizer steps between EMA updates."""
