"""What reaches the terminal."""

import logging

import pytest
from prefect.logging.configuration import setup_logging

from tasks.logs import hush_console


def test_an_interrupt_is_no_crash_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(incremental=False)
    logger = logging.getLogger("prefect.engine")
    logger.error("before")
    hush_console()
    logger.error("Crash detected!")
    said = "".join(capsys.readouterr())
    assert "before" in said
    assert "Crash" not in said
