"""Turn a selection of layers, such as `20-31,-1`, into layer numbers."""

from __future__ import annotations

import re
from collections import Counter

from scale_surgery.errors import PlanError, Problem

# Python refuses to read a number of thousands of digits
NUMBER = r"\d{1,18}"


def select_layers(text: str, num_layers: int, option: str = "--layers") -> tuple[int, ...]:
    """Resolve a layer selection: from 0, ranges with both ends, -1 is the last, `every:n` takes 0, n, 2n, ..."""
    place, chosen, problems = f"{option} {text}", list[int](), list[Problem]()
    for part in text.split(","):
        try:
            chosen += _select_part(part.strip(), num_layers)
        except PlanError as error:
            problems += [problem.within(place) for problem in error.problems]
    repeated = sorted(layer for layer, count in Counter(chosen).items() if count > 1)
    if repeated:
        problems.append(Problem("layers-repeated", place, layers=repeated))
    if problems:
        raise PlanError(*problems)
    return tuple(sorted(chosen))


def _select_part(part: str, num_layers: int) -> list[int]:
    if part == "all":
        return list(range(num_layers))
    if match := re.fullmatch(rf"(last|every):({NUMBER})", part):
        return _select_pattern(match[1], int(match[2]), num_layers)
    if match := re.fullmatch(rf"(-?{NUMBER})-(-?{NUMBER})", part):
        first, last = (_resolve(int(end), num_layers) for end in match.groups())
        if first > last:
            raise PlanError(Problem("layer-range-backwards", part=part))
        return list(range(first, last + 1))
    if re.fullmatch(rf"-?{NUMBER}", part):
        return [_resolve(int(part), num_layers)]
    raise PlanError(Problem("layers-unreadable", part=part))


def _select_pattern(word: str, count: int, num_layers: int) -> list[int]:
    if not 1 <= count <= num_layers:
        raise PlanError(Problem("layer-pattern-out-of-range", word=word, count=count, layers=num_layers))
    return list(range(num_layers - count, num_layers)) if word == "last" else list(range(0, num_layers, count))


def _resolve(layer: int, num_layers: int) -> int:
    resolved = layer + num_layers if layer < 0 else layer
    if not 0 <= resolved < num_layers:
        raise PlanError(Problem("layer-out-of-range", layer=layer, last=num_layers - 1))
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
