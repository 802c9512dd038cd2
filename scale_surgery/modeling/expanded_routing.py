"""Routing: a router of `expanded_routers` makes one set of logits from the features of all paths.

Logits are large, so computations in float32 take some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .expanded_blocks import aligned_contiguous
from .expanded_paths import Paths
from .expanded_releases import count_tokens, find_cache, find_old_cache, is_filled
from .expanded_routers import Router

# logits of all paths that are in memory at a time; smaller pieces take longer, since each comes in new pages of memory
LOGITS_AT_ONCE = 2**25
# numbers below this, added to a score, hide a token
HIDDEN = -1e3
# positions to remember if generation asks for several, since it may take some of them back
MOST_KEPT = 64


class PathFeatures(NamedTuple):
    """The features of one path."""

    base_index: int  # number of its base stream
    up: Tensor | None  # its up stream as the head reads it (b, t, u), or None
    blocks: Any  # blocks of its expansion at the head, or None


class WeighedPath(NamedTuple):
    """A path that a router weighs."""

    logits: Tensor  # logits of its base stream (b, t, v), still without those of its up stream
    path: PathFeatures


@dataclass(frozen=True)
class Features:
    """Output of the last norm, before the head."""

    head: Any
    bases: tuple[Tensor, ...]  # the base streams (b, t, d)
    paths: tuple[PathFeatures, ...]
    unsplit: Tensor  # [base | up | padding] of the first group with its strides, on which adding a bias depends

    @classmethod
    def of(cls, head: Any, features: Tensor, paths: Paths, stream_widths: dict[str, int]) -> Features:
        """Split the output of the last norm into the features of each path."""
        groups = paths.groups(paths.layers)
        stacked, streams = features.chunk(len(groups)), []
        for whole, group in zip(stacked, groups, strict=True):
            widths = [stream_widths[name] for name in ("", *group.ups)]
            streams.append(whole[..., : sum(widths)].split(widths, dim=-1))
        bases = (base.detach() if group.is_fixed else base for group, (base, *_) in zip(groups, streams, strict=True))
        path_features = []
        for path in paths.paths:
            number, up = paths.place_of(path, paths.layers)
            blocks, read = head.expansions._modules.get(path.expansion), None
            if up is not None:
                read = streams[number][1 + up]
                read = read if blocks is None else blocks(streams[number][0], read, None, False)[1]
            path_features.append(PathFeatures(number, read, blocks))
        return cls(head, tuple(bases), tuple(path_features), stacked[0])

    def at(self, positions: slice | Tensor) -> Features:
        """Return the features at some positions."""
        if isinstance(positions, slice) and positions == slice(None):
            return self
        paths = (path if path.up is None else path._replace(up=path.up[:, positions]) for path in self.paths)
        bases = tuple(base[:, positions] for base in self.bases)
        return Features(self.head, bases, tuple(paths), self.unsplit[:, positions])

    def base_logits(self) -> list[Tensor]:
        """Compute the logits of each base stream in new memory (b, t, v)."""
        return [self.head.base_logits(aligned_contiguous(base), self.unsplit) for base in self.bases]

    def sides(self, bases: list[Tensor] | None = None) -> list[WeighedPath]:
        """List all paths, each with a copy of the logits of its base stream.

        Args:
            bases: The result of `base_logits`, if it is known already; it is overwritten.
        """
        bases = self.base_logits() if bases is None else bases
        # the last path of a base stream takes the original, so one copy fewer is made
        last = {path.base_index: place for place, path in enumerate(self.paths)}
        logits = [bases[path.base_index] for path in self.paths]
        return [
            WeighedPath(logits[place] if last[path.base_index] == place else logits[place].clone(), path)
            for place, path in enumerate(self.paths)
        ]

    def whole(self, side: WeighedPath) -> Tensor:
        """Compute the logits of a path (b, t, v), capped as in the stock model, in the memory of its base logits."""
        logits, path = side.logits, side.path
        if path.blocks is not None:
            up = aligned_contiguous(path.up)
            logits, _ = path.blocks(up, up, logits, False, is_read=True)
        return self.head.without_new_tokens(self.head.capped_in_place(logits), path.blocks)

    def of_base(self) -> Tensor:
        """Compute the logits of the base in new memory (b, t, v)."""
        return self.whole(WeighedPath(self.base_logits()[0], PathFeatures(0, None, None)))

    def logits(self) -> list[Tensor]:
        """Compute the logits of each path alone in new memory (b, t, v)."""
        return [self.whole(side) for side in self.sides()]

    def one_of(self, sides: list[WeighedPath], numbers: Tensor) -> Tensor:
        """Compute for each token the logits of one path, given by its number (b, t, 1); `sides` may be overwritten."""
        if len({side.path.blocks for side in sides}) > 1:
            return select([self.whole(side) for side in sides], numbers, in_place=True)
        # one product with the head, of the up stream that each token needs
        logits = select([side.logits for side in sides], numbers, in_place=True)
        path = sides[0].path
        up = None if path.blocks is None else select([side.path.up for side in sides], numbers)
        return self.whole(WeighedPath(logits, path._replace(up=up)))


class Evidence(NamedTuple):
    """The inputs of a router for each token."""

    # log-probability of the token on each path (b, t, k), float32; 0 for the first token of a text. None if the router
    # reads no tokens
    log_likelihoods: Tensor | None
    before: Tensor | None  # log weights of the paths after the tokens of earlier forwards (b, k), or None
    restarts: Tensor  # True where a sequence begins, and at padding (b, t)
    observed: (
        Tensor | None
    )  # a number that the router takes from the logits of each position (b, t); see `Router.sides`
    paths: int  # number of weighed paths, k


class TokenScores(NamedTuple):
    """Scores and weights of each token but the first; natural logarithms."""

    base: Tensor  # log-probability of the token under the base model (b, t - 1)
    sides: Tensor  # log-probability of the token on each weighed path (b, t - 1, k)
    weights: Tensor  # weight of each path in the prediction of the token (b, t - 1, k); they sum to 1
    routed: Tensor  # log-probability of the token under the routed output (b, t - 1)
    observed: Tensor | None  # `Evidence.observed` at the position that predicts the token (b, t - 1), or None


def decided(router: Router, weights: Tensor) -> Tensor:
    """Return the log weights for combining logits; a hard router gives all the weight to the heaviest path."""
    if not router.is_hard:
        return weights
    return torch.full_like(weights, -torch.inf).scatter_(-1, weights.argmax(-1, keepdim=True), 0)


def combine(
    router: Router, logits: list[Tensor], norms: list[Tensor], weights: Tensor, out: Tensor | None = None
) -> Tensor:
    """Combine the logits of all paths, which may be overwritten: those of one path, or `mix` of all."""
    if router.is_hard:
        selected = select(logits, weights.argmax(-1, keepdim=True), in_place=True)
        return selected if out is None else out.copy_(selected)
    return mix(logits, norms, weights, out)


def route(router: Router, features: Features, context: RouterContext) -> Tensor:
    """Compute routed logits (b, kept, v); no gradient passes through the weights.

    The weights at a position depend on earlier tokens alone. So positions are read in order, some at a time, and the
    logits of a whole prompt are never in memory together.
    """
    if not router.reads_tokens:
        sides, observed = router.sides(features.at(context.keep))
        with torch.no_grad():
            weights = router.weights(Evidence(None, None, context.restarts[:, context.keep], observed, len(sides)))
        if router.is_hard:
            return features.one_of(sides, weights.argmax(-1, keepdim=True))
        logits = [features.whole(side) for side in sides]
        return combine(router, logits, [normalizers(z.detach()) for z in logits], weights)
    length, is_slice = context.ids.shape[1], isinstance(context.keep, slice)
    wanted = range(length)[context.keep] if is_slice else range(length)
    remembered = min(len(wanted), MOST_KEPT) if is_slice and context.keep != slice(None) else 1
    # in training, all logits stay in memory anyway
    ups = [path.up for path in features.paths if path.up is not None]
    is_trained = torch.is_grad_enabled() and any(up.requires_grad for up in ups)
    width = len(features.paths) * len(context.ids) * features.head.weight.shape[0]
    pieces = [slice(0, length)] if is_trained else list(in_chunks(length, width, LOGITS_AT_ONCE))
    reader = _Reader(router, context, length - remembered, wanted, is_whole=len(pieces) == 1)
    for positions in pieces:
        reader.read_positions(features, positions)
    if context.is_cached:
        context.result = torch.cat(reader.next_log_probs, 1), torch.cat(reader.weights, 1)[..., None]
    return reader.routed if is_slice else reader.routed[:, context.keep]


class _Reader:
    """A forward of a router that reads tokens, some positions at a time."""

    def __init__(
        self, router: Router, context: RouterContext, remembered: int, wanted: range, *, is_whole: bool
    ) -> None:
        self.router, self.context, self.remembered = router, context, remembered
        self.wanted, self.is_whole = wanted, is_whole
        self.routed: Tensor | None = None  # logits at the wanted positions (b, wanted, v)
        # log-probabilities of every next token at the positions to be remembered (b, some, k, v), and log weights there
        self.next_log_probs: list[Tensor] = []
        self.weights: list[Tensor] = []
        state = context.state
        self.before = None if state is None else state.values[:, :, -1, 0]
        self.next = None if state is None else state.keys[:, :, -1]

    def read_positions(self, features: Features, positions: slice) -> None:
        """Read the tokens at some positions; mix the logits of the wanted ones."""
        logits, observed = self.router.read_logits(features.at(positions))
        with torch.no_grad():
            norms = [normalizers(z) for z in logits]
            weights = self.update(positions, [z.detach() for z in logits], norms, observed)
        first, last = max(self.wanted.start, positions.start), min(self.wanted.stop, positions.start + weights.shape[1])
        if first >= last:
            return
        if last - first < weights.shape[1]:
            # the stock model would compute the wanted rows alone, and a product of more rows may round differently
            logits, _ = self.router.read_logits(features.at(slice(first, last)))
            norms = [normalizers(z.detach()) for z in logits]
            weights = weights[:, first - positions.start : last - positions.start]
        if self.is_whole:
            self.routed = combine(self.router, logits, norms, weights)
            return
        if self.routed is None:
            # one tensor for all pieces, since concatenating them would need the memory twice
            self.routed = logits[0].new_empty(len(weights), len(self.wanted), logits[0].shape[-1])
        place = slice(first - self.wanted.start, last - self.wanted.start)
        combine(self.router, logits, norms, weights, self.routed[:, place])

    def update(self, positions: slice, logits: list[Tensor], norms: list[Tensor], observed: Tensor | None) -> Tensor:
        """Compute the log weights after each token at some positions (b, some, k)."""
        ids, paths = self.context.ids[:, positions, None], len(logits)
        first = logits[0].new_zeros(len(ids), 1, paths, dtype=torch.float32)
        if self.next is not None:
            first[:, 0] = self.next.gather(-1, ids[:, :1].expand(-1, paths, 1))[..., 0]
        # of each position and path, the log-probability of the token after it
        pairs = zip(logits, norms, strict=True)
        later = [z[:, :-1].gather(-1, ids[:, 1:])[..., 0].float() - norm[:, :-1] for z, norm in pairs]
        log_likelihoods = torch.cat((first, torch.stack(later, -1)), 1)
        restarts = self.context.restarts[:, positions]
        weights = self.router.weights(Evidence(log_likelihoods, self.before, restarts, observed, paths))
        self.remember(positions, logits, norms, weights)
        return weights

    def remember(self, positions: slice, logits: list[Tensor], norms: list[Tensor], weights: Tensor) -> None:
        """Store the state for the next positions and the next forward."""
        last = slice(min(max(self.remembered - positions.start, 0), weights.shape[1] - 1), None)
        pairs = zip(logits, norms, strict=True)
        next_log_probs = torch.stack([z[:, last].float() - norm[:, last, None] for z, norm in pairs], 2)
        self.before, self.next = weights[:, -1], next_log_probs[:, -1]
        if positions.start + weights.shape[1] > self.remembered:
            self.next_log_probs.append(next_log_probs)
            self.weights.append(weights[:, last])


def score_tokens(router: Router, features: Features, context: RouterContext) -> TokenScores:
    """Score each token but the first on every path; see `TokenScores`."""
    following, seen = context.ids[:, 1:], features.at(slice(None, -1))
    width = len(features.paths) * len(context.ids) * features.head.weight.shape[0]
    pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
    # a single token predicts nothing; an empty piece gives the results their shapes
    for positions in in_chunks(following.shape[1], width, LOGITS_AT_ONCE) if following.shape[1] else [slice(0, 0)]:
        here, ids = seen.at(positions), following[:, positions]
        sides, observed = router.read_logits(here)
        path_scores = [token_log_probs(side, ids) for side in sides]
        is_base_first = here.paths[0].up is None
        base = path_scores[0] if is_base_first else token_log_probs(here.of_base(), ids)
        pieces.append((base, torch.stack(path_scores, -1), observed))
    base, scored, observed = (None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
    return weigh(router, base, scored, context.restarts, observed)


def weigh(router: Router, base: Tensor, sides: Tensor, restarts: Tensor, observed: Tensor | None) -> TokenScores:
    """Let a router weigh paths from the scores of tokens; see `TokenScores`.

    Args:
        router: Any router that weighs these paths.
        base: Log-probability of each token but the first under the base model (b, t - 1).
        sides: Log-probability of these tokens on each path (b, t - 1, k).
        restarts: True where a sequence begins, and at padding (b, t).
        observed: `Evidence.observed` at the positions that predict them (b, t - 1), or None.
    """
    # nothing predicts the first token, and the last one predicts nothing
    log_likelihoods = torch.nn.functional.pad(sides, (0, 0, 1, 0))
    seen = None if observed is None else torch.nn.functional.pad(observed, (0, 1))
    weights = router.weights(Evidence(log_likelihoods, None, restarts, seen, sides.shape[-1]))[:, :-1]
    weights = decided(router, weights)
    return TokenScores(base, sides, weights.exp(), (sides + weights).logsumexp(-1), observed)


# ---- arithmetic

# logits that are converted to float32 at a time: as many as fit into a processor's cache, or keep an accelerator busy
CHUNK_ON_CPU, CHUNK = 2**17, 2**22
# differences of log-probabilities beyond this would overflow when they are exponentiated
LARGEST = 80.0
# a smaller weight changes no probability in float32
LEAST_LOG_WEIGHT = -60.0


def in_chunks(rows: int, width: int, at_once: int) -> Iterator[slice]:
    """Cut rows of `width` numbers into ranges of at most `at_once` numbers, and of at least one row."""
    step = max(1, at_once // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Cut rows of logits (rows, v) into ranges that are converted to float32 together."""
    return in_chunks(*logits.shape, at_once=CHUNK_ON_CPU if logits.device.type == "cpu" else CHUNK)


