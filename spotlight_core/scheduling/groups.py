"""Nodes and their groups, and the lists of those that could take something."""

from collections import OrderedDict
from collections.abc import Iterable

from spotlight_core.events import NodeJoined, NodeKey, SPGroup
from spotlight_core.scheduling.records import Group, Node, Shelf

SIDES = (0, 1)  # nodes that anybody may have, and those that training owns


class GroupList(OrderedDict[Group, None]):
    """Groups of one side that hold the same, longest listed first.

    Ordered dicts find their first at once, however many have left; plain ones look for it.
    """

    def __init__(self, home: "ByShelf", shelf: Shelf | None) -> None:
        super().__init__()
        self.home = home
        self.shelf = shelf


ByShelf = dict[Shelf | None, GroupList]


class Groups:
    """Nodes by key; groups that are ``idle``, and those with ``room`` behind the lease they run.

    Both are by side and then by the policy version that the group holds, longest waiting first.
    """

    def __init__(self) -> None:
        self.nodes: dict[NodeKey, Node] = {}
        self.staying = 0  # nodes that are not draining
        self.idle: tuple[ByShelf, ...] = tuple({} for _ in SIDES)
        self.room: tuple[ByShelf, ...] = tuple({} for _ in SIDES)
        self._listings = 0

    def join(self, event: NodeJoined) -> Node | None:
        """A node with a group for each GPU; None when it is here already."""
        key = (event.node, event.incarnation)
        if key in self.nodes:
            return None
        node = self.nodes[key] = Node(key, side=int(event.pool == "reserved"))
        node.there = list(range(event.gpus))
        for gpu in node.there:
            ref = SPGroup(node=event.node, incarnation=event.incarnation, ranks=(gpu,))
            node.groups[ref.ranks] = Group(ref, node)
        self.staying += 1
        return node

    def find(self, ref: SPGroup) -> Group | None:
        node = self.nodes.get((ref.node, ref.incarnation))
        group = node.groups.get(ref.ranks) if node is not None else None
        # One that was formed of the same ranks before has no more to say.
        return group if group is not None and group.ref.generation == ref.generation else None

    def node_of(self, label: str) -> Node | None:
        """The node that a timer names."""
        name, _, incarnation = label.rpartition("#")
        return self.nodes.get((name, int(incarnation)))

    def remove(self, key: NodeKey) -> Node | None:
        """Forget a node; its groups keep what they have, for the caller to look through."""
        node = self.nodes.pop(key, None)
        if node is not None:
            self._stays_no_longer(node)
        return node

    def drain(self, node: Node) -> None:
        """Nothing else is placed on the node."""
        self._stays_no_longer(node)
        node.draining = True

    def _stays_no_longer(self, node: Node) -> None:
        self.staying -= not node.draining
        for group in node.groups.values():
            self.unlist(group)

    # -- lists ----------------------------------------------------------------------------------------

    def relist(self, group: Group) -> None:
        """Put a group where it belongs: among the idle, among those with room, or nowhere."""
        self.unlist(group)
        if group.node.draining or group.down or group.settling:
            return
        if group.loading is not None or group.queued is not None:
            return
        by_shelf = (self.idle if group.running is None else self.room)[group.node.side]
        groups = by_shelf.get(group.loaded)
        if groups is None:
            groups = by_shelf[group.loaded] = GroupList(by_shelf, group.loaded)
        self._listings = group.listed_at = self._listings + 1
        groups[group] = None
        group.listed = groups

    def unlist(self, group: Group) -> None:
        groups = group.listed
        if groups is not None:
            del groups[group]
            group.listed = None
            if not groups:
                del groups.home[groups.shelf]

    def first_idle(self, sides: Iterable[int], shelf: Shelf) -> Group | None:
        """The group that has been idle longest of those that hold a policy version."""
        return _first(self.idle[side].get(shelf) for side in sides)

    def first_with_room(self, sides: Iterable[int], shelf: Shelf) -> Group | None:
        """The group that has had room longest of those that hold a policy version."""
        return _first(self.room[side].get(shelf) for side in sides)

    def first_idle_of_any(self, sides: Iterable[int]) -> Group | None:
        """The group that has been idle longest, whatever it holds."""
        return _first(groups for side in sides for groups in self.idle[side].values())


def _listed_at(group: Group) -> int:
    return group.listed_at


def _first(lists: Iterable[GroupList | None]) -> Group | None:
    heads = [next(iter(groups)) for groups in lists if groups]
    return min(heads, key=_listed_at) if len(heads) > 1 else heads[0] if heads else None
