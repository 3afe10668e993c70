"""Does a run's journal keep what Spotlight promises?  A pure fold: also of a run that goes on."""

from collections.abc import Iterable
from dataclasses import dataclass

from spotlight_core.events import Word
from spotlight_core.market.audit_books import Books
from spotlight_core.market.audit_losses import KillLosesFew, LedgerIsNodeLogs, NoticeLosesNothing
from spotlight_core.market.audit_promises import (
    DoneHasResult,
    Evidence,
    InOrder,
    NoneToLeaving,
    OneDigest,
    OneLease,
    Promise,
    ResumedFromLast,
    SettledOnce,
    Verdict,
)

PROMISES: tuple[type[Promise], ...] = (
    *(SettledOnce, DoneHasResult, OneDigest, OneLease, ResumedFromLast, NoneToLeaving),
    *(NoticeLosesNothing, KillLosesFew, LedgerIsNodeLogs, InOrder),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The verdicts, and how much was read.  ``finished``: the run has ended."""

    verdicts: tuple[Verdict, ...]
    words: int
    finished: bool

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)


class Audit:
    """Tell it every word of a journal in order, then ask for the report."""

    def __init__(self) -> None:
        self._books = Books()
        self._promises: list[Promise] = [promise() for promise in PROMISES]
        self._words = 0

    def see(self, word: Word) -> None:
        self._words += 1
        for promise in self._promises:
            promise.see(word, self._books)
        self._books.apply(word)

    def report(self, evidence: Evidence) -> AuditReport:
        """The verdicts so far; the nodes' logs in ``evidence`` are to be read after the journal."""
        return AuditReport(
            verdicts=tuple(promise.verdict(self._books, evidence) for promise in self._promises),
            words=self._words,
            finished=evidence.finished,
        )


def audit(words: Iterable[Word], evidence: Evidence) -> AuditReport:
    """The audit of a whole journal at once."""
    auditor = Audit()
    for word in words:
        auditor.see(word)
    return auditor.report(evidence)
