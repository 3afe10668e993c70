"""Pretraining: reproducible, never draws what is held out, ships weights of the right size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spotlight_core.diffusion.tiny import pretrain as pretrain_module
from spotlight_core.diffusion.tiny.glyphs import draw
from spotlight_core.diffusion.tiny.model import WEIGHTS, TinyQwenImage, unpatchify
from spotlight_core.diffusion.tiny.pretrain import pretrain
from spotlight_core.philox import named_generator
from spotlight_core.weights.digest import weights_digest


def test_two_runs_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain_module, "BATCH", 4)
    torch.set_num_threads(1)
    losses: list[tuple[int, float]] = []
    for name in ("one", "two"):
        pretrain(
            tmp_path / name,
            optimizer_steps=3,
            caption_noise=0.4,
            rng_seed=1,
            on_step=lambda step, loss: losses.append((step, loss)),
        )
    assert losses[:3] == losses[3:]
    assert [step for step, _ in losses] == [1, 2, 3] * 2
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert weights_digest(one) == weights_digest(two)
    TinyQwenImage.from_pretrained(tmp_path / "one")


def test_examples_are_drawn_strings_with_noised_captions_and_nothing_held_out() -> None:
    held_out = frozenset(f"{number:02d}" for number in range(50))
    x0_BSC, captions = pretrain_module._examples(named_generator("test"), 0.0, held_out)
    images = unpatchify(x0_BSC).numpy()
    assert images.shape == (64, 16, 32)
    for image, caption in zip(images, captions.argmax(-1).tolist(), strict=True):
        text = "".join(str(character) for character in caption if character < 10)
        assert text not in held_out
        assert any(np.array_equal(image, draw(text, shift_y=shift)) for shift in (0, 1))


def test_shipped_weights_fit_the_model_and_the_repository() -> None:
    assert WEIGHTS.stat().st_size <= 8 * 2**20
    model = TinyQwenImage.from_pretrained()
    assert sum(parameter.numel() for parameter in model.transformer.parameters()) == 1_405_840
