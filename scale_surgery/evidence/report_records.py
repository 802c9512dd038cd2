"""The records of a report: expansion tensors, layers, the base stream, training runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scale_surgery.checkpoint.files import plain_json

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Layer
    from scale_surgery.modeling.expanded_routers import Router

# values of a training log that a report plots
CURVES = ("loss", "forgetting", "learning", "old_accuracy", "new_accuracy")
# norms that add up as squares; None in one tensor makes the sum None
ADDED = ("norm", "start_norm", "change")


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of a tensor, or of several taken as one.

    Attributes:
        norm: Its norm.
        start_norm: Its initial norm.
        change: Norm of the difference of the two.
        base_norm: Norm of the corresponding base weight; None if there is none, as for a norm, a bias, or what runs
            beside a mixture of experts.
    """

    norm: float
    start_norm: float
    change: float
    base_norm: float | None

    @property
    def relative_change(self) -> float | None:
        """Change over the initial norm; None if the initial values are zeros."""
        return _ratio(self.change, self.start_norm)

    @property
    def relative_norm(self) -> float | None:
        """Norm over that of the corresponding base weight."""
        return _ratio(self.norm, self.base_norm)

    @property
    def change_of_base(self) -> float | None:
        """Change over the norm of the corresponding base weight."""
        return _ratio(self.change, self.base_norm)


@dataclass(frozen=True)
class TensorChange:
    """The change of one expansion tensor, or of the rows of one role in a fused projection.

    Attributes:
        name: Name of the tensor.
        layer: Its layer, or None outside the layers.
        role: Role of its linear (q, k, v, o, gate, up_proj, down), or beside (a block that runs unchanged, such as a
            mixture of experts), norm, embedding or head.
        group: attn, ffn, norm, embedding, head, or beside (copies of matrices that no expansion widens).
        block: Last part of the name: w12, w21, w22, up_weight, ...
        init: Its initialisation: svd, zero, mean, ...
        shape: Its shape, or that of the rows.
        norms: Its norms.
        is_trained: True if its bytes differ from those that the expansion wrote.
        separation: For copies in a grown model, norm of their difference from their present original over its norm;
            None for other tensors.
    """

    name: str
    layer: int | None
    role: str
    group: str
    block: str
    init: str
    shape: tuple[int, ...]
    norms: Norms
    is_trained: bool
    separation: float | None = None


@dataclass(frozen=True)
class BlockChange:
    """The change of all tensors of one block in one group of one layer, taken as one."""

    layer: int
    group: str
    block: str
    norms: Norms


@dataclass(frozen=True)
class Streams:
    """The base stream against the base model's, on probe text.

    Attributes:
        layers: Drift and cosine after each layer, the last one after the final norm; layer -1 is the embedding.
        source: The texts.
        tokens: Tokens of the texts.
        dtype: Dtype of the hidden states.
        path: Compared with the base model: the model, or the adapt path of a routed one.
    """

    layers: tuple[Layer, ...]
    source: str
    tokens: int
    dtype: str
    path: Literal["expanded", "adapt"]

    @property
    def is_bit_equal(self) -> bool:
        """True if all layers are bit-equal."""
        return all(layer.is_bit_equal for layer in self.layers)


@dataclass(frozen=True)
class Report:
    """The result of `report`.

    Attributes:
        path: The expanded checkpoint.
        base_name: Name of its base model.
        method: Its method: scale, grow or depth.
        variant: Its variant.
        routing: Its router, or None.
        state: "initial", or "trained" if an expansion tensor changed since the expansion.
        parameters: Parameters of the expansion.
        tensors: Every expansion tensor, in the order of the plan.
        layers: The same by layer, group and block.
        streams: The base stream, or None if no model was run.
        runs: Records of the training runs in surgery.json.
        log: The log of the last run, if it exists; see `train`.
        notes: Notes on the numbers.
    """

    path: Path
    base_name: str
    method: str
    variant: str
    routing: Router | None
    state: Literal["initial", "trained"]
    parameters: int
    tensors: tuple[TensorChange, ...]
    layers: tuple[BlockChange, ...]
    streams: Streams | None
    runs: tuple[Mapping[str, Any], ...]
    log: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    def find(self, block: str, group: str | None = None) -> list[TensorChange]:
        """Return the tensors of a block, optionally only of one group."""
        return [tensor for tensor in self.tensors if tensor.block == block and group in (None, tensor.group)]

    @property
    def measured(self) -> dict[str, float]:
        """The last measurement of the last training run; empty if there is none."""
        return dict(self.runs[-1].get("measured") or {}) if self.runs else {}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values, with values derived from the norms."""
        content = asdict(self) | {"path": str(self.path)}
        for key in ("tensors", "layers"):
            pairs = zip(content[key], getattr(self, key), strict=True)
            content[key] = [_flat(row, record.norms) for row, record in pairs]
        # JSON has neither NaN nor infinity, so they become texts
        return plain_json(content)


def _flat(row: dict[str, Any], norms: Norms) -> dict[str, Any]:
    derived = {"relative_change": norms.relative_change, "relative_norm": norms.relative_norm}
    derived |= {"change_of_base": norms.change_of_base}
    nested: dict[str, float | None] = row.pop("norms")
    return row | nested | derived


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def add_norms(parts: Iterable[Norms]) -> Norms:
    """Return the norms of several tensors taken as one: roots of the sums of squares."""
    listed = list(parts)
    norm, start, change = (math.hypot(*(getattr(part, name) for part in listed)) for name in ADDED)
    base = [part.base_norm for part in listed if part.base_norm is not None]
    return Norms(norm, start, change, math.hypot(*base) if len(base) == len(listed) else None)


def by_layer(tensors: Iterable[TensorChange]) -> tuple[BlockChange, ...]:
    """Merge all tensors of a layer, group and block into one change; skip tensors outside layers."""
    norms: dict[tuple[int, str, str], list[Norms]] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            norms.setdefault((tensor.layer, tensor.group, tensor.block), []).append(tensor.norms)
    return tuple(BlockChange(*place, add_norms(parts)) for place, parts in sorted(norms.items()))
