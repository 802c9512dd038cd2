"""Rehearsal: while learning new text, keep the model close to its base on other text.

    loss = cross entropy (new text) + weight * KL(base || model) on rehearsal text

The model contains its base, so the base's predictions cost one forward pass without gradient, or only the head if the
base stream is unchanged. If the base writes the text itself, this is pseudo-rehearsal (Robins 1995) with the loss of
Learning without Forgetting (Li and Hoiem 2016). Huang et al. 2024, Mitigating Catastrophic Forgetting in Large Language
Models with Self-Synthesized Rehearsal, rehearse a language model's own samples. Rehearsal carries no proof, unlike a
router's promise; its effect is only measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_surgery.running.freeze import expansion_disabled, expansion_parts
from scale_surgery.running.loss import evaluating
from scale_surgery.running.pieces import Pieces, Tail, in_pieces
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import collate
from scale_surgery.training.chunked_loss import sum_of_pieces
from scale_surgery.training.settings import TrainingSettings

# most float32 numbers held at once besides the logits
CHUNK = 2**24


@dataclass(frozen=True)
class Rehearsal:
    """Rehearsal text in batches of `rows` sequences; `weight` is the weight of the divergence in the loss."""

    sequences: Sequences
    rows: int
    weight: float
    seed: int

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return the inputs of a batch by its number."""
        batch = shuffled_batch(self.sequences, number, self.rows, self.seed)
        # a label would make the model compute a loss
        return {name: batch[name] for name in ("input_ids", "attention_mask")}


def shuffled_batch(sequences: Sequences, number: int, rows: int, seed: int) -> dict[str, Tensor]:
    """Return a batch by its number, from 0, in an endless order that reshuffles each pass over the sequences."""
    places = [divmod(row, len(sequences)) for row in range(number * rows, (number + 1) * rows)]
    return collate([sequences[int(order_of_pass(len(sequences), seed + turn)[place])] for turn, place in places])


# texts to learn and rehearsal texts, of which a batch may span two passes
@lru_cache(maxsize=4)
def order_of_pass(count: int, seed: int) -> Tensor:
    """Return the random order in which a pass reads sequences."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def make_rehearsal(sequences: Sequences | None, settings: TrainingSettings) -> Rehearsal | None:
    """Return the rehearsal of a run; None without text."""
    if sequences is None:
        return None
    return Rehearsal(sequences, settings.rehearsed_rows, settings.rehearsal_weight, settings.seed)


class BaseModel(NamedTuple):
    """The base that a model is kept close to.

    Attributes:
        model: The model that computes its predictions, as it is wrapped.
        inside: The same, unwrapped.
        alone: Disables inside a `with` block what was added to it.
        tail: Its modules that compute logits in pieces.
    """

    model: Any
    inside: Any
    alone: Callable[[], AbstractContextManager[Any]]
    tail: Tail | None


def base_inside(model: Any, inside: Any, tail: Tail | None = None) -> BaseModel:
    """Return the base inside an expanded model."""
    return BaseModel(model, inside, partial(expansion_disabled, inside), tail)


def divergence_from_base(
    model: Any, inside: Any, batch: dict[str, Tensor], tail: Tail | None = None, base: BaseModel | None = None
) -> Tensor:
    """Return KL(base || model) over the next token, a mean over the tokens of a batch.

    Args:
        model: The model as it is wrapped.
        inside: The unwrapped model.
        batch: Its inputs.
        tail: Modules that compute logits in pieces; None to compute those of all tokens at once.
        base: Its base. Default: the base inside an expanded model.
    """
    base = base or base_inside(model, inside, tail)
    if tail is not None and base.tail is not None:
        return divergence_in_pieces(model, inside, batch, (tail, base.tail), base)
    wanted, logits = logits_beside_base(model, inside, batch, base)
    return divergence(logits, wanted, batch["attention_mask"])


def divergence_in_pieces(
    model: Any, inside: Any, batch: dict[str, Tensor], tails: tuple[Tail, Tail], base: BaseModel
) -> Tensor:
    """Return the same mean, computed from the logits of some tokens at a time, by the tails of model and base."""
    tail, tail_of_base = tails
    mask = batch["attention_mask"].bool()
    # a router needs all tokens at their positions
    wanted = mask if getattr(getattr(inside, "choice", None), "router", None) is None else None
    beside: list[Pieces] = []

    def keep(pieces: Pieces) -> Tensor:
        beside.append(pieces)
        return pieces.hidden.new_zeros(())

    def finish(pieces: Pieces) -> Tensor:
        kept, total = pieces.pick(mask), mask.sum()

        def loss_of(part: Tensor, positions: slice) -> Tensor:
            logits = pieces.logits(part, positions)
            if beside:
                with torch.no_grad(), base.alone():
                    expected = beside[0].logits(beside[0].hidden[:, positions], positions)
            else:
                expected, logits = logits.chunk(2)
            here = kept[:, positions]
            # a piece of padding alone has no mean
            return divergence(logits, expected.detach(), here) * (here.sum() / total) if here.any() else total * 0.0

        return sum_of_pieces(tail.head, loss_of, pieces)

    if carries_base_logits(inside):
        with answering_both(inside), in_pieces(inside, tail, batch, wanted, finish):
            loss: Tensor = model(**batch, use_cache=False)["loss"]
        return loss
    at_base = in_pieces(base.inside, tail_of_base, batch, wanted, keep)
    with torch.no_grad(), evaluating(base.inside), base.alone(), at_base:
        base.model(**batch, use_cache=False)
    with in_pieces(inside, tail, batch, wanted, finish):
        loss = model(**batch, use_cache=False)["loss"]
    return loss


def divergence(logits: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """Return KL(base || model) of logits (rows, tokens, vocabulary), a mean over the tokens of the mask."""
    kept = mask.bool()
    # logits are large, so they are not copied if there is no padding
    rows = [tensor.flatten(0, 1) if kept.all() else tensor[kept] for tensor in (logits, base)]
    mean: Tensor = Divergence.apply(*rows)
    return mean


def logits_beside_base(model: Any, inside: Any, batch: dict[str, Tensor], base: BaseModel) -> tuple[Tensor, Tensor]:
    """Return the logits of the base, without gradient, and of the model; from one forward pass if possible."""
    if carries_base_logits(inside):
        with answering_both(inside):
            wanted, logits = model(**batch, use_cache=False).logits.chunk(2)
        return wanted.detach(), logits
    with torch.no_grad(), evaluating(base.inside), base.alone():
        wanted = base.model(**batch, use_cache=False).logits
    return wanted, model(**batch, use_cache=False).logits


def carries_base_logits(model: Any) -> bool:
    """Return True if a forward pass also yields the base's logits: no W12 writes into its stream, nothing is random."""
    choice = getattr(model, "choice", None)
    if choice is None or len(choice.names) != 1 or choice.router is not None:
        return False
    infix = f".expansions.{choice.names[0]}."
    writes = any(infix in part.name and part.group in ("w12", "w11") for part in expansion_parts(model))
    return not writes and not (model.training and any(map(_disturbs, (model.config, *model.modules()))))


