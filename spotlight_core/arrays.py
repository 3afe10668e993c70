"""Named arrays as they travel and rest: safetensors bytes, and the digest that names their contents.

Without torch, since the coordinator and the Tensor Store hold them and compute nothing.
"""

import hashlib

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

__all__ = ["Arrays", "SafetensorError", "arrays_digest", "from_bytes", "payload_digest", "to_bytes"]

Arrays = dict[str, np.ndarray]


def arrays_digest(arrays: Arrays) -> str:
    """sha256 over names, dtypes, shapes and bytes, in name order: the identity of a result or state."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def payload_digest(payload: bytes) -> str:
    """``arrays_digest`` of what ``payload`` holds; SafetensorError when it is damaged."""
    return arrays_digest(from_bytes(payload))


def to_bytes(arrays: Arrays) -> bytes:
    """Arrays as safetensors bytes."""
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def from_bytes(data: bytes) -> Arrays:
    """The inverse of ``to_bytes``; SafetensorError when the bytes are damaged."""
    return safetensors.numpy.load(data)
