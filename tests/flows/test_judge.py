"""A reward behind an address: found wrong before anything starts, and failing in mid-run without loss."""

import json
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.run_folder import RunFolder, read_records
from tests.core.rewards.endpoint import MODEL, Answer, Endpoint, graded, ok, serving
from tests.flows.command_line import Cli
from tests.flows.live import command, environment, nothing_left, train, write_inputs

RECIPE = """
extends = "mini"
[reward]
type = "vlm_judge"
url = "{url}"
model = "judge-7b"
attempts = 2
timeout_seconds = {timeout}
"""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as state:
        yield state


def judged(folder: Path, url: str, timeout: float = 10.0) -> Path:
    runs = write_inputs(folder)
    (folder / "judged.toml").write_text(RECIPE.format(url=url, timeout=timeout))
    return runs


def by_the_image(body: dict[str, Any], call: int) -> Answer:
    """Equal images get equal grades; which, does not matter."""
    return ok(f'{{"grade": {zlib.crc32(json.dumps(body).encode()) % 11}}}')


def broken(body: dict[str, Any], call: int) -> Answer:
    return 500, {}, b"out of memory"


def garbage(body: dict[str, Any], call: int) -> Answer:
    return ok("I would rather not say.")


def silent(body: dict[str, Any], call: int) -> Answer:
    time.sleep(3.0)
    return graded(body, call)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(broken, "500"), (garbage, "I would rather not say"), (silent, "timed out")],
    ids=["500", "garbage", "hangs"],
)
def test_a_judge_that_does_not_judge_is_refused_before_anything_starts(
    spotlight: Cli,
    tmp_path: Path,
    endpoint: Endpoint,
    answer: Callable[[dict[str, Any], int], Answer],
    said: str,
) -> None:
    endpoint.answer = answer
    judged(tmp_path, endpoint.url, timeout=0.5)
    code, out, err = spotlight("train", str(tmp_path / "judged.toml"))
    assert code != 0
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err
    assert endpoint.url in err
    assert not (tmp_path / "runs").exists()


def test_a_judge_that_is_not_there_is_refused(spotlight: Cli, tmp_path: Path) -> None:
    judged(tmp_path, "http://127.0.0.1:9")
    code, out, err = spotlight("train", str(tmp_path / "judged.toml"))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"model '{MODEL}' at http://127.0.0.1:9) failed 2 times (ConnectError" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_judge_that_fails_in_mid_run_stops_it_with_everything_saved(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    runs = judged(tmp_path, endpoint.url)
    folder = RunFolder(runs / "judged")

    def fails_in_the_second_iteration(body: dict[str, Any], call: int) -> Answer:
        first_done = (folder.checkpoints / "1").exists()
        return broken(body, call) if first_done else by_the_image(body, call)

    endpoint.answer = fails_in_the_second_iteration
    stopped = subprocess.run(
        command(runs, "judged", recipe="judged"),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=200,
    )
    assert stopped.returncode == 1
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith("error: scorer 'vlm_judge' failed")
    assert "500" in last
    assert "--resume" in last
    nothing_left(folder)
    # What was done is there, and nothing was scored 0 in the place of an answer.
    records = list(read_records(folder.iterations))
    assert [record["iteration"] for record in records] == [-1, 0]
    assert (folder.checkpoints / "1").is_dir()

    endpoint.answer = by_the_image
    train(runs, "judged", "--resume", recipe="judged")
    assert [record["iteration"] for record in read_records(folder.iterations)] == [-1, 0, 1]
