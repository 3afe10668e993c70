"""An audit finds every breach it is there to find, and none in a journal that keeps its promises."""

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotlight_core import events as ev
from spotlight_core.events import Event, SPGroup, Word
from spotlight_core.market.audit import AuditReport, audit
from spotlight_core.market.audit_promises import Evidence
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.node_records import NodeRecord, Strike
from tests.core.market.journals import (
    S0,
    S1,
    A,
    B,
    committed,
    done,
    finished,
    kept,
    killed,
    notice,
    rank_lost,
    stamped,
    start,
)
from tests.core.market.words import boot_failed, request


def record(node: str, stopped_at: float | None, started_at: float = 0.0) -> NodeRecord:
    return NodeRecord(
        node=node, incarnation=1, pool="spot", gpus=1, started_at=started_at, stopped_at=stopped_at
    )


EVIDENCE = Evidence(
    finished=True,
    commit_every_steps=4,
    lives=(record("s0", 5.0), record("s1", 20.0)),
    strikes={},
)


def breaches(report: AuditReport) -> list[str]:
    return [breach for verdict in report.verdicts for breach in verdict.breaches]


def without(words: list[Word], kind: type[Word], number: int = 0) -> list[Word]:
    gone = [word for word in words if isinstance(word, kind)][number]
    return [word for word in words if word is not gone]


def swapped(words: list[Word], old: Word, new: Word) -> list[Word]:
    assert old in words
    return [new if word == old else word for word in words]


def inserted(words: list[Word], after: Word, *new: Word) -> list[Word]:
    """``new`` behind ``after``, and every event numbered anew."""
    assert after in words
    found = [part for word in words for part in ((word, *new) if word == after else (word,))]
    seq, at, result = 0, 0.0, list[Word]()
    for word in found:
        if isinstance(word, Event):
            seq, at = seq + 1, max(at, word.at)
            result.append(word.stamped(at, seq, word.epoch))
        else:
            result.append(word)
    return result


def test_a_journal_that_keeps_its_promises() -> None:
    report = audit(kept(), EVIDENCE)
    assert breaches(report) == []
    assert report.kept
    said = {verdict.said: verdict.counted for verdict in report.verdicts}
    assert said["every submitted request was settled exactly once"] == "2 requests"
    assert said["no group ran two requests at once, and no lease was given twice"] == (
        "4 leases, 2 handed over early"
    )
    assert said["with a notice, no denoise step was lost"] == "1 notice, 1 request in flight"
    assert said["the ledger's node-seconds are those of the nodes' own logs"] == (
        "2 lives, 25.0 s of ended ones"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (without(kept(), ev.Settle), ["b was never settled"]),
        (inserted(kept(), kept()[16], done("b")), ["b was settled twice"]),
        (
            inserted(kept(), kept()[0], ev.Settle(request="z", outcome="aborted")),
            ["z was settled and never submitted"],
        ),
        (
            without(kept(), ev.Finished, 1),
            ["a is done with a.out, which no lease of it made"],
        ),
        (
            inserted(kept(), kept()[15], finished("0.3", "b", "other")),
            ["b has the results d and other"],
        ),
        (inserted(kept(), kept()[2], ev.Alarm(detail="x")), ["an alarm was raised: x"]),
        (
            swapped(kept(), kept()[10], start("0.3", B, S1, 3)),
            ["lease 0.3 of b begins at denoise step 3, and the last commit is noise"],
        ),
        (
            swapped(kept(), kept()[13], start("0.4", A, S1, 4, queued=True)),
            ["lease 0.4 of a begins at denoise step 4, and the last commit is denoise step 5"],
        ),
        (
            swapped(kept(), kept()[13], start("0.4", A, S1, 0, queued=True)),
            ["lease 0.4 of a begins at denoise step 0, and the last commit is denoise step 5"],
        ),
        (swapped(kept(), kept()[13], start("0.4", A, S1, 5)), ["s1#1 0 ran 0.3 when 0.4 began"]),
        (
            inserted(kept(), kept()[4], start("0.9", request("c"), S0, queued=True)),
            ["lease 0.9 is the second in line on s0#1 0"],
        ),
        (inserted(kept(), kept()[14], ev.Started(lease="0.4")), ["s1#1 0 ran 0.3 when 0.4 began"]),
        (swapped(kept(), kept()[10], start("0.1", B, S1)), ["lease 0.1 was given twice"]),
        (
            inserted(kept(), kept()[8], ev.Load(group=S0, policy=A.policy)),
            ["weights old-0 went to s0#1 0, after its notice"],
        ),
        (
            inserted(kept(), kept()[14], ev.Load(group=S0, policy=A.policy)),
            [
                "weights old-0 went to s0#1 0, after its notice",
                "weights old-0 went to s0#1 0, after its loss",
            ],
        ),
        (
            inserted(kept(), kept()[0], ev.Load(group=S1, policy=A.policy)),
            ["weights old-0 went to s1#1 0, which never joined"],
        ),
        (
            inserted(kept(), kept()[10], rank_lost(S0), rank_lost(S1)),
            ["lease 0.4 went to s1#1 0, whose process was dead"],
        ),
        (swapped(kept(), kept()[-1], replace(kept()[-1], seq=2)), ["event 0/2 follows event 0/11"]),
        (
            swapped(kept(), kept()[-1], replace(kept()[-1], stopped_at=21.0)),
            ["s1#1 ended at 20.0 and is billed until 21.0"],
        ),
        (
            swapped(kept(), kept()[0], replace(kept()[0], started_at=0.5)),
            ["s0#1 began at 0.0 and is billed from 0.5"],
        ),
        (without(kept(), ev.Lost, 1), ["the journal lacks the end of s1#1"]),
        (
            inserted(
                kept(),
                kept()[-1],
                ev.NodeJoined(node="s9", incarnation=1, pool="spot", gpus=1, started_at=9.0),
            ),
            ["s9#1 has no log"],
        ),
    ],
)
def test_each_breach_is_named(words: list[Word], said: list[str]) -> None:
    report = audit(words, EVIDENCE)
    assert [breach for breach in breaches(report) if breach in said] == said
    assert not report.kept


