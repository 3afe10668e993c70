"""Published policy versions on disk: one safetensors file each, named by label and number, known by digest.

A file appears complete or not at all (temporary file, fsync, rename), so a node that pulls while
the trainer publishes never reads half of one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spotlight_core.durable import replacing
from spotlight_core.errors import SpotlightError
from spotlight_core.types import PolicyVersion, VersionLabel
from spotlight_core.weights.digest import weights_digest

_SUFFIX = ".safetensors"


def write_durably(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write safetensors to ``path``, which is whole at any time; durable when it returns."""
    with replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)


class WeightStore:
    """A folder of published policy versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def publish(self, label: VersionLabel, number: int, weights: Mapping[str, torch.Tensor]) -> PolicyVersion:
        """Write ``weights`` as version ``number`` of ``label``; publishing the same again replaces it."""
        policy = PolicyVersion(label=label, number=number, digest=weights_digest(weights))
        write_durably(weights, self.path(policy))
        return policy

    def path(self, policy: PolicyVersion) -> Path:
        """Where the version's file is, or would be."""
        return self.folder / f"{policy.name}{_SUFFIX}"

    def load(self, policy: PolicyVersion) -> dict[str, torch.Tensor]:
        """The version's weights.

        Raises:
            SpotlightError: the file is missing, unreadable, or holds other weights than ``policy.digest``.
        """
        path = self.path(policy)
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SpotlightError(
                f"cannot read policy version {policy.name} from {path} ({error})",
                "restore the file, or resume the run from a checkpoint that publishes it again",
            ) from error
        found = weights_digest(weights)
        if found != policy.digest:
            raise SpotlightError(
                f"{path} holds weights {found[:12]}, policy version {policy.name} is {policy.digest[:12]}",
                "the file was changed after publishing: resume the run from its last checkpoint",
            )
        return weights

    def prune(self, keep: Iterable[PolicyVersion]) -> list[Path]:
        """Remove every published file but those of ``keep``; returns what was removed, by name."""
        kept = {self.path(policy).name for policy in keep}
        removed = sorted(path for path in self.folder.glob(f"*{_SUFFIX}") if path.name not in kept)
        for path in removed:
            path.unlink(missing_ok=True)
        return removed
