"""The linear layers of each family's blocks, from its transformer's own settings: for plans, without torch.

Names are diffusers'.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spotlight_core.config import LoraConfig
from spotlight_core.diffusion.models.families import ATTENTION, FAMILIES, MMDIT_ATTENTION
from spotlight_core.estimates.published import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer."""

    name: str
    inputs: int
    outputs: int


def width(settings: Settings) -> int:
    """Channels between the blocks."""
    return int(settings["num_attention_heads"]) * int(settings["attention_head_dim"])


def depth(settings: Settings) -> int:
    """Blocks of all kinds."""
    return int(settings["num_layers"]) + int(settings.get("num_single_layers", 0))


def linear_layers(family: str, settings: Settings) -> Iterator[Linear]:
    """The linear layers inside of the transformer's blocks."""
    yield from {"qwen_image": _qwen_image, "flux": _flux, "sd3": _sd3, "wan": _wan}[family](settings)


def lora_parameters(family: str, settings: Settings, lora: LoraConfig) -> int:
    """Weights of the adapters: r (inputs + outputs) for each adapted layer."""
    targets = lora.target_modules or FAMILIES[family].lora_targets
    adapted = (
        layer
        for layer in linear_layers(family, settings)
        if any(layer.name == target or layer.name.endswith(f".{target}") for target in targets)
    )
    return lora.rank * sum(layer.inputs + layer.outputs for layer in adapted)


def forward_flops(family: str, settings: Settings, image_tokens: int, text_tokens: int) -> float:
    """Floating-point operations of one forward of one row: two for each weight and token it meets, and
    the products of attention; norms and embeddings are left out."""
    tokens = {"image": image_tokens, "text": text_tokens, "both": image_tokens + text_tokens, "row": 1}
    linear = sum(
        2.0 * layer.inputs * layer.outputs * tokens[_stream(layer.name)]
        for layer in linear_layers(family, settings)
    )
    both = image_tokens + text_tokens
    pairs = float(depth(settings) * both * both)
    if family == "wan":  # to itself, and to the text
        pairs = float(depth(settings) * image_tokens * both)
    elif family == "sd3":
        pairs += len(settings.get("dual_attention_layers") or ()) * image_tokens**2
    return linear + 4.0 * width(settings) * pairs


def _stream(name: str) -> Literal["image", "text", "both", "row"]:
    """Which tokens a layer works on; modulations take the timestep, one vector a row."""
    if "_mod." in name or ".norm" in name:
        return "row"
    if any(part in name for part in ("txt_", "ff_context", ".add_", "to_add_out")):
        return "text"
    if name.endswith((".attn2.to_k", ".attn2.to_v")) and name.startswith("blocks."):
        return "text"  # Wan's cross-attention
    return "both" if name.startswith("single_") else "image"


def _square(prefix: str, names: tuple[str, ...], channels: int) -> Iterator[Linear]:
    for name in names:
        yield Linear(name=f"{prefix}.{name}", inputs=channels, outputs=channels)


def _mlp(prefix: str, channels: int, hidden: int) -> Iterator[Linear]:
    yield Linear(name=f"{prefix}.net.0.proj", inputs=channels, outputs=hidden)
    yield Linear(name=f"{prefix}.net.2", inputs=hidden, outputs=channels)


def _qwen_image(settings: Settings) -> Iterator[Linear]:
    channels = width(settings)
    for block in range(settings["num_layers"]):
        here = f"transformer_blocks.{block}"
        yield from _square(here, MMDIT_ATTENTION, channels)
        for stream in ("img", "txt"):
            yield Linear(name=f"{here}.{stream}_mod.1", inputs=channels, outputs=6 * channels)
            yield from _mlp(f"{here}.{stream}_mlp", channels, 4 * channels)


def _flux(settings: Settings) -> Iterator[Linear]:
    channels = width(settings)
    for block in range(settings["num_layers"]):
        here = f"transformer_blocks.{block}"
        yield from _square(here, MMDIT_ATTENTION, channels)
        for norm in ("norm1", "norm1_context"):
            yield Linear(name=f"{here}.{norm}.linear", inputs=channels, outputs=6 * channels)
        for mlp in ("ff", "ff_context"):
            yield from _mlp(f"{here}.{mlp}", channels, 4 * channels)
    for block in range(settings["num_single_layers"]):
        here = f"single_transformer_blocks.{block}"
        yield from _square(f"{here}.attn", ("to_q", "to_k", "to_v"), channels)
        yield Linear(name=f"{here}.norm.linear", inputs=channels, outputs=3 * channels)
        yield Linear(name=f"{here}.proj_mlp", inputs=channels, outputs=4 * channels)
        yield Linear(name=f"{here}.proj_out", inputs=5 * channels, outputs=channels)


def _sd3(settings: Settings) -> Iterator[Linear]:
    channels, blocks = width(settings), settings["num_layers"]
    dual = settings.get("dual_attention_layers") or ()
    for block in range(blocks):
        here, last = f"transformer_blocks.{block}", block == blocks - 1
        # The last block leaves the text stream alone.
        yield from _square(here, MMDIT_ATTENTION[:-1] if last else MMDIT_ATTENTION, channels)
        norms = 9 if block in dual else 6
        yield Linear(name=f"{here}.norm1.linear", inputs=channels, outputs=norms * channels)
        context = 2 if last else 6
        yield Linear(name=f"{here}.norm1_context.linear", inputs=channels, outputs=context * channels)
        if block in dual:
            yield from _square(f"{here}.attn2", ATTENTION, channels)
        for mlp in ("ff",) if last else ("ff", "ff_context"):
            yield from _mlp(f"{here}.{mlp}", channels, 4 * channels)


def _wan(settings: Settings) -> Iterator[Linear]:
    channels = width(settings)
    for block in range(settings["num_layers"]):
        for attention in ("attn1", "attn2"):
            yield from _square(f"blocks.{block}.{attention}", ATTENTION, channels)
        yield from _mlp(f"blocks.{block}.ffn", channels, int(settings["ffn_dim"]))
