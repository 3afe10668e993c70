"""What the ranks of one SP group say to each other.

A communicator belongs to one generation of one group.  Ranks are numbered within the group; every
method is collective: all ranks call the same ones in the same order.  Without torch at run time, since
a node's owner, who computes nothing, looks after its groups too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class GroupBrokenError(RuntimeError):
    """The group is no more: a member is gone, or its generation was ended from outside.

    ``lost``: the node's ranks that are known to be gone; empty when the group was ended in order.
    """

    def __init__(self, message: str, lost: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.lost = lost


class Communicator(Protocol):
    """Collectives of one SP group.  Each raises ``GroupBrokenError`` and never hangs on a lost member.

    A rank that fails between two collectives calls ``abort``, or the others would wait for it.
    """

    rank: int
    size: int
    generation: int

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send ``parts[r]`` to rank r; returns what each rank sent here, of these ``shapes``.

        Parts may differ in shape and be empty; dtypes agree.
        """
        ...

    def all_gather(self, part: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Every rank's part, of these ``shapes``, in the order of the ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, added in their order, so that all get the same bits."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """``source``'s tensor; on the others ``tensor`` gives shape and dtype."""
        ...

    def abort(self) -> None:
        """End this generation from any thread: every rank's call, under way or to come, raises."""
        ...
