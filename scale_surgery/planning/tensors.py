"""The new tensors of a plan: first where they stand and how large they are, then their dtype, shard and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.checkpoint.headers import DTYPE_BYTES
from scale_surgery.modeling.expanded_shapes import shapes_of
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.specs import Spec, specs_of_layer
from scale_surgery.planning.stored import module_path

# values of a new tensor: from a decomposition, random, zeros, ones, the mean of base values, a copy, the gain with
# which a norm gives zeros, or for each new token the mean of the rows of its pieces
Init = Literal["svd", "random", "zero", "one", "mean", "copy", "mute", "pieces"]


@dataclass(frozen=True)
class TensorPlan:
    """A new tensor with its dtype, its shard, and how its values are made from the base tensor `source`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    layer: int | None
    shard: str
    init: Init
    source: str

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class NewTensor:
    """A tensor that specifications add.

    Attributes:
        name: Name on disk: see `checkpoint.expansions`.
        shape: Its shape; rows of a block are outputs.
        block: Last part of its name.
        kind: Kind of module it belongs to: linear, norm, embedding, head, or block.
        layer: Its layer, or None outside the layers.
        source: Base tensor that it stands beside.
        is_copy: Whether its values are those of that tensor.
    """

    name: str
    shape: tuple[int, ...]
    block: str
    kind: str
    layer: int | None
    source: str
    is_copy: bool = False


def new_tensors(
    architecture: Architecture, sizes: Sizes, specs: Spec, prefix: str, head: str, names: Collection[str]
) -> Iterator[NewTensor]:
    """List every tensor that the specifications add, layer by layer from the embedding to the head."""
    final, expansion, is_gated = architecture.final_norm.name, specs["name"], specs.get("variant") == "gated"
    for name, spec in specs["model"].items():
        if name != final:
            yield from _beside(spec, prefix + architecture.on_disk(name), expansion, None, names, sizes.embedded)
    collaborative = specs["collaborative"]
    for layer in specs["expanded_layers"]:
        groups = collaborative["groups"] if layer in collaborative["layers"] else ()
        for name, spec in specs_of_layer(specs, layer)["expanded"].items():
            path = module_path(architecture, prefix, layer, name)
            has_w12 = spec.get("group") in groups
            yield from _beside(spec, path, expansion, layer, names, has_w12=has_w12, is_gated=is_gated)
    if final in specs["model"]:
        yield from _beside(specs["model"][final], prefix + architecture.on_disk(final), expansion, None, names)
    if specs["head"]:
        yield from _beside(specs["head"], head, expansion, None, names, sizes.vocabulary, is_gated=is_gated)


def _beside(
    spec: Spec,
    path: str,
    expansion: str,
    layer: int | None,
    names: Collection[str],
    rows: int = 0,
    *,
    has_w12: bool = False,
    is_gated: bool = False,
) -> Iterator[NewTensor]:
    """The tensors beside a module, but for empty ones; those of a grown MLP are copies."""
    kind, has_bias = spec["kind"], f"{path}.bias" in names
    source = _some_tensor(path, names) if kind == "block" else f"{path}.weight"
    for block, shape in shapes_of(spec, rows, has_bias=has_bias, has_w12=has_w12, is_gated=is_gated).items():
        if 0 not in shape:
            beside = f"{path}.bias" if "bias" in block and has_bias else source
            name, module_kind = tensor_name(path, expansion, block), "linear" if kind == "grown" else kind
            yield NewTensor(name, shape, block, module_kind, layer, beside, is_copy=kind == "grown")


def _some_tensor(path: str, names: Collection[str]) -> str:
    """A tensor inside a block, or in the module around it, whose dtype a small MLP beside the block takes."""
    inside = min((name for name in names if name.startswith(f"{path}.")), default=None)
    return inside or min(name for name in names if name.startswith(f"{path.rpartition('.')[0]}."))
