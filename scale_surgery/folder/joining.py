"""Join a linear's base weight and its expansion blocks to one matrix, and take them out of it again.

    [ W    W12 ]      rows are outputs, columns inputs; of a fused projection, each section has its base rows before
    [ W21  W22 ]      its up rows: q, q_up, k, k_up, ...

The up part of the embedding, and of the head, follows the base's columns. If the base ties them, they stay one matrix
[W | head's up part | embedding's up part]. In a layer that is not expanded, a linear that reads or writes the hidden
state gets zeros for the up stream.

Joining copies and never adds, so that every tensor comes out bit for bit as it went in; but for a grown MLP, whose base
weight counts a share, and which may have trained copies W11 in place of W. It is joined for the stock form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.expansions import INFIX, tensor_name
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.errors import Problem
from scale_surgery.folder.record import Manifest
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import Spec, specs_of_layer
from scale_surgery.planning.stock import IN_EMBEDDING, first_wide_layer
from scale_surgery.planning.stored import module_path

if TYPE_CHECKING:
    from torch import Tensor

# whether a tensor lies in the rows that write the up stream, or in all, and in which of the `inputs` its columns lie
PLACES: dict[str, tuple[bool | None, int]] = {
    "weight": (False, 0),
    "w12": (False, 1),
    "w21": (True, 0),
    "w22": (True, 1),
    "bias": (False, 0),
    "up_bias": (True, 0),
    # of the head and the embedding, in which rows of new tokens come after those of the base
    "up_weight": (None, 1),
    "new_rows": (True, 0),
    # of an embedding whose second columns are the head's up part
    "embedding_up_weight": (None, 2),
    # of a grown MLP: what is trained in place of the base's
    "w11": (False, 0),
    "bias11": (False, 0),
}


@dataclass(frozen=True)
class Joined:
    """A weight or bias of the joined form.

    Attributes:
        name: Its name; that of the base tensor in it, but for a head that was tied to the embedding.
        pieces: Names of the tensors in it, by the last part of their names; what is not there is zero.
        inputs: Base and up width of what the linear reads; of an embedding that is also the head, three widths.
        sections: Base and up width of what it writes, section by section.
        is_transposed: Whether the weight is stored as (inputs, outputs), as Conv1D does.
        share: What the base weight counts; other than 1 in the down projection of a grown MLP.
    """

    name: str
    pieces: dict[str, str]
    inputs: tuple[int, ...]
    sections: tuple[tuple[int, int], ...]
    is_transposed: bool
    share: float = 1.0

    @property
    def base(self) -> str:
        """Name of the base tensor in it, or of the first block if there is none."""
        return next(iter(self.pieces.values()))

    @property
    def is_bias(self) -> bool:
        """True if it is a bias, which has no columns."""
        return self.name.endswith("bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """Its stored shape."""
        rows, columns = sum(map(sum, self.sections)), sum(self.inputs)
        if self.is_bias:
            return (rows,)
        return (columns, rows) if self.is_transposed else (rows, columns)


def joined_tensors(manifest: Manifest) -> Iterator[Joined]:
    """List every tensor that joining makes of an expanded model: embedding, linears layer by layer, and a head last."""
    plan, present = manifest.plan, {*manifest.base_tensors, *manifest.expansion_tensors}
    architecture, sizes, up = plan.architecture, plan.sizes, plan.widths.up_width
    embedding, first = plan.embedding, first_wide_layer(architecture, plan.layers)
    fork, new = fork_of(manifest), plan.widths.new_tokens
    columns = up if first == IN_EMBEDDING else 0
    up_weight, own_rows = (tensor_name(plan.head, plan.request.name, block) for block in ("up_weight", "new_rows"))
    embedding_up, embedding_rows = (_embedding_block(plan, block) for block in ("up_weight", "new_rows"))
    is_shared = shares_head(manifest)
    if is_shared:
        pieces = {"weight": embedding, "up_weight": up_weight, "embedding_up_weight": embedding_up}
        widths = (sizes.hidden, up, own_columns(manifest))
        yield _of_vocabulary(embedding, {**pieces, "new_rows": embedding_rows}, widths, (sizes.embedded, new), present)
    elif columns or new:
        pieces = {"weight": embedding, "up_weight": embedding_up, "new_rows": embedding_rows}
        yield _of_vocabulary(embedding, pieces, (sizes.hidden, columns), (sizes.embedded, new), present)
    for layer in range(max(first, 0), sizes.layers):
        is_expanded = layer in plan.layers
        gated = plan.collaboration.groups if plan.variant == "gated" and layer in plan.collaboration.layers else ()
        specs = plan.expanded_linears(layer) if is_expanded else _passing_linears(plan, layer)
        if fork is not None and layer >= fork:
            specs = _stock_linears(plan, layer) | specs
        for name, spec in specs.items():
            path = module_path(architecture, plan.prefix, layer, name)
            base_in, up_in = spec["in_features"]
            sections = tuple((base, up) for base, up in spec["out_features"])
            share = spec.get("share", 1.0)
            matrices: tuple[tuple[str, tuple[str, ...], tuple[int, int], bool], ...] = (
                ("weight", ("weight", "w12", "w21", "w22", "w11"), (base_in, up_in), architecture.transposed),
                ("bias", ("bias", "up_bias", "bias11"), (0, 0), False),
            )
            if spec.get("group") in gated or (fork is not None and layer >= fork):
                # of two paths, W12 acts on one alone; a gate acts on what both read of the up stream
                matrices = (
                    ("base.weight", ("weight", "w21"), (base_in, 0), architecture.transposed),
                    ("base.bias", ("bias", "up_bias"), (0, 0), False),
                    ("up.weight", ("w12", "w22"), (0, up_in), False),
                )
            for matrix, blocks, inputs, is_transposed in matrices:
                names = {block: block_name(path, plan.request.name, block) for block in blocks}
                pieces = {block: piece for block, piece in names.items() if piece in present}
                # a bias without an up part is as long as before
                if pieces and ("weight" in matrix or any(up for _, up in sections)):
                    yield Joined(f"{path}.{matrix}", pieces, inputs, sections, is_transposed, share)
    head, bias = (f"{plan.head}.{part}" for part in ("weight", "bias"))
    if new and bias in present:
        yield Joined(bias, {"bias": bias}, (0, 0), ((sizes.vocabulary, new),), False)
    if not is_shared and (up_weight in present or own_rows in present or (new and head in present)):
        # one that is tied to the embedding becomes a tensor of its own; a copy of it may be stored
        pieces = {"weight": head if head in present else embedding, "up_weight": up_weight}
        pieces["new_rows"] = own_rows if own_rows in present else embedding_rows
        yield _of_vocabulary(head, pieces, (sizes.hidden, up), (sizes.vocabulary, new), present)


def _of_vocabulary(
    name: str, pieces: dict[str, str], inputs: tuple[int, ...], rows: tuple[int, int], present: Collection[str]
) -> Joined:
    """Describe an embedding or a head, of the pieces that are present."""
    pieces = {block: piece for block, piece in pieces.items() if piece in present}
    return Joined(name, pieces, inputs, (rows,), False)


def _embedding_block(plan: Plan, block: str) -> str:
    """Return the name of a block of the embedding."""
    return tensor_name(plan.embedding.removesuffix(".weight"), plan.request.name, block)


def shares_head(manifest: Manifest) -> bool:
    """Return True if a fused model with an up stream has one matrix for embedding and head, as its base."""
    plan, sizes = manifest.plan, manifest.plan.sizes
    # what leaves the last norm is wider by them than what enters the first layer
    is_too_wide = plan.architecture.keeps_width and own_columns(manifest) > 0
    return plan.widths.up_width > 0 and sizes.is_tied and sizes.embedded == sizes.vocabulary and not is_too_wide


def tied_head(manifest: Manifest) -> Joined | None:
    """Return the head of a fused model if it was tied to the embedding and is now a separate matrix."""
    *_, last = joined_tensors(manifest)
    return last if "up_weight" in last.pieces and last.base == manifest.plan.embedding != last.name else None


def own_columns(manifest: Manifest) -> int:
    """Return the number of columns of a shared matrix that only the embedding reads."""
    plan = manifest.plan
    return plan.widths.up_width * (_embedding_block(plan, "up_weight") in manifest.expansion_tensors)


def copied_head(manifest: Manifest) -> str | None:
    """Return the name of a tied head that the base stores separately and the fused model does not."""
    head = f"{manifest.plan.head}.weight"
    return head if head in manifest.base_tensors and shares_head(manifest) else None


def _stock_linears(plan: Plan, layer: int) -> dict[str, Spec]:
    """Return the linears of a layer of the base."""
    return {
        linear.name: {"in_features": (linear.inputs, 0), "out_features": [(size, 0) for size in linear.outputs]}
        for linear in plan.architecture.kind(layer).linears
    }


def block_name(module: str, expansion: str, block: str) -> str:
    """Return the name of a base tensor or of a block of a module."""
    return f"{module}.{block}" if block in ("weight", "bias") else tensor_name(module, expansion, block)


def fork_of(manifest: Manifest) -> int | None:
    """Return the first layer of a fused model that runs for two paths; None without a router over two."""
    return min(manifest.plan.collaboration.layers, default=None) if manifest.routing is not None else None


def _passing_linears(plan: Plan, layer: int) -> dict[str, Spec]:
    """Return the linears that read or write the hidden state in an unexpanded layer above an expanded one."""
    passing = specs_of_layer(plan.specs, layer)["passing"]
    return {
        linear.name: {
            "in_features": (linear.inputs, 0 if passing[linear.name]["base"] is None else plan.widths.up_width),
            "out_features": [(sum(linear.outputs), passing[linear.name]["up"])]
            if passing[linear.name]["up"]
            else [(size, 0) for size in linear.outputs],
        }
        for linear in plan.architecture.kind(layer).linears
        if linear.name in passing
    }


def renamed_tensors(manifest: Manifest) -> dict[str, str]:
    """Return the new names of tensors that fusing only renames: blocks of norms, and linears of two paths."""
    joined = list(joined_tensors(manifest))
    inside = {name for item in joined for name in item.pieces.values()}
    names = (name for name in manifest.expansion_tensors if name not in inside)
    biases = (item.name.removesuffix("base.weight") for item in joined if item.name.endswith(".base.weight"))
    stock = (f"{path}bias" for path in biases if f"{path}bias" in manifest.base_tensors)
    return {
        **{name: _fused_name(manifest.plan, *name.split(INFIX)) for name in names},
        **{name: f"{name.removesuffix('bias')}base.bias" for name in stock if name not in inside},
    }


def _fused_name(plan: Plan, module: str, block: str) -> str:
    """Return the name in a fused model of a block that is only renamed; the gate of the head is in the last norm."""
    block = block.rpartition(".")[2]
    if (module, block) == (plan.head, "gate"):
        return f"{last_norm_of(plan)}.gate"
    return f"{module}.{block}"


def head_of(manifest: Manifest) -> tuple[str, str | None]:
    """Return the names of the head's weight, or of the embedding if they are tied, and of its bias."""
    head = manifest.plan.head
    weight, bias = f"{head}.weight", f"{head}.bias"
    has_own = weight in manifest.base_tensors
    return weight if has_own else manifest.plan.embedding, bias if bias in manifest.base_tensors else None


