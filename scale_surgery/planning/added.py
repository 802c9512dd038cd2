"""Every tensor that specifications add to a base model, by its name and shape on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.specs import Spec, specs_of_layer
from scale_surgery.planning.stored import module_path


@dataclass(frozen=True)
class NewTensor:
    """A tensor that the expansion adds.

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
    """List every tensor that the specifications add, layer by layer from the embedding to the head.

    Args:
        architecture: Facts of the architecture.
        sizes: Sizes of the base model.
        specs: Result of `build_specs`.
        prefix: What stands before the base model's names on disk, `model.` or nothing.
        head: Name of the head on disk.
        names: Names of the base's tensors.

    Yields:
        The new tensors.
    """
    final, called = architecture.final_norm.name, specs["name"]
    for name, spec in specs["model"].items():
        if spec["kind"] in ("embedding", "norm") and name != final:
            path = prefix + architecture.on_disk(name)
            yield from _module_tensors(spec, path, called, None, names, sizes.embedded)
    collaborative = specs["collaborative"]
    for layer in specs["expanded_layers"]:
        groups = collaborative["groups"] if layer in collaborative["layers"] else ()
        for name, spec in specs_of_layer(specs, layer)["expanded"].items():
            path = module_path(architecture, prefix, layer, name)
            has_w12 = spec.get("group") in groups
            if spec["kind"] == "linear":
                yield from _linear_tensors(spec, path, called, layer, names, has_w12=has_w12)
            elif spec["kind"] == "block":
                yield from _block_tensors(spec, path, called, layer, names, has_w12=has_w12)
            elif spec["kind"] == "norm":
                yield from _module_tensors(spec, path, called, layer, names)
    if final in specs["model"]:
        path = prefix + architecture.on_disk(final)
        yield from _module_tensors(specs["model"][final], path, called, None, names)
    if specs["head"]:
        yield from _module_tensors(specs["head"], head, called, None, names, sizes.vocabulary)


def _module_tensors(
    spec: Spec, path: str, expansion: str, layer: int | None, names: Collection[str], rows: int = 0
) -> Iterator[NewTensor]:
    is_norm = spec["kind"] == "norm"
    shape = (spec["up"],) if is_norm else (rows, spec["up"])
    named = partial(tensor_name, path, expansion)
    yield NewTensor(named("up_weight"), shape, "up_weight", spec["kind"], layer, f"{path}.weight")
    if is_norm and f"{path}.bias" in names:
        yield NewTensor(named("up_bias"), (spec["up"],), "up_bias", "norm", layer, f"{path}.bias")


def _linear_tensors(
    spec: Spec, path: str, expansion: str, layer: int, names: Collection[str], *, has_w12: bool
) -> Iterator[NewTensor]:
    base_in, up_in = spec["in_features"]
    base_out, up_out = (sum(widths) for widths in zip(*spec["out_features"], strict=True))
    shapes = {
        "w12": (base_out, up_in if has_w12 else 0),
        "w21": (up_out, base_in),
        "w22": (up_out, up_in),
        "up_bias": (up_out if f"{path}.bias" in names else 0,),
    }
    for block, shape in shapes.items():
        if 0 not in shape:
            yield NewTensor(tensor_name(path, expansion, block), shape, block, "linear", layer, f"{path}.weight")


def _block_tensors(
    spec: Spec, path: str, expansion: str, layer: int, names: Collection[str], *, has_w12: bool
) -> Iterator[NewTensor]:
    """The small MLP beside a block that runs as it is."""
    base, up, inner = spec["base"], spec["up"], spec["inner"]
    shapes = {
        "w12": (base, inner if has_w12 else 0),
        "w21": (inner, base),
        "w22": (inner, up),
        "up_weight": (up, inner),
    }
    # it is made of no tensor; this one says in which layer it stands
    own = (name for name in names if name.startswith(f"{path}."))
    beside = min(own, default=None) or min(name for name in names if name.startswith(f"{path.rpartition('.')[0]}."))
    for block, shape in shapes.items():
        if 0 not in shape:
            yield NewTensor(tensor_name(path, expansion, block), shape, block, "block", layer, beside)
