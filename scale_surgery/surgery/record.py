"""surgery.json: the base of an expanded checkpoint, its expansions, and how to take them off again.

It records the sha256 of every base file and tensor, the text of each base file that the expansion replaces, the request
and the facts from which each expansion was planned, versions, and the last verification. It is enough to verify and to
strip without the base at hand. What follows from these is not stored: a plan is made again from its request and facts.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import kernel_problems
from scale_surgery.checkpoint.folder import Checkpoint, read_json
from scale_surgery.checkpoint.forms import form_of, refuse_form
from scale_surgery.checkpoint.headers import DTYPE_BYTES, TensorInfo
from scale_surgery.checkpoint.listing import check_folder, is_left_link, linked_parts, unfit
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, is_inside
from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.records import read_record_file, reading
from scale_surgery.errors import CheckpointError, PlanError, SurgeryError, in_one_line, name_some
from scale_surgery.modeling import is_ours
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.base import Base, BaseFacts, check_facts, check_layers
from scale_surgery.planning.plan import Plan, plan_expansion
from scale_surgery.planning.request import Request
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.surgery.record_schema import Certificate, ForcedBase, Fused, Run, Size, check_headers
from scale_surgery.surgery.routers import read_router

MANIFEST_FORMAT = 3
# the record of a package is read once: it stays as it was imported
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

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class RecordEntry:
    """An expansion as it is stored; the plan of its `ExpansionRecord` follows from request and facts."""

    request: Request
    facts: BaseFacts
    tensors: Mapping[str, str]
    trained: Mapping[str, str] | None = None
    training: tuple[Run, ...] = ()
    forced_base: ForcedBase | None = None


@dataclass(frozen=True)
class ExpansionRecord:
    """An expansion in surgery.json.

    Attributes:
        plan: Its plan, made again from its request and facts.
        tensors: sha256 of each of its tensors as it began.
        trained: sha256 of those that differ from that since the last training run; None where no run has ended.
        training: An entry for each training run: settings, data, steps, measurements.
        forced_base: After `apply --force` on another base: the base that it was made on, and what differs.
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
        expansions: Each expansion, by its name, in the order of the paths.
        tool: Versions of the programs that wrote the folder.
        verification: The last result of `verify`.
        routing: How it routes, or None.
        fused: Of a fused model: headers and texts of the files that it was made from, and the measured drift.
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
        """Name of the only expansion; PlanError names each where there are several."""
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
        """A copy with other values of the only expansion."""
        return replace(self, expansions={self.name: replace(self.expansions[self.name], **changes)})

    @property
    def of_folder(self) -> Manifest:
        """The record of all that the folder holds; of a view another one."""
        return self

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
    def adds_tokens(self) -> bool:
        """Whether one of the expansions adds tokens to the tokenizer."""
        return any(plan.widths.new_tokens for plan in self.plans.values())

    @property
    def planned(self) -> dict[str, TensorPlan]:
        """Every tensor of every expansion, by its name."""
        return {tensor.name: tensor for plan in self.plans.values() for tensor in plan.tensors}

    @property
    def changed_texts(self) -> tuple[str, ...]:
        """Base files whose text in `replaced` is not what it was."""
        hashes = {name: sha256(text.encode("utf-8")).hexdigest() for name, text in self.replaced.items()}
        return tuple(name for name, digest in hashes.items() if digest != self.base_files[name].sha256)

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
                "request": asdict(record.plan.request),
                "facts": asdict(record.plan.facts),
                "tensors": record.tensors,
                "trained": record.trained,
                "training": record.training,
                "forced_base": record.forced_base,
            }
            for name, record in self.expansions.items()
        }
        routing = None if self.routing is None else self.routing.settings
        others = {each.name: getattr(self, each.name) for each in fields(Manifest)}
        plain = asdict(Manifest(**{**others, "expansions": {}, "routing": None}))
        return {**plain, "expansions": expansions, "routing": routing}


