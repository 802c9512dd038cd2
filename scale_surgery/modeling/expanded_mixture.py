"""Arithmetic of routing: numbers of each row of logits, the posterior weights of two paths, and mixtures of any number.

Logits are large, so what needs float32 takes them some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# logits that are taken to float32 at a time: as many as a processor's cache holds, or as keep an accelerator busy
AT_ONCE_ON_CPU, AT_ONCE = 2**17, 2**22
# differences of log-probabilities beyond this would overflow when they are exponentiated
LARGEST = 80.0
# a smaller weight changes no probability that float32 can tell from 0 or 1
LEAST_LOG_WEIGHT = -60.0


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


def posterior_weights(
    before: Tensor | None, evidence: Tensor, restarts: Tensor, prior: tuple[float, ...], rate: float
) -> Tensor:
    """Log weights of all paths after each token, normalised (b, t, k), float32; see `expanded_routers`.

    Args:
        before: Log weights before the first token (b, k), or None where there is nothing before it.
        evidence: Log-probability of each token on each path (b, t, k), float32.
        restarts: Where a sequence begins (b, t).
        prior: Weight of each path at a start.
        rate: Fixed-share rate.
    """
    start = evidence.new_tensor(prior, dtype=torch.float32).log()
    if len(prior) > 2:
        before = start.expand(len(evidence), -1) if before is None else before
        return follow_paths(before, evidence, restarts, start, rate)
    # all prefixes at once: a text may be long where it is trained on
    odds = None if before is None else before[:, 0] - before[:, 1]
    odds = follow(odds, evidence[..., 0] - evidence[..., 1], restarts, prior[0], rate)
    return torch.nn.functional.logsigmoid(torch.stack((odds, -odds), -1))


def follow_paths(before: Tensor, evidence: Tensor, restarts: Tensor, prior: Tensor, rate: float) -> Tensor:
    """Log weights of all paths after each token, normalised (b, t, k), float32.

    Each token multiplies the weights by its likelihoods, and then by the shares; a restart sets them to the prior. One
    token is taken after the other: products of all prefixes at once, as for two paths, grow with the third power of
    the number of paths.
    """
    # what a path has where all the weight is another's, and where it is its own
    least, most = (evidence.new_tensor(share) for share in (rate / (evidence.shape[-1] - 1), 1 - rate))
    weights, found = before, []
    for known, is_start in zip(evidence.unbind(1), restarts[..., None].unbind(1), strict=True):
        weights = weights + known
        # without shares a weight may be too small for a number that is no logarithm
        weights = torch.lerp(least, most, weights.softmax(-1)).log() if rate > 0 else weights.log_softmax(-1)
        weights = torch.where(is_start, prior, weights)
        found.append(weights)
    return torch.stack(found, 1)


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


def select(logits: Sequence[Tensor], numbers: Tensor, *, in_place: bool = False) -> Tensor:
    """Of each row (..., v) that of the path whose number it has (..., 1); if in place, in the memory of the first."""
    found = logits[0]
    is_free = in_place and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    for number, own in enumerate(logits[1:], 1):
        found = torch.where(numbers == number, own, found, out=found if is_free else None)
    return found


def mix(logits: Sequence[Tensor], norms: Sequence[Tensor], weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits of Σ_k w_k softmax(logits_k), in their dtype; those of the first path are written over, or `out`.

    The path with most weight gives the scale, and alone it gives its own logits back: with a_k what the
    log-probabilities of path k are ahead of its own, log(1 + Σ_k w_k (exp(a_k) - 1)) is added to them. Where all are
    equal that is exactly zero.

    Args:
        logits: Logits of each path (..., v).
        norms: Log sum exp of each row of them (...).
        weights: Log weights of the paths (..., k).
        out: Where the result goes, part of a larger tensor (b, t, v).
    """
    stacked = torch.stack(list(norms), -1)
    if any(own.requires_grad for own in logits):
        mixed: Tensor = Mixture.apply(stacked, weights, *logits)
        return mixed if out is None else out.copy_(mixed)
    if out is None:
        return _mix(logits, stacked, weights)
    for row, found in enumerate(out):
        # the rows of a batch lie apart in the larger one
        _mix([own[row] for own in logits], stacked[row], weights[row], found)
    return out


