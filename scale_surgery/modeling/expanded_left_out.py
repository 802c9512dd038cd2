"""Paths that are left out of a mixture while they weigh little, and come back when they would weigh more.

Those that are in read token by token. The others owe what was read meanwhile, and read it at once: then their keys and
values are there again, and it is known what every path would weigh had none been out. That says who is in. In the
mixture itself a path comes back with the weight that it went out with, since it predicted nothing meanwhile, as do
experts that sleep (Freund et al. 1997). So with a switch rate of 0 no text loses more against the base, which is never
out, than -ln of its prior; against another path, what that would have won while it was out comes on top.
This file needs only torch and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .expanded_attention import Part
from .expanded_choice import Choice, forgotten
from .expanded_posterior import PathMixture, PathState
from .expanded_routing import state_of

# what a token can be read with once more; with anything else no path is out
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep"}
KNOWN |= {"use_cache", "return_dict"}
# heads of one layer as they lie in the cache: how many, and whether they are of paths that are in
Heads = list[tuple[int, bool]]


class LeftOut(DynamicLayer):
    """What is kept of paths that are out, as one more layer of the KV cache, which reorders and crops it.

    `keys` are the tokens that they have not read (b, 1, n, 1), `values` their positions.

    Attributes:
        inside: What the model is meanwhile.
        whole: State of the whole mixture when they went out.
        order: Heads of the layers where some went out, by number of the layer.
        heads: Keys and values that went out there.
        weights: Log weights of all paths in the mixture after the first token that some have not read (b, k, 1, 1).
    """

    def __init__(self, inside: Choice, whole: PathState, order: dict[int, Heads]) -> None:
        super().__init__()
        self.inside, self.whole, self.order = inside, whole, order
        self.heads: dict[int, DynamicLayer] = {}
        self.weights, self.is_placed = DynamicLayer(), False

    def numbers(self, choice: Choice) -> list[int]:
        """Which of all paths are in; the base is 0."""
        return [0, *(1 + choice.names.index(name) for name in self.inside.names)]

    def owe(self, ids: Tensor, positions: Tensor | None) -> None:
        """Note tokens that only the paths that are in have read."""
        self.is_placed |= positions is not None
        places = torch.full_like(ids, self.whole.seen + self.get_seq_length()) if positions is None else positions
        self.update(ids[:, None, :, None], places.expand_as(ids)[:, None, :, None])

    def take(self, cache: Cache) -> None:
        """Take heads of paths that go out from the cache."""
        for number, order in self.order.items():
            layer, self.heads[number] = cache.layers[number], DynamicLayer()
            (layer.keys, keys), (layer.values, values) = (split_heads(own, order) for own in (layer.keys, layer.values))
            self.heads[number].update(keys, values)

    def give_back(self, cache: Cache) -> None:
        """Let the cache end where they went out, with all heads."""
        for number, layer in enumerate(layers_of(cache)):
            if owed := self.get_seq_length():
                layer.crop(-owed)
            if order := self.order.get(number):
                own = self.heads[number]
                layer.keys = join_heads(layer.keys, own.keys, order)
                layer.values = join_heads(layer.values, own.values, order)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; before transformers 5 the argument is a positive number of tokens to keep."""
        owed, most = self.get_seq_length(), self.whole.seen + self.get_seq_length()
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, most - tokens_to_remove)
        if owed and removed:
            kept = max(0, owed - removed)
            self.keys, self.values = self.keys[..., :kept, :], self.values[..., :kept, :]
        if removed > owed:
            for own in (self.whole, *self.heads.values()):
                own.crop(owed - removed)

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows of all that is kept."""
        super().reorder_cache(beam_idx)
        self._each("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat rows of all that is kept."""
        super().batch_repeat_interleave(repeats)
        self._each("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows of all that is kept."""
        super().batch_select_indices(indices)
        self._each("batch_select_indices", indices)

    def _each(self, name: str, argument: Any) -> None:
        for own in (self.whole, self.weights, *self.heads.values()):
            getattr(own, name)(argument)


def split_heads(states: Tensor, order: Heads) -> list[Tensor]:
    """Keys or values (b, heads, t, head size) of paths that are in, and of those that are not."""
    pairs = list(zip(states.split([count for count, _ in order], dim=1), order, strict=True))
    return [torch.cat([part for part, (_, is_in) in pairs if is_in is side], dim=1) for side in (True, False)]


def join_heads(inside: Tensor, outside: Tensor, order: Heads) -> Tensor:
    """What was split, as it lay."""
    sizes = {side: [count for count, is_in in order if is_in is side] for side in (True, False)}
    parts = {True: iter(inside.split(sizes[True], dim=1)), False: iter(outside.split(sizes[False], dim=1))}
    return torch.cat([next(parts[is_in]) for _, is_in in order], dim=1)


def layers_of(cache: Cache) -> list[Any]:
    """Layers of a KV cache that are the model's."""
    return [own for own in getattr(cache, "layers", []) if not isinstance(own, (PathState, LeftOut))]


def left_out_of(cache: Cache) -> LeftOut | None:
    """What is left out, or None; nothing is once a cache was emptied."""
    found = next((own for own in getattr(cache, "layers", []) if isinstance(own, LeftOut)), None)
    if found is not None and not cache.get_seq_length():
        cache.layers.remove(found)
        return None
    return found


def may_leave_out(inputs: dict[str, Any]) -> bool:
    """Whether a call reads one more token of each row, and all that it reads can be read once more."""
    ids, cache = inputs.get("input_ids"), inputs["past_key_values"]
    if ids is None or ids.shape[1] > 1 or not cache.get_seq_length() or torch.compiler.is_compiling():
        return False
    is_flat = all(inputs.get(name) is None or inputs[name].dim() == 2 for name in ("attention_mask", "position_ids"))
    is_known = all(own is None or name in KNOWN for name, own in inputs.items())
    is_plain = all(type(own) is DynamicLayer for own in layers_of(cache)) and not getattr(cache, "offloading", False)
    return is_flat and is_known and is_plain


def leave_out(choice: Choice, heads: dict[int, list[Part]], cache: Cache, ids: Tensor) -> LeftOut | None:
    """Leave out paths that would weigh too little in every row; None where there is none.

    Args:
        choice: What the model is.
        heads: As they lie in the layers of the cache in which expansions have some.
        cache: What all paths have read.
        ids: The next tokens (b, 1).
    """
    state, mixture = state_of(cache), choice.mixture
    weights = (state.values[:, :, -1] + likelihoods(state, ids)[..., None]).log_softmax(1)
    least = mixture.switch_rate / len(choice.names)
    after = least + (1 - mixture.switch_rate - least) * weights[:, 1:, 1].exp()
    is_in = [True, *(after >= mixture.prune).any(0).tolist()]
    if all(is_in):
        return None
    numbers = [number for number, stays in enumerate(is_in) if stays]
    names = tuple(choice.names[number - 1] for number in numbers[1:])
    prior = [mixture.prior[number] for number in numbers]
    few = PathMixture(tuple(own / sum(prior) for own in prior), mixture.switch_rate)
    order = {place: [(own.kv_heads, own.owner in ("", *names)) for own in parts] for place, parts in heads.items()}
    order = {place: own for place, own in order.items() if not all(stays for _, stays in own)}
    found = LeftOut(Choice(names, few) if names else Choice(), state, order)
    found.weights.update(*[weights[:, :, None, :1]] * 2)
    found.take(cache)
    cache.layers = [*layers_of(cache), found, *([state.among(numbers)] if names else [])]
    return found


def as_log_probabilities(output: Any) -> Any:
    """What the base gave out alone, with logits as a mixture gives them out."""
    is_tuple = isinstance(output, tuple)
    logits = output[0] if is_tuple else output.logits
    found = logits.log_softmax(-1, dtype=torch.float32).to(logits.dtype)
    if is_tuple:
        return found, *output[1:]
    output.logits = found
    return output


def likelihoods(state: PathState, ids: Tensor) -> Tensor:
    """Log-probability of the next tokens (b, 1) on each path (b, k)."""
    return state.keys[:, :, -1].gather(-1, ids[:, None].expand(-1, state.keys.shape[1], 1))[..., 0]


def bring_back(left: LeftOut, choice: Choice, cache: Cache) -> tuple[dict[str, Any], Tensor]:
    """Let the cache end where paths went out.

    Args:
        left: What was left out.
        choice: What the model is with all of them.
        cache: What those that were in have read.

    Returns:
        Inputs of the call in which all paths read the rest, and their log weights in the mixture after it (b, k):
        paths that were in divide what they had, as they did by their own mixture.
    """
    state = state_of(cache)
    if any(own is not None and not own.values.shape[-2] for own in (state, left.whole)):
        raise ValueError(forgotten(left.whole.seen + left.get_seq_length()))
    weights, is_in = left.weights.keys[:, :, 0, 0].clone(), left.numbers(choice)
    shares = 0.0 if state is None else state.values[:, :, -1, 0]
    weights[:, is_in] = weights[:, is_in].logsumexp(1, keepdim=True) + shares
    left.give_back(cache)
    cache.layers = [*layers_of(cache), left.whole]
    owed = {"input_ids": left.keys[:, 0, :, 0], "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return owed | ({"position_ids": left.values[:, 0, :, 0]} if left.is_placed else {}), weights


def weigh_next(state: PathState, weights: Tensor, is_in: list[int], ids: Tensor) -> None:
    """Give paths their weights in the mixture; the next tokens (b, 1) count for those alone that predicted them.

    What the others are given now is what the tokens are going to take from them, or to give.
    """
    known, own = likelihoods(state, ids), weights[:, is_in]
    mixed = (own + known[:, is_in]).logsumexp(1, keepdim=True) - own.logsumexp(1, keepdim=True)
    state.values[:, :, -1, 0] = weights + mixed - known
    state.values[:, is_in, -1, 0] = own