def gram_size(manifest: Manifest) -> int:
    """Return the rows of the Gram matrix of a fused model with a cosine router."""
    return manifest.plan.sizes.hidden + (head_of(manifest)[1] is not None)


def gram_of(plan: Plan) -> str:
    """Return the name of the Gram matrix of a fused model with a cosine router; see `modeling_fused`."""
    return f"{last_norm_of(plan)}.gram"


def last_norm_of(plan: Plan) -> str:
    """Return the name of the last norm."""
    return f"{plan.prefix}{plan.architecture.on_disk(plan.architecture.final_norm.name)}"


def count_differences(manifest: Manifest) -> dict[str, int]:
    """Count the parameters that a fused model has beyond those of its blocks, by reason; negative if it has fewer."""
    joined = list(joined_tensors(manifest))
    sizes = [{name: prod(_shape(item, block)) for block, name in item.pieces.items()} for item in joined]
    pieces = {name: size for of_item in sizes for name, size in of_item.items()}
    copy = None if copied_head(manifest) is None else pieces[manifest.plan.embedding]
    counts = {
        "zeros": sum(prod(item.shape) - sum(of_item.values()) for item, of_item in zip(joined, sizes, strict=True)),
        # those of a head that is tied in the base, and a matrix of its own here
        "head": sum(sum(of_item.values()) for of_item in sizes) - sum(pieces.values()),
        "copy": -(copy or 0),
        "router": 0 if fork_of(manifest) is None else gram_size(manifest) ** 2,
    }
    return {reason: count for reason, count in counts.items() if count}


