"""Features of all paths become one set of logits, by a router of `expanded_routers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expanded_mixture import in_chunks, mix, normalizers, select, token_log_probs
from .expanded_paths import Paths
from .expanded_routers import Router
from .expanded_state import RouterCall
from .expanded_streams import aligned_contiguous

# logits of all paths that stand in memory at a time: pieces cost time, each comes in new pages of memory
LOGITS_AT_ONCE = 2**25
# where generation asks for several positions, it may take some of them back
MOST_KEPT = 64


class PathFeatures(NamedTuple):
    """The features of one path."""

    base_index: int  # number of its base stream
    up: Tensor | None  # what the head reads of its up stream (b, t, u), or None
    blocks: Any  # what its expansion adds to the head, or None


class WeighedPath(NamedTuple):
    """A path that a router weighs."""

    logits: Tensor  # logits of base streams (b, t, v), to which `path` has yet to add its own
    path: PathFeatures  # features of the path


@dataclass(frozen=True)
class Features:
    """What leaves the last norm, before the head."""

    head: Any  # the head
    bases: tuple[Tensor, ...]  # the base streams (b, t, d)
    paths: tuple[PathFeatures, ...]  # the features of each path
    unsplit: Tensor  # [base | up | padding] of the first group, as it lies in memory: adding a bias depends on that

    @classmethod
    def of(cls, head: Any, features: Tensor, paths: Paths, stream_widths: dict[str, int]) -> Features:
        """Split what leaves the last norm into the features of each path."""
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
        """The features at some positions."""
        if isinstance(positions, slice) and positions == slice(None):
            return self
        paths = (path if path.up is None else path._replace(up=path.up[:, positions]) for path in self.paths)
        bases = tuple(base[:, positions] for base in self.bases)
        return Features(self.head, bases, tuple(paths), self.unsplit[:, positions])

    def base_logits(self) -> list[Tensor]:
        """Logits of each base stream, in memory of their own (b, t, v)."""
        return [self.head.base_logits(aligned_contiguous(base), self.unsplit) for base in self.bases]

    def sides(self, bases: list[Tensor] | None = None) -> list[WeighedPath]:
        """Each path, with logits of its base stream in memory of their own.

        Args:
            bases: What `base_logits` gave, where that is known already; it is written over.
        """
        bases = self.base_logits() if bases is None else bases
        # the last path of a base stream gets its logits themselves, those before it copies
        last = {path.base_index: place for place, path in enumerate(self.paths)}
        logits = [bases[path.base_index] for path in self.paths]
        return [
            WeighedPath(logits[place] if last[path.base_index] == place else logits[place].clone(), path)
            for place, path in enumerate(self.paths)
        ]

    def whole(self, side: WeighedPath) -> Tensor:
        """Logits of a path (b, t, v), in the memory of those of its base stream, capped as the stock model does."""
        logits, path = side.logits, side.path
        if path.blocks is not None:
            up = aligned_contiguous(path.up)
            logits, _ = path.blocks(up, up, logits, False, is_read=True)
        return self.head.without_new_tokens(self.head.capped_in_place(logits), path.blocks)

    def of_base(self) -> Tensor:
        """Logits of the base alone, in memory of their own (b, t, v)."""
        return self.whole(WeighedPath(self.base_logits()[0], PathFeatures(0, None, None)))

    def logits(self) -> list[Tensor]:
        """Logits of each path alone, in memory of their own (b, t, v)."""
        return [self.whole(side) for side in self.sides()]

    def one_of(self, sides: list[WeighedPath], numbers: Tensor) -> Tensor:
        """Logits of the path whose number each token has (b, t, 1); those of the first may be written over."""
        if len({side.path.blocks for side in sides}) > 1:
            return select([self.whole(side) for side in sides], numbers, in_place=True)
        # one product for what the head adds: of the up stream that each token needs
        logits = select([side.logits for side in sides], numbers, in_place=True)
        path = sides[0].path
        up = None if path.blocks is None else select([side.path.up for side in sides], numbers)
        return self.whole(WeighedPath(logits, path._replace(up=up)))


class Evidence(NamedTuple):
    """What a router knows of each token."""

    # log-probability of the token on each path (b, t, k), float32; 0 where nothing was before it. None where the router
    # reads no tokens
    log_likelihoods: Tensor | None
    # log weights of the paths after the tokens of earlier calls (b, k), or None where there were none
    before: Tensor | None
    restarts: Tensor  # where a sequence begins and where padding stands (b, t)
    observed: Tensor | None  # what the router reads in the logits at each position (b, t); see `Router.sides`
    paths: int  # how many are weighed, k


class TokenScores(NamedTuple):
    """How each token but the first was scored and routed; natural logarithms."""

    base: Tensor  # log-probability of the token under the base model (b, t - 1)
    sides: Tensor  # the same under what the router weighs, a path each (b, t - 1, k)
    weights: Tensor  # weight of each where the token is predicted (b, t - 1, k); they sum to 1
    routed: Tensor  # log-probability of the token under the routed output (b, t - 1)
    observed: Tensor | None  # what the router read in the logits there (b, t - 1), or None; see `Router.sides`


def decided(router: Router, weights: Tensor) -> Tensor:
    """Log weights by which logits are combined: a hard router may remember more than the path that it chose."""
    if not router.is_hard:
        return weights
    return torch.full_like(weights, -torch.inf).scatter_(-1, weights.argmax(-1, keepdim=True), 0)


def combine(
    router: Router, logits: list[Tensor], norms: list[Tensor], weights: Tensor, out: Tensor | None = None
) -> Tensor:
    """One set of logits of all paths, which may be written over: one path's, or `mix` of all."""
    if router.is_hard:
        selected = select(logits, weights.argmax(-1, keepdim=True), in_place=True)
        return selected if out is None else out.copy_(selected)
    return mix(logits, norms, weights, out)


