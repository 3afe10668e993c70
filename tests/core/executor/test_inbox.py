import threading

from spotlight_core.events import Event, Started, Timer
from spotlight_core.executor.inbox import Clock, Inbox


class Hands(Clock):
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


def names(events: list[Event]) -> list[str]:
    return [event.id if isinstance(event, Timer) else event.lease for event in events]  # type: ignore[attr-defined]


def test_events_come_out_in_the_order_they_went_in_stamped() -> None:
    inbox = Inbox(epoch=3, clock=Hands())
    inbox.post(Started(lease="a"))
    inbox.post(Started(lease="b"))
    inbox.close()

    assert list(inbox.events()) == [
        Started(lease="a", at=100.0, seq=1, epoch=3),
        Started(lease="b", at=100.0, seq=2, epoch=3),
    ]


def test_due_timers_ring_in_their_order_behind_what_has_arrived() -> None:
    clock = Hands()
    inbox = Inbox(epoch=0, clock=clock)
    for name, at in (("late", 130.0), ("second", 120.0), ("third", 120.0), ("first", 110.0)):
        inbox.set_timer(name, at)
    clock.at = 120.0
    inbox.post(Started(lease="a"))
    events = inbox.events()

    assert names([next(events) for _ in range(4)]) == ["a", "first", "second", "third"]


def test_a_busy_inbox_rings_too() -> None:
    clock = Hands()
    inbox = Inbox(epoch=0, clock=clock)
    inbox.set_timer("due", 110.0)
    clock.at = 110.0
    for number in range(3):
        inbox.post(Started(lease=str(number)))
    seen = []
    for event in inbox.events():
        seen.append(event)
        if isinstance(event, Timer):
            break
        inbox.post(Started(lease="more"))

    assert names(seen) == ["0", "1", "2", "due"]


def test_a_timer_set_by_another_thread_wakes_the_reader() -> None:
    inbox = Inbox(epoch=0)
    threading.Timer(0.05, lambda: inbox.set_timer("now", inbox.clock.now())).start()

    assert names([next(inbox.events())]) == ["now"]


def test_nothing_is_lost_from_many_threads() -> None:
    inbox = Inbox(epoch=0)

    def post(writer: int) -> None:
        for number in range(500):
            inbox.post(Started(lease=f"{writer}.{number}"))

    threads = [threading.Thread(target=post, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inbox.close()
    events = list(inbox.events())

    assert [event.seq for event in events] == list(range(1, 4001))
    for writer in range(8):
        mine = [name for name in names(events) if name.startswith(f"{writer}.")]
        assert mine == [f"{writer}.{number}" for number in range(500)]
