"""`spotlight pretrain-tiny`: the embedded model's base weights, from nothing."""

from collections.abc import Callable
from pathlib import Path

from spotlight_core.data.prompts import quoted_target, read_rows
from spotlight_core.diffusion.tiny.pretrain import (
    DEFAULT_CAPTION_NOISE,
    DEFAULT_OPTIMIZER_STEPS,
    pretrain,
)
from spotlight_core.recipes import RECIPES

HELD_OUT = RECIPES / "prompts" / "digits" / "test.txt"
SAY_EVERY = 100


def run_pretraining(
    output: Path,
    *,
    steps: int | None,
    caption_noise: float | None,
    rng_seed: int,
    prompts: Path | None,
    say: Callable[[str], None],
) -> None:
    """Train and write ``output``; the targets of ``prompts`` (the shipped test file) are never drawn."""
    total = steps if steps is not None else DEFAULT_OPTIMIZER_STEPS
    held_out = frozenset(quoted_target(row.text) for row in read_rows(prompts or HELD_OUT))
    losses: list[float] = []

    def on_step(optimizer_step: int, loss: float) -> None:
        losses.append(loss)
        if optimizer_step % SAY_EVERY == 0 or optimizer_step == total:
            recent = losses[-SAY_EVERY:]
            say(f"optimizer step {optimizer_step}/{total}  loss {sum(recent) / len(recent):.4f}")

    pretrain(
        output,
        optimizer_steps=total,
        caption_noise=caption_noise if caption_noise is not None else DEFAULT_CAPTION_NOISE,
        rng_seed=rng_seed,
        held_out=held_out,
        on_step=on_step,
    )
    say(f"weights {output}")
