"""surgery.json: what an expanded checkpoint stands on, what was done, and how to take it back.

It records sha256 of every base file and tensor, the text of each base file that the expansion replaces, what was asked
for and known when each expansion was planned, the versions, and the last verification. It is enough to verify and to
strip without the base at hand. What follows from these is not stored: a plan is made again of its request and facts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import kernel_problems
from scale_surgery.checkpoint.expansions import BASE_KEY, EXPANSIONS_KEY, expansion_of
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_json
from scale_surgery.checkpoint.forms import form_of, refuse_form
from scale_surgery.checkpoint.headers import DTYPE_BYTES, TensorInfo
from scale_surgery.checkpoint.listing import check_folder, is_left_link, unfit
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, is_inside
from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.records import read_record_file, reading
from scale_surgery.errors import CheckpointError, PlanError, SurgeryError, in_one_line
from scale_surgery.modeling import is_ours
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.base import Base, BaseFacts, check_facts, check_layers
from scale_surgery.planning.plan import Plan, plan_expansion
from scale_surgery.planning.request import Request
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.surgery.record_schema import Certificate, ForcedBase, Fused, Run, Size, check_headers
from scale_surgery.surgery.routers import read_router

MANIFEST_FORMAT = 3
# a package's record is read once: what was imported stays what it is
_version = cache(version)


@dataclass(frozen=True)
class BaseFile:
    """A file of the base model: its sha256, its size, and the name it has in the expanded folder.

    `stored_as` is None for a file that the expansion replaces; its text then stands in `Manifest.replaced`.
    """

    sha256: str
    bytes: int
    stored_as: str | None


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the base model: sha256 of its bytes, dtype (safetensors' name) and shape."""

    sha256: str
    dtype: str
    shape: tuple[Size, ...]

    @property
    def form(self) -> str:
        """Dtype and shape, to be read."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class RecordEntry:
    """What surgery.json holds of an expansion; see `ExpansionRecord`, whose plan follows from request and facts."""

    request: Request
    facts: BaseFacts
    tensors: Mapping[str, str]
    trained: Mapping[str, str] | None = None
    training: tuple[Run, ...] = ()
    forced_base: ForcedBase | None = None


@dataclass(frozen=True)
class ExpansionRecord:
    """What surgery.json says of an expansion.

    Attributes:
        plan: Everything that was planned, made again of its request and facts.
        tensors: sha256 of each of its tensors as it began.
        trained: sha256 of those that the last run left otherwise than they began; None where none has ended.
        training: An entry a training run: settings, data, steps, what was measured.
        forced_base: Of one that `apply --force` put on another base: the base that it was made on, and what differs.
    """

    plan: Plan
    tensors: Mapping[str, str]
    trained: Mapping[str, str] | None = None
    training: tuple[Mapping[str, Any], ...] = ()
    forced_base: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of surgery.json.

    Attributes:
        base_name: What the base is called.
        base_revision: Commit of its Hub repository, where known.
        base_files: Its files.
        base_tensors: Its tensors.
        left_out: Files of its folder that were not taken along.
        replaced: Texts of its files that the folder replaces.
        code: sha256 of each code file of the folder.
        expansions: What is said of each expansion, by its name, in the order of the paths.
        tool: Versions of what wrote the folder.
        verification: What `verify` found last.
        routing: How it routes, or None.
        fused: Of a fused model: headers and texts of what it was made of, and the drift that was measured.
        renumbered: Of a model with duplicated layers: the base's header of each shard in which tensors got other names.
    """

    base_name: str
    base_revision: str | None
    base_files: Mapping[str, BaseFile]
    base_tensors: Mapping[str, BaseTensor]
    left_out: tuple[str, ...]
    replaced: Mapping[str, str]
    code: Mapping[str, str]
    expansions: Mapping[str, ExpansionRecord]
    tool: Mapping[str, str] = field(default_factory=dict)
    verification: Mapping[str, Any] | None = None
    routing: Router | None = None
    fused: Mapping[str, Any] | None = None
    renumbered: Mapping[str, str] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def name(self) -> str:
        """Name of the only expansion.

        Raises:
            PlanError: If there are several; each is named.
        """
        if len(self.expansions) > 1:
            raise PlanError(
                f"--name: is missing, and the model has {len(self.expansions)} expansions: "
                f"{', '.join(self.expansions)}. Say which: --name {next(iter(self.expansions))}."
            )
        return next(iter(self.expansions))

    @property
    def plan(self) -> Plan:
        """Plan of the only expansion."""
        return self.expansions[self.name].plan

    @property
    def expansion_tensors(self) -> Mapping[str, str]:
        """sha256 of each tensor of the only expansion as it began."""
        return self.expansions[self.name].tensors

    @property
    def training(self) -> tuple[Mapping[str, Any], ...]:
        """Training runs of the only expansion."""
        return self.expansions[self.name].training

    @property
    def forced_base(self) -> Mapping[str, Any] | None:
        """The base on which the only expansion was made, where `apply --force` put it on another."""
        return self.expansions[self.name].forced_base

    def with_expansion(self, **changes: Any) -> Manifest:
        """The same with other values of the only expansion."""
        return replace(self, expansions={self.name: replace(self.expansions[self.name], **changes)})

    @property
    def base_hashes(self) -> dict[str, str]:
        """sha256 of each tensor of the base."""
        return {name: tensor.sha256 for name, tensor in self.base_tensors.items()}

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each expansion, by its name."""
        return {name: expansion.plan for name, expansion in self.expansions.items()}

    @property
    def first_plan(self) -> Plan:
        """The plan of the first expansion, for what each of them knows of the base."""
        return next(iter(self.expansions.values())).plan

    @property
    def numbering(self) -> Numbering | None:
        """Where layers stand among copies; None where no layer is duplicated."""
        return next((plan.numbering for plan in self.plans.values()), None)

    @property
    def code_files(self) -> tuple[str, ...]:
        """Names of the code files that the folder needs; where all expansions are left out, of those that it had."""
        if self.fused is not None:
            return self.plan.architecture.fused_code_files
        return self.first_plan.code_files if self.expansions else tuple(self.code)

    @property
    def planned(self) -> dict[str, TensorPlan]:
        """Every tensor of every expansion, by its name."""
        return {tensor.name: tensor for plan in self.plans.values() for tensor in plan.tensors}

    @property
    def foreign_code(self) -> tuple[str, ...]:
        """Code files that this release did not write."""
        facts = self.first_plan.architecture
        return tuple(file for file, digest in self.code.items() if not is_ours(file, digest, facts))

    @property
    def joined_shards(self) -> Mapping[str, Mapping[str, str]]:
        """Shards that a fused model was made of, whose tensors now lie in joined ones; none where it has its blocks."""
        return {} if self.fused is None else self.fused["shards"]

    def to_json(self) -> dict[str, Any]:
        """What surgery.json holds, as plain JSON values."""
        expansions = {
            name: {
                "request": asdict(own.plan.request),
                "facts": asdict(own.plan.facts),
                "tensors": own.tensors,
                "trained": own.trained,
                "training": own.training,
                "forced_base": own.forced_base,
            }
            for name, own in self.expansions.items()
        }
        routing = None if self.routing is None else self.routing.settings
        return {**asdict(replace(self, expansions={}, routing=None)), "expansions": expansions, "routing": routing}


@dataclass(frozen=True)
class StoredManifest(Manifest):
    """surgery.json as it lies there: plans and the router are made of what it holds."""

    expansions: Mapping[str, RecordEntry]  # type: ignore[assignment]
    verification: Certificate | None = None
    routing: Mapping[str, Any] | None = None  # type: ignore[assignment]
    fused: Fused | None = None


def base_tensors(base: Checkpoint, hashes: Mapping[str, str]) -> dict[str, BaseTensor]:
    """What surgery.json says of the tensors of a base.

    Args:
        base: Its headers.
        hashes: sha256 of each tensor.
    """
    return {name: BaseTensor(hashes[name], info.dtype, info.shape) for name, info in base.tensors.items()}


def tool_versions() -> dict[str, str]:
    """Versions of this program and of what it stands on."""
    names = ("scale-surgery", "torch", "transformers", "safetensors")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def read_manifest(path: Path) -> Manifest:
    """Read surgery.json of an expanded checkpoint.

    Raises:
        CheckpointError: If it is missing, is of another format or is incomplete.
    """
    file = path / MANIFEST_FILE
    check_folder(path)
    if file.exists() and (problem := unfit(path, MANIFEST_FILE)):
        raise CheckpointError(problem)
    if not file.is_file():
        read_json(path / CONFIG_FILE)  # a folder that has none is no model
        refuse_form(path, form_of(path), "expanded")
    stored = read_stored(file)
    with reading(file):
        if not stored.expansions:
            raise PlanError("expansions is empty")
        routing = read_router(stored.routing, len(stored.expansions), "routing")
        base = _recorded_base(path, stored)
        expansions = {name: _planned(file, stored, base, name, own) for name, own in stored.expansions.items()}
        manifest = Manifest(**{**vars(stored), "expansions": expansions, "routing": routing})
        _check_names(file, manifest.base_files, manifest.replaced, [*manifest.code, *_fused_names(manifest.fused)])
        _check_renumbered(manifest)
    return manifest


def read_stored(file: Path) -> StoredManifest:
    """Read surgery.json, and check the kinds of all values; what they mean together, `read_manifest` checks.

    Raises:
        CheckpointError: If it is missing, is of another format, or values are of other kinds; every one is named.
    """
    return read_record_file(file, StoredManifest, MANIFEST_FORMAT)


def _recorded_base(path: Path, manifest: Manifest) -> Checkpoint:
    """Config and headers of the base, as surgery.json has them; a config that is missing is named with other files."""
    tensors = {
        name: TensorInfo(name, "", own.dtype, own.shape, 0, prod(own.shape) * DTYPE_BYTES.get(own.dtype, 1))
        for name, own in manifest.base_tensors.items()
    }
    return Checkpoint(path, _base_config(manifest), tensors, (), (), ())


def _base_config(manifest: Manifest) -> dict[str, Any]:
    config = parse_json(manifest.replaced.get(CONFIG_FILE, "{}"))
    if not isinstance(config, dict):
        raise PlanError(f"replaced.{CONFIG_FILE}")
    if problems := list(kernel_problems(config)):
        raise CheckpointError.from_problems(
            f"{MANIFEST_FILE}: replaced.{CONFIG_FILE}.{problem}" for problem in problems
        )
    return config


def refuse_fused(path: Path, manifest: Manifest) -> None:
    """Refuse a model whose blocks are joined with base tensors.

    Raises:
        CheckpointError: If it is one.
    """
    if manifest.fused is not None:
        refuse_form(path, "fused", "expanded")


def refuse_linked(path: Path, manifest: Manifest) -> None:
    """Refuse a model that would not be whole elsewhere, since a file of it is a link that is never taken along.

    Raises:
        CheckpointError: If it is one; every link is named.
    """
    stored = dict.fromkeys([*(entry.stored_as for entry in manifest.base_files.values()), *manifest.code])
    problems = [
        f"{name}: is a symbolic link that leads out of {path}, expected the file that {MANIFEST_FILE} names. "
        "Put the file itself in its place."
        for name in stored
        if name is not None and is_left_link(path, name)
    ]
    if problems:
        raise CheckpointError.from_problems(problems)


def _planned(file: Path, manifest: Manifest, base: Checkpoint, name: str, stored: RecordEntry) -> ExpansionRecord:
    """What is said of an expansion, its plan made again."""
    if stored.request.name != name or not name.isidentifier():
        raise PlanError(f"expansions.{name} is called {stored.request.name!r} in its request")
    check_layers(stored.facts.architecture, stored.facts.sizes.layers, base.tensors)
    try:
        check_facts(stored.facts)
        plan = plan_expansion(
            Base(base, stored.facts), stored.request, name=manifest.base_name, revision=manifest.base_revision
        )
    except SurgeryError as error:
        raise PlanError(f"expansions.{name}: {in_one_line([line.rstrip('.') for line in error.lines])}") from error
    both = [tensor.name for tensor in plan.tensors if tensor.name in base.tensors]
    if both:
        raise CheckpointError.from_problems(
            f"{file}: {name} is said to be a base tensor and a new one. Do not use this checkpoint before you know who "
            "made it."
            for name in both[:10]
        )
    return ExpansionRecord(plan, stored.tensors, stored.trained, stored.training, stored.forced_base)


def check_numbering(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Check that config.json names layers, and the same duplicated ones as surgery.json, by which tensors have names.

    Raises:
        CheckpointError: If not.
    """
    found, wanted = numbering_of(checkpoint.config.get(CONFIG_KEY)), manifest.numbering
    if found != wanted:
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: {CONFIG_KEY} names {_copied(found)} as duplicated, expected "
            f"{_copied(wanted)} from {MANIFEST_FILE}. Restore config.json from where you got it."
        )
    if CONFIG_KEY not in checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: has no {CONFIG_KEY}, expected what {MANIFEST_FILE} says of its layers. "
            "Restore config.json from where you got it."
        )


