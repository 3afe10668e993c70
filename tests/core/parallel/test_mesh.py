"""Which back-end carries a group, and what cannot."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.errors import BadInputError
from spotlight_core.events import SPGroup
from spotlight_core.parallel.mesh import Mesh
from spotlight_core.parallel.rendezvous import NodeRendezvous

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def elastic(communicator: str) -> ElasticConfig:
    return ElasticConfig.model_validate({"communicator": communicator})


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[NodeRendezvous]:
    node = NodeRendezvous.create(tmp_path / "node", 1)
    rank = NodeRendezvous.join(node.path, 0)
    yield rank
    rank.close()
    node.close()


def test_a_group_of_scheduling_becomes_a_communicator(rank: NodeRendezvous) -> None:
    mesh = Mesh(rank, elastic("auto"), CPU)
    mesh.prepare([(0,)])  # costs nothing over shared memory
    communicator = mesh.communicator(SPGroup(node="node", incarnation=1, ranks=(0,), generation=3))
    assert (communicator.rank, communicator.size, communicator.generation) == (0, 1, 3)
    assert communicator.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("communicator", "device", "message"),
    [
        ("nccl", CPU, '"nccl" on cpu: use "shm" or "auto" there'),
        ("shm", CUDA, '"shm" on cuda:0: use "nccl" or "auto" there'),
        ("gloo", CUDA, '"gloo" on cuda:0: use "nccl" or "auto" there'),
        ("gloo", CPU, "no store at .*: let the node's owner host it"),
    ],
)
def test_a_back_end_that_cannot_carry_a_ranks_tensors_is_named(
    rank: NodeRendezvous, communicator: str, device: torch.device, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        Mesh(rank, elastic(communicator), device)


@pytest.mark.parametrize(
    ("communicator", "device_type", "needed"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("shm", "cpu", False), ("gloo", "cpu", True)],
)
def test_a_store_is_needed_by_what_is_not_ours(communicator: str, device_type: str, needed: bool) -> None:
    assert elastic(communicator).needs_store(device_type) is needed
