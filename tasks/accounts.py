"""What the driver knows of money and nodes: folds over the journal that the coordinator writes.

The journal is read, not listened to: after a word that the driver acts on, everything before it is
on disk, so that a question asked then is answered from all of it.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from spotlight_core.errors import FleetError
from spotlight_core.events import Lost, NodeJoined, Start, Word
from spotlight_core.journal import JournalFollower
from spotlight_core.market.ledger import CostLedger
from tasks.display import Display

T = TypeVar("T")
FOLLOW_SECONDS = 0.5


class SpotNodes:
    """Tells the display how many spot nodes there are."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._present: set[tuple[str, int]] = set()

    def __call__(self, word: Word) -> None:
        if isinstance(word, NodeJoined) and word.pool == "spot":
            self._present.add((word.node, word.incarnation))
        elif isinstance(word, Lost):
            self._present.discard((word.node, word.incarnation))
        else:
            return
        self._display.nodes(len(self._present))


class ExploredOn:
    """Where the seeds of the last explored batches were denoised, by prompt occurrence and seed."""

    def __init__(self) -> None:
        self._nodes: dict[int, dict[tuple[str, int], str]] = {}

    def __call__(self, word: Word) -> None:
        if isinstance(word, Start) and word.request.kind == "explore":
            iteration = int(word.request.id.partition("/")[0])
            nodes = self._nodes.setdefault(iteration, {})
            occurrence = word.request.prompt.occurrence
            nodes.update(dict.fromkeys(((occurrence, seed) for seed in word.request.seeds), word.group.node))
            for old in sorted(self._nodes)[:-2]:
                del self._nodes[old]

    def nodes(self, iteration: int) -> dict[tuple[str, int], str]:
        """Of the batch of an iteration."""
        return dict(self._nodes.get(iteration, {}))


def check_ends(ledger: CostLedger) -> None:
    """That no node is billed any more, once the fleet has been closed.

    Raises:
        FleetError: a node's end is not in the journal, so that what it cost is not known.
    """
    open_nodes = [bill.node for bill, _ in ledger.lives(0.0) if bill.stopped_at is None]
    if open_nodes:
        raise FleetError(
            f"the end of {', '.join(open_nodes)} is not in the journal",
            "continue with --resume: it ends what is left and counts it (see logs/coordinator.log)",
        )


class LiveLedger:
    """The ledger of a run under way, safe from any thread; ``observers`` see the same words after it."""

    def __init__(
        self, ledger: CostLedger, follower: JournalFollower, *observers: Callable[[Word], None]
    ) -> None:
        self._ledger = ledger
        self._follower = follower
        self._observers = observers
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="ledger", daemon=True)

    def start(self) -> None:
        """Keep up with the journal by itself, so that no question has to wait for a long way to catch up."""
        self._thread.start()

    def close(self) -> None:
        """Stop keeping up; it can still be asked."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def read(self, question: Callable[[CostLedger], T]) -> T:
        """An answer from everything that is in the journal by now.

        Raises:
            SpotlightError: the journal holds what the ledger cannot account for, now or before.
        """
        with self._lock:
            self._catch_up()
            return question(self._ledger)

    def _catch_up(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            for word in self._follower.news():
                self._ledger.apply(word)
                for observe in self._observers:
                    observe(word)
        except Exception as error:
            self._failure = error  # a word is missing from now on: no later answer would be right
            raise

    def _follow(self) -> None:
        while not self._closed.wait(FOLLOW_SECONDS):
            with self._lock:
                try:
                    self._catch_up()
                except Exception:  # told to whoever asks
                    return
