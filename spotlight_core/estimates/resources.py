"""What a run will take, estimated from the recipe before anything is loaded: operations, seconds, memory.

Nothing here was measured.  Operations are exact counts of the blocks' matrix products; seconds follow
from a GPU's peak and a share of it; activations follow Korthikanti et al. (arXiv 2205.05198): about 34
bytes a channel, token and block at 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight_core.config import (
    BanditConfig,
    FamilyConfig,
    FluxConfig,
    NftConfig,
    NoExplorationConfig,
    RunConfig,
    SD3Config,
    WanConfig,
)
from spotlight_core.diffusion.models.families import guided
from spotlight_core.errors import BadInputError
from spotlight_core.estimates.layers import depth, forward_flops, lora_parameters, width
from spotlight_core.estimates.published import ModelSize
from spotlight_core.estimates.sizes import image_tokens
from spotlight_core.exploration.planner import arms_of

GIB = 2**30
UTILISATION = 0.4
ACTIVATION_BYTES = 34  # a channel, token and block, at two bytes a number, with fused attention
BACKWARD = 2  # a backward pass in forwards
DTYPE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Published peaks: dense bf16, fp32 as torch multiplies by default, and memory."""

    bf16_tflops: float
    fp32_tflops: float
    memory_gib: float


GPUS: Mapping[str, Gpu] = {
    "A100": Gpu(bf16_tflops=312, fp32_tflops=19.5, memory_gib=80),
    "L40S": Gpu(bf16_tflops=362, fp32_tflops=91.6, memory_gib=48),
    "H100": Gpu(bf16_tflops=989, fp32_tflops=67, memory_gib=80),
    "H200": Gpu(bf16_tflops=989, fp32_tflops=67, memory_gib=141),
    "B200": Gpu(bf16_tflops=2250, fp32_tflops=80, memory_gib=180),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Forwards of one row in an iteration, guidance counted: ``trained`` have a backward pass."""

    rollout: int
    explore: int
    evaluate: float
    trained: int
    untrained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of one iteration on the whole fleet, without text, VAE, rewards, copies and waiting."""

    rollout: float
    train: float
    explore: float
    evaluate: float

    @property
    def iteration(self) -> float:
        """Exploration runs while the reserved nodes train."""
        return self.rollout + max(self.train, self.explore) + self.evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one GPU of the trainer, and of a rollout's model and latents beside or without it."""

    text_encoders: float
    frozen: float
    trained: float
    gradients: float
    optimizer: float
    average: float
    kept: float
    activations: float
    rollout: float

    @property
    def training(self) -> float:
        return (
            self.text_encoders
            + self.frozen
            + self.trained
            + self.gradients
            + self.optimizer
            + self.average
            + self.kept
            + self.activations
        )


def gpu_named(name: str) -> Gpu:
    """The GPU of that name; BadInputError names those there are."""
    try:
        return GPUS[name.upper()]
    except KeyError:
        raise BadInputError(f"no speed is known for GPU {name!r}", f"give one of {', '.join(GPUS)}") from None


def trained_timesteps(config: RunConfig) -> int:
    """Timesteps T that are trained of each sample."""
    if isinstance(config.loss, NftConfig):
        return config.loss.timesteps_per_sample
    return 0 if config.sampler.type == "ode" else config.sampler.trained_per_sample


def untrained_forwards(config: RunConfig) -> int:
    """Forwards without gradients beside each trained one."""
    reference = config.loss.kl_weight > 0
    if isinstance(config.loss, NftConfig):
        return 1 + reference  # the old policy's velocity
    return reference + (config.model.rollout_dtype != config.model.training_dtype)


def token_counts(model: FamilyConfig, size: ModelSize) -> tuple[int, int]:
    """Image and text tokens of one row, text as long as the family pads it, or 64 where it does not."""
    patches = image_tokens(model, size)
    if isinstance(model, WanConfig):
        return patches, 512
    if isinstance(model, FluxConfig):
        return patches, model.max_text_tokens
    if isinstance(model, SD3Config):
        return patches, 77 + model.max_text_tokens  # CLIP's tokens and T5's
    return patches, min(64, model.max_text_tokens)


def work_of(config: RunConfig, model: FamilyConfig) -> Work:
    """The forwards of an iteration; an evaluation's are spread over the iterations between two."""
    data, evaluation, arm = config.data, config.evaluation, config.exploration
    rows = 2 if guided(model) else 1
    samples = data.prompts_per_iteration * data.seeds_per_prompt
    explored = 0
    if not isinstance(arm, NoExplorationConfig):  # a bandit's largest arm, which may not fit beside training
        largest = max(
            each.seeds_per_prompt * each.effective_steps
            for each in (
                arms_of(arm, data.seeds_per_prompt, config.sampler.denoise_steps)
                if isinstance(arm, BanditConfig)
                else (arm,)
            )
        )
        explored = (data.prompts_per_iteration - arm.unexplored_prompts) * largest
    trained = samples * trained_timesteps(config)
    evaluated = evaluation.images * (evaluation.denoise_steps or config.sampler.denoise_steps)
    return Work(
        rollout=samples * config.sampler.denoise_steps * rows,
        explore=explored * rows,
        evaluate=evaluated * rows / evaluation.every,
        trained=trained * rows,
        untrained=trained * untrained_forwards(config) * rows,
    )


def seconds_of(config: RunConfig, model: FamilyConfig, size: ModelSize, gpu: Gpu) -> Seconds:
    """Rollout and evaluation use every node, training the trainer's GPUs, exploration the spot nodes."""
    work, fleet = work_of(config, model), config.fleet
    flops = forward_flops(model.type, size.settings, *token_counts(model, size))

    def seconds(forwards: float, gpus: int, dtype: str) -> float:
        peak = gpu.bf16_tflops if dtype == "bf16" else gpu.fp32_tflops
        return forwards * flops / (peak * 1e12 * UTILISATION * max(gpus, 1))

    every = fleet.reserved_nodes + fleet.spot_nodes
    passes = 1 + BACKWARD + config.trainer.gradient_checkpointing
    training = work.trained * passes + work.untrained
    return Seconds(
        rollout=seconds(work.rollout, every, model.rollout_dtype),
        train=seconds(training, config.trainer.ranks, model.training_dtype),
        explore=seconds(work.explore, fleet.spot_nodes or every, model.rollout_dtype),
        evaluate=seconds(work.evaluate, every, model.rollout_dtype),
    )


def memory_of(config: RunConfig, model: FamilyConfig, size: ModelSize) -> Memory:
    """Bytes on one GPU; weights, gradients and states are sharded over the trainer's ranks."""
    ranks, trained = config.trainer.ranks, trained_parameters(model, size)
    frozen = size.transformer * DTYPE_BYTES[model.training_dtype] if model.lora else 0
    copies = int(isinstance(config.loss, NftConfig))
    if model.lora is None:
        copies += config.loss.kl_weight > 0  # under LoRA the reference is the frozen base itself
    rollout = (size.transformer + size.text_encoders) * DTYPE_BYTES[model.rollout_dtype]
    return Memory(
        text_encoders=size.text_encoders * DTYPE_BYTES[model.training_dtype],  # whole on every rank
        frozen=frozen / ranks,
        trained=4 * trained / ranks,
        gradients=4 * trained / ranks,
        optimizer=8 * trained / ranks,
        average=4 * trained / ranks,
        kept=4 * trained * copies / ranks,
        activations=_activations(config, model, size),
        rollout=rollout + 4 * size.vae,  # which decodes in fp32 always
    )


def disk_of(config: RunConfig, trained: int) -> int:
    """Bytes of two checkpoints, of a third while it is written, and of four published versions."""
    kept = isinstance(config.loss, NftConfig)
    checkpoint = 4 + kept  # trained, average, two moments, and the old policy
    return 4 * trained * (3 * checkpoint + 4)


def trained_parameters(model: FamilyConfig, size: ModelSize) -> int:
    """Those of the adapters, or of the whole transformer."""
    if model.lora is None:
        return size.transformer
    return lora_parameters(model.type, size.settings, model.lora)


def _activations(config: RunConfig, model: FamilyConfig, size: ModelSize) -> float:
    optimizer = config.optimizer
    samples = config.data.prompts_per_iteration * config.data.seeds_per_prompt
    rows = min(optimizer.samples_per_forward, samples) * min(
        optimizer.timesteps_per_forward, trained_timesteps(config)
    )
    channels = rows * (2 if guided(model) else 1) * sum(token_counts(model, size)) * width(size.settings)
    number = DTYPE_BYTES[model.training_dtype]
    block = channels * ACTIVATION_BYTES * number / 2
    if config.trainer.gradient_checkpointing:
        return depth(size.settings) * channels * number + block
    return depth(size.settings) * block
