"""Routers: from the features of both paths to one set of logits, token by token.

    Z_p, Z_a     logits of the base stream on the preserve path and on the adapt path (Z_p are the base model's)
    Z_up         what the up stream adds to the logits of its path

cosine      if cos(Z_p, Z_a) > threshold: (Z_p + Z_a) / 2 + Z_up_p, else Z_a + Z_up_a  (SCALE, arXiv 2511.03270, eq. 5);
            strict: Z_p alone instead of the first
posterior   log(w p_P + (1 - w) p_A), where w is the posterior probability that the preserve path explains the tokens
            read so far: log odds += log p_P(y) - log p_A(y) for each token y, mixed with a fixed-share rate
            (Herbster and Warmuth 1998); p_P = softmax(Z_p), p_A = softmax(Z_a + Z_up_a)

This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .expanded_mixture import Mixture, chosen, cosines, follow, in_chunks, mix, normalizers, row_chunks
from .expanded_streams import own_memory

# logits that are made only to score tokens at a time: fewer rows make a matrix product slow
SCORED_AT_ONCE = 2**24
# positions of one call to which assisted generation may go back
MOST_KEPT = 64
# log odds beyond this change no probability that float32 can tell from 0 or 1
MOST_LOG_ODDS = 60.0


class TokenScores(NamedTuple):
    """What routing made of each token but the first; all (b, t - 1), natural logarithms.

    Attributes:
        base: Log-probability of the token under the base model.
        preserve: The same under what the router gives out on the preserve side.
        adapt: The same under the adapt path.
        routed: The same under the routed output.
        cosine: cos(Z_p, Z_a) where the token is predicted.
        weight: Weight of the adapt path there, from 0 to 1; 0 or 1 for a decision.
    """

    base: Tensor
    preserve: Tensor
    adapt: Tensor
    routed: Tensor
    cosine: Tensor
    weight: Tensor


class RouterState(DynamicLayer):
    """What the posterior router remembers, as one more layer of the KV cache, which reorders and crops it.

    `keys` are log p_P - log p_A of every possible next token at the last positions (b, 1, positions, v), `values` the
    log odds there (b, 1, positions, 1). Without a position it knows nothing.
    """

    def __init__(self, first: DynamicLayer) -> None:
        super().__init__()
        self.first, self.seen = first, 0
        # masks are made by the first sliding layer and by the first that is not: this must never be either;
        # and they are left out where not all layers are of a fixed size
        self.is_sliding, self.is_compileable = getattr(first, "is_sliding", False), first.is_compileable

    def prefetch(self) -> None:
        """An offloaded cache fetches the layer after the last of the model, and means the first."""
        self.first.prefetch()

    def set(self, evidence: Tensor, odds: Tensor, tokens: int) -> None:
        """Remember the state after so many more tokens."""
        self.keys, self.values = evidence.unsqueeze(1), odds[:, None, :, None]
        self.dtype, self.device, self.is_initialized = evidence.dtype, evidence.device, True
        self.seen += tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; before transformers 5 the argument is a positive number of tokens to keep."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if removed and self.is_initialized:
            kept = max(0, self.keys.shape[-2] - removed)
            self.keys, self.values = self.keys[..., :kept, :], self.values[..., :kept, :]
            self.seen -= removed

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized, self.seen = False, 0


def state_of(cache: Cache | None) -> RouterState | None:
    """The router's state in a KV cache, or None."""
    layers = getattr(cache, "layers", [])
    return next((layer for layer in layers if isinstance(layer, RouterState)), None)


@dataclass
class Tokens:
    """What a router must know of a call beside the features.

    Attributes:
        ids: Token ids (b, t), or None.
        restarts: Where a sequence begins and where padding stands (b, t).
        state: State after the tokens before, or None where there are none.
        keep: Positions whose logits are wanted.
        is_cached: Whether there will be a KV cache to remember the state in.
        result: State after the last token, made by the posterior router.
    """

    ids: Tensor | None
    restarts: Tensor
    state: RouterState | None
    keep: slice | Tensor
    is_cached: bool = True
    result: tuple[Tensor, Tensor] | None = None

    def move(self, device: torch.device) -> None:
        """Bring what is read to the head's device: a model may lie on several."""
        self.ids = None if self.ids is None else self.ids.to(device)
        self.restarts = self.restarts.to(device)


