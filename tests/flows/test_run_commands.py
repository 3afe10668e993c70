"""`spotlight explain` and `spotlight audit` on run folders made by hand."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from spotlight_core.events import Settle, Word, encode
from spotlight_core.recipes import load_recipe
from tests.core.market.journals import kept, killed
from tests.flows.command_line import Cli

STRIKE = {"event": "strike", "at": 5.0, "lease": "0.1", "request": "a", "denoise_step": 5}
STOPS = {"s0": 5.0, "s1": 20.0}


def write(
    folder: Path, words: Iterable[Word], status: str = "finished", strikes: Iterable[dict[str, object]] = ()
) -> None:
    (folder / "nodes").mkdir(parents=True)
    (folder / "recipe.json").write_text(load_recipe("quickstart").model_dump_json(), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"status": status}), encoding="utf-8")
    (folder / "journal.jsonl").write_bytes(b"".join(encode(word) + b"\n" for word in words))
    for node, stop in STOPS.items():
        life = {"node": node, "incarnation": 1, "pool": "spot", "gpus": 1}
        records = [{"event": "start", "at": 0.0, **life}]
        records += [dict(strike) for strike in strikes if node == "s0"]
        records.append({"event": "stop", "at": stop, **life})
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "nodes" / f"{node}-1.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_a_notice_explained(spotlight: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write(runs / "one", kept())
    code, out, _ = spotlight("explain", "one")
    assert code == 0
    assert "a (rollout) at step 5 step 5 s1 at step 5, after" in flat(out)
    assert "notice (trace)" in out
    assert (
        "1 preemption, 1 with notice; 1 request in flight (1 resumed); 0 denoise steps lost, 0.00 GPU-s, "
        "$0.00000" in flat(out)
    )


def test_a_kill_explained_to_the_step_and_as_json(spotlight: Cli, runs: Path) -> None:
    write(runs / "one", killed(), strikes=[STRIKE])
    code, out, _ = spotlight("explain", "one", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["total"]["denoise_steps_lost"] == 3.0
    assert told["total"]["exact"] is True
    ((item,),) = [one["requests"] for one in told["preemptions"]]
    assert (item["denoise_step"], item["saved_denoise_step"], item["resumed_on"]) == (5.0, 2, "s1")


def test_runs_without_preemptions_say_so(spotlight: Cli, runs: Path) -> None:
    write(runs / "young", [])
    write(runs / "calm", kept()[:6])
    assert spotlight("explain", "young")[1] == "young has no journal yet: nothing has happened to it.\n"
    assert "No node of calm was preempted in 2 node lives." in spotlight("explain", "calm")[1]
    assert "no run 'other' in" in spotlight("explain", "other")[2]


def test_an_audit_that_passes(spotlight: Cli, runs: Path) -> None:
    write(runs / "one", kept())
    code, out, _ = spotlight("audit", "one")
    assert code == 0
    assert out.count("✓") == 10
    assert "✗" not in out
    assert out.endswith("All promises kept.\n")


def test_an_audit_that_fails_exits_with_one_and_names_the_breach(spotlight: Cli, runs: Path) -> None:
    write(runs / "one", [word for word in kept() if not isinstance(word, Settle)])
    code, out, _ = spotlight("audit", "one")
    assert code == 1
    assert out.count("✗") == 1
    assert "a was never settled" in out
    assert out.endswith("1 promise broken.\n")
    code, out, _ = spotlight("audit", "one", "--json")
    told = json.loads(out)
    assert (code, told["kept"], told["promises"][0]["kept"]) == (1, False, False)


def test_a_running_run_is_audited_as_far_as_it_has_come(spotlight: Cli, runs: Path) -> None:
    write(runs / "one", kept()[:10], status="running")
    with (runs / "one" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"word": "Star')
    code, out, _ = spotlight("audit", "one")
    assert code == 0
    assert "2 requests, 2 open" in out
    assert "not finished" in out


@pytest.mark.parametrize("command", ["explain", "audit"])
@pytest.mark.parametrize("file", ["recipe.json", "run.json", "journal.jsonl"])
@pytest.mark.parametrize(
    "garbage", [b"{\n", b"[]\n", b"\xff\n", None], ids=["cut", "list", "bytes", "folder"]
)
def test_a_file_that_is_garbage_is_one_line(
    spotlight: Cli, runs: Path, command: str, file: str, garbage: bytes | None
) -> None:
    write(runs / "one", kept())
    path = runs / "one" / file
    path.unlink()
    if garbage is None:
        path.mkdir()
    else:
        path.write_bytes(garbage)

    code, out, err = spotlight(command, "one")
    if (command, file) == ("explain", "run.json"):  # which it does not ask
        assert (code, err) == (0, "")
    else:
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ")
        assert file in err
