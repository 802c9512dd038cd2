"""Compare each expansion tensor with its initial values, a few tensors in memory at a time.

Initial values are not stored. An untrained tensor still has them. For a trained tensor they are computed again from
the base inside the checkpoint, as `expand` does, and checked against the sha256 in surgery.json.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.expansions import INFIX
from scale_surgery.checkpoint.folder import read_tensor
from scale_surgery.checkpoint.hashes import hash_tensor
from scale_surgery.evidence.report_records import Norms, TensorChange
from scale_surgery.folder.folder import Folder
from scale_surgery.planning.architecture import Block, Linear
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import linear_widths, specs_of_layer
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.tensors.initialise import Initialiser

LinearOfBlock = tuple[Block, Linear]
# numbers converted to float64 at a time, 64 MiB
CHUNK_ELEMENTS = 1 << 23


@dataclass
class Comparison:
    """A comparison of the tensors of an expanded checkpoint with their initial values.

    Attributes:
        folder: The folder, as if it held this expansion alone.
        device: Device of the computation.
        differing: Tensors whose recomputed initial values have another sha256 than recorded.
        spoiled: Tensors with NaN or infinity.
    """

    folder: Folder
    device: str
    differing: list[str] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    base_norms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Plan of the expansion."""
        return self.folder.manifest.plan

    def changes(self, advance: Progress) -> Iterator[TensorChange]:
        """Compare every tensor; `advance` is called with the bytes done."""
        for tensor in self.plan.tensors:
            yield from self._compare(tensor)
            advance(tensor.bytes)

    def _compare(self, tensor: TensorPlan) -> Iterator[TensorChange]:
        beside = _block_of(self.plan, tensor)
        located = find_linear(self.plan, tensor) if beside is None else None
        linear = None if located is None else located[1]
        stored = read_tensor(self.folder, tensor.name)
        if not stored.isfinite().all():
            self.spoiled.append(tensor.name)
        is_trained = self._is_trained(tensor)
        roles = linear.roles if linear is not None else ("beside" if beside else _place_of(self.plan, tensor),)
        # a gate is one for all roles of a fused projection
        split = located
        if tensor.block == "gate":
            split, roles = None, ("+".join(roles),)
        now = self._split(split, self._by_rows(tensor.block, stored))
        start = self._split(split, self._by_rows(tensor.block, self._start_of(tensor))) if is_trained else now
        # a block with many weights has no one that corresponds
        base_norms = (None if beside else self._base_norms(located, tensor)) or [None] * len(roles)
        originals = self._originals(located, tensor) or [None] * len(roles)
        for role, value, before, base_norm, original in zip(roles, now, start, base_norms, originals, strict=True):
            block = beside if located is None else located[0]
            group = role if block is None else block.group
            change = _measure(tensor, role, group, value, before, base_norm, is_trained=is_trained)
            yield change if original is None else replace(change, separation=_separation(value, original))

    def _is_trained(self, tensor: TensorPlan) -> bool:
        digest = hash_tensor(self.folder.path, self.folder.tensors[tensor.name])
        return self.folder.manifest.expansion_tensors.get(tensor.name) != digest

    def _by_rows(self, block: str, value: Tensor) -> Tensor:
        """Return a tensor with outputs as rows; base weights and copies of them may be stored transposed."""
        is_transposed = block == "weight" and value.dim() == 2 and self.plan.architecture.transposed
        return value.T if is_transposed else value

    def _start_of(self, tensor: TensorPlan) -> Tensor:
        """Return the initial values of a tensor."""
        from scale_surgery.checkpoint.shards import tensor_bytes

        start = self._initialiser.make(tensor)
        if hashlib.sha256(tensor_bytes(start)).hexdigest() != self.folder.manifest.expansion_tensors.get(tensor.name):
            self.differing.append(tensor.name)
        return start

    @cached_property
    def _initialiser(self) -> Initialiser:
        from scale_surgery.tensors.initialise import Initialiser

        return Initialiser(self.plan, self.folder, self.device)

    def _split(self, located: LinearOfBlock | None, value: Tensor) -> list[Tensor]:
        """Return the rows of each role of a fused projection, as matrices; the whole tensor if it is not fused."""
        from scale_surgery.tensors.initialise import split_roles

        rows = value[:, None].to(self.device) if value.dim() == 1 else value.to(self.device)
        if located is None or len(located[1].roles) == 1:
            return [rows]
        widths = next(widths for widths in _role_widths(self.plan, *located) if sum(widths) == rows.shape[0])
        return split_roles(rows, located[1], located[0].head_size, widths)

    def _base_norms(self, located: LinearOfBlock | None, tensor: TensorPlan) -> Sequence[float | None]:
        """Return the norm of the base weight of a matrix, by role; empty if there is none."""
        if len(tensor.shape) < 2:
            return []
        name = self._base_name(tensor)
        if name not in self.base_norms and name in self.folder.tensors:
            parts = self._split(located, self._by_rows("weight", read_tensor(self.folder, name)))
            self.base_norms[name] = [norm_of(part) for part in parts]
        return self.base_norms.get(name, [])

    def _originals(self, located: LinearOfBlock | None, tensor: TensorPlan) -> Sequence[Tensor | None]:
        """Return the present weights that a W21 copies, by role; empty if it is no copy."""
        if tensor.block != "w21" or tensor.init != "copy":
            return []
        trained = f"{tensor.name.removesuffix('w21')}w11"
        if trained in self.folder.tensors:
            return self._split(located, read_tensor(self.folder, trained))
        return self._split(located, self._by_rows("weight", read_tensor(self.folder, tensor.source)))

    def _base_name(self, tensor: TensorPlan) -> str:
        """Return the name of the base weight of a tensor; for a tied head, the embedding."""
        if tensor.source in self.folder.tensors or tensor.layer is not None:
            return tensor.source
        return self.plan.embedding


