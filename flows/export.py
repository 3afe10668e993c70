"""`spotlight export`: a policy as diffusers loads it, with a model card and the recipe.

DIR/  pytorch_lora_weights.safetensors   or  transformer/, when all weights were trained
      README.md  recipe.json
"""

import json
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flows.model_card import TAG, CardFacts, model_card, public_recipe
from flows.targets import Target, Weights, chosen_weights
from spotlight_core.config import ModelConfig, TinyModelConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.types import Evaluation, PolicyVersion
from tasks.run_folder import check_writable, read_records

CARD, RECIPE, TRANSFORMER = "README.md", "recipe.json", "transformer"
WRITTEN = (
    CARD,
    RECIPE,
    "pytorch_lora_weights.safetensors",
    f"{TRANSFORMER}/config.json",
    f"{TRANSFORMER}/diffusion_pytorch_model*.safetensors",
    f"{TRANSFORMER}/diffusion_pytorch_model.safetensors.index.json",
)
"""Every file that an export may hold; whatever else lies beside them is the user's."""
NAMED = 3  # files of the user's that a refusal names


def export_policy(target: Target, output: Path) -> Path:
    """Write the target's EMA weights to the folder ``output``, whole or not at all.

    An earlier export there is replaced; a link is followed.

    Raises:
        BadInputError: ``output`` is a file, holds anything else or cannot be written, or the run has no
            weights yet.
        SpotlightError: the weights could not be written, as on a full disk.
    """
    from safetensors import SafetensorError

    check_output(output)
    folder = _followed(output)
    policy, weights = chosen_weights(target)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_weights(target.config.model, weights, temporary)
        recipe = json.dumps(public_recipe(target.config), indent=2, ensure_ascii=False)
        (temporary / RECIPE).write_text(recipe + "\n", encoding="utf-8")
        card = model_card(target.config, _facts(target, policy))
        (temporary / CARD).write_text(card, encoding="utf-8")
        check_output(output)  # minutes may have passed
        _replace(folder, temporary)
    except SafetensorError as error:  # how a full disk ends there
        raise SpotlightError(
            f"cannot write the weights to {output} ({error})", "free some space, or give another --output"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output.absolute()


def _followed(output: Path) -> Path:
    """Where ``output`` leads, itself where it is no link."""
    return Path(os.path.realpath(output))


def _replace(folder: Path, new: Path) -> None:
    """``new`` takes the place of ``folder``; what was there is moved aside first, and back if that fails."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_suffix(".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def _write_weights(model: ModelConfig, weights: Weights, folder: Path) -> None:
    from spotlight_core.diffusion.models.export import export_adapter, export_transformer

    if model.lora is not None:
        export_adapter(model, weights, folder)
    if model.type == "tiny":
        _write_tiny(model, weights, folder / TRANSFORMER)
    elif model.lora is None:
        export_transformer(model, weights, folder / TRANSFORMER)
    config = folder / TRANSFORMER / "config.json"
    if config.exists():
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings.pop("_name_or_path", None)  # where the base model was on this machine
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tiny(model: TinyModelConfig, weights: Weights, folder: Path) -> None:
    """The embedded transformer; its base weights beside an adapter, since they are on no hub."""
    from spotlight_core.diffusion.policy import load_policy_weights
    from spotlight_core.diffusion.tiny.model import WEIGHTS, TinyQwenImage

    tiny = TinyQwenImage.from_pretrained(model.weights or WEIGHTS)
    if model.lora is None:
        load_policy_weights(tiny.transformer, weights)
    tiny.transformer.save_pretrained(folder)


def check_output(output: Path) -> None:
    """``output`` may be written: it is not there yet, empty, or an export of ours and nothing else.

    Raises:
        BadInputError: it is something else, which is left alone, or cannot be written.
    """
    folder = _followed(output)
    if folder.is_symlink():
        raise BadInputError(f"{output} is a link that leads to itself", "give a folder as --output")
    if not folder.parent.is_dir():
        raise BadInputError(f"no folder {folder.parent}", "make it first, or give another --output")
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"{output} is a file", "give a folder as --output")
    if folder.exists() and any(folder.iterdir()):
        if not _is_export(folder):
            raise BadInputError(
                f"{output} exists and is no export of ours", "give another --output, or empty it"
            )
        _check_nothing_else(output, folder)
    check_writable(folder.parent, what="the export", option="--output")


def _check_nothing_else(output: Path, folder: Path) -> None:
    others = sorted(_others(folder))
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        raise BadInputError(
            f"{output} holds {', '.join(others[:NAMED])}{more} beside an export of ours",
            "move them away, or give another --output",
        )


def _others(folder: Path) -> Iterator[str]:
    """What no export writes; links too, wherever they lead."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_file = path.is_file() and not path.is_symlink()
        ours = any(name.count("/") == known.count("/") and fnmatchcase(name, known) for known in WRITTEN)
        if not (ours and is_file) and not (name == TRANSFORMER and path.is_dir() and not path.is_symlink()):
            yield name


def _is_export(folder: Path) -> bool:
    card = folder / CARD
    if not card.is_file() or not (folder / RECIPE).is_file():
        return False
    front, _, _ = (
        card.read_text(encoding="utf-8", errors="replace").removeprefix("---\n").partition("\n---\n")
    )
    return f"- {TAG}" in front.split("\n")


def _facts(target: Target, policy: PolicyVersion) -> CardFacts:
    records = list(read_records(target.folder.iterations))
    evaluations = [_evaluation(record["evaluation"]) for record in records if record["evaluation"]]
    done = [record for record in records if record["iteration"] < policy.number]
    costs = [record["metrics"]["cost/usd_total"] for record in done if "cost/usd_total" in record["metrics"]]
    facts = target.folder.facts()
    whole = policy.number == target.config.iterations and "usd_total" in facts
    prompts = read_prompts(target.config.data.prompts, "test")
    return CardFacts(
        policy=policy,
        base=next((each for each in evaluations if each.policy.label == "base"), None),
        evaluated=next((each for each in reversed(evaluations) if each.policy.digest == policy.digest), None),
        usd=facts["usd_total"] if whole else (costs[-1] if costs else None),
        prompt=prompts[0].text,
    )


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(**{**record, "policy": PolicyVersion(**record["policy"])})