def per_row(function: Callable[..., Tensor], *logits: Tensor) -> Tensor:
    """Compute a number for each row of logits in float32, without a float32 copy of all logits."""
    flat = [tensor.flatten(0, -2) for tensor in logits]
    # allocated before the loop, since a small tensor left over by each chunk would fragment the heap
    numbers = logits[0].new_empty(len(flat[0]), dtype=torch.float32)
    for rows in row_chunks(flat[0]):
        numbers[rows] = function(*(tensor[rows].float() for tensor in flat))
    return numbers.view(logits[0].shape[:-1])


def normalizers(logits: Tensor) -> Tensor:
    """Compute log sum exp of each row, float32."""
    return per_row(lambda rows: rows.logsumexp(-1), logits)


def row_cosines(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine of each pair of rows, float32, clamped to [-1, 1]."""
    return per_row(lambda u, v: torch.nn.functional.cosine_similarity(u, v, dim=-1), a, b).clamp(-1, 1)


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the log-probability of one token per row, float32."""
    return logits.gather(-1, ids[..., None]).squeeze(-1).float() - normalizers(logits)


def posterior_weights(
    before: Tensor | None, log_likelihoods: Tensor, restarts: Tensor, prior: tuple[float, ...], rate: float
) -> Tensor:
    """Compute log weights of all paths after each token, normalised (b, t, k), float32; see `expanded_routers`.

    Args:
        before: Log weights before the first token (b, k), or None if no token came before.
        log_likelihoods: Log-probability of each token on each path (b, t, k), float32.
        restarts: True where a sequence begins, and at padding (b, t).
        prior: Weight of each path at a restart.
        rate: Fixed-share rate.
    """
    start = log_likelihoods.new_tensor(prior, dtype=torch.float32).log()
    if len(prior) > 2:
        before = start.expand(len(log_likelihoods), -1) if before is None else before
        return log_weights_after(before, log_likelihoods, restarts, start, rate)
    # all prefixes at once, since texts are long in training
    odds = None if before is None else before[:, 0] - before[:, 1]
    odds = log_odds_after(odds, log_likelihoods[..., 0] - log_likelihoods[..., 1], restarts, prior[0], rate)
    return torch.nn.functional.logsigmoid(torch.stack((odds, -odds), -1))


def log_weights_after(before: Tensor, log_likelihoods: Tensor, restarts: Tensor, prior: Tensor, rate: float) -> Tensor:
    """Compute log weights of more than two paths after each token, normalised (b, t, k), float32.

    Each token multiplies the weights by its likelihoods, and then by the shares; a restart sets them to the prior.
    Tokens are read one by one. Products of all prefixes at once, as for two paths, would grow with the third power of
    the number of paths.
    """
    # weight of a path after the shares if another had all the weight, and if it had all itself
    least, most = (log_likelihoods.new_tensor(share) for share in (rate / (log_likelihoods.shape[-1] - 1), 1 - rate))
    weights, weights_after = before, []
    for token_log_likelihoods, is_start in zip(log_likelihoods.unbind(1), restarts[..., None].unbind(1), strict=True):
        weights = weights + token_log_likelihoods
        # with a share, no weight underflows; without one, only its logarithm is safe
        weights = torch.lerp(least, most, weights.softmax(-1)).log() if rate > 0 else weights.log_softmax(-1)
        weights = torch.where(is_start, prior, weights)
        weights_after.append(weights)
    return torch.stack(weights_after, 1)


def log_odds_after(odds: Tensor | None, log_ratios: Tensor, restarts: Tensor, prior: float, rate: float) -> Tensor:
    """Compute the log odds of the first of two paths after each token.

    Each token multiplies the weights (w, 1 - w) by its likelihoods and by [[1 - rate, rate], [rate, 1 - rate]]; a
    restart sets them to the prior. Both are linear, so the result for each prefix is a product of 2 x 2 matrices. All
    prefixes are computed in log2(t) steps.

    Args:
        odds: Log odds before the first token (b,), or None if no token came before.
        log_ratios: log p_1(y) - log p_2(y) of each token (b, t), float32.
        restarts: True where a sequence begins, and at padding (b, t).
        prior: Weight of the first path at a restart.
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
        # only ratios matter; the largest entry becomes 1
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
    """Take each row (..., v) from the path of the given number (..., 1); if `in_place`, in the memory of the first."""
    selected = logits[0]
    is_free = in_place and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    for number, z in enumerate(logits[1:], 1):
        selected = torch.where(numbers == number, z, selected, out=selected if is_free else None)
    return selected


def mix(logits: Sequence[Tensor], norms: Sequence[Tensor], weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute logits of Σ_k w_k softmax(logits_k) in their dtype, in the memory of the first path or in `out`.

    The result has the scale of the heaviest path. Let a_k be the log-probability of a token on path k minus that on the
    heaviest path. Then log(1 + Σ_k w_k (exp(a_k) - 1)) is added to the logits of the heaviest path. If all paths are
    equal, or it has all the weight, that is exactly zero.

    Args:
        logits: Logits of each path (..., v).
        norms: Log sum exp of each row of them (...).
        weights: Log weights of the paths (..., k).
        out: Part of a larger tensor, for the result (b, t, v).
    """
    stacked = torch.stack(list(norms), -1)
    if any(z.requires_grad for z in logits):
        mixed: Tensor = Mixture.apply(stacked, weights, *logits)
        return mixed if out is None else out.copy_(mixed)
    if out is None:
        return _mix(logits, stacked, weights)
    for row, row_out in enumerate(out):
        # the rows of a batch are not adjacent in the larger tensor
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
    # the rest are all paths but the heaviest; if that is not the first, the first takes its place among them
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
        # subtracted from all and added back at the end, against overflow
        beyond = reduce(torch.maximum, ahead).sub(LARGEST).clamp_(min=0)
        parts = [difference.sub_(beyond).expm1_().mul_(shares[rows, k, None]) for k, difference in enumerate(ahead)]
        lead = reduce(Tensor.add_, parts)
        torch.add(lead.log1p_().add_(anchor), beyond, out=out.flatten(0, -2)[rows])
    return out


class Mixture(torch.autograd.Function):
    """`mix` with gradients for the logits of some paths.

    Let r_k = w_k p_k / mixture be the share of path k in each probability, and G the gradient of the mixture's logits.
    Then the gradient of the logits of path k is G r_k - p_k sum(G r_k), up to a shift of a whole row of logits, which
    changes no cross-entropy.
    """

    @staticmethod
    def forward(context: Any, norms: Tensor, weights: Tensor, *logits: Tensor) -> Tensor:
        # whole tensors and no views, through which autograd would copy the gradient of all logits
        mixed = _mix(logits, norms, weights)
        if mixed is logits[0]:
            context.mark_dirty(mixed)
        learning = zip(logits, context.needs_input_grad[2:], strict=True)
        context.save_for_backward(mixed, norms, weights, *(z if learns else None for z, learns in learning))
        return mixed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, norms, weights, *logits = context.saved_tensors
        # from a log-probability of a path to one of the mixture, which has the scale of the heaviest path
        shifts = weights - norms + norms.gather(-1, weights.argmax(-1, keepdim=True))
        gradients: list[Tensor | None] = [None] * len(logits)
        for k, z in enumerate(logits):
            if z is not None:
                gradients[k] = _gradient(gradient, mixed, z, shifts[..., k, None], norms[..., k, None])
        return None, None, *gradients


def _gradient(gradient: Tensor, mixed: Tensor, path_logits: Tensor, shift: Tensor, norm: Tensor) -> Tensor:
    """Compute the gradient of the logits of one path."""
    result = torch.empty_like(gradient)
    flat = [tensor.flatten(0, -2) for tensor in (result, gradient, mixed, path_logits, shift, norm)]
    for rows in row_chunks(flat[0]):
        given, whole, logits, log_weight, log_norm = (tensor[rows].float() for tensor in flat[1:])
        share = given * (logits - whole + log_weight).clamp(max=0).exp()
        flat[0][rows] = (share - (logits - log_norm).exp() * share.sum(-1, keepdim=True)).to(result.dtype)
    return result


# ---- state


class RouterState(DynamicLayer):
    """State of a router. It is one more layer of the KV cache, so the cache reorders and crops it.

    `keys` are the log-probabilities of every possible next token on each path at the last positions (b, k, positions,
    v), `values` the log weights there (b, k, positions, 1). Without positions the state is empty.
    """

    def __init__(self, first: DynamicLayer) -> None:
        super().__init__()
        self.first, self.seen = first, 0
        # transformers makes masks for the first sliding layer and for the first other one: this must be neither. It
        # leaves them out unless all layers are of a fixed size. States of other kinds are, too, and have no masks.
        self.is_sliding = getattr(first, "is_sliding", False)
        self.is_compileable = first.is_compileable and isinstance(first, CacheLayerMixin)

    @property
    def max_batch_size(self) -> int:
        """Return the rows of the cache; before transformers 5.13 a cache of a fixed size asks every layer."""
        return self.first.max_batch_size

    @property
    def max_cache_len(self) -> int:
        """Return the tokens that the cache has room for; a cache of a fixed size asks every layer."""
        return self.first.max_cache_len

    def prefetch(self) -> None:
        """Prefetch the first layer, which an offloaded cache means by the layer after the model's last."""
        self.first.prefetch()

    def set(self, next_log_probs: Tensor, weights: Tensor, tokens: int) -> None:
        """Store the state after `tokens` more: next_log_probs (b, positions, k, v), weights (b, positions, k, 1)."""
        self.keys, self.values = next_log_probs.transpose(1, 2), weights.transpose(1, 2)
        self.dtype, self.device, self.is_initialized = next_log_probs.dtype, next_log_probs.device, True
        self.seen += tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget -`tokens_to_remove` tokens; a positive number, before transformers 5, is how many to keep."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if removed and self.is_initialized:
            remaining = max(0, self.keys.shape[-2] - removed)
            self.keys, self.values = self.keys[..., :remaining, :], self.values[..., :remaining, :]
            self.seen -= removed

    def get_seq_length(self) -> int:
        """Return how many tokens were read; a cache of state-space layers alone asks this layer."""
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized, self.seen = False, 0


def state_of(cache: Cache | None) -> RouterState | None:
    """Find the router's state in a KV cache; None if there is none."""
    layers = getattr(cache, "layers", [])
    return next((layer for layer in layers if isinstance(layer, RouterState)), None)


@dataclass
class RouterContext:
    """The inputs of a forward that a router needs beside the features, and its state."""

    ids: Tensor | None  # token ids (b, t), or None
    restarts: Tensor  # True where a sequence begins, and at padding (b, t)
    state: RouterState | None  # state after the tokens of earlier forwards, or None
    keep: slice | Tensor  # positions whose logits are wanted
    is_cached: bool = True  # whether a KV cache will hold the state
    result: tuple[Tensor, Tensor] | None = None  # state after the last token, made by a router that reads tokens

    @classmethod
    def of(cls, inputs: dict[str, Any], keep: int | Tensor, *, reads_tokens: bool, is_training: bool) -> RouterContext:
        """Take what a router needs from the arguments of a forward.

        Args:
            inputs: Arguments of the forward without `logits_to_keep`: the router reads every position.
            keep: `logits_to_keep`.
            reads_tokens: Whether the router weighs paths by the tokens.
            is_training: Whether the model trains.

        Raises:
            ValueError: If there are no ids to read, if the cache holds tokens that this router has not read or does
                not count them, or if a text continues and no cache holds its beginning.
        """
        ids, cache = inputs.get("input_ids"), find_cache(inputs)
        if ids is None and reads_tokens:
            raise ValueError("inputs_embeds: the router scores tokens, expected input_ids.")
        if reads_tokens and cache is None and (unknown := find_old_cache(inputs)) is not None:
            raise ValueError(
                f"The KV cache, a {type(unknown).__name__}, counts no tokens, and the router must know where a text "
                "begins, expected use_cache=False, or a cache that counts. Caches of state-space layers count from "
                "transformers 5 on, those of continuous batching never do: scale-surgery serve answers without it."
            )
        past = count_tokens(cache)
        state = state_of(cache) if past else None
        is_read = state is not None and state.seen == past and state.keys.shape[-2] > 0
        if reads_tokens and is_filled(cache) and not is_read:
            raise ValueError(
                f"The KV cache holds {past or 'states of'} tokens that this router has not read, or from which "
                "more were taken back than it remembers, expected a cache that it filled itself. Begin with an empty "
                f"one. At most {MOST_KEPT} tokens can be taken back, such as those of prompt_lookup_num_tokens."
            )
        like = inputs["inputs_embeds"] if ids is None else ids
        mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
        if reads_tokens and not past and goes_on(mask, places, like.shape[1], has_cache=cache is not None):
            raise ValueError(
                "The text goes on (its attention mask is longer than input_ids, or its first position is not 0), and "
                "no KV cache holds the router's state for its beginning. Give the whole text, or the cache that the "
                f"model filled. transformers {transformers.__version__} may name the cache in a way that this code "
                "does not know; scale-surgery verify FOLDER checks it."
            )
        cuts = find_cuts(mask, past, like.shape[1])
        tells_beginnings = mask is None or is_flat(mask) or cuts is not None
        if reads_tokens and places is None and (not tells_beginnings or inputs.get("cu_seq_lens_q") is not None):
            raise ValueError(
                "attention_mask or cu_seq_lens_q: the router reads no beginnings of texts from these, expected "
                "position_ids beside them, or a mask of two or four dimensions with a column for each token."
            )
        restarts = find_restarts(mask, places, past, like)
        restarts = restarts if cuts is None else restarts | cuts.to(restarts.device)
        positions = slice(-keep or None, None) if isinstance(keep, int) else keep
        is_asked = inputs.get("use_cache")
        is_cached = cache is not None or (not is_training if is_asked is None else bool(is_asked))
        return cls(ids, restarts, state, positions, is_cached)

    def move(self, device: torch.device) -> None:
        """Move ids and restarts to the head's device, since a model may be on several."""
        self.ids = None if self.ids is None else self.ids.to(device)
        self.restarts = self.restarts.to(device)

    def remember(self, cache: Cache | None) -> None:
        """Put the router's state into the KV cache, as one more layer."""
        if self.result is None or not getattr(cache, "layers", None):
            return
        if state_of(cache) is None:
            # in a hybrid model, one that has keys and values
            like = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
            cache.layers.append(RouterState(next(like, cache.layers[0])))
        state = state_of(cache)
        # a cache may be emptied without a reset of the state; its next text starts again
        state.seen = 0 if self.state is None else state.seen
        state.set(*self.result, tokens=self.ids.shape[1])


def is_flat(mask: Any) -> bool:
    """Return whether an attention mask has a number for each token (b, t)."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def find_cuts(mask: Any, past: int, length: int) -> Tensor | None:
    """Find the tokens that do not attend to themselves, or not to the token before: there a text begins, or is padding.

    Args:
        mask: Attention mask (b or 1, heads or 1, t, past + t or more), bool or added to scores; or a dict of the masks
            of kinds of layers. Of these, one that sees a token counts, since a window or a chunk hides some.
        past: Tokens in the KV cache.
        length: Tokens of the forward, t.

    Returns:
        (b or 1, t), bool; None without such a mask.
    """
    masks, cuts = list(mask.values()) if isinstance(mask, dict) else [mask], []
    if isinstance(mask, dict) and any(each is None for each in masks):
        return torch.zeros(1, length, dtype=torch.bool)  # the usual causal mask sees all
    for each in masks:
        if isinstance(each, Tensor) and each.dim() == 4 and each.shape[-1] >= past + length:
            is_seen = (each > HIDDEN if each.is_floating_point() else each != 0).any(1)
            itself = is_seen.diagonal(past, -2, -1)[:, :length]
            before = is_seen.diagonal(past - 1, -2, -1)[:, :length]
            before = before if past else torch.nn.functional.pad(before[:, : length - 1], (1, 0), value=True)
            cuts.append(~(itself & before))
    return reduce(torch.logical_and, cuts) if cuts else None


def goes_on(mask: Tensor | None, positions: Tensor | None, length: int, *, has_cache: bool) -> bool:
    """Return whether tokens came before those of a forward without a KV cache, or with an empty one.

    Args:
        mask: Attention mask (b, earlier tokens + t); any other mask is ignored.
        positions: Position ids (b or 1, t) or None.
        length: Tokens of the forward, t.
        has_cache: Whether there is an empty cache. If it is of a fixed size, columns may stand for tokens to come.
    """
    is_read = is_flat(mask)
    # a graph cannot ask for values
    is_graph = is_compiling() or (is_read and mask.is_meta)
    if is_read and mask.shape[1] > length and not (has_cache and (is_graph or not mask[:, length:].any())):
        return True
    if positions is None or positions.dim() != 2 or positions.is_meta or is_graph:
        return False
    # padding may have any position; without a mask, transformers 4 gives it position 1
    starts = positions[:, 0] * (mask[:, 0] != 0) if is_read else positions[:, 0]
    return bool((starts > 1).any())


def find_restarts(mask: Tensor | None, positions: Tensor | None, past: int, like: Tensor) -> Tensor:
    """Find the beginnings of sequences and padding; there the router forgets earlier tokens.

    Args:
        mask: Attention mask (b, past + t); any other mask is ignored. With a cache of a fixed size it may have more
            columns, for tokens to come.
        positions: Position ids (b or 1, t) or None.
        past: Tokens in the KV cache.
        like: Features or ids (b, t, ...).

    Returns:
        (b, t), bool.
    """
    rows, length = like.shape[:2]
    restarts = torch.zeros(rows, length, dtype=torch.bool, device=like.device)
    if positions is not None and positions.dim() == 2:
        restarts[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
        restarts[:, 0] |= positions[:, 0] == 0
    if is_flat(mask):
        padded = torch.nn.functional.pad(mask[:, : past + length] == 0, (1, 0), value=False)
        restarts |= padded[:, -length:] | padded[:, -length - 1 : -1]
    if past == 0:
        restarts[:, 0] = True
    return restarts
