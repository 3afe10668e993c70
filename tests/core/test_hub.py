"""Where a model's files are on this machine: a folder, or a snapshot in the hub's cache."""

from pathlib import Path

import pytest

from spotlight_core.hub import hub_cache, is_hub_id, local_folder


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen-Image", True),
        ("black-forest-labs/FLUX.1-dev", True),
        ("./nowhere", False),
        ("../models/flux", False),
        ("/models/flux", False),
        ("one/two/three", False),
        ("flux", False),
    ],
)
def test_a_hub_id_is_an_owner_and_a_name(name: str, is_one: bool) -> None:
    assert is_hub_id(name) is is_one


def test_the_cache_is_where_huggingface_hub_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/home")
    assert hub_cache() == Path("/home/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert hub_cache() == Path("/cache")


def test_a_snapshot_is_found_by_branch_and_by_commit_once_it_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    assert local_folder("owner/name", None) is None
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    assert local_folder("owner/name", None) == snapshot
    assert local_folder("owner/name", "abc") == snapshot
    assert local_folder("owner/name", "other") is None
    assert local_folder("owner/name", None, "config.json") is None
    (snapshot / "config.json").touch()
    assert local_folder("owner/name", None, "config.json") == snapshot
    # A folder is taken as it is: what it lacks is told by who reads it.
    assert local_folder(str(tmp_path), None, "config.json") == tmp_path
