"""A file that appears: the hook for whatever can touch one, and for trying things out."""

import logging
from pathlib import Path

from spotlight_core.config.fleet import FileNoticesConfig
from spotlight_core.executor.notices.base import LONGEST_ANSWER_BYTES, Watcher, ranks_from, seconds_from

log = logging.getLogger(__name__)


class FileWatcher(Watcher):
    """A notice as long as the file is there: who put it there takes it away before the node returns."""

    source = "file"

    def __init__(self, config: FileNoticesConfig, node: str, grace_seconds: float) -> None:
        self._path = Path(config.path.replace("{node}", node))
        self._grace_seconds = grace_seconds
        self._trouble = ""

    def poll(self) -> float | None:
        """A file that cannot be understood is a notice too, since somebody put it there."""
        try:
            with self._path.open("rb") as file:
                body = file.read(LONGEST_ANSWER_BYTES)
        except FileNotFoundError:
            self._trouble, self.sure = "", True
            return None
        except OSError as error:
            self.sure = False
            self._say(f"cannot be read ({error.strerror}), and is no notice")
            return None
        seconds = seconds_from(body, self._grace_seconds)
        self.ranks = ranks_from(body)
        if seconds is None:
            self._say(
                f'is neither empty nor {{"seconds_left": 30}}: taken for {self._grace_seconds:g} seconds'
            )
            return self._grace_seconds
        self._trouble = ""
        return seconds

    def _say(self, what: str) -> None:
        if self._trouble != what:
            log.warning("the notice %s %s", self._path, what)
        self._trouble = what
