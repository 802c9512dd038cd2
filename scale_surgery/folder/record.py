"""surgery.json: the base of an expanded checkpoint, its expansions, and how to take them off again.

It records the sha256 of every base file and tensor, the text of each base file that the expansion replaces, the request
and the facts from which each expansion was planned, versions, and the last verification. It is enough to verify and to
strip without the base at hand. What follows from these is not stored: a plan is made again from its request and facts.
"""

from __future__ import annotations

import platform
import reprlib
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
from scale_surgery.checkpoint.listing import check_folder, unfit
from scale_surgery.checkpoint.names import CHANGED_FILES, CONFIG_FILE, MANIFEST_FILE, is_inside
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.records import RecordError, read_record_file, reading
from scale_surgery.errors import CheckpointError, PlanError, Problem, SurgeryError
from scale_surgery.folder.record_schema import Certificate, Fused, Run, Size, Strength, check_headers
from scale_surgery.folder.routers import read_router
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.base import Base, BaseFacts, check_facts, check_layers
from scale_surgery.planning.exported import is_ours
from scale_surgery.planning.plan import Plan, plan_expansion
from scale_surgery.planning.request import Request
from scale_surgery.planning.tensors import TensorPlan

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
        """Dtype and shape, for people."""
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
    strength: Strength = 1.0


@dataclass(frozen=True)
class ExpansionRecord:
    """An expansion in surgery.json.

    Attributes:
        plan: Its plan, made again from its request and facts.
        tensors: sha256 of each of its tensors as it began.
        trained: sha256 of those that differ from that since the last training run; None where no run has ended.
        training: An entry for each training run: settings, data, steps, measurements.
        strength: Factor of the learned tensors that write into the base stream and the logits.
    """

    plan: Plan
    tensors: Mapping[str, str]
    trained: Mapping[str, str] | None = None
    training: tuple[Mapping[str, Any], ...] = ()
    strength: float = 1.0


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
        """Name of the only expansion; PlanError names each if there are several."""
        first = next(iter(self.expansions))
        if len(self.expansions) > 1:
            raise PlanError(Problem("expansion-unchosen", "--name", names=list(self.expansions), first=first))
        return first

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

    def with_expansion(self, **changes: Any) -> Manifest:
        """Return a copy with other values of the only expansion."""
        return replace(self, expansions={self.name: replace(self.expansions[self.name], **changes)})

    @property
    def base_hashes(self) -> dict[str, str]:
        """sha256 of each tensor of the base."""
        return {name: tensor.sha256 for name, tensor in self.base_tensors.items()}

    @property
    def base_config(self) -> dict[str, Any]:
        """Parsed config.json of the base."""
        config: dict[str, Any] = parse_json(self.replaced[CONFIG_FILE])
        return config

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
        """Positions of layers among copies; None if no layer is duplicated."""
        return next((plan.numbering for plan in self.plans.values()), None)

    @property
    def code_files(self) -> tuple[str, ...]:
        """Names of the code files that the folder needs; without expansions, of those that it has."""
        if self.fused is not None:
            return self.plan.architecture.fused_code_files
        return self.first_plan.code_files if self.expansions else tuple(self.code)

    @property
    def adds_tokens(self) -> bool:
        """True if one of the expansions adds tokens to the tokenizer."""
        return any(plan.widths.new_tokens for plan in self.plans.values())

    @property
    def planned(self) -> dict[str, TensorPlan]:
        """The planned tensors of all expansions, by name."""
        return {tensor.name: tensor for plan in self.plans.values() for tensor in plan.tensors}

    @property
    def changed_texts(self) -> tuple[str, ...]:
        """Base files whose text in `replaced` has another sha256 than recorded."""
        hashes = {name: sha256(text.encode("utf-8")).hexdigest() for name, text in self.replaced.items()}
        return tuple(name for name, digest in hashes.items() if digest != self.base_files[name].sha256)

    @property
    def foreign_code(self) -> tuple[str, ...]:
        """Code files that this release did not write."""
        facts = self.first_plan.architecture
        return tuple(file for file, digest in self.code.items() if not is_ours(file, digest, facts))

    @property
    def joined_shards(self) -> Mapping[str, Mapping[str, str]]:
        """Shards from which a fused model was made; empty for a folder in blocks."""
        return {} if self.fused is None else self.fused["shards"]

    def to_json(self) -> dict[str, Any]:
        """Return the content of surgery.json as plain JSON values."""
        expansions = {
            name: {
                "request": asdict(record.plan.request),
                "facts": asdict(record.plan.facts),
                "tensors": record.tensors,
                "trained": record.trained,
                "training": record.training,
                **strength_entry(record.strength),
            }
            for name, record in self.expansions.items()
        }
        routing = None if self.routing is None else self.routing.settings
        others = {each.name: getattr(self, each.name) for each in fields(Manifest)}
        plain = asdict(Manifest(**{**others, "expansions": {}, "routing": None}))
        return {**plain, "expansions": expansions, "routing": routing}


def strength_entry(strength: float) -> dict[str, float]:
    """Return the entry of a strength in a record; records of what was learned have none."""
    return {} if strength == 1 else {"strength": strength}


@dataclass(frozen=True)
class StoredManifest(Manifest):
    """surgery.json as it is stored, from which plans and the router are made."""

    expansions: Mapping[str, RecordEntry]  # type: ignore[assignment]
    verification: Certificate | None = None
    routing: Mapping[str, Any] | None = None  # type: ignore[assignment]
    fused: Fused | None = None


