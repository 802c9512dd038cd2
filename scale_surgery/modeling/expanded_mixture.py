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

# logits that become float32 at a time: as many as a processor's cache holds, or as keep an accelerator busy
CHUNK_ON_CPU, CHUNK = 2**17, 2**22
# differences of log-probabilities beyond this would overflow when they are exponentiated
LARGEST = 80.0
# a smaller weight changes no probability that float32 can tell from 0 or 1
LEAST_LOG_WEIGHT = -60.0


def in_chunks(rows: int, width: int, at_once: int) -> Iterator[slice]:
    """Ranges of rows that have at most `at_once` numbers, `width` a row."""
    step = max(1, at_once // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows of logits (rows, v) that become float32 together."""
    return in_chunks(*logits.shape, at_once=CHUNK_ON_CPU if logits.device.type == "cpu" else CHUNK)


def per_row(function: Callable[..., Tensor], *logits: Tensor) -> Tensor:
    """Apply a function of logits to a number a row in float32, without a copy of all the logits."""
    flat = [tensor.flatten(0, -2) for tensor in logits]
    # made before the loop: a small tensor that is kept after each chunk would let the heap grow by the chunk
    numbers = logits[0].new_empty(len(flat[0]), dtype=torch.float32)
    for rows in row_chunks(flat[0]):
        numbers[rows] = function(*(tensor[rows].float() for tensor in flat))
    return numbers.view(logits[0].shape[:-1])


def normalizers(logits: Tensor) -> Tensor:
    """Take log sum exp of each row, float32."""
    return per_row(lambda rows: rows.logsumexp(-1), logits)


def row_cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each pair of rows, float32, from -1 to 1 whatever the rounding."""
    return per_row(lambda u, v: torch.nn.functional.cosine_similarity(u, v, dim=-1), a, b).clamp(-1, 1)


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of one token a row, float32."""
    return logits.gather(-1, ids[..., None]).squeeze(-1).float() - normalizers(logits)


def posterior_weights(
    before: Tensor | None, log_likelihoods: Tensor, restarts: Tensor, prior: tuple[float, ...], rate: float
) -> Tensor:
    """Log weights of all paths after each token, normalised (b, t, k), float32; see `expanded_routers`.

    Args:
        before: Log weights before the first token (b, k), or None where there is nothing before it.
        log_likelihoods: Log-probability of each token on each path (b, t, k), float32.
        restarts: Where a sequence begins (b, t).
        prior: Weight of each path at a start.
        rate: Fixed-share rate.
    """
    start = log_likelihoods.new_tensor(prior, dtype=torch.float32).log()
    if len(prior) > 2:
        before = start.expand(len(log_likelihoods), -1) if before is None else before
        return log_weights_after(before, log_likelihoods, restarts, start, rate)
    # all prefixes at once: a text may be long where it is trained on
    odds = None if before is None else before[:, 0] - before[:, 1]
    odds = log_odds_after(odds, log_likelihoods[..., 0] - log_likelihoods[..., 1], restarts, prior[0], rate)
    return torch.nn.functional.logsigmoid(torch.stack((odds, -odds), -1))


def log_weights_after(before: Tensor, log_likelihoods: Tensor, restarts: Tensor, prior: Tensor, rate: float) -> Tensor:
    """Log weights of all paths after each token, normalised (b, t, k), float32.

    Each token multiplies the weights by its likelihoods, and then by the shares; a restart sets them to the prior. One
    token is taken after the other: products of all prefixes at once, as for two paths, grow with the third power of
    the number of paths.
    """
    # what a path has where all the weight is another's, and where it is its own
    least, most = (log_likelihoods.new_tensor(share) for share in (rate / (log_likelihoods.shape[-1] - 1), 1 - rate))
    weights, weights_after = before, []
    for token_log_likelihoods, is_start in zip(log_likelihoods.unbind(1), restarts[..., None].unbind(1), strict=True):
        weights = weights + token_log_likelihoods
        # without shares a weight may be too small for a number that is no logarithm
        weights = torch.lerp(least, most, weights.softmax(-1)).log() if rate > 0 else weights.log_softmax(-1)
        weights = torch.where(is_start, prior, weights)
        weights_after.append(weights)
    return torch.stack(weights_after, 1)


def log_odds_after(odds: Tensor | None, log_ratios: Tensor, restarts: Tensor, prior: float, rate: float) -> Tensor:
    """Log odds of the preserve path after each token.

    Each token multiplies the weights (w, 1 - w) by its likelihoods and by [[1 - rate, rate], [rate, 1 - rate]]; a
    restart sets them to the prior. Both are linear, so all prefixes are products of 2 x 2 matrices, taken here in
    log2(t) steps.

    Args:
        odds: Log odds before the first token (b,), or None where there is nothing before it.
        log_ratios: log p_P(y) - log p_A(y) of each token (b, t), float32.
        restarts: Where a sequence begins (b, t).
        prior: Weight of the preserve path at a start.
        rate: Fixed-share rate.

    Returns:
        Log odds (b, t), float32.
    """
    stay, switch = _log(1 - rate), _log(rate)
    gain = log_ratios.float()
    rows = [torch.stack((gain + stay, torch.full_like(gain, switch)), -1)]
    rows += [torch.stack((gain + switch, torch.full_like(gain, stay)), -1)]
    begin = log_ratios.new_tensor([[_log(prior)] * 2, [_log(1 - prior)] * 2], dtype=torch.float32)
    steps = torch.where(restarts[..., None, None], begin, torch.stack(rows, -2))  # (b, t, written, read)
    distance = 1
    while distance < log_ratios.shape[1]:
        later, earlier = steps[:, distance:], steps[:, :-distance]
        through = (later.unsqueeze(-1) + earlier.unsqueeze(-3)).logsumexp(-2)
        # only ratios count
        through = through - through.amax((-2, -1), keepdim=True)
        steps = torch.cat((steps[:, :distance], through), 1)
        distance *= 2
    before = log_ratios.new_zeros(len(log_ratios)) if odds is None else odds
    weights = torch.stack((before, torch.zeros_like(before)), -1)[:, None, None]
    after = (steps + weights).logsumexp(-1)
    return after[..., 0] - after[..., 1]


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def select(logits: Sequence[Tensor], numbers: Tensor, *, in_place: bool = False) -> Tensor:
    """Of each row (..., v) that of the path whose number it has (..., 1); if in place, in the memory of the first."""
    selected = logits[0]
    is_free = in_place and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    for number, z in enumerate(logits[1:], 1):
        selected = torch.where(numbers == number, z, selected, out=selected if is_free else None)
    return selected


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
    if any(z.requires_grad for z in logits):
        mixed: Tensor = Mixture.apply(stacked, weights, *logits)
        return mixed if out is None else out.copy_(mixed)
    if out is None:
        return _mix(logits, stacked, weights)
    for row, row_out in enumerate(out):
        # the rows of a batch lie apart in the larger one
        _mix([z[row] for z in logits], stacked[row], weights[row], row_out)
    return out


def _mix(logits: Sequence[Tensor], norms: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = logits[0] if logits[0].is_contiguous() and not logits[0].requires_grad else torch.empty_like(logits[0])
    flat = [tensor.flatten(0, -2) for tensor in logits]
    norms, weights = norms.flatten(0, -2), weights.flatten(0, -2)
    heaviest, is_out = weights.argmax(-1, keepdim=True), weights.isneginf()
    shifts = (norms.gather(-1, heaviest) - norms).masked_fill(is_out, -math.inf)
    shares = weights.clamp(min=LEAST_LOG_WEIGHT).exp().masked_fill(is_out, 0)
    # the rest are all paths but the heaviest: where that is not the first, the first takes its place among them
    moved = heaviest == torch.arange(1, len(flat), device=heaviest.device)
    shifts, shares = (torch.where(moved, numbers[:, :1], numbers[:, 1:]) for numbers in (shifts, shares))
    for rows in row_chunks(flat[0]):
        first, *rest = (tensor[rows].float() for tensor in flat)
        anchor = select([first, *rest], heaviest[rows])
        # in few passes and in place: logits are large
        ahead = [
            torch.where(moved[rows, k, None], first, tensor).sub_(anchor).add_(shifts[rows, k, None])
            for k, tensor in enumerate(rest)
        ]
        # subtracted from all and added back at the end; a path so far ahead that this matters outweighs the anchor
        beyond = reduce(torch.maximum, ahead).sub(LARGEST).clamp_(min=0)
        parts = [difference.sub_(beyond).expm1_().mul_(shares[rows, k, None]) for k, difference in enumerate(ahead)]
        lead = reduce(Tensor.add_, parts)
        torch.add(lead.log1p_().add_(anchor), beyond, out=out.flatten(0, -2)[rows])
    return out


class Mixture(torch.autograd.Function):
    """`mix` with gradients for the logits of some paths.

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
        context.save_for_backward(mixed, norms, weights, *(z if learns else None for z, learns in learning))
        return mixed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, norms, weights, *logits = context.saved_tensors
        # of a log-probability of a path to one of the mixture, whose scale is that of the heaviest path
        shifts = weights - norms + norms.gather(-1, weights.argmax(-1, keepdim=True))
        gradients: list[Tensor | None] = [None] * len(logits)
        for k, z in enumerate(logits):
            if z is not None:
                gradients[k] = _gradient(gradient, mixed, z, shifts[..., k, None], norms[..., k, None])
        return None, None, *gradients


def _gradient(gradient: Tensor, mixed: Tensor, path_logits: Tensor, shift: Tensor, norm: Tensor) -> Tensor:
    """The gradient of the logits of one path."""
    result = torch.empty_like(gradient)
    flat = [tensor.flatten(0, -2) for tensor in (result, gradient, mixed, path_logits, shift, norm)]
    for rows in row_chunks(flat[0]):
        given, whole, logits, log_weight, log_norm = (tensor[rows].float() for tensor in flat[1:])
        share = given * (logits - whole + log_weight).clamp(max=0).exp()
        flat[0][rows] = (share - (logits - log_norm).exp() * share.sum(-1, keepdim=True)).to(result.dtype)
    return result
