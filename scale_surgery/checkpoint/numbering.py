"""Names of tensors of a model with duplicated layers: by base layer here, by position in the files.

With `--layers 1` a copy of layer 1 comes after it, and every layer above moves up by one:

    in this package                  in the files, and in the model that loads them
    model.layers.1.mlp.x             model.layers.1.mlp.x
    model.layers.1.after.mlp.x       model.layers.2.mlp.x       the copy
    model.layers.2.mlp.x             model.layers.3.mlp.x       the base's layer 2

So the name of a base tensor does not depend on copies below it. `open_checkpoint` converts names in files to these
names, and `Numbering.stored` converts them back for writing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scale_surgery.errors import CheckpointError, Problem

CONFIG_KEY = "scale_surgery"
# key of base and request inside it, for folders without their surgery.json
ORIGIN_KEY = "origin"
AFTER = "after."


@dataclass(frozen=True)
class Numbering:
    """The positions of a base's layers among copies.

    Attributes:
        base_model: Possible prefix of the layers in a name, such as `model`.
        layers: Module list of the layers, such as `layers`.
        copied: Base layers followed by a copy, ascending.
    """

    base_model: str
    layers: str
    copied: tuple[int, ...]

    @cached_property
    def new(self) -> tuple[int, ...]:
        """The positions of the copies."""
        return tuple(layer + number for number, layer in enumerate(self.copied, 1))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # a base may have been saved without the outer modules
        parts = self.base_model.split(".")
        paths = "|".join(re.escape(".".join(parts[start:])) for start in range(len(parts)))
        return re.compile(rf"((?:(?:{paths})\.)?{re.escape(self.layers)}\.)(\d+)\.(.+)")

    def position(self, layer: int) -> int:
        """Return the position of a base layer: its number plus the number of copies below it."""
        return layer + sum(copied < layer for copied in self.copied)

    def numbers(self, name: str) -> bool:
        """Return True if a name has the number of a layer."""
        return self._pattern.fullmatch(name) is not None

    def stored(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return name
        path, layer, rest = match[1], int(match[2]), match[3]
        if rest.startswith(AFTER) and layer in self.copied:
            return f"{path}{self.position(layer) + 1}.{rest.removeprefix(AFTER)}"
        return f"{path}{self.position(layer)}.{rest}"

    def named(self, stored: str) -> str:
        """Return the name of a stored tensor in this package, as the inverse of `stored`."""
        match = self._pattern.fullmatch(stored)
        if match is None:
            return stored
        path, position, rest = match[1], int(match[2]), match[3]
        layer = position - sum(new <= position for new in self.new)
        return f"{path}{layer}.{AFTER if position in self.new else ''}{rest}"

    def as_key_mapping(self, layers: int) -> dict[str, str]:
        """Return a `key_mapping` by which transformers loads base tensors from files numbered by position."""
        moved = {self.position(layer): layer for layer in range(layers) if self.position(layer) != layer}
        word = re.escape(self.layers)
        return {rf"(?<![^.]){word}\.{position}\.": f"{self.layers}.{layer}." for position, layer in moved.items()}


def numbering_of(specs: Mapping[str, Any] | None) -> Numbering | None:
    """Return the numbering in a model's key `scale_surgery`, or None if no layer was duplicated."""
    # only specifications of duplicated layers name their method
    if not isinstance(specs, Mapping) or "method" not in specs:
        return None
    copied, names = specs.get("expanded_layers"), (specs.get("base_model"), specs.get("layers"))
    are_layers = isinstance(copied, list | tuple) and all(type(layer) is int and layer >= 0 for layer in copied)
    if not are_layers or not copied or sorted(set(copied)) != list(copied) or not all(map(_is_word, names)):
        raise CheckpointError(Problem("config-copies-unnamed", f"config.json: {CONFIG_KEY}"))
    return Numbering(str(names[0]), str(names[1]), tuple(copied))


def _is_word(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
