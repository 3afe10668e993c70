"""Everything that can be found wrong with a run before it costs anything or leaves anything behind."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from spotlight_core.config import FunctionRewardConfig, RunConfig, flattened
from spotlight_core.data.prompts import quoted_target, read_prompts
from spotlight_core.diffusion.tiny.glyphs import check_text
from spotlight_core.errors import BadInputError
from spotlight_core.executor.cluster import check_port
from spotlight_core.market.prices import PriceBook
from spotlight_core.market.progress import ProgressTrace
from spotlight_core.market.traces import read_trace
from tasks.run_folder import RunFolder, check_writable
from tasks.services import check_answers

GIB = 2**30
DISK_GIB = 1.0  # journal, two checkpoints, stores and logs of a quickstart, several times over


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of both files."""

    train: tuple[str, ...]
    test: tuple[str, ...]


def check_run(config: RunConfig, folder: RunFolder, *, resume: bool, fresh: bool = False) -> list[str]:
    """Check recipe, inputs, machine and folder; returns what is worth telling though it is no fault.

    Raises:
        BadInputError: the first fault, with its remedy.
    """
    check_folder(folder, resume=resume, fresh=fresh)
    prompts = load_prompts(config)
    _check_drawable(config, prompts)
    notes = _check_held_out(config, prompts) + _check_trace(config)
    PriceBook(config.prices)
    _check_files(config)
    _check_ports(config)
    _check_machine(config, folder)
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
    finished = folder.facts().get("status") == "finished"
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
    folder = config.data.prompts
    if not folder.is_dir():
        raise BadInputError(
            f"no prompt folder {folder}", "set data.prompts to a folder with train.txt and test.txt"
        )
    return Prompts(
        train=tuple(read_prompts(folder / "train.txt")), test=tuple(read_prompts(folder / "test.txt"))
    )


def _check_held_out(config: RunConfig, prompts: Prompts) -> list[str]:
    """An evaluation shows each held-out prompt once: fewer prompts than images is worth telling."""
    wanted = max(config.evaluation.images, config.evaluation.final_images)
    if wanted <= len(prompts.test):
        return []
    there = len(prompts.test)
    return [f"evaluations use all {there} prompts of test.txt, fewer than the {wanted} images asked for"]


def check_same_recipe(given: RunConfig, begun: RunConfig) -> None:
    """A run continues under the recipe it was begun with; services may move.

    Raises:
        BadInputError: names the first key that differs.
    """
    old, new = flattened(begun), flattened(given)
    for key in sorted(old.keys() | new.keys()):
        movable = key.startswith("services.") and key != "services.torch_threads"  # sums depend on threads
        if not movable and old.get(key) != new.get(key):
            raise BadInputError(
                f"the run was begun with {key} = {old.get(key)}, now it is {new.get(key)}",
                "resume with the same recipe and overrides, or start another --name",
            )


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
    weights = config.model.weights
    if weights is not None and not weights.is_file():
        raise BadInputError(
            f"no model weights at {weights}", "set model.weights to a safetensors file, or remove it"
        )
    for reward in (config.reward, config.evaluation.held_out_reward):
        if isinstance(reward, FunctionRewardConfig):
            from spotlight_core.rewards.base import build_reward

            build_reward(reward)


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


def _check_machine(config: RunConfig, folder: RunFolder) -> None:
    free = psutil.virtual_memory().available / GIB
    if free < config.fleet.memory_gib:
        raise BadInputError(
            f"{free:.1f} GiB of memory are free, fleet.memory_gib = {config.fleet.memory_gib:g} are needed",
            "close other programs, use fewer nodes, or lower fleet.memory_gib if you know better",
        )
    disk = shutil.disk_usage(_existing(folder.path)).free / GIB
    if disk < DISK_GIB:
        raise BadInputError(
            f"{disk:.1f} GiB of disk are free at {folder.path}, the run needs {DISK_GIB:g}",
            "free some, or give --runs elsewhere",
        )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _check_drawable(config: RunConfig, prompts: Prompts) -> None:
    """Every prompt can be drawn by the recipe's model."""
    for name, texts in (("train.txt", prompts.train), ("test.txt", prompts.test)):
        for prompt in texts:
            try:
                check_text(quoted_target(prompt))
            except BadInputError as error:
                raise BadInputError(f"{config.data.prompts / name}: {error.problem}", error.remedy) from error
