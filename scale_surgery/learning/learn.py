"""The whole job: check everything, estimate it, run one stage after the other, write one page.

    OUT/learn.json      recipe, files that were read, what each stage that is done has kept
    OUT/recipe.yaml     the recipe, to read and to share
    OUT/...             a folder or a file for each stage
    OUT/learn.html      the page

A stage counts when learn.json says so, which is written after its outputs are whole. The same line typed again,
without --overwrite, goes on with the first one that does not. It is the first file there, and says too whether
another job has to go: so a folder that was left at any moment is known again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import specs_of_expansions
from scale_surgery.checkpoint.files import UNFINISHED
from scale_surgery.checkpoint.folder import LAYER_KEYS, Checkpoint
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.locks import locked
from scale_surgery.checkpoint.names import JOB_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import Source, find_beside_weights, open_model
from scale_surgery.deriving.base import read_base
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import CheckpointError, DataError, PlanError, Problem, SurgeryError, TrainingError
from scale_surgery.evidence.promises import verdict
from scale_surgery.evidence.rehearsed import ITSELF
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import check_paths_differ, describe_router, router_for
from scale_surgery.learning.estimate import Estimate, count_tokens, estimate_cost
from scale_surgery.learning.hold_out import text_files
from scale_surgery.learning.job_record import (
    Record,
    check_job_folder,
    check_there,
    clear_folder,
    gone_since,
    remove,
    take_up,
)
from scale_surgery.learning.learned import Learned, StageDone, rows_of, warnings_of
from scale_surgery.learning.presets import JobFacts, with_preset
from scale_surgery.learning.processes import unfit_type
from scale_surgery.learning.recipe import PRESET, Recipe, make_recipe, values_of
from scale_surgery.learning.recipe_file import write_recipe
from scale_surgery.learning.stages import Kept, Stage, Work, stages_of
from scale_surgery.planning.base import base_alone
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.paths import path_problems
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Track, no_track
from scale_surgery.routing.choice import read_limits
from scale_surgery.running.context import DEFAULT_LENGTH, choose_length, context_of
from scale_surgery.running.new_tokens import check_source
from scale_surgery.running.options import RunOptions
from scale_surgery.running.processes import count_launched
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.text.instructions import SHIPPED
from scale_surgery.text.sources import parse_source
from scale_surgery.text.uses import texts_of_two_uses
from scale_surgery.training.arguments import check_device
from scale_surgery.training.load_model import check_quantisation
from scale_surgery.training.rank_layers import plan_candidates, read_budget
from scale_surgery.training.settings import check_gates, check_groups, check_settings

RECIPE_FILE, PAGE_FILE, LOCK = "recipe.yaml", "learn.html", "job"
# files before learn.json: the lock, and learn.json half written
BEFORE = (f".{LOCK}.lock", UNFINISHED)
# bytes of all texts of a job up to which their content is compared if a time changed
MOST_HASHED = 1 << 28


@dataclass(frozen=True)
class JobEvents:
    """Functions that are called as a job goes on.

    Attributes:
        estimate: Called once, with what the job takes.
        begins: Called with the name of each stage before it starts, its line, and its number from 1.
        ends: Called with the name of each stage and its result.
    """

    estimate: Callable[[Estimate], None] = lambda estimate: None
    begins: Callable[[str, str, int], None] = lambda name, line, number: None
    ends: Callable[[str, Any], None] = lambda name, result: None


@dataclass(frozen=True)
class Job:
    """A job that was checked and can begin; `started` counts the seconds of earlier runs too."""

    work: Work
    stages: tuple[Stage, ...]
    estimate: Estimate
    record: Record
    started: float


def default_output(recipe: Recipe) -> Path:
    """The default folder of a job: `<name>-learn` in the current folder."""
    return Path(f"{Path(recipe.model).resolve().name}-learn")


def resolve_recipe(overrides: Mapping[str, Any]) -> Recipe:
    """Make a recipe of a preset and settings that override it.

    Args:
        overrides: Settings by name, such as "training.steps"; "preset" names the preset, by default "default".

    Returns:
        The recipe, with every setting.

    Raises:
        PlanError: If a setting is unknown or has a value that it cannot have, or there is no such preset.
        DataError: If a text is not there or cannot be read, or the model has no tokenizer.
        CheckpointError: If the model cannot be found.
    """
    given = {name: value for name, value in overrides.items() if name != PRESET}
    recipe = make_recipe(given)
    _stamp_texts(recipe)
    # as they were read, since a number may have come as text
    values = values_of(recipe)
    settings = {name: values[name] for name in given}
    return make_recipe(with_preset(overrides.get(PRESET) or "default", settings, _facts(recipe)))


def _facts(recipe: Recipe) -> JobFacts:
    source, checkpoint = open_model(recipe.model, recipe.revision)
    config = checkpoint.config.get("text_config") or checkpoint.config
    tokenizer = need_tokenizer(find_beside_weights(recipe.model, recipe.revision), source.name, recipe.running)
    count = count_tokens(recipe.data, tokenizer)
    tokens = None if count.is_least else count.tokens
    return JobFacts(
        layers=count_layers(checkpoint, recipe.running),
        context=context_of(config) or DEFAULT_LENGTH,
        tokens=tokens,
        processes=recipe.processes,
    )


def count_layers(checkpoint: Checkpoint, run: RunOptions) -> int:
    """Return the number of layers of a base: from its config, or else from what is derived of it."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    known = next((int(config[key]) for key in LAYER_KEYS if config.get(key)), None)
    return read_base(base_alone(checkpoint), run).sizes.layers if known is None else known


