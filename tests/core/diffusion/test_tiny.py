"""The embedded model: what its stand-ins for VAE and text encoder compute, and that its weights are whole."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight_core.diffusion.tiny.glyphs import draw
from spotlight_core.diffusion.tiny.model import (
    WEIGHTS,
    TinyQwenImage,
    build_transformer,
    check_text,
    embed_text,
    patchify,
    unpatchify,
)
from spotlight_core.diffusion.tiny.pretrain import pretrain
from spotlight_core.errors import BadInputError


@pytest.fixture(scope="module")
def model() -> TinyQwenImage:
    torch.manual_seed(0)
    return TinyQwenImage(build_transformer())


def test_a_token_is_an_8_by_8_patch_in_reading_order() -> None:
    image = torch.arange(2 * 16 * 32, dtype=torch.float32).reshape(2, 16, 32)
    tokens = patchify(image)
    assert tokens.shape == (2, 8, 64)
    for batch, row, column, i, j in itertools.product(range(2), range(2), range(4), range(8), range(8)):
        pixel = batch * 512 + (row * 8 + i) * 32 + column * 8 + j
        assert tokens[batch, row * 4 + column, i * 8 + j] == pixel


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 2**31))
def test_unpatchify_is_the_inverse_of_patchify(batch: int, rng_seed: int) -> None:
    numbers = np.random.default_rng(rng_seed).standard_normal((batch, 16, 32), dtype=np.float32)
    image = torch.from_numpy(numbers)
    assert torch.equal(unpatchify(patchify(image)), image)
    tokens = image.reshape(batch, 8, 64)
    assert torch.equal(patchify(unpatchify(tokens)), tokens)


def test_text_is_one_hot_digits_then_end_marks() -> None:
    embedding = embed_text(["407", "19"])
    assert embedding.shape == (2, 5, 16)
    assert embedding.dtype == torch.float32
    assert embedding.argmax(-1).tolist() == [[4, 0, 7, 10, 10], [1, 9, 10, 10, 10]]
    assert embedding.sum(-1).tolist() == [[1.0] * 5] * 2


def test_a_prompt_is_encoded_by_its_quoted_target_alone(model: TinyQwenImage) -> None:
    encoded = model.encode(['A ticket that reads "407"', 'The number "407" on a bus'])
    assert torch.equal(encoded.tokens_BLD[0], encoded.tokens_BLD[1])
    assert torch.equal(encoded.tokens_BLD[:1], embed_text(["407"]))
    assert encoded.mask_BL is None


@pytest.mark.parametrize("text", ["", "12345", "4a7", "4 7", "-1", "٤"])
def test_text_beyond_the_embedded_model_is_refused(text: str) -> None:
    with pytest.raises(BadInputError) as caught:
        check_text(text)
    assert f'"{text}"' in caught.value.problem
    assert "1 to 4 of the characters 0123456789" in caught.value.remedy


def test_decoding_maps_minus_one_to_black_and_one_to_white_and_clamps(model: TinyQwenImage) -> None:
    image = torch.zeros(1, 16, 32)
    image[0, 0, :5] = torch.tensor([-1.0, 1.0, -3.0, 3.0, 0.5])
    decoded = model.decode(patchify(image))
    assert decoded.dtype == np.uint8
    assert decoded.shape == (1, 16, 32, 3)
    # (x + 1) * 127.5, rounded half to even: 0 -> 127.5 -> 128, 0.5 -> 191.25 -> 191.
    assert decoded[0, 0, :5].tolist() == [[0] * 3, [255] * 3, [0] * 3, [255] * 3, [191] * 3]
    assert (decoded[0, 1:] == 128).all()


def test_a_drawn_image_survives_the_way_through_the_latents(model: TinyQwenImage) -> None:
    drawn = draw("407")
    expected = np.repeat(np.round((drawn + 1.0) * 127.5).astype(np.uint8)[..., None], 3, axis=-1)
    np.testing.assert_array_equal(model.decode(patchify(torch.from_numpy(drawn[None])))[0], expected)


def test_drawing_is_black_on_white_and_shifts_by_whole_pixels() -> None:
    drawn = draw("12")
    assert drawn.shape == (16, 32)
    assert drawn.dtype == np.float32
    assert (drawn.max(), drawn.min()) == (1.0, -1.0)
    assert (drawn[:, :4] == 1.0).all()  # two digits leave the margins white, so that a roll is a shift
    np.testing.assert_array_equal(draw("12", 2, 1), np.roll(drawn, (1, 2), axis=(0, 1)))
    assert not np.array_equal(drawn, draw("13"))


def test_the_transformer_is_the_class_of_qwen_image_at_1_4_million_parameters(model: TinyQwenImage) -> None:
    assert type(model.transformer) is QwenImageTransformer2DModel
    assert round(sum(p.numel() for p in model.transformer.parameters()) / 1e6, 2) == 1.41


def test_velocity_keeps_the_latent_shape_and_rows_apart(model: TinyQwenImage) -> None:
    generator = np.random.default_rng(0)
    x_BSC = torch.from_numpy(generator.standard_normal((3, *model.latent_shape_SC), dtype=np.float32))
    sigma_B = torch.tensor([1.0, 0.5, 0.1])
    text = model.encode(['A "12"', 'A "345"', 'A "6789"'])
    with torch.no_grad():
        velocity = model.velocity(x_BSC, sigma_B, text)
        alone = model.velocity(x_BSC[1:2], sigma_B[1:2], text.rows(torch.tensor([1])))
    assert velocity.shape == x_BSC.shape
    torch.testing.assert_close(velocity[1:2], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(velocity[0], velocity[1])


def test_weights_survive_a_file_and_a_wrong_key_is_refused(model: TinyQwenImage, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    model.save_weights(file)
    restored = TinyQwenImage.from_pretrained(file).transformer.state_dict()
    for name, tensor in model.transformer.state_dict().items():
        assert torch.equal(restored[name], tensor), name
    with pytest.raises(RuntimeError, match="Missing key"):
        TinyQwenImage(build_transformer()).load_weights({})
    with pytest.raises(BadInputError, match=r"no model weights at .*absent.*spotlight pretrain-tiny"):
        TinyQwenImage.from_pretrained(tmp_path / "absent.safetensors")


def test_pretraining_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "c")]
    losses: list[tuple[int, float]] = []
    for file, rng_seed in zip(files, (0, 0, 1), strict=True):
        torch.manual_seed(len(file.name))  # the global generator's state must not matter
        pretrain(
            file,
            optimizer_steps=2,
            caption_noise=0.4,
            rng_seed=rng_seed,
            on_step=lambda step, loss: losses.append((step, loss)),
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != files[2].read_bytes()
    assert [step for step, _ in losses] == [1, 2] * 3
    assert losses[:2] == losses[2:4]


def test_shipped_weights_fit_the_transformer_and_are_small() -> None:
    assert WEIGHTS.stat().st_size <= 8 * 2**20
    weights = TinyQwenImage.from_pretrained().transformer.state_dict()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