def find_restarts(mask: Tensor | None, positions: Tensor | None, past: int, like: Tensor) -> Tensor:
    """Find where a sequence begins and where padding stands: there the router knows nothing of what came before.

    Args:
        mask: 2-dimensional attention mask (b, past + t) or None; any other mask is not read.
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
    if isinstance(mask, Tensor) and mask.dim() == 2:
        padded = torch.nn.functional.pad(mask == 0, (1, 0), value=False)
        restarts |= padded[:, -length:] | padded[:, -length - 1 : -1]
    if past == 0:
        restarts[:, 0] = True
    return restarts


@dataclass(frozen=True)
class Paths:
    """Features of both paths before the head, each (..., d + u); one tensor twice where the paths do not part."""

    head: Any
    preserve: Tensor
    adapt: Tensor

    @classmethod
    def of(cls, head: Any, features: Tensor, *, is_forked: bool) -> Paths:
        """Split what leaves the last norm."""
        return cls(head, *(features.chunk(2) if is_forked else (features, features)))

    def at(self, keep: Any) -> Paths:
        """The same at some positions (b, positions, d + u)."""
        if isinstance(keep, slice) and keep == slice(None):
            return self
        # one copy, so that paths that are one stay one
        preserve = self.preserve[:, keep]
        return Paths(self.head, preserve, preserve if self.adapt is self.preserve else self.adapt[:, keep])

    def chunks(self, width: int) -> Iterator[Paths]:
        """The same, some positions at a time, in order; each (1, positions, d + u)."""
        preserve, adapt = (path.flatten(0, -2)[None] for path in (self.preserve, self.adapt))
        whole = Paths(self.head, preserve, preserve if self.adapt is self.preserve else adapt)
        return (whole.at(rows) for rows in in_chunks(preserve.shape[1], width, SCORED_AT_ONCE))

    def base_logits(self) -> tuple[Tensor, Tensor]:
        """Z_p and Z_a, by the stock head, in memory of their own."""
        width = self.head.base_in
        z_p = self.head.base_logits(own_memory(self.preserve[..., :width].detach()), self.preserve)
        if self.adapt is self.preserve:
            return z_p, z_p.clone()
        return z_p, self.head.base_logits(own_memory(self.adapt[..., :width]), self.adapt)

    def lead(self, ids: Tensor) -> Tensor:
        """Evidence log p_P - log p_A of one token a position; the logits of one path after those of the other."""
        width = self.head.base_in
        logits = self.head.forward_stock(own_memory(self.preserve[..., :width].detach()))
        if self.adapt is self.preserve:
            ahead = chosen(self.head.capped(logits), ids)
        else:
            ahead = chosen(self.head.capped_in_place(logits), ids)
            del logits
            logits = self.head.forward_stock(own_memory(self.adapt[..., :width]))
        return ahead - chosen(self.head.capped_in_place(self.head.add_up(logits, self.up()[1])), ids)

    def up(self) -> tuple[Tensor, Tensor]:
        """Up streams of both paths."""
        width = self.head.base_in
        return own_memory(self.preserve[..., width:]), own_memory(self.adapt[..., width:])

    def logits(self) -> tuple[Tensor, Tensor]:
        """What each path alone gives out: the base model's logits, and those of the model that does not route."""
        z_p, z_a = self.base_logits()
        return self.head.capped_in_place(z_p), self.head.capped_in_place(self.head.add_up(z_a, self.up()[1]))