def route(router: Router, features: Features, call: RouterCall) -> Tensor:
    """Routed logits (b, kept, v); no gradient passes through the weights.

    Positions are taken some at a time, in order: the weights at one depend on what was before it alone, and logits of
    a whole prompt never stand in memory together.
    """
    if not router.reads_tokens:
        sides, observed = router.sides(features.at(call.keep))
        with torch.no_grad():
            weights = router.weights(Evidence(None, None, call.restarts[:, call.keep], observed, len(sides)))
        if router.is_hard:
            return features.one_of(sides, weights.argmax(-1, keepdim=True))
        logits = [features.whole(side) for side in sides]
        return combine(router, logits, [normalizers(z.detach()) for z in logits], weights)
    length, is_slice = call.ids.shape[1], isinstance(call.keep, slice)
    wanted = range(length)[call.keep] if is_slice else range(length)
    remembered = min(len(wanted), MOST_KEPT) if is_slice and call.keep != slice(None) else 1
    # where a text is trained on, its logits stand in memory anyway
    ups = [path.up for path in features.paths if path.up is not None]
    is_trained = torch.is_grad_enabled() and any(up.requires_grad for up in ups)
    width = len(features.paths) * len(call.ids) * features.head.weight.shape[0]
    pieces = [slice(0, length)] if is_trained else list(in_chunks(length, width, LOGITS_AT_ONCE))
    reader = _Reader(router, call, length - remembered, wanted, is_whole=len(pieces) == 1)
    for positions in pieces:
        reader.read_positions(features, positions)
    if call.is_cached:
        call.result = torch.cat(reader.next_log_probs, 1), torch.cat(reader.weights, 1)[..., None]
    return reader.routed if is_slice else reader.routed[:, call.keep]