def _mix(logits: Sequence[Tensor], norms: Tensor, weights: Tensor, found: Tensor | None = None) -> Tensor:
    if found is None:
        found = logits[0] if logits[0].is_contiguous() and not logits[0].requires_grad else torch.empty_like(logits[0])
    flat, (norms, weights) = [own.flatten(0, -2) for own in logits], (own.flatten(0, -2) for own in (norms, weights))
    heaviest, is_out = weights.argmax(-1, keepdim=True), weights.isneginf()
    shifts = (norms.gather(-1, heaviest) - norms).masked_fill(is_out, -math.inf)
    shares = weights.clamp(min=LEAST_LOG_WEIGHT).exp().masked_fill(is_out, 0)
    # the heaviest path is never ahead of itself: the first path stands in its place among the others
    moved = heaviest == torch.arange(1, len(flat), device=heaviest.device)
    shifts, shares = (torch.where(moved, own[:, :1], own[:, 1:]) for own in (shifts, shares))
    for rows in row_chunks(flat[0]):
        first, *others = (own[rows].float() for own in flat)
        anchor = select([first, *others], heaviest[rows])
        # in few passes and in place: logits are large
        ahead = [
            torch.where(moved[rows, k, None], first, own).sub_(anchor).add_(shifts[rows, k, None])
            for k, own in enumerate(others)
        ]
        # taken from all, and given back afterwards; what is so far ahead that this matters outweighs the anchor
        beyond = reduce(torch.maximum, ahead).sub(LARGEST).clamp_(min=0)
        parts = [own.sub_(beyond).expm1_().mul_(shares[rows, k, None]) for k, own in enumerate(ahead)]
        lead = reduce(Tensor.add_, parts)
        torch.add(lead.log1p_().add_(anchor), beyond, out=found.flatten(0, -2)[rows])
    return found


class Mixture(torch.autograd.Function):
    """The same with gradients for the logits of some paths.

    With r_k = w_k p_k / mixture, the share of path k in each probability, and the gradient G of the mixture's logits,
    the gradient of its logits is G r_k - p_k sum(G r_k), but for what shifts a whole row of logits, which no
    cross-entropy sees.
    """

    @staticmethod
    def forward(context: Any, norms: Tensor, weights: Tensor, *logits: Tensor) -> Tensor:
        # whole tensors, and no views of them: through a view, autograd would copy the gradient of all logits
        mixed = _mix(logits, norms, weights)
        if mixed is logits[0]:
            context.mark_dirty(mixed)
        learning = zip(logits, context.needs_input_grad[2:], strict=True)
        context.save_for_backward(mixed, norms, weights, *(own if learns else None for own, learns in learning))
        return mixed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, norms, weights, *logits = context.saved_tensors
        # of a log-probability of a path to one of the mixture, whose scale is that of the heaviest path
        shifts = weights - norms + norms.gather(-1, weights.argmax(-1, keepdim=True))
        found: list[Tensor | None] = [None] * len(logits)
        for k, own in enumerate(logits):
            if own is not None:
                found[k] = _gradient(gradient, mixed, own, shifts[..., k, None], norms[..., k, None])
        return None, None, *found


def _gradient(gradient: Tensor, mixed: Tensor, own: Tensor, shift: Tensor, norm: Tensor) -> Tensor:
    """The gradient of the logits of one path."""
    found = torch.empty_like(gradient)
    flat = [tensor.flatten(0, -2) for tensor in (found, gradient, mixed, own, shift, norm)]
    for rows in row_chunks(flat[0]):
        given, whole, logits, log_weight, log_norm = (tensor[rows].float() for tensor in flat[1:])
        share = given * (logits - whole + log_weight).clamp(max=0).exp()
        flat[0][rows] = (share - (logits - log_norm).exp() * share.sum(-1, keepdim=True)).to(found.dtype)
    return found
