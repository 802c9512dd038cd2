"""State of a router that reads tokens, and what it needs to know of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, DynamicLayer

from .expanded_releases import count_tokens, find_cache


class RouterState(DynamicLayer):
    """State of a router, as one more layer of the KV cache, which reorders and crops it.

    `keys` are the log-probabilities of every possible next token on each path at the last positions (b, k, positions,
    v), `values` the log weights there (b, k, positions, 1). Without positions the state is empty.
    """

    def __init__(self, first: DynamicLayer) -> None:
        super().__init__()
        self.first, self.seen = first, 0
        # masks are made by the first sliding layer and by the first that is not: this must never be either;
        # and they are left out where not all layers are of a fixed size
        self.is_sliding, self.is_compileable = getattr(first, "is_sliding", False), first.is_compileable

    @property
    def max_batch_size(self) -> int:
        """Rows of the cache: before transformers 5.13 one with a fixed size asks every layer."""
        return self.first.max_batch_size

    @property
    def max_cache_len(self) -> int:
        """Tokens that the cache has room for, which such a cache asks too."""
        return self.first.max_cache_len

    def prefetch(self) -> None:
        """An offloaded cache fetches the layer after the last of the model, and means the first."""
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
        """Return how many tokens were read: a cache of state-space layers alone asks the first layer that counts."""
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized, self.seen = False, 0


def state_of(cache: Cache | None) -> RouterState | None:
    """The router's state in a KV cache, or None."""
    layers = getattr(cache, "layers", [])
    return next((layer for layer in layers if isinstance(layer, RouterState)), None)


@dataclass
class RouterCall:
    """What a router knows of a call beside the features."""

    ids: Tensor | None  # token ids (b, t), or None
    restarts: Tensor  # where a sequence begins and where padding stands (b, t)
    state: RouterState | None  # state after the tokens before, or None where there are none
    keep: slice | Tensor  # positions whose logits are wanted
    is_cached: bool = True  # whether there will be a KV cache to remember the state in
    result: tuple[Tensor, Tensor] | None = None  # state after the last token, made by a router that reads tokens

    @classmethod
    def of(cls, inputs: dict[str, Any], keep: int | Tensor, *, reads_tokens: bool, is_training: bool) -> RouterCall:
        """Take what a router needs from the arguments of a forward.

        Args:
            inputs: Arguments of the forward without `logits_to_keep`: the router reads every position.
            keep: `logits_to_keep`.
            reads_tokens: Whether the router weighs paths by the tokens.
            is_training: Whether the model trains.

        Raises:
            ValueError: If there are no ids to read, the cache holds tokens that this router has not read, or a text is
                to go on and no cache holds its beginning.
        """
        ids, cache = inputs.get("input_ids"), find_cache(inputs)
        if ids is None and reads_tokens:
            raise ValueError("inputs_embeds: the router scores tokens, expected input_ids.")
        past = count_tokens(cache)
        state = state_of(cache) if past else None
        if past and reads_tokens and (state is None or state.seen != past or not state.keys.shape[-2]):
            raise ValueError(
                f"The KV cache holds {past} tokens that this router has not read, or from which more were taken back "
                "than it remembers, expected a cache that it filled itself. Begin with an empty one."
            )
        like = inputs["inputs_embeds"] if ids is None else ids
        mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
        if reads_tokens and not past and goes_on(mask, places, like.shape[1]):
            raise ValueError(
                "The text goes on (its attention mask is longer than input_ids, or its first position is not 0), and "
                "no KV cache holds the router's state for its beginning. Give the whole text, or the cache that the "
                f"model filled. transformers {transformers.__version__} may name the cache in a way that this code "
                "does not know; scale-surgery verify FOLDER checks it."
            )
        restarts = find_restarts(mask, places, past, like)
        positions = slice(-keep or None, None) if isinstance(keep, int) else keep
        is_cached = cache is not None or not (is_training or inputs.get("use_cache") is False)
        return cls(ids, restarts, state, positions, is_cached)

    def move(self, device: torch.device) -> None:
        """Move ids and restarts to the head's device: a model may lie on several."""
        self.ids = None if self.ids is None else self.ids.to(device)
        self.restarts = self.restarts.to(device)

    def remember(self, cache: Cache | None) -> None:
        """Put the router's state into the KV cache, as one more layer."""
        if self.result is None or not getattr(cache, "layers", None):
            return
        if state_of(cache) is None:
            cache.layers.append(RouterState(cache.layers[0]))
        state = state_of(cache)
        # however an older cache was emptied, its next text begins anew
        state.seen = 0 if self.state is None else state.seen
        state.set(*self.result, tokens=self.ids.shape[1])


def goes_on(mask: Tensor | None, positions: Tensor | None, length: int) -> bool:
    """Return whether tokens came before those of a call that has no KV cache.

    Args:
        mask: 2-dimensional attention mask (b, earlier tokens + t) or None; any other mask is not read.
        positions: Position ids (b or 1, t) or None.
        length: Tokens of the call, t.
    """
    is_read = isinstance(mask, Tensor) and mask.dim() == 2
    if is_read and mask.shape[1] > length:
        return True
    # a graph cannot ask for values
    if positions is None or positions.dim() != 2 or positions.is_meta or is_compiling():
        return False
    # padding may have any position; where no mask says what it is, transformers 4 gives it the position 1
    starts = positions[:, 0] * (mask[:, 0] != 0) if is_read else positions[:, 0]
    return bool((starts > 1).any())


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