@dataclass(frozen=True)
class ManifestView(Manifest):
    """surgery.json as if the folder held some of its expansions alone; `whole` is what it says of all."""

    whole: Manifest | None = None

    @property
    def of_folder(self) -> Manifest:
        """The record of all that the folder holds."""
        return self.whole or self


@dataclass(frozen=True)
class StoredManifest(Manifest):
    """surgery.json as it is stored, from which plans and the router are made."""

    expansions: Mapping[str, RecordEntry]  # type: ignore[assignment]
    verification: Certificate | None = None
    routing: Mapping[str, Any] | None = None  # type: ignore[assignment]
    fused: Fused | None = None


def base_tensors(base: Checkpoint, hashes: Mapping[str, str]) -> dict[str, BaseTensor]:
    """The tensors of a base for surgery.json; `hashes` has the sha256 of each."""
    return {name: BaseTensor(hashes[name], info.dtype, info.shape) for name, info in base.tensors.items()}


def tool_versions() -> dict[str, str]:
    """Versions of this program and of the libraries under it."""
    names = ("scale-surgery", "torch", "transformers", "safetensors")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def read_manifest(path: Path) -> Manifest:
    """Read surgery.json of an expanded checkpoint."""
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
        # a config that is missing is named with other files
        config = parse_json(stored.replaced.get(CONFIG_FILE, "{}"))
        if not isinstance(config, dict):
            raise PlanError(f"replaced.{CONFIG_FILE}")
        if problems := list(kernel_problems(config)):
            raise CheckpointError.from_problems(
                f"{MANIFEST_FILE}: replaced.{CONFIG_FILE}.{problem}" for problem in problems
            )
        tensors = {
            name: TensorInfo(name, "", info.dtype, info.shape, 0, prod(info.shape) * DTYPE_BYTES.get(info.dtype, 1))
            for name, info in stored.base_tensors.items()
        }
        base = Checkpoint(path, config, tensors, (), (), ())
        expansions = {name: _planned(file, stored, base, name, entry) for name, entry in stored.expansions.items()}
        manifest = Manifest(**{**vars(stored), "expansions": expansions, "routing": routing})
        _check_names(file, manifest)
        _check_renumbered(manifest)
        _check_fused(manifest)
    return manifest


def read_stored(file: Path) -> StoredManifest:
    """Read surgery.json, and check the kinds of all values; what they mean together, `read_manifest` checks."""
    return read_record_file(file, StoredManifest, MANIFEST_FORMAT)


def refuse_fused(path: Path, manifest: Manifest) -> None:
    """Refuse a model whose blocks are joined with base tensors."""
    if manifest.fused is not None:
        refuse_form(path, "fused", "expanded")


def refuse_linked(path: Path, manifest: Manifest | None) -> None:
    """Refuse a model whose copy would lack files: those that are links out of its folder; each is named."""
    files = [] if manifest is None else [*(entry.stored_as for entry in manifest.base_files.values()), *manifest.code]
    linked = [name for name in dict.fromkeys(files) if name is not None and is_left_link(path, name)]
    problems = [
        f"{name}: is a symbolic link that leads out of {path}, expected the file that {MANIFEST_FILE} names. "
        "Put the file itself in its place."
        for name in linked
    ]
    problems += [
        f"{name}: is a symbolic link that leads out of {path} and is not followed, and without it the model would not "
        "be whole. Put the file itself in its place, or take the link away."
        for name in linked_parts(path)
        if name not in linked
    ]
    if problems:
        raise CheckpointError.from_problems(problems)


