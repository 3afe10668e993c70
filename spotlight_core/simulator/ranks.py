"""What virtual nodes know of their ranks: which groups they form, and whether they sleep."""

from spotlight_core.events import NodeKey, Regroup, SPGroup

_Formed = dict[tuple[int, ...], int]  # generation by ranks


class VirtualRanks:
    """Of all nodes; as on live ones a group that is formed no more takes nothing."""

    def __init__(self, gpus_per_node: int) -> None:
        self._alone: _Formed = {(rank,): 0 for rank in range(gpus_per_node)}
        self._formed: dict[NodeKey, _Formed] = {}
        self._asleep: set[NodeKey] = set()

    def regroup(self, command: Regroup) -> None:
        """Form these groups; those of the same ranks stay what they are."""
        key = command.node, command.incarnation
        before = self._formed.get(key, self._alone)
        self._formed[key] = {ranks: before.get(ranks, command.generation) for ranks in command.groups}

    def is_formed(self, group: SPGroup) -> bool:
        """Whether the group is one of now."""
        formed = self._formed.get((group.node, group.incarnation), self._alone)
        return formed.get(group.ranks) == group.generation

    def sleep(self, node: NodeKey) -> None:
        """Its ranks let their weights go."""
        self._asleep.add(node)

    def wake(self, group: SPGroup) -> bool:
        """Have the group's node take its weights back; whether it slept."""
        key = group.node, group.incarnation
        slept = key in self._asleep
        self._asleep.discard(key)
        return slept