def prepare(
    recipe: Recipe,
    output: str | Path,
    *,
    overwrite: bool = False,
    started: float | None = None,
    track: Track = no_track,
) -> Job:
    """Check everything that a job needs, and estimate what it takes; its arguments and errors are those of `learn`."""
    # the time that a job takes counts from `started`, a time of `time.monotonic`; by default from this call
    started, folder = time.monotonic() if started is None else started, Path(output)
    _check_processes(recipe)
    _check_settings(recipe)
    check_job_folder(folder, JOB_FILE, BEFORE, inputs_of(recipe))
    read = _stamp_texts(recipe, hashed=True)
    record = Record(folder / JOB_FILE, values_of(recipe), read, clears=overwrite)
    if record.file.is_file() and not overwrite:
        record = take_up(record, recipe)
    source, checkpoint, made = _first_plan(recipe, record.kept, track)
    check_groups(recipe.model, made, recipe.training)
    check_gates(recipe.model, made, recipe.training)
    check_quantisation(recipe.model, made, recipe.training.base_quantization, recipe.running)
    has_pilot = recipe.chooses_layers and ("layers" in record.kept or not _pays_for_all(recipe, made))
    problems = _route_problems(made) if recipe.route else []
    routes = recipe.route and not problems
    others = specs_of_expansions(checkpoint.config.get(CONFIG_KEY, {}))
    if routes:
        _check_router(recipe, made, 1 + len(others))
    work = Work(recipe, folder, routes, has_pilot, is_one_of_several=bool(others))
    share, parts = recipe.hold_out.share, len(work.new_parts)
    if share * parts >= 1:
        raise PlanError(Problem("nothing-left-to-learn", "hold_out.share", share=share, parts=parts))
    if parts and (shared := work.tokens_of_data).has_any and not shared.has_all:
        raise PlanError(Problem("tokens-of-some-data", "--new-tokens-from"))
    if has_pilot and "layers" not in record.kept:
        plan_candidates(source, checkpoint, work.candidates, recipe.ranking, recipe.running)
    stages = tuple(stages_of(work))
    check_there(work, stages, record)
    notes = [f"no router: {problem}" for problem in problems]
    if recipe.chooses_layers and not has_pilot:
        notes.append(f"no pilot: --budget {recipe.ranking.budget} pays for all layers")
    estimate = estimate_cost(work, stages, checkpoint, made, record.kept, notes)
    return Job(work, stages, estimate, record, started - record.seconds)


def learn(
    recipe: Recipe,
    output: str | Path,
    *,
    overwrite: bool = False,
    events: JobEvents = JobEvents(),
    track: Track = no_track,
) -> Learned:
    """Do the whole job: set text aside, choose layers, expand, train, route, measure, verify, write one page.

    Args:
        recipe: All settings; see `make_recipe`.
        output: Folder of the job. One that an earlier run of the same recipe began is continued.
        overwrite: Whether a folder of another job is replaced.
        events: Functions that are called as it goes on.
        track: Makes progress bars.

    Returns:
        Scores of the base, the learned and the routed model, and the stages that ran.

    Raises:
        PlanError: If the recipe does not fit the model, or one of its stages would refuse a setting.
        DataError: If texts cannot be read, or there is too little.
        CheckpointError: If the model cannot be read, the folder belongs to something else or to another recipe, what an
            earlier run made is gone, or the disk has no room.
        TrainingError: If gates would train with nothing to rehearse, the job was interrupted, or training had to stop.
    """
    return run(prepare(recipe, output, overwrite=overwrite, track=track), events=events, track=track)


def run(job: Job, *, events: JobEvents = JobEvents(), track: Track = no_track) -> Learned:
    """Run a prepared job; see `learn`."""
    if (problem := job.estimate.disk_problem) is not None:
        raise CheckpointError(problem.within(job.work.folder))
    try:
        return _run(job, events, track)
    except KeyboardInterrupt as error:
        raise TrainingError(Problem("job-interrupted", job.work.folder)) from error


