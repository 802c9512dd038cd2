"""Compare the output of a trainer with the expanded folder that it trained, tensor by tensor.

config.json     --compared-->  the same expansion; other differences are listed
names, shapes   --matched-->   which tensor is which; none is missing, unexpected or of another shape
base tensors    --sha256-->    the base's, byte for byte; in another dtype, the same numbers
new tensors     --read-->      cast once, to the dtype that the plan gives them
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import BASE_KEY, ROUTER_KEY, place_of_specs, specs_of_expansions
from scale_surgery.checkpoint.folder import Checkpoint, holding_dtype, open_checkpoint, read_json, read_tensor
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, TOKENIZER_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, ORIGIN_KEY
from scale_surgery.checkpoint.reading import differing_keys
from scale_surgery.checkpoint.same_values import difference
from scale_surgery.checkpoint.shards import Entry, computed
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.checkpoint.trainer_files import LeftBehind, chat_template, read_left_behind
from scale_surgery.deriving.configs import config_of
from scale_surgery.errors import MOST_LINES, CheckpointError, Problem, counted
from scale_surgery.folder.folder import Folder
from scale_surgery.planning.base import FLOATS
from scale_surgery.planning.new_tokens import token_ids
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Track
from scale_surgery.running.in_memory import without_weights
from scale_surgery.running.loading import needs_own_code, translated
from scale_surgery.running.matching import Match, Pair, match_names

if TYPE_CHECKING:
    from torch import Tensor

# what a config says of how it was saved and how it is run, and what the expansion wrote
UNIMPORTANT = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "use_cache"),
    *("_name_or_path", CONFIG_KEY),
}
# keys that matter in training alone, for how a model is begun, or for what it is asked and where its answer ends
LEAVES_NUMBERS = re.compile(r"drop|jitter|initializer|init_std|aux_loss|z_loss|token_id$|checkpointing|output_")
# tensors of these dtypes are compared by their numbers and rounded to one another; others hold no plain numbers


@dataclass(frozen=True)
class Trained:
    """The expanded model that was trained: its name and its folder."""

    name: str
    folder: Folder

    @property
    def first_plan(self) -> Plan:
        """Plan of the first expansion; each has the facts of the base."""
        return self.folder.manifest.first_plan

    @cached_property
    def base_tensors(self) -> Mapping[str, TensorInfo]:
        """The base's tensors, in the order of their files."""
        return {name: info for name, info in self.folder.tensors.items() if name in self.folder.manifest.base_tensors}

    @cached_property
    def planned(self) -> dict[str, TensorPlan]:
        """The new tensors, by name."""
        return self.folder.manifest.planned

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo | TensorPlan]:
        """The tensors of base and expansion, by name, for their dtypes and shapes."""
        return {**self.base_tensors, **self.planned}

    @property
    def bytes_added(self) -> int:
        """Bytes of the new tensors."""
        return sum(plan.costs.bytes_added for plan in self.folder.manifest.plans.values())

    @cached_property
    def loaded_config(self) -> Any:
        """Its config as transformers reads it; None if only the base's own code can read it."""
        return None if needs_own_code(self.folder.config) else _load_config(self.folder.config, self.name)

    def model(self) -> Any:
        """Make the model without weights; None if only the base's own code can."""
        return None if self.loaded_config is None else without_weights(self.loaded_config, self.name)


@dataclass(frozen=True)
class Saved:
    """The output of a trainer: its name, tensors, config.json or {}, and other files of the trainer."""

    name: str
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    left: LeftBehind


def open_saved(saved: str | Path, expanded: Mapping[str, Any]) -> Saved:
    """Open the output of a trainer, a folder or a Hub id; no tensor is read."""
    path = find_source(saved).path
    # `expanded` is the config.json of the model that was trained, for a folder that has none
    checkpoint = open_checkpoint(path, expanded)
    has_config = (path / CONFIG_FILE).is_file()
    if has_config:
        _refuse_other_forms(str(saved), checkpoint)
    return Saved(str(saved), checkpoint, checkpoint.config if has_config else {}, read_left_behind(path))


def _refuse_other_forms(name: str, checkpoint: Checkpoint) -> None:
    specs = specs_of_expansions(checkpoint.config.get(CONFIG_KEY, {}))
    if not specs:
        refuse_form(name, "base", "saved")
    if specs[0].get("fused"):
        refuse_form(name, "fused", "saved")
    files = (checkpoint.recorded or {}).get("base_files")
    entries = files.values() if isinstance(files, dict) else ()
    stored = [entry.get("stored_as") for entry in entries if isinstance(entry, dict)]
    # one that a trainer wrote into an expanded folder has another layout than its surgery.json
    if set(checkpoint.shards).intersection(map(str, stored)):
        raise CheckpointError(Problem("saved-expanded", name))


