"""From the features of all paths to one set of logits: what a router of `expanded_routers` reads, and gives out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expanded_mixture import chosen, in_chunks, mix, normalizers, select
from .expanded_paths import Paths
from .expanded_routers import Router
from .expanded_state import Tokens
from .expanded_streams import own_memory

# logits of all paths that stand in memory at a time: pieces cost time, each comes in new pages of memory
AT_ONCE = 2**25
# where generation asks for several positions, it may take some of them back
MOST_KEPT = 64


class PathFeatures(NamedTuple):
    """What of the features is one path's."""

    base: int  # number of its base stream
    up: Tensor | None  # its up stream (b, t, u), or None
    blocks: Any  # what its expansion adds to the head, or None


class Side(NamedTuple):
    """What a router weighs."""

    logits: Tensor  # logits of base streams (b, t, v), to which `path` has yet to add its own
    path: PathFeatures  # what of the features is this path's


@dataclass(frozen=True)
class Features:
    """What leaves the last norm, before the head."""

    head: Any  # the head
    bases: tuple[Tensor, ...]  # the base streams (b, t, d)
    paths: tuple[PathFeatures, ...]  # what is each path's
    read: Tensor  # one base stream as it lies in memory: how a bias is added depends on that

    @classmethod
    def of(cls, head: Any, features: Tensor, paths: Paths, stream_widths: dict[str, int]) -> Features:
        """Take apart what leaves the last norm."""
        groups = paths.groups(paths.layers)
        stacked, streams = features.chunk(len(groups)), []
        for whole, group in zip(stacked, groups, strict=True):
            widths = [stream_widths[name] for name in ("", *group.ups)]
            streams.append(whole[..., : sum(widths)].split(widths, dim=-1))
        # nothing that trains reaches the base's own stream
        bases = (base if group.writer else base.detach() for group, (base, *_) in zip(groups, streams, strict=True))
        found = []
        for path in paths.paths:
            number, up = paths.place_of(path, paths.layers)
            blocks = head.expansions._modules.get(path.expansion)
            found.append(PathFeatures(number, None if up is None else streams[number][1 + up], blocks))
        return cls(head, tuple(bases), tuple(found), stacked[0])

    def at(self, keep: slice | Tensor) -> Features:
        """The same at some positions."""
        if isinstance(keep, slice) and keep == slice(None):
            return self
        paths = (own if own.up is None else own._replace(up=own.up[:, keep]) for own in self.paths)
        return replace(
            self, bases=tuple(base[:, keep] for base in self.bases), paths=tuple(paths), read=self.read[:, keep]
        )

    def base_logits(self) -> list[Tensor]:
        """Logits of each base stream, in memory of their own (b, t, v)."""
        return [self.head.base_logits(own_memory(base), self.read) for base in self.bases]

    def sides(self, bases: list[Tensor] | None = None) -> list[Side]:
        """Each path, with logits of its base stream in memory of their own.

        Args:
            bases: What `base_logits` gave, where that is known already; it is written over.
        """
        bases = self.base_logits() if bases is None else bases
        last = {path.base: place for place, path in enumerate(self.paths)}
        return [
            Side(bases[path.base] if last[path.base] == place else bases[path.base].clone(), path)
            for place, path in enumerate(self.paths)
        ]

    def whole(self, side: Side) -> Tensor:
        """Logits of a path (b, t, v), in the memory of those of its base stream, capped as the stock model does."""
        logits, path = side.logits, side.path
        if path.blocks is not None:
            up = own_memory(path.up)
            logits, _ = path.blocks(up, up, logits, False)
        return self.head.capped_in_place(logits)

    def logits(self) -> list[Tensor]:
        """Logits of each path alone, in memory of their own (b, t, v)."""
        return [self.whole(side) for side in self.sides()]

    def one_of(self, sides: list[Side], numbers: Tensor) -> Tensor:
        """Logits of the path whose number each token has (b, t, 1); those of the first may be written over."""
        if len({side.path.blocks for side in sides}) > 1:
            return select([self.whole(side) for side in sides], numbers, in_place=True)
        # one product for what the head adds: of the up stream that each token needs
        logits = select([side.logits for side in sides], numbers, in_place=True)
        path = sides[0].path
        up = None if path.blocks is None else select([side.path.up for side in sides], numbers)
        return self.whole(Side(logits, path._replace(up=up)))


