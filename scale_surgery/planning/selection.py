"""Turn a selection of layers, such as `20-31,-1`, into layer numbers."""

from __future__ import annotations

import re
from collections import Counter

from scale_surgery.errors import PlanError

LAYER_FORMS = "20-31 (inclusive), 0,4,8, -1, last:4, every:4, all"


def select_layers(text: str, num_layers: int, option: str = "--layers") -> tuple[int, ...]:
    """Resolve a layer selection: from 0, ranges with both ends, -1 is the last, `every:n` takes 0, n, 2n, ..."""
    chosen: list[int] = []
    problems: list[str] = []
    for part in text.split(","):
        try:
            chosen += _select_part(part.strip(), num_layers)
        except ValueError as error:
            problems.append(f"{option} {text}: {error}")
    repeated = sorted(layer for layer, count in Counter(chosen).items() if count > 1)
    if repeated:
        problems.append(f"{option} {text}: names layer {', '.join(map(str, repeated))} twice. Name each layer once.")
    if not chosen and not problems:
        problems.append(f"{option} {text!r}: selects no layer. Forms: {LAYER_FORMS}.")
    if problems:
        raise PlanError.from_problems(problems)
    return tuple(sorted(chosen))


def _select_part(part: str, num_layers: int) -> list[int]:
    if part == "all":
        return list(range(num_layers))
    if match := re.fullmatch(r"(last|every):(\d+)", part):
        return _select_pattern(match[1], int(match[2]), num_layers)
    if match := re.fullmatch(r"(-?\d+)-(-?\d+)", part):
        first, last = (_resolve(int(end), num_layers) for end in match.groups())
        if first > last:
            raise ValueError(f"the range {part} runs backwards, expected the lower layer first.")
        return list(range(first, last + 1))
    if re.fullmatch(r"-?\d+", part):
        return [_resolve(int(part), num_layers)]
    raise ValueError(f"{part!r} is not a layer selection. Forms: {LAYER_FORMS}.")


def _select_pattern(word: str, count: int, num_layers: int) -> list[int]:
    if not 1 <= count <= num_layers:
        raise ValueError(f"{word}:{count} needs a number from 1 to {num_layers}, the model's layers.")
    return list(range(num_layers - count, num_layers)) if word == "last" else list(range(0, num_layers, count))


def _resolve(layer: int, num_layers: int) -> int:
    resolved = layer + num_layers if layer < 0 else layer
    if not 0 <= resolved < num_layers:
        raise ValueError(f"layer {layer} is out of range, the model has layers 0 to {num_layers - 1}.")
    return resolved


def format_layers(layers: tuple[int, ...]) -> str:
    """Write layer numbers short, runs as ranges: (3, 4, 5, 9) becomes "3-5,9"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in runs) or "none"
