"""What a composed model is for now: a choice of expansions, what it asks of a call, and what of it a KV cache keeps.

This file needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .expanded_posterior import Features, PathMixture, PathState
from .expanded_routing import Tokens, find_restarts, state_of

# names that an error shows
MOST_NAMED = 5


class Choice(NamedTuple):
    """What the model is for now.

    Attributes:
        names: Expansions that take part; none for the base.
        mixture: The router over the base and these, or None.
        rows: The expansion of each row of a batch, None for the base's; empty where all rows are alike.
    """

    names: tuple[str, ...] = ()
    mixture: PathMixture | None = None
    rows: tuple[str | None, ...] = ()

    @property
    def is_composed(self) -> bool:
        """Whether several paths run side by side."""
        return self.mixture is not None or bool(self.rows)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a KV cache belongs to."""
        return self.names, self.is_composed, self.mixture


def tokens_of(inputs: dict[str, Any], choice: Choice, *, is_training: bool) -> Tokens:
    """What a mixture must know of a call; every position is handed to the head, because it reads all of them."""
    ids, cache, keep = inputs.get("input_ids"), inputs.get("past_key_values"), inputs.pop("logits_to_keep", 0)
    if ids is None and choice.mixture is not None:
        raise ValueError("inputs_embeds: the mixture scores tokens, expected input_ids.")
    past = 0 if cache is None else int(cache.get_seq_length())
    state = state_of(cache) if past else None
    if past and choice.mixture is not None and (state is None or state.seen != past or not state.keys.shape[-2]):
        raise ValueError(forgotten(past))
    like = inputs["inputs_embeds"] if ids is None else ids
    restarts = find_restarts(inputs.get("attention_mask"), inputs.get("position_ids"), past, like)
    kept = slice(-keep or None, None) if isinstance(keep, int) else keep
    is_cached = cache is not None or not (is_training or inputs.get("use_cache") is False)
    return Tokens(ids, restarts, state, kept, is_cached)


def forgotten(past: int) -> str:
    """What is wrong with a KV cache of so many tokens where the mixture's state is of others."""
    return (
        f"past_key_values: holds {past} tokens that this mixture has not read, or from which more were taken back "
        "than it remembers, expected a cache that it filled itself. Begin with an empty one."
    )


def check_rows(rows: Sequence[str | None] | None, inputs: dict[str, Any]) -> None:
    """Refuse another number of names than of rows."""
    read = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if rows is not None and read is not None and len(rows) != len(read) and not isinstance(rows, str):
        raise ValueError(
            f"expansion_names: {len(rows)} names for {len(read)} rows, expected one for each, None for the base."
        )


def by_row(paths: Features, choice: Choice) -> Tensor:
    """Logits of each row's own path; beams of one row lie one after the other."""
    batch, rows = len(paths.streams[0][0]), len(choice.rows)
    if batch % rows:
        raise ValueError(f"expansion_names: {rows} names for {batch} rows, expected one for each, None for the base.")
    numbers = [0 if name is None else 1 + choice.names.index(name) for name in choice.rows]
    chosen = torch.tensor(numbers, device=paths.streams[0][0].device).repeat_interleave(batch // rows)[:, None, None]
    found, *others = paths.logits()
    for number, logits in enumerate(others, 1):
        found = torch.where(chosen == number, logits, found)
    return found


def number_problems(switch_rate: float, prune: float, lag: int) -> list[str]:
    """Numbers of a router that make no sense."""
    problems = [
        f"{name}: is {own!r}, expected a share of at least 0 and less than 1."
        for name, own in {"switch_rate": switch_rate, "prune": prune}.items()
        if not isinstance(own, int | float) or not 0 <= own < 1
    ]
    if not isinstance(lag, int) or lag < 1:
        problems += [f"lag: is {lag!r}, expected a whole number of at least 1."]
    return problems


def make_mixture(paths: int, prior: Sequence[float] | None, switch_rate: float, prune: float, lag: int) -> PathMixture:
    """The router over so many paths."""
    weights = (1 / paths,) * paths if prior is None else tuple(float(own) for own in prior)
    problems = number_problems(switch_rate, prune, lag)
    if len(weights) != paths or not all(own > 0 for own in weights) or abs(sum(weights) - 1) > 1e-6:
        said = f"prior: is {list(weights)}, expected {paths} positive weights of sum 1, the base's first."
        problems = [said, *problems]
    if problems:
        raise ValueError("\n".join(problems))
    return PathMixture(weights, switch_rate, prune, lag)


def unknown_name(name: str, known: list[str]) -> str:
    """What is wrong with a name that no expansion has; the nearest ones, or all."""
    near = get_close_matches(name, known, 3, 0.5) or known[:MOST_NAMED]
    return f"{name}: is no expansion of this model, expected {' or '.join(near) or 'none, it has none yet'}."


def cache_of(output: Any) -> Cache | None:
    """The KV cache that a forward gave out."""
    found = output.values() if hasattr(output, "values") else output
    return next((value for value in found if isinstance(value, Cache)), None)


def check_cache(cache: Cache | None, choice: Choice) -> None:
    """Refuse a KV cache that was filled under another choice: it holds other heads, or other values."""
    past = 0 if cache is None else int(cache.get_seq_length())
    if past and getattr(cache, "expansion_choice", Choice().key) != choice.key:
        raise ValueError(
            f"past_key_values: holds {past} tokens that were read under another choice of expansions than "
            f"{', '.join(choice.names) or 'none'}. Begin with an empty one."
        )


def remember(tokens: Tokens, cache: Cache | None, output: Any) -> None:
    """Put the mixture's state into the KV cache, as one more layer."""
    cache = cache_of(output) if cache is None else cache
    if not getattr(cache, "layers", None):
        return
    if state_of(cache) is None:
        cache.layers.append(PathState(cache.layers[0]))
    state = state_of(cache)
    # however an older cache was emptied, its next text begins anew
    state.seen = 0 if tokens.state is None else state.seen
    state.set(*tokens.result, tokens=tokens.ids.shape[1])
