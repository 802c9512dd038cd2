"""The commands about routing: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import FOLDER, Command, add_options, output_options, overwrite_options

if TYPE_CHECKING:
    from scale_surgery.planning.routing_specs import Routing
    from scale_surgery.show.console import Output


def routing_options(command: Command) -> Command:
    """Add the numbers of both routers; defaults stand in the dataclass."""
    options = [
        click.option(
            "--threshold", type=float, help="Cosine above which a token takes the preserve path. Default: 0.5."
        ),
        click.option("--prior", type=float, help="Weight of the base at the start of a text, 0 to 1. Default: 0.5."),
        click.option(
            "--switch-rate",
            type=float,
            help="Share of its weight that each path gives to the other at every token. Default: 0.01.",
        ),
        click.option("--strict", is_flag=True, help="The preserve side is the base's output alone; posterior: always."),
    ]
    return add_options(command, options)


def make_routing(router: Any, options: dict[str, Any]) -> Routing | None:
    """How to route, from command line options, None for not at all; an option of another router is refused."""
    from scale_surgery.planning.routing_specs import Routing

    given = {name: value for name, value in options.items() if value is not None and value is not False}
    foreign = {"cosine": ("prior", "switch_rate"), "posterior": ("threshold",), "none": tuple(given)}[router]
    named = [f"--{name.replace('_', '-')}" for name in foreign if name in given]
    if named:
        raise click.UsageError(f"{', '.join(named)} does not go with --router {router}.")
    return None if router == "none" else Routing(router, **given)


@click.command(name="route-export")
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder to be.")
@click.option(
    "--router",
    type=click.Choice(["posterior", "cosine", "none"]),
    default="posterior",
    show_default=True,
    help="posterior: by how well each path predicted the text so far. cosine: by the cosine of both paths' logits, as "
    "in the paper. none: take the router of EXPANDED away.",
)
@routing_options
@overwrite_options
@output_options
def route_export_command(
    expanded: Path, output: Path, router: str, base_weights: Any, overwrite: bool, out: Output, **options: Any
) -> None:
    """Give EXPANDED a router: one forward pass, two paths, and each token from the one that knows it.

    \b
    Example: scale-surgery route-export EXPANDED -o ROUTED
    """
    from scale_surgery.show.tables_route import render_routed
    from scale_surgery.surgery.route import route_export, unroute

    taking: Any = {"base_weights": base_weights, "overwrite": overwrite, "track": out.track}
    routing = make_routing(router, options)
    done = unroute(expanded, output, **taking) if routing is None else route_export(expanded, output, routing, **taking)
    out.show(done, render_routed(done))
