"""The group sampler: which prompts an iteration trains on, as a function of its position alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from spotlight_core.philox import named_generator
from spotlight_core.types import Prompt, PromptRow


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """Shuffled passes over the prompts; its whole state is the integer ``position``.

    Every batch has exactly ``count`` prompts, also across the end of a pass.
    """

    prompts: Sequence[PromptRow]
    rng_seed: int

    def batch(self, position: int, count: int) -> tuple[Prompt, ...]:
        """The ``count`` prompt occurrences from ``position`` on."""
        return tuple(self._occurrence(index) for index in range(position, position + count))

    def _occurrence(self, index: int) -> Prompt:
        shuffle, offset = divmod(index, len(self.prompts))
        order = named_generator("prompts", self.rng_seed, shuffle).permutation(len(self.prompts))
        row = self.prompts[int(order[offset])]
        return Prompt(occurrence=f"p{index}", text=row.text, metadata=row.metadata)
