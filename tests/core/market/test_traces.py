import json
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace, read_trace, slots
from spotlight_core.recipes import RECIPES

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.txt"
    path.write_text(text, encoding="utf-8")
    return path


def clock(path: Path) -> ClockTrace:
    trace = read_trace(path)
    assert isinstance(trace, ClockTrace)
    return trace


def test_bamboo_sorts_and_drops_and_says_so(tmp_path: Path) -> None:
    text = "0,add,a\n2000,remove,a\n1000,add,b\n1000,add,b\n3000,remove,c\n"
    trace = clock(written(tmp_path, text))
    assert trace.events == ((0.0, "add", "a"), (1.0, "add", "b"), (2.0, "remove", "a"))
    assert trace.repairs == (
        "1 rows out of order, sorted (first at line 3)",
        "1 repeated rows dropped (first at line 4)",
        "1 rows that change nothing dropped (first at line 5: remove c)",
    )


def test_counts_become_nodes_first_in_first_out(tmp_path: Path) -> None:
    text = (
        "2021-12-31, 23:59:50, 2\n2022-01-01, 00:00:00, 1\n2022-01-01, 00:00:00, 1\n2022-01-01, 00:00:30, 2\n"
    )
    trace = clock(written(tmp_path, text))
    assert trace.events == (
        (0.0, "add", "node-0"),
        (0.0, "add", "node-1"),
        (10.0, "remove", "node-0"),
        (40.0, "add", "node-2"),
    )
    assert trace.repairs == ("1 repeated counts dropped (first at line 3)",)


def test_skypilot_counts_per_gap(tmp_path: Path) -> None:
    trace = clock(
        written(tmp_path, json.dumps({"metadata": {"gap_seconds": 150}, "data": [0, 2, 2, 1]}, indent=1))
    )
    assert trace.events == ((150.0, "add", "node-0"), (150.0, "add", "node-1"), (450.0, "remove", "node-0"))


def test_parcae_lists_nodes(tmp_path: Path) -> None:
    rows = [
        [0, "add", {"nodes": ["a", "b"]}],
        [500, "no-op", {"nodes": []}],
        [1500, "remove", {"nodes": ["a"]}],
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    assert clock(written(tmp_path, text)).events == (
        (0.0, "add", "a"),
        (0.0, "add", "b"),
        (1.5, "remove", "a"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add,a\n5,vanish,a\n", r"trace.txt:2: 'vanish' is neither add nor remove"),
        ("0,add,a\n\n5,remove\n", r"trace.txt:3: '5,remove' is not milliseconds"),
        ("0,add,a\nsoon,remove,a\n", r"trace.txt:2: 'soon' is not a time"),
        ("-1,add,a\n", r"trace.txt:1: '-1' is not a time"),
        (
            "2021-12-11, 11:11:30, 5\n2021-12-11, 25:11:30, 5\n",
            r"trace.txt:2: .* no row of a known trace format",
        ),
        ("2021-12-11, 11:11:30, -5\n", r"trace.txt:1: -5 nodes"),
        ("time,nodes\n", r"trace.txt:1: 'time,nodes' is no row of a known"),
        ('{"metadata": {}, "data": [1]}', r"trace.txt:1: metadata.gap_seconds is None"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1, -2]}', r"trace.txt:data\[1\]: -2 is not a count"),
        ('{"metadata": {"gap_seconds": 5}, "data": []}', r"trace.txt:1: data is not a list"),
        (
            '[0, "add", {"nodes": ["a"]}]\n[9, "gone", {"nodes": ["a"]}]\n',
            r"trace.txt:2: .*is not \[milliseconds",
        ),
        ("# nothing\n\n", "is empty"),
        ('{"metadata": {"gap_seconds": 5}, "data": [0, 0]}', "no node ever joins"),
    ],
)
def test_refuses_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_trace(written(tmp_path, text))


def test_refuses_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot read trace .*missing\.csv: check the path"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"0,add,\xff\xfe")
    with pytest.raises(BadInputError, match=r"not UTF-8 \(byte 6\)"):
        read_trace(tmp_path / "bytes.csv")


def strike(**changes: object) -> str:
    point = {
        "iteration": 2,
        "phase": "rollout",
        "node": "s0",
        "event": "notice",
        "nth_request": 1,
        "denoise_step": 4,
    }
    return json.dumps({key: value for key, value in (point | changes).items() if value is not None})


BACK = {"event": "return", "nth_request": None, "denoise_step": None}


