"""What a DenoiseActor needs to be a rank of an SP group: where it meets the others, and states it holds."""

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from spotlight_core.arrays import Arrays, arrays_digest
from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup

if TYPE_CHECKING:
    from spotlight_core.parallel.communicator import Communicator

HELD = "held:"  # before the lease whose state a rank holds, as a ``state_ref``
MOST_HELD = 4  # a rank is in one group at a time: what is older was given up


class HeldStates:
    """The last states that this rank let go of without a commit, by lease."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, Arrays] = OrderedDict()

    def keep(self, lease: str, state: Arrays) -> str:
        """Hold the state; returns its digest."""
        self._states[lease] = state
        while len(self._states) > MOST_HELD:
            self._states.popitem(last=False)
        return arrays_digest(state)

    def take(self, ref: str, digest: str) -> Arrays:
        """The state, which is held no longer.

        Raises:
            SpotlightError: it is not here, or is another one: of the ranks of a group that broke, some may
                have been a step ahead.
        """
        state = self._states.pop(ref.removeprefix(HELD), None)
        if state is None or arrays_digest(state) != digest:
            raise SpotlightError(f"{ref} is not held here", "go on from the last commit")
        return state


class Meeting:
    """This rank's end of its node's rendezvous."""

    def __init__(self, path: Path, rank: int, elastic: ElasticConfig) -> None:
        # With torch, which who only makes actors need not hold.
        import torch

        from spotlight_core.parallel.mesh import Mesh
        from spotlight_core.parallel.rendezvous import NodeRendezvous

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._rendezvous = NodeRendezvous.join(path, rank)
        self._elastic, self._device = elastic, device
        self._mesh = Mesh(self._rendezvous, elastic, device)

    def become(self, rank: int) -> None:
        """Be another rank, whose process is gone."""
        from spotlight_core.parallel.mesh import Mesh

        self._rendezvous.take(rank)
        self._mesh = Mesh(self._rendezvous, self._elastic, self._device)

    def communicator(self, group: SPGroup) -> "Communicator":
        """The group's.

        Raises:
            GroupBrokenError: it is no more.
        """
        return self._mesh.communicator(group)
