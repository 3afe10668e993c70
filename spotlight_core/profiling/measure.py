"""Runs the ranks of a profile, and makes a cost model of what they say."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from spotlight_core.child_process import child_environment
from spotlight_core.config import RunConfig
from spotlight_core.costs import CostModel, StepCost
from spotlight_core.costs.recorded import fit_line
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.executor.gpus import local_gpus
from spotlight_core.parallel.rendezvous import NodeRendezvous, meeting_place
from spotlight_core.profiling.plan import ProfilePlan

Record = dict[str, Any]


def measured(config: RunConfig, plan: ProfilePlan, told: Callable[[Record], None]) -> list[Record]:
    """What the ranks measured, in order; ``told`` hears of each record when it comes.

    Raises:
        BadInputError: more ranks than this machine has GPUs, or a recipe that cannot be loaded.
        SpotlightError: a rank ended without an answer; its last line says why.
    """
    count, gpus = max(plan.degrees), local_gpus()
    if gpus and count > len(gpus):
        raise BadInputError(f"SP {count} on {len(gpus)} GPUs", "give --degrees that fit this machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.write(folder)
        (folder / "recipe.json").write_text(config.model_dump_json(), encoding="utf-8")
        place = meeting_place(folder) / "node"
        rendezvous = NodeRendezvous.create(place, count)
        (folder / "node").symlink_to(place)
        try:
            with _store_of_groups(rendezvous, config, "cuda" if gpus else "cpu"):
                return _run(folder, _environments(config, count, gpus), told)
        finally:
            rendezvous.close()
            place.parent.rmdir()


@contextlib.contextmanager
def _store_of_groups(rendezvous: NodeRendezvous, config: RunConfig, device: str) -> Iterator[None]:
    """Host what torch's own groups meet over, where the ranks have such."""
    if not config.elastic.needs_store(device):
        yield
        return
    from spotlight_core.parallel.torch_groups import host_store  # with torch, which else is not needed here

    store = host_store(rendezvous)
    yield
    del store


def _environments(config: RunConfig, count: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Of the ranks' processes: a GPU for each, where there are any."""
    shared = child_environment(config.services.torch_threads)
    return [shared | ({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}) for rank in range(count)]


def _run(folder: Path, environments: list[dict[str, str]], told: Callable[[Record], None]) -> list[Record]:
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        ranks = [
            stack.enter_context(_process(folder, rank, environment))
            for rank, environment in enumerate(environments)
        ]
        for rank in range(len(ranks)):
            _answer(ranks, folder, rank)
        records.append({"boot": time.perf_counter() - began})
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        while "done" not in (record := _answer(ranks, folder, 0)):
            records.append(record)
            told(record)
    return records


@contextlib.contextmanager
def _process(folder: Path, rank: int, environment: dict[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "spotlight_core.profiling.rank", str(folder), str(rank)]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _answer(ranks: "Sequence[subprocess.Popen[bytes]]", folder: Path, rank: int) -> Record:
    stdout = ranks[rank].stdout
    assert stdout is not None
    line = stdout.readline()
    if not line:
        raise _ended(ranks, folder, rank)
    record = dict(json.loads(line))
    if "error" in record:
        kind = BadInputError if record["kind"] == "BadInputError" else SpotlightError
        raise kind(record["error"], record["remedy"])
    return record


def _ended(ranks: "Sequence[subprocess.Popen[bytes]]", folder: Path, rank: int) -> SpotlightError:
    """Which rank ended, and how: ``rank`` may only have lost another one in a collective."""
    ranks[rank].wait()
    gone = [other for other, process in enumerate(ranks) if process.poll() is not None]
    last = {other: _last_line(folder / f"rank-{other}.log") for other in gone}
    culprit = next((other for other in gone if "GroupBrokenError" not in last[other]), rank)
    code = ranks[culprit].returncode
    how = last[culprit] or (f"signal {-code}" if code < 0 else f"exit code {code}")
    return SpotlightError(
        f"rank {culprit} of the profile ended without an answer ({how})",
        "see that this machine has the memory; fewer --rows and --degrees take less",
    )


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def cost_model(records: Iterable[Record], *, train_seconds: float, score_seconds: float) -> CostModel:
    """Medians of what was measured; seconds to train and to score are those of a recorded run."""
    listed = list(records)
    steps: dict[int, list[tuple[int, float]]] = {}
    for record in listed:
        for seconds in record.get("steps", ()):
            steps.setdefault(record["degree"], []).append((record["rows"], seconds))
    lines = {degree: fit_line(points) for degree, points in sorted(steps.items())}
    reused = [seconds for record in listed for seconds in record.get("reused", ())]
    tokens = next(int(record["tokens"]) for record in listed if "tokens" in record)
    fixed, per_row = lines.pop(1)

    def middle(name: str) -> float:
        return median([record[name] for record in listed if name in record] or [0.0])

    return CostModel(
        denoise_step_fixed_seconds=fixed,
        denoise_step_per_row_seconds=per_row,
        reused_step_seconds=median(reused),
        tokens=tokens,
        sharded=tuple(
            StepCost(tokens=tokens, degree=degree, fixed_seconds=line[0], per_row_seconds=line[1])
            for degree, line in lines.items()
        ),
        launch_seconds=middle("launch"),
        load_seconds=middle("load"),
        copy_seconds=middle("copy"),
        sleep_seconds=middle("sleep"),
        wake_seconds=middle("wake"),
        publish_seconds=middle("publish"),
        regroup_seconds=middle("regroup"),
        reshard_seconds=middle("reshard"),
        boot_seconds=middle("boot"),
        train_seconds=train_seconds,
        score_seconds_per_image=score_seconds,
    )
