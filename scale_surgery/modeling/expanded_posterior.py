"""The posterior mixture of K + 1 paths: the base and K expansions of it, weighed by how well each predicted the text.

    v_k(t) ∝ w_k(t) p_k(y_t),   w_k(t+1) = (1 - r) v_k(t) + (r / K) Σ_{j≠k} v_j(t),   output Σ_k w_k p_k

Bayes' mixture with fixed share (Herbster and Warmuth 1998). With r = 0 and a uniform prior no text loses more than
ln(K + 1) nats against the best path for it. Two paths, K = 1, are what `PosteriorRouter` mixes.
This file needs only torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expanded_mixture import chosen, in_chunks, normalizers, row_chunks
from .expanded_routing import MOST_KEPT, RouterState, Tokens
from .expanded_streams import own_memory

# logits of one path that stand in memory at a time: fewer rows make a matrix product slow
AT_ONCE = 2**22
# tokens that a path may not have read: at once they take far less time than one by one
LAG = 32


@dataclass(frozen=True)
class Features:
    """What leaves the last norm of each path, before the head.

    Attributes:
        heads: The head of the base, and that of each expansion, on the same weight.
        streams: Base stream and up stream of each path (b, t, ...); paths that share the base stream have one tensor.
        read: One path's features as they lie in memory (b, t, ...): how a bias is added depends on that.
        softcap: What the logits of each path are capped with, or None.
    """

    heads: tuple[Any, ...]
    streams: tuple[tuple[Tensor, Tensor], ...]
    read: Tensor
    softcap: float | None = None

    def at(self, keep: slice | Tensor) -> Features:
        """The same at some positions."""
        if isinstance(keep, slice) and keep == slice(None):
            return self
        bases = {id(base): base[:, keep] for base, _ in self.streams}
        streams = ((bases[id(base)], up[:, keep]) for base, up in self.streams)
        return Features(self.heads, tuple(streams), self.read[:, keep], self.softcap)

    def logits(self) -> Iterator[Tensor]:
        """Logits of each path alone, one after the other, in memory of their own (b, t, v); all read one base once."""
        first = self.streams[0][0]
        shared = self.heads[0].base_logits(own_memory(first), self.read)
        for head, (base, up) in zip(self.heads, self.streams, strict=True):
            logits = shared.clone() if base is first else head.base_logits(own_memory(base), self.read)
            yield self.capped(head.add_up(logits, own_memory(up)) if up.shape[-1] else logits)

    def capped(self, logits: Tensor) -> Tensor:
        """Cap logits as the stock model does."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