class Evidence(NamedTuple):
    """What a router knows of each token."""

    # log-probability of the token on each path (b, t, k), float32; 0 where nothing was before it. None for a router
    # that reads no tokens.
    likelihoods: Tensor | None
    # log weights of the paths after the tokens of earlier calls (b, k), or None where there were none
    before: Tensor | None
    restarts: Tensor  # where a sequence begins and where padding stands (b, t)
    observed: Tensor | None  # what the router reads in the logits at each position (b, t); see `Router.sides`
    paths: int  # how many are weighed, k


class TokenScores(NamedTuple):
    """What routing made of each token but the first; natural logarithms."""

    base: Tensor  # log-probability of the token under the base model (b, t - 1)
    sides: Tensor  # the same under what the router weighs, a path each (b, t - 1, k)
    weights: Tensor  # weight of each where the token is predicted (b, t - 1, k); they sum to 1
    routed: Tensor  # log-probability of the token under the routed output (b, t - 1)
    observed: Tensor | None  # what the router read in the logits there (b, t - 1), or None; see `Router.sides`


def combine(
    router: Router, logits: list[Tensor], norms: list[Tensor], weights: Tensor, out: Tensor | None = None
) -> Tensor:
    """One set of logits of all paths, which may be written over: one path's, or `mix` of all."""
    if router.is_hard:
        found = select(logits, weights.argmax(-1, keepdim=True), in_place=True)
        return found if out is None else out.copy_(found)
    return mix(logits, norms, weights, out)


def route(router: Router, features: Features, tokens: Tokens) -> Tensor:
    """Routed logits (b, kept, v); no gradient passes through the weights.

    Positions are taken some at a time, in order: the weights at one depend on what was before it alone, and logits of
    a whole prompt never stand in memory together.
    """
    if not router.reads_tokens:
        sides, observed = router.sides(features.at(tokens.keep))
        with torch.no_grad():
            weights = router.weights(Evidence(None, None, tokens.restarts[:, tokens.keep], observed, len(sides)))
        if router.is_hard:
            return features.one_of(sides, weights.argmax(-1, keepdim=True))
        logits = [features.whole(side) for side in sides]
        return combine(router, logits, [normalizers(own.detach()) for own in logits], weights)
    length, is_slice = tokens.ids.shape[1], isinstance(tokens.keep, slice)
    wanted = range(length)[tokens.keep] if is_slice else range(length)
    kept = min(len(wanted), MOST_KEPT) if is_slice and tokens.keep != slice(None) else 1
    # where a text is trained on, its logits stand in memory anyway
    is_trained = torch.is_grad_enabled() and any(
        path.up is not None and path.up.requires_grad for path in features.paths
    )
    width = len(features.paths) * len(tokens.ids) * features.head.weight.shape[0]
    pieces = [slice(0, length)] if is_trained else list(in_chunks(length, width, AT_ONCE))
    call = _Reading(router, tokens, length - kept, wanted, is_whole=len(pieces) == 1)
    for rows in pieces:
        call.read(features, rows)
    if tokens.is_cached:
        tokens.result = torch.cat(call.evidence, 1), torch.cat(call.weights, 1)[..., None]
    return call.routed if is_slice else call.routed[:, tokens.keep]


