"""Mutations of safetensors files: of their headers, with the bytes behind them left as they are, and of those bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]
BIG = (-1, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64, 10**30)
DTYPES = (
    "F64",
    "F32",
    "I32",
    "U32",
    "BF16",
    "F16",
    "I64",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F8_E8M0",
    "F4",
    "C64",
    "f32",
    "X",
    "",
)
NAMES = ("", "\x1b[31mred", "a\nb", "__metadata__", "x" * 5000, "model..weight", "\u202e", "../x", "a\0b")
VALUES = (None, True, 1.5, "0", [], {}, [0], "x", -1)


def mutate_header(dice: random.Random, file: Path, outside: Path) -> str:
    """Change one thing of a header; says what."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if dice.random() < 0.3:
        name = dice.choice(list(TEXTS))
        file.write_bytes(TEXTS[name](dice, header, data))
        return name
    parsed = json.loads(header)
    tensor = dice.choice([name for name in parsed if name != "__metadata__"])
    change = dice.choice(ENTRIES)
    description = change(dice, parsed, tensor)
    file.write_bytes(_joined(json.dumps(parsed).encode(), data))
    return f"{description} of {tensor}"


def _joined(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _offsets(dice: random.Random, header: Header, name: str) -> str:
    begin, end = header[name]["data_offsets"]
    by = dice.choice(BIG)
    choices = ([begin + by, end + by], [begin, end + by], [begin + by, end], [end, begin], [begin], [begin, end, end])
    header[name]["data_offsets"] = dice.choice([*choices, [float(begin), float(end)], [True, False], str(begin), None])
    return f"offsets {header[name]['data_offsets']}"


def _shape(dice: random.Random, header: Header, name: str) -> str:
    shape = header[name]["shape"]
    choices = [shape[::-1], [*shape, 1], [*shape, 0], [-size for size in shape], shape[:-1], [dice.choice(BIG), *shape]]
    choices += [[2**32, 2**32], [float(size) for size in shape], [str(size) for size in shape], [True, *shape], None, 3]
    header[name]["shape"] = dice.choice(choices)
    return f"shape {header[name]['shape']}"


def _dtype(dice: random.Random, header: Header, name: str) -> str:
    header[name]["dtype"] = dice.choice([*DTYPES, None, 1, ["F32"]])
    return f"dtype {header[name]['dtype']}"


def _value(dice: random.Random, header: Header, name: str) -> str:
    key = dice.choice(["dtype", "shape", "data_offsets", "more", None])
    value = dice.choice(VALUES)
    if key is None:
        header[name] = value
    else:
        header[name][key] = value
    return f"{key} {value!r}"


def _missing(dice: random.Random, header: Header, name: str) -> str:
    key = dice.choice(list(header[name]))
    del header[name][key]
    return f"no {key}"


def _dropped(dice: random.Random, header: Header, name: str) -> str:
    del header[name]
    return "drop"


def _renamed(dice: random.Random, header: Header, name: str) -> str:
    header[new := dice.choice(NAMES)] = header.pop(name)
    return f"name {new[:20]!r}"


def _exchanged(dice: random.Random, header: Header, name: str) -> str:
    """Two tensors of one shape for each other: nothing else notices."""
    shape = header[name]["shape"]
    alike = [candidate for candidate, entry in header.items() if candidate != name and entry.get("shape") == shape]
    partner = dice.choice(alike or [name])
    header[name], header[partner] = header[partner], header[name]
    return f"exchange with {partner}"


def _metadata(dice: random.Random, header: Header, name: str) -> str:
    odd: list[Any] = [
        {"format": 1},
        {"format": "np"},
        {"x": "\x1b[2J"},
        [],
        None,
        "x",
        {"a": {"b": 1}},
        {"format": "\x00"},
    ]
    header["__metadata__"] = dice.choice(odd)
    return f"metadata {header['__metadata__']!r} beside that"


ENTRIES: tuple[Callable[[random.Random, Header, str], str], ...] = (
    _offsets,
    _offsets,
    _shape,
    _shape,
    _dtype,
    _value,
    _missing,
    _dropped,
    _renamed,
    _exchanged,
    _metadata,
)


def _twice(dice: random.Random, header: bytes, data: bytes) -> bytes:
    name, entry = list(json.loads(header).items())[-1]
    return _joined(header.rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode(), data)


def _length(dice: random.Random, header: bytes, data: bytes) -> bytes:
    length = len(header)
    wrong = [
        0,
        1,
        2,
        length - 1,
        length + 1,
        length + len(data),
        length + len(data) + 1,
        100_000_001,
        2**40,
        2**63,
        2**64 - 1,
    ]
    return _joined(header, data, dice.choice(wrong))


def _at(dice: random.Random, data: bytes) -> int:
    return dice.randrange(len(data) + 1)


TEXTS: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "a name twice": _twice,
    "length": _length,
    "spaces behind": lambda dice, header, data: _joined(header + b" " * 8, data),
    "spaces before": lambda dice, header, data: _joined(b" " * 8 + header, data),
    "line ends behind": lambda dice, header, data: _joined(header + b"\n" * 8, data),
    "nul behind": lambda dice, header, data: _joined(header + b"\0" * 8, data),
    "byte order mark": lambda dice, header, data: _joined(b"\xef\xbb\xbf" + header, data),
    "utf-16": lambda dice, header, data: _joined(header.decode().encode("utf-16"), data),
    "not utf-8": lambda dice, header, data: _joined(header.replace(b'"', b'"\xff', 1), data),
    "deep": lambda dice, header, data: _joined(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, data),
    "a list": lambda dice, header, data: _joined(b"[" + header.rstrip() + b"]", data),
    "no tensors": lambda dice, header, data: _joined(b"{}", data),
    "no tensors, no bytes": lambda dice, header, data: _joined(b"{}", b""),
    "hole behind": lambda dice, header, data: _joined(header, data + b"\0" * 8),
    "hole before": lambda dice, header, data: _joined(header, b"\0" * 8 + data),
    "short of a byte": lambda dice, header, data: _joined(header, data[:-1]),
    "NaN": lambda dice, header, data: _joined(header.replace(b'"shape":[', b'"shape":[NaN,', 1), data),
    "half": lambda dice, header, data: _joined(header, data[: _at(dice, data)]),
    "flipped byte in the header": lambda dice, header, data: _joined(_flip(dice, header), data),
}


def _flip(dice: random.Random, content: bytes) -> bytes:
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << dice.randrange(8))]) + content[place + 1 :]


def flip_byte(dice: random.Random, file: Path, outside: Path) -> str:
    """Change one bit of a file: of its tensors, where it has some."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    if start >= len(content):
        return "nothing to flip"
    file.write_bytes(content[:start] + _flip(dice, content[start:]))
    return "flip a bit"
