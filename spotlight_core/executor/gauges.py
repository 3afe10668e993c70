"""The run in numbers, for whoever watches it: a fold over the journal's words, as Prometheus text.

A fold of its own and not the deciders' state, which only the coordinator's thread may look at.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spotlight_core import events as ev
from spotlight_core.events import NodeKey, SPGroup, Word

Sizes = Mapping[str, float]
STATES = ("pending", "queued", "in_flight")


def _no_sizes() -> Sizes:
    return {}


@dataclass(slots=True, kw_only=True)
class _Lease:
    request: str
    group: SPGroup
    queued: bool


class Gauges:
    """Give it every word of the journal; read it from any thread.

    ``sizes``: more gauges by name, asked whenever somebody looks.
    """

    def __init__(self, sizes: Callable[[], Sizes] = _no_sizes) -> None:
        self.phase, self.iteration = "", 0
        self._sizes = sizes
        self._lock = threading.Lock()
        self._kinds: dict[str, str] = {}  # of the requests that are not settled
        self._leases: dict[str, _Lease] = {}
        self._held: dict[str, set[str]] = {}  # leases of a request
        self._nodes: dict[NodeKey, list[str]] = {}  # pool, state
        self._steps: dict[str, int] = {}  # last committed denoise step of a request
        self._counters: Counter[tuple[str, str]] = Counter()
        self._committed_steps = 0

    def __call__(self, word: Word) -> None:
        handler = _HANDLERS.get(type(word))
        if handler is not None:
            with self._lock:
                handler(self, word)

    # -- reading ------------------------------------------------------------------------------------

    def requests(self) -> dict[str, dict[str, int]]:
        """How many requests are not settled, by kind and state."""
        with self._lock:
            counts: dict[str, dict[str, int]] = {}
            for request, kind in self._kinds.items():
                by_state = counts.setdefault(kind, dict.fromkeys(STATES, 0))
                by_state[self._state(request)] += 1
            return counts

    def nodes(self) -> dict[str, dict[str, int]]:
        """How many nodes are there, by pool and state (``ready``, ``draining``)."""
        with self._lock:
            counts: dict[str, dict[str, int]] = {}
            for pool, state in self._nodes.values():
                by_state = counts.setdefault(pool, {"ready": 0, "draining": 0})
                by_state[state] += 1
            return counts

    def text(self) -> str:
        """Everything in Prometheus's text format."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _metric("spotlight_requests", "gauge", "Requests that are not settled.")
        for kind, states in sorted(self.requests().items()):
            for state, count in states.items():
                yield f'spotlight_requests{{kind="{kind}",state="{state}"}} {count}'
        yield from _metric("spotlight_nodes", "gauge", "Nodes that are there.")
        for pool, states in sorted(self.nodes().items()):
            for state, count in states.items():
                yield f'spotlight_nodes{{pool="{pool}",state="{state}"}} {count}'
        with self._lock:
            leases, steps, counters = len(self._leases), self._committed_steps, dict(self._counters)
        yield from _metric("spotlight_leases", "gauge", "Leases that groups hold.")
        yield f"spotlight_leases {leases}"
        yield from _metric(
            "spotlight_denoise_steps_committed_total",
            "counter",
            "Denoise steps that a loss cannot take back.",
        )
        yield f"spotlight_denoise_steps_committed_total {steps}"
        yield from _metric("spotlight_words_total", "counter", "What happened, by word and how it ended.")
        for (word, how), count in sorted(counters.items()):
            yield f'spotlight_words_total{{word="{word}",how="{how}"}} {count}'
        yield from _metric("spotlight_iteration", "gauge", "The iteration under way.")
        yield f"spotlight_iteration {self.iteration}"
        for name, value in sorted(self._sizes().items()):
            yield from _metric(f"spotlight_{name}", "gauge", "Held now.")
            yield f"spotlight_{name} {value}"

    def _state(self, request: str) -> str:
        held = self._held.get(request)
        if not held:
            return "pending"
        return "queued" if all(self._leases[lease].queued for lease in held) else "in_flight"

    # -- the fold -----------------------------------------------------------------------------------

    def _submitted(self, word: ev.Submitted) -> None:
        for request in word.requests:
            self._kinds.setdefault(request.id, request.kind)
        self._counters["submitted", "requests"] += len(word.requests)

    def _start(self, word: ev.Start) -> None:
        self._leases[word.lease] = _Lease(request=word.request.id, group=word.group, queued=word.queued)
        self._held.setdefault(word.request.id, set()).add(word.lease)
        how = "resumed" if word.from_denoise_step else "from_noise"
        self._counters["start", how] += 1

    def _started(self, word: ev.Started) -> None:
        lease = self._leases.get(word.lease)
        if lease is not None:
            lease.queued = False

    def _finished(self, word: ev.Finished) -> None:
        self._counters["finished", "results"] += 1
        self._end(word.lease)

    def _failed(self, word: ev.Failed) -> None:
        self._counters["failed", "abandoned" if word.error == "abandoned" else "error"] += 1
        self._end(word.lease)

    def _committed(self, word: ev.Committed) -> None:
        self._counters["committed", "released" if word.released else "kept"] += 1
        if word.request in self._kinds:
            known = self._steps.get(word.request, 0)
            self._committed_steps += max(0, word.next_denoise_step - known)
            self._steps[word.request] = max(known, word.next_denoise_step)
        if word.released:
            self._end(word.lease)

    def _settle(self, word: ev.Settle) -> None:
        self._counters["settle", word.outcome] += 1
        self._kinds.pop(word.request, None)
        self._steps.pop(word.request, None)
        for lease in list(self._held.get(word.request, ())):
            self._end(lease)

    def _end(self, name: str) -> None:
        lease = self._leases.pop(name, None)
        if lease is not None:
            held = self._held[lease.request]
            held.discard(name)
            if not held:
                del self._held[lease.request]

    def _end_where(self, gone: Callable[[SPGroup], bool]) -> None:
        for name in [name for name, lease in self._leases.items() if gone(lease.group)]:
            self._end(name)

    def _end_node(self, node: str, incarnation: int) -> None:
        self._end_where(lambda group: (group.node, group.generation) == (node, incarnation))

    def _joined(self, word: ev.NodeJoined) -> None:
        self._counters["node_joined", word.pool] += 1
        self._nodes[word.node, word.incarnation] = [word.pool, "ready"]

    def _noticed(self, word: ev.Notice) -> None:
        self._counters["notice", word.source] += 1
        node = self._nodes.get((word.node, word.incarnation))
        if node is not None:
            node[1] = "draining"

    def _lost(self, word: ev.Lost) -> None:
        self._counters["lost", word.cause] += 1
        self._nodes.pop((word.node, word.incarnation), None)
        self._end_node(word.node, word.incarnation)

    def _released(self, word: ev.Release) -> None:
        self._end_node(word.node, word.incarnation)

    def _actor_lost(self, word: ev.ActorLost) -> None:
        self._counters["actor_lost", "actors"] += 1
        self._end_where(lambda group: group == word.group)

    def _phase(self, word: ev.PhaseChanged) -> None:
        self.phase, self.iteration = word.phase, word.iteration


_HANDLERS: dict[type, Callable[[Gauges, Any], None]] = {
    ev.Submitted: Gauges._submitted,
    ev.Start: Gauges._start,
    ev.Started: Gauges._started,
    ev.Finished: Gauges._finished,
    ev.Failed: Gauges._failed,
    ev.Committed: Gauges._committed,
    ev.Settle: Gauges._settle,
    ev.NodeJoined: Gauges._joined,
    ev.Notice: Gauges._noticed,
    ev.Lost: Gauges._lost,
    ev.Release: Gauges._released,
    ev.ActorLost: Gauges._actor_lost,
    ev.PhaseChanged: Gauges._phase,
}


def _metric(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"
