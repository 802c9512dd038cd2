"""What a trainer saved of an expanded model, beside the model that it was given: the same expansion, tensor by tensor.

config.json     --compared-->  the same expansion; what else differs is told
names, shapes   --matched-->   which tensor is which; none is missing, unexpected or of another shape
values                         see `saved_values`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import BASE_KEY, ROUTER_KEY, place_of_specs, specs_of_expansions
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.headers import FLOAT_DTYPES, TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, ORIGIN_KEY
from scale_surgery.checkpoint.reading import differing_keys
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.checkpoint.trainer_files import LeftBehind, chat_template, read_left_behind
from scale_surgery.deriving.configs import config_of
from scale_surgery.errors import CheckpointError, shorten
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.running.in_memory import without_weights
from scale_surgery.running.loading import needs_own_code, translated
from scale_surgery.running.matching import Match, Pair, match_names

# what a config says of how it was saved and how it is run, and what the expansion wrote
UNIMPORTANT = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "use_cache"),
    *("_name_or_path", CONFIG_KEY),
}
# keys that matter in training alone, for how a model is begun, or for what it is asked and where its answer ends
LEAVES_NUMBERS = re.compile(r"drop|jitter|initializer|init_std|aux_loss|z_loss|token_id$|checkpointing|output_")
# numbers of these are compared with one another, and rounded to one another; others are no such numbers
NUMBERS = {"F64", *FLOAT_DTYPES.values()}


@dataclass(frozen=True)
class Trained:
    """The expanded model that a trainer was given: its folder, or its base and plans.

    Attributes:
        name: What it is called.
        checkpoint: Holds the base's tensors.
        plans: How it was expanded, by the names of the expansions.
        base_tensors: The base's tensors, in the order of their files.
        config: Its config.json.
    """

    name: str
    checkpoint: Checkpoint
    plans: Mapping[str, Plan]
    base_tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]

    @property
    def facts(self) -> Plan:
        """A plan, for what each of them knows of the base."""
        return next(iter(self.plans.values()))

    @property
    def planned(self) -> dict[str, TensorPlan]:
        """The new tensors, by name."""
        return {tensor.name: tensor for plan in self.plans.values() for tensor in plan.tensors}

    @property
    def bytes_added(self) -> int:
        """Bytes of the new tensors."""
        return sum(plan.costs.bytes_added for plan in self.plans.values())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        base = {name: tuple(info.shape) for name, info in self.base_tensors.items()}
        return base | {name: tuple(tensor.shape) for name, tensor in self.planned.items()}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of all tensors."""
        base = {name: info.dtype for name, info in self.base_tensors.items()}
        return base | {name: tensor.dtype for name, tensor in self.planned.items()}

    def model(self) -> Any:
        """The model without weights; None where code of the base's own says what it is, which does not run here."""
        return None if needs_own_code(self.config) else without_weights(_read(self.config, self.name), self.name)


@dataclass(frozen=True)
class Saved:
    """What a trainer saved.

    Attributes:
        name: What it is called.
        checkpoint: Its tensors.
        config: Its config.json; empty where it has none.
        left: What else the trainer left there.
    """

    name: str
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    left: LeftBehind

    @property
    def router(self) -> Mapping[str, Any] | None:
        """What its config.json says of a router."""
        found: Mapping[str, Any] | None = self.config.get(CONFIG_KEY, {}).get(ROUTER_KEY)
        return found


