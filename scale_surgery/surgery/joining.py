"""Join a linear's base weight and its expansion blocks to one matrix, and take them out of it again.

    [ W    W12 ]      rows are outputs, columns inputs; of a fused projection, each section has its base rows before
    [ W21  W22 ]      its up rows: q, q_up, k, k_up, ...

Joining copies and never adds, so that every tensor comes out bit for bit as it went in; but for a grown MLP, whose base
weight counts a share, and which may have trained copies W11 in place of W. It is joined for the stock form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.expansions import INFIX, tensor_name
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.planning.stored import module_path
from scale_surgery.surgery.record import Manifest

if TYPE_CHECKING:
    from torch import Tensor

# whether a tensor lies in the rows that write the up stream, and in the columns that read it
PLACES = {
    "weight": (False, False),
    "w12": (False, True),
    "w21": (True, False),
    "w22": (True, True),
    "bias": (False, False),
    "up_bias": (True, False),
    # of the head
    "up_weight": (False, True),
    # of a grown MLP: what is trained in place of the base's
    "w11": (False, False),
    "bias11": (False, False),
}


@dataclass(frozen=True)
class Joined:
    """A weight or bias of the joined form.

    Attributes:
        name: Its name, that of the base tensor in it.
        pieces: Names of the tensors in it, by the last part of their names; what is not there is zero.
        inputs: Base and up width of what the linear reads.
        sections: Base and up width of what it writes, section by section.
        is_transposed: Whether the weight is stored as (inputs, outputs), as Conv1D does.
        share: What the base weight counts; other than 1 in the down projection of a grown MLP.
    """

    name: str
    pieces: dict[str, str]
    inputs: tuple[int, int]
    sections: tuple[tuple[int, int], ...]
    is_transposed: bool
    share: float = 1.0

    @property
    def is_bias(self) -> bool:
        """Whether it is a bias, which has no columns."""
        return "bias" in self.pieces

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as it is stored."""
        rows, columns = sum(map(sum, self.sections)), sum(self.inputs)
        if self.is_bias:
            return (rows,)
        return (columns, rows) if self.is_transposed else (rows, columns)


def joined_tensors(manifest: Manifest) -> Iterator[Joined]:
    """List every tensor that joining makes of an expanded model: the linears of its expanded layers, and the head.

    Args:
        manifest: Its surgery.json.

    Yields:
        The tensors, layer by layer.
    """
    plan, present = manifest.plan, {*manifest.base_tensors, *manifest.expansion_tensors}
    is_transposed = plan.architecture.transposed
    for layer in plan.layers:
        for name, spec in plan.expanded_linears(layer).items():
            path = module_path(plan.architecture, plan.prefix, layer, name)
            base_in, up_in = spec["in_features"]
            sections = tuple((base, up) for base, up in spec["out_features"])
            share = spec.get("share", 1.0)
            for blocks in (("weight", "w12", "w21", "w22", "w11"), ("bias", "up_bias", "bias11")):
                names = {blocks[0]: f"{path}.{blocks[0]}"}
                names |= {block: tensor_name(path, plan.request.name, block) for block in blocks[1:]}
                pieces = {block: own for block, own in names.items() if own in present}
                # a bias without an up part is as long as before
                if "weight" in pieces or "up_bias" in pieces:
                    yield Joined(f"{path}.{blocks[0]}", pieces, (base_in, up_in), sections, is_transposed, share)
    yield from _joined_head(manifest)


def _joined_head(manifest: Manifest) -> Iterator[Joined]:
    """The head, where it is a tensor of its own; a tied one would have to be stored a second time.

    A router asks for the logits of each stream by itself.
    """
    sizes, widths = manifest.plan.sizes, manifest.plan.widths
    heads = {tensor.name for tensor in manifest.plan.head_parts}
    names = sorted(heads.intersection(manifest.expansion_tensors))
    for up_weight in names if not (sizes.is_tied or manifest.routing) else ():
        weight = f"{up_weight.partition(INFIX)[0]}.weight"
        sections = ((sizes.vocabulary, 0),)
        yield Joined(
            weight, {"weight": weight, "up_weight": up_weight}, (sizes.hidden, widths.up_width), sections, False
        )


def has_joined_head(manifest: Manifest) -> bool:
    """Whether joining makes one matrix of the head and its up part."""
    return any(_joined_head(manifest))


def damaged_pieces(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """Tensors to be joined that are missing or of a wrong shape."""
    problems = []
    for item in joined_tensors(manifest):
        for block, name in item.pieces.items():
            found = checkpoint.tensors.get(name)
            if found is None:
                problems.append(f"{name}: is missing, expected shape {_shape(item, block)}.")
            elif found.shape != _shape(item, block):
                problems.append(f"{name}: shape {found.shape}, expected {_shape(item, block)}.")
    return problems


def _shape(joined: Joined, block: str) -> tuple[int, ...]:
    """Shape of a piece as it is stored."""
    is_up_row, is_up_column = PLACES[block]
    rows = sum(section[is_up_row] for section in joined.sections)
    if joined.is_bias:
        return (rows,)
    columns = joined.inputs[is_up_column]
    return (columns, rows) if joined.is_transposed and block == "weight" else (rows, columns)


def cast_problems(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """Blocks that cannot be joined without a cast, each with what to do."""
    tensors = checkpoint.tensors
    return [
        f"{name}: is {tensors[name].dtype}, the base tensor beside it {tensors[item.name].dtype}; joining copies and "
        "never casts. Expand without --dtype for a model that can be merged."
        for item in joined_tensors(manifest)
        for name in item.pieces.values()
        if tensors[name].dtype != tensors[item.name].dtype
    ]


def join_pieces(joined: Joined, read: Callable[[str], Tensor]) -> Tensor:
    """Join what `read` gives for the name of each piece; in the dtype of the base tensor, as it is to be stored."""
    base = read(joined.name)
    whole = _by_rows(joined, base.new_zeros(joined.shape))
    for block, name in joined.pieces.items():
        value = base if name == joined.name else read(name)
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
    """A stored tensor with outputs as rows, or the other way around."""
    return tensor.t() if joined.is_transposed and not joined.is_bias else tensor


def _rows(joined: Joined, block: str) -> list[int]:
    is_up = PLACES[block][0]
    rows: list[int] = []
    start = 0
    for base, up in joined.sections:
        rows += range(start + base, start + base + up) if is_up else range(start, start + base)
        start += base + up
    return rows


def _columns(joined: Joined, block: str) -> slice:
    base = joined.inputs[0]
    return slice(base, None) if PLACES[block][1] else slice(0, base)