def damaged_pieces(tensors: Mapping[str, TensorInfo], manifest: Manifest) -> list[Problem]:
    """List tensors to be joined that are missing or of a wrong shape."""
    problems = []
    for item in joined_tensors(manifest):
        for block, name in item.pieces.items():
            info, planned = tensors.get(name), _shape(item, block)
            if info is None:
                problems.append(Problem("tensor-missing", name))
            elif info.shape != planned:
                problems.append(Problem("tensor-shape", name, shape=info.shape, planned=planned))
    return problems


def _shape(joined: Joined, block: str) -> tuple[int, ...]:
    """Return the stored shape of a piece."""
    is_up_row, column = PLACES[block]
    rows = sum(sum(section) if is_up_row is None else section[is_up_row] for section in joined.sections)
    if joined.is_bias:
        return (rows,)
    columns = joined.inputs[column]
    return (columns, rows) if joined.is_transposed and block == "weight" else (rows, columns)


def cast_problems(tensors: Mapping[str, TensorInfo], manifest: Manifest) -> list[Problem]:
    """List blocks that cannot be joined without a cast."""
    problems = []
    for item in joined_tensors(manifest):
        for name in item.pieces.values():
            weight = f"{name.partition(INFIX)[0]}.weight"
            is_beside = INFIX in name and weight in tensors and not item.is_bias
            beside = tensors[weight if is_beside else item.base].dtype
            if tensors[name].dtype != beside:
                problems.append(Problem("block-other-dtype", name, dtype=tensors[name].dtype, base=beside))
    return problems


