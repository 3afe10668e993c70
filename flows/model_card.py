"""The README.md of an exported policy: a Hugging Face model card.

A function of the recipe and the run's own numbers: no dates and no paths of a machine, so two exports
of one policy are equal to the byte.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight_core.config import (
    DiffusersModelConfig,
    FamilyConfig,
    RunConfig,
    WanConfig,
    WeightedRewardConfig,
)
from spotlight_core.data.requirements import single_rewards
from spotlight_core.diffusion.models.families import FAMILIES, guided
from spotlight_core.types import Evaluation, PolicyVersion

TAG = "spotlight"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the run says of the exported policy; ``evaluated`` is None where it was not evaluated itself."""

    policy: PolicyVersion
    base: Evaluation | None
    evaluated: Evaluation | None
    usd: float | None
    prompt: str
    """A held-out prompt for the snippet."""


def public_recipe(config: RunConfig) -> dict[str, Any]:
    """The resolved recipe without what belongs to a machine: paths keep their last name, services go."""
    tree = config.model_dump(mode="json", exclude={"services"})
    return {key: _without_folders(value) for key, value in tree.items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def model_card(config: RunConfig, facts: CardFacts) -> str:
    """The whole card."""
    sections = [
        _front_matter(config),
        f"# {config.name}",
        _introduction(config),
        _scores(config, facts),
        "## Load it",
        _usage(config, facts.prompt),
        "## How it was trained",
        _training(config, facts),
        "The whole recipe is in `recipe.json`.",
    ]
    return "\n\n".join(sections) + "\n"


# -- what it is --------------------------------------------------------------------------------------------


def _front_matter(config: RunConfig) -> str:
    kind = "text-to-video" if isinstance(config.model, WanConfig) else "text-to-image"
    base = _hub_id(config)
    lines = [f"base_model: {base}"] if base else []
    if base and config.model.lora:
        lines.append("base_model_relation: adapter")
    elif base:
        lines.append("base_model_relation: finetune")
    lines += ["library_name: diffusers", f"pipeline_tag: {kind}", "tags:"]
    tags = [*(["lora"] if config.model.lora else []), kind, "reinforcement-learning", TAG]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---"])


def _hub_id(config: RunConfig) -> str | None:
    model = config.model
    if not isinstance(model, DiffusersModelConfig) or Path(model.path).is_absolute():
        return None
    return model.path


def _base_name(config: RunConfig) -> str:
    model = config.model
    if not isinstance(model, DiffusersModelConfig):
        return "Spotlight's embedded model, which draws digits"
    hub_id = _hub_id(config)
    revision = f" at revision {model.revision}" if model.revision else ""
    return f"[{hub_id}](https://huggingface.co/{hub_id}){revision}" if hub_id else Path(model.path).name


def _introduction(config: RunConfig) -> str:
    what = "A LoRA adapter for" if config.model.lora else "The transformer of"
    rewards = " and ".join(single.type for single in single_rewards(config.reward))
    return f"{what} {_base_name(config)}, post-trained with {config.loss.type} for the reward {rewards}."


def _scores(config: RunConfig, facts: CardFacts) -> str:
    rows = ["| held-out prompts | base model | this policy |", "| --- | ---: | ---: |"]
    held_out = config.evaluation.held_out_reward.type
    for name, key in ((f"{config.reward.type} (trained for)", "score"), (f"{held_out} (never)", "held_out")):
        shown = (
            "–" if each is None else f"{getattr(each, key):.4f}" for each in (facts.base, facts.evaluated)
        )
        rows.append(f"| {name} | {' | '.join(shown)} |")
    images = [
        "not evaluated" if each is None else f"{each.images} images" for each in (facts.base, facts.evaluated)
    ]
    return "\n".join([*rows, f"| | {' | '.join(images)} |"])


# -- how it was made ---------------------------------------------------------------------------------------


def _training(config: RunConfig, facts: CardFacts) -> str:
    data, sampler, lora = config.data, config.sampler, config.model.lora
    trained = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}" if lora else "all weights"
    rewards: str = config.reward.type
    if isinstance(config.reward, WeightedRewardConfig):
        rewards = " + ".join(f"{part.weight:g} × {part.reward.type}" for part in config.reward.parts)
    level = f", noise level {sampler.noise_level:g}" if sampler.type != "ode" else ""
    rows = {
        "iterations": f"{facts.policy.number} of {config.iterations}",
        "seed": str(config.rng_seed),
        "trained": trained,
        "loss": config.loss.type,
        "reward": rewards,
        "batch": f"{data.prompts_per_iteration} prompts × {data.seeds_per_prompt} seeds",
        "sampler": f"{sampler.type}, {sampler.denoise_steps} steps{level}",
        "optimizer": f"AdamW, learning rate {config.optimizer.lr:g}",
        "average": f"EMA, decay {config.ema.decay:g} every {config.ema.interval} steps",
        "weights": f"`{facts.policy.name}`, sha256 `{facts.policy.digest}`",
        "cost": "unknown" if facts.usd is None else f"${facts.usd:.2f} at the recipe's prices",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())])


