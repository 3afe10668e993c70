"""Everything that can be found wrong with a run before it costs anything or leaves anything behind."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.model_files import check_model
from flows.same_recipe import check_replay
from spotlight_core.config import (
    DiffusersModelConfig,
    FunctionRewardConfig,
    RunConfig,
    VlmJudgeRewardConfig,
)
from spotlight_core.data.prompts import prompt_file, quoted_target, read_prompts, read_rows
from spotlight_core.data.requirements import row_checks, single_rewards
from spotlight_core.diffusion.tiny.glyphs import check_text
from spotlight_core.errors import BadInputError
from spotlight_core.estimates.resources import GIB, disk_of, trained_parameters
from spotlight_core.estimates.sizes import model_size
from spotlight_core.executor.cluster import check_port
from spotlight_core.executor.notices import check_notices
from spotlight_core.market.prices import PriceBook
from spotlight_core.market.progress import ProgressTrace
from spotlight_core.market.traces import read_trace
from spotlight_core.storage import check_url, store_url
from spotlight_core.types import PromptRow
from tasks.run_folder import RunFolder, check_writable
from tasks.services import check_answers

DISK_GIB = 1.0  # journal, two checkpoints, stores and logs of a quickstart, several times over


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of both files."""

    train: tuple[PromptRow, ...]
    test: tuple[PromptRow, ...]


def check_run(
    config: RunConfig, folder: RunFolder, *, resume: bool, fresh: bool = False, dry_run: bool = False
) -> list[str]:
    """Check recipe, inputs, machine and folder; returns what is worth telling though it is no fault.

    A dry run may be made on another machine than the run: what this one lacks is told, not refused.

    Raises:
        BadInputError: the first fault, with its remedy.
    """
    check_folder(folder, resume=resume, fresh=fresh)
    prompts = load_prompts(config)
    _check_drawable(config, prompts)
    notes = _check_held_out(config, prompts) + _check_trace(config)
    PriceBook(config.prices)
    _check_files(config)
    notes += check_model(config)
    if config.replay is not None:
        check_replay(config, RunFolder(config.replay))
    check_notices(config.fleet.notices)
    check_url(store_url(config.fleet.store, folder.path, folder.run_id), try_it=not dry_run)
    if dry_run and config.fleet.store.url is not None:
        notes.append(f"fleet.store.url = {config.fleet.store.url} is tried when the run starts")
    _check_ports(config)
    for lacks in (*_missing_keys(config), *_machine_faults(config, folder)):
        if not dry_run:
            raise lacks
        notes.append(str(lacks))
    if not dry_run:
        _check_judges(config)
    return notes


def check_folder(folder: RunFolder, *, resume: bool, fresh: bool) -> None:
    """The run folder is free, writable, and in the state that ``resume`` or ``fresh`` asks for."""
    check_writable(folder.path)
    if folder.path.exists() and not folder.path.is_dir():
        raise BadInputError(f"{folder.path} is a file", "give another --name or --runs")
    holder = folder.holder()
    if holder is not None:
        raise folder.in_use(holder)
    if resume and fresh:
        raise BadInputError("--resume and --fresh exclude each other", "give one of them")
    if resume and not folder.exists():
        raise BadInputError(
            f"no run to resume in {folder.path}", "drop --resume to start it, or check --name and --runs"
        )
    # A run that is replaced may hold anything.
    finished = not fresh and folder.facts().get("status") == "finished"
    if resume and finished:
        raise BadInputError(
            f"run {folder.name} has finished", f"see {folder.report}, or start another --name"
        )
    if folder.exists() and not resume and not fresh:
        state, way = ("has finished", "") if finished else ("was begun", "--resume to continue it, ")
        raise BadInputError(
            f"run {folder.name} {state} in {folder.path}",
            f"give {way}another --name, or --fresh to replace it",
        )
    if (
        folder.path.exists()
        and not folder.exists()
        and any(path.name != "lock" for path in folder.path.iterdir())
    ):
        raise BadInputError(f"{folder.path} exists and is no run of ours", "give another --name or --runs")


def load_prompts(config: RunConfig) -> Prompts:
    """Both prompt files of the recipe.

    Raises:
        BadInputError: a file is unusable.
    """
    folder, checks = config.data.prompts, row_checks(config)
    return Prompts(
        train=tuple(read_prompts(folder, "train", checks)), test=tuple(read_prompts(folder, "test", checks))
    )


def evaluation_prompts(config: RunConfig, prompts: Path | None, images: int | None) -> list[PromptRow]:
    """What `spotlight evaluate` draws: the first prompts of a file, of a folder's test split or the recipe's.

    Raises:
        BadInputError: the recipe's model or rewards cannot use the file, or it has fewer prompts than images.
    """
    place, checks = prompts or config.data.prompts, row_checks(config)
    file = prompt_file(place, "test") if place.is_dir() or prompts is None else place
    rows = read_rows(file, checks)
    _check_rows_drawable(config, file, rows)
    count = images if images is not None else min(config.evaluation.final_images, len(rows))
    if count > len(rows):
        raise BadInputError(
            f"{count} images exceed the {len(rows)} prompts of {file}", "lower --images or add prompts"
        )
    return rows[:count]


def check_picture(output: Path) -> None:
    """A PNG can be written to ``output``."""
    if output.suffix.lower() != ".png":
        raise BadInputError(f"--output {output} is no .png", "give a file such as grid.png")
    check_file(output, "the images")