def join_pieces(joined: Joined, read: Callable[[str], Tensor]) -> Tensor:
    """Join the pieces that `read` returns by name, in the dtype of the base tensor."""
    base = read(joined.base)
    whole = _by_rows(joined, base.new_zeros(joined.shape))
    for block, name in joined.pieces.items():
        value = base if name == joined.base else read(name)
        if block == "weight" and joined.share != 1:
            value = (value.float() * joined.share).to(value.dtype)
        columns = whole if joined.is_bias else whole[:, _columns(joined, block)]
        columns[_rows(joined, block)] = _by_rows(joined, value) if block == "weight" else value
    return _by_rows(joined, whole).contiguous()


def take_piece(joined: Joined, block: str, whole: Tensor) -> Tensor:
    """Take one piece out of a joined tensor, as it was stored."""
    rows = _by_rows(joined, whole)
    value = (rows if joined.is_bias else rows[:, _columns(joined, block)])[_rows(joined, block)]
    return (_by_rows(joined, value) if block == "weight" else value).contiguous()


def _by_rows(joined: Joined, tensor: Tensor) -> Tensor:
    """Transpose a stored tensor if its outputs are not rows; applied twice it changes nothing."""
    return tensor.t() if joined.is_transposed and not joined.is_bias else tensor


def _rows(joined: Joined, block: str) -> list[int]:
    is_up = PLACES[block][0]
    rows: list[int] = []
    start = 0
    for base, up in joined.sections:
        rows += range(start + base * bool(is_up), start + base + up * (is_up is not False))
        start += base + up
    return rows


def _columns(joined: Joined, block: str) -> slice:
    place = PLACES[block][1]
    start = sum(joined.inputs[:place])
    return slice(start, start + joined.inputs[place])
