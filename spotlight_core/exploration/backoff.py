"""When previews stop predicting rollouts: compute more of each, and in the end explore nothing."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

LOG = logging.getLogger(__name__)

AUDITS = 3  # whose mean is judged: one prompt's correlation says little


class FidelityBackoff:
    """Raises the fewest effective steps while the audited rank correlation stays under a floor."""

    def __init__(self, steps: Sequence[int], floor: float) -> None:
        """``steps``: effective steps that may be explored at.  ``floor``: 0 for never."""
        self._steps = tuple(sorted(set(steps)))
        self._floor = floor
        self._last: deque[float] = deque(maxlen=AUDITS)
        self.least_steps = self._steps[0]
        self.off = False

    def audited(self, effective_steps: int, correlation: float) -> None:
        """What an audit of previews at so many effective steps has found."""
        self._last.append(correlation)
        if len(self._last) < AUDITS or fmean(self._last) >= self._floor or self.off:
            return
        found, higher = fmean(self._last), [steps for steps in self._steps if steps > effective_steps]
        self._last.clear()
        if higher:
            self.least_steps = higher[0]
            LOG.warning("rank correlation %.2f: previews compute %d steps from now on", found, higher[0])
        else:
            self.off = True
            LOG.warning("rank correlation %.2f at all denoise steps: nothing is explored any more", found)

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self._last), "least_steps": self.least_steps, "off": self.off}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = deque(map(float, state["last"]), maxlen=AUDITS)
        self.least_steps, self.off = int(state["least_steps"]), bool(state["off"])