class _Reader:
    """One call of a router that reads tokens, some positions at a time."""

    def __init__(self, router: Router, call: RouterCall, remembered: int, wanted: range, *, is_whole: bool) -> None:
        self.router, self.call, self.remembered = router, call, remembered
        self.wanted, self.is_whole = wanted, is_whole
        self.routed: Tensor | None = None  # logits at the positions that are wanted (b, wanted, v)
        # log-probabilities of every next token at the positions to be remembered (b, some, k, v), and log weights there
        self.next_log_probs: list[Tensor] = []
        self.weights: list[Tensor] = []
        state = call.state
        self.before = None if state is None else state.values[:, :, -1, 0]
        self.next = None if state is None else state.keys[:, :, -1]

    def read_positions(self, features: Features, positions: slice) -> None:
        """Read the tokens at some positions; mix the logits of those that are wanted."""
        logits, observed = self.router.read_logits(features.at(positions))
        with torch.no_grad():
            norms = [normalizers(z) for z in logits]
            weights = self.update(positions, [z.detach() for z in logits], norms, observed)
        first, last = max(self.wanted.start, positions.start), min(self.wanted.stop, positions.start + weights.shape[1])
        if first >= last:
            return
        if last - first < weights.shape[1]:
            # as many rows at once as the stock model computes, where it is asked for the last ones alone
            logits, _ = self.router.read_logits(features.at(slice(first, last)))
            norms = [normalizers(z.detach()) for z in logits]
            weights = weights[:, first - positions.start : last - positions.start]
        if self.is_whole:
            self.routed = combine(self.router, logits, norms, weights)
            return
        if self.routed is None:
            # all in one place: pieces that are put together stand in memory twice
            self.routed = logits[0].new_empty(len(weights), len(self.wanted), logits[0].shape[-1])
        place = slice(first - self.wanted.start, last - self.wanted.start)
        combine(self.router, logits, norms, weights, self.routed[:, place])

    def update(self, positions: slice, logits: list[Tensor], norms: list[Tensor], observed: Tensor | None) -> Tensor:
        """Log weights after each token at some positions (b, some, k)."""
        ids, paths = self.call.ids[:, positions, None], len(logits)
        first = logits[0].new_zeros(len(ids), 1, paths, dtype=torch.float32)
        if self.next is not None:
            first[:, 0] = self.next.gather(-1, ids[:, :1].expand(-1, paths, 1))[..., 0]
        # position by position, what each path gave for the token after it
        pairs = zip(logits, norms, strict=True)
        later = [z[:, :-1].gather(-1, ids[:, 1:])[..., 0].float() - norm[:, :-1] for z, norm in pairs]
        log_likelihoods = torch.cat((first, torch.stack(later, -1)), 1)
        restarts = self.call.restarts[:, positions]
        weights = self.router.weights(Evidence(log_likelihoods, self.before, restarts, observed, paths))
        self.remember(positions, logits, norms, weights)
        return weights

    def remember(self, positions: slice, logits: list[Tensor], norms: list[Tensor], weights: Tensor) -> None:
        """Store what the next positions and the next call begin with."""
        last = slice(min(max(self.remembered - positions.start, 0), weights.shape[1] - 1), None)
        pairs = zip(logits, norms, strict=True)
        next_log_probs = torch.stack([z[:, last].float() - norm[:, last, None] for z, norm in pairs], 2)
        self.before, self.next = weights[:, -1], next_log_probs[:, -1]
        if positions.start + weights.shape[1] > self.remembered:
            self.next_log_probs.append(next_log_probs)
            self.weights.append(weights[:, last])


def score_tokens(router: Router, features: Features, call: RouterCall) -> TokenScores:
    """Score each token but the first on every path; see `TokenScores`."""
    following, seen = call.ids[:, 1:], features.at(slice(None, -1))
    width = len(features.paths) * len(call.ids) * features.head.weight.shape[0]
    pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
    # where there is one token alone, nothing is predicted, and shapes are all the same
    for positions in in_chunks(following.shape[1], width, LOGITS_AT_ONCE) if following.shape[1] else [slice(0, 0)]:
        here, ids = seen.at(positions), following[:, positions]
        sides, observed = router.read_logits(here)
        path_scores = [token_log_probs(side, ids) for side in sides]
        is_base_first = here.paths[0].up is None
        base = path_scores[0] if is_base_first else token_log_probs(here.of_base(), ids)
        pieces.append((base, torch.stack(path_scores, -1), observed))
    base, scored, observed = (None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
    return weigh(router, base, scored, call.restarts, observed)


def weigh(router: Router, base: Tensor, sides: Tensor, restarts: Tensor, observed: Tensor | None) -> TokenScores:
    """Let a router weigh tokens that were read; see `TokenScores`.

    Args:
        router: Any router that gives out these sides.
        base: Log-probability of each token but the first under the base model (b, t - 1).
        sides: The same on each side (b, t - 1, k).
        restarts: Where a sequence begins (b, t).
        observed: What the router reads in the logits where each is predicted (b, t - 1), or None.
    """
    # nothing predicts the first token, and the last one predicts nothing
    log_likelihoods = torch.nn.functional.pad(sides, (0, 0, 1, 0))
    seen = None if observed is None else torch.nn.functional.pad(observed, (0, 1))
    weights = router.weights(Evidence(log_likelihoods, None, restarts, seen, sides.shape[-1]))[:, :-1]
    weights = decided(router, weights)
    return TokenScores(base, sides, weights.exp(), (sides + weights).logsumexp(-1), observed)