def _planned(file: Path, manifest: Manifest, base: Checkpoint, name: str, entry: RecordEntry) -> ExpansionRecord:
    """The record of an expansion, its plan made again."""
    request, facts = entry.request, entry.facts
    if request.name != name or not name.isidentifier():
        raise PlanError(f"expansions.{name} is called {request.name!r} in its request")
    check_layers(facts.architecture, facts.sizes.layers, base.tensors)
    try:
        check_facts(facts)
        plan = plan_expansion(Base(base, facts), request, name=manifest.base_name, revision=manifest.base_revision)
    except SurgeryError as error:
        raise PlanError(f"expansions.{name}: {in_one_line([line.rstrip('.') for line in error.lines])}") from error
    both = [tensor.name for tensor in plan.tensors if tensor.name in base.tensors]
    if both:
        raise CheckpointError.from_problems(
            f"{file}: {tensor} is said to be a base tensor and a new one. Do not use this checkpoint before you know "
            "who made it."
            for tensor in both[:10]
        )
    return ExpansionRecord(plan, entry.tensors, entry.trained, entry.training, entry.forced_base)


def check_numbering(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Check that config.json names the same duplicated layers as surgery.json: names of tensors follow from them."""
    numbering, expected = numbering_of(checkpoint.config.get(CONFIG_KEY)), manifest.numbering
    if numbering != expected:
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: {CONFIG_KEY} names {_copied(numbering)} as duplicated, expected "
            f"{_copied(expected)} from {MANIFEST_FILE}. Restore config.json from where you got it."
        )
    if CONFIG_KEY not in checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: has no {CONFIG_KEY}, expected what {MANIFEST_FILE} says of its layers. "
            "Restore config.json from where you got it."
        )


def _copied(numbering: Numbering | None) -> str:
    return "no layer" if numbering is None else f"layers {', '.join(map(str, numbering.copied))}"


def _fused_names(fused: Mapping[str, Any] | None) -> list[str]:
    """Names of files that taking a fused model apart writes."""
    if fused is None:
        return []
    if not fused["shards"]:
        raise PlanError("fused.shards is empty")
    check_headers({shard: record["header"] for shard, record in fused["shards"].items()}, "fused.shards")
    return [*fused["shards"], *fused["texts"]]


def _check_renumbered(manifest: Manifest) -> None:
    headers = manifest.renumbered
    known = {entry.stored_as for entry in manifest.base_files.values()}
    are_shards = known.issuperset(headers) and all(name.endswith(".safetensors") for name in headers)
    if not are_shards or (headers and manifest.numbering is None):
        raise PlanError("renumbered")
    check_headers(headers, "renumbered")


def _check_fused(manifest: Manifest) -> None:
    """Check that the record of a fused model names its tensors: which joined one each is in follows from the names."""
    if manifest.fused is None:
        return
    known: dict[str, Mapping[str, Any]] = {
        f"{name}.{key}": getattr(record, key) or {}
        for name, record in manifest.expansions.items()
        for key in ("tensors", "trained")
    }
    for place, tensors in known.items():
        if unknown := [name for name in tensors if name not in manifest.planned]:
            raise PlanError(f"expansions.{place} names {name_some(unknown)}, which this expansion does not have")
    held = {name for record in manifest.joined_shards.values() for name in parse_json(record["header"])}
    if missing := [name for name in manifest.base_tensors if name not in held]:
        raise PlanError(f"fused.shards names no {name_some(missing)}, expected every tensor of the base")


def _check_names(file: Path, manifest: Manifest) -> None:
    """Refuse names of files that lead out of the folder, and files of which a text is missing."""
    files, replaced = manifest.base_files, manifest.replaced
    stored = [entry.stored_as for entry in files.values() if entry.stored_as is not None]
    problems = [
        f"{file}: {name!r} is said to be a file of the model, expected a name inside the folder. "
        "Do not use this checkpoint before you know who made it."
        for name in [*files, *stored, *manifest.code, *_fused_names(manifest.fused)]
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


def check_name(name: str | None, manifest: Manifest, path: Path) -> None:
    """Check that a folder has an expansion of this name, if one is given."""
    if name is not None and name not in manifest.expansions:
        raise PlanError(f"--name: is {name}, expected an expansion of {path}: {' or '.join(manifest.expansions)}.")