def base_tensors(base: Checkpoint, hashes: Mapping[str, str]) -> dict[str, BaseTensor]:
    """Describe the tensors of a base for surgery.json; `hashes` has the sha256 of each."""
    return {name: BaseTensor(hashes[name], info.dtype, info.shape) for name, info in base.tensors.items()}


def tool_versions() -> dict[str, str]:
    """Return the versions of this program and of the libraries that it uses."""
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
            raise RecordError(Problem("value-empty", "expansions"))
        routing = read_router(stored.routing, len(stored.expansions), "routing")
        # a config that is missing is named with other files
        config = parse_json(stored.replaced.get(CONFIG_FILE, "{}"))
        if not isinstance(config, dict):
            value = reprlib.repr(stored.replaced[CONFIG_FILE])
            raise RecordError(Problem("value-unfit", f"replaced.{CONFIG_FILE}", value=value, kind="a JSON object"))
        if problems := [problem.within(f"{file}: replaced.{CONFIG_FILE}") for problem in kernel_problems(config)]:
            raise CheckpointError(*problems)
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
    """Read surgery.json, and check the type of each value; `read_manifest` checks them together."""
    return read_record_file(file, StoredManifest, MANIFEST_FORMAT)


def _planned(file: Path, manifest: Manifest, base: Checkpoint, name: str, entry: RecordEntry) -> ExpansionRecord:
    """Return the record of an expansion, with its plan made again."""
    request, facts = entry.request, entry.facts
    if request.name != name or not name.isidentifier():
        kind = repr(name) if name.isidentifier() else "letters, digits and underscores"
        place = f"expansions.{name}.request.name"
        raise RecordError(Problem("value-unfit", place, value=repr(request.name), kind=kind))
    check_layers(facts.architecture, facts.sizes.layers, base.tensors)
    try:
        check_facts(facts)
        plan = plan_expansion(Base(base, facts), request, name=manifest.base_name, revision=manifest.base_revision)
    except SurgeryError as error:
        raise RecordError(*(problem.within(f"expansions.{name}") for problem in error.problems)) from error
    both = [tensor.name for tensor in plan.tensors if tensor.name in base.tensors]
    if both:
        raise CheckpointError(*(Problem("record-tensor-both", file, tensor=tensor) for tensor in both))
    return ExpansionRecord(plan, entry.tensors, entry.trained, entry.training, entry.strength)


def _fused_names(fused: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the files that `merge --to blocks` writes."""
    if fused is None:
        return []
    if not fused["shards"]:
        raise RecordError(Problem("value-empty", "fused.shards"))
    check_headers({shard: record["header"] for shard, record in fused["shards"].items()}, "fused.shards")
    return [*fused["shards"], *fused["texts"]]


def _check_renumbered(manifest: Manifest) -> None:
    headers = manifest.renumbered
    known = {entry.stored_as for entry in manifest.base_files.values()}
    are_shards = known.issuperset(headers) and all(name.endswith(".safetensors") for name in headers)
    if not are_shards or (headers and manifest.numbering is None):
        kind = "shards of the base, in a model with duplicated layers"
        raise RecordError(Problem("value-unfit", "renumbered", value=reprlib.repr(list(headers)), kind=kind))
    check_headers(headers, "renumbered")


def _check_fused(manifest: Manifest) -> None:
    """Check that the record of a fused model names its tensors; the joined tensor of each follows from its name."""
    if manifest.fused is None:
        return
    known: dict[str, Mapping[str, Any]] = {
        f"{name}.{key}": getattr(record, key) or {}
        for name, record in manifest.expansions.items()
        for key in ("tensors", "trained")
    }
    planned = manifest.planned
    for place, tensors in known.items():
        if unknown := [name for name in tensors if name not in planned]:
            raise RecordError(Problem("record-tensor-unknown", f"expansions.{place}", names=unknown))
    held = {name for record in manifest.joined_shards.values() for name in parse_json(record["header"])}
    if missing := [name for name in manifest.base_tensors if name not in held]:
        raise RecordError(Problem("record-tensor-missing", "fused.shards", names=missing))


def _check_names(file: Path, manifest: Manifest) -> None:
    """Refuse names of files that lead out of the folder, and files of which a text is missing."""
    files, replaced = manifest.base_files, manifest.replaced
    stored = [entry.stored_as for entry in files.values() if entry.stored_as is not None]
    names = [*files, *stored, *manifest.code, *_fused_names(manifest.fused)]
    if outside := [name for name in names if not is_inside(name)]:
        raise CheckpointError(*(Problem("record-escape", file, name=name) for name in outside))
    texts = [name for name, entry in files.items() if entry.stored_as is None]
    problems = [Problem("key-missing", f"replaced.{name}") for name in texts if name not in replaced]
    problems += [Problem("key-unknown", f"replaced.{name}") for name in replaced if name not in files]
    # an expansion changes no other file, and what it changes is compared with its text alone
    problems += [Problem("key-unknown", f"replaced.{name}") for name in texts if name not in CHANGED_FILES]
    problems += [Problem("key-missing", f"base_files.{CONFIG_FILE}")] if CONFIG_FILE not in files else []
    if problems:
        raise RecordError(*problems)


def check_name(name: str | None, manifest: Manifest, path: Path) -> None:
    """Check that a folder has an expansion of this name, if one is given."""
    if name is not None and name not in manifest.expansions:
        names = list(manifest.expansions)
        raise PlanError(Problem("expansion-unknown", "--name", name=name, folder=path, names=names))
