"""Where W12 exists: the collaborative layers of an expansion, and the groups of linears in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scale_surgery.errors import PlanError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.selection import format_layers, select_layers
from scale_surgery.planning.specs import Collaboration, Widths

if TYPE_CHECKING:
    from scale_surgery.planning.request import Request


def resolve_collaboration(
    architecture: Architecture, request: Request, layers: tuple[int, ...], widths: Widths
) -> tuple[Collaboration, list[str]]:
    """Say in which layers, and in which linears of them, W12 exists."""
    if request.variant == "preserve":
        return Collaboration((), ()), _preserve_problems(request, widths)
    problems: list[str] = []
    chosen = layers
    if request.collaborative_layers is not None:
        try:
            chosen = select_layers(
                request.collaborative_layers, len(architecture.kind_of_layer), "--collaborative-layers"
            )
        except PlanError as error:
            problems.append(str(error))
    groups = _resolve_groups(request, widths)
    outside = sorted(set(chosen) - set(layers))
    if layers and outside:
        problems.append(
            f"--collaborative-layers {request.collaborative_layers}: {', '.join(map(str, outside))} not among the "
            f"expanded layers, which are {format_layers(layers)}. Choose among those, or add to --layers."
        )
    problems += _sealed_problems(request, layers, chosen, groups, widths)
    problems += [] if problems else _idle_problems(architecture, chosen, groups, widths)
    return Collaboration(chosen, groups), problems


def _resolve_groups(request: Request, widths: Widths) -> tuple[str, ...]:
    if request.collaborate == "both":
        return ("attn", "ffn")
    if request.collaborate is not None:
        return (request.collaborate,)
    if widths.up_width:
        return ("attn",)
    # without an up stream W12 is the only way out of what is added
    return _needed_groups(widths)


def _needed_groups(widths: Widths) -> tuple[str, ...]:
    return (("attn",) if widths.up_kv_heads else ()) + (("ffn",) if widths.up_inner_width else ())


def _preserve_problems(request: Request, widths: Widths) -> list[str]:
    problems = []
    if widths.up_width == 0:
        problems.append(
            f"{no_up_stream(request)} with --variant preserve: without an up stream, W12 is the only way out of the "
            "new heads and the new inner features, and preserve has none. Use --variant adapt, or an --up-width."
        )
    for option, value in (
        ("--collaborative-layers", request.collaborative_layers),
        ("--collaborate", request.collaborate),
    ):
        if value is not None:
            problems.append(f"{option} {value} with --variant preserve: it has no W12. Use --variant adapt.")
    return problems


def no_up_stream(request: Request) -> str:
    """What left no up stream: the width that was asked for, or the heads from which it follows."""
    if request.up_width is None and request.up_kv_heads == 0:
        return "--up-kv-heads is 0 (and so the up width, which is that of the new heads)"
    return "--up-width is 0"


def _sealed_problems(
    request: Request, layers: tuple[int, ...], chosen: tuple[int, ...], groups: tuple[str, ...], widths: Widths
) -> list[str]:
    if widths.up_width:
        return []
    problems = []
    if set(layers) - set(chosen):
        problems.append(
            f"{no_up_stream(request)}: --collaborative-layers names {format_layers(chosen)}, expected every expanded "
            f"layer, {format_layers(layers)}. Leave the option out."
        )
    missing = [group for group in _needed_groups(widths) if group not in groups]
    if missing:
        problems.append(
            f"{no_up_stream(request)} and --collaborate leaves out {' and '.join(missing)}: what is added there would "
            "have no way out. Use --collaborate both, or add nothing there."
        )
    return problems


def _idle_problems(
    architecture: Architecture, chosen: tuple[int, ...], groups: tuple[str, ...], widths: Widths
) -> list[str]:
    """Some layers have attention and no MLP or the other way round, and beside some blocks nothing may be added."""
    blocks = [block for layer in chosen for block in architecture.kind(layer).blocks]
    found = {block.group for block in blocks if block.treatment != "block" or widths.up_inner_width}
    if not (chosen and groups) or found & set(groups):
        return []
    return [
        f"--collaborate {' and '.join(groups)}: layers {format_layers(chosen)} have nothing of that kind in which W12 "
        "could stand, so nothing would be written into the base stream. Use "
        + "".join(f"--collaborate {group}, " for group in sorted(found))
        + "other --collaborative-layers, or --variant preserve."
    ]
