"""Tables of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.checkpoint.expansions import nameless
from scale_surgery.errors import Problem, counted, name_some
from scale_surgery.planning.paths import path_problems
from scale_surgery.planning.selection import format_layers
from scale_surgery.planning.stock import fused_problems, stock_problems
from scale_surgery.planning.treatments import treatment_rows
from scale_surgery.show.layout import Facts, NamedRows, heading
from scale_surgery.show.method_rows import METHOD_ROWS
from scale_surgery.show.tables import describe_head, format_bytes

if TYPE_CHECKING:
    from scale_surgery.planning.plan import Plan
    from scale_surgery.planning.tensors import TensorPlan


def render_plan(plan: Plan, *, details: bool = False, tensors: bool = True) -> RenderableType:
    """Render a plan: the resolved settings, the costs, and the new tensors of one layer or of all."""
    if not tensors:
        return Facts("plan", plan_rows(plan))
    shown = plan.tensors if details else _sample(plan)
    note = "" if details else f"{len(shown)} of {len(plan.tensors)}; --details shows all"
    return Group(Facts("plan", plan_rows(plan)), Text(), _render_tensors(plan, shown, note))


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return settings, costs and later uses of an expansion, as names and values."""
    costs = plan.costs
    share = costs.parameters_added / costs.parameters_before
    is_mixed = 0 < len(plan.collaboration.layers) < len(plan.layers)
    return [
        ("base", plan.base_name + (f" at {plan.base_revision[:12]}" if plan.base_revision else "")),
        ("variant", plan.variant),
        (f"{plan.method.verb} layers", f"{format_layers(plan.layers)}  ({len(plan.layers)} of {plan.sizes.layers})"),
        *_new_tokens(plan),
        *_odd(plan),
        *treatment_rows(plan.architecture, _added_by_layer(plan)),
        *METHOD_ROWS[plan.request.method](plan),
        ("parameters", f"+{costs.parameters_added:,} on {costs.parameters_before:,} ({share:.1%})"),
        ("in one layer", f"+{costs.parameters_per_layer:,}" + (" at most" if is_mixed else "")),
        *_outside_layers(plan),
        ("bytes", f"+{format_bytes(costs.bytes_added)} in {counted(len(plan.shards), 'new shard')}"),
        ("forward cost", f"x {costs.forward_factor:.3f}"),
        ("training reaches", _reach(plan)),
        ("memory", f"about {format_bytes(costs.peak_memory_bytes)} at most, to expand"),
        ("fused form", _fused_form(plan)),
        ("stock form", _stock_form(plan)),
        ("router", _router(plan)),
    ]


def _new_tokens(plan: Plan) -> list[tuple[str, str]]:
    if (new := plan.request.new_tokens) is None:
        return []
    how = "learned from a text" if new.merges else "as given"
    rows = "one row each in the tied embedding and head" if plan.sizes.is_tied else "one row each in embedding and head"
    return [("new tokens", f"{len(new.tokens):,}, {how}, {rows}; the base keeps its {plan.sizes.vocabulary:,}")]


def _odd(plan: Plan) -> list[tuple[str, str]]:
    """Return surprising facts: a head that is not tied although config.json says so, and skipped tensors."""
    facts = plan.facts
    head = [("head", describe_head(plan.sizes.is_tied, facts.has_own_head))] * facts.has_own_head
    return [*head, ("not loaded", name_some(facts.not_loaded))]


def _added_by_layer(plan: Plan) -> dict[int, int]:
    added = dict.fromkeys(plan.layers, 0)
    for tensor in plan.tensors:
        if tensor.layer is not None:
            added[tensor.layer] += tensor.elements
    return added


def _outside_layers(plan: Plan) -> list[tuple[str, str]]:
    """Return the parameters added to embedding, final norm and head. They weigh most in a small model."""
    added = {tensor.name: tensor.elements for tensor in plan.tensors if tensor.layer is None}
    if not added:
        return []
    largest = max(added, key=lambda name: added[name])
    return [("outside layers", f"+{sum(added.values()):,}, of them {nameless(largest)} {added[largest]:,}")]


def _fused_form(plan: Plan) -> str:
    refused = plan.method.refusal("fuse") or plan.method.refusal("merge")
    if problems := refused or fused_problems(plan.architecture, plan.layers):
        return _none(problems[:1])
    return f"yes, by merge --to fused{_only(plan)}"


def _only(plan: Plan) -> str:
    return f", if the base's tensors are {plan.request.dtype} too" if plan.request.dtype else ""


def _router(plan: Plan) -> str:
    fork = min(plan.collaboration.layers, default=None)
    problems = plan.method.refusal("route") or path_problems(plan.architecture, fork)
    return _none(problems[:1]) if problems else "yes, by route-export"


def _none(problems: Iterable[Problem]) -> str:
    # the row says of which form it is
    reason = " ".join(str(problem).removeprefix(f"{problem.where}: ") for problem in problems)
    return f"none. {reason[:1].upper()}{reason[1:]}"


def _stock_form(plan: Plan) -> str:
    stock = plan.costs.stock
    if plan.method.adds_layers:
        caution = "; other programs must read layer_types, not layer numbers" if plan.architecture.layer_types else ""
        return f"the folder itself: {plan.family} with more layers, without custom code{caution}"
    if stock is None:
        return _none(stock_problems(plan.architecture, plan.sizes, plan.widths, has_gates=plan.has_gates))
    added = stock.parameters - plan.costs.parameters_before
    before, after = stock.before, stock.after
    changes = [f"of them {stock.padding:,} zeros"]
    if before.query_heads != after.query_heads:
        heads = [f"{widths.query_heads} query and {widths.key_value_heads} key/value" for widths in (before, after)]
        changes.append(f"heads from {heads[0]} to {heads[1]}")
    if before.inner != after.inner:
        changes.append(f"inner from {before.inner} to {after.inner}")
    return f"+{added:,} ({added / plan.costs.parameters_before:.1%}), {'; '.join(changes)}{_only(plan)}"


def _sample(plan: Plan) -> tuple[TensorPlan, ...]:
    # a collaborative layer has all blocks of a preservation layer
    shown = next(iter(plan.collaboration.layers or plan.layers), None)
    return tuple(tensor for tensor in plan.tensors if tensor.layer in (None, shown))


def _reach(plan: Plan) -> str:
    def down_to(first: int | None) -> str:
        return "none" if first is None else format_layers(tuple(range(first, plan.sizes.layers)))

    if (numbering := plan.numbering) is not None:
        reached = tuple(range(numbering.new[0], plan.sizes.layers + len(numbering.new)))
        return f"layer{'s' if len(reached) > 1 else ''} {format_layers(reached)}"
    if not plan.widths.up_width:
        return f"base stream: {down_to(plan.costs.base_stream_from)}"
    return f"up stream: {down_to(plan.costs.up_stream_from)}; base stream: {down_to(plan.costs.base_stream_from)}"


def _render_tensors(plan: Plan, tensors: tuple[TensorPlan, ...], note: str) -> RenderableType:
    table = NamedRows(["shape", "dtype", "init"], name="name", left=(2, 3))
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape))
        table.add_row(nameless(plan.stored_name(tensor.name)), shape, tensor.dtype, tensor.init)
    return Group(heading("new tensors", note), table)
