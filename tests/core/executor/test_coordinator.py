"""The coordinator in this process, with nodes that answer at once."""

import asyncio
import json
from pathlib import Path

import pytest

from spotlight_core.errors import FleetError
from spotlight_core.events import Event, PhaseChanged, Settle, Started, Word, encode
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.coordinator_process import Fence, Order, Superseded
from spotlight_core.executor.inbox import Inbox
from spotlight_core.journal import read_words
from tests.core.executor.coordinator_rig import Nodes, Straight, request, submit, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def coordinator(journal: Journal, epoch: int = 0) -> tuple[Coordinator, Inbox]:
    inbox = Inbox(epoch)
    made = Coordinator(decider=Straight(), nodes=Nodes(inbox), inbox=inbox, journal=journal)
    made.start()
    return made, inbox


def words(path: Path) -> list[str]:
    return [type(word).__name__ for word in read_words(path)]


def test_a_request_goes_through_and_every_word_is_journalled_in_order(path: Path) -> None:
    made, _ = coordinator(Journal(path))

    async def run() -> list[tuple[str, str]]:
        submission = submit(made, [request("a"), request("b")], deadline_seconds=5.0)
        return [(each.id, ref) async for each, ref in submission.results()]

    assert asyncio.run(run()) == [("a", "a"), ("b", "b")]
    made.close()
    assert words(path) == ["Submitted", "Start", "Start", "Finished", "Settle", "Finished", "Settle"]
    submitted = next(read_words(path))
    assert submitted.deadline == pytest.approx(submitted.at + 5.0, abs=1.0)  # type: ignore[union-attr]


def test_a_word_is_on_disk_before_it_is_executed(path: Path) -> None:
    seen: list[list[str]] = []

    class Watching(Nodes):
        def execute(self, command: object) -> None:
            seen.append(words(path))

    inbox = Inbox(0)
    made = Coordinator(decider=Straight(), nodes=Watching(inbox), inbox=inbox, journal=Journal(path))
    made.start()

    async def queue() -> None:
        submit(made, [request("a")])

    asyncio.run(queue())
    made.close()
    assert seen == [["Submitted", "Start"]]


def test_an_alarm_fails_who_waits_and_who_comes_later_and_the_rest_is_still_journalled(path: Path) -> None:
    made, inbox = coordinator(Journal(path))

    async def run() -> None:
        waiting = submit(made, [request("never", kind="explore"), request("alarm")])
        with pytest.raises(FleetError, match="two results of alarm differ"):
            _ = [ref async for _, ref in waiting.results()]
        with pytest.raises(FleetError, match="two results of alarm differ"):
            submit(made, [request("b")])

    asyncio.run(run())
    inbox.post(PhaseChanged(phase="train", iteration=1))
    made.close()
    assert words(path) == ["Submitted", "Alarm", "PhaseChanged"]


def test_a_fault_of_the_decider_is_told_to_who_waits(path: Path) -> None:
    class Broken:
        def decide(self, event: Event) -> list[Settle]:
            raise KeyError("spot-7")

    inbox = Inbox(0)
    made = Coordinator(decider=Broken(), nodes=Nodes(inbox), inbox=inbox, journal=Journal(path))
    made.start()

    async def run() -> None:
        with pytest.raises(FleetError, match="spot-7"):
            _ = [ref async for _, ref in submit(made, [request("a")]).results()]

    asyncio.run(run())
    made.close()


def test_closing_fails_who_still_waits(path: Path) -> None:
    made, _ = coordinator(Journal(path))

    async def run() -> None:
        waiting = submit(made, [request("never", kind="explore")])
        made.close()
        with pytest.raises(FleetError, match="closed"):
            _ = [ref async for _, ref in waiting.results()]

    asyncio.run(run())
    made.close()


def test_a_journal_is_continued_behind_its_last_whole_line(path: Path) -> None:
    words_seen: list[Word] = []
    first, second = Started(lease="a", seq=1), Started(lease="b", seq=2)
    path.write_bytes(encode(first) + b"\n" + b'{"word":"Star')
    journal = Journal(path, [words_seen.append])
    journal(second)
    journal.close()

    assert list(read_words(path)) == [first, second]
    assert words_seen == [second]


def test_a_coordinator_that_was_replaced_writes_not_one_more_word(tmp_path: Path, path: Path) -> None:
    """Two on one journal, as after a pause: the newer one's epoch is in run.json before it begins."""
    order = Order(run_folder=tmp_path, run_id="r", epoch=1)
    old, old_inbox = coordinator(Journal(path, fence=Fence(order)), epoch=1)
    old_inbox.post(PhaseChanged(phase="rollout", iteration=0))
    until(lambda: words(path) == ["PhaseChanged"])

    (tmp_path / "run.json").write_text(json.dumps({"epoch": 2}))
    newer = Order(run_folder=tmp_path, run_id="r", epoch=2)
    new, new_inbox = coordinator(Journal(path, fence=Fence(newer)), epoch=2)
    new_inbox.post(PhaseChanged(phase="rollout", iteration=0))
    old_inbox.post(PhaseChanged(phase="train", iteration=0))
    until(lambda: old.failure is not None)
    old_inbox.post(PhaseChanged(phase="publish", iteration=0))
    old.close()
    new.close()

    assert isinstance(old.failure, Superseded)
    assert [(word.epoch, word.phase) for word in read_words(path)] == [(1, "rollout"), (2, "rollout")]  # type: ignore[union-attr]


def test_a_fence_lets_its_own_epoch_and_unreadable_files_pass(tmp_path: Path) -> None:
    fence = Fence(Order(run_folder=tmp_path, run_id="r", epoch=2))
    fence()
    for said in ('{"epoch": 2}', '{"ep', "{}", '{"epoch": 1}', "[]", '{"epoch": "x"}'):
        (tmp_path / "run.json").write_text(said)
        fence()
    (tmp_path / "coordinator.json").write_text('{"epoch": 3}')

    with pytest.raises(Superseded, match="epoch 3 has the run"):
        fence()
    (tmp_path / "coordinator.json").unlink()
    with pytest.raises(Superseded):  # once is for ever
        fence()
