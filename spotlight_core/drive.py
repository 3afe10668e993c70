"""decider x executor: the loop that runs every level below the iteration, live or simulated."""

from collections.abc import Callable, Iterator
from typing import Protocol

from spotlight_core.events import Command, Event


class Decider(Protocol):
    """A pure state machine: reads no clock, environment, file or global generator."""

    def decide(self, event: Event) -> list[Command]: ...


class Together:
    """Several deciders as one: each sees every event, and their commands follow in their order."""

    def __init__(self, *deciders: Decider) -> None:
        self.deciders = deciders

    def decide(self, event: Event) -> list[Command]:
        return [command for decider in self.deciders for command in decider.decide(event)]


class Executor(Protocol):
    """Turns commands into effects.  Never blocks in ``execute``: failures come back as events."""

    def events(self) -> Iterator[Event]:
        """Stamped events in order; ends when the executor is closed."""
        ...

    def execute(self, command: Command) -> None: ...


Journal = Callable[[Event | Command], None]


def drive(
    decider: Decider, executor: Executor, journal: Journal, until: Callable[[], bool] = lambda: False
) -> None:
    """Journal, decide, dispatch, for each event until the executor closes or ``until()`` holds."""
    for event in executor.events():
        journal(event)
        for command in decider.decide(event):
            journal(command)
            executor.execute(command)
        if until():
            return