def specs_in(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What a config.json says of each of its expansions; nothing where it says nothing of one."""
    return specs_of_expansions(config.get(CONFIG_KEY, {}))


def open_saved(saved: str | Path, expanded: Mapping[str, Any] | None) -> Saved:
    """Read what a trainer saved; no tensor is read.

    Args:
        saved: A folder or a Hub id.
        expanded: config.json of the model that was trained, where it is given.

    Raises:
        CheckpointError: If it holds no weights that can be read, or is something else; the message says what it is.
    """
    source = find_source(saved)
    checkpoint = open_checkpoint(source.path, expanded or {})
    if not (source.path / CONFIG_FILE).is_file():
        return Saved(str(saved), checkpoint, {}, read_left_behind(source.path))
    _refuse_other(str(saved), checkpoint)
    return Saved(str(saved), checkpoint, checkpoint.config, read_left_behind(source.path))


def _refuse_other(name: str, checkpoint: Checkpoint) -> None:
    specs = specs_in(checkpoint.config)
    if not specs:
        refuse_form(name, "base", "saved")
    if specs[0].get("fused"):
        refuse_form(name, "fused", "saved")
    files = (checkpoint.manifest or {}).get("base_files")
    stored = [own.get("stored_as") for own in files.values()] if isinstance(files, dict) else []
    # one that a trainer wrote into an expanded folder has another layout than its surgery.json
    if set(checkpoint.shards).intersection(map(str, stored)):
        raise CheckpointError(
            f"{name}: has a {MANIFEST_FILE} and the layout of an expanded model: there is nothing to adopt. Use it as "
            "it is."
        )


def check_specs(saved: Saved, trained: Trained) -> None:
    """Check that a saved model names the expansion that it is compared with, where it names one.

    Raises:
        CheckpointError: If it names another; every key is listed.
    """
    if not saved.config:
        return
    mine, theirs = specs_in(saved.config), specs_in(trained.config)
    keys = list[str]()
    for number in range(max(len(mine), len(theirs))):
        place = place_of_specs(saved.config[CONFIG_KEY], number)
        keys += _differing_specs(place, _at(mine, number), _at(theirs, number))
    bases = (one.config[CONFIG_KEY].get(BASE_KEY, {}) for one in (saved, trained))
    keys += [f"{CONFIG_KEY}.{BASE_KEY}.{key}" for key in differing_keys(*bases)]
    if keys:
        head = f"{saved.name}: was saved from another expansion than {trained.name}."
        lines = [f"{CONFIG_FILE}: {key} is another." for key in keys]
        raise CheckpointError.from_problems([head, *shorten(lines), _give(trained)])


def _at(specs: Sequence[Mapping[str, Any]], number: int) -> Mapping[str, Any]:
    return specs[number] if number < len(specs) else {}


def _differing_specs(place: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    both = ({key: value for key, value in specs.items() if key != ORIGIN_KEY} for specs in (mine, theirs))
    keys = [f"{place}.{key}" for key in differing_keys(*both)]
    asked, planned = ((specs.get(ORIGIN_KEY) or {}).get("request") for specs in (mine, theirs))
    # a config.json that somebody wrote need not say what was asked for
    if keys or not asked or not planned:
        return keys
    # it may have been given another name since, which both name above
    others = [key for key in differing_keys(asked, planned) if key != "name"]
    return [f"{place}.{ORIGIN_KEY}.request.{key}" for key in others]


def _give(trained: Trained) -> str:
    return f"Give the expanded model that was trained: --expanded EXPANDED, not {trained.name}."


def fit(saved: Saved, trained: Trained) -> Match:
    """Find out which saved tensor is which, by names and shapes.

    Args:
        saved: What was saved.
        trained: What was trained.

    Returns:
        Each with its name in this package; of the base everything was saved, or nothing.

    Raises:
        CheckpointError: If a tensor is missing, unexpected, of another shape or of a dtype that holds no numbers of
            its kind; the first are listed.
    """
    numbering = trained.facts
    stored = {info.stored_as or name: name for name, info in saved.checkpoint.tensors.items()}
    wanted = {numbering.stored_name(name): name for name in trained.shapes}
    found = match_names(stored, wanted, trained.facts.architecture.unread, trained.model)
    match = Match(
        pairs=tuple(Pair(stored[pair.saved], wanted[pair.wanted], pair.part) for pair in found.pairs),
        missing=tuple(wanted[name] for name in found.missing),
        unexpected=found.unexpected,
        joined={name: stored[own] for name, own in found.joined.items()},
        model=found.model,
    )
    has_base = any(pair.wanted in trained.base_tensors for pair in match.pairs)
    missing = [name for name in match.missing if has_base or name not in trained.base_tensors]
    problems = [*_shape_problems(saved, trained, match), *_dtype_problems(saved, trained, match)]
    problems += [f"{name}: was not saved." for name in missing]
    problems += [f"{name}: is not in {trained.name}." for name in match.unexpected]
    if problems:
        count = "1 tensor does" if len(problems) == 1 else f"{len(problems)} tensors do"
        head = f"{saved.name}: {count} not fit {trained.name}."
        raise CheckpointError.from_problems([head, *shorten(problems), _advice(saved, trained, match)])
    return match


def _shape_problems(saved: Saved, trained: Trained, match: Match) -> Iterator[str]:
    for pair in match.pairs:
        found, expected = tuple(saved.checkpoint.tensors[pair.saved].shape), trained.shapes[pair.wanted]
        if pair.part is None and found != expected:
            yield f"{pair.wanted}: shape {list(found)}, expected {list(expected)}."


def _dtype_problems(saved: Saved, trained: Trained, match: Match) -> Iterator[str]:
    for pair in match.pairs:
        found, expected = saved.checkpoint.tensors[pair.saved].dtype, trained.dtypes[pair.wanted]
        if found != expected and not {found, expected} <= NUMBERS:
            yield f"{pair.wanted}: dtype {found}, expected {expected}."


def _advice(saved: Saved, trained: Trained, match: Match) -> str:
    embedding = f"{trained.facts.prefix}{trained.facts.architecture.embedding_weight}"
    found = next((saved.checkpoint.tensors[pair.saved] for pair in match.pairs if pair.wanted == embedding), None)
    rows = trained.shapes[embedding][0]
    if found is not None and found.shape[:1] != (rows,):
        return (
            f"Its vocabulary was changed, from {rows} tokens to {found.shape[0]}, and an expansion keeps that of its "
            "base. Resize the embedding of the base model, save that, expand it, and train again."
        )
    if any(info.dtype.startswith(("U8", "I8", "F8")) for info in trained.base_tensors.values()):
        return (
            "The base is quantised, and a trainer that saves it writes other tensors, which cannot be compared with "
            "it. Train with scale-surgery train."
        )
    if any(_dtype_problems(saved, trained, match)):
        return (
            "Numbers of such dtypes were made of the trained ones, which they do not give back. Save the model as it "
            "trained, and quantise or convert what comes of it."
        )
    if match.unexpected and needs_own_code(trained.config):
        return "Save the trained model by save_pretrained: other names than its files' are not known of its own code."
    return _give(trained)


def other_settings(saved: Saved, trained: Trained) -> Iterator[str]:
    """Say what was saved otherwise beside the expansion and changes no number of a model: what was trained stays.

    Yields:
        A line for each setting.
    """
    yield from _other_template(saved, trained)
    if not saved.config:
        return
    yield from (line for key, line in _other_keys(saved, trained) if LEAVES_NUMBERS.search(key))
    mine, theirs = saved.router, trained.config[CONFIG_KEY].get(ROUTER_KEY)
    if mine is not None and theirs != mine:
        stays = "its router's numbers stay" if theirs is not None else "OUT has none: route-export gives it one"
        yield f"the saved model routes in another way than {trained.name}, {stays}"


def other_computation(saved: Saved, trained: Trained) -> Iterator[str]:
    """Say what a saved config.json has otherwise with which a model may compute otherwise: what was trained stays.

    Yields:
        A line for each key.
    """
    for key, line in _other_keys(saved, trained):
        if not LEAVES_NUMBERS.search(key):
            yield (
                f"{line}: the saved model computes with its own, so this one may give other numbers. Where the "
                "training meant it, write it into the base's config.json and expand that."
            )


def _other_keys(saved: Saved, trained: Trained) -> Iterator[tuple[str, str]]:
    """Keys of a saved config.json with another value, and what to say of each."""
    if not saved.config:
        return
    found, wanted = _both_settings(saved, trained)
    for key in differing_keys(found, wanted):
        yield key, f"{key} is {_short(found.get(key))} in what was saved, {_short(wanted.get(key))} stays"


def _other_template(saved: Saved, trained: Trained) -> Iterator[str]:
    found, wanted = chat_template(saved.checkpoint), chat_template(trained.checkpoint)
    if found is not None and found != wanted:
        none = "" if wanted is not None else ": it has none"
        yield f"the chat template is another in what was saved, that of {trained.name} stays{none}"


def _both_settings(saved: Saved, trained: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of both configs; of a model with code of its own, those that both name: none of that code runs."""
    if not needs_own_code(trained.config):
        both = ((saved.config, saved.name), (trained.config, trained.name))
        found, wanted = (dict(_settings(_read(*own).to_dict())) for own in both)
        return found, wanted
    found, wanted = dict(_settings(saved.config)), dict(_settings(trained.config))
    return {key: own for key, own in found.items() if key in wanted}, {
        key: own for key, own in wanted.items() if key in found
    }


def _read(config: Mapping[str, Any], name: str) -> Any:
    """What transformers makes of a parsed config.json of an expanded model."""
    modeling.register()
    with translated(f"{name}: {CONFIG_FILE}", "transformers does not read it", "Restore it from where you got it."):
        return config_of(config)


def _settings(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a config, those of its parts too, without what does not matter."""
    for key, value in config.items():
        if key not in UNIMPORTANT:
            yield from _settings(value, f"{place}{key}.") if isinstance(value, dict) else [(f"{place}{key}", value)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else "another"
