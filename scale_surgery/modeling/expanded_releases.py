"""Names that differ between releases of transformers, and the releases that this code was tested with.

A release that renames something needs a change in this file and in no other. Configurations import it too, so it needs
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers

# releases that exported checkpoints are tested with, from the oldest to the newest
TESTED = ("4.57", "5.5", "5.12", "5.13", "5.16", "5.19", "5.23", "5.24")
# earlier releases can run code that a config.json names
OLDEST_SAFE = "5.5"

# the KV cache among the arguments of a model's forward: `cache` from 5.24 on; before, `past_key_values`, and
# `cache_params` in state-space models, both of which 5.24 to 5.39 accept with a warning
CACHE, OLD_CACHES = "cache", ("past_key_values", "cache_params")
# the same among the arguments of a module of a layer: `past_key_value` until 4.57, `layer_past` in GPT-2 and others
CACHES_OF_MODULES = frozenset((CACHE, *OLD_CACHES, "past_key_value", "layer_past"))

# features that models with images add to the hidden state, by the number of a layer: after it (all releases), or before
# it (from 5.12 on)
ADDED_AFTER, ADDED_BEFORE = "deepstack_visual_embeds", "deepstack_features"

# methods of a model for transformers' own adapters (all releases)
ADAPTER_METHODS = (
    *("load_adapter", "add_adapter", "set_adapter", "delete_adapter", "enable_adapters", "disable_adapters"),
    *("active_adapter", "active_adapters", "get_adapter_state_dict"),
)

# part of the OSError for a folder or repository without weights (all releases)
NO_WEIGHTS = "file named"


def find_cache(values: Any) -> Any:
    """Return the KV cache among the named arguments of a forward, or in its output; None if there is none.

    Its name and class vary, so it is recognised by its method `get_seq_length`.
    """
    each = values.values() if hasattr(values, "values") else values
    return next((value for value in each if hasattr(value, "get_seq_length")), None)


def find_old_cache(inputs: dict[str, Any]) -> Any:
    """Return a KV cache among the arguments of a forward that counts no tokens, as MambaCache of 4.57; None without."""
    given = (inputs.get(name) for name in (CACHE, *OLD_CACHES))
    return next((value for value in given if value is not None and not hasattr(value, "get_seq_length")), None)


def count_tokens(cache: Any) -> int:
    """Return how many tokens a KV cache holds; 0 if there is none, or if it counts no tokens."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0  # of state-space layers alone


def is_filled(cache: Any) -> bool:
    """Return whether a KV cache holds a text, counted or as states of state-space layers.

    A layer says whether it has a state: for each of its states from 5.24 on, in one answer before.
    """
    answers = (getattr(layer, "has_previous_state", False) for layer in getattr(cache, "layers", ()))
    return count_tokens(cache) > 0 or any(any(each.values()) if hasattr(each, "values") else each for each in answers)


def is_quantised(cache: Any) -> bool:
    """Return whether a KV cache keeps rounded keys and values (all releases, several classes)."""
    return "Quantized" in type(cache).__name__


def name_cache(inputs: dict[str, Any], known: Iterable[str]) -> None:
    """Give the KV cache among named inputs the name that a stock forward has for it, in place.

    Args:
        inputs: Named inputs of a forward.
        known: Names that the stock forward takes.
    """
    wanted = next((name for name in (CACHE, *OLD_CACHES) if name in known), None)
    for name in (CACHE, *OLD_CACHES):
        if wanted is not None and name != wanted and name in inputs:
            value = inputs.pop(name)
            inputs[wanted] = value if inputs.get(wanted) is None else inputs[wanted]


def release_of(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a release."""
    return tuple(int(number) for number in version.split(".")[:2])


def warn_of_old_release() -> None:
    """Warn of a release of transformers that can run code that a config.json names."""
    if release_of(transformers.__version__) < release_of(OLDEST_SAFE):
        warn(
            f"transformers before {OLDEST_SAFE} can run code that a config.json names (CVE-2026-4372, CVE-2026-5241). "
            "Install a newer release, or load only files that you trust."
        )


def warn_of_new_release(folder: Any) -> None:
    """Warn once of a release of transformers that is newer than those this code was tested with.

    Args:
        folder: The folder or repository that is loaded.
    """
    if release_of(transformers.__version__) > release_of(TESTED[-1]):
        warn(
            f"{folder}: transformers {transformers.__version__} is newer than {TESTED[-1]}, the newest release that "
            f"the code of this model was tested with. Check it: scale-surgery verify {folder}"
        )


def warn(message: str) -> None:
    """Log a warning once in a process."""
    transformers.logging.get_logger("transformers").warning_once(message)