@dataclass(frozen=True)
class CosineRouter:
    """The paper's router, on the base part of the logits; see the module."""

    threshold: float
    strict: bool
    needs_ids = False

    def logits(self, paths: Paths, tokens: Tokens) -> Tensor:
        """Routed logits (b, kept, v); no gradient passes through the decision."""
        kept = paths.at(tokens.keep)
        z_p, z_a = kept.base_logits()
        is_preserve = (cosines(z_p.detach(), z_a.detach()) > self.threshold)[..., None]
        up_p, up_a = kept.up()
        if self.strict:
            return kept.head.capped_in_place(_where(is_preserve, z_p, kept.head.add_up(z_a, up_a)))
        mean = (z_p + z_a) / 2 if z_a.requires_grad else z_p.add_(z_a).div_(2)
        return kept.head.capped_in_place(
            kept.head.add_up(_where(is_preserve, mean, z_a), torch.where(is_preserve, up_p, up_a))
        )

    def preserve_side(self, paths: Paths, z_p: Tensor, z_a: Tensor) -> Tensor:
        """What the router gives out where it takes the preserve path."""
        return z_p if self.strict else paths.head.add_up((z_p + z_a) / 2, paths.up()[0])

    def weigh(self, scores: TokenScores, tokens: Tokens) -> TokenScores:
        """Decide for each token that was scored on both sides."""
        is_adapt = scores.cosine <= self.threshold
        routed = torch.where(is_adapt, scores.adapt, scores.preserve)
        return scores._replace(routed=routed, weight=is_adapt.to(routed.dtype))


@dataclass(frozen=True)
class PosteriorRouter:
    """The Bayes mixture of both paths; see the module."""

    prior: float
    switch_rate: float
    strict = True
    needs_ids = True

    def logits(self, paths: Paths, tokens: Tokens) -> Tensor:
        """Logits of the mixture (b, kept, v); no gradient passes through the weights."""
        kept = paths.at(tokens.keep)
        z_p, z_a = kept.logits()
        with torch.no_grad():
            norms = normalizers(z_p), normalizers(z_a)
            odds = self.odds(self.evidence(paths, kept, (z_p, z_a), norms, tokens), tokens)
            self.remember(paths, (z_p, z_a), norms, odds, tokens)
            shift = norms[0] - norms[1]
            wanted = odds[:, tokens.keep].clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        return Mixture.apply(z_p, z_a, shift, wanted, norms[1]) if z_a.requires_grad else mix(z_p, z_a, shift, wanted)

    def evidence(
        self, paths: Paths, kept: Paths, logits: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], tokens: Tokens
    ) -> Tensor:
        """Evidence log p_P - log p_A of each token but the first of the call (b, t - 1)."""
        following = tokens.ids[:, 1:, None]
        if kept is paths:
            found = [
                own[:, :-1].gather(-1, following)[..., 0].float() - norm[:, :-1]
                for own, norm in zip(logits, norms, strict=True)
            ]
            return found[0] - found[1]
        # a prompt is scored some positions at a time, so its logits never stand in memory together
        earlier, ids = paths.at(slice(None, -1)), following.reshape(1, -1)
        found, start = [logits[0].new_zeros(1, 0, dtype=torch.float32)], 0
        for part in earlier.chunks(logits[0].shape[-1]) if ids.shape[1] else ():
            found.append(part.lead(ids[:, start : start + part.preserve.shape[1]]))
            start += part.preserve.shape[1]
        return torch.cat(found, 1).view(following.shape[:2])

    def odds(self, evidence: Tensor, tokens: Tokens) -> Tensor:
        """Log odds of the preserve path after each token of the call (b, t)."""
        state = tokens.state
        if state is None:
            first, before = evidence.new_zeros(len(tokens.ids), 1), None
        else:
            first, before = state.keys[:, 0, -1].gather(-1, tokens.ids[:, :1]), state.values[:, 0, -1, 0]
        return follow(before, torch.cat((first, evidence), 1), tokens.restarts, self.prior, self.switch_rate)

    def remember(
        self, paths: Paths, logits: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], odds: Tensor, tokens: Tokens
    ) -> None:
        """Note the state after the last token; where generation asks for several, it may take some of them back."""
        if not tokens.is_cached:
            return
        z_p, z_a = logits
        if isinstance(tokens.keep, Tensor):
            z_p, z_a = paths.at(slice(-1, None)).logits()
            norms = normalizers(z_p), normalizers(z_a)
        kept = 1 if tokens.keep == slice(None) else min(z_p.shape[1], MOST_KEPT)
        one, other = (
            own[:, -kept:].float() - norm[:, -kept:, None] for own, norm in zip((z_p, z_a), norms, strict=True)
        )
        tokens.result = one - other, odds[:, -kept:]

    def preserve_side(self, paths: Paths, z_p: Tensor, z_a: Tensor) -> Tensor:
        """What the router gives out where it takes the preserve path."""
        return z_p

    def weigh(self, scores: TokenScores, tokens: Tokens) -> TokenScores:
        """Mix what was scored on both sides."""
        odds = self.odds(scores.base - scores.adapt, tokens)[:, :-1]
        log_w, log_rest = torch.nn.functional.logsigmoid(odds), torch.nn.functional.logsigmoid(-odds)
        routed = torch.logaddexp(log_w + scores.base, log_rest + scores.adapt)
        return scores._replace(routed=routed, weight=torch.sigmoid(-odds))


