"""Reserved nodes hold no weights on their GPUs while training uses these.

training begins ─► Sleep ─► Asleep of every such node ─► the trainer may take the GPUs
work, or a version to load, comes ─► the ranks take their weights back by themselves
"""

from spotlight_core.events import Asleep, Command, NodeKey, PhaseChanged, Sleep
from spotlight_core.scheduling.groups import Groups
from spotlight_core.scheduling.records import Node

_TRAINER = 1  # the side of the nodes that training owns


class Sleeping:
    """Who is to sleep, and who does not yet."""

    def __init__(self, enabled: bool, groups: Groups) -> None:
        self._enabled = enabled
        self._groups = groups
        self._training: int | None = None
        self._falling: set[NodeKey] = set()

    @property
    def trainer_alone(self) -> int | None:
        """The iteration whose training has the reserved GPUs to itself; None while it has to wait."""
        return None if self._falling else self._training

    def phase_changed(self, event: PhaseChanged, commands: list[Command]) -> None:
        """All of them when training begins; behind what their ranks are told to let go of."""
        self._training = event.iteration if event.phase == "train" else None
        self._falling.clear()
        for node in self._groups.nodes.values():
            self.consider(node, commands)

    def consider(self, node: Node, commands: list[Command]) -> None:
        """A node, or a rank of it, that came while training runs."""
        if self._enabled and self._training is not None and node.side == _TRAINER:
            self._falling.add(node.key)
            name, incarnation = node.key
            commands.append(Sleep(node=name, incarnation=incarnation))

    def asleep(self, event: Asleep, commands: list[Command]) -> None:
        """Word of one that sleeps."""
        self._falling.discard((event.node, event.incarnation))

    def lost(self, key: NodeKey) -> None:
        """A node is gone."""
        self._falling.discard(key)
