"""The identity of a set of weights."""

import hashlib
from collections.abc import Mapping

import torch


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes, dtypes and bytes in name order: every node must confirm the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # NumPy knows no bf16
    return digest.hexdigest()
