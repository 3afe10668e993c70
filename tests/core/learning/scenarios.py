"""Small recipes, models and groups for the trainer's tests, alike in every process."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file

from spotlight_core.arrays import Arrays
from spotlight_core.config import RunConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.families import MMDIT_ATTENTION
from spotlight_core.diffusion.models.precision import Role, precision
from spotlight_core.diffusion.models.trainable import prepare_policy
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.digest import weights_digest
from spotlight_core.windows import sde_window

Tree = dict[str, Any]
LORA: Tree = {"model": {"type": "tiny", "lora": {"rank": 2, "alpha": 4.0}}}
NFT: Tree = {
    "loss": {"type": "nft", "timesteps_per_sample": 2},
    "sampler": {"type": "ode", "denoise_steps": 4},
    "optimizer": {"lr": 1e-3, "updates_per_iteration": 2, "samples_per_forward": 4},
}
GRPO: Tree = {
    "loss": {"type": "grpo"},
    "sampler": {
        "type": "flow_sde",
        "denoise_steps": 4,
        "window": {"type": "fixed", "first": 0, "end": 2},
    },
    "optimizer": {"lr": 1e-3, "updates_per_iteration": 2, "samples_per_forward": 4},
}
GUARD: Tree = GRPO | {"loss": {"type": "grpo_guard", "kl_weight": 0.01}}


def config(tree: Tree, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "t", "iterations": 1, "data": {"prompts": "."}} | tree | changes)


def with_optimizer(tree: Tree, **changes: object) -> RunConfig:
    return config(tree, optimizer=tree["optimizer"] | changes)


class Guided(TinyQwenImage):
    """Two forwards in each velocity, as classifier-free guidance has them."""

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        v_BSC = super().velocity(x_BSC, sigma_B, text)
        nothing = TextEmbeddings(tokens_BLD=torch.zeros_like(text.tokens_BLD))
        v_negative_BSC = super().velocity(x_BSC, sigma_B, nothing)
        return v_negative_BSC + 2.0 * (v_BSC - v_negative_BSC)


def small_model(recipe: RunConfig, seed: int = 0, role: Role = "training") -> TinyQwenImage:
    """The embedded model's transformer at two blocks and 30 thousand parameters, with the recipe's LoRA."""
    asked = precision(recipe.model, role)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        patch_size=8,
        in_channels=64,
        out_channels=1,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    if asked.weights is not torch.float32:
        transformer.to(asked.weights)
    prepare_policy(
        transformer,
        recipe.model,
        role,
        MMDIT_ATTENTION,
        gradient_checkpointing=role == "training" and recipe.trainer.gradient_checkpointing,
    )
    return (Guided if recipe.name == "guided" else TinyQwenImage)(transformer, asked)


def rollout(recipe: RunConfig, model: TinyQwenImage, prompt: str, occurrence: str) -> Arrays:
    request = GenerationRequest(
        id=occurrence,
        kind="rollout",
        prompts=(Prompt(occurrence=occurrence, text=prompt),),
        seeds=(0, 1, 2, 3),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=Fidelity(
            denoise_steps=recipe.sampler.denoise_steps,
            sde_steps=sde_window(recipe.sampler, recipe.rng_seed, 0, occurrence),
        ),
    )
    engine = DenoiseEngine(model, recipe.sampler, recipe.rng_seed, record_means=True)
    outcome = engine.generate(request)
    assert isinstance(outcome, Generated)
    return outcome.arrays


def small_groups(
    recipe: RunConfig, count: int = 3, constant: tuple[int, ...] = (), model: TinyQwenImage | None = None
) -> list[TrainingGroup]:
    """``count`` groups of four, those in ``constant`` without variance."""
    model = model or small_model(recipe)
    return [
        TrainingGroup(
            prompt=f'A "{number}7"',
            rewards=np.full(4, 0.5) if number in constant else np.array([0.0, 1.0, 0.25, 0.5]),
            arrays=rollout(recipe, model, f'A "{number}7"', f"p{number}"),
            sde_steps=sde_window(recipe.sampler, recipe.rng_seed, 0, f"p{number}"),
        )
        for number in range(count)
    ]


def spoilt(groups: list[TrainingGroup], which: int) -> list[TrainingGroup]:
    """The same with a NaN in one group's final latents."""
    groups = copy.deepcopy(groups)
    groups[which].arrays["x0"][0, 0, 0] = np.nan
    if "x_TBSC" in groups[which].arrays:
        groups[which].arrays["x_TBSC"][0, 0, 0, 0] = np.nan
    return groups


def state_digest(trainer: PolicyTrainer) -> str:
    """Of everything that a checkpoint of one rank holds."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        return weights_digest(load_file(Path(folder) / "rank-00000.safetensors"))
