"""What a test of the command line says and expects."""

from collections.abc import Callable
from pathlib import Path

Said = tuple[int, str, str]
Cli = Callable[..., Said]


def refused(said: Said, tmp_path: Path) -> str:
    """The one line of a refusal that left nothing behind."""
    code, out, err = said
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert not (tmp_path / "runs").exists()
    return err.removeprefix("error: ").rstrip("\n")
