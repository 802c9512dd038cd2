"""Tables of a verification: promises, numbers, problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.errors import counted, shorten
from scale_surgery.evidence.promises import verdict
from scale_surgery.folder.routers import describe_router
from scale_surgery.show.layout import Facts, NamedRows, PlainTable, heading, sentence
from scale_surgery.show.tables import render_warnings

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Layer, Numbers, PathNumbers
    from scale_surgery.evidence.promises import Promise
    from scale_surgery.evidence.verification import Verification

STYLES = {
    "holds": "green",
    "holds (unclaimed)": "green",
    "not claimed": "dim",
    "not checked": "yellow",
    "BROKEN": "bold red",
}


def render_verification(result: Verification) -> RenderableType:
    """Render a verification: promises, numbers, problems."""
    table = render_promises(result.promises, result.required)
    parts: list[RenderableType] = [table, Text(), _render_numbers(result)]
    problems = shorten(list(result.findings), ending="; -o FILE.json writes all")
    parts += [sentence(f"problem: {problem}", "red") for problem in problems]
    parts += render_warnings(result.warnings)
    word = Text("verified", style="bold green") if result.passed else Text("NOT verified", style="bold red")
    changed = counted(result.trained_tensors, "tensor")
    state = "untrained" if result.state == "initial" else f"trained ({changed} changed)"
    router = result.routing
    kind = (
        result.variant if router is None else f"{result.variant}, routed ({describe_router(router, result.expansions)})"
    )
    return Group(*parts, Text(), word + sentence(f"  {kind}, {state}, base {result.base_name}"))


def render_promises(promises: Sequence[Promise], required: Sequence[str]) -> RenderableType:
    """Render the result of each promise."""
    table = PlainTable("promises")
    table.add_column("promise", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for promise in promises:
        is_required = promise.name in required
        result = verdict(holds=promise.holds, claimed=promise.claimed, required=is_required)
        style = "bold red" if is_required and not promise.holds else STYLES[result]
        table.add_row(promise.name, Text(result, style), promise.evidence)
    return table


def _render_numbers(result: Verification) -> RenderableType:
    numbers = result.numbers
    if numbers is None:
        return sentence(f"no model was run: {result.not_run}", "dim")
    # NaN counts as the worst drift
    worst = max(numbers.layers, key=lambda layer: math.inf if math.isnan(layer.drift) else layer.drift)
    lowest = min((layer.cosine for layer in numbers.layers), key=lambda cosine: -2 if math.isnan(cosine) else cosine)
    how = f"{numbers.dtype}, {numbers.attention}, {numbers.device}"
    kind, note = ("token", "") if numbers.is_text else ("random id", " (no tokenizer)")
    rows = [
        ("probes", f"{counted(numbers.prompts, 'prompt')}, {counted(numbers.tokens, kind)}{note}, {how}"),
        ("logits", "bit-equal" if numbers.is_bit_equal else f"drift {numbers.drift:.3g}"),
        ("KL divergence", f"{numbers.kl_divergence:.3g} nats per token"),
        ("top-1 agreement", f"{numbers.top1_agreement:.1%}"),
        ("base stream", f"{_drift_of(worst)}, lowest cosine {lowest:.6f}"),
        ("continuation", _continuation(numbers)),
    ]
    if (mixture := numbers.mixture) is not None:
        best = "the base" if len(result.expansions) == 1 else "the best path"
        texts = f"{counted(mixture.texts, 'text')} of up to {counted(mixture.longest, 'token')}"
        # in float32 there is no difference
        is_rounded = mixture.rounding > mixture.own_rounding
        own = f", {mixture.own_excess:z.3g} before logits are rounded" if is_rounded else ""
        lost = f"{mixture.excess:z.3g} nats against {best}{own}: {mixture.worst}"
        rows += [("mixture", texts), ("worst loss", lost)]
    if (state := numbers.kept_state) is not None:
        kept = f"holds {state.tokens:,} of {counted(state.read, 'token')} with a KV cache"
        rows.append(("router's state", f"{kept}, weights differ by {state.weight_difference:.2g}"))
    parts: list[RenderableType] = [Facts("numbers", rows)]
    parts += [] if worst.drift == 0 else [Text(), _render_layers(numbers.layers)]
    parts += [Text(), *_render_paths(numbers)] if numbers.paths else []
    return Group(*parts)


def _drift_of(worst: Layer) -> str:
    if worst.is_bit_equal:
        return "bit-equal after every layer"
    return f"largest drift {worst.drift:.3g}, after {'the embedding' if worst.layer < 0 else f'layer {worst.layer}'}"


def _render_layers(layers: tuple[Layer, ...]) -> Table:
    table = PlainTable("base stream against the base model's")
    for name in ("after", "drift", "cosine"):
        table.add_column(name, justify="right")
    for layer in layers:
        after = "embedding" if layer.layer < 0 else f"layer {layer.layer}"
        table.add_row(after, "bit-equal" if layer.is_bit_equal else f"{layer.drift:.3g}", f"{layer.cosine:.6f}")
    return table


def _continuation(numbers: Numbers) -> str:
    if numbers.generation_equal is None:
        return "not run"
    cached, uncached = numbers.generation_equal, numbers.uncached_equal
    with_cache = "the base's tokens" if cached else "other tokens than the base's"
    without = "too" if cached == uncached else "the base's tokens" if uncached else "other tokens than the base's"
    return f"greedy, {counted(numbers.new_tokens, 'token')}: {with_cache}; without KV cache {without}"


def _render_paths(numbers: Numbers) -> Sequence[RenderableType]:
    """Render the comparison of each path with the model of this expansion alone."""
    table = NamedRows(["chosen by name", "with other paths", counted(numbers.new_tokens, "greedy token")], name="path")
    for path in numbers.paths:
        drifts = ("bit-equal" if drift == 0 else f"drift {drift:.3g}" for drift in (path.drift, path.drift_beside))
        table.add_row(path.name, *drifts, _greedy(path))
    return heading("each path compared with its expansion alone"), table


def _greedy(path: PathNumbers) -> str:
    if path.generation_equal is None:
        return "not run"
    return "the same" if path.generation_equal and path.uncached_equal else "others"
