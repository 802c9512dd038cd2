"""A recipe: every setting of `learn`, also as one flat mapping.

preset  <  recipe file  <  options      {"training.steps": 200, "expansion.layers": "last:4", ...}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args

from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import Count, Field, fields_of
from scale_surgery.folder.routers import RouterOptions
from scale_surgery.learning.hold_out import HoldOutSettings
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.request import Request
from scale_surgery.routing.choice import CalibrationSettings
from scale_surgery.running.options import RunOptions
from scale_surgery.training.ranking import RankingSettings
from scale_surgery.training.settings import TrainingSettings

# layers that a pilot chooses
AUTO = "auto"
# the setting that names a preset
PRESET = "preset"
PresetName = Literal["default", "one-path", "paper"]
RecipeValues = Mapping[str, Any]
# settings that change no result but for rounding: a job that has begun takes others, as after memory ran out
HOW_IT_RUNS = ("running.device", "running.batch_size", "training.gradient_checkpointing")


@dataclass(frozen=True)
class Recipe:
    """Everything that `learn` does.

    Attributes:
        model: The base model, a folder or a Hub id.
        data: Text to learn: files, or folders saved by the library datasets.
        old: Old text, to calibrate the router and to measure forgetting. Without it, only learning is measured.
        measure_new: Text to measure learning on, instead of held-out text.
        measure_old: Text to measure forgetting on, instead of held-out text.
        revision: Branch, tag or commit of a Hub repository.
        route: Add a router, which chooses between the base and the expansion.
        base_weights: How base shards get from MODEL into the first folder. Later folders in OUT share them by hard
            links, except with copy.
        processes: Number of processes for training and measuring, one for each GPU. A step learns one batch of each
            process.
        accelerate_config: YAML file of accelerate config, such as fsdp2.yaml, for several processes. Default: DDP.
        hold_out: Text to hold out.
        ranking: Budget and training of the pilot (layers: auto). If any of it is given without layers, a pilot chooses
            them.
        expansion: Layers, method and widths. layers: auto lets a pilot choose the layers.
        tokens: Tokens to add to the tokenizer.
        training: Training of the new blocks.
        routing: Router of the model.
        calibration: Limits of the router.
        running: Device and dtype of models.
    """

    model: str
    data: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    measure_new: tuple[str, ...] = ()
    measure_old: tuple[str, ...] = ()
    revision: str | None = None
    route: bool = True
    base_weights: BaseWeights = "auto"
    processes: Count = 1
    accelerate_config: str | None = None
    hold_out: HoldOutSettings = HoldOutSettings()
    ranking: RankingSettings = RankingSettings()
    expansion: Request = field(default_factory=lambda: Request(AUTO))
    tokens: TokenSource = TokenSource()
    training: TrainingSettings = TrainingSettings()
    routing: RouterOptions = RouterOptions()
    calibration: CalibrationSettings = CalibrationSettings()
    running: RunOptions = RunOptions()

    @property
    def chooses_layers(self) -> bool:
        """True if a pilot chooses the layers."""
        return self.expansion.layers == AUTO


SECTIONS: Mapping[str, type] = {name: field.kind for name, field in fields_of(Recipe).items() if not field.is_plain}
# settings that stages fill in
FILLED_BY_STAGES = {
    *("hold_out.parts", "expansion.new_tokens", "training.name"),
    *("calibration.write", "calibration.plot", "running.memory_bytes"),
}


@cache
def settings() -> Mapping[str, Field]:
    """Every setting of a recipe, by its name with that of its section: "training.steps"."""
    top = {name: field for name, field in fields_of(Recipe).items() if name not in SECTIONS}
    inner = {
        f"{section}.{name}": field for section, kind in SECTIONS.items() for name, field in fields_of(kind).items()
    }
    return {name: field for name, field in (top | inner).items() if name not in FILLED_BY_STAGES}


def values_of(recipe: Recipe) -> dict[str, Any]:
    """A recipe as a flat mapping."""
    content = asdict(recipe)
    values = {name: content[name] for name in content if name not in SECTIONS}
    values |= {f"{section}.{name}": value for section in SECTIONS for name, value in content[section].items()}
    return {name: values[name] for name in settings()}


def unknown_setting(name: str) -> Problem:
    """Return the problem of an unknown setting, with the settings of the most similar name.

    Names are compared without their sections: a long section would make all its settings similar. A similar section
    then decides between settings of one name.
    """
    section, _, last = name.replace("-", "_").rpartition(".")
    parts = [(known, *known.rpartition(".")[::2]) for known in settings()]
    names = get_close_matches(last, {own for _, _, own in parts}, 1)
    sections = get_close_matches(section, {of for _, of, own in parts if own in names}, 1)
    near = [known for known, of, own in parts if own in names and (not sections or of in sections)]
    return Problem("setting-misnamed", name, near=near) if near else Problem("setting-unknown", name)


def value_problems(name: str, value: Any) -> list[Problem]:
    """Return the problem of the value of a setting, if it has one."""
    setting = settings()[name]
    expected = setting.expects(value)
    if setting.kind is tuple and not setting.choices and expected is not None:
        expected = "a list of files"
    return [] if expected is None else [Problem("value-unfit", name, value=repr(value), kind=expected)]


def preset_problems(name: Any) -> list[Problem]:
    """Return the problem of the name of a preset, if one is named and there is none of that name."""
    known = get_args(PresetName)
    return [] if name is None or name in known else [Problem("preset-unknown", PRESET, name=name, choices=known)]


def missing_settings(values: RecipeValues) -> list[Problem]:
    """Return the problems of settings that every job needs and that are not given."""
    codes = {"model": "model-not-given", "data": "data-not-given"}
    return [Problem(code, name) for name, code in codes.items() if not values.get(name)]


def make_recipe(values: RecipeValues) -> Recipe:
    """Make a recipe of settings by name, with defaults for missing ones; all problems are one PlanError."""
    unknown = [unknown_setting(name) for name in values if name not in settings()]
    known = {name: settings()[name].read(value) for name, value in values.items() if name in settings()}
    unfit = [problem for name, value in known.items() for problem in value_problems(name, value)]
    if problems := [*unknown, *unfit, *missing_settings(known)]:
        raise PlanError(*problems)
    sections = {section: kind(**_of_section(known, section)) for section, kind in SECTIONS.items()}
    return Recipe(**{name: known[name] for name in known if "." not in name}, **sections)


def _of_section(values: RecipeValues, section: str) -> dict[str, Any]:
    usual = {"layers": AUTO} if section == "expansion" else {}
    named = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
    return usual | named


def differences(recipe: Recipe, before: RecipeValues) -> Iterator[Problem]:
    """Yield a problem for each setting that an earlier recipe, kept as plain values, has otherwise.

    Exception: settings of HOW_IT_RUNS.
    """
    for name, value in values_of(recipe).items():
        if name in HOW_IT_RUNS:
            continue
        was = before.get(name)
        if settings()[name].read(was) != value and not (was is None and value == ()):
            yield Problem("setting-changed", name, began=was, now=value)
