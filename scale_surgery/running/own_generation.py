"""Generation for measurements: with our own settings instead of a model's generation_config.json.

That file is for answers to users: it may request sampling, beam search, stop strings, several sequences or an output
object. `generate`, `chat` and `serve` follow it. Comparisons of models need the same settings for each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def generate_with(
    model: Any, inputs: Mapping[str, Tensor], *, on_token: Callable[[Tensor], None] | None = None, **settings: Any
) -> Any:
    """Generate with these settings only. Other settings have transformers' defaults.

    `on_token` is called with the token ids of all rows after each new token.
    """
    import torch
    from transformers import GenerationConfig

    watching = {} if on_token is None else {"stopping_criteria": [_never_stopping(on_token)]}

    before, own = model.generation_config, GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    # transformers fills gaps of a given config from the model's generation config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad():
            made = model.generate(**inputs, generation_config=own, **watching)
    finally:
        model.generation_config = before
    return made


def _never_stopping(on_token: Callable[[Tensor], None]) -> Any:
    """Return a stopping criterion that never stops, and reports each token."""
    import torch

    def watch(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        on_token(ids)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    return watch


def continue_greedily(
    model: Any, inputs: Mapping[str, Tensor], new_tokens: int, *, known: int | None = None, use_cache: bool = True
) -> Tensor:
    """Continue each text greedily by a number of tokens.

    No token ends the text, and no token has an id of `known` or more.
    """
    suppressed = end_tokens(model)
    if known is not None:
        suppressed += range(known, model.config.get_text_config(decoder=True).vocab_size)
    settings: dict[str, Any] = {"suppress_tokens": suppressed} if suppressed else {}
    made: Tensor = generate_with(
        model, inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, use_cache=use_cache, **settings
    )
    return made


def end_tokens(model: Any) -> list[int]:
    """Return the tokens with which the model ends a text."""
    ends = model.generation_config.eos_token_id
    return [end for end in (ends if isinstance(ends, list | tuple) else [ends]) if isinstance(end, int)]