def _run(job: Job, events: JobEvents, track: Track) -> Learned:
    work, record = job.work, job.record
    events.estimate(job.estimate)
    work.folder.mkdir(parents=True, exist_ok=True)
    with locked(work.folder / LOCK, called=work.folder):
        record.write()
        if record.clears:
            _clear(record)
        write_recipe(work.recipe, work.folder / RECIPE_FILE)
        left = [stage for stage in job.stages if stage.name not in record.kept]
        for number, stage in enumerate(job.stages, start=1):
            if stage in left:
                events.begins(stage.name, stage.call(record.kept).line, number)
                result = _do(stage, job, track)
                _write_record(job)
                events.ends(stage.name, result)
    done = _describe(job, record.done)
    gone = [*gone_since(job.stages, record).values(), *([] if done.page.is_file() else [done.page])]
    missing = [f"gone since the job was done: {', '.join(map(str, gone))}."] if gone else []
    return replace(done, warnings=(*done.warnings, *missing))


def _write_record(job: Job) -> None:
    job.record.seconds = time.monotonic() - job.started
    job.record.write()


def _clear(record: Record) -> None:
    """Remove the files of another job; until then the record says that they have to go."""
    clear_folder(record.file.parent, (JOB_FILE, *BEFORE))
    record.clears = False
    record.write()


def _do(stage: Stage, job: Job, track: Track) -> Any:
    """Run a stage and record its result; outputs of an interrupted run are removed first."""
    record, started = job.record, time.monotonic()
    call = stage.call(record.kept)
    if stage.renews:
        remove(stage.output)
    try:
        result = stage.run(call, track)
        kept = stage.keep(result)
        if stage is job.stages[-1]:
            _write_page(job, stage, result, time.monotonic() - started)
    except (KeyboardInterrupt, SurgeryError) as error:
        with suppress(OSError, SurgeryError):  # a full disk may be the reason
            _write_record(job)
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
            raise TrainingError(Problem("stage-interrupted", job.work.folder, stage=stage.name)) from error
        raise
    record.kept[stage.name] = kept
    record.done[stage.name] = {"line": call.line, "seconds": time.monotonic() - started}
    return result


def _write_page(job: Job, last: Stage, report: Any, seconds: float) -> None:
    from scale_surgery.learning.page import render_learned_page
    from scale_surgery.show.pages.filling import write

    done = {last.name: {"line": last.call(job.record.kept).line, "seconds": seconds}}
    job.record.seconds = time.monotonic() - job.started
    page = render_learned_page(_describe(job, {**job.record.done, **done}), report)
    write(page, job.work.folder / PAGE_FILE)


def _describe(job: Job, done: Mapping[str, Mapping[str, Any]]) -> Learned:
    work, kept = job.work, job.record.kept
    verification, made = kept["verify"], read_manifest(work.result)
    return Learned(
        path=work.folder,
        model=work.recipe.model,
        result=work.result,
        layers=kept["plan"]["layers"],
        parameters_added=kept["plan"]["parameters_added"],
        router=None if made.routing is None else describe_router(made.routing, list(made.expansions)),
        rows=rows_of(kept["evaluate"], routed=work.routes, name=work.training.name),
        verified=verification["passed"],
        promises={promise["name"]: _promised(promise) for promise in verification["promises"]},
        stages=tuple(StageDone(name, stage["line"], stage["seconds"]) for name, stage in done.items()),
        seconds=job.record.seconds,
        page=work.folder / PAGE_FILE,
        warnings=warnings_of(kept, has_old=bool(work.measured("old")), routed=work.routes),
    )


def _promised(promise: Mapping[str, Any]) -> str:
    result = verdict(holds=promise["holds"], claimed=promise["claimed"], required=False)
    return result if result == "not claimed" else f"{result}: {promise['evidence']}"


def _check_processes(recipe: Recipe) -> None:
    if (started := count_launched()) > 1:
        raise TrainingError(Problem("job-launched", processes=started))
    if (config := recipe.accelerate_config) is None:
        return
    if recipe.processes == 1:
        raise PlanError(Problem("config-of-one-process", "--accelerate-config", config=config))
    if not Path(config).is_file():
        raise PlanError(Problem("accelerate-config-missing", config))
    if (kind := unfit_type(Path(config))) is not None:
        raise PlanError(Problem("accelerate-config-unfit", config, kind=kind))


def _check_settings(recipe: Recipe) -> None:
    """Check the settings that later stages would refuse: a job that has begun takes no other recipe."""
    checks: list[Callable[[], object]] = [
        *([recipe.routing.make] if recipe.route else []),
        lambda: check_settings(recipe.training),
        lambda: check_device(recipe.running),
        lambda: check_source(recipe.tokens),
    ]
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except SurgeryError as error:
            problems += error.problems
    if recipe.training.routed:
        problems.append(Problem("routed-before-router", "training.routed"))
    problems += _texts_of_two_uses(recipe)
    if problems:
        raise PlanError(*problems)