def test_what_the_ledger_makes_of_a_journal_is_held_against_the_logs() -> None:
    def said(*more: Word, **changes: int | str) -> list[str]:
        words = swapped(kept(), kept()[0], replace(kept()[0], **changes))
        end = kept()[-1]
        assert isinstance(end, Event)
        last = [
            word.stamped(end.at, end.seq + 1 + i, 0) for i, word in enumerate(more) if isinstance(word, Event)
        ]
        return breaches(audit([*words, *last], EVIDENCE))

    assert said() == []
    assert said(gpus=2) == ["s0#1 is 1 x spot, and billed as 2 x spot"]
    assert said(pool="reserved") == ["s0#1 is 1 x spot, and billed as 1 x reserved"]
    assert said(kept()[0]) == ["the ledger refuses the journal: node s0 began twice as incarnation 1"]
    assert said(pool="edge")[0] == (
        "the ledger refuses the journal: no price for pool 'edge' (known: on_demand, reserved, spot)"
    )


def test_gpu_seconds_that_are_billed_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostLedger, "gpu_hours", lambda self, now: {"idle": 25.5 / 3600.0})
    assert breaches(audit(kept(), EVIDENCE)) == ["25.5 GPU-seconds are billed, and the nodes logged 25.0"]


def test_a_boot_that_failed_is_billed_as_its_node_logged_it() -> None:
    def judged(stopped_at: float) -> AuditReport:
        words = [*kept(), replace(boot_failed("s9", 1.0, stopped_at, incarnation=1), at=20.0, seq=13)]
        lives = (*EVIDENCE.lives, record("s9", 4.0, 1.0))
        return audit(words, with_(EVIDENCE, lives=lives))

    assert breaches(judged(4.0)) == []
    assert judged(4.0).verdicts[8].counted == "3 lives, 28.0 s of ended ones"
    assert breaches(judged(4.5)) == ["s9#1 ended at 4.0 and is billed until 4.5"]


def test_what_is_asked_again_is_settled_again_with_the_same_result() -> None:
    again = [ev.Submitted(requests=(A,), at=20.0, seq=13), done("a")]
    assert breaches(audit([*kept(), *again], EVIDENCE)) == []
    assert breaches(audit([*kept(), *again[:1]], EVIDENCE)) == ["a was never settled"]
    assert breaches(audit([*kept(), *again, done("a")], EVIDENCE)) == ["a was settled twice"]
    cancelled = ev.Settle(request="a", outcome="cancelled")
    assert (
        breaches(audit([*kept(), again[0], cancelled, replace(again[0], seq=14), done("a")], EVIDENCE)) == []
    )


