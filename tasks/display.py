"""Who is told how a run goes."""

from typing import Any, Protocol


class Display(Protocol):
    """Told of stages, finished iterations and nodes, from any thread."""

    def stage(self, text: str) -> None:
        """What happens now, in a few words."""
        ...

    def begin(self, done: int, iterations: int) -> None:
        """The loop begins with ``done`` of ``iterations`` behind it."""
        ...

    def iteration(self, record: dict[str, Any]) -> None:
        """A finished iteration, as its line in ``iterations.jsonl``."""
        ...

    def nodes(self, spot: int) -> None:
        """How many spot nodes are there now."""
        ...

    def close(self) -> None:
        """Nothing more will be told."""
        ...