def _texts_of_two_uses(recipe: Recipe) -> Iterator[Problem]:
    """Yield texts to measure on that are trained or calibrated on, or of which new tokens are chosen, as well."""
    rehearsed = tuple(name for name in recipe.training.rehearse if name != ITSELF)
    prompts = recipe.training.rehearsal_prompts
    learned = {
        "--data": recipe.data,
        "--rehearse": rehearsed,
        "rehearsal_prompts": () if prompts in (None, SHIPPED) else (prompts,),
        "--new-tokens-from": recipe.tokens.token_texts,
    }
    uses = {
        "measure_new": (recipe.measure_new, learned | {"--old": recipe.old}),
        "measure_old": (recipe.measure_old, learned | {"--old": recipe.old}),
        "--old": (recipe.old, learned),
    }
    return texts_of_two_uses(uses)


def inputs_of(recipe: Recipe) -> dict[str, Path]:
    """The paths of all that a job reads, by their names."""
    others = (recipe.model, recipe.tokens.token_file, recipe.accelerate_config)
    inputs = {str(name): Path(name) for name in others if name is not None}
    return inputs | {name: parse_source(name).path for name in _texts(recipe)}


def _texts(recipe: Recipe) -> tuple[str, ...]:
    """Return every text that a job reads, as it was named."""
    given = (*recipe.data, *recipe.old, *recipe.measure_new, *recipe.measure_old, *recipe.tokens.token_texts)
    beginnings = recipe.training.rehearsal_prompts
    rehearsed = (name for name in recipe.training.rehearse if name != ITSELF)
    return (*given, *rehearsed, *([] if beginnings in (None, SHIPPED) else [beginnings]))


def _stamp_texts(recipe: Recipe, *, hashed: bool = False) -> dict[str, list[Any]]:
    """Sizes and times of all texts, and of files with tokens and settings: none may change until the job ends.

    Where `hashed`, files have their sha256 too if all of them are not large, since a copy of a file has another time.
    """
    given = _texts(recipe)
    others = [Path(name) for name in (recipe.tokens.token_file, recipe.accelerate_config) if name is not None]
    sources = {name: parse_source(name) for name in given}
    missing = [name for name, source in sources.items() if not source.path.exists() and not source.is_on_hub]
    if missing:
        raise DataError(*(Problem("text-not-found", name) for name in missing))
    files = [*text_files(given), *(file for file in others if file.is_file())]
    stamps: dict[str, list[Any]] = {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    # a corpus would be read without a progress bar
    if hashed and sum(size for size, _ in stamps.values()) <= MOST_HASHED:
        return {file: [*stamp, hash_file(Path(file))] for file, stamp in stamps.items()}
    return stamps


def _first_plan(recipe: Recipe, kept: Mapping[str, Kept], track: Track) -> tuple[Source, Checkpoint, Plan]:
    """The model and its plan, or that of all layers where none are chosen yet, so that misfits are errors now."""
    request = recipe.expansion
    if recipe.chooses_layers:
        request = replace(request, layers=kept.get("layers", {}).get("layers", "all"))
    if recipe.tokens.is_wanted:
        # which they are is found out of the text that is learned; here their number is enough
        request = replace(request, new_tokens=NewTokens(tuple(map(str, range(recipe.tokens.token_count)))))
    source, checkpoint = open_model(recipe.model, recipe.revision)
    choose_length(recipe.training.sequence_length, {recipe.model: context_of(checkpoint.config)})
    given: dict[str, Any] = {"revision": source.revision, "run": recipe.running, "track": track}
    return source, checkpoint, make_plan(checkpoint, request, name=source.name, **given)


def _pays_for_all(recipe: Recipe, made: Plan) -> bool:
    """Return True if the budget pays for all layers, so that a pilot has no choice."""
    return made.costs.parameters_added <= read_budget(recipe.ranking.budget, made.costs.parameters_before)


def _check_router(recipe: Recipe, made: Plan, expansions: int) -> None:
    """Check what would be refused when the model has learned: its router, and the limits of setting it."""
    router = router_for(recipe.routing.make(), expansions)
    check_paths_differ(router, bool(made.collaboration.layers))
    if recipe.old:
        read_limits(recipe.calibration, router)


def _route_problems(made: Plan) -> list[Problem]:
    """List why an expansion cannot be routed; nothing if it can."""
    fork = min(made.collaboration.layers, default=None)
    return made.method.refusal("route") or path_problems(made.architecture, fork)