def find_linear(plan: Plan, tensor: TensorPlan) -> LinearOfBlock | None:
    """Return the linear of a tensor, with its block; None for a norm, an embedding or a head."""
    return None if tensor.layer is None else plan.architecture.find_linear(tensor.source.rpartition(".")[0])


def _block_of(plan: Plan, tensor: TensorPlan) -> Block | None:
    """Return the block, such as a mixture of experts, that runs unchanged beside a tensor; None if there is none."""
    if tensor.layer is None:
        return None
    kind, module = plan.architecture.kind(tensor.layer), tensor.name.partition(INFIX)[0]
    whole = (block for block in kind.blocks if block.is_whole)
    return next((block for block in whole if module.endswith(f".{kind.on_disk(block.name)}")), None)


def _place_of(plan: Plan, tensor: TensorPlan) -> str:
    if tensor.block == "gate":
        return "head"
    if len(tensor.shape) < 2:
        return "norm"
    if tensor.layer is not None:
        # a copy of a matrix that no expansion widens, as of an expert
        return "beside"
    is_embedding = tensor.source == plan.embedding
    return "embedding" if is_embedding else "head"


def _role_widths(plan: Plan, block: Block, linear: Linear) -> Iterator[list[int]]:
    """Generate the possible numbers of rows of the roles of a fused projection: the base's, and the added ones."""
    outputs = linear_widths(block, linear, plan.widths).outputs
    yield [base for base, _ in outputs]
    yield [up for _, up in outputs]
    specs = (specs_of_layer(plan.specs, layer).get("expanded", {}) for layer in plan.layers)
    named = (modules[linear.name] for modules in specs if linear.name in modules)
    sections = next(named, dict[str, list[list[int]]]()).get("out_features", [])
    if len(sections) == len(linear.roles):
        yield [up for _, up in sections]


def _measure(
    tensor: TensorPlan,
    role: str,
    group: str,
    now: Tensor,
    start: Tensor,
    base_norm: float | None,
    *,
    is_trained: bool,
) -> TensorChange:
    """Measure a matrix, or a vector as one column, against its initial values; an untrained tensor equals them."""
    change = now.double() - start.double()
    return TensorChange(
        name=tensor.name,
        layer=tensor.layer,
        role=role,
        group=group,
        block=tensor.block,
        init=tensor.init,
        shape=tuple(now.shape)[: len(tensor.shape)],
        norms=Norms(norm_of(now), norm_of(start), norm_of(change), base_norm),
        is_trained=is_trained,
    )


def _separation(copies: Tensor, original: Tensor) -> float | None:
    """Return the distance of stacked copies from their original, relative to the norm of as many originals."""
    count = copies.shape[0] // original.shape[0]
    apart = copies.double().view(count, *original.shape) - original.double()
    whole = norm_of(original) * math.sqrt(count)
    return norm_of(apart) / whole if whole else None


def norm_of(tensor: Tensor) -> float:
    """Compute the Frobenius norm ||A||_F, the root of the sum of squares, added up in float64."""
    import torch

    chunks = torch.split(tensor.detach().reshape(-1), CHUNK_ELEMENTS)
    return math.sqrt(sum(float(chunk.double().square().sum()) for chunk in chunks))
