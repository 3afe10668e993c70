"""Each family's whole stock pipeline at a random tiny size, made on the spot: no network, no downloads.

Text encoders, tokenizers, VAE, transformer and scheduler are the classes that the published models use;
only sizes and weights differ.  Images are 32 x 48, so that a mixed-up height and width shows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from spotlight_core.config.model import FluxConfig, QwenImageConfig, SD3Config, WanConfig

FamilyConfig = QwenImageConfig | FluxConfig | SD3Config | WanConfig

FAMILIES = ("qwen_image", "flux", "sd3", "wan")
HEIGHT, WIDTH, FRAMES = 32, 48, 5
MAX_TEXT_TOKENS = 64
LATENT_CHANNELS = 4
RNG_SEED = 3
PIPELINES: dict[str, Any] = {
    "qwen_image": QwenImagePipeline,
    "flux": FluxPipeline,
    "sd3": StableDiffusion3Pipeline,
    "wan": WanPipeline,
}
# The words of Qwen-Image's template, so that it takes as many tokens (34) as the pipeline skips.
QWEN_WORDS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\nassistant\n"
)
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LATENT_STATISTICS = {
    "latents_mean": [0.1, -0.2, 0.3, -0.4],
    "latents_std": [1.5, 0.8, 1.2, 0.9],
}


def recipe(family: str, folder: Path, **overrides: Any) -> FamilyConfig:
    """The model section for the pipeline in ``folder``."""
    sizes = {"height": HEIGHT, "width": WIDTH, "max_text_tokens": MAX_TEXT_TOKENS}
    fields = {"type": family, "path": str(folder), **sizes, **overrides}
    if family == "wan":
        fields.setdefault("frames", FRAMES)
    configs: dict[str, type[FamilyConfig]] = {
        "qwen_image": QwenImageConfig,
        "flux": FluxConfig,
        "sd3": SD3Config,
        "wan": WanConfig,
    }
    return configs[family].model_validate(fields)


def stock_pipeline(family: str, folder: Path) -> Any:
    """The family's own pipeline from ``folder``, in fp32, silent."""
    pipeline = PIPELINES[family].from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_pixels(pipeline: Any, config: FamilyConfig, **call: Any) -> torch.Tensor:
    """What the stock pipeline draws: ``[B, 3, H, W]`` or ``[B, 3, F, H, W]`` in 0..1.

    ``call`` holds at least ``prompt`` (a list), ``latents`` and ``num_inference_steps``.
    """
    guidance: dict[str, Any] = {
        "true_cfg_scale" if isinstance(config, QwenImageConfig) else "guidance_scale": config.guidance
    }
    negative = [config.negative_prompt] * len(call["prompt"])
    if not isinstance(config, FluxConfig):
        guidance["negative_prompt"] = negative
    if isinstance(config, WanConfig):
        guidance["num_frames"] = config.frames
    drawn = pipeline(
        height=config.height,
        width=config.width,
        max_sequence_length=config.max_text_tokens,
        output_type="pt",
        return_dict=False,
        **guidance,
        **call,
    )[0]
    return drawn.movedim(2, 1) if isinstance(config, WanConfig) else drawn


def save_pipeline(family: str, folder: Path) -> Path:
    """Write the family's tiny pipeline into ``folder`` (made); returns ``folder``."""
    builders: dict[str, Callable[[], Any]] = {
        "qwen_image": qwen_image,
        "flux": flux,
        "sd3": sd3,
        "wan": wan,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RNG_SEED)
        builders[family]().save_pretrained(folder)
    return folder


def qwen_image() -> QwenImagePipeline:
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(  # as published
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **LATENT_STATISTICS,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(_qwen_text_config()),
        tokenizer=_qwen_tokenizer(),
    )


def flux(guidance_embeds: bool = True) -> FluxPipeline:
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, max_shift=1.15, use_dynamic_shifting=True),
        vae=_image_vae(),
        text_encoder=CLIPTextModel(_clip_config()),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=T5EncoderModel(_t5_config()),
        tokenizer_2=_t5_tokenizer(),
    )


def sd3() -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(),
        text_encoder=CLIPTextModelWithProjection(_clip_config(hidden_size=16)),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(hidden_size=16)),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=T5EncoderModel(_t5_config()),
        tokenizer_3=_t5_tokenizer(),
    )


def wan() -> WanPipeline:
    return WanPipeline(
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **LATENT_STATISTICS,
        ),
        text_encoder=UMT5EncoderModel(UMT5Config(**_t5_sizes())),
        tokenizer=_t5_tokenizer(),
    )


def _image_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4, 4, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=HEIGHT,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def _qwen_text_config() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 600,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    )


def _qwen_tokenizer() -> Qwen2Tokenizer:
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [QWEN_WORDS], BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"] | {token: len(model["vocab"]) + i for i, token in enumerate(QWEN_SPECIAL)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in model["merges"]],
        additional_special_tokens=QWEN_SPECIAL[1:],
    )


def _clip_config(hidden_size: int = 32) -> CLIPTextConfig:
    vocabulary = _clip_vocabulary()
    return CLIPTextConfig(
        hidden_size=hidden_size,
        intermediate_size=32,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(vocabulary),
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
    )


def _clip_vocabulary() -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return {word: index for index, word in enumerate(words)}


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=77)


def _t5_vocabulary() -> list[tuple[str, float]]:
    letters = [chr(code) for code in range(33, 127)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return [*special, ("▁", -1.0), *((letter, -2.0) for letter in letters)]


def _t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer(
        vocab=_t5_vocabulary(), extra_ids=0, additional_special_tokens=[], model_max_length=512
    )


def _t5_sizes() -> dict[str, Any]:
    return {
        "vocab_size": len(_t5_vocabulary()),
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def _t5_config() -> T5Config:
    return T5Config(**_t5_sizes())