def test_progress_points_come_in_the_order_of_the_run(tmp_path: Path) -> None:
    lines = [
        "# comment",
        strike(event="kill", iteration=4),
        strike(seconds_left=20),
        strike(seconds_left=20),
        strike(iteration=4, **BACK),
    ]
    trace = read_trace(written(tmp_path, "\n".join(lines)))
    place = {"phase": "rollout", "node": "s0"}
    assert trace == ProgressTrace(
        points=(
            ProgressPoint(
                iteration=2, event="notice", nth_request=1, denoise_step=4, seconds_left=20, **place
            ),
            ProgressPoint(iteration=4, event="return", **place),
            ProgressPoint(iteration=4, event="kill", nth_request=1, denoise_step=4, **place),
        ),
        repairs=(
            "1 lines out of order, sorted (first at line 3)",
            "1 repeated lines dropped (first at line 4)",
        ),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (strike(event="reboot"), "trace.txt:1: event: Input should be 'notice', 'kill' or 'return'"),
        (strike(step=3), "trace.txt:1: step: Unexpected"),
        (strike(iteration="2"), "trace.txt:1: iteration: Input should be a valid integer"),
        (strike(iteration=-2), "trace.txt:1: iteration is negative"),
        (strike(denoise_step=None), "trace.txt:1: when does the notice strike"),
        (strike(nth_request=0), "trace.txt:1: when does the notice strike"),
        (strike(event="kill", seconds_left=5), "trace.txt:1: a kill gives no notice"),
        (strike(seconds_left=0), "trace.txt:1: seconds_left = 0"),
        (strike(event="return"), "trace.txt:1: a return happens when its phase begins"),
        (strike(**BACK), "trace.txt:1: return of s0 in iteration 2, when it is there"),
        (strike() + "\n" + strike(iteration=3), "trace.txt:2: notice of s0 in iteration 3, when it is away"),
        ('{"iteration": 2,', "trace.txt:1: the line: Invalid JSON"),
    ],
)
def test_progress_refuses_with_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_trace(written(tmp_path, line))


def test_the_quickstart_trace_interrupts_in_every_way() -> None:
    trace = read_trace(RECIPES / "traces" / "quickstart.jsonl")
    assert isinstance(trace, ProgressTrace)
    assert trace.repairs == ()
    strikes = [point for point in trace.points if point.event != "return"]
    kinds = sorted((point.event, point.phase) for point in strikes)
    assert kinds == [("kill", "rollout"), ("notice", "explore"), ("notice", "rollout"), ("notice", "rollout")]
    assert all((point.denoise_step or 0) > 0 and point.iteration >= 2 for point in strikes)
    assert trace.points[-1].event == "return"
    assert trace.points[-1].iteration < 20
    away: set[str] = set()
    for point in trace.points:
        away ^= {point.node}
        assert len(away) <= 1


def events(*rows: tuple[float, str, str]) -> ClockTrace:
    return ClockTrace(events=tuple(ClockEvent(*row) for row in rows))  # type: ignore[arg-type]


def test_slots_hold_the_first_nodes_and_replace_those_that_go() -> None:
    trace = events(
        *[(0.0, "add", node) for node in "abc"],
        (60.0, "remove", "a"),  # c takes its slot at once
        (120.0, "remove", "b"),  # nobody is left for this one
        (180.0, "add", "d"),
    )
    assert slots(trace, 2, speedup=60) == [
        (0.0, 0, "join"),
        (0.0, 1, "join"),
        (1.0, 0, "notice"),
        (1.0, 0, "join"),
        (2.0, 1, "notice"),
        (3.0, 1, "join"),
    ]


def test_a_node_that_goes_at_the_same_instant_replaces_nobody() -> None:
    trace = events((0.0, "add", "a"), (0.0, "add", "b"), (5.0, "remove", "a"), (5.0, "remove", "b"))
    assert slots(trace, 1) == [(0.0, 0, "join"), (5.0, 0, "notice")]


def test_nodes_no_slot_holds_may_come_and_go() -> None:
    trace = events((0.0, "add", "a"), (1.0, "add", "b"), (2.0, "remove", "b"))
    assert slots(trace, 1) == [(0.0, 0, "join")]
    assert slots(trace, 0) == []


@pytest.mark.parametrize(
    ("name", "count", "hours", "most"),
    [
        ("bamboo-p3-trace.csv", 344, 11.366666666666667, 32),
        ("bamboo-g4dn-trace.csv", 153, 10.766666666666667, 24),
        ("bamboo-a100x1-east1b.txt", 372, None, 64),
    ],
)
def test_public_traces_read_clean(name: str, count: int, hours: float | None, most: int) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    trace = clock(path)
    assert (len(trace.events), trace.repairs) == (count, ())
    if hours is not None:
        assert trace.events[-1].at_seconds / 3600 == hours
    present = peak = 0
    for event in trace.events:
        present += 1 if event.change == "add" else -1
        peak = max(peak, present)
    assert peak == most
    for slot in range(2):
        changes = [event.change for event in slots(trace, 2, 60) if event.slot == slot]
        assert changes == ["join", "notice"] * (len(changes) // 2) + ["join"] * (len(changes) % 2)
