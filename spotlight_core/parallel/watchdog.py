"""Who of a node's ranks is gone: dead, or so long silent that it must be taken for hung.

Silence is a heartbeat that stands still.  A thread beats through steps of any length, so neither a slow
step nor a long collective looks like one.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from spotlight_core.parallel.table import Pulse

LOOK_SECONDS = 0.05
STEPS_OF_SILENCE = 3

Verdict = Literal["died", "hung"]
_log = logging.getLogger(__name__)


class Watched(Protocol):
    """What the watchdog needs of a node's rendezvous."""

    def pulses(self) -> dict[int, Pulse]:
        """What the process of every rank shows, by rank."""
        ...

    def lose(self, rank: int, boots: int) -> None:
        """End the groups that a rank is in, and count this process of its as gone."""
        ...


@dataclass(slots=True)
class _Silence:
    boots: int
    heartbeat: int
    seconds: float = 0.0
    judged: bool = False


class Silences:
    """Judges pulses; pure, so that time may be anything."""

    def __init__(self, hung_seconds: float, longest_look_seconds: float = 4 * LOOK_SECONDS) -> None:
        """A rank is hung after ``hung_seconds`` or three of its denoise steps, whichever is longer.

        No look counts for more than ``longest_look_seconds`` of silence: where this process itself was
        stopped, or its machine asleep, the others' silence proves nothing.
        """
        self._hung_seconds = hung_seconds
        self._longest_look_seconds = longest_look_seconds
        self._silences: dict[int, _Silence] = {}
        self._looked_at: float | None = None

    def look(self, now: float, pulses: Mapping[int, Pulse]) -> list[tuple[int, Verdict]]:
        """Ranks found gone at ``now`` seconds, in order; each process once."""
        elapsed = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_look_seconds)
        self._looked_at = now
        self._silences = {rank: known for rank, known in self._silences.items() if rank in pulses}
        verdicts = ((rank, self._judge(rank, pulses[rank], elapsed)) for rank in sorted(pulses))
        return [(rank, verdict) for rank, verdict in verdicts if verdict is not None]

    def _judge(self, rank: int, pulse: Pulse, elapsed: float) -> Verdict | None:
        known = self._silences.get(rank)
        if known is None or known.boots != pulse.boots:
            known = self._silences[rank] = _Silence(pulse.boots, pulse.heartbeat)
        elif known.heartbeat != pulse.heartbeat:
            known.heartbeat, known.seconds = pulse.heartbeat, 0.0
        else:
            known.seconds += elapsed
        limit = max(self._hung_seconds, STEPS_OF_SILENCE * pulse.step_seconds)
        verdict: Verdict | None = "hung" if known.seconds >= limit else None
        verdict = verdict if pulse.alive else "died"
        if known.judged or verdict is None:
            return None
        known.judged = True
        return verdict


class Watchdog:
    """Looks at a node's ranks from a thread of its owner; each that is gone is told once.

    First the rank's groups are ended, so that its survivors stop waiting, then the callback runs.
    """

    def __init__(
        self,
        rendezvous: Watched,
        hung_seconds: float,
        on_hung: Callable[[int], None],
        on_dead: Callable[[int], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._silences = Silences(hung_seconds)
        self._tell: dict[Verdict, Callable[[int], None]] = {"hung": on_hung, "died": on_dead}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Look every ``LOOK_SECONDS`` from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._thread.join()

    def step(self, now: float) -> None:
        """One look, at ``now`` seconds."""
        pulses = self._rendezvous.pulses()
        for rank, verdict in self._silences.look(now, pulses):
            self._rendezvous.lose(rank, pulses[rank].boots)
            try:
                self._tell[verdict](rank)
            except Exception:  # the other ranks still need their watchdog
                _log.exception("rank %d %s, and what should follow failed", rank, verdict)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            self.step(time.monotonic())
