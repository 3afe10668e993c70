"""The order is fixed: journal the event, decide, then journal and dispatch each command."""

from collections.abc import Iterator

from spotlight_core.drive import drive
from spotlight_core.events import Command, Event, SetTimer, Timer


class Countdown:
    """Asks for as many timers as a timer's id says, each with one less to go."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def decide(self, event: Event) -> list[Command]:
        assert isinstance(event, Timer)
        self.log.append(f"decide {event.id}")
        return [SetTimer(id=str(left), at=event.at + 1) for left in range(int(event.id))]


class Queue:
    """An executor in virtual time: a set timer fires when its turn comes."""

    def __init__(self, log: list[str], first: str) -> None:
        self.log = log
        self.waiting = [Timer(id=first)]

    def events(self) -> Iterator[Event]:
        seq = 0
        while self.waiting:
            event = self.waiting.pop(0)
            yield event.stamped(event.at, seq, 1)
            seq += 1

    def execute(self, command: Command) -> None:
        assert isinstance(command, SetTimer)
        self.log.append(f"execute {command.id}")
        self.waiting.append(Timer(id=command.id, at=command.at))


def run(first: str, stop_after: int = 10**6) -> tuple[list[str], Queue]:
    log: list[str] = []
    queue = Queue(log, first)
    seen: list[Event] = []

    def journal(word: Event | Command) -> None:
        if isinstance(word, Timer):
            seen.append(word)
            log.append(f"journal {word.id} at {word.at:.0f} seq {word.seq}")
        elif isinstance(word, SetTimer):
            log.append(f"journal set {word.id}")

    drive(Countdown(log), queue, journal, until=lambda: len(seen) >= stop_after)
    return log, queue


def test_each_event_is_journaled_decided_and_dispatched_in_order() -> None:
    log, queue = run("2")
    assert log == [
        "journal 2 at 0 seq 0",
        "decide 2",
        "journal set 0",
        "execute 0",
        "journal set 1",
        "execute 1",
        "journal 0 at 1 seq 1",
        "decide 0",
        "journal 1 at 1 seq 2",
        "decide 1",
        "journal set 0",
        "execute 0",
        "journal 0 at 2 seq 3",
        "decide 0",
    ]
    assert queue.waiting == []


def test_until_stops_after_the_commands_of_the_event_that_met_it() -> None:
    log, queue = run("2", stop_after=1)
    assert log[-1] == "execute 1"
    assert [event.id for event in queue.waiting] == ["0", "1"]
