"""The stages of a job: each is a command of this program, with its line to type and its place in the job's folder.

texts -> layers -> plan -> expand -> train -> route -> calibrate -> evaluate -> verify -> report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import BaseWeights, makes_links
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import LOG_FILE, SETTINGS_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.deriving.planned import load_plan, make_plan
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.evidence.evaluate import Evaluation, evaluate
from scale_surgery.evidence.report import report
from scale_surgery.evidence.verify import verify
from scale_surgery.folder.routers import RouterOptions, describe_router
from scale_surgery.learning.calls import Call
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
from scale_surgery.learning.processes import launch_options
from scale_surgery.learning.recipe import AUTO, Recipe
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.saved import save_plan
from scale_surgery.progress import Track
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.calibration import Calibration
from scale_surgery.routing.choice import CalibrationSettings
from scale_surgery.running.learned_tokens import ChosenTokens
from scale_surgery.running.new_tokens import find_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.expand import Expansion, expand
from scale_surgery.surgery.route import Routed, route_export
from scale_surgery.text.uses import SharedTexts, compare_texts
from scale_surgery.training.rank_layers import rank_layers
from scale_surgery.training.result import Training
from scale_surgery.training.run_folder import CURVES_FILE, NEW_LOSS, read_log
from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart
from scale_surgery.training.train import train

# values that a stage keeps for later stages and for the page, as plain JSON
Kept = Mapping[str, Any]


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
        """Folder of the finished model: routed, or learned without a router."""
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
        """Request all layers, for a pilot to rank. Seed, name and new tokens belong to the later expansion."""
        usual = Request("all")
        others = {name: getattr(usual, name) for name in ("layers", "seed", "name", "new_tokens_init")}
        return replace(self.recipe.expansion, **others)

    @property
    def tokens(self) -> TokenSource:
        """Return the sources of new tokens; of a text to learn, without its held-out part."""
        wanted, shared = self.recipe.tokens, self.tokens_of_data
        texts = (*self.to_learn, *shared.apart) if self.new_parts and shared.has_any else wanted.token_texts
        return replace(wanted, token_texts=texts)

    @property
    def tokens_of_data(self) -> SharedTexts:
        """Find what the texts of new tokens have in common with the text to learn."""
        return compare_texts(self.recipe.tokens.token_texts, list(map(str, self.recipe.data)))

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

    @cached_property
    def taking(self) -> BaseWeights:
        """How folders of the job share base shards."""
        wanted = self.recipe.base_weights
        return "copy" if wanted == "copy" or (wanted == "auto" and not makes_links(self.folder)) else "link"

    def run(self, *names: str) -> RunOptions:
        """Return how models run, of which a command reads these fields."""
        return RunOptions(**{name: getattr(self.recipe.running, name) for name in names})


@dataclass(frozen=True)
class Stage:
    """A stage of a job.

    Attributes:
        name: Name of the stage.
        call: Makes its call, which may depend on results of earlier stages.
        output: Folder or file that it makes.
        keep: Returns the values to keep of its result.
        run: Runs the call and returns the result.
        renews: Whether the output of an interrupted run is removed first; train continues from it.
    """

    name: str
    call: Callable[[Kept], Call]
    output: Path
    keep: Callable[[Any], Kept] = lambda result: {}
    run: Callable[[Call, Track], Any] = Call.run
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


def _hold_out(work: Work, name: str, files: Sequence[str], settings: HoldOutSettings, output: Path) -> Stage:
    call = Call("hold-out", hold_out, {"data": files, "output": output, "settings": settings})
    return Stage(name, lambda kept: call, output)


def _rank_layers(work: Work) -> Stage:
    recipe, file = work.recipe, work.folder / "layers.json"
    arguments = {
        "model": recipe.model,
        "data": work.to_learn,
        "request": work.candidates,
        "settings": recipe.ranking,
        "revision": recipe.revision,
        "run": work.run("device", "trust_remote_code"),
    }
    call = Call("rank-layers", rank_layers, arguments, saved=file)
    return Stage("layers", lambda kept: call, file, lambda ranking: {"layers": ranking.argument})


def _plan(work: Work) -> Stage:
    recipe = work.recipe

    def call(kept: Kept) -> Call:
        request = recipe.expansion
        if recipe.chooses_layers:
            # the budget pays for all layers if there is no pilot
            unchosen = AUTO if work.has_pilot else "all"
            request = replace(request, layers=kept.get("layers", {}).get("layers", unchosen))
        arguments = {
            "model": recipe.model,
            "request": request,
            "tokens": work.tokens,
            "revision": recipe.revision,
            "run": work.run("trust_remote_code"),
            "output": work.plan_file,
        }
        remark = "the pilot chooses the value of --layers" if request.layers == AUTO else None
        return Call("plan", _save_plan, arguments, remark=remark)

    def keep(made: Plan) -> Kept:
        return {"layers": made.request.layers, "parameters_added": made.costs.parameters_added}

    return Stage("plan", call, work.plan_file, keep)


def _save_plan(
    model: str,
    request: Request = Request(AUTO),
    tokens: TokenSource = TokenSource(),
    *,
    output: Path,
    **given: Any,
) -> Plan:
    found = find_new_tokens(model, tokens, **given)
    if found is not None:
        request = replace(request, new_tokens=found.new_tokens if isinstance(found, ChosenTokens) else found)
    # its new tokens were tried when they were found
    source, checkpoint = open_model(model, given["revision"])
    made = make_plan(checkpoint, request, name=source.name, **given | {"revision": source.revision})
    save_plan(made, output)
    return made


def _expand(work: Work) -> Stage:
    recipe = work.recipe
    arguments = {
        "model": recipe.model,
        "plan": work.plan_file,
        "revision": recipe.revision,
        "base_weights": recipe.base_weights,
        "run": work.run("device", "trust_remote_code"),
        "output": work.expanded,
    }
    call = Call("expand", _expand_by_plan, arguments)
    return Stage("expand", lambda kept: call, work.expanded, lambda done: {"warnings": list(done.warnings)})


def _expand_by_plan(
    model: str, plan: Path, *, output: Path, base_weights: BaseWeights = "auto", **given: Any
) -> Expansion:
    return expand(model, load_plan(model, plan, **given), output, base_weights=base_weights, **given)


def _train(work: Work) -> Stage:
    recipe = work.recipe
    arguments = {
        "expanded": work.expanded,
        "data": work.to_learn,
        "eval_data": EvalData(old=work.measured("old"), new=work.measured("new")),
        "settings": work.training,
        "base_weights": work.taking,
        "run": work.run("device", "trust_remote_code"),
        "output": work.learned,
    }
    call = Call("train", _train_on, arguments, launch_options(recipe.processes, recipe.accelerate_config))

    def run(call: Call, track: Track) -> Training | None:
        done = None
        if not is_trained(work.learned):
            has_begun = (work.learned / TRAINING_FOLDER / SETTINGS_FILE).is_file()
            done = replace(call, arguments={**call.arguments, "resume": has_begun}).run(track)
            done = read_record(done, Training) if call.launch else done
        trained_by = read_json(work.learned / TRAINING_FOLDER / SETTINGS_FILE)["processes"]
        if trained_by != recipe.processes:
            counts = {"found": trained_by, "expected": recipe.processes}
            raise TrainingError(Problem("job-of-other-processes", work.learned, **counts))
        check_learned(work)
        return done

    def keep(done: Training | None) -> Kept:
        return {} if done is None else {"steps": done.steps, "loss": done.loss, "warnings": list(done.warnings)}

    return Stage("train", lambda kept: call, work.learned, keep, run, renews=False)


def _train_on(
    expanded: Path, data: Sequence[str], *, base_weights: BaseWeights, resume: bool = False, **given: Any
) -> Training:
    return train(expanded, data, start=TrainingStart(resume, base_weights), **given)


def _route(work: Work) -> Stage:
    options = {"routing": work.recipe.routing, "base_weights": work.taking}
    call = Call("route-export", _add_router, {"expanded": work.learned, "output": work.routed, **options})
    return Stage("route", lambda kept: call, work.routed)


def _add_router(
    expanded: Path,
    output: Path,
    routing: RouterOptions = RouterOptions(),
    **given: Any,
) -> Routed:
    return route_export(expanded, output, routing.make(), **given)


def _calibrate(work: Work) -> Stage:
    drawn = work.folder / "calibration.png"
    arguments = {
        "routed": work.routed,
        "old": [part_file(work.old, CALIBRATE)],
        "new": [part_file(work.new, CALIBRATE)],
        "settings": replace(work.recipe.calibration, write=True),
        "run": work.run("batch_size", "dtype", "device", "trust_remote_code"),
        "output": drawn,
    }
    call = Call("route-calibrate", _set_router, arguments)

    def keep(calibration: Calibration) -> Kept:
        routing = calibration.proposed.routing if calibration.written else calibration.present.routing
        return {"within": calibration.is_within, "router": "" if routing is None else describe_router(routing)}

    return Stage("calibrate", lambda kept: call, drawn, keep)


def _set_router(
    routed: Path,
    old: Sequence[Path],
    new: Sequence[Path],
    settings: CalibrationSettings = CalibrationSettings(),
    *,
    output: Path,
    **given: Any,
) -> Calibration:
    return route_calibrate(routed, old, new, replace(settings, plot=output), **given)


def _evaluate(work: Work) -> Stage:
    arguments = {
        "models": [work.result],
        "old": work.measured("old"),
        "new": work.measured("new"),
        "run": work.run("batch_size", "dtype", "device", "trust_remote_code"),
    }
    file = work.folder / "evaluation.json"
    # each process holds the whole model
    call = Call("evaluate", evaluate, arguments, launch_options(work.recipe.processes), saved=file)

    def run(call: Call, track: Track) -> Evaluation | None:
        done: Any = call.run(track)
        if isinstance(done, Evaluation):
            return done
        with suppress(ValueError):  # JSON has no number for a loss that is not finite
            return read_record(done, Evaluation)
        return None

    return Stage("evaluate", lambda kept: call, file, lambda evaluation: read_json(file), run)


def _verify(work: Work) -> Stage:
    file = work.folder / "verification.json"
    arguments = {"expanded": work.result, "run": work.run("device", "trust_remote_code")}
    call = Call("verify", verify, arguments, saved=file)
    return Stage("verify", lambda kept: call, file, lambda verification: read_json(file))


def _report(work: Work) -> Stage:
    file = work.folder / "report.json"
    running = work.run("device", "trust_remote_code")
    call = Call("report", report, {"expanded": work.result, "name": work.training.name, "run": running}, saved=file)
    return Stage("report", lambda kept: call, file)


def is_trained(folder: Path) -> bool:
    """Return True if a folder holds a finished training run."""
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
