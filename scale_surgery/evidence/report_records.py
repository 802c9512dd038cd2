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

# values of a training log that a report draws
CURVES = ("loss", "forgetting", "learning", "old_accuracy", "new_accuracy")
# norms that add up as squares; None in one tensor makes the sum None
ADDED = ("norm", "start_norm", "change", "base_norm")


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a block at some of its ranks, which count from 1, at its start and now."""

    ranks: tuple[int, ...]
    start: tuple[float, ...]
    now: tuple[float, ...]


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of a tensor, or of several taken as one.

    Attributes:
        norm: Its norm.
        start_norm: Its norm when it was expanded; None where the start is not known.
        change: Norm of the difference of the two; None likewise.
        base_norm: Norm of the base weight beside it; None where there is none, as beside a norm or a bias.
    """

    norm: float
    start_norm: float | None
    change: float | None
    base_norm: float | None

    @property
    def relative_change(self) -> float | None:
        """Change over the norm at the start; None where it started as zeros."""
        return _ratio(self.change, self.start_norm)

    @property
    def relative_norm(self) -> float | None:
        """Norm over that of the base weight beside it."""
        return _ratio(self.norm, self.base_norm)

    @property
    def change_of_base(self) -> float | None:
        """Change over the norm of the base weight beside it."""
        return _ratio(self.change, self.base_norm)


@dataclass(frozen=True)
class TensorChange:
    """The change of one expansion tensor, or of the rows of one role in a fused projection.

    Attributes:
        name: Name of the tensor.
        layer: Its layer, or None outside the layers.
        role: What the linear beside it does (q, k, v, o, gate, up_proj, down), or norm, embedding or head.
        group: attn, ffn, norm, embedding or head.
        block: Last part of the name: w12, w21, w22, up_weight, ...
        init: How it started: svd, zero, mean, ...
        shape: Its shape, or that of the rows.
        norms: Its norms.
        rank: Its effective rank; None of a vector, and of zeros.
        start_rank: Effective rank at its start.
        change_rank: Effective rank of its change.
        spectrum: Its singular values, of a W21.
        is_trained: Whether its bytes differ from those that the expansion wrote.
        separation: Of copies in a grown model, norm of their difference from what they are copies of, which may have
            trained too, over the norm of that; None of what is no copy.
    """

    name: str
    layer: int | None
    role: str
    group: str
    block: str
    init: str
    shape: tuple[int, ...]
    norms: Norms
    rank: float | None
    start_rank: float | None
    change_rank: float | None
    spectrum: Spectrum | None
    is_trained: bool
    separation: float | None = None

    @property
    def full_rank(self) -> int:
        """The most that an effective rank can be."""
        return min(self.shape)


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
        tokens: Tokens in it.
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
        """Whether nothing differs anywhere."""
        return all(layer.is_bit_equal for layer in self.layers)


@dataclass(frozen=True)
class Report:
    """The result of `report`.

    Attributes:
        path: The expanded checkpoint.
        base_name: Name of its base model.
        method: How it was grown: scale, grow or depth.
        variant: Its variant.
        routing: Its router, or None.
        state: "initial", or "trained" where an expansion tensor changed since the expansion.
        parameters: Parameters of the expansion.
        tensors: Every expansion tensor, in the order of the plan.
        layers: The same by layer, group and block.
        streams: The base stream, or None where no model was run.
        runs: What surgery.json records of each training run.
        log: The log of the last run, if it is there; see `train`.
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
        """Tensors of a block, of a group alone where one is given."""
        return [tensor for tensor in self.tensors if tensor.block == block and group in (None, tensor.group)]

    @property
    def measured(self) -> dict[str, float]:
        """The last measurement of the last training run; empty where there is none."""
        return dict(self.runs[-1].get("measured") or {}) if self.runs else {}

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, with what follows from the norms."""
        content = asdict(self) | {"path": str(self.path)}
        for key in ("tensors", "layers"):
            pairs = zip(content[key], getattr(self, key), strict=True)
            content[key] = [_flat(row, record.norms) for row, record in pairs]
        # JSON has neither NaN nor infinity: they become texts
        return plain_json(content)


def _flat(row: dict[str, Any], norms: Norms) -> dict[str, Any]:
    derived = {"relative_change": norms.relative_change, "relative_norm": norms.relative_norm}
    derived |= {"change_of_base": norms.change_of_base}
    nested: dict[str, float | None] = row.pop("norms")
    return row | nested | derived


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def add_norms(parts: Iterable[Norms]) -> Norms:
    """Norms of several tensors taken as one: roots of the sums of squares."""
    listed = list(parts)
    values = [[getattr(part, name) for part in listed] for name in ADDED]
    norm, *rest = (None if None in column else math.hypot(*column) for column in values)
    assert norm is not None
    return Norms(norm, *rest)


def by_layer(tensors: Iterable[TensorChange]) -> tuple[BlockChange, ...]:
    """Take all tensors of a layer, group and block as one; tensors outside layers are left out."""
    norms: dict[tuple[int, str, str], list[Norms]] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            norms.setdefault((tensor.layer, tensor.group, tensor.block), []).append(tensor.norms)
    return tuple(BlockChange(*place, add_norms(parts)) for place, parts in sorted(norms.items()))
