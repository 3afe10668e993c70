"""What a coordinator's process is built from, and who builds it: the real thing, or a test's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spotlight_core.config import RunConfig
from spotlight_core.drive import Decider
from spotlight_core.events import Word
from spotlight_core.executor.coordinator import NodeExecutor
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.service import Payloads


class Fleet(Protocol):
    """The nodes of a run."""

    def start(self) -> None:
        """Returns when the first nodes are there; raises SpotlightError when they do not come."""
        ...

    def alive(self) -> bool:
        """Whether nodes can still be talked to."""
        ...

    def close(self) -> None:
        """End every node; each one's Lost is in the inbox."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """``observe`` sees every word of the journal; ``sizes`` are gauges by name, asked from any thread.

    ``nodes`` gets every command but timers and alarms, ``Settle`` too.
    """

    decider: Decider
    nodes: NodeExecutor
    fleet: Fleet
    results: Payloads
    observe: Callable[[Word], None]
    sizes: Callable[[], Mapping[str, float]]


Build = Callable[[RunConfig, Path, str, Inbox], Parts]