class _Reading:
    """One call of a router that reads tokens, some positions at a time.

    Attributes:
        evidence: Log-probabilities of every next token at the positions to be remembered (b, some, k, v).
        weights: Log weights there (b, some, k).
        routed: Routed logits at the positions that are wanted (b, wanted, v).
    """

    def __init__(self, router: Router, tokens: Tokens, remembered: int, wanted: range, *, is_whole: bool) -> None:
        self.router, self.tokens, self.remembered = router, tokens, remembered
        self.wanted, self.is_whole = wanted, is_whole
        self.routed: Tensor | None = None
        self.evidence: list[Tensor] = []
        self.weights: list[Tensor] = []
        state = tokens.state
        self.before = None if state is None else state.values[:, :, -1, 0]
        self.next = None if state is None else state.keys[:, :, -1]

    def read(self, features: Features, rows: slice) -> None:
        """Read the tokens at some positions, and mix where that is wanted."""
        logits, observed = self.router.read(features.at(rows))
        with torch.no_grad():
            norms = [normalizers(own) for own in logits]
            weights = self.follow(rows, [own.detach() for own in logits], norms, observed)
        first, last = max(self.wanted.start, rows.start), min(self.wanted.stop, rows.start + weights.shape[1])
        if first >= last:
            return
        if last - first < weights.shape[1]:
            # as many rows at once as the stock model computes, where it is asked for the last ones alone
            logits, _ = self.router.read(features.at(slice(first, last)))
            norms = [normalizers(own.detach()) for own in logits]
            weights = weights[:, first - rows.start : last - rows.start]
        if self.is_whole:
            self.routed = combine(self.router, logits, norms, weights)
            return
        if self.routed is None:
            # all in one place: pieces that are put together stand in memory twice
            self.routed = logits[0].new_empty(len(weights), len(self.wanted), logits[0].shape[-1])
        place = slice(first - self.wanted.start, last - self.wanted.start)
        combine(self.router, logits, norms, weights, self.routed[:, place])

    def follow(self, rows: slice, logits: list[Tensor], norms: list[Tensor], observed: Tensor | None) -> Tensor:
        """Log weights after each token at some positions (b, some, k)."""
        ids, paths = self.tokens.ids[:, rows, None], len(logits)
        first = logits[0].new_zeros(len(ids), 1, paths, dtype=torch.float32)
        if self.next is not None:
            first[:, 0] = self.next.gather(-1, ids[:, :1].expand(-1, paths, 1))[..., 0]
        # position by position, what each path gave for the token after it
        later = [
            own[:, :-1].gather(-1, ids[:, 1:])[..., 0].float() - norm[:, :-1]
            for own, norm in zip(logits, norms, strict=True)
        ]
        likelihoods = torch.cat((first, torch.stack(later, -1)), 1)
        restarts = self.tokens.restarts[:, rows]
        weights = self.router.weights(Evidence(likelihoods, self.before, restarts, observed, paths))
        self.remember(rows, logits, norms, weights)
        return weights

    def remember(self, rows: slice, logits: list[Tensor], norms: list[Tensor], weights: Tensor) -> None:
        """Note what the next positions, and the next call, begin with."""
        kept = slice(min(max(self.remembered - rows.start, 0), weights.shape[1] - 1), None)
        parts = [own[:, kept].float() - norm[:, kept, None] for own, norm in zip(logits, norms, strict=True)]
        evidence = torch.stack(parts, 2)
        self.before, self.next = weights[:, -1], evidence[:, -1]
        if rows.start + weights.shape[1] > self.remembered:
            self.evidence.append(evidence)
            self.weights.append(weights[:, kept])


def score_tokens(router: Router, features: Features, tokens: Tokens) -> TokenScores:
    """Score each token but the first on every path; see `TokenScores`."""
    following, seen = tokens.ids[:, 1:], features.at(slice(None, -1))
    width = len(features.paths) * len(tokens.ids) * features.head.weight.shape[0]
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    # where there is one token alone, nothing is predicted, and shapes are all the same
    for rows in in_chunks(following.shape[1], width, AT_ONCE) if following.shape[1] else [slice(0, 0)]:
        here, ids = seen.at(rows), following[:, rows]
        sides, observed = router.read(here)
        own = [chosen(side, ids) for side in sides]
        base = own[0] if here.paths[0].up is None else chosen(here.head.capped(here.base_logits()[0]), ids)
        found.append((base, torch.stack(own, -1), observed))
    base, scored, observed = (None if own[0] is None else torch.cat(own, 1) for own in zip(*found, strict=True))
    return weigh(router, base, scored, tokens.restarts, observed)


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
    likelihoods = torch.nn.functional.pad(sides, (0, 0, 1, 0))
    seen = None if observed is None else torch.nn.functional.pad(observed, (0, 1))
    weights = router.weights(Evidence(likelihoods, None, restarts, seen, sides.shape[-1]))[:, :-1]
    return TokenScores(base, sides, weights.exp(), (sides + weights).logsumexp(-1), observed)
