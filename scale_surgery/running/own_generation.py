"""Generation that measures: with settings of our own, and none of a model's generation_config.json.

That file says how a model answers people: it may sample, search with beams, stop at a text, return several sequences or
an object. `generate`, `chat` and `serve` answer so. What compares models needs the same tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def generate_with(
    model: Any, inputs: Mapping[str, Tensor], *, on_token: Callable[[Tensor], None] | None = None, **settings: Any
) -> Any:
    """Generate with these settings alone; those that are left out are transformers' own.

    `on_token` is called with the token ids of all rows after each new token.
    """
    import torch
    from transformers import GenerationConfig

    watching = {} if on_token is None else {"stopping_criteria": [_never_stopping(on_token)]}

    before, own = model.generation_config, GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    # transformers fills in what a given config leaves out from that of the model
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad():
            made = model.generate(**inputs, generation_config=own, **watching)
    finally:
        model.generation_config = before
    return made


def _never_stopping(on_token: Callable[[Tensor], None]) -> Any:
    """Make a criterion of transformers that stops no row, and tells of each token."""
    import torch

    def watch(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        on_token(ids)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    return watch


def continue_greedily(
    model: Any, inputs: Mapping[str, Tensor], new_tokens: int, *, known: int | None = None, use_cache: bool = True
) -> Tensor:
    """Continue each text by the most likely token, so many times; no token ends it, nor has an id from `known` on."""
    suppressed = _end_tokens(model)
    if known is not None:
        suppressed += range(known, model.config.get_text_config(decoder=True).vocab_size)
    settings: dict[str, Any] = {"suppress_tokens": suppressed} if suppressed else {}
    made: Tensor = generate_with(
        model, inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, use_cache=use_cache, **settings
    )
    return made


def _end_tokens(model: Any) -> list[int]:
    """Tokens with which the model ends a text."""
    ends = model.generation_config.eos_token_id
    return [end for end in (ends if isinstance(ends, list | tuple) else [ends]) if isinstance(end, int)]
