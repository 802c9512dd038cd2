"""The command compose: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import as_list, output_options, overwrite_options
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.errors import counted

if TYPE_CHECKING:
    from scale_surgery.modeling.expanded_routers import Router
    from scale_surgery.show.console import Output


@click.command(name="compose", cls=Headed)
@click.argument("base")
@click.argument("extracts", nargs=-1)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--names",
    callback=as_list,
    metavar="A,B",
    help="Names of the expansions, in the order of EXTRACTS: letters, digits and underscores. An expansion named "
    "default gets the name of its folder: qwen3-law becomes qwen3_law.  [default: their own names]",
)
@click.option(
    "--remove",
    multiple=True,
    metavar="NAME",
    help="Expansion of BASE to leave out, even if it is damaged. BASE is then an expanded folder. Can be repeated.",
)
@click.option(
    "--prior",
    callback=as_list,
    metavar="W,W",
    help="Weights of the base and of each expansion at the start of a text. Their sum is 1.  [default: all equal]",
)
@click.option(
    "--switch-rate",
    type=float,
    help="Share of weight that each path passes to the others at every token. With 0, the loss of any text is "
    "bounded.  [default: 0.01; at least 0 and less than 1]",
)
@overwrite_options
@output_options
def compose_command(
    base: str,
    extracts: tuple[str, ...],
    output: Path,
    names: tuple[str, ...] | None,
    out: Output,
    **options: Any,
) -> None:
    """Combine EXTRACTS of one BASE into one folder, which loads as one model.

    The router weighs K + 1 paths, the base and every expansion, by how well each predicted the text so far. BASE is the
    base model, or an expanded folder. To the latter, expansions can be added, and --remove removes some.

    \b
    Example: scale-surgery compose MODEL MEDICINE LAW -o COMPOSED
    """
    from scale_surgery.show.tables_forms import render_composed
    from scale_surgery.surgery.compose import compose

    if names is not None and len(names) != len(extracts):
        raise click.UsageError(
            f"--names gives {counted(len(names), 'name')} for {counted(len(extracts), 'extract')}, expected one for "
            "each."
        )
    if names is not None and len(set(names)) < len(names):
        raise click.UsageError(f"--names {','.join(names)}: one name stands twice, expected another for each extract.")
    named = extracts if names is None else dict(zip(names, extracts, strict=True))
    changes = bool(extracts or options["remove"])
    routing = router_of_composition(base, options.pop("prior"), options.pop("switch_rate"), changes=changes)
    done = compose(base, named, output, routing=routing, track=out.track, **options)
    out.show(done, render_composed(done))


def router_of_composition(
    base: str, prior: tuple[str, ...] | None, switch_rate: float | None, *, changes: bool
) -> Router | None:
    """Return the router of a composition from command line options, or None if no option is given."""
    from scale_surgery.checkpoint.names import MANIFEST_FILE
    from scale_surgery.checkpoint.sources import find_source
    from scale_surgery.folder.record import read_manifest
    from scale_surgery.modeling.expanded_routers import PosteriorRouter

    if prior is None and switch_rate is None:
        return None
    try:
        weights = None if prior is None else tuple(map(float, prior))
    except ValueError as error:
        raise click.UsageError(
            f"--prior {','.join(prior or ())}: expected numbers with commas between them."
        ) from error
    path = find_source(base).path
    before = read_manifest(path).routing if (path / MANIFEST_FILE).is_file() else None
    # the switch rate of an expanded folder is kept if none is given
    usual = before if isinstance(before, PosteriorRouter) else PosteriorRouter()
    rate = usual.switch_rate if switch_rate is None else switch_rate
    # added or removed expansions reset all weights to equal
    return PosteriorRouter(weights or (None if changes else usual.prior), rate)
