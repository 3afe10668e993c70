"""Models by name: what a hub id looks like, and where its files are on this machine.  Never downloads.

A hub id is looked for where huggingface_hub keeps its snapshots: that layout is public, and asking the
library would mean asking the network.
"""

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of one, as in Qwen/Qwen-Image."""
    return _HUB_ID.fullmatch(name) is not None


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def local_folder(name: str, revision: str | None, file: str = "") -> Path | None:
    """The folder ``name``, or the cached snapshot of that hub id; None where neither is here.

    A snapshot that lacks ``file`` does not count: its download was broken off, or took other files.
    """
    if Path(name).is_dir():
        return Path(name)
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit if commit else None
    return snapshot if snapshot is not None and (snapshot / file).exists() else None


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids huggingface_hub to ask the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
