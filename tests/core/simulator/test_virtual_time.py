"""Virtual time: order, removal, processes."""

import pytest

from spotlight_core.simulator.virtual_time import Calendar, Occasion, Process


def test_entries_come_by_time_then_by_order_of_entry_and_never_in_the_past() -> None:
    calendar = Calendar()
    calendar.add(2.0, "late")
    calendar.add(1.0, "first")
    calendar.add(1.0, "second")
    assert [calendar.pop(), calendar.pop()] == ["first", "second"]
    calendar.add(0.5, "now")
    assert calendar.pop() == "now"
    assert calendar.now == 1.0
    assert [calendar.pop(), calendar.pop()] == ["late", None]


def test_a_removed_entry_does_not_happen_and_a_past_one_is_left_alone() -> None:
    calendar = Calendar()
    gone, past = calendar.add(2.0, "gone"), calendar.add(1.0, "past")
    calendar.pop()
    calendar.remove(gone)
    calendar.remove(past)
    calendar.add(3.0, "stays")
    assert calendar.pop() == "stays"


def test_processes_wait_for_each_other() -> None:
    door: Occasion[str] = Occasion()

    async def visitor() -> str:
        return "in by " + await door

    async def host() -> list[str]:
        first, second = Process(visitor()), Process(visitor())
        return [await first, await second]

    process = Process(host())
    assert not process.done
    door.succeed("noon")
    assert process.value == ["in by noon", "in by noon"]


def test_an_occasion_happens_once_and_has_no_value_before() -> None:
    door: Occasion[int] = Occasion()
    with pytest.raises(RuntimeError, match="not yet"):
        _ = door.value
    door.succeed(1)
    with pytest.raises(RuntimeError, match="once"):
        door.succeed(2)
