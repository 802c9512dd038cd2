"""Check that a router keeps its state from token to token while `generate` runs with a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scale_surgery.errors import counted
from scale_surgery.modeling.expanded_releases import TESTED, find_cache
from scale_surgery.running.own_generation import generate_with
from scale_surgery.running.prompts import Batch

# number of generated tokens, and class of the KV cache's layer that holds the router's state
WRITTEN, STATE_CLASS = 3, "RouterState"
# a smaller difference of weights always counts as rounding
LEAST_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class KeptState:
    """State of a router that reads tokens, after the prompts were continued token by token.

    Attributes:
        tokens: Tokens in the state.
        read: Tokens that the model has read.
        weight_difference: Largest difference of a path's weight from the same tokens read at once, without a KV cache;
            of a hard router, how far its choice then lies behind the heaviest path, in nats.
        rounding: Difference that rounding of the logits can explain.
    """

    tokens: int
    read: int
    weight_difference: float
    rounding: float

    @property
    def problems(self) -> Iterator[str]:
        """The difference from a router that reads all tokens at once."""
        advice = (
            f"so generate gives other tokens than the router chooses. Load it with transformers {TESTED[-1]} or older, "
            "or write it again with the newest scale-surgery: scale-surgery route-export."
        )
        if self.tokens != self.read:
            held = f"holds {counted(self.tokens, 'token')} of {self.read}"
            yield f"router: after generation with a KV cache its state {held}, {advice}"
        elif not self.weight_difference <= self.rounding:
            differ = f"differ by {self.weight_difference:.3g}, expected at most {self.rounding:.3g}"
            yield f"router: weights of the paths with and without a KV cache {differ}, {advice}"


@torch.no_grad()
def measure_kept_state(model: Any, batch: Batch, device: str, rounding: float) -> KeptState | None:
    """Measure the state of a router after generation; None if it reads no tokens.

    Args:
        model: A routed model.
        batch: The prompts.
        device: Device of the model.
        rounding: Loss of a path on a prompt that rounding of its logits can explain, in nats.
    """
    if not model.choice.router.reads_tokens:
        return None
    inputs = batch.inputs(device)
    options: dict[str, Any] = {
        "max_new_tokens": WRITTEN,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    written = generate_with(model, inputs, **options)
    ids, mask = written.sequences, inputs["attention_mask"]
    layers = getattr(find_cache(written), "layers", ())
    state = next((layer for layer in layers if type(layer).__name__ == STATE_CLASS), None)
    # the last token is generated, but not read
    read = ids.shape[1] - 1
    if state is None or state.seen != read:
        return KeptState(0 if state is None else state.seen, read, float("nan"), rounding)
    mask = torch.cat((mask, mask.new_ones(len(mask), WRITTEN)), 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    at_once = model.score_tokens(ids, attention_mask=mask, position_ids=positions).weights[:, -1]
    kept = state.values[:, :, -1, 0].float()
    if model.choice.router.is_hard:
        # what it keeps is not shown: how far does the path that it chooses lie behind there?
        difference = (kept.amax(-1) - kept.gather(-1, at_once.argmax(-1, keepdim=True))[:, 0]).max()
    else:
        difference = (kept.exp() - at_once).abs().max()
    # a weight moves by at most a quarter of the change of its log odds, and both paths are rounded
    return KeptState(state.seen, read, float(difference), max(LEAST_DIFFERENCE, rounding / 2))
