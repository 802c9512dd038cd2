"""The command learn: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    BASE_CODE,
    OLD_HELP,
    options_from,
    output_options,
    read_settings,
    run_options,
)
from scale_surgery.cli.outputs import OUTPUT_FOLDER, OutputFile
from scale_surgery.errors import render
from scale_surgery.learning.recipe import PresetName, Recipe
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.request import Request
from scale_surgery.training.ranking import RankingSettings
from scale_surgery.training.settings import TrainingSettings

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

# settings with their own option, by section; all others are set by --set
EXPANSION, RANKING = ("layers", "name"), ("budget",)
TRAINING = ("steps", "epochs", "learning_rate", "sequence_length", "batch_size", "rehearse")
TOP = ("processes", "accelerate_config")
RUNNING = ("device", "trust_remote_code")
TOKENS = ("token_file", "token_texts", "token_count")
SHORT = {"expansion": EXPANSION, "tokens": TOKENS, "ranking": RANKING, "training": TRAINING, "running": RUNNING}
HELPS = {
    "layers": "Layers to expand, in the syntax of plan. auto: chosen by rank-layers.  [default: the last quarter]",
    "budget": "Parameters that the expansion may add: a share of the base's, or a number, such as 200M. With this "
    "option and without --layers, a pilot chooses the layers.",
    "learning_rate": "Peak learning rate of all tensors, after the warm-up.",
}
# a preset has other defaults than the single commands
USUAL = dict.fromkeys(("epochs", "batch_size"), "from the preset")
USUAL |= {"learning_rate": "from the width of the model"}


def settings_from(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given settings, by their names in a recipe.

    --set overrides options, and options override the recipe.
    """
    from scale_surgery.learning.recipe import missing_settings, preset_problems
    from scale_surgery.learning.recipe_file import read_recipe

    recipe, given = options.pop("recipe"), options.pop("given")
    settings = {} if recipe is None else read_recipe(recipe)
    settings |= {name: value for name in ("model", "preset") if (value := options.pop(name)) is not None}
    said = _from_options(options) | read_settings(given)
    # what is said here overrides what the recipe has in its place
    replaced = {"expansion.layers": "ranking.budget" in said, "training.steps": said.get("training.epochs") is not None}
    settings = {name: value for name, value in settings.items() if not replaced.get(name)} | said
    # checked after merging, because the recipe may also set them
    if problems := [*missing_settings(settings), *preset_problems(settings.get("preset"))]:
        raise click.UsageError("\n".join(render(problems)))
    return settings


def _from_options(options: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for section, names in SHORT.items():
        values = {f"{section}.{name}": options.pop(name) for name in names}
        # False is a flag that was not given; 0 equals False, but was given
        settings |= {name: value for name, value in values.items() if value is not None and value is not False}
    texts = {name: tuple(map(str, options.pop(name))) for name in ("data", "old")}
    settings |= {name: files for name, files in texts.items() if files}
    return settings | {name: value for name in (*TOP, "revision") if (value := options.pop(name)) is not None}


@click.command(name="learn", cls=Headed, first=("data", "old", "output", "layers", "preset"))
@click.argument("model", required=False)
@click.option("--data", multiple=True, help="Text to learn: a file, a folder or a dataset of the Hub. Can be repeated.")
@click.option("--old", multiple=True, help=OLD_HELP)
@click.option("-o", "--output", type=OUTPUT_FOLDER, help="Folder of the job. Default: ./<name>-learn.")
@options_from(Request, *EXPANSION, helps=HELPS, usual=USUAL)
@options_from(TokenSource, *TOKENS)
@options_from(RankingSettings, *RANKING, helps=HELPS)
@options_from(TrainingSettings, *TRAINING, helps=HELPS, usual=USUAL)
@options_from(Recipe, *TOP)
@click.option(
    "--preset",
    type=click.Choice(get_args(PresetName)),
    help="Set of initial settings. default: the last quarter of the layers and a router. one-path: gates and rehearsal "
    "in all layers, without a router. paper: the run of arXiv 2511.03270, with its cosine router.  [default: default]",
)
@click.option("--recipe", type=click.Path(path_type=Path), help="YAML file with settings. Options override it.")
@click.option(
    "--set",
    "given",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any setting of a recipe, such as training.warmup=0.1. Can be repeated.",
)
@click.option("--write-recipe", type=OutputFile(".yaml", ".yml"), help="Write the recipe with all settings, and stop.")
@click.option("--dry-run", is_flag=True, help="Show every command and all missing requirements, and stop.")
@click.option("--overwrite", is_flag=True, help="Replace the job in an existing folder.")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@run_options("device", code=BASE_CODE)
@output_options
def learn_command(
    output: Path | None, write_recipe: Path | None, dry_run: bool, overwrite: bool, out: Output, **options: Any
) -> None:
    """Teach MODEL the text of --data, in one job. The result is a verified model that keeps its base.

    The stages: hold text out for measurements, plan, expand the last quarter of the layers (or --layers), train, add a
    router and calibrate it, measure, verify, and write one page. The command of each stage is shown. With --old, the
    router is calibrated on old text and forgetting is measured.

    The same command, without --overwrite, resumes an interrupted job. A YAML file can hold all settings.

    \b
    Example: scale-surgery learn MODEL --data new.jsonl --old old.txt -o OUT
    On several GPUs: scale-surgery learn MODEL --data FILE --processes 8
    Recipes: scale-surgery learn MODEL --data FILE --write-recipe r.yaml
             scale-surgery learn --recipe r.yaml -o OUT
    """
    started = time.monotonic()  # the time includes imports, because the user waits for them too
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.learning.learn import JobEvents, default_output, inputs_of, prepare, resolve_recipe, run
    from scale_surgery.learning.recipe_file import write_recipe as write
    from scale_surgery.learning.tables import (
        render_estimate,
        render_learned,
        render_lines,
        render_recipe,
        render_result,
        render_stage,
    )

    recipe_file = options["recipe"]
    resolved = resolve_recipe(settings_from(options))
    if write_recipe is not None:
        check_output_files([write_recipe], [*inputs_of(resolved).values(), *filter(None, [recipe_file])])
        write(resolved, write_recipe)
        out.show(resolved, render_recipe(write_recipe))
        return
    job = prepare(resolved, output or default_output(resolved), overwrite=overwrite, started=started, track=out.track)
    if dry_run:
        out.show(job.estimate, render_estimate(job.estimate))
        out.say(render_lines(job.estimate))
        return

    def begins(name: str, line: str, number: int) -> None:
        out.begin(name, f"stage {number} of {len(job.stages)}")
        out.say(render_stage(name, line, number), as_it_is=True)

    def ends(name: str, result: Any) -> None:
        if (shown := render_result(name, result)) is not None:
            out.say(shown)

    events = JobEvents(
        estimate=lambda estimate: out.say(render_estimate(estimate)),
        begins=begins,
        ends=ends,
    )
    learned = run(job, events=events, track=out.track)
    out.say("")
    out.show(learned, render_learned(learned))
    sys.exit(0 if learned.verified else 1)
