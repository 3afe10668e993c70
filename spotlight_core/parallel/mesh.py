"""From an SP group, as scheduling names it, to what its ranks talk over."""

from collections.abc import Sequence

import torch

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.errors import BadInputError
from spotlight_core.events import SPGroup
from spotlight_core.parallel.communicator import Communicator
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.torch_groups import TorchGroups


class Mesh:
    """One rank's communicators, over the back-end that the recipe names."""

    def __init__(self, rendezvous: NodeRendezvous, elastic: ElasticConfig, device: torch.device) -> None:
        """``device``: this rank's.

        Raises:
            BadInputError: a back-end that cannot carry tensors of this device, or is not there.
        """
        kind = elastic.communicator
        if kind == "auto":
            kind = "nccl" if device.type == "cuda" else "shm"
        if kind != "nccl" and device.type == "cuda":
            raise BadInputError(f'elastic.communicator = "{kind}" on {device}', 'use "nccl" or "auto" there')
        if kind == "nccl" and device.type != "cuda":
            raise BadInputError(f'elastic.communicator = "nccl" on {device}', 'use "shm" or "auto" there')
        self._rendezvous = rendezvous
        self._groups = None if kind == "shm" else TorchGroups(rendezvous, kind, device)

    def communicator(self, group: SPGroup) -> Communicator:
        """The group's, from this rank's side.

        Raises:
            GroupBrokenError: its generation was ended, or a member is gone or in a newer one.
        """
        source = self._rendezvous if self._groups is None else self._groups
        return source.communicator(group.ranks, group.generation)

    def prepare(self, rank_sets: Sequence[tuple[int, ...]]) -> None:
        """Have likely groups built ahead, where that takes time; all their ranks must do so."""
        if self._groups is not None:
            self._groups.prepare(rank_sets)
