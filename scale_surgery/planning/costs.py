"""Costs of an expansion: parameters, bytes, forward cost, training depth, and an estimate of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.headers import DTYPE_BYTES
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.planning.base import Base
from scale_surgery.planning.specs import REPLACING, Widths
from scale_surgery.planning.stock import StockCost, cost_of_stock, stock_problems

if TYPE_CHECKING:
    from scale_surgery.planning.tensors import TensorPlan

# peak resident memory of a process that imported torch and transformers, pages of their libraries included
PROCESS_BYTES = 930_000_000
# bytes for each byte of tokenizer.json: while it loads, when it is loaded, and while tokens are added to it
LOADING_TOKENIZER = 13
LOADED_TOKENIZER = 9
EXTENDING_TOKENIZER = 43


@dataclass(frozen=True)
class Costs:
    """Costs of an expansion.

    Attributes:
        parameters_before: Stored parameters of the base model that its class reads.
        parameters_added: Parameters added in all.
        bytes_added: Bytes of the new shards.
        parameters_per_layer: Parameters added in the expanded layer that gets most.
        forward_factor: Multiply-adds of all linears and the head, expanded over base.
        up_stream_from: Lowest layer through which training backpropagates the up stream.
        base_stream_from: Lowest layer through which training backpropagates the base stream, None for none.
        peak_memory_bytes: Estimated peak memory of the expansion: resident, with pages of the libraries.
        stock: Cost of the stock form, a plain checkpoint of the base's architecture; None where there is none.
    """

    parameters_before: int
    parameters_added: int
    bytes_added: int
    parameters_per_layer: int
    forward_factor: float
    up_stream_from: int
    base_stream_from: int | None
    peak_memory_bytes: int
    stock: StockCost | None


def count_costs(base: Base, specs: Mapping[str, Any], tensors: Sequence[TensorPlan], svd: str) -> Costs:
    """Costs of a plan."""
    checkpoint = base.checkpoint
    added = sum(tensor.elements for tensor in tensors)
    beside = sum(tensor.elements for tensor in tensors if tensor.block not in REPLACING)
    # rows of new tokens are below all layers
    trained = [0] if specs["widths"]["new_tokens"] else specs["collaborative"]["layers"]
    decomposed = [tensor for tensor in tensors if tensor.init == "svd"]
    before = sum(info.elements for info in base.read.values())
    widths = Widths(**specs["widths"])
    facts = (base.architecture, base.sizes, widths)
    has_stock_form = not any(stock_problems(*facts, has_gates=any(tensor.block == "gate" for tensor in tensors)))
    return Costs(
        parameters_before=before,
        parameters_added=added,
        bytes_added=sum(tensor.bytes for tensor in tensors),
        parameters_per_layer=_most_in_a_layer(tensors),
        forward_factor=_forward_factor(base, tensors),
        up_stream_from=min(specs["expanded_layers"], default=0),
        base_stream_from=min(trained, default=None),
        peak_memory_bytes=_peak_memory(decomposed, tensors, checkpoint, svd, has_new_tokens=widths.new_tokens > 0),
        stock=cost_of_stock(*facts, checkpoint.tensors, base.head, (before, beside)) if has_stock_form else None,
    )


def estimate_depth(base: Base, specs: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> Costs:
    """Costs of duplicated layers."""
    layers, checkpoint = specs["expanded_layers"], base.checkpoint
    return Costs(
        parameters_before=sum(info.elements for info in base.read.values()),
        parameters_added=sum(tensor.elements for tensor in tensors),
        bytes_added=sum(tensor.bytes for tensor in tensors),
        parameters_per_layer=_most_in_a_layer(tensors),
        forward_factor=_forward_factor(base, tensors),
        # training reaches down to the lowest copy, which stands after the first of the chosen layers
        up_stream_from=layers[0],
        base_stream_from=layers[0],
        peak_memory_bytes=_peak_memory([], tensors, checkpoint, ""),
        stock=None,
    )


def _most_in_a_layer(tensors: Sequence[TensorPlan]) -> int:
    """Return the parameters of the layer that gets most."""
    added = Counter[int]()
    for tensor in tensors:
        if tensor.layer is not None:
            added[tensor.layer] += tensor.elements
    return max(added.values(), default=0)


def _forward_factor(base: Base, tensors: Sequence[TensorPlan]) -> float:
    layers, embedding = f"{base.prefix}{base.architecture.layers}.", base.architecture.embedding_weight
    # experts count all, though a token goes through few of them
    matrices = (info for name, info in base.read.items() if name.startswith(layers) and len(info.shape) > 1)
    before = sum(info.elements for info in matrices) + base.sizes.vocabulary * base.sizes.hidden

    def is_product(tensor: TensorPlan) -> bool:
        # the head of a tied model reads the rows of new tokens too
        is_read_twice = tensor.block == "new_rows" and base.sizes.is_tied
        return len(tensor.shape) > 1 and (is_read_twice or not tensor.source.endswith(embedding))

    # a trained copy takes the place of a base product
    others = (tensor for tensor in tensors if tensor.block not in REPLACING)
    return (before + sum(tensor.elements for tensor in others if is_product(tensor))) / before


def _peak_memory(
    decomposed: Sequence[TensorPlan],
    tensors: Sequence[TensorPlan],
    checkpoint: Checkpoint,
    svd: str,
    *,
    has_new_tokens: bool = False,
) -> int:
    shards: dict[str, int] = {}
    for tensor in tensors:
        shards[tensor.shard] = shards.get(tensor.shard, 0) + tensor.bytes
    working = 0
    for tensor in decomposed:
        info = checkpoint.tensors[tensor.source]
        small = min(info.shape)
        width = 8 if svd == "exact" else 4
        matrices = 4 * small * small if svd == "exact" else info.elements
        working = max(working, info.elements * DTYPE_BYTES[info.dtype] + width * matrices)
    for tensor in tensors:
        if tensor.init == "copy" and tensor.block == "w12":
            info = checkpoint.tensors[tensor.source]
            # in float32 the share of one copy; of several also the noise that keeps them apart
            matrices = 1 if tensor.elements == info.elements else 5
            working = max(working, info.elements * (DTYPE_BYTES[info.dtype] + 4 * matrices))
    tokenizer = checkpoint.path / TOKENIZER_FILE
    # of a repository on the Hub, it may not be here yet
    text = tokenizer.stat().st_size if tokenizer.is_file() else 0
    made = working + 2 * max(shards.values(), default=0)
    if has_new_tokens:
        return PROCESS_BYTES + EXTENDING_TOKENIZER * text + made
    return PROCESS_BYTES + max(LOADING_TOKENIZER * text, LOADED_TOKENIZER * text + made)
