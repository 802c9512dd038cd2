"""Routers: from the features of all paths to one set of logits, token by token.

    posterior   log Σ_k w_k p_k, where w_k is the posterior probability that path k explains the tokens read so far:

                    v_k(t) ∝ w_k(t) p_k(y_t)        w_k(t+1) = (1 - r) v_k(t) + (r / K) Σ_{j≠k} v_j(t)

                Bayes' mixture of K + 1 paths with fixed share r (Herbster and Warmuth 1998). With r = 0 no text loses
                more than -ln of a path's prior against that path.
    cosine      of two paths, Z_p and Z_a being the logits of their base streams and Z_up what their up streams add:
                if cos(Z_p, Z_a) > threshold: (Z_p + Z_a) / 2 + Z_up_p, else Z_a + Z_up_a (SCALE, arXiv 2511.03270, eq.
                5); strict: Z_p alone instead of the first

A router is what `weights` makes of what is known of each token; ROUTERS is all that knows which there are.
This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .expanded_mixture import chosen, cosines, follow, in_chunks, mix, normalizers, select
from .expanded_paths import BASE, Path, Paths
from .expanded_state import Tokens
from .expanded_streams import own_memory

# logits of all paths that stand in memory at a time: pieces cost time, each comes in new pages of memory
AT_ONCE = 2**25
# where generation asks for several positions, it may take some of them back
MOST_KEPT = 64


class PathFeatures(NamedTuple):
    """What of the features is one path's.

    Attributes:
        base: Number of its base stream.
        up: Its up stream (b, t, u), or None.
        blocks: What its expansion adds to the head, or None.
    """

    base: int
    up: Tensor | None
    blocks: Any


class Side(NamedTuple):
    """What a router weighs.

    Attributes:
        logits: Logits of base streams (b, t, v), to which `path` has yet to add its own.
        path: What of the features is this path's.
    """

    logits: Tensor
    path: PathFeatures


@dataclass(frozen=True)
class Features:
    """What leaves the last norm, before the head.

    Attributes:
        head: The head.
        bases: The base streams (b, t, d).
        paths: What is each path's.
        read: One base stream as it lies in memory: how a bias is added depends on that.
    """

    head: Any
    bases: tuple[Tensor, ...]
    paths: tuple[PathFeatures, ...]
    read: Tensor

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
        path = side.path
        return self.head.capped_in_place(
            side.logits if path.blocks is None else path.blocks(side.logits, own_memory(path.up))
        )

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
    """What a router knows of each token.

    Attributes:
        likelihoods: Log-probability of the token on each path (b, t, k), float32; 0 where nothing was before it. None
            for a router that reads no tokens.
        before: Log weights of the paths after the tokens of earlier calls (b, k), or None where there were none.
        restarts: Where a sequence begins and where padding stands (b, t).
        observed: What the router reads in the logits at each position (b, t); see `Router.sides`.
        paths: How many are weighed, k.
    """

    likelihoods: Tensor | None
    before: Tensor | None
    restarts: Tensor
    observed: Tensor | None
    paths: int


class TokenScores(NamedTuple):
    """What routing made of each token but the first; natural logarithms.

    Attributes:
        base: Log-probability of the token under the base model (b, t - 1).
        sides: The same under what the router weighs, a path each (b, t - 1, k).
        weights: Weight of each where the token is predicted (b, t - 1, k); they sum to 1.
        routed: Log-probability of the token under the routed output (b, t - 1).
        observed: What the router read in the logits there (b, t - 1), or None; see `Router.sides`.
    """

    base: Tensor
    sides: Tensor
    weights: Tensor
    routed: Tensor
    observed: Tensor | None


class Router:
    """What makes one set of logits of several paths.

    Attributes:
        reads_tokens: Whether it weighs paths by how they predicted the tokens read; it then has a state in the cache.
        is_hard: Whether it gives all weight to one path, whose logits then come out as they are.
    """

    reads_tokens: ClassVar[bool] = True
    is_hard: ClassVar[bool] = False

    def paths(self, expansions: tuple[str, ...]) -> tuple[Path, ...]:
        """The paths that run."""
        return (BASE, *(Path(name) for name in expansions))

    @classmethod
    def defaults(cls, expansions: int) -> dict[str, Any]:
        """Numbers that it has for so many expansions where none are given."""
        return {}

    def problems(self, expansions: int) -> list[str]:
        """What is wrong with its numbers for so many expansions."""
        return []

    def sides(self, features: Features) -> tuple[list[Side], Tensor | None]:
        """What is weighed, and what is read in logits to weigh it (b, t), or None."""
        return features.sides(), None

    def read(self, features: Features) -> tuple[list[Tensor], Tensor | None]:
        """The same, with logits of each path (b, t, v)."""
        sides, observed = self.sides(features)
        return [features.whole(side) for side in sides], observed

    def weights(self, evidence: Evidence) -> Tensor:
        """Log weights of the paths after each token (b, t, k), float32."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """Its numbers, as config.json keeps them."""
        name = next(name for name, kind in ROUTERS.items() if type(self) is kind)
        return {"router": name} | {key: list(own) if isinstance(own, tuple) else own for key, own in vars(self).items()}


@dataclass(frozen=True)
class PosteriorRouter(Router):
    """The Bayes mixture of all paths; see the module.

    Attributes:
        prior: Weight of the base and of each expansion at the start of a text; they sum to 1.
        switch_rate: Share of its weight that each path gives to the others at every token.
    """

    prior: tuple[float, ...]
    switch_rate: float = 0.01

    @classmethod
    def defaults(cls, expansions: int) -> dict[str, Any]:
        return {"prior": (1 / (1 + expansions),) * (1 + expansions)}

    def problems(self, expansions: int) -> list[str]:
        found = []
        is_whole = len(self.prior) == 1 + expansions and abs(sum(self.prior) - 1) < 1e-6
        if not is_whole or not all(own > 0 for own in self.prior):
            found.append(
                f"prior: is {list(self.prior)}, expected {1 + expansions} positive weights of sum 1, the base's first."
            )
        if not 0 <= self.switch_rate < 1:
            found.append(f"switch_rate: is {self.switch_rate!r}, expected a share of at least 0 and less than 1.")
        return found

    def weights(self, evidence: Evidence) -> Tensor:
        known, before = evidence.likelihoods, evidence.before
        prior = torch.tensor(self.prior, dtype=torch.float32, device=known.device).log()
        if known.shape[-1] > 2:
            before = prior.expand(len(known), -1) if before is None else before
            return follow_paths(before, known, evidence.restarts, prior, self.switch_rate)
        # all prefixes at once: a text may be long where it is trained on
        odds = None if before is None else before[:, 0] - before[:, 1]
        gain = known[..., 0] - known[..., 1]
        odds = follow(odds, gain, evidence.restarts, self.prior[0], self.switch_rate)
        return torch.nn.functional.logsigmoid(torch.stack((odds, -odds), -1))


@dataclass(frozen=True)
class CosineRouter(Router):
    """The paper's router, on the base part of the logits; see the module.

    Attributes:
        threshold: Cosine above which a token takes the preserve path.
        strict: Whether that is the base model alone, without an up stream of its own.
    """

    reads_tokens: ClassVar[bool] = False
    is_hard: ClassVar[bool] = True
    threshold: float
    strict: bool = False

    def paths(self, expansions: tuple[str, ...]) -> tuple[Path, ...]:
        return tuple(own for name in expansions for own in (BASE if self.strict else Path(name, False), Path(name)))

    def problems(self, expansions: int) -> list[str]:
        found = [] if expansions == 1 else [f"cosine: decides between the base and one expansion, not {expansions}."]
        if not -1 <= self.threshold <= 1:
            found.append(f"threshold: is {self.threshold!r}, expected a cosine, from -1 to 1.")
        return found

    def sides(self, features: Features) -> tuple[list[Side], Tensor | None]:
        bases = features.base_logits()
        with torch.no_grad():
            observed = cosines(bases[0].detach(), bases[-1].detach())
        if self.strict:
            return features.sides(bases), observed
        preserve, adapt = features.paths
        z_p, z_a = bases[0], bases[-1]
        if z_a.requires_grad or z_p is z_a:
            mean, z_a = (z_p + z_a) / 2, z_a.clone()
        else:
            # logits are large
            mean = z_p.add_(z_a).div_(2)
        return [Side(mean, preserve), Side(z_a, adapt)], observed

    def weights(self, evidence: Evidence) -> Tensor:
        is_adapt = evidence.observed <= self.threshold
        return torch.stack((~is_adapt, is_adapt), -1).float().log()


ROUTERS: dict[str, type] = {"posterior": PosteriorRouter, "cosine": CosineRouter}


def make_router(settings: dict[str, Any], expansions: int, source: str = "") -> Router:
    """Make the router that settings name, the posterior one where they name none.

    Args:
        settings: `router`, and its numbers.
        expansions: How many expansions it weighs beside the base.
        source: Where the settings are from, if not from a call.

    Raises:
        ValueError: If there is no such router, or one of its numbers is out of range.
    """
    numbers = {key: tuple(own) if isinstance(own, list) else own for key, own in settings.items() if key != "router"}
    try:
        kind = ROUTERS[settings.get("router", "posterior")]
        router = kind(**kind.defaults(expansions) | numbers)
        problems = router.problems(expansions)
    except (KeyError, TypeError) as error:
        advice = "Was it made by another release, or by hand?" if source else "Leave out what it does not have."
        raise ValueError(
            f"{source or 'router:'} is {settings}, expected one of {', '.join(ROUTERS)} with its numbers ({error}). "
            + advice
        ) from error
    if problems:
        raise ValueError("\n".join(f"{source}.{line}" if source else line for line in problems))
    return router


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
