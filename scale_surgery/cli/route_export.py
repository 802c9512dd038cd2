"""The command route-export: parse, call one function, hand its result to the console."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, given, named, options_from, output_options, overwrite_options
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.fields import fields_of
from scale_surgery.folder.routers import RouterOptions
from scale_surgery.modeling.expanded_routers import ROUTERS

if TYPE_CHECKING:
    from scale_surgery.modeling.expanded_routers import Router
    from scale_surgery.show.console import Output


def make_routing(router: str, options: dict[str, Any]) -> Router | None:
    """Return the router from command line options; None removes it. Options of other routers are rejected."""
    settings = given(options)
    known = [field.name for field in fields(ROUTERS[router])] if router in ROUTERS else []
    if foreign := [name for name in settings if name not in known]:
        raise click.UsageError(f"{named(foreign)} does not go with --router {router}.")
    return RouterOptions(router, **settings).make() if router in ROUTERS else None


@click.command(name="route-export", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--router",
    type=click.Choice([*ROUTERS, "none"]),
    default="posterior",
    show_default=True,
    help=f"{fields_of(RouterOptions)['router'].help} none removes the router of EXPANDED.",
)
@options_from(RouterOptions, *(name for name in fields_of(RouterOptions) if name != "router"))
@overwrite_options
@output_options
def route_export_command(
    expanded: Path, output: Path, router: str, base_weights: Any, overwrite: bool, out: Output, **options: Any
) -> None:
    """Add a router to EXPANDED. One forward pass computes two paths, and the router decides token by token.

    The preserve path has no W12 and keeps the base's knowledge. The adapt path is the trained model. No weight
    changes.

    \b
    Example: scale-surgery route-export EXPANDED -o ROUTED
    """
    from scale_surgery.show.tables import render_routed
    from scale_surgery.surgery.route import route_export, unroute

    taking: Any = {"base_weights": base_weights, "overwrite": overwrite, "track": out.track}
    routing = make_routing(router, options)
    done = unroute(expanded, output, **taking) if routing is None else route_export(expanded, output, routing, **taking)
    out.show(done, render_routed(done))
