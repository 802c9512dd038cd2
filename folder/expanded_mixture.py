"""Arithmetic of routing: numbers of each row of logits, the posterior weights of two paths, and their mixture.

Logits are large, so what needs float32 takes them some rows at a time.
This file travels with the checkpoint: it opens no file, and needs only torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# logits that are taken to float32 at a time: as many as a processor's cache holds, or as keep an accelerator busy
AT_ONCE_ON_CPU, AT_ONCE = 2**17, 2**22
# differences of log-probabilities beyond this would overflow when they are exponentiated
LARGEST = 80.0


def in_chunks(rows: int, width: int, at_once: int) -> Iterator[slice]:
    """Ranges of rows of so many numbers at a time."""
    step = max(1, at_once // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows of logits (rows, v) that are taken to float32 together."""
    return in_chunks(*logits.shape, at_once=AT_ONCE_ON_CPU if logits.device.type == "cpu" else AT_ONCE)


def by_row(function: Callable[..., Tensor], *logits: Tensor) -> Tensor:
    """Apply a function of logits to a number a row in float32, without a copy of all the logits."""
    flat = [tensor.flatten(0, -2) for tensor in logits]
    # made before the loop: a small tensor that is kept after each chunk would let the heap grow by the chunk
    found = logits[0].new_empty(len(flat[0]), dtype=torch.float32)
    for rows in row_chunks(flat[0]):
        found[rows] = function(*(tensor[rows].float() for tensor in flat))
    return found.view(logits[0].shape[:-1])


def normalizers(logits: Tensor) -> Tensor:
    """Take log sum exp of each row, float32."""
    return by_row(lambda rows: rows.logsumexp(-1), logits)


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Cosine of each pair of rows, float32, from -1 to 1 whatever the rounding."""
    return by_row(lambda a, b: torch.nn.functional.cosine_similarity(a, b, dim=-1), one, other).clamp(-1, 1)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of one token a row, float32."""
    return logits.gather(-1, ids[..., None]).squeeze(-1).float() - normalizers(logits)


def follow(odds: Tensor | None, evidence: Tensor, restarts: Tensor, prior: float, rate: float) -> Tensor:
    """Log odds of the preserve path after each token.

    Each token multiplies the weights (w, 1 - w) by its likelihoods and by [[1 - rate, rate], [rate, 1 - rate]]; a
    restart sets them to the prior. Both are linear, so all prefixes are products of 2 x 2 matrices, taken here in
    log2(t) steps.

    Args:
        odds: Log odds before the first token (b,), or None where there is nothing before it.
        evidence: log p_P(y) - log p_A(y) of each token (b, t), float32.
        restarts: Where a sequence begins (b, t).
        prior: Weight of the preserve path at a start.
        rate: Fixed-share rate.

    Returns:
        Log odds (b, t), float32.
    """
    stay, switch = _log(1 - rate), _log(rate)
    gain = evidence.float()
    rows = [torch.stack((gain + stay, torch.full_like(gain, switch)), -1)]
    rows += [torch.stack((gain + switch, torch.full_like(gain, stay)), -1)]
    begin = evidence.new_tensor([[_log(prior)] * 2, [_log(1 - prior)] * 2], dtype=torch.float32)
    steps = torch.where(restarts[..., None, None], begin, torch.stack(rows, -2))  # (b, t, written, read)
    distance = 1
    while distance < evidence.shape[1]:
        later, earlier = steps[:, distance:], steps[:, :-distance]
        through = (later.unsqueeze(-1) + earlier.unsqueeze(-3)).logsumexp(-2)
        # only ratios count
        through = through - through.amax((-2, -1), keepdim=True)
        steps = torch.cat((steps[:, :distance], through), 1)
        distance *= 2
    before = evidence.new_zeros(len(evidence)) if odds is None else odds
    weights = torch.stack((before, torch.zeros_like(before)), -1)[:, None, None]
    after = (steps + weights).logsumexp(-1)
    return after[..., 0] - after[..., 1]


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _mix_rows(z_p: Tensor, z_a: Tensor, shift: Tensor, odds: Tensor) -> Tensor:
    """Mixture of some rows; the path with more weight gives the scale, and alone it gives its own logits back.

    With k the weight of the lighter path and a its lead in log-probability: log((1 - k) + k exp(a)), added to the
    logits of the heavier one. Where both are equal that is exactly zero.
    """
    is_preserve, lighter = odds >= 0, torch.sigmoid(-odds.abs())
    sign = torch.where(is_preserve, 1.0, -1.0)
    ahead = torch.addcmul(shift * sign, z_a - z_p, sign)
    small = ahead.clamp(max=LARGEST)
    beyond = ahead.sub_(small)
    # in few passes and in place: logits are large
    small = torch.addcmul(-lighter, small.exp_(), lighter, out=small).log1p_()
    return small.add_(torch.where(is_preserve, z_p, z_a)).add_(beyond)


def mix(z_p: Tensor, z_a: Tensor, shift: Tensor, odds: Tensor) -> Tensor:
    """Write the mixture of both paths over z_p; logits (..., v), the others (...)."""
    flat = [tensor.flatten(0, -2) for tensor in (z_p, z_a, shift[..., None], odds[..., None])]
    for rows in row_chunks(flat[0]):
        one, other, *numbers = (tensor[rows] for tensor in flat)
        one.copy_(_mix_rows(one.float(), other.float(), *numbers))
    return z_p


class Mixture(torch.autograd.Function):
    """Logits of w softmax(z_p) + (1 - w) softmax(z_a), written over z_p; only z_a has a gradient.

    With r = (1 - w) p_A / mixture, the share of the adapt path in each probability, and the gradient G of the
    mixture's logits, the gradient of z_a is G r - p_A sum(G r), but for what shifts a whole row of logits, which no
    cross-entropy sees.
    """

    @staticmethod
    def forward(context: Any, z_p: Tensor, z_a: Tensor, shift: Tensor, odds: Tensor, norm: Tensor) -> Tensor:
        # whole tensors, and no views of them: through a view, autograd would copy the gradient of all logits
        context.mark_dirty(z_p)
        context.save_for_backward(mix(z_p, z_a, shift, odds), z_a, shift, odds, norm)
        return z_p

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, z_a, shift, odds, norm = context.saved_tensors
        weight = torch.nn.functional.logsigmoid(-odds) + torch.where(odds >= 0, shift, 0)
        own = torch.empty_like(gradient)
        flat = [tensor.flatten(0, -2) for tensor in (own, gradient, mixed, z_a, weight[..., None], norm[..., None])]
        for rows in row_chunks(flat[0]):
            given, whole, adapt, log_weight, log_norm = (tensor[rows].float() for tensor in flat[1:])
            share = given * (adapt - whole + log_weight).clamp(max=0).exp()
            flat[0][rows] = (share - (adapt - log_norm).exp() * share.sum(-1, keepdim=True)).to(own.dtype)
        return None, own, None, None, None