# -- how it is used ----------------------------------------------------------------------------------------


def _usage(config: RunConfig, prompt: str) -> str:
    model = config.model
    if not isinstance(model, DiffusersModelConfig):
        lines = [
            "from diffusers import QwenImageTransformer2DModel",
            "",
            'here = "."  # this folder, or its hub id',
            'transformer = QwenImageTransformer2DModel.from_pretrained(here, subfolder="transformer")',
        ]
        if model.lora:
            lines += [
                'weights = "pytorch_lora_weights.safetensors"',
                "transformer.load_lora_adapter(here, weight_name=weights)",
            ]
        return _python(lines)
    family = FAMILIES[model.type]
    pipeline, transformer = family.pipeline, family.transformer
    names = pipeline if model.lora else f"{pipeline}, {transformer}"
    dtype = "torch.bfloat16" if model.rollout_dtype == "bf16" else "torch.float32"
    base = _hub_id(config)
    base_line = (
        f"base = {json.dumps(base)}" if base else f"base = {json.dumps(Path(model.path).name)}  # its folder"
    )
    revision = f", revision={json.dumps(model.revision)}" if model.revision else ""
    lines = [
        "import torch",
        f"from diffusers import {names}",
        "",
        base_line,
        'here = "."  # this folder, or its hub id',
    ]
    loaded = f"{pipeline}.from_pretrained(base{revision}, dtype={dtype}"
    if model.lora:
        lines += [f"pipeline = {loaded})", "pipeline.load_lora_weights(here)"]
    else:
        lines += [
            f"transformer = {transformer}.from_pretrained(",
            f'    here, subfolder="transformer", dtype={dtype}',
            ")",
            f"pipeline = {loaded}, transformer=transformer)",
        ]
    lines += [*_schedule(config), 'pipeline.to("cuda" if torch.cuda.is_available() else "cpu")', ""]
    return _python([*lines, *_call(config, model, prompt)])


def _schedule(config: RunConfig) -> list[str]:
    shift = config.sampler.shift
    if shift is None:
        return []
    return [
        "pipeline.scheduler = type(pipeline.scheduler).from_config(",
        f"    pipeline.scheduler.config, use_dynamic_shifting=False, shift={shift:g}",
        ")",
    ]


def _call(config: RunConfig, model: FamilyConfig, prompt: str) -> list[str]:
    steps = config.evaluation.denoise_steps or config.sampler.denoise_steps
    settings: Mapping[str, Any] = {
        "prompt": prompt,
        "height": model.height,
        "width": model.width,
        "num_inference_steps": steps,
        "true_cfg_scale" if model.type == "qwen_image" else "guidance_scale": model.guidance,
        "max_sequence_length": model.max_text_tokens,
    }
    if guided(model):
        settings = {**settings, "negative_prompt": model.negative_prompt}
    if isinstance(model, WanConfig):
        settings = {**settings, "num_frames": model.frames, "output_type": "pil"}
    arguments = [f"    {name}={_literal(value)}," for name, value in settings.items()]
    if isinstance(model, WanConfig):
        return ["frames = pipeline(", *arguments, ").frames[0]", 'frames[0].save("first_frame.png")']
    return ["image = pipeline(", *arguments, ").images[0]", 'image.save("image.png")']


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _python(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])
