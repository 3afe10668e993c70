"""Pipelines with a part missing, cut off or of another size: one line, never random weights."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.export import export_transformer
from spotlight_core.diffusion.models.families import check_index
from spotlight_core.errors import BadInputError
from tests.core.diffusion.models.tiny_pipelines import recipe

DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model.safetensors", "model.safetensors"
MODULES = [
    ("qwen_image", "text_encoder", TRANSFORMERS),
    ("flux", "text_encoder", TRANSFORMERS),
    ("flux", "text_encoder_2", TRANSFORMERS),
    ("sd3", "text_encoder_3", TRANSFORMERS),
    ("sd3", "transformer", DIFFUSERS),
    ("wan", "vae", DIFFUSERS),
    ("wan", "text_encoder", TRANSFORMERS),
]
TOKENIZERS = [
    ("qwen_image", "tokenizer"),
    ("flux", "tokenizer"),
    ("flux", "tokenizer_2"),
    ("sd3", "tokenizer_3"),
    ("wan", "tokenizer"),
]


@pytest.fixture
def copies(folders: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Each family's pipeline, to be damaged."""
    return {
        family: Path(shutil.copytree(folder, tmp_path / "copies" / family))
        for family, folder in folders.items()
    }


def _refused(family: str, folder: Path, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as raised:
        build_model(recipe(family, folder), "rollout")
    assert "\n" not in str(raised.value)


def _refused_unloaded(family: str, folder: Path, said: str) -> None:
    """Without loading anything, as a dry run does, and by whoever loads it all the same."""
    with pytest.raises(BadInputError, match=said):
        check_index(recipe(family, folder), json.loads((folder / "model_index.json").read_text()))
    _refused(family, folder, said)


def _first_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name, tensor in sorted(tensors.items()) if tensor.dim() > 1 and "embed" not in name)


@pytest.mark.parametrize(("family", "part", "file"), MODULES)
def test_a_tensor_that_is_missing(copies: dict[str, Path], family: str, part: str, file: str) -> None:
    weights = copies[family] / part / file
    tensors = load_file(weights)
    lost = _first_matrix(tensors)
    del tensors[lost]
    save_file(tensors, weights, {"format": "pt"})
    ending = re.escape(lost.split(".", 1)[1])  # transformers has its own names for some files' tensors
    _refused(family, copies[family], rf"^{part} \(\w+\) of model.path .* lacks 1 tensors, .*{ending}: ")


@pytest.mark.parametrize(("family", "part", "file"), MODULES)
def test_a_tensor_of_another_shape(copies: dict[str, Path], family: str, part: str, file: str) -> None:
    weights = copies[family] / part / file
    tensors = load_file(weights)
    name = _first_matrix(tensors)
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, weights, {"format": "pt"})
    _refused(family, copies[family], rf"cannot be loaded as a {part} \(\w+\) \(.+\): give a whole pipeline")


@pytest.mark.parametrize(("family", "part", "file"), MODULES)
def test_weights_that_are_cut_off(copies: dict[str, Path], family: str, part: str, file: str) -> None:
    weights = copies[family] / part / file
    size = weights.stat().st_size
    for kept in (size - 1, 100, 3, 0):
        weights.write_bytes(weights.read_bytes()[:kept])
        _refused_unloaded(
            family, copies[family], rf"{part}/{file}' is no whole safetensors file \(.+\): down"
        )


@pytest.mark.parametrize("held", ["shared.weight", "encoder.embed_tokens.weight"])
def test_a_tied_tensor_may_be_in_the_file_once(
    folders: dict[str, Path], copies: dict[str, Path], held: str
) -> None:
    weights = copies["flux"] / "text_encoder_2" / TRANSFORMERS
    tensors = load_file(weights)
    table = tensors.pop("shared.weight")
    tensors.pop("encoder.embed_tokens.weight", None)
    save_file(tensors | {held: table}, weights, {"format": "pt"})
    prompts = ['A "4"', "two cats"]
    found, expected = (
        build_model(recipe("flux", folder), "rollout").encode(prompts).tokens_BLD
        for folder in (copies["flux"], folders["flux"])
    )
    assert torch.equal(found, expected)


def test_every_component_has_its_folder(copies: dict[str, Path], family: str) -> None:
    index = json.loads((copies[family] / "model_index.json").read_text())
    for part in [name for name, value in index.items() if isinstance(value, list) and value[0]]:
        (copies[family] / part).rename(copies[family] / "aside")
        _refused_unloaded(family, copies[family], rf"has no folder {part} \(\w+\): download or copy")
        (copies[family] / "aside").rename(copies[family] / part)
    build_model(recipe(family, copies[family]), "rollout")


def test_every_component_has_its_configuration(copies: dict[str, Path], family: str) -> None:
    files = {"tokenizer": "tokenizer_config.json", "scheduler": "scheduler_config.json"}
    index = json.loads((copies[family] / "model_index.json").read_text())
    for part in [name for name, value in index.items() if isinstance(value, list) and value[0]]:
        name = files.get(part.split("_")[0], "config.json")
        held = (copies[family] / part / name).read_text()
        (copies[family] / part / name).write_text(held[: len(held) // 2])
        _refused_unloaded(family, copies[family], rf"{part}/{name}' is no JSON object")
        (copies[family] / part / name).unlink()
        _refused_unloaded(family, copies[family], rf"{part}' has no {name}: download or copy")
        (copies[family] / part / name).write_text(held)


@pytest.mark.parametrize(
    ("family", "part"), [("flux", "text_encoder_2"), ("sd3", "tokenizer_2"), ("wan", "text_encoder")]
)
def test_a_component_that_the_index_leaves_out(copies: dict[str, Path], family: str, part: str) -> None:
    file = copies[family] / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: [None, None]}))
    _refused_unloaded(family, copies[family], rf"model_index.json names no {part}: download or copy")


