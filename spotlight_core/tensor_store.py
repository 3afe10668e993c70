"""The Tensor Store: committed in-flight state, on reserved storage, so that it outlives a spot node.

One safetensors file a commit.  fp32 stays fp32, since a rounded latent would end the promise that a
resumed request gives the very bits of an uninterrupted one.
"""

import hashlib
import os
from pathlib import Path

from spotlight_core.arrays import Arrays, SafetensorError, arrays_digest, from_bytes, to_bytes
from spotlight_core.errors import SpotlightError

_SUFFIX = ".safetensors"


class TensorStore:
    """A folder of commits, named by request and denoise step."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, request_id: str, next_denoise_step: int, state: Arrays) -> tuple[str, str]:
        """Write ``state`` durably; returns ``(ref, digest)``.  The same commit again replaces it."""
        ref = f"{_key(request_id)}/{next_denoise_step}{_SUFFIX}"
        path = self.folder / ref
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(to_bytes(state))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return ref, arrays_digest(state)

    def get(self, ref: str, digest: str) -> Arrays:
        """The state that ``put`` named ``ref``.

        Raises:
            SpotlightError: the commit is missing, damaged, or holds another state than ``digest``.
        """
        path = self.folder / ref
        try:
            state = from_bytes(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise SpotlightError(
                f"cannot read the commit {path} ({error})", "resume the run from its last checkpoint"
            ) from error
        found = arrays_digest(state)
        if found != digest:
            raise SpotlightError(
                f"the commit {path} holds {found[:12]} instead of {digest[:12]}",
                "the file was changed after it was written: resume the run from its last checkpoint",
            )
        return state

    def discard(self, request_id: str) -> None:
        """Forget every commit of a request; none is fine too."""
        folder = self.folder / _key(request_id)
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            folder.rmdir()


def _key(request_id: str) -> str:
    """A folder name for a request: its id holds slashes, and whatever a prompt's occurrence is called."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:32]
