"""Text embeddings, each prompt's computed once, alone, and kept on the CPU.

Alone, because a text encoder's last bits depend on what else is in its batch: a prompt must have the
same embedding in every request, on every node.

Shape legend: B batch, L text tokens, D text channels.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spotlight_core.diffusion.model import TextEmbeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedding:
    """One prompt's; ``pooled_D`` where the family has one."""

    tokens_LD: torch.Tensor
    pooled_D: torch.Tensor | None = None


class TextCache:
    """The most recently used embeddings, at most ``capacity`` prompts."""

    def __init__(self, embed: Callable[[str], PromptEmbedding], capacity: int) -> None:
        """``embed`` runs the text encoders on one prompt and returns tensors on the CPU."""
        self._embed = embed
        self._capacity = capacity
        self._kept: OrderedDict[str, PromptEmbedding] = OrderedDict()

    def get(self, prompt: str) -> PromptEmbedding:
        """The prompt's embedding, from the text encoders where it is not kept."""
        if prompt not in self._kept:
            self._kept[prompt] = self._embed(prompt)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        self._kept.move_to_end(prompt)
        return self._kept[prompt]


def stack(rows: Sequence[PromptEmbedding], negative: TextEmbeddings | None = None) -> TextEmbeddings:
    """Rows of a batch, padded with zeros to the longest; the mask is None when all are equally long."""
    lengths = [row.tokens_LD.shape[0] for row in rows]
    longest = max(lengths)
    tokens_BLD = rows[0].tokens_LD.new_zeros(len(rows), longest, rows[0].tokens_LD.shape[1])
    for index, row in enumerate(rows):
        tokens_BLD[index, : lengths[index]] = row.tokens_LD
    mask_BL = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    pooled = [row.pooled_D for row in rows if row.pooled_D is not None]
    return TextEmbeddings(
        tokens_BLD=tokens_BLD,
        mask_BL=None if bool(mask_BL.all()) else mask_BL,
        pooled_BD=torch.stack(pooled) if pooled else None,
        negative=negative,
    )
