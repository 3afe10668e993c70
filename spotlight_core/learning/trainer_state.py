"""A trainer's tensors on disk: each rank writes its own shards, any number of ranks reads them.

    rank-00000.safetensors  rank-00001.safetensors  ...

PyTorch's distributed checkpoint format over safetensors: every file says where in the whole tensors
its shards belong.  Each rank plans by itself, without the object collectives that would pickle, and
there is no pickled metadata file: what a whole checkpoint is, is read from the files and checked.
"""

import contextlib
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from spotlight_core.errors import TrainingError
from spotlight_core.learning.sharding import Ranks

REMEDY = "resume with the recipe the run was started with"


class _OwnShards(DefaultSavePlanner):
    """Plans one rank's shards, which do not add up to whole tensors: the default refuses that."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, ranks: Ranks) -> None:
    """Write ``tensors`` to ``folder``; all ranks together, and the files are there when it returns.

    Those that are not sharded are the same on every rank and written by the first.
    """
    own = {name: tensor for name, tensor in tensors.items() if _sharded(tensor) or ranks.rank == 0}
    place = folder / f".rank-{ranks.rank}"
    place.mkdir(parents=True)
    writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
    with _alone():
        dcp.save(dict(own), storage_writer=writer, planner=_OwnShards(), no_dist=True)
    for written in place.iterdir():  # one file; every rank gives it the same name
        written.rename(folder / f"rank-{ranks.rank:05d}.safetensors")
    shutil.rmtree(place)
    ranks.barrier()


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What ``folder`` holds, as tensors without data (on "meta") of the whole shapes.

    Raises:
        TrainingError: shards are missing.
    """
    found = {}
    for name, stored in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise TrainingError(
                f"shards of tensor {name!r} are missing in {folder}", "resume from another checkpoint"
            )
        found[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
    return found


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill ``tensors`` in place, sharded or not, from what any number of ranks wrote.

    Raises:
        TrainingError: the folder holds other tensors than these, or of other shapes.
    """
    stored = stored_tensors(folder)
    if tensors.keys() != stored.keys():
        differing = sorted(tensors.keys() ^ stored.keys())[0]
        raise TrainingError(f"the checkpoint does not fit this recipe (tensor {differing!r})", REMEDY)
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            raise TrainingError(
                f"the checkpoint does not fit this recipe (tensor {name!r} is {_described(stored[name])}, "
                f"here {_described(tensor)})",
                REMEDY,
            )
    with _alone():
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def read_tensors(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The whole tensors whose names begin with ``prefix``, under what is left of their names, on the CPU.

    Raises:
        TrainingError: shards are missing.
    """
    named = {name: tensor for name, tensor in stored_tensors(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in named.items()}
    with _alone():
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that there is no process group, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
