"""What a user meets when the recipe's model is not there, or is another one."""

import json
import shutil
from pathlib import Path

import pytest
from diffusers import FluxPipeline

from spotlight_core.config.model import TinyModelConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import BadInputError
from tests.core.diffusion.models.tiny_pipelines import recipe


def test_a_missing_folder_and_one_without_a_model(tmp_path: Path, family: str) -> None:
    with pytest.raises(BadInputError, match=r"model.path '.*absent' is no folder here and no hub id: give a"):
        build_model(recipe(family, tmp_path / "absent"), "rollout")
    with pytest.raises(BadInputError, match=r"has no model_index.json: give a folder"):
        build_model(recipe(family, tmp_path), "rollout")


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInputError, match=r"no model at 'nobody/nothing' \(.+\): give model.path a hub id"):
        build_model(recipe("flux", Path("nobody/nothing")), "rollout")


def test_another_familys_weights_name_their_own_type(folders: dict[str, Path]) -> None:
    with pytest.raises(
        BadInputError, match=r"holds a StableDiffusion3Pipeline, no FluxPipeline: set .* = 'sd3'"
    ):
        build_model(recipe("flux", folders["sd3"]), "rollout")


def test_a_pipeline_of_no_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KolorsPipeline"}))
    with pytest.raises(BadInputError, match=r"holds a KolorsPipeline.*: give a FluxPipeline"):
        build_model(recipe("flux", tmp_path), "rollout")


def test_pickled_weights_are_not_read(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(folders["flux"], folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(
        BadInputError, match=r"has no diffusion_pytorch_model.safetensors and no .*as safetensors$"
    ):
        build_model(recipe("flux", folder), "rollout")


def test_wan_of_two_transformers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "two"
    shutil.copytree(folders["wan"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer_2"] = ["diffusers", "WanTransformer3DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match="has two transformers"):
        build_model(recipe("wan", folder), "rollout")


def test_sizes_beyond_the_family(folders: dict[str, Path], family: str) -> None:
    config = recipe(family, folders[family])  # itself takes multiples of 16 alone, and some VAEs more
    with pytest.raises(BadInputError, match=r"model.height = 40 is no multiple of 16: give 32 or 48"):
        build_model(config.model_copy(update={"height": 40}), "rollout")
    with pytest.raises(BadInputError, match=r"model.width = 8 is no multiple of 16: give 16$"):
        build_model(config.model_copy(update={"width": 8}), "rollout")


def test_a_flux_without_guidance_input_takes_none(tmp_path: Path) -> None:
    from tests.core.diffusion.models.tiny_pipelines import flux

    flux(guidance_embeds=False).save_pretrained(tmp_path)
    assert isinstance(FluxPipeline.from_pretrained(tmp_path), FluxPipeline)
    model = build_model(recipe("flux", tmp_path, guidance=9.0), "rollout")
    import torch

    x_BSC = torch.ones(1, *model.latent_shape_SC)
    with torch.no_grad():
        assert model.velocity(x_BSC, torch.ones(1), model.encode(['A "4"'])).shape == x_BSC.shape


def test_the_embedded_models_weights_must_exist(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no model weights at"):
        build_model(TinyModelConfig(weights=tmp_path / "absent.safetensors"), "rollout")
