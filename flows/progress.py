"""What `spotlight train` shows while it runs: one live line at a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tasks.display import Display


def build_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


@contextlib.contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over parts of some work, at a terminal; yields what is told of those that are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class _Pace:
    """Remaining seconds from the mean of the iterations done by this process."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first = 0
        self.iterations = 0

    def begin(self, done: int, iterations: int) -> None:
        self._began, self._first, self.iterations = time.monotonic(), done, iterations

    def left(self, done: int) -> str:
        """Minutes and seconds left; a dash before the first iteration is over."""
        if done <= self._first:
            return "–"
        each = (time.monotonic() - self._began) / (done - self._first)
        minutes, seconds = divmod(round(each * (self.iterations - done)), 60)
        return f"{minutes}:{seconds:02d}"


def summary(record: dict[str, Any]) -> dict[str, str]:
    """What is worth a glance in an iteration's record."""
    metrics, evaluation = record["metrics"], record["evaluation"]
    return {
        "score": f"{evaluation['score']:.3f}" if evaluation else "",
        "reward": f"{metrics['train/reward_mean']:.3f}" if "train/reward_mean" in metrics else "",
        "usd": f"${metrics.get('cost/usd_total', 0.0):.4f}",
        "preemptions": f"{metrics.get('spot/preemptions', 0):g}",
    }


class PlainDisplay:
    """A line per stage and per iteration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = _Pace()
        self._spot = 0

    def stage(self, text: str) -> None:
        self._say(text)

    def begin(self, done: int, iterations: int) -> None:
        self._pace.begin(done, iterations)

    def iteration(self, record: dict[str, Any]) -> None:
        said, done = summary(record), record["iteration"] + 1
        parts = [f"iteration {done}/{self._pace.iterations}" if done else "base model"]
        parts += [f"{name} {said[name]}" for name in ("reward", "score") if said[name]]
        parts += [said["usd"], f"spot nodes {self._spot}", f"preemptions {said['preemptions']}"]
        self._say("  ".join([*parts, f"left {self._pace.left(done)}"]))

    def nodes(self, spot: int) -> None:
        self._spot = spot

    def close(self) -> None:
        """Nothing to undo."""

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar that stays in place."""

    def __init__(self, console: Console) -> None:
        self._pace = _Pace()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("score {task.fields[score]}  {task.fields[usd]}  spot {task.fields[spot]}"),
            TextColumn("preemptions {task.fields[preemptions]}  left {task.fields[left]}"),
            console=console,
        )
        fields: dict[str, Any] = {"score": "–", "usd": "$0", "spot": 0, "preemptions": "0", "left": "–"}
        self._task: TaskID = self._progress.add_task("starting", total=None, **fields)
        self._progress.start()

    def stage(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def begin(self, done: int, iterations: int) -> None:
        self._pace.begin(done, iterations)
        self._progress.update(self._task, completed=done, total=iterations)

    def iteration(self, record: dict[str, Any]) -> None:
        said, done = summary(record), record["iteration"] + 1
        fields: dict[str, Any] = {name: said[name] for name in ("usd", "preemptions")}
        if said["score"]:
            fields["score"] = said["score"]
        description = f"iteration {done + 1}" if done < self._pace.iterations else "finishing"
        self._progress.update(
            self._task, completed=done, description=description, left=self._pace.left(done), **fields
        )

    def nodes(self, spot: int) -> None:
        self._progress.update(self._task, spot=spot)

    def close(self) -> None:
        self._progress.stop()
