"""Are the files of models here, and does this machine fit them?  Looked at, never downloaded.

A hub id is looked for where huggingface_hub keeps its snapshots: that layout is public, and asking the
library would mean asking the network.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from flows.model_card import PIPELINES
from spotlight_core.config import (
    ClipScoreRewardConfig,
    DiffusersModelConfig,
    GenEvalRewardConfig,
    NftConfig,
    PickScoreRewardConfig,
    RunConfig,
)
from spotlight_core.data.requirements import single_rewards
from spotlight_core.errors import BadInputError
from spotlight_core.executor.gpus import local_gpus

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FAMILIES = {pipeline: family for family, (pipeline, _) in PIPELINES.items()}


def check_model(config: RunConfig) -> list[str]:
    """The model's folder is one of its family's pipelines; returns notes on what is not here yet.

    Raises:
        BadInputError: no such folder, no pipeline in it, another family's, or no hub id.
    """
    model = config.model
    if not isinstance(model, DiffusersModelConfig):
        return _reward_notes(config)
    index = _model_index(model)
    if index is None:
        notes = [_to_download(model.path)]
    else:
        _check_family(model, index)
        notes = []
    return [*notes, *_reward_notes(config), *_machine_notes(config)]


def cached(hub_id: str, revision: str | None, file: str = "") -> Path | None:
    """The snapshot of a hub id in the local cache, None where there is none (with ``file`` in it)."""
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit if commit else None
    return snapshot if snapshot is not None and (snapshot / file).exists() else None


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _model_index(model: DiffusersModelConfig) -> Path | None:
    """``model_index.json`` of a local folder or a cached snapshot; None where it is still on the hub."""
    folder = Path(model.path)
    remedy = "give a folder that holds model_index.json, or a hub id such as Qwen/Qwen-Image"
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise BadInputError(f"model.path {model.path} has no model_index.json", remedy)
        return folder / "model_index.json"
    if not _HUB_ID.fullmatch(model.path):
        raise BadInputError(f"model.path {model.path!r} is no folder here and no hub id", remedy)
    snapshot = cached(model.path, model.revision, "model_index.json")
    return snapshot / "model_index.json" if snapshot else None


def _check_family(model: DiffusersModelConfig, index: Path) -> None:
    try:
        found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise BadInputError(f"{index} is not readable ({error})", "download the model again") from error
    expected = PIPELINES[model.type][0]  # type: ignore[attr-defined]
    if found != expected:
        family = _FAMILIES.get(str(found))
        remedy = f"set model.type = {family!r}" if family else f"give a {expected} in diffusers' format"
        raise BadInputError(f"model.path {model.path} holds a {found}, no {expected}", remedy)


def _reward_notes(config: RunConfig) -> list[str]:
    names = dict.fromkeys(
        name
        for reward in (config.reward, config.evaluation.held_out_reward)
        for single in single_rewards(reward)
        for name in _models_of(single)
    )
    absent = [name for name in names if not Path(name).is_dir() and not cached(name, None)]
    return [_to_download(name) for name in absent]


def _models_of(reward: object) -> Iterator[str]:
    if isinstance(reward, PickScoreRewardConfig):
        yield from (reward.path, reward.processor)
    elif isinstance(reward, ClipScoreRewardConfig):
        yield reward.path
    elif isinstance(reward, GenEvalRewardConfig):
        yield from (reward.detector, reward.classifier)


def _to_download(hub_id: str) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    how = "HF_HUB_OFFLINE forbids to download it" if offline else "it will be downloaded at the start"
    return f"{hub_id} is not in {hub_cache()}: {how}"


def _machine_notes(config: RunConfig) -> list[str]:
    gpus, ranks, model = len(local_gpus()), config.trainer.ranks, config.model
    notes = []
    if gpus == 0:
        notes.append(
            f"no NVIDIA GPU here: a {model.type} model on a CPU takes hours where a GPU takes seconds"
        )
    elif gpus < ranks and config.trainer.device != "cpu":
        notes.append(f"trainer.ranks = {ranks} want a GPU each, this machine has {gpus}")
    if model.rollout_dtype != model.training_dtype and not isinstance(config.loss, NftConfig):
        notes.append(
            f"rollout in {model.rollout_dtype}, training in {model.training_dtype}: their log-probabilities "
            "differ, so the trainer computes the old ones again"
        )
    return notes
