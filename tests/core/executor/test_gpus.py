"""Which GPU a node has."""

import pytest

from spotlight_core.executor.gpus import gpu_of, local_gpus


@pytest.mark.parametrize(
    ("visible", "expected"), [("", ()), ("-1", ()), ("3", ("3",)), ("0, 2,GPU-8f", ("0", "2", "GPU-8f"))]
)
def test_visible_devices_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == expected


def test_reserved_nodes_come_first_and_gpus_are_shared_when_they_are_few() -> None:
    nodes = ["reserved-0", "reserved-1", "spot-0", "spot-1", "spot-2"]
    assert [gpu_of(node, 2, ("a", "b", "c")) for node in nodes] == ["a", "b", "c", "a", "b"]
    assert gpu_of("spot-0", 1, ()) is None
