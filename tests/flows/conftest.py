"""The command in this process, for all tests of it."""

import sys
from pathlib import Path

import pytest

from flows import cli
from tests.flows.command_line import Cli, Said


@pytest.fixture
def spotlight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process with ``--runs`` in a temporary folder."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["spotlight", *arguments, "--runs", str(tmp_path / "runs")])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    return run
