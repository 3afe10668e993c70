"""CLIP score and PickScore against a straightforward computation, on a tiny random CLIP."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spotlight_core.config import ClipScoreRewardConfig, PickScoreRewardConfig
from spotlight_core.errors import BadInputError
from spotlight_core.rewards.base import build_reward
from spotlight_core.rewards.clip_score import ClipScoreReward
from spotlight_core.rewards.pretrained import scoring_device
from tests.core.rewards.prompts import rows

TEXTS = ("a photo of one dog", "red car", "a horse on grass", "black")
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Of the model's own size, so that nothing is resized."""
    return np.random.default_rng(3).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def expected(tiny_clip: Path, images: np.ndarray) -> tuple[list[float], float]:
    """The cosines and the scale, by the model's own forward on tokens and pixels made by hand."""
    from transformers import CLIPModel, PreTrainedTokenizerFast

    model = CLIPModel.from_pretrained(tiny_clip).eval()
    words = PreTrainedTokenizerFast.from_pretrained(tiny_clip).get_vocab()
    cosines = []
    for image, text in zip(images, TEXTS, strict=True):
        pixels = ((image / 255.0 - MEAN) / STD).transpose(2, 0, 1)
        ids = [1, *(words[word] for word in text.split()), 3]
        with torch.no_grad():
            answer = model(
                pixel_values=torch.tensor(pixels[None], dtype=torch.float32), input_ids=torch.tensor([ids])
            )
        cosines.append(float((answer.image_embeds * answer.text_embeds).sum()))
    return cosines, float(np.exp(model.logit_scale.item()))


def test_clip_score_is_the_cosine_at_least_zero(
    tiny_clip: Path, images: np.ndarray, expected: tuple[list[float], float]
) -> None:
    cosines, _ = expected
    assert min(cosines) < 0 < max(cosines)  # both branches are seen
    reward = build_reward(ClipScoreRewardConfig(type="clip_score", path=str(tiny_clip)))
    assert reward.score(images, rows(*TEXTS)) == pytest.approx([max(c, 0.0) for c in cosines], abs=1e-5)
    assert isinstance(reward, ClipScoreReward)
    assert reward.probes(images, rows(*TEXTS))["CLIP"] == pytest.approx(cosines, abs=1e-5)


def test_pickscore_is_scaled_by_the_logit_scale_over_26(
    tiny_clip: Path, images: np.ndarray, expected: tuple[list[float], float]
) -> None:
    cosines, scale = expected
    config = PickScoreRewardConfig(type="pickscore", path=str(tiny_clip), processor=str(tiny_clip))
    reward = build_reward(config)
    assert scale == pytest.approx(np.exp(2.6592), rel=1e-5)
    assert reward.score(images, rows(*TEXTS)) == pytest.approx([c * scale / 26 for c in cosines], abs=1e-5)
    assert reward.score(images, rows(*TEXTS)) == reward.score(images, rows(*TEXTS))


def test_images_of_another_size_are_resized_and_long_texts_are_cut(tiny_clip: Path) -> None:
    reward = build_reward(ClipScoreRewardConfig(type="clip_score", path=str(tiny_clip)))
    assert isinstance(reward, ClipScoreReward)
    large = np.random.default_rng(0).integers(0, 256, (2, 80, 48, 3), dtype=np.uint8)
    half = ["a", "photo", "of", "one", "dog"]
    context = half + half[::-1]  # ten words, two marks: all twelve places
    texts = [" ".join(context), " ".join([*context, "black", "black", "black"])]
    same = np.stack([large[0], large[0]])
    first, second = reward.probes(same, rows(*texts))["CLIP"]
    assert first == second
    shorter = reward.probes(large[:1], rows(" ".join(context[:-1])))["CLIP"]
    assert shorter[0] != pytest.approx(first, abs=1e-4)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(BadInputError, match=f"cannot load the scoring model {missing}"):
        build_reward(ClipScoreRewardConfig(type="clip_score", path=missing))


def test_another_kind_of_model(tiny_mask2former: Path) -> None:
    with pytest.raises(BadInputError, match=r"is a Mask2FormerModel: name a CLIP model"):
        build_reward(ClipScoreRewardConfig(type="clip_score", path=str(tiny_mask2former)))


def test_weights_that_lack_a_parameter_are_not_drawn_at_random(tiny_clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(tiny_clip, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"lack 1 parameters of CLIPModel.*visual_projection\.weight"):
        build_reward(ClipScoreRewardConfig(type="clip_score", path=str(folder)))


def test_pickled_weights_are_refused(tiny_clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(tiny_clip, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match="safetensors"):
        build_reward(ClipScoreRewardConfig(type="clip_score", path=str(folder)))


def test_the_device() -> None:
    assert scoring_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert scoring_device("cpu") == torch.device("cpu")
    for device in ("cuda:99", "abacus"):
        with pytest.raises(BadInputError, match=f"reward.device = '{device}' cannot be used"):
            scoring_device(device)