def follow_paths(before: Tensor, evidence: Tensor, restarts: Tensor, prior: Tensor, rate: float) -> Tensor:
    """Log weights of all paths after each token.

    Each token multiplies the weights by its likelihoods, and then by the shares; a restart sets them to the prior. One
    token is taken after the other: products of all prefixes at once, as for two paths, grow with the third power of
    the number of paths.

    Args:
        before: Log weights before the first token (b, k).
        evidence: log p(y) of each token on each path (b, t, k), float32.
        restarts: Where a sequence begins (b, t).
        prior: Log weights at a start (k,).
        rate: Fixed-share rate.

    Returns:
        Log weights (b, t, k), float32, normalised.
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


def mix_paths(logits: list[Tensor], shifts: list[Tensor]) -> Tensor:
    """Logarithm of the mixture: log Σ_k exp(logits_k + shift_k), with logits (..., v) and shifts (...), float32.

    Args:
        logits: Logits of each path.
        shifts: Log weight of each path, less the log sum exp of its logits.

    Returns:
        Log-probabilities, in the dtype of the logits.
    """
    flat, added = [own.flatten(0, -2) for own in logits], [own.flatten() for own in shifts]
    found = []
    for rows in row_chunks(flat[0]):
        whole = torch.stack([own[rows].float() + shift[rows, None] for own, shift in zip(flat, added, strict=True)])
        found.append(whole.logsumexp(0).to(logits[0].dtype))
    return torch.cat(found).view_as(logits[0])


class PathState(RouterState):
    """What the mixture remembers, as one more layer of the KV cache; see `RouterState`.

    `keys` are the log-probabilities of every possible next token on each path at the last positions (b, k, positions,
    v), `values` the log weights there (b, k, positions, 1).
    """

    def set(self, evidence: Tensor, weights: Tensor, tokens: int) -> None:
        """Remember the state after so many more tokens; evidence (b, positions, k, v), weights (b, positions, k, 1)."""
        self.keys, self.values = evidence.transpose(1, 2), weights.transpose(1, 2)
        self.dtype, self.device, self.is_initialized = evidence.dtype, evidence.device, True
        self.seen += tokens

    def among(self, numbers: list[int]) -> PathState:
        """State of a mixture of some of the paths."""
        found, weights = PathState(self.first), self.values[:, numbers, :, :1]
        found.set(self.keys[:, numbers].transpose(1, 2), weights.log_softmax(1).transpose(1, 2), self.seen)
        return found


class PathScores(NamedTuple):
    """What the mixture made of each token but the first; natural logarithms.

    Attributes:
        paths: Log-probability of the token on each path alone, the base's first (b, t - 1, k), float32.
        weights: Weight of each path where the token is predicted (b, t - 1, k); they sum to 1.
        mixed: Log-probability of the token under the mixture (b, t - 1).
    """

    paths: Tensor
    weights: Tensor
    mixed: Tensor


@dataclass(frozen=True)
class PathMixture:
    """The router over K + 1 paths.

    Attributes:
        prior: Weight of the base and of each expansion at the start of a text.
        switch_rate: Share of its weight that each path gives to the others at every token.
        prune: Weight below which a path is left out while tokens are read one by one; 0 leaves none out.
        lag: Tokens after which paths that are out read what they have not.
    """

    prior: tuple[float, ...]
    switch_rate: float
    prune: float = 0.0
    lag: int = LAG

    def logits(self, paths: Features, tokens: Tokens) -> Tensor:
        """Log-probabilities of the mixture (b, kept, v); no gradient passes through the weights.

        Positions are taken some at a time, in order: the weights at one depend on what was before it alone.
        """
        length, is_slice = tokens.ids.shape[1], isinstance(tokens.keep, slice)
        wanted = range(length)[tokens.keep] if is_slice else range(length)
        # where generation asks for several positions, it may take some of them back
        kept = min(len(wanted), MOST_KEPT) if is_slice and tokens.keep != slice(None) else 1
        run, width = Following(self, tokens, length - kept), len(tokens.ids) * paths.heads[0].weight.shape[0]
        found = [run.mixed(paths, rows, wanted) for rows in in_chunks(length, width, AT_ONCE)]
        tokens.result = (torch.cat(run.evidence, 1), torch.cat(run.weights, 1)) if tokens.is_cached else None
        mixed = torch.cat([own for own in found if own is not None], 1)
        return mixed if is_slice else mixed[:, tokens.keep]

    def score(self, paths: Features, tokens: Tokens) -> PathScores:
        """How each path predicts a text from its beginning, and what weight it has there."""
        following, seen = tokens.ids[:, 1:], paths.at(slice(None, -1))
        width = len(tokens.ids) * paths.heads[0].weight.shape[0]
        none = torch.zeros(len(following), 0, len(self.prior), device=following.device)
        parts = [
            torch.stack([chosen(own, following[:, rows]) for own in seen.at(rows).logits()], -1)
            for rows in in_chunks(following.shape[1], width, AT_ONCE)
        ]
        return self.weigh(torch.cat([none, *parts], 1), tokens.restarts)

    def weigh(self, paths: Tensor, restarts: Tensor) -> PathScores:
        """Weigh paths whose predictions are known.

        Args:
            paths: Log-probability of each token but the first on each path (b, t - 1, k), float32.
            restarts: Where a sequence begins (b, t).
        """
        prior = torch.tensor(self.prior, dtype=torch.float32, device=paths.device).log()
        # nothing predicts the first token, and the last one predicts nothing
        evidence = torch.nn.functional.pad(paths, (0, 0, 1, 0))
        weights = follow_paths(prior.expand(len(paths), -1), evidence, restarts, prior, self.switch_rate)[:, :-1]
        return PathScores(paths, weights.exp(), (paths + weights).logsumexp(-1))


class Following:
    """One call of a mixture as it reads tokens, some positions at a time.

    Attributes:
        evidence: Log-probabilities of every next token at the positions to be remembered (b, some, k, v).
        weights: Log weights there (b, some, k).
    """

    def __init__(self, mixture: PathMixture, tokens: Tokens, remembered: int) -> None:
        self.mixture, self.tokens, self.remembered = mixture, tokens, remembered
        self.evidence: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.prior = torch.tensor(mixture.prior, dtype=torch.float32, device=tokens.ids.device).log()
        state = tokens.state
        prior = self.prior.expand(len(tokens.ids), -1)
        self.before = [prior] * (1 + (mixture.prune > 0)) if state is None else state.values[:, :, -1].unbind(-1)
        self.next = None if state is None else state.keys[:, :, -1]

    def mixed(self, paths: Features, rows: slice, wanted: range) -> Tensor | None:
        """Read the tokens at some positions, and mix where that is wanted; None where it is nowhere."""
        logits = list(paths.at(rows).logits())
        norms = [normalizers(own) for own in logits]
        weights = self.follow(rows, [own.detach() for own in logits], [own.detach() for own in norms])
        inside = slice(max(wanted.start - rows.start, 0), max(wanted.stop - rows.start, 0))
        if not logits[0][:, inside].shape[1]:
            return None
        shifts = [weights[:, inside, path] - norm[:, inside] for path, norm in enumerate(norms)]
        return mix_paths([own[:, inside] for own in logits], shifts)

    def follow(self, rows: slice, logits: list[Tensor], norms: list[Tensor]) -> Tensor:
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
        evidence = torch.cat((first, torch.stack(later, -1)), 1)
        restarts = self.tokens.restarts[:, rows]
        found = [follow_paths(own, evidence, restarts, self.prior, self.mixture.switch_rate) for own in self.before]
        self.remember(rows, logits, norms, torch.stack(found, -1))
        return found[0]

    def remember(self, rows: slice, logits: list[Tensor], norms: list[Tensor], weights: Tensor) -> None:
        """Note what the next positions, and the next call, begin with."""
        kept = slice(min(max(self.remembered - rows.start, 0), weights.shape[1] - 1), None)
        parts = [own[:, kept].float() - norm[:, kept, None] for own, norm in zip(logits, norms, strict=True)]
        evidence = torch.stack(parts, 2)
        self.before, self.next = weights[:, -1].unbind(-1), evidence[:, -1]
        if rows.start + weights.shape[1] > self.remembered:
            self.evidence.append(evidence)
            self.weights.append(weights[:, kept])
