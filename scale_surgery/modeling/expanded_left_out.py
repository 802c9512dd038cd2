"""Paths that are left out of a mixture while they weigh little, and come back when they would weigh more.

Those that are in read token by token. The others owe what was read meanwhile, and read it at once: then every key,
value and likelihood is there again, and each path's weight as if none had been out. That weight says who is in. In the
mixture a path keeps the weight that it went out with: it wins nothing by tokens that it did not predict, so that with a
switch rate of 0 no text loses more against the base, which is always in, than -ln of its prior. This file needs only
torch and transformers.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from .expanded_arranged import MODE
from .expanded_choice import Choice
from .expanded_posterior import PathMixture, PathState
from .expanded_routing import state_of

# what a call may have where paths are left out: of anything else they would not know later
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep"}
KNOWN |= {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}
# heads of a layer as they lie in the cache: whose they are, "" for the base, and how many
Heads = list[tuple[str, int]]


class LeftOut(DynamicLayer):
    """What is kept of paths that are out, as one more layer of the KV cache, which reorders and crops it.

    `keys` are the tokens that they have not read (b, 1, n, 1), `values` their positions.

    Attributes:
        inside: What the model is meanwhile.
        whole: State of the whole mixture when they went out.
        heads: Heads of the paths that are out, by number of the layer.
        lying: All heads of these layers.
    """

    def __init__(self, first: DynamicLayer, inside: Choice, whole: PathState, lying: dict[int, Heads]) -> None:
        super().__init__()
        self.inside, self.whole, self.lying = inside, whole, lying
        self.heads: dict[int, DynamicLayer] = {}
        self.is_sliding, self.is_compileable = first.is_sliding, first.is_compileable
        self.is_placed = False

    @property
    def kept(self) -> list[DynamicLayer]:
        """All that moves with the rows of the cache."""
        return [self.whole, *self.heads.values()]

    def owe(self, ids: Tensor, positions: Tensor | None) -> None:
        """Note tokens that only the paths that are in have read."""
        self.is_placed |= positions is not None
        past = self.whole.seen + self.get_seq_length()
        default = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        places = default if positions is None else positions
        self.update(ids[:, None, :, None], places.expand_as(ids)[:, None, :, None])

    def take(self, cache: Cache) -> None:
        """Take heads of those that are out from the cache."""
        for number, heads in self.lying.items():
            layer, own = cache.layers[number], DynamicLayer()
            is_in = [name in ("", *self.inside.names) for name, _ in heads]
            for kind in ("keys", "values"):
                parts = getattr(layer, kind).split([count for _, count in heads], dim=1)
                setattr(layer, kind, torch.cat([part for part, stays in zip(parts, is_in, strict=True) if stays], 1))
                if not all(is_in):
                    out = torch.cat([part for part, stays in zip(parts, is_in, strict=True) if not stays], 1)
                    setattr(own, kind, out)
            if not all(is_in):
                own.is_initialized, own.dtype, own.device = True, out.dtype, out.device
                self.heads[number] = own

    def give_back(self, cache: Cache) -> None:
        """Put heads back into the cache, which then ends where they went out."""
        for number, heads in self.lying.items():
            layer, own = cache.layers[number], self.heads.get(number)
            for kind in ("keys", "values"):
                known = getattr(layer, kind)[..., : self.whole.seen, :]
                if own is not None:
                    is_in = [name in ("", *self.inside.names) for name, _ in heads]
                    sizes = [[count for (_, count), stays in zip(heads, is_in, strict=True) if stays is one] for one in (True, False)]
                    ins, outs = iter(known.split(sizes[0], 1)), iter(getattr(own, kind).split(sizes[1], 1))
                    known = torch.cat([next(ins) if stays else next(outs) for stays in is_in], 1)
                setattr(layer, kind, known)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for own in self.kept:
            own.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for own in self.kept:
            own.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for own in self.kept:
            own.batch_select_indices(indices)


def left_out_of(cache: Cache | None) -> LeftOut | None:
    """What is left out, or None."""
    return next((own for own in getattr(cache, "layers", []) if isinstance(own, LeftOut)), None)


def may_leave_out(inputs: dict[str, Any]) -> bool:
    """Whether a call reads one token of each row, and all that it reads can be read again later."""
    ids, cache = inputs.get("input_ids"), inputs.get("past_key_values")
    own = [layer for layer in getattr(cache, "layers", []) if not isinstance(layer, (PathState, LeftOut))]
    if ids is None or ids.shape[1] != 1 or not own or torch.compiler.is_compiling():
        return False
    is_flat = all(inputs.get(name) is None or inputs[name].dim() == 2 for name in ("attention_mask", "position_ids"))
    is_known = all(name in KNOWN or value is None for name, value in inputs.items())
    is_plain = all(type(layer) is DynamicLayer for layer in own) and not getattr(cache, "offloading", False)
    return is_flat and is_known and is_plain


def heads_of(model: nn.Module) -> dict[int, Heads]:
    """All heads of keys and values of each layer of a composed model, as they lie in the cache."""
    found = {}
    for module in model.modules():
        own = getattr(module, "modes", {}).get(MODE)
        if own and module.parts is own["parts"]:
            found[module.layer_idx] = [(part.owner, part.kv_heads) for part in own["parts"]]
    return found


def leave_out(cache: Cache, choice: Choice, lying: Any) -> LeftOut | None:
    """Leave out the paths that weigh too little in every row; None where there is none."""
    state, mixture = state_of(cache), choice.mixture
    weights = state.values[:, :, -1, -1]
    is_in = [True, *(weights[:, 1:] >= log(mixture.prune)).any(0).tolist()]
    if all(is_in):
        return None
    names = tuple(name for name, stays in zip(choice.names, is_in[1:], strict=True) if stays)
    numbers = [number for number, stays in enumerate(is_in) if stays]
    left = LeftOut(cache.layers[0], choice_among(choice, names, numbers), state, lying())
    cache.layers.remove(state)
    if names:
        cache.layers.append(state.among(numbers))
    left.take(cache)
    cache.layers.append(left)
    return left


def choice_among(choice: Choice, names: tuple[str, ...], numbers: list[int]) -> Choice:
    """The base and some of those of a mixture, with their shares of the prior."""
    if not names:
        return Choice()
    prior = [choice.mixture.prior[number] for number in numbers]
    return Choice(names, PathMixture(tuple(own / sum(prior) for own in prior), choice.mixture.switch_rate))


def weights_after(left: LeftOut, choice: Choice, cache: Cache) -> Tensor:
    """Log weights in the mixture when paths come back: those that were in share what they had, by their own mixture."""
    numbers = [0, *(1 + choice.names.index(name) for name in left.inside.names)]
    weights, state = left.whole.values[:, :, -1, 0].clone(), state_of(cache)
    shares = 0 if state is None else state.values[:, :, -1, 0]
    weights[:, numbers] = weights[:, numbers].logsumexp(1, keepdim=True) + shares
    return weights


def bring_back(left: LeftOut, cache: Cache) -> dict[str, Any]:
    """Let the cache end where paths went out, with all heads; what is to be read is returned."""
    state = state_of(cache)
    cache.layers = [layer for layer in cache.layers if layer is not left and layer is not state]
    left.give_back(cache)
    cache.layers.append(left.whole)
    found = {"input_ids": left.keys[:, 0, :, 0], "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return found | ({"position_ids": left.values[:, 0, :, 0]} if left.is_placed else {})
