"""Runs the ranks of a profile, and makes a cost model of what they say."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from spotlight_core.child_process import child_environment
from spotlight_core.config import RunConfig
from spotlight_core.costs import CostModel, StepCost
from spotlight_core.costs.recorded import fit_line
from spotlight_core.errors import SpotlightError
from spotlight_core.parallel.rendezvous import NodeRendezvous, meeting_place
from spotlight_core.profiling.plan import ProfilePlan

Record = dict[str, Any]


def measured(config: RunConfig, plan: ProfilePlan, told: Callable[[Record], None]) -> list[Record]:
    """What the ranks measured, in order; ``told`` hears of each record when it comes.

    Raises:
        SpotlightError: a rank ended without an answer; its last lines say why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.write(folder)
        (folder / "recipe.json").write_text(config.model_dump_json(), encoding="utf-8")
        place = meeting_place(folder) / "node"
        rendezvous = NodeRendezvous.create(place, max(plan.degrees))
        (folder / "node").symlink_to(place)
        try:
            return _run(folder, config, plan, told)
        finally:
            rendezvous.close()
            place.parent.rmdir()


def _run(folder: Path, config: RunConfig, plan: ProfilePlan, told: Callable[[Record], None]) -> list[Record]:
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        ranks = [
            stack.enter_context(_process(folder, rank, config.services.torch_threads))
            for rank in range(max(plan.degrees))
        ]
        for rank, process in enumerate(ranks):
            _answer(process, folder, rank)
        records.append({"boot": time.perf_counter() - began})
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        while "done" not in (record := _answer(ranks[0], folder, 0)):
            records.append(record)
            told(record)
    return records


@contextlib.contextmanager
def _process(folder: Path, rank: int, threads: int) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "spotlight_core.profiling.rank", str(folder), str(rank)]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=child_environment(threads)
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _answer(process: "subprocess.Popen[bytes]", folder: Path, rank: int) -> Record:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
        raise SpotlightError(
            f"rank {rank} of the profile ended without an answer ({said[-1] if said else 'it said nothing'})",
            "see that the recipe's model loads here: spotlight train RECIPE --dry-run",
        )
    return dict(json.loads(line))


def cost_model(records: Iterable[Record], *, train_seconds: float, score_seconds: float) -> CostModel:
    """Medians of what was measured; seconds to train and to score are those of a recorded run."""
    listed = list(records)
    steps: dict[int, list[tuple[int, float]]] = {}
    for record in listed:
        for seconds in record.get("steps", ()):
            steps.setdefault(record["degree"], []).append((record["rows"], seconds))
    lines = {degree: fit_line(points) for degree, points in sorted(steps.items())}
    tokens = next(int(record["tokens"]) for record in listed if "tokens" in record)
    fixed, per_row = lines.pop(1)

    def middle(name: str) -> float:
        return median([record[name] for record in listed if name in record] or [0.0])

    return CostModel(
        denoise_step_fixed_seconds=fixed,
        denoise_step_per_row_seconds=per_row,
        tokens=tokens,
        sharded=tuple(
            StepCost(tokens=tokens, degree=degree, fixed_seconds=line[0], per_row_seconds=line[1])
            for degree, line in lines.items()
        ),
        launch_seconds=middle("launch"),
        load_seconds=middle("load"),
        publish_seconds=middle("publish"),
        regroup_seconds=middle("regroup"),
        reshard_seconds=middle("reshard"),
        boot_seconds=middle("boot"),
        train_seconds=train_seconds,
        score_seconds_per_image=score_seconds,
    )