def _copied(numbering: Numbering | None) -> str:
    return "no layer" if numbering is None else f"layers {', '.join(map(str, numbering.copied))}"


def _fused_names(fused: Mapping[str, Any] | None) -> list[str]:
    """Names of files that un-fusing writes."""
    if fused is None:
        return []
    if not fused["shards"]:
        raise PlanError("fused.shards is empty")
    check_headers({shard: own["header"] for shard, own in fused["shards"].items()}, "fused.shards")
    return [*fused["shards"], *fused["texts"]]


def are_numbers(values: Iterable[object]) -> bool:
    """Whether values are numbers, all of them."""
    return all(isinstance(value, int | float) for value in values)


def _check_renumbered(manifest: Manifest) -> None:
    headers = manifest.renumbered
    known = {entry.stored_as for entry in manifest.base_files.values()}
    are_shards = known.issuperset(headers) and all(name.endswith(".safetensors") for name in headers)
    if not are_shards or (headers and manifest.numbering is None):
        raise PlanError("renumbered")
    check_headers(headers, "renumbered")


def _check_names(file: Path, files: Mapping[str, BaseFile], replaced: Mapping[str, str], ours: list[str]) -> None:
    names = [*files, *(entry.stored_as for entry in files.values() if entry.stored_as is not None), *ours]
    problems = [
        f"{file}: {name!r} is said to be a file of the model, expected a name inside the folder. "
        "Do not use this checkpoint before you know who made it."
        for name in names
        if not is_inside(name)
    ]
    problems += [
        f"{file}: is incomplete, the text of {name} is missing. Restore it from where you got it."
        for name, entry in files.items()
        if entry.stored_as is None and not isinstance(replaced.get(name), str)
    ]
    problems += [
        f"{file}: is incomplete, replaced.{name} is no file of the base. Restore it from where you got it."
        for name in replaced
        if name not in files
    ]
    if CONFIG_FILE not in files:
        problems.append(
            f"{file}: is incomplete, the base's {CONFIG_FILE} is missing. Restore it from where you got it."
        )
    if problems:
        raise CheckpointError.from_problems(problems)


