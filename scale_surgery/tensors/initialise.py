"""Make the values of planned tensors: read its base tensor, take fused projections apart, apply blocks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.expansions import nameless
from scale_surgery.checkpoint.folder import Checkpoint, read_tensor, read_text
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.planning.architecture import Block, Linear
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import linear_widths
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress, no_progress
from scale_surgery.tensors import blocks

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Initialiser:
    """A maker of the new tensors of a plan, one at a time; at most one base tensor is in memory.

    Attributes:
        plan: The plan.
        checkpoint: The base model.
        device: Where to compute, such as "cpu" or "cuda".
        tokenizer: The base's, if it is loaded already.
    """

    plan: Plan
    checkpoint: Checkpoint
    device: str = "cpu"
    tokenizer: Any | None = None

    def make(self, tensor: TensorPlan) -> Tensor:
        """Make one new tensor on the CPU, in its planned shape and dtype; NaN and infinity cannot be decomposed."""
        value = self._copy(tensor) if tensor.init == "copy" else self._compute(tensor)
        return value.to(device="cpu", dtype=TORCH_DTYPES[tensor.dtype]).contiguous()

    def _copy(self, tensor: TensorPlan) -> Tensor:
        """Copy a base tensor for its block: W21 once for each new copy, W12 a share of W for each."""
        value = read_tensor(self.checkpoint, tensor.source)
        if self.plan.numbering is not None or tensor.block in ("weight", "bias", "bias11"):
            return value
        copies = tensor.elements // value.numel()
        rows = value.T if self.plan.architecture.transposed and value.dim() == 2 else value
        if tensor.block == "w11":
            return rows
        if tensor.block == "w12":
            return blocks.copied_w12(rows, copies, self._generator(tensor), TORCH_DTYPES[tensor.dtype])
        _, linear = _linear_of(self.plan, tensor)
        parts = torch.split(rows, list(linear.outputs))
        return torch.cat([part for part in parts for _ in range(copies)])

    def _generator(self, tensor: TensorPlan) -> torch.Generator:
        """Return the random generator of a tensor; the name of its expansion changes no value."""
        return blocks.seeded_generator(self.plan.request.seed, nameless(tensor.name))

    def _compute(self, tensor: TensorPlan) -> Tensor:
        """Make a tensor in float32: a constant, random numbers, or a decomposed base weight."""
        plan, generator = self.plan, self._generator(tensor)
        if tensor.init == "zero":
            return torch.zeros(tensor.shape)
        if tensor.init == "one":
            return torch.ones(tensor.shape)
        if tensor.init == "mute":
            return torch.full(tensor.shape, float(plan.architecture.mute_gain))
        if tensor.init == "random" and tensor.block != "new_rows":
            return blocks.random_block(tensor.shape[0], tensor.shape[1], generator)
        weight = read_tensor(self.checkpoint, self._stored_source(tensor)).to(self.device)
        if tensor.block == "new_rows":
            return self._new_rows(tensor, weight, generator)
        if tensor.init == "mean":
            return torch.full(tensor.shape, float(weight.float().mean()))
        blocks.check_finite(weight, tensor.source)
        method = plan.request.svd
        if tensor.block == "up_weight":
            columns = blocks.svd_embedding(weight, tensor.shape[1], method, generator)
            # means of rows are on the CPU, as all that is made
            return torch.cat((columns.cpu(), self._means_of_pieces(columns))) if plan.widths.new_tokens else columns
        block, linear = _linear_of(plan, tensor)
        rows = weight.T if plan.architecture.transposed else weight
        parts = split_roles(rows, linear, block.head_size)
        ups = [up for _, up in linear_widths(block, linear, plan.widths).outputs]
        made = [
            blocks.svd_w21(part, up, method, generator)
            if tensor.block == "w21"
            else blocks.svd_w22(part, up, tensor.shape[1], method, generator)
            for part, up in zip(parts, ups, strict=True)
        ]
        return join_roles(made, linear, block.head_size)

    def _stored_source(self, tensor: TensorPlan) -> str:
        """Return the base tensor beside a new one; for a tied head, the embedding."""
        is_stored = tensor.source in self.checkpoint.tensors
        return tensor.source if is_stored else self.plan.embedding

    def _new_rows(self, tensor: TensorPlan, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Make the rows of new tokens: means of the rows of their pieces, or random rows of the usual norm."""
        if tensor.init == "pieces":
            return self._means_of_pieces(weight)
        # a sample says how large numbers are
        usual = float(weight[:: max(1, len(weight) // 1000)].float().std())
        return usual * torch.randn(tensor.shape, generator=generator)

    def _means_of_pieces(self, rows: Tensor) -> Tensor:
        """Compute the mean of the rows of its pieces for each new token, float32."""
        return torch.stack([(rows[ids] if ids else rows).float().mean(0) for ids in self._pieces]).cpu()

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """Return the ids that the base's tokenizer gives for each new token."""
        new = self.plan.request.new_tokens
        assert new is not None
        tokenizer = self._read_tokenizer() if self.tokenizer is None else self.tokenizer.backend_tokenizer
        # what was learned is spelled as the model spells it, and what stands for itself as in a text
        if new.merges:
            return [[piece.id for piece in tokenizer.model.tokenize(token)] for token in new.tokens]
        return [tokenizer.encode(token, add_special_tokens=False).ids for token in new.tokens]

    def _read_tokenizer(self) -> Any:
        """Read the base's tokenizer from its file, or from the text that an expanded folder remembers."""
        from tokenizers import Tokenizer

        replaced = {} if self.checkpoint.recorded is None else self.checkpoint.recorded["replaced"]
        return Tokenizer.from_str(replaced.get(TOKENIZER_FILE) or read_text(self.checkpoint, TOKENIZER_FILE))


def altered_copies(
    plan: Plan, copies: Sequence[TensorPlan], checkpoint: Checkpoint, advance: Progress = no_progress
) -> list[str]:
    """List tensors that began as copies of base tensors and have changed, a line each."""
    lines, initialiser = [], Initialiser(plan, checkpoint)
    for tensor in copies:
        advance(tensor.bytes)
        info, source = checkpoint.tensors.get(tensor.name), checkpoint.tensors.get(tensor.source)
        # tensors that are missing or of a wrong shape are left to other checks
        if info is None or info.shape != tensor.shape or source is None:
            continue
        value, copy = read_tensor(checkpoint, tensor.name), initialiser.make(tensor)
        # on another processor the noise of several copies may be rounded another way
        is_near = tensor.elements > source.elements and torch.allclose(value.float(), copy.float(), 1e-2, 1e-6)
        if not (is_near or torch.equal(value, copy)):
            lines.append(f"{tensor.name}: is not the copy of {tensor.source} that it began as.")
    return lines


def _linear_of(plan: Plan, tensor: TensorPlan) -> tuple[Block, Linear]:
    block_and_linear = plan.architecture.find_linear(tensor.source.rpartition(".")[0])
    assert block_and_linear is not None, tensor.source
    return block_and_linear


def split_roles(weight: Tensor, linear: Linear, head_size: int, rows: Sequence[int] | None = None) -> list[Tensor]:
    """Take a fused projection apart: one matrix for each role, rows are outputs; as many as the base's or `rows`."""
    widths = list(rows or linear.outputs)
    if linear.fused_by == "section" or len(linear.roles) == 1:
        return list(torch.split(weight, widths))
    groups = _groups(widths, head_size)
    by_group = weight.view(groups, -1, weight.shape[1])
    parts = torch.split(by_group, [width // groups for width in widths], dim=1)
    return [part.reshape(-1, weight.shape[1]) for part in parts]


def join_roles(parts: list[Tensor], linear: Linear, head_size: int) -> Tensor:
    """Put the matrices of fused roles together in the order of rows that the base projection has."""
    if linear.fused_by == "section" or len(parts) == 1:
        return torch.cat(parts)
    groups = _groups([len(part) for part in parts], head_size)
    by_group = torch.cat([part.view(groups, -1, part.shape[1]) for part in parts], dim=1)
    return by_group.reshape(-1, parts[0].shape[1])


def _groups(widths: Sequence[int], head_size: int) -> int:
    """Return the number of groups of rows: a key, a value, and the queries that share them."""
    return min(widths) // head_size