def check_file(output: Path, what: str) -> None:
    """``output`` can be made, or written over, as a file that holds ``what``.

    Raises:
        BadInputError: there is no such folder, it is a folder itself, or writing is not allowed.
    """
    folder = output.absolute().parent
    if not folder.is_dir():
        raise BadInputError(f"no folder {folder}", "make it first, or give another --output")
    if output.is_dir():
        raise BadInputError(f"--output {output} is a folder", "give a file")
    check_writable(folder, what=what, option="--output")
    if not output.exists():
        return
    try:
        with output.open("ab"):  # changes nothing
            pass
    except OSError as error:
        raise BadInputError(
            f"--output {output} cannot be written over ({error.strerror})",
            "give another file, or change its permissions",
        ) from error


def _check_held_out(config: RunConfig, prompts: Prompts) -> list[str]:
    """An evaluation shows each held-out prompt once: fewer prompts than images is worth telling."""
    wanted = max(config.evaluation.images, config.evaluation.final_images)
    if wanted <= len(prompts.test):
        return []
    there = len(prompts.test)
    name = prompt_file(config.data.prompts, "test").name
    return [f"evaluations use all {there} prompts of {name}, fewer than the {wanted} images asked for"]


def _check_trace(config: RunConfig) -> list[str]:
    path = config.fleet.trace
    if path is None:
        return []
    trace = read_trace(path)
    if isinstance(trace, ProgressTrace):
        known = [f"spot-{index}" for index in range(config.fleet.spot_nodes)]
        fleet = ", ".join(known) or "no spot nodes"
        for point in trace.points:
            if point.node not in known:
                raise BadInputError(
                    f"{path} names node {point.node!r}, the fleet has {fleet}",
                    "change the trace or fleet.spot_nodes",
                )
    return [f"{path.name}: {repair}" for repair in trace.repairs]


def _check_files(config: RunConfig) -> None:
    weights = config.model.weights if config.model.type == "tiny" else None
    if weights is not None and not weights.is_file():
        raise BadInputError(
            f"no model weights at {weights}", "set model.weights to a safetensors file, or remove it"
        )
    for reward in (config.reward, config.evaluation.held_out_reward):
        for single in single_rewards(reward):
            if isinstance(single, FunctionRewardConfig):
                from spotlight_core.rewards.base import build_reward

                build_reward(single)


def _check_judges(config: RunConfig) -> None:
    """A judge behind an address answers as it should, before anything is started for it."""
    from spotlight_core.rewards.selftest import self_test
    from spotlight_core.rewards.vlm_judge import VlmJudgeReward

    for reward in (config.reward, config.evaluation.held_out_reward):
        for single in single_rewards(reward):
            if isinstance(single, VlmJudgeRewardConfig):
                with contextlib.closing(VlmJudgeReward(single)) as judge:
                    self_test(judge)


def _missing_keys(config: RunConfig) -> Iterator[BadInputError]:
    """Keys of judges that the environment does not hold."""
    for reward in (config.reward, config.evaluation.held_out_reward):
        for single in single_rewards(reward):
            variable = single.api_key_variable if isinstance(single, VlmJudgeRewardConfig) else None
            if variable is not None and not os.environ.get(variable, "").strip():
                yield BadInputError(
                    f"the environment variable {variable} of the judge's api_key_variable is empty",
                    "export the key in it",
                )


def _check_ports(config: RunConfig) -> None:
    services = config.services
    if services.prefect_port and services.prefect_port == services.ray_port:
        raise BadInputError(
            f"services.prefect_port and services.ray_port are both {services.ray_port}",
            "give them different ports, or 0",
        )
    check_port(services.ray_port, "services.ray_port")
    own_server = os.environ.get("PREFECT_API_URL")
    if own_server:
        check_answers(own_server)
    else:
        check_port(services.prefect_port, "services.prefect_port")


def _machine_faults(config: RunConfig, folder: RunFolder) -> Iterator[BadInputError]:
    free = psutil.virtual_memory().available / GIB
    if free < config.fleet.memory_gib:
        yield BadInputError(
            f"{free:.1f} GiB of memory are free, fleet.memory_gib = {config.fleet.memory_gib:g} are needed",
            "close other programs, use fewer nodes, or lower fleet.memory_gib if you know better",
        )
    disk, needed = shutil.disk_usage(_existing(folder.path)).free / GIB, _disk_gib(config)
    if disk < needed:
        yield BadInputError(
            f"{disk:.1f} GiB of disk are free at {folder.path}, the run needs {needed:.3g}",
            "free some, or give --runs elsewhere",
        )


def _disk_gib(config: RunConfig) -> float:
    """Checkpoints and published weights of a large model are most of what a run writes."""
    if not isinstance(config.model, DiffusersModelConfig):
        return DISK_GIB
    trained = trained_parameters(config.model, model_size(config.model))
    return DISK_GIB + disk_of(config, trained) / GIB


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _check_drawable(config: RunConfig, prompts: Prompts) -> None:
    """Every prompt can be drawn by the recipe's model."""
    _check_rows_drawable(config, prompt_file(config.data.prompts, "train"), prompts.train)
    _check_rows_drawable(config, prompt_file(config.data.prompts, "test"), prompts.test)


def _check_rows_drawable(config: RunConfig, file: Path, rows: Sequence[PromptRow]) -> None:
    """The embedded model draws digits only; the others draw whatever they are told."""
    if config.model.type != "tiny":
        return
    for row in rows:
        try:
            check_text(quoted_target(row.text))
        except BadInputError as error:
            raise BadInputError(f"{file}: {error.problem}", error.remedy) from error
