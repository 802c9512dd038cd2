"""Presets: named settings that go together; a recipe and options override them.

default   the last quarter of the layers, W12 in attention and MLP, and a router; texts that are short are read up to
          twelve times, in batches that leave a hundred steps
one-path  gates and rehearsal in place of a router: a model that can be fused and served
paper     SCALE-Route as published for English to Korean (arXiv 2511.03270, section 5): all layers, W12 above the lowest
          three sixteenths, batches of 512 sequences of 8192 tokens, one pass, the cosine router
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scale_surgery.errors import PlanError
from scale_surgery.learning.recipe import AUTO, PresetName, preset_problems
from scale_surgery.planning.request import DEFAULT_METHOD, NO_LAYERS
from scale_surgery.running.context import DEFAULT_LENGTH
from scale_surgery.training.settings import TrainingSettings

PresetValues = dict[str, Any]
# share of the layers that is expanded, the last ones
EXPANDED = 1 / 4
# share of the lowest layers that have no W12
PRESERVED = 3 / 16
PAPER_LENGTH, PAPER_BATCH, ROWS = 8192, 512, 8
STEPS, MOST_PASSES = 100, 12


@dataclass(frozen=True)
class JobFacts:
    """Facts of a job that presets look at.

    Attributes:
        layers: Layers of the base.
        context: Its context length.
        tokens: About how many tokens there are to learn, if known.
        processes: How many processes train.
        batch_size: The batch size, if given.
        sequence_length: The length of sequences, if given.
    """

    layers: int
    context: int
    tokens: int | None
    processes: int = 1
    batch_size: int | None = None
    sequence_length: int | None = None


def last_layers(layers: int) -> str:
    """Return the last quarter of the layers, as a request names them."""
    return f"last:{math.ceil(layers * EXPANDED)}"


def _default(facts: JobFacts) -> PresetValues:
    length = facts.sequence_length or min(DEFAULT_LENGTH, facts.context)
    usual, row_tokens = TrainingSettings.batch_size, length * facts.processes
    # a text whose end nobody knows is taken for a long one
    tokens = STEPS * usual * row_tokens if facts.tokens is None else facts.tokens
    passes = min(MOST_PASSES, max(1, math.ceil(STEPS * usual * row_tokens / tokens)))
    return {
        "expansion.layers": last_layers(facts.layers),
        "expansion.variant": "adapt",
        "expansion.collaborate": "both",
        "training.epochs": float(passes),
        "training.batch_size": min(usual, max(1, passes * tokens // (STEPS * row_tokens))),
    }


def _one_path(facts: JobFacts) -> PresetValues:
    return _default(facts) | {
        "route": False,
        "expansion.layers": "all",
        "expansion.variant": "gated",
        "training.rehearse": ("self",),
        "training.rehearsal_weight": 3.0,
    }


def _paper(facts: JobFacts) -> PresetValues:
    rows = facts.batch_size or ROWS
    return {
        "expansion.layers": "all",
        "expansion.variant": "adapt",
        "expansion.collaborate": "both",
        "expansion.collaborative_layers": f"last:{facts.layers - round(facts.layers * PRESERVED)}",
        "training.sequence_length": min(PAPER_LENGTH, facts.context),
        "training.batch_size": rows,
        "training.gradient_accumulation": max(1, PAPER_BATCH // (rows * facts.processes)),
        "training.epochs": 1.0,
        "training.learning_rate": 1e-3,
        "training.schedule": "linear",
        "training.warmup": 0.06,
        "routing.router": "cosine",
    }


PRESETS: dict[PresetName, Callable[[JobFacts], PresetValues]] = {
    "default": _default,
    "one-path": _one_path,
    "paper": _paper,
}


def with_preset(name: PresetName, overrides: Mapping[str, Any], facts: JobFacts) -> PresetValues:
    """A preset with overrides."""
    if problems := preset_problems(name):
        raise PlanError(*problems)
    batch_size, length = (overrides.get(f"training.{setting}") for setting in ("batch_size", "sequence_length"))
    values = PRESETS[name](replace(facts, batch_size=batch_size, sequence_length=length))
    # an empty variant is none that was said
    said = {key: value for key, value in overrides.items() if (key, value) != ("expansion.variant", None)}
    # a budget is what a pilot may spend
    if any(key.startswith("ranking.") for key in said) and "expansion.layers" not in said:
        said["expansion.layers"] = AUTO
    # steps go in place of passes
    dropped = {"training.epochs"} if said.get("training.steps") is not None else set()
    # a preset says which of all layers have W12; where layers are chosen, each has it
    if said.get("expansion.layers", "all") != "all":
        dropped.add("expansion.collaborative_layers")
    # another method or variant, or no layers, drops the expansion of the preset but for its layers, and its router
    usual = {"expansion.method": DEFAULT_METHOD} | values
    is_other = any(said.get(key, usual[key]) != usual[key] for key in ("expansion.method", "expansion.variant"))
    if is_other or said.get("expansion.layers") == NO_LAYERS:
        dropped |= {key for key in values if key.startswith(("expansion.", "routing.")) and key != "expansion.layers"}
    return {key: value for key, value in values.items() if key not in dropped} | said
