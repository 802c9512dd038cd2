"""The stages of a job: each is a command of this program, with its line to type and its place in the job's folder.

texts -> layers -> plan -> expand -> train -> route -> calibrate -> evaluate -> verify -> report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import BaseWeights, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import LOG_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.deriving.planned import load_plan, make_plan
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.evidence.evaluate import Evaluation, evaluate
from scale_surgery.evidence.report import report
from scale_surgery.evidence.verify import verify
from scale_surgery.learning.hold_out import (
    CALIBRATE,
    LARGEST_SHARE,
    LEARN,
    MEASURE,
    HoldOutSettings,
    TextSide,
    hold_out,
    part_file,
)
from scale_surgery.learning.processes import launch_line, launch_options, run_launched
from scale_surgery.learning.recipe import Recipe
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.saved import save_plan
from scale_surgery.progress import Track, no_track
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.choice import CalibrationSettings
from scale_surgery.running.learned_tokens import ChosenTokens
from scale_surgery.running.new_tokens import find_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.show.commands import changed_options, command, of_revision
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export, set_routing
from scale_surgery.surgery.routers import RouterOptions, describe_router
from scale_surgery.training.rank_layers import rank_layers
from scale_surgery.training.ranking import RankingSettings
from scale_surgery.training.result import Training
from scale_surgery.training.run_folder import CURVES_FILE, NEW_LOSS, SETTINGS_FILE, read_log
from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart
from scale_surgery.training.train import train

# values that a stage keeps for later stages and for the page, as plain JSON
Kept = Mapping[str, Any]
CHOSEN = "(chosen by the pilot)"


@dataclass(frozen=True)
class Work:
    """A job and its folder.

    Attributes:
        recipe: All settings.
        folder: Its folder.
        routes: Whether the model gets a router, which a recipe or a method may not have.
        has_pilot: Whether a pilot chooses layers; it has nothing to choose where the budget pays for all of them.
        is_one_of_several: Whether MODEL has expansions already.
    """

    recipe: Recipe
    folder: Path
    routes: bool
    has_pilot: bool = False
    is_one_of_several: bool = False

    @property
    def new(self) -> Path:
        """New text in parts."""
        return self.folder / "texts-new"

    @property
    def old(self) -> Path:
        """Old text in parts."""
        return self.folder / "texts-old"

    @property
    def plan_file(self) -> Path:
        """The plan."""
        return self.folder / "plan.json"

    @property
    def expanded(self) -> Path:
        """The expanded model, untrained."""
        return self.folder / "expanded"

    @property
    def learned(self) -> Path:
        """The trained model."""
        return self.folder / "learned"

    @property
    def routed(self) -> Path:
        """The trained model with its router."""
        return self.folder / "routed"

    @property
    def result(self) -> Path:
        """What the job ends with."""
        return self.routed if self.routes else self.learned

    @property
    def new_parts(self) -> tuple[TextSide, ...]:
        """Parts to set aside of the new text: for setting the router, and for measuring unless that is given."""
        sets_router = self.routes and bool(self.recipe.old)
        return (CALIBRATE,) * sets_router + (MEASURE,) * (not self.recipe.measure_new)

    @property
    def old_parts(self) -> tuple[TextSide, ...]:
        """Parts to set aside of the old text, likewise."""
        return ((CALIBRATE,) * self.routes + (MEASURE,) * (not self.recipe.measure_old)) * bool(self.recipe.old)

    @property
    def to_learn(self) -> list[str]:
        """Text to learn."""
        return [str(part_file(self.new, LEARN))] if self.new_parts else list(self.recipe.data)

    @property
    def candidates(self) -> Request:
        """What a pilot ranks: all layers, without new tokens, which are no part of one."""
        return replace(self.recipe.expansion, layers="all", new_tokens_init=Request.new_tokens_init)

    @property
    def tokens(self) -> TokenSource:
        """Where new tokens come from; of the text to learn, without what is set aside."""
        wanted = self.recipe.tokens
        is_learned = set(wanted.token_texts) == set(self.recipe.data)
        return replace(wanted, token_texts=tuple(self.to_learn)) if is_learned else wanted

    @property
    def training(self) -> TrainingSettings:
        """Settings of the training, with the name of the expansion where there are several."""
        name = self.recipe.expansion.name if self.is_one_of_several else None
        return replace(self.recipe.training, name=name)

    def measured(self, side: str) -> list[Path]:
        """Text to measure on, "old" or "new"; none where there is no old text."""
        given = self.recipe.measure_old if side == "old" else self.recipe.measure_new
        folder, has_any = (self.old, bool(self.recipe.old)) if side == "old" else (self.new, True)
        return list(map(Path, given)) if given else [part_file(folder, MEASURE)] if has_any else []

    @property
    def taking(self) -> BaseWeights:
        """How folders of the job share base shards."""
        return "copy" if self.recipe.base_weights == "copy" else "link"

    def running(self, *names: str) -> list[str]:
        """Options that say how models run, those that a command has."""
        without = {"device", "dtype", "trust_remote_code", "memory_bytes", "batch_size"} - set(names)
        return list(changed_options(self.recipe.running, RunOptions(), without))


@dataclass(frozen=True)
class Stage:
    """A stage of a job.

    Attributes:
        name: Name of the stage.
        line: Its command, which may depend on results of earlier stages.
        outputs: Folders and files that it makes.
        run: Runs it; gives the result to show, and the values to keep.
        renews: Whether outputs of an interrupted run are removed first; train continues from them.
    """

    name: str
    line: Callable[[Kept], str]
    outputs: Sequence[Path]
    run: Callable[[Kept, Track], tuple[Any, Kept]]
    renews: bool = True


def stages_of(work: Work) -> Iterator[Stage]:
    """The stages of a job, in order."""
    recipe = work.recipe
    if work.new_parts:
        yield _hold_out(work, "texts-new", recipe.data, replace(recipe.hold_out, parts=work.new_parts), work.new)
    if work.old_parts:
        settings = replace(recipe.hold_out, share=LARGEST_SHARE, parts=work.old_parts)
        yield _hold_out(work, "texts-old", recipe.old, settings, work.old)
    if work.has_pilot:
        yield _rank_layers(work)
    yield _plan(work)
    yield _expand(work)
    yield _train(work)
    if work.routes:
        yield _route(work)
        if recipe.old:
            yield _calibrate(work)
    yield _evaluate(work)
    yield _verify(work)
    yield _report(work)


def _plain(result: Any) -> Any:
    """A result as --json prints it."""
    from scale_surgery.show.console import to_json

    return to_json(result)


def _texts(option: str, files: Sequence[str | Path]) -> Iterator[str]:
    for file in files:
        yield from (option, str(file))


def _hold_out(work: Work, name: str, files: Sequence[str], settings: HoldOutSettings, output: Path) -> Stage:
    line = command("hold-out", *files, "-o", output, *changed_options(settings, HoldOutSettings()))
    return Stage(
        name, lambda kept: line, [output], lambda kept, track: (hold_out(files, output, settings, track=track), {})
    )


def _rank_layers(work: Work) -> Stage:
    recipe, file = work.recipe, work.folder / "layers.json"
    line = command(
        "rank-layers",
        recipe.model,
        *_texts("--data", work.to_learn),
        *changed_options(work.candidates, Request("all"), {"seed", "name"}),
        *changed_options(recipe.ranking, RankingSettings()),
        *of_revision(recipe.revision),
        *work.running("device", "trust_remote_code"),
        "-o",
        file,
    )

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        given: dict[str, Any] = {"run": recipe.running, "revision": recipe.revision, "track": track}
        ranking = rank_layers(recipe.model, work.to_learn, work.candidates, recipe.ranking, **given)
        write_json(file, _plain(ranking))
        return ranking, {"layers": ranking.argument}

    return Stage("layers", lambda kept: line, [file], run)


def _request(work: Work, kept: Kept) -> Request:
    """The request, with the layers that a pilot chose, or all where the budget pays for them."""
    if not work.recipe.chooses_layers:
        return work.recipe.expansion
    unchosen = CHOSEN if work.has_pilot else "all"
    return replace(work.recipe.expansion, layers=kept.get("layers", {}).get("layers", unchosen))


def _plan(work: Work) -> Stage:
    recipe = work.recipe

    def line(kept: Kept) -> str:
        request = _request(work, kept)
        options = list(changed_options(request, Request(request.layers), {"layers"}))
        options += changed_options(work.tokens, TokenSource())
        running = (*of_revision(recipe.revision), *work.running("trust_remote_code"))
        return command("plan", recipe.model, "--layers", request.layers, *options, *running, "-o", work.plan_file)

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        request = _request(work, kept)
        given: dict[str, Any] = {"revision": recipe.revision, "run": recipe.running, "track": track}
        if (tokens := find_new_tokens(recipe.model, work.tokens, **given)) is not None:
            request = replace(request, new_tokens=tokens.new_tokens if isinstance(tokens, ChosenTokens) else tokens)
        # its new tokens were tried when they were found
        source, checkpoint = open_model(recipe.model, recipe.revision)
        made = make_plan(
            checkpoint, request, name=source.name, revision=source.revision, run=recipe.running, track=track
        )
        save_plan(made, work.plan_file)
        return made, {"layers": request.layers, "parameters_added": made.costs.parameters_added}

    return Stage("plan", line, [work.plan_file], run)


def _expand(work: Work) -> Stage:
    recipe = work.recipe
    given: dict[str, Any] = {"revision": recipe.revision, "run": recipe.running}
    line = command(
        "expand",
        recipe.model,
        "--plan",
        work.plan_file,
        *of_revision(recipe.revision),
        "--base-weights",
        recipe.base_weights,
        *work.running("device", "trust_remote_code"),
        "-o",
        work.expanded,
    )

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        made: Plan = load_plan(recipe.model, work.plan_file, **given, track=track)
        done = expand(recipe.model, made, work.expanded, base_weights=recipe.base_weights, **given, track=track)
        return done, {"warnings": list(done.warnings)}

    return Stage("expand", lambda kept: line, [work.expanded], run)


def _train(work: Work) -> Stage:
    recipe = work.recipe
    eval_data = EvalData(old=work.measured("old"), new=work.measured("new"))
    launch = launch_options(recipe.processes, recipe.accelerate_config)
    words = [
        "train",
        work.expanded,
        *_texts("--data", work.to_learn),
        *(
            word
            for side in ("old", "new")
            for file in work.measured(side)
            for word in ("--eval-data", f"{side}={file}")
        ),
        *changed_options(work.training, TrainingSettings()),
        "--base-weights",
        work.taking,
        *work.running("device", "trust_remote_code"),
        "-o",
        work.learned,
    ]
    line = launch_line(words, launch)

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        if is_trained(work.learned):
            check_learned(work)
            return None, {}
        has_begun = (work.learned / TRAINING_FOLDER / SETTINGS_FILE).is_file()
        if launch:
            done = read_record(
                run_launched([*words, *["--resume"] * has_begun], launch, quiet=track is no_track), Training
            )
        else:
            start = TrainingStart(resume=has_begun, base_weights=work.taking)
            given: dict[str, Any] = {"eval_data": eval_data, "start": start, "run": recipe.running, "track": track}
            done = train(work.expanded, work.to_learn, work.learned, work.training, **given)
        check_learned(work)
        return done, {"steps": done.steps, "loss": done.loss, "warnings": list(done.warnings)}

    return Stage("train", lambda kept: line, [work.learned], run, renews=False)


def _route(work: Work) -> Stage:
    recipe = work.recipe
    line = command(
        "route-export",
        work.learned,
        "-o",
        work.routed,
        *changed_options(recipe.routing, RouterOptions()),
        "--base-weights",
        work.taking,
    )

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        return route_export(work.learned, work.routed, recipe.routing.make(), base_weights=work.taking, track=track), {}

    return Stage("route", lambda kept: line, [work.routed], run)


def _calibrate(work: Work) -> Stage:
    recipe, drawn = work.recipe, work.folder / "calibration.png"
    old, new = ([part_file(folder, CALIBRATE)] for folder in (work.old, work.new))
    line = command(
        "route-calibrate",
        work.routed,
        *_texts("--old", old),
        *_texts("--new", new),
        *changed_options(recipe.calibration, CalibrationSettings(), {"write", "plot"}),
        *work.running("batch_size", "dtype", "device", "trust_remote_code"),
        "--write",
        "-o",
        drawn,
    )

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        settings = replace(recipe.calibration, write=False, plot=drawn)
        calibration = route_calibrate(work.routed, old, new, settings, run=recipe.running, track=track)
        if calibration.is_within and (proposed := calibration.proposed.routing) is not None:
            set_routing(work.routed, proposed)
            calibration = replace(calibration, written=True)
        routing = calibration.proposed.routing if calibration.written else calibration.present.routing
        router = "" if routing is None else describe_router(routing)
        return calibration, {"within": calibration.is_within, "router": router}

    return Stage("calibrate", lambda kept: line, [drawn], run)


def _evaluate(work: Work) -> Stage:
    file = work.folder / "evaluation.json"
    old, new = (work.measured(side) for side in ("old", "new"))
    # each process holds the whole model
    launch = launch_options(work.recipe.processes)
    words = [
        "evaluate",
        work.result,
        *_texts("--old", old),
        *_texts("--new", new),
        *work.running("batch_size", "dtype", "device", "trust_remote_code"),
        "-o",
        file,
    ]

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        if launch:
            content, evaluation = run_launched(words, launch, quiet=track is no_track), None
            with suppress(ValueError):  # JSON has no number for a loss that is not finite
                evaluation = read_record(content, Evaluation)
            return evaluation, content
        evaluation = evaluate([work.result], old, new, run=work.recipe.running, track=track)
        write_json(file, _plain(evaluation))
        return evaluation, _plain(evaluation)

    return Stage("evaluate", lambda kept: launch_line(words, launch), [file], run)


def _verify(work: Work) -> Stage:
    file = work.folder / "verification.json"
    line = command("verify", work.result, *work.running("device", "trust_remote_code"), "-o", file)

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        verification = verify(work.result, run=work.recipe.running, track=track)
        write_json(file, _plain(verification))
        return verification, _plain(verification)

    return Stage("verify", lambda kept: line, [file], run)


def _report(work: Work) -> Stage:
    file = work.folder / "report.json"
    name = work.training.name
    named = [] if name is None else ["--name", name]
    line = command("report", work.result, *named, *work.running("device", "trust_remote_code"), "-o", file)

    def run(kept: Kept, track: Track) -> tuple[Any, Kept]:
        made = report(work.result, name=name, run=replace(work.recipe.running, batch_size=None), track=track)
        write_json(file, _plain(made))
        return made, {}

    return Stage("report", lambda kept: line, [file], run)


def is_trained(folder: Path) -> bool:
    """Whether a folder holds a training run that ended."""
    file = folder / TRAINING_FOLDER / SETTINGS_FILE
    return file.is_file() and bool(read_json(file).get("finished"))


def check_learned(work: Work) -> None:
    """Refuse to go on if the loss on new text is higher after the training than before it."""
    folder = work.learned / TRAINING_FOLDER
    losses = [entry[NEW_LOSS] for entry in read_log(folder / LOG_FILE) if NEW_LOSS in entry]
    if not losses or losses[-1] <= losses[0]:
        return
    rate = read_json(folder / SETTINGS_FILE)["learning_rate"]
    values = {"before": losses[0], "after": losses[-1], "rate": rate, "lower": rate / 5, "curves": folder / CURVES_FILE}
    raise TrainingError(Problem("loss-rose", work.learned, **values))
