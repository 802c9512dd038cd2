"""The loss of a batch over a large vocabulary, computed for some tokens at a time.

The logits of a few tokens, their loss, and its gradients with respect to hidden states and trained parameters of the
head are computed at once, and the logits are freed. The loss equals the model's own up to rounding. torch's
linear_cross_entropy does the same for a head that is one matrix. Here a head also has new blocks, scales, caps and
routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scale_surgery.modeling.expanded_routing import row_chunks
from scale_surgery.running.loss import evaluating
from scale_surgery.running.pieces import PROBED_TOKENS, Pieces, Tail, find_tail, in_pieces
from scale_surgery.text.sequences import IGNORED

# relative difference of a loss that is computed twice from the same logits
LOSS_ROUNDING = 1e-5


class SumOfPieces(torch.autograd.Function):
    """The sum of the losses of pieces of hidden states; each piece's gradient is computed along with its loss."""

    @staticmethod
    def forward(
        context: Any,
        loss_of: Callable[[Tensor, slice], Tensor],
        slices: Sequence[slice],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Add up losses.

        Args:
            context: Keeps the gradients.
            loss_of: Function of a piece of the hidden states and its positions that returns its loss, float32.
            slices: Positions of each piece.
            hidden: Hidden states (rows, n, width).
            parameters: Trained parameters after the hidden states.
        """
        needs_hidden, *_ = context.needs_input_grad[2:]
        hidden_gradient = torch.zeros_like(hidden) if needs_hidden else None
        # None if no piece yields a gradient, as for a whole batch
        gradients: list[Tensor | None] = [None] * len(parameters)
        total = torch.zeros((), device=hidden.device)
        for positions in slices:
            part = hidden[:, positions].detach().requires_grad_(needs_hidden)
            with torch.enable_grad():
                loss = loss_of(part, positions)
            total += loss.detach()
            if not loss.requires_grad:
                continue
            wanted = [part, *parameters] if needs_hidden else list(parameters)
            made = list(torch.autograd.grad(loss, wanted, allow_unused=True))
            if hidden_gradient is not None and (gradient := made.pop(0)) is not None:
                hidden_gradient[:, positions] = gradient
            for place, gradient in enumerate(made):
                known = gradients[place]
                gradients[place] = gradient if known is None else known if gradient is None else known.add_(gradient)
        context.gradients = [hidden_gradient, *gradients]
        return total

    @staticmethod
    def backward(context: Any, *given: Tensor) -> tuple[Any, ...]:
        """Return the gradients, in the memory in which they were added up."""
        gradients, context.gradients = context.gradients, None
        return None, None, *(None if made is None else made.mul_(given[0].to(made.dtype)) for made in gradients)


class CrossEntropy(torch.autograd.Function):
    """Cross entropy of tokens, divided by a given count; its gradient is computed along with it, in the logits' dtype.

    Few rows are float32 at a time, so only one gradient is stored next to the logits.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, total: Any) -> Tensor:
        """Return the nats of the tokens that are not IGNORED, divided by `total`."""
        gradient = torch.empty_like(logits) if context.needs_input_grad[0] else None
        nats = logits.new_empty(len(targets), dtype=torch.float32)
        for rows in row_chunks(logits):
            # ignored positions add nothing
            is_wanted, tokens = targets[rows, None] != IGNORED, targets[rows, None].clamp(min=0)
            log_p = logits[rows].log_softmax(-1, dtype=torch.float32)
            nats[rows] = torch.where(is_wanted, -log_p.gather(-1, tokens), 0)[:, 0]
            if gradient is not None:
                p = log_p.exp_()
                p.scatter_add_(-1, tokens, p.new_full(tokens.shape, -1))
                gradient[rows] = torch.where(is_wanted, p.div_(total), 0)
        context.gradient = gradient
        mean: Tensor = nats.sum() / total
        return mean

    @staticmethod
    def backward(context: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, in its own memory."""
        gradient, context.gradient = context.gradient, None
        made: Tensor = gradient.mul_(given[0].to(gradient.dtype))
        return made, None, None


def sum_of_pieces(head: Any, loss_of: Callable[[Tensor, slice], Tensor], pieces: Pieces) -> Tensor:
    """Add up the losses of pieces, with gradients for the hidden states and the head's trained parameters."""
    total: Tensor = SumOfPieces.apply(loss_of, pieces.slices, pieces.hidden, *trained_in_head(head))
    return total


def trained_in_head(head: Any) -> list[Tensor]:
    """Return the trained tensors of a head; a tied head uses the embedding's rows of new tokens."""
    rows = (getattr(blocks, "rows", None) for blocks in getattr(head, "expansions", {}).values())
    tensors = {id(tensor): tensor for tensor in (*head.parameters(), *rows) if tensor is not None}
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


def cross_entropy(head: Any, pieces: Pieces, labels: Tensor, count: Any = None) -> Tensor:
    """Return the cross entropy of the labelled tokens, a mean over them or over the labels of all batches of a step.

    Args:
        head: Module that computes the logits.
        pieces: Hidden states.
        labels: Next token of each position, or IGNORED (b, t).
        count: Labels of all batches of a step.
    """
    targets = pieces.pick(labels)
    total = (targets != IGNORED).sum() if count is None else count

    def loss_of(part: Tensor, positions: slice) -> Tensor:
        logits = pieces.logits(part, positions).flatten(0, 1)
        loss: Tensor = CrossEntropy.apply(logits, targets[:, positions].flatten(), total)
        return loss

    return sum_of_pieces(head, loss_of, pieces)


@contextmanager
def loss_in_pieces(model: Any, tail: Tail, inputs: dict[str, Any]) -> Iterator[None]:
    """Let the next forward of a model compute its loss in pieces, called wrapped or unwrapped.

    Args:
        model: The unwrapped model.
        tail: Modules after its decoder.
        inputs: The batch of this forward.
    """
    count: list[Any] = [None]
    following = functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)

    def take(module: Any, args: Any, given: dict[str, Any]) -> Any:
        given = dict(given)
        given.pop("labels", None)
        count[0] = given.pop("num_items_in_batch", None)
        return args, given

    hook = model.register_forward_pre_hook(take, with_kwargs=True)
    try:
        with in_pieces(
            model,
            tail,
            inputs,
            following != IGNORED,
            lambda pieces: cross_entropy(tail.head, pieces, following, count[0]),
        ):
            yield
    finally:
        hook.remove()


@torch.no_grad()
def find_pieces(model: Any, inside: Any, inputs: dict[str, Any]) -> Tail | None:
    """Return the tail of a model that can run in pieces; None if its loss is not only the cross entropy of its logits.

    The loss of a mixture may have a term for its router.
    """
    with evaluating(inside):
        ids = inputs["input_ids"][:1, :PROBED_TOKENS]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        loss = functional.cross_entropy(output["logits"][0, :-1].float(), ids[0, 1:])
        is_own = bool((output["loss"].float() - loss).abs() <= LOSS_ROUNDING * loss)
        return find_tail(inside, ids[0]) if is_own else None