def test_a_component_of_another_library_is_not_imported(copies: dict[str, Path]) -> None:
    file = copies["flux"] / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vae": ["mine", "Vae"]}))
    _refused_unloaded("flux", copies["flux"], "names 'Vae' of 'mine' as vae: give a pipeline whose")


@pytest.mark.parametrize(("family", "part"), TOKENIZERS)
def test_a_tokenizer_without_its_vocabulary(copies: dict[str, Path], family: str, part: str) -> None:
    for file in (copies[family] / part).iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    _refused_unloaded(family, copies[family], rf"{part}' has no vocabulary, none of tokenizer.json, vocab.js")


@pytest.mark.parametrize(("family", "part"), TOKENIZERS)
def test_a_tokenizer_that_knows_no_words(copies: dict[str, Path], family: str, part: str) -> None:
    file = copies[family] / part / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    if isinstance(words, list):
        tokenizer["model"]["vocab"] = [pair for pair in words if pair[0] in special]
    else:
        tokenizer["model"]["vocab"] = {word: number for word, number in words.items() if word in special}
        tokenizer["model"]["merges"] = []
    file.write_text(json.dumps(tokenizer))
    _refused(family, copies[family], rf"({part} of model.path .* gives 'red cat' and 'big dog' the same)")


def test_a_tokenizer_of_a_larger_encoder(copies: dict[str, Path]) -> None:
    file = copies["flux"] / "tokenizer_2" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"][3:3] = [[f"zz{number}", -9.0] for number in range(98)]  # after the special
    file.write_text(json.dumps(tokenizer))
    _refused(
        "flux", copies["flux"], r"tokenizer_2 of model.path .* gives token \d+ to a text encoder of 98: "
    )


def test_a_clip_tokenizer_without_its_limit(copies: dict[str, Path]) -> None:
    file = copies["sd3"] / "tokenizer_2" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["model_max_length"]
    file.write_text(json.dumps(settings))
    _refused(
        "sd3", copies["sd3"], r"tokenizer_2 of model.path .* allows 1\d+ tokens to a text encoder of 77: "
    )


def test_each_shard_and_each_of_its_tensors_is_there(copies: dict[str, Path]) -> None:
    folder = copies["wan"] / "transformer"
    whole = WanTransformer3DModel.from_pretrained(folder, use_safetensors=True)
    (folder / DIFFUSERS).unlink()
    whole.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 2
    build_model(recipe("wan", copies["wan"]), "rollout")
    held = shards[-1].read_bytes()
    tensors = load_file(shards[-1])
    lost, _ = tensors.popitem()
    save_file(tensors, shards[-1], {"format": "pt"})
    _refused_unloaded(
        "wan", copies["wan"], rf"{shards[-1].name}' lacks {re.escape(lost)}, against diffusion_py"
    )
    shards[-1].write_bytes(held[:-8])
    _refused_unloaded("wan", copies["wan"], rf"{shards[-1].name}' is no whole safetensors file \(\d+ bytes, ")
    shards[-1].unlink()
    _refused_unloaded("wan", copies["wan"], rf"{shards[-1].name}' is no whole safetensors file \(.*No such")


def test_an_export_needs_the_base_whole(copies: dict[str, Path], tmp_path: Path) -> None:
    weights = copies["flux"] / "transformer" / DIFFUSERS
    tensors = load_file(weights)
    whole = dict(tensors)
    del tensors["x_embedder.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(
        BadInputError, match=r"^transformer .* lacks 1 tensors, the first is x_embedder.weight"
    ):
        export_transformer(recipe("flux", copies["flux"]), whole, tmp_path / "out")


@pytest.fixture
def cached(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLUX as the hub's snapshot "some/flux", and no network."""
    repository = tmp_path / "hub" / "models--some--flux"
    shutil.copytree(folders["flux"], repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository / "snapshots" / ("a" * 40)


def test_the_gaps_of_a_snapshot_are_told_where_no_download_can_fill_them(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.loads((cached / "model_index.json").read_text())
    check_index(recipe("flux", Path("some/flux")), index)
    shutil.rmtree(cached / "tokenizer_2")
    _refused("flux", Path("some/flux"), r"has no folder tokenizer_2 \(T5Tokenizer\): download")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_index(recipe("flux", Path("some/flux")), index)


@pytest.mark.slow
def test_a_snapshot_of_the_hub_is_loaded_in_silence(cached: Path) -> None:
    code = (
        "from spotlight_core.config.model import FluxConfig\n"
        "from spotlight_core.diffusion.models import build_model\n"
        "model = build_model(FluxConfig(type='flux', path='some/flux', height=32, width=48), 'rollout')\n"
        "print(tuple(model.encode(['a', 'b']).tokens_BLD.shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "(2, 256, 32)\n"), done.stderr
    assert "[transformers]" not in done.stderr
    assert "it/s" not in done.stderr