def _disturbs(owner: Any) -> bool:
    """Return True if training is random here: dropout, or the noise of a mixture's router."""
    named = [value for name, value in vars(owner).items() if "drop" in name or "jitter" in name]
    rates = [*named, owner.p] if isinstance(owner, torch.nn.Dropout) else named
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def answering_both(model: Any) -> AbstractContextManager[None]:
    """Let the head return logits of the base and of the expansion inside a `with` block."""
    # an expansion without W12 does not change the base stream: both paths read the same one
    base = model.choice.paths[0]._replace(expansion="")
    both: AbstractContextManager[None] = model.answering(_give_both, (base, *model.choice.paths))
    return both


def _give_both(features: Any) -> Tensor:
    """Return the logits of the base and of the expansion, joined along the batch."""
    base, logits = features.logits()
    return torch.cat((base.detach(), logits))


class Divergence(torch.autograd.Function):
    """KL(base || model) of logits, a mean over tokens, some tokens at a time.

        KL = sum_v p_base(v) (log p_base(v) - log p(v)),   dKL/dlogit(v) = p(v) - p_base(v)

    The gradient is computed along with the loss, in the dtype of the logits, so no distribution is kept.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, base: Tensor) -> Tensor:
        """Return the nats per token."""
        tokens, vocabulary = logits.shape
        gradient = torch.empty_like(logits)
        # Apple GPUs have no float64
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        total = torch.zeros((), dtype=wide, device=logits.device)
        at_once = max(1, math.ceil(CHUNK / vocabulary))
        for start in range(0, tokens, at_once):
            rows = slice(start, start + at_once)
            log_p, log_base = (tensor[rows].float().log_softmax(-1) for tensor in (logits, base))
            p_base = log_base.exp()
            total += (p_base * (log_base - log_p)).sum(dtype=wide)
            gradient[rows] = ((log_p.exp() - p_base) / tokens).to(gradient.dtype)
        context.save_for_backward(gradient)
        return (total / tokens).float()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient with respect to the model's logits."""
        (gradient,) = context.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None
