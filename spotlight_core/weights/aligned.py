"""Safetensors files whose tensors begin at multiples of 64 bytes, mapped instead of read.

The format aligns its header to 8 bytes only; spaces after its JSON, which it allows, take the data to 64.
So a map of the file can be copied with the widest vector instructions and registered with a GPU's driver.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

ALIGNMENT = 64
_LENGTH_BYTES = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_aligned(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write ``path``, which must not be there, in name order.

    Raises:
        OSError: it cannot be written, or there is no room.
        ValueError: a dtype that weights do not have.
    """
    header: dict[str, Any] = {}
    end = 0
    ordered = {name: tensors[name].detach() for name in sorted(tensors)}
    for name, tensor in ordered.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}")
        begin = _aligned(end)
        if begin > end:  # the format allows no gap between two tensors
            header[f".{end}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    start = _aligned(_LENGTH_BYTES + len(text))
    with path.open("xb+") as file:
        if end:
            file.truncate(start + end)
        file.write((start - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text.ljust(start - _LENGTH_BYTES))
        for name, tensor in ordered.items():
            file.seek(start + header[name]["data_offsets"][0])
            file.write(_bytes(tensor.cpu().contiguous()))


def map_aligned(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that ``write_aligned`` wrote, over its pages; not to be written to.

    They stay valid when the file is removed.

    Raises:
        OSError: there is no such file.
        SafetensorError: it holds something else.
    """
    with path.open("r+b") as file:
        # Shared, since a GPU's driver pins pages and would first copy those of a private map.
        try:
            pages = mmap.mmap(file.fileno(), 0)
        except ValueError as error:
            raise SafetensorError(f"{path} is empty") from error
    try:
        size = int.from_bytes(pages[:_LENGTH_BYTES], "little")
        header = json.loads(pages[_LENGTH_BYTES : _LENGTH_BYTES + size])
        whole = torch.frombuffer(pages, dtype=torch.uint8)[_LENGTH_BYTES + size :]
        return {
            name: whole[slice(*entry["data_offsets"])].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
            for name, entry in header.items()
            if not name.startswith(".")
        }
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise SafetensorError(f"{path} is damaged ({error})") from error


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