def check_specs(saved: Saved, trained: Trained) -> None:
    """Check that the saved config.json, if any, names the expansions of the trained model."""
    if not saved.config:
        return
    there, here = saved.config[CONFIG_KEY], trained.folder.config[CONFIG_KEY]
    keys = list[str]()
    expansions = zip_longest(specs_of_expansions(there), specs_of_expansions(here), fillvalue=dict[str, Any]())
    for number, (spec, expected) in enumerate(expansions):
        keys += [f"{place_of_specs(there, number)}.{key}" for key in _differing_specs(spec, expected)]
    bases = (specs.get(BASE_KEY, {}) for specs in (there, here))
    keys += [f"{CONFIG_KEY}.{BASE_KEY}.{key}" for key in differing_keys(*bases)]
    if keys:
        differing = [Problem("saved-key-differs", f"{CONFIG_FILE}: {key}") for key in keys]
        raise CheckpointError(Problem("saved-other-expansion", saved.name, *differing, trained=trained.name))


def _differing_specs(spec: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the keys of an expansion that differ; of its origin, only the request counts."""
    if keys := [key for key in differing_keys(spec, expected) if key != ORIGIN_KEY]:
        return keys
    asked, planned = ((specs.get(ORIGIN_KEY) or {}).get("request") for specs in (spec, expected))
    # a config.json that somebody wrote need not say what was asked for
    if not asked or not planned:
        return []
    # an expansion may have got another name since, which is a key of its own
    return [f"{ORIGIN_KEY}.request.{key}" for key in differing_keys(asked, planned) if key != "name"]


def match_tensors(saved: Saved, trained: Trained) -> Match:
    """Match saved tensors with those of the trained model, by names and shapes."""
    plan = trained.first_plan
    stored = {info.stored_as or name: name for name, info in saved.checkpoint.tensors.items()}
    wanted = {plan.stored_name(name): name for name in trained.tensors}
    # no trainer saves what the class of the base does not load
    left = (rf"^{re.escape(path)}(\.|$)" for path in plan.facts.not_loaded)
    by_files = match_names(stored, wanted, (*plan.architecture.unread, *left), trained.model)
    # each with its name in this package
    match = Match(
        pairs=tuple(Pair(stored[pair.saved], wanted[pair.wanted], pair.part) for pair in by_files.pairs),
        missing=tuple(wanted[name] for name in by_files.missing),
        unexpected=by_files.unexpected,
        joined={name: stored[file_name] for name, file_name in by_files.joined.items()},
        model=by_files.model,
    )
    # of the base everything was saved, or nothing
    has_base = any(pair.wanted in trained.base_tensors for pair in match.pairs)
    missing = [name for name in match.missing if has_base or name not in trained.base_tensors]
    shapes, dtypes = _shape_problems(saved, trained, match), _dtype_problems(saved, trained, match)
    problems = [*shapes, *dtypes, *(Problem("tensor-not-saved", name) for name in missing)]
    problems += [Problem("tensor-not-trained", name, trained=trained.name) for name in match.unexpected]
    if problems:
        code = _cause(saved, trained, match, has_other_dtypes=bool(dtypes))
        raise CheckpointError(Problem(code, saved.name, *problems, count=len(problems), trained=trained.name))
    return match


def _shape_problems(saved: Saved, trained: Trained, match: Match) -> list[Problem]:
    pairs = [pair for pair in match.pairs if pair.part is None]
    both = ((pair, saved.checkpoint.tensors[pair.saved].shape, trained.tensors[pair.wanted].shape) for pair in pairs)
    return [
        Problem("tensor-shape", pair.wanted, shape=shape, planned=planned)
        for pair, shape, planned in both
        if shape != planned
    ]


def _dtype_problems(saved: Saved, trained: Trained, match: Match) -> list[Problem]:
    tensors = saved.checkpoint.tensors
    both = ((pair, tensors[pair.saved].dtype, trained.tensors[pair.wanted].dtype) for pair in match.pairs)
    return [
        Problem("tensor-dtype", pair.wanted, dtype=dtype, planned=planned)
        for pair, dtype, planned in both
        if dtype != planned and not {dtype, planned} <= FLOATS
    ]


def _cause(saved: Saved, trained: Trained, match: Match, *, has_other_dtypes: bool) -> str:
    """Return the code of the most likely reason why tensors do not fit."""
    embedding = trained.first_plan.embedding
    shapes = (saved.checkpoint.tensors[pair.saved].shape for pair in match.pairs if pair.wanted == embedding)
    before, after = trained.tensors[embedding].shape[:1], next(shapes, None)
    if after is not None and after[:1] != before:
        return "saved-other-vocabulary"
    if any(info.dtype.startswith(("U8", "I8", "F8")) for info in trained.base_tensors.values()):
        return "saved-quantised-base"
    if has_other_dtypes:
        return "saved-converted"
    if match.unexpected and needs_own_code(trained.folder.config):
        return "saved-other-names"
    return "saved-tensors-unfit"


def compare_settings(saved: Saved, trained: Trained) -> tuple[list[str], list[str]]:
    """Describe settings of the output that differ from the trained model's, which stay."""
    # a line for each difference that changes no number of the model, and for each with which it may compute otherwise
    harmless, decisive = list[str](), list[str]()
    template, kept = chat_template(saved.checkpoint), chat_template(trained.folder)
    if template is not None and template != kept:
        none = ": it has none" if kept is None else ""
        harmless.append(f"the chat template is another in what was saved, that of {trained.name} stays{none}")
    decisive += _added_tokens(saved, trained)
    if not saved.config:
        return harmless, decisive
    there, here = _settings_of_both(saved, trained)
    for key in differing_keys(there, here):
        line = f"{key} is {short(there.get(key))} in what was saved, {short(here.get(key))} stays"
        if LEAVES_NUMBERS.search(key):
            harmless.append(line)
        else:
            decisive.append(
                f"{line}: the saved model computes with its own, so this one may give other numbers. Where the "
                "training meant it, write it into the base's config.json and expand that."
            )
    routing, kept = (config[CONFIG_KEY].get(ROUTER_KEY) for config in (saved.config, trained.folder.config))
    if routing is not None and routing != kept:
        stays = "its router's numbers stay" if kept is not None else "OUT has none: route-export gives it one"
        harmless.append(f"the saved model routes in another way than {trained.name}, {stays}")
    return harmless, decisive


def _added_tokens(saved: Saved, trained: Trained) -> Iterator[str]:
    """Generate a line if the saved tokenizer gives ids that the trained model's does not give."""
    files = [checkpoint.path / TOKENIZER_FILE for checkpoint in (saved.checkpoint, trained.folder)]
    if not all(file.is_file() for file in files):
        return
    there, here = (token_ids(read_json(file)) for file in files)
    if added := [token for token, id_ in there.items() if here.get(token) != id_]:
        yield (
            f"the tokenizer of what was saved has {counted(len(added), 'other token')}, such as {added[0]!r}, that of "
            f"{trained.name} stays: text is read in other tokens than in the training. Expand the base with "
            "--new-tokens to keep them."
        )


def _settings_of_both(saved: Saved, trained: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of both configs; for a base with its own code, only keys that both have."""
    if trained.loaded_config is not None:
        loaded = _load_config(saved.config, saved.name), trained.loaded_config
        there, here = (dict(settings_of(config.to_dict())) for config in loaded)
        return there, here
    there, here = dict(settings_of(saved.config)), dict(settings_of(trained.folder.config))
    both = there.keys() & here.keys()
    return {key: there[key] for key in both}, {key: here[key] for key in both}


def _load_config(config: Mapping[str, Any], name: str) -> Any:
    modeling.register()
    with translated("config-not-read", f"{name}: {CONFIG_FILE}"):
        return config_of(config)


def settings_of(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Generate the values of a config and of its parts, without unimportant ones."""
    for key, value in config.items():
        if key not in UNIMPORTANT:
            yield from settings_of(value, f"{place}{key}.") if isinstance(value, dict) else [(f"{place}{key}", value)]


def short(value: object) -> str:
    """Return a value of a config as a message shows it."""
    text = repr(value)
    return text if len(text) <= 40 else "another"


class SavedTensors:
    """Read saved tensors one by one; parts of a joined tensor are read one after the other."""

    def __init__(self, saved: Saved, match: Match) -> None:
        self.checkpoint, self._match = saved.checkpoint, match
        self._read_parts = lru_cache(maxsize=1)(self._split)

    def read(self, pair: Pair) -> Tensor:
        """Read the tensor of a pair, as it was saved."""
        if pair.part is None:
            return read_tensor(self.checkpoint, pair.saved)
        return self._read_parts(pair.part.joined)[pair.part.name]

    def _split(self, joined: str) -> dict[str, Tensor]:
        model, saved = self._match.model, self._match.joined
        assert model is not None  # parts are only found with one
        names = [name for name, place in model.places.items() if place.part is not None and place.name == joined]
        return dict(model.tensors(lambda name: read_tensor(self.checkpoint, saved[name]), names))


@dataclass(frozen=True)
class BaseComparison:
    """The number of saved base tensors, and of those in another dtype, such as "F32 for BF16"."""

    count: int
    widened: Mapping[str, int]


def compare_base(saved: Saved, trained: Trained, match: Match, track: Track) -> BaseComparison:
    """Compare each saved base tensor with the base's, and describe the first that differ."""
    pairs = [pair for pair in match.pairs if pair.wanted in trained.base_tensors]
    dtypes = {pair: (saved.checkpoint.tensors[pair.saved].dtype, trained.tensors[pair.wanted].dtype) for pair in pairs}
    by_hash = [pair for pair in pairs if pair.part is None and len(set(dtypes[pair])) == 1]
    by_value = [pair for pair in pairs if pair.part is not None or len(set(dtypes[pair])) > 1]
    values, changed, widened = SavedTensors(saved, match), list[Pair](), Counter[str]()
    base_hashes = trained.folder.manifest.base_hashes

    def describe(pair: Pair) -> Problem | None:
        return difference(pair.wanted, values.read(pair), read_tensor(trained.folder, pair.wanted))

    with track("base tensors", sum(trained.base_tensors[pair.wanted].bytes for pair in pairs)) as advance:
        hashes = hash_tensors(saved.checkpoint, list(dict.fromkeys(pair.saved for pair in by_hash)), advance)
        changed += [pair for pair in by_hash if hashes[pair.saved] != base_hashes[pair.wanted]]
        for pair in by_value:
            dtype, expected = dtypes[pair]
            if describe(pair) is not None:
                changed.append(pair)
            elif dtype != expected:
                widened[f"{dtype} for {expected}"] += 1
            advance(trained.base_tensors[pair.wanted].bytes)
    if changed:
        # to describe a tensor is to read it twice
        some = [problem for pair in changed[:MOST_LINES] if (problem := describe(pair)) is not None]
        is_rounded = all(problem.code == "tensor-rounded" for problem in some)
        code = "saved-base-rounded" if is_rounded else "saved-base-changed"
        facts: dict[str, Any] = {"count": len(changed), "total": len(pairs), "trained": trained.name}
        if is_rounded:
            facts["holds"] = holding_dtype(trained.tensors[pair.wanted].dtype for pair in pairs)
        raise CheckpointError(Problem(code, saved.name, *some, **facts))
    return BaseComparison(len(pairs), dict(widened))


def new_entries(saved: Saved, trained: Trained, match: Match) -> dict[str, list[Entry]]:
    """Return the saved new tensors by the shards of their plans; one at a time is in memory."""
    values, shards, pairs = SavedTensors(saved, match), dict[str, list[Entry]](), dict[str, list[Pair]]()
    for pair in match.pairs:
        pairs.setdefault(pair.wanted, []).append(pair)
    for tensor in trained.planned.values():
        name = trained.first_plan.stored_name(tensor.name)
        entry = computed(name, tensor.dtype, tensor.shape, _reader(values, tensor, pairs[tensor.name]))
        shards.setdefault(tensor.shard, []).append(entry)
    return shards


def _reader(values: SavedTensors, tensor: TensorPlan, pairs: Sequence[Pair]) -> Callable[[], Tensor]:
    """Return a reader of a new tensor in the dtype of its plan; duplicates must be equal."""
    from scale_surgery.tensors.initialise import TORCH_DTYPES

    def read() -> Tensor:
        value = values.read(pairs[0])
        if not value.isfinite().all():
            raise CheckpointError(Problem("saved-not-finite", tensor.name))
        for pair in pairs[1:]:
            if (problem := difference(pair.saved, values.read(pair), value)) is not None:
                names = {"first": pairs[0].saved, "second": pair.saved}
                raise CheckpointError(Problem("saved-twice", tensor.name, problem, **names))
        cast = value.to(TORCH_DTYPES[tensor.dtype])
        if not cast.isfinite().all():
            most = value.abs().max().item()
            raise CheckpointError(Problem("saved-out-of-range", tensor.name, most=most, dtype=tensor.dtype))
        return cast

    return read


def rounded_dtypes(saved: Saved, trained: Trained, match: Match) -> Mapping[str, int]:
    """Count new tensors that are rounded to the dtype of the plan, such as "F32 to BF16"."""
    import torch

    from scale_surgery.tensors.initialise import TORCH_DTYPES

    rounded = Counter[str]()
    for pair in match.pairs:
        if pair.wanted in trained.planned:
            source, planned = saved.checkpoint.tensors[pair.saved].dtype, trained.planned[pair.wanted].dtype
            dtype = TORCH_DTYPES[planned]
            if source not in TORCH_DTYPES or torch.promote_types(TORCH_DTYPES[source], dtype) != dtype:
                rounded[f"{source} to {planned}"] += 1
    return dict(rounded)