def open_expansion(path: Path, name: str | None = None) -> tuple[Checkpoint, Manifest]:
    """Read an expanded folder as if it held one expansion: the others, and a router over all, are left out.

    Args:
        path: The folder.
        name: Name of the expansion; needed where there are several.

    Returns:
        The checkpoint, and its surgery.json, both with the tensors and texts of that expansion alone.

    Raises:
        CheckpointError: If this is no expanded folder.
        PlanError: If there is no such expansion, or there are several and none is named.
    """
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    if name is not None and name not in manifest.expansions:
        raise PlanError(f"--name: is {name}, expected an expansion of {path}: {' or '.join(manifest.expansions)}.")
    if len(manifest.expansions) == 1:
        return checkpoint, manifest
    return only(checkpoint, manifest, name or manifest.name)


def only(checkpoint: Checkpoint, manifest: Manifest, name: str) -> tuple[Checkpoint, Manifest]:
    """A folder of several expansions as if it held one."""
    tensors = {key: info for key, info in checkpoint.tensors.items() if expansion_of(key) in (None, name)}
    held = {info.file for info in tensors.values()}
    specs = checkpoint.config[CONFIG_KEY]
    alone = {BASE_KEY: specs[BASE_KEY], EXPANSIONS_KEY: [own for own in specs[EXPANSIONS_KEY] if own["name"] == name]}
    shards = tuple(shard for shard in checkpoint.shards if shard in held)
    config = {**checkpoint.config, CONFIG_KEY: alone}
    view = replace(checkpoint, config=config, tensors=tensors, shards=shards)
    one = {name: manifest.expansions[name]}
    return view, replace(manifest, expansions=one, routing=None, verification=None)
