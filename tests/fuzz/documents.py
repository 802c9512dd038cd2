"""Mutations of JSON documents: of what they say, and of how they are written."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# values as they stand in a file; OUTSIDE becomes a place that nothing may touch
OUTSIDE = "/outside/canary"
RAW = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "one": "1",
    "minus one": "-1",
    "seven": "7",
    "a fraction": "1.5",
    "empty text": '""',
    "a text": '"x"',
    "empty list": "[]",
    "empty object": "{}",
    "a list": '[null, "x", 1]',
    "an object": '{"a": {"b": []}}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "a billion": "1000000000",
    "beyond 64 bits": "18446744073709551616",
    "beyond floats": "1" + "0" * 400,
    "beyond int()": "1" + "0" * 5000,
    "infinite": "1e999",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "escapes": r'"\u001b[31mred\u001b]0;title\u0007"',
    "line ends": r'"a\r\n\u2028# heading\n---"',
    "nul": r'"a\u0000b"',
    "turned": r'"a\u202eb"',
    "half a character": r'"\ud800"',
    "up": '"../outside"',
    "up two": '"../../outside/canary"',
    "absolute": f'"{OUTSIDE}"',
    "backslash": r'"..\\outside"',
    "dot": '"."',
    "same": '"./config.json"',
    "long": json.dumps("n" * 5000),
    "pickle": '"pytorch_model.bin"',
    "hash": json.dumps("0" * 64),
}
HASH = re.compile(r"[0-9a-f]{64}")
SLOT = "@@slot@@"


def mutate_document(dice: random.Random, file: Path, outside: Path) -> str:
    """Change one thing of a JSON file; says what."""
    if dice.random() < 0.25:
        return _rewrite(dice, file)
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True) if file.suffix == ".jsonl" else [text]
    row = dice.randrange(len(lines))
    document = json.loads(lines[row])
    container, key = _spot(dice, document)
    change = dice.choice(CHANGES)
    description, raw = change(dice, document, container, key)
    written = json.dumps(document, indent=None if file.suffix == ".jsonl" else 2, ensure_ascii=False)
    lines[row] = written.replace(json.dumps(SLOT), raw.replace(OUTSIDE, str(outside))) + "\n"
    file.write_text("".join(lines), encoding="utf-8")
    return f"{description} at {key!r}"


def _spot(dice: random.Random, document: Any) -> tuple[Any, Any]:
    """A place in a document, found by descent, so that a long list of hashes does not take all attention."""
    container, key, here = document, None, document
    while isinstance(here, dict | list) and here and (key is None or dice.random() < 0.75):
        container, key = here, dice.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = container[key]
    return container, key


Change = Callable[[random.Random, Any, Any, Any], tuple[str, str]]


def _drop(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    del container[key]
    return "drop", ""


def _retype(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    name = dice.choice(list(RAW))
    container[key] = SLOT
    return name, RAW[name]


def _add(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    """One more entry, also one whose name is as bad as a value can be."""
    name, named = dice.choice(list(RAW)), dice.choice([raw for raw in RAW.values() if raw.startswith('"')])
    if isinstance(container, list):
        container.append(SLOT)
        return f"add {name}", RAW[name]
    container[SLOT] = container[key]
    return "add a name", named


def _duplicate(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    if isinstance(container, list):
        container.append(container[key])
        return "repeat", ""
    # the same name twice: most readers keep the last one
    container[SLOT] = dice.choice([None, 0, {}, "x", container[key]])
    return "name twice", json.dumps(key)


def _number(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    number = container[key]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return _retype(dice, document, container, key)
    container[key] = number + dice.choice([-1, 1, 0.5, 1000, -number])
    return "other number", ""


def _swap(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    other_key = dice.choice(keys)
    container[key], container[other_key] = container[other_key], container[key]
    return f"swap with {other_key!r}", ""


def _swap_hashes(dice: random.Random, document: Any, container: Any, key: Any) -> tuple[str, str]:
    places = list(_hashes(document))
    if len(places) < 2:
        return _swap(dice, document, container, key)
    (first, a), (second, b) = dice.sample(places, 2)
    first[a], second[b] = second[b], first[a]
    return f"swap the hashes of {a!r} and {b!r} near", ""


def _hashes(here: Any) -> Any:
    for key, value in here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ():
        if isinstance(value, str) and HASH.fullmatch(value):
            yield here, key
        yield from _hashes(value)


CHANGES: tuple[Change, ...] = (_drop, _retype, _retype, _retype, _add, _duplicate, _number, _swap, _swap_hashes)


def _rewrite(dice: random.Random, file: Path) -> str:
    """Write a document in another way, or another document."""
    before = file.read_bytes()
    name = dice.choice(list(REWRITES))
    file.write_bytes(REWRITES[name](before))
    return name


REWRITES: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "utf-16": lambda text: text.decode().encode("utf-16"),
    "latin-1": lambda text: text + "\n\u00e9".encode("latin-1"),
    "not utf-8": lambda text: text.replace(b'"', b'"\xff\xfe', 1),
    "another end": lambda text: text + b"}",
    "two documents": lambda text: text + text,
    "half": lambda text: text[: len(text) // 2],
    "blank": lambda text: b" \n" * 10,
    "a list": lambda text: b"[" + text.strip().replace(b"\n", b" ") + b"]",
    "null": lambda text: b"null",
    "a number": lambda text: b"1",
    "deep": lambda text: b"[" * 200_000,
    "deep and closed": lambda text: b"[" * 100_000 + b"]" * 100_000,
    "empty object": lambda text: b"{}",
    "comment": lambda text: b"// as it was\n" + text,
    "other spaces": lambda text: (
        json.dumps(json.loads(text), separators=(",", ":")).encode() if text[:1] == b"{" else text
    ),
    "nul at the end": lambda text: text + b"\0",
}
