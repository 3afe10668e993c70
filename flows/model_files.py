"""Are the files of models here, and does this machine fit them?  Looked at, never downloaded."""

import json
from collections.abc import Iterator

from spotlight_core.config import (
    ClipScoreRewardConfig,
    DiffusersModelConfig,
    FamilyConfig,
    GenEvalRewardConfig,
    NftConfig,
    PickScoreRewardConfig,
    RunConfig,
)
from spotlight_core.data.requirements import single_rewards
from spotlight_core.diffusion.models.families import INDEX, check_index, check_path
from spotlight_core.errors import BadInputError
from spotlight_core.estimates.sizes import image_multiple, model_size
from spotlight_core.executor.gpus import local_gpus
from spotlight_core.hub import hub_cache, local_folder, offline


def check_model(config: RunConfig) -> list[str]:
    """The model's files are those of a pipeline of its family; returns notes on what is not here yet.

    Raises:
        BadInputError: no such folder, no pipeline in it, another family's, or no hub id.
    """
    model = config.model
    if not isinstance(model, DiffusersModelConfig):
        return _reward_notes(config)
    check_path(model)
    notes = [*_reward_notes(config), *_machine_notes(config)]
    folder = local_folder(model.path, model.revision, INDEX)
    if folder is None:
        _check_size(model)
        return [_to_download(model.path), *notes]
    try:
        index = dict(json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"{folder / INDEX} is not readable ({error})", "download the model again"
        ) from error
    check_index(model, index)
    _check_size(model)
    return notes


def _check_size(model: FamilyConfig) -> None:
    """Some VAEs want larger multiples than their family does."""
    multiple = image_multiple(model_size(model))
    for name, pixels in (("height", model.height), ("width", model.width)):
        below = pixels // multiple * multiple
        if pixels != below:
            choice = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise BadInputError(f"model.{name} = {pixels} is no multiple of {multiple}", f"give {choice}")


def _reward_notes(config: RunConfig) -> list[str]:
    names = dict.fromkeys(
        name
        for reward in (config.reward, config.evaluation.held_out_reward)
        for single in single_rewards(reward)
        for name in _models_of(single)
    )
    absent = [name for name in names if local_folder(name, None) is None]
    return [_to_download(name) for name in absent]


def _models_of(reward: object) -> Iterator[str]:
    if isinstance(reward, PickScoreRewardConfig):
        yield from (reward.path, reward.processor)
    elif isinstance(reward, ClipScoreRewardConfig):
        yield reward.path
    elif isinstance(reward, GenEvalRewardConfig):
        yield from (reward.detector, reward.classifier)


def _to_download(hub_id: str) -> str:
    how = "HF_HUB_OFFLINE forbids to download it" if offline() else "it will be downloaded at the start"
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
