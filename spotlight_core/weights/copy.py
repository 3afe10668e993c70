"""Policy versions that the ranks of one node share: pulled once, mapped by all.

    first rank:  WeightStore ─ pull, check ─► publish a copy in the node's shared memory
    the others:  map the copy, check it

A rank that comes back so costs a copy inside the node, and nothing of the network.
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from spotlight_core.types import PolicyVersion
from spotlight_core.weights.aligned import map_aligned, write_aligned
from spotlight_core.weights.digest import weights_digest
from spotlight_core.weights.store import WeightStore

LOG = logging.getLogger(__name__)

KEPT_VERSIONS = 2
_SUFFIX = ".safetensors"


class NodeWeights:
    """The copies of one node, in a folder of its shared memory, over the run's ``WeightStore``."""

    def __init__(self, folder: Path, store: WeightStore) -> None:
        """Half-written copies, which a killed rank left, are removed."""
        self._folder = folder
        self._store = store
        folder.mkdir(parents=True, exist_ok=True)
        with self._publishing():
            for left in folder.glob("*.tmp"):
                left.unlink(missing_ok=True)

    def path(self, policy: PolicyVersion) -> Path:
        """Where the version's copy is, or would be."""
        return self._folder / f"{policy.name}-{policy.digest[:16]}{_SUFFIX}"

    def load(self, policy: PolicyVersion) -> dict[str, torch.Tensor]:
        """The version's weights, with ``policy.digest``; not to be written to.

        Raises:
            SpotlightError: neither the node nor the store has them whole.
        """
        weights = self._copy(policy)
        if weights is not None:
            return weights
        with self._publishing():
            weights = self._copy(policy)  # another rank published it meanwhile
            if weights is None:
                weights = self._store.load(policy)
                self._publish(policy, weights)
        return weights

    def _copy(self, policy: PolicyVersion) -> dict[str, torch.Tensor] | None:
        path = self.path(policy)
        try:
            weights = map_aligned(path)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            LOG.warning("the node's copy of %s is of no use: %s", policy.name, error)
            return None
        if weights_digest(weights) != policy.digest:
            LOG.warning("the node's copy of %s holds other weights", policy.name)
            return None
        return weights

    def _publish(self, policy: PolicyVersion, weights: dict[str, torch.Tensor]) -> None:
        """Without room the node goes on without a copy: each rank then pulls for itself."""
        path = self.path(policy)
        temporary = path.with_suffix(".tmp")
        try:
            self._drop_old()
            write_aligned(weights, temporary)
            temporary.replace(path)
        except OSError as error:
            LOG.warning("no copy of %s on this node: %s", policy.name, error)
            temporary.unlink(missing_ok=True)

    def _drop_old(self) -> None:
        """Keep the newest ones beside the one that comes; who has mapped another keeps its pages."""
        copies = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in copies[: 1 - KEPT_VERSIONS]:
            with suppress(FileNotFoundError):
                path.unlink()

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """One publisher at a time; a killed one lets go."""
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
