"""Silence is judged on made-up time; the watchdog tells each loss once."""

import pytest

from spotlight_core.parallel.table import Pulse
from spotlight_core.parallel.watchdog import Silences, Verdict, Watchdog

HUNG_SECONDS, LONGEST_LOOK_SECONDS = 2.0, 0.5


def pulse(heartbeat: int, *, alive: bool = True, boots: int = 1, step_seconds: float = 0.0) -> Pulse:
    return Pulse(boots=boots, heartbeat=heartbeat, alive=alive, steps=0, step_seconds=step_seconds)


def judged_at(pulses: list[Pulse], look_seconds: float = 0.25) -> list[tuple[float, Verdict]]:
    """When a rank that shows these pulses, one a look, is judged, and how."""
    silences = Silences(HUNG_SECONDS, LONGEST_LOOK_SECONDS)
    looks = ((look * look_seconds, {0: seen}) for look, seen in enumerate(pulses))
    return [(now, verdict) for now, seen in looks for _, verdict in silences.look(now, seen)]


def test_a_rank_that_beats_is_never_judged_however_long() -> None:
    assert judged_at([pulse(beat, step_seconds=1000.0) for beat in range(100)]) == []


def test_two_seconds_of_silence_are_hung_and_told_once() -> None:
    assert judged_at([pulse(0), pulse(1)] + [pulse(1)] * 30) == [(2.25, "hung")]


def test_a_late_beat_begins_the_silence_anew() -> None:
    assert judged_at([pulse(1)] * 8 + [pulse(2)] * 8 + [pulse(3)]) == []


def test_three_denoise_steps_of_silence_are_needed_where_these_are_longer() -> None:
    assert judged_at([pulse(1, step_seconds=1.5)] * 40) == [(4.5, "hung")]


def test_a_dead_process_is_told_at_once_and_once() -> None:
    assert judged_at([pulse(1), pulse(2), *[pulse(2, alive=False)] * 20]) == [(0.5, "died")]


def test_a_hung_rank_that_is_then_killed_is_not_told_again() -> None:
    assert judged_at([pulse(1)] * 12 + [pulse(1, alive=False)] * 3) == [(2.0, "hung")]


def test_another_process_in_the_slot_is_judged_by_itself() -> None:
    beats = [pulse(1, alive=False), *[pulse(1, boots=2)] * 9]
    assert judged_at(beats) == [(0.0, "died"), (2.25, "hung")]


def test_a_sleep_of_the_watcher_counts_for_one_look() -> None:
    assert judged_at([pulse(1)] * 4, look_seconds=100.0) == []
    assert judged_at([pulse(1)] * 5, look_seconds=100.0) == [(400.0, "hung")]


class FakeNode:
    """Pulses that a test sets."""

    def __init__(self) -> None:
        self.shown = {0: pulse(0), 1: pulse(0)}
        self.lost: list[int] = []

    def pulses(self) -> dict[int, Pulse]:
        return self.shown

    def lose(self, rank: int, boots: int) -> None:
        assert boots == self.shown[rank].boots
        self.lost.append(rank)


def test_groups_are_ended_before_the_callback_and_a_failing_one_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node, told = FakeNode(), []

    def on_dead(rank: int) -> None:
        told.append((rank, tuple(node.lost)))
        if rank == 0:
            raise RuntimeError("no standby")

    watchdog = Watchdog(node, HUNG_SECONDS, on_hung=lambda rank: None, on_dead=on_dead)
    node.shown = {0: pulse(0, alive=False), 1: pulse(0, alive=False)}
    watchdog.step(0.0)
    watchdog.step(1.0)
    assert told == [(0, (0,)), (1, (0, 1))]
    assert "rank 0 died, and what should follow failed" in caplog.text
