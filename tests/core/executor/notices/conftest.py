"""Watchers give up on an answer sooner than a real one, so that silence costs no test two seconds."""

import pytest

from spotlight_core.executor.notices import base


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TIMEOUT_SECONDS", 0.2)
