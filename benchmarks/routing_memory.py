"""Memory of routing: the KV cache, and how many logits-sized tensors live at once where the vocabulary is large.

The cache is counted from its tensors after PROMPT tokens, the router's own layer apart. Logits are measured on a model
that has little else, THIN: most memory above the loaded model during one call in a process of its own (anonymous
memory, asked every few ms; with CUDA, what torch has allocated), divided by the bytes of one logits tensor.

forward     all logits, without gradients
prompt      into the KV cache, and logits of the last token alone
training    forward with labels, and backward
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.device import peak_of, settle
from benchmarks.make_checkpoint import Shape
from benchmarks.routing_models import Settings, Variant, load, make_models, random_tokens

PROMPT = 160
THIN = Shape(hidden=64, inner=176, layers=2, heads=4, key_value_heads=2, vocabulary=128256)
THIN_TOKENS, QUICK_TOKENS = 512, 256
MODES = ("forward", "prompt", "training")
# logits tensors that a router may add to a call without gradients: one, and some rows of it at a time
MOST_EXTRA = 1.1


@dataclass(frozen=True)
class Cache:
    """KV cache of one model after PROMPT tokens.

    Attributes:
        variant: The model.
        bytes: Keys and values of its layers.
        router_bytes: What the router remembers.
        formula: Predicted multiple of the unrouted model's.
    """

    variant: str
    bytes: int
    router_bytes: int
    formula: float


@dataclass(frozen=True)
class Peak:
    """Most memory of one call of one model, in logits tensors."""

    variant: str
    mode: str
    logits: float


def cached_bytes(layer: Any) -> int:
    """Bytes of the tensors of one layer of a KV cache."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (layer.keys, layer.values))


@torch.no_grad()
def measure_cache(model: Any, variant: Variant) -> Cache:
    """Fill a KV cache and count it."""
    tokens = random_tokens(model, 1, PROMPT)
    layers = model(tokens, use_cache=True, logits_to_keep=1).past_key_values.layers
    model_layers = layers[: model.config.num_hidden_layers]
    beside = layers[len(model_layers) :]
    return Cache(variant.name, sum(map(cached_bytes, model_layers)), sum(map(cached_bytes, beside)), variant.formula)


def make_call(model: Any, mode: str, tokens: torch.Tensor) -> Callable[[], None]:
    """Make one call of a mode."""

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=mode == "prompt", logits_to_keep=int(mode == "prompt"))

    def training() -> None:
        model.train()
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    return training if mode == "training" else forward


def measure_peak(folder: Path, variant: Variant, mode: str, settings: Settings) -> Peak:
    """Most memory above the loaded model during one call, in a process that does nothing else."""
    torch.set_num_threads(settings.threads)
    model = load(folder, variant, settings.device)
    settle(model)
    tokens = random_tokens(model, 1, QUICK_TOKENS if settings.is_quick else THIN_TOKENS)
    call = make_call(model, mode, tokens)
    with peak_of(settings) as peak:
        call()
    return Peak(variant.name, mode, peak.bytes / (tokens.numel() * model.config.vocab_size * model.dtype.itemsize))


def measure_peaks(settings: Settings) -> tuple[list[Variant], list[Peak]]:
    """Measure every model in every mode, one process after the other, forked from one that has imported all."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        variants = make_models(Path(name), THIN, settings, [1])
        asked = [(Path(name), variant, mode, settings) for variant in variants for mode in MODES]
        waiting = [pool.submit(measure_peak, *arguments) for arguments in asked]
        return variants, [future.result() for future in waiting]


def extra_logits(variants: Sequence[Variant], peaks: Sequence[Peak]) -> dict[tuple[str, str], float]:
    """Logits tensors that each routed model needs above the same model without its router, by model and mode."""
    known = {(peak.variant, peak.mode): peak.logits for peak in peaks}
    routed = [variant for variant in variants if variant.router is not None]
    return {
        (variant.name, mode): known[variant.name, mode] - known[variant.unrouted, mode]
        for variant in routed
        for mode in MODES
    }


def empty_table(title: str, columns: Sequence[str]) -> Table:
    """Begin a table of numbers that fits 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def most_extra(extra: Mapping[tuple[str, str], float]) -> float:
    """Most logits tensors that any router adds to a call without gradients."""
    return max(value for (_, mode), value in extra.items() if mode != "training")


def render_caches(variants: Sequence[Variant], caches: Sequence[Cache]) -> Table:
    """Lay out the caches as a table."""
    table = empty_table(f"KV cache of {PROMPT} tokens", ("KiB", "x unrouted", "formula", "router, KiB"))
    bytes_of = {cache.variant: cache.bytes for cache in caches}
    for variant, cache in zip(variants, caches, strict=True):
        ratio = cache.bytes / bytes_of[variant.unrouted]
        compared = (f"{ratio:.2f}", f"{cache.formula:.2f}", f"{cache.router_bytes / 1024:,.0f}")
        table.add_row(cache.variant, f"{cache.bytes / 1024:,.0f}", *(compared if variant.router else ()))
    return table


def render_peaks(variants: Sequence[Variant], peaks: Sequence[Peak]) -> Table:
    """Lay out the peaks as a table."""
    columns = [column for mode in MODES for column in (mode, "extra")]
    table = empty_table(f"Peak in logits tensors, vocabulary {THIN.vocabulary:,}", columns)
    extra = extra_logits(variants, peaks)
    known = {(peak.variant, peak.mode): peak.logits for peak in peaks}
    for variant in variants:
        cells = ((known[variant.name, mode], extra.get((variant.name, mode))) for mode in MODES)
        shown = [f"{value:.2f}" if value is not None else "" for pair in cells for value in pair]
        table.add_row(variant.name, *shown)
    return table