def test_a_damaged_commit_sends_the_next_start_to_noise_or_to_a_later_commit() -> None:
    def judged(step: int, after: float) -> list[str]:
        words = [word for word in kept() if word not in (kept()[-1], kept()[-2], kept()[-3], kept()[-4])]
        late = committed("0.1", "a", 7, released=False)
        lost_it = ev.Failed(lease="0.4", error="damaged", fault="node", commit_lost=True)
        more = stamped((10.0, late), (11.0, lost_it), (11.0, start("0.5", A, S1, step)), seq=9)
        return breaches(audit([*words, *more[int(after) :]], with_(EVIDENCE, finished=False)))

    assert judged(0, 0) == []
    assert judged(7, 0) == []
    assert judged(5, 0) == ["lease 0.5 of a begins at denoise step 5, and the last commit is denoise step 7"]
    assert judged(0, 1) == []
    assert judged(5, 1) == ["lease 0.5 of a begins at denoise step 5, and the last commit is noise"]


def test_work_that_a_noticed_node_did_not_commit_is_a_breach() -> None:
    words = [word for word in kept() if getattr(word, "next_denoise_step", None) is None]
    assert breaches(audit(words, EVIDENCE))[1:] == ["a on s0#1 was not committed when the node was released"]
    failed = swapped(
        kept(), kept()[11], replace(ev.Failed(lease="0.1", error="x", fault="node"), at=4.0, seq=9)
    )
    assert "a on s0#1 ended with: x" in breaches(audit(failed, EVIDENCE))


def test_a_provider_that_takes_the_node_before_its_deadline_gave_no_notice() -> None:
    words = swapped(killed(), killed()[4], replace(notice("s0"), at=3.0, seq=4))
    words = swapped(words, killed()[6], start("0.2", A, S1))
    report = audit(words, EVIDENCE)
    assert breaches(report) == []
    assert report.verdicts[6].counted == "1 notice, 1 request in flight, 1 cut short by the provider"


def test_a_kill_is_held_to_the_interval_of_commits_where_the_node_said_how_far_it_was() -> None:
    def judged(denoise_step: int, every: int = 4) -> AuditReport:
        strike = Strike(at=5.0, lease="0.1", request="a", denoise_step=denoise_step)
        return audit(killed(), with_(EVIDENCE, strikes={"0.1": strike}, commit_every_steps=every))

    assert breaches(judged(6)) == []
    assert judged(6).verdicts[7].counted == "1 request in flight, 1 known to the step, the worst lost 4"
    assert breaches(judged(7)) == ["a on s0#1 lost 5 denoise steps, and at most 4 were promised"]
    assert breaches(judged(9, every=0)) == []
    assert audit(killed(), EVIDENCE).verdicts[7].counted == "1 request in flight"


def test_a_run_that_goes_on_has_open_requests_and_logs_ahead_of_its_journal() -> None:
    words = kept()[:12]
    report = audit(words, with_(EVIDENCE, finished=False))
    assert breaches(report) == []
    assert report.verdicts[0].counted == "2 requests, 2 open"
    assert report.verdicts[8].counted == "2 lives, 2 not journaled yet, 0.0 s of ended ones"


def test_the_next_epoch_asks_again_and_may_go_on_from_what_the_former_one_committed() -> None:
    s9 = SPGroup(node="s9", incarnation=1)
    again = stamped(
        (30.0, ev.Lost(node="s1", incarnation=1, cause="killed", stopped_at=20.0)),
        (31.0, ev.NodeJoined(node="s9", incarnation=1, pool="spot", gpus=1, started_at=30.0)),
        (31.0, ev.Submitted(requests=(A, B))),
        (31.0, start("1.1", A, s9, 5)),
        (35.0, finished("1.1", "a")),
        (35.0, done("a")),
        (35.0, start("1.2", B, s9)),
        (39.0, finished("1.2", "b")),
        (39.0, done("b")),
        (40.0, ev.Lost(node="s9", incarnation=1, cause="shutdown", stopped_at=40.0)),
        epoch=1,
    )
    words = [*kept()[:13], kept()[14], *again]
    evidence = with_(EVIDENCE, lives=(*EVIDENCE.lives, record("s9", 40.0, 30.0)))
    report = audit(words, evidence)
    assert breaches(report) == []
    assert report.verdicts[0].counted == "4 requests, 2 cut off with a coordinator"
    late = [*words, replace(kept()[2], seq=99)]
    assert breaches(audit(late, evidence))[-1] == "event 0/99 follows event 1/6"
