"""Context length: the most tokens that a model can read at once, and the length that is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_surgery.errors import DataError, Problem

# default length of a window, if the context is longer
DEFAULT_LENGTH = 1024


def context_of(config: Any) -> int | None:
    """Return the context length of a model, or None if its config does not name it."""
    values = config if isinstance(config, Mapping) else config.get_text_config().to_dict()
    # GPT-2 uses another key
    context = values.get("max_position_embeddings") or values.get("n_positions")
    return int(context) if context else None


def check_room(tokens: int, context: int | None, name: str) -> None:
    """Check that a model can read a prompt and generate at least one more token."""
    if context is not None and tokens >= context:
        raise DataError(Problem("prompt-too-long", tokens=tokens, context=context, model=name))


def choose_length(length: int | None, contexts: Mapping[str, int | None], option: str = "--sequence-length") -> int:
    """Choose the length of a window in tokens, the same for all models."""
    known = {name: context for name, context in contexts.items() if context is not None}
    length = min([DEFAULT_LENGTH, *known.values()]) if length is None else length
    problems = [
        Problem("length-over-context", option, length=length, context=context, model=name)
        for name, context in known.items()
        if length > context
    ]
    if length < 2:
        problems.append(Problem("length-too-short", option, length=length))
    if problems:
        raise DataError(*problems)
    return length
