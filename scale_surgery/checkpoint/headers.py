"""Headers of safetensors files: name, dtype, shape and place of every tensor, checked before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.reading import open_regular, parse_json
from scale_surgery.errors import CheckpointError, Problem

MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
FLOAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor: file, dtype (safetensors' name), shape, first byte in the file and byte count.

    `stored_as` is its name in the file if duplicated layers changed it; see numbering.py.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    stored_as: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def differences(self, dtype: str, shape: tuple[int, ...]) -> Iterator[Problem]:
        """Generate a problem if it has another dtype or shape than planned."""
        if self.shape != shape:
            yield Problem("tensor-shape", self.name, shape=self.shape, planned=shape)
        if self.dtype != dtype:
            yield Problem("tensor-dtype", self.name, dtype=self.dtype, planned=dtype)


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file: 8 bytes of length, then JSON."""
    try:
        with open_regular(path / file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(Problem("header-length", file, length=length, size=size))
            header = parse_json(stream.read(length).decode("utf-8"))
        tensors = _parse_header(file, header, 8 + length, size)
    except FileNotFoundError as error:
        raise CheckpointError(Problem("shard-missing", file, folder=path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(Problem("header-invalid", file, error=error)) from error
    except OSError as error:
        raise CheckpointError(Problem("file-unreadable", file, error=error)) from error
    _check_as_loaders_do(path, file, tensors)
    return tensors


def _check_as_loaders_do(path: Path, file: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that safetensors, which all loaders use, finds the same tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
            loaded = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem("header-invalid", file, error=error)) from error
    differing = loaded.items() ^ {name: (info.dtype, info.shape) for name, info in tensors.items()}.items()
    if differing:
        names = sorted({name for name, _ in differing})
        raise CheckpointError(Problem("header-disputed", file, tensor=names[0]))


def _parse_header(file: str, header: Mapping[str, Any], data_start: int, size: int) -> dict[str, TensorInfo]:
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        info = TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]), data_start + begin, end - begin)
        if data_start + end > size:
            raise CheckpointError(Problem("tensor-past-end", file, tensor=name, end=data_start + end, size=size))
        needed = info.elements * DTYPE_BYTES.get(info.dtype, 0)
        if info.bytes != needed and info.dtype in DTYPE_BYTES:
            size_of = {"bytes": info.bytes, "needed": needed, "shape": f"{info.shape}", "dtype": info.dtype}
            raise CheckpointError(Problem("tensor-size", file, tensor=name, **size_of))
        tensors[name] = info
    _check_offsets(file, tensors, data_start, size)
    return tensors


def _check_offsets(file: str, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.bytes)):
        if info.offset != end or info.bytes < 0:
            raise CheckpointError(Problem("tensor-offset", file, tensor=info.name, offset=info.offset, needed=end))
        end += info.bytes
    if end != size:
        raise CheckpointError(Problem("tensors-end-early", file, end=end, size=size))
