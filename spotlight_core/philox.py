"""Random draws as functions of names: NumPy's Philox keyed by a hash, never by a history of draws."""

import hashlib

import numpy as np

SCHEME = "philox-names-1"
"""Which draws belong to which names: another scheme gives other noise for the same recipe."""


def named_generator(*names: str | int) -> np.random.Generator:
    """The generator that belongs to these names; equal names give equal draws on every machine.

    Philox's bits do not depend on the CPU's capability, unlike ``torch.randn``'s.
    """
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