def _where(is_preserve: Tensor, z_p: Tensor, z_a: Tensor) -> Tensor:
    """Rows of z_p or of z_a; in the memory of z_a where nothing trains."""
    if z_a.requires_grad:
        return torch.where(is_preserve, z_p, z_a)
    flat, own, mask = z_a.flatten(0, -2), z_p.flatten(0, -2), is_preserve.flatten(0, -2)
    for rows in row_chunks(flat):
        flat[rows] = torch.where(mask[rows], own[rows], flat[rows])
    return z_a


def score_tokens(router: CosineRouter | PosteriorRouter, paths: Paths, tokens: Tokens) -> TokenScores:
    """Score each token but the first on both sides; see `TokenScores`."""
    following, start = tokens.ids[:, 1:], 0
    columns = [[paths.preserve.new_zeros(1, 0, dtype=torch.float32)] for _ in range(4)]
    flat = following.reshape(1, -1)
    for part in paths.at(slice(None, -1)).chunks(paths.head.weight.shape[0]) if flat.shape[1] else ():
        z_p, z_a = part.base_logits()
        ids = flat[:, start : start + z_p.shape[1]]
        start += z_p.shape[1]
        side = router.preserve_side(part, z_p, z_a)
        columns[3].append(cosines(z_p, z_a))
        adapt = part.head.add_up(z_a, part.up()[1])
        for column, logits in zip(columns, (z_p, side, adapt), strict=False):
            column.append(chosen(part.head.capped(logits), ids))
    base, preserve, adapt, cosine = (torch.cat(column, 1).view_as(following) for column in columns)
    return router.weigh(TokenScores(base, preserve, adapt, base, cosine, base), tokens)


def make_router(settings: dict[str, Any]) -> CosineRouter | PosteriorRouter:
    """Make the router that config.json names.

    Raises:
        ValueError: If there is no such router, or one of its numbers is out of range.
    """
    try:
        router, is_strict = settings["router"], settings["strict"]
        is_consistent = is_strict is not settings["keeps_up"] and (is_strict or router == "cosine")
        if is_consistent and router == "cosine" and -1 <= settings["threshold"] <= 1:
            return CosineRouter(settings["threshold"], is_strict)
        if is_consistent and router == "posterior" and 0 < settings["prior"] < 1 and 0 <= settings["switch_rate"] < 1:
            return PosteriorRouter(settings["prior"], settings["switch_rate"])
    except (KeyError, TypeError):
        pass  # what is missing or of another kind is said below
    known = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    raise ValueError(
        f"config.json: scale_surgery.routing is {known}, expected router cosine with a threshold in [-1, 1], or "
        "posterior with a prior in (0, 1) and a switch_rate in [0, 1). Was it made by another release, or by hand?"
    )
