"""surgery.json: what an expanded checkpoint stands on, what was done, and how to take it back.

It records sha256 of every base file and tensor, the text of each base file that the expansion replaces, the
plan, the versions, and the last verification. It is enough to verify and to strip without the base at hand.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import kernel_problems
from scale_surgery.checkpoint.composed import refuse_composed
from scale_surgery.checkpoint.folder import Checkpoint, read_json
from scale_surgery.checkpoint.foreign import saved_elsewhere
from scale_surgery.checkpoint.listing import check_folder, is_left_link
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, is_inside
from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.schema import build, in_one_line, misfits
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.modeling import is_ours
from scale_surgery.planning.base import check_layers
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.routing_specs import Routing
from scale_surgery.planning.saved import check_plan
from scale_surgery.surgery.record_schema import header_problems, part_problems

MANIFEST_FORMAT = 1
# what a stock export holds in place of surgery.json
STOCK_RECORD_FILE = "merge.json"
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
class OnBase:
    """What a record says of the base of a folder.

    Attributes:
        base_name: What the base is called.
        base_revision: Commit of its Hub repository, where known.
        base_fingerprint: sha256 over its config and the names, dtypes and shapes of its tensors.
        base_files: Its files.
        base_tensors: sha256 of each of its tensors.
        left_out: Files of its folder that were not taken along.
        replaced: Texts of its files that the folder replaces.
        code: sha256 of each code file of the folder.
    """

    base_name: str
    base_revision: str | None
    base_fingerprint: str
    base_files: Mapping[str, BaseFile]
    base_tensors: Mapping[str, str]
    left_out: tuple[str, ...]
    replaced: Mapping[str, str]
    code: Mapping[str, str]

    @property
    def record_file(self) -> str:
        """Name of the file that holds this."""
        return MANIFEST_FILE

    @property
    def joined_shards(self) -> Mapping[str, Mapping[str, str]]:
        """Shards whose tensors lie in joined ones now."""
        return {}


@dataclass(frozen=True)
class Manifest(OnBase):
    """The content of surgery.json."""

    expansion_tensors: Mapping[str, str]
    plan: Plan
    tool: Mapping[str, str] = field(default_factory=dict)
    verification: Mapping[str, Any] | None = None
    # one entry a training run: settings, data, steps, what was measured
    training: tuple[Mapping[str, Any], ...] = ()
    # how it routes, or None
    routing: Routing | None = None
    # of a fused model: headers and texts of what it was made of, and the drift that was measured
    fused: Mapping[str, Any] | None = None
    # of an expansion that `apply --force` put on another base: the base that it was made on, and what differs
    forced_base: Mapping[str, Any] | None = None
    # of a model with duplicated layers: the base's header of each shard in which tensors got other names
    renumbered: Mapping[str, str] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def foreign_code(self) -> tuple[str, ...]:
        """Code files that this release did not write."""
        facts = self.plan.architecture
        return tuple(file for file, digest in self.code.items() if not is_ours(file, digest, facts))

    @property
    def joined_shards(self) -> Mapping[str, Mapping[str, str]]:
        """Shards that a fused model was made of, whose tensors now lie in joined ones; none where it has its blocks."""
        return {} if self.fused is None else self.fused["shards"]


def tool_versions() -> dict[str, str]:
    """Versions of this program and of what it stands on."""
    names = ("scale-surgery", "torch", "transformers", "safetensors")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def read_manifest(path: Path) -> Manifest:
    """Read surgery.json of an expanded checkpoint.

    Raises:
        CheckpointError: If it is missing, is of another format or is incomplete; or if the folder is a composed one.
    """
    file = path / MANIFEST_FILE
    check_folder(path)
    refuse_composed(path, "an expanded model")
    if not file.is_file() and (path / STOCK_RECORD_FILE).is_file():
        raise CheckpointError(
            f"{path}: is a plain checkpoint that scale-surgery merge --to stock made, it has no blocks. Give the "
            "expanded model that it was made from."
        )
    if path.is_dir() and not file.is_file() and is_base(path):
        raise CheckpointError(
            f"{path}: is a base model, expected one made by scale-surgery expand. Expand it first: scale-surgery "
            f"expand {path} --layers LAYERS -o EXPANDED."
        )
    if path.is_dir() and not file.is_file():
        raise CheckpointError(saved_elsewhere(path, read_json(path / CONFIG_FILE)))
    content = read_json(file)
    if content.get("format") != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{file}: format {content.get('format')!r}, expected {MANIFEST_FORMAT}. Use the release that made it."
        )
    try:
        _check_values(content)
        manifest: Manifest = build(content, Manifest)
        check_plan(manifest.plan)
        _base_config(manifest)
        _check_plan(file, manifest.plan, manifest.base_tensors)
        _check_names(file, manifest.base_files, manifest.replaced, [*manifest.code, *_fused_names(manifest.fused)])
        _check_renumbered(manifest)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, PlanError) as error:
        raise CheckpointError(f"{file}: is incomplete ({error}). Restore it from where you got it.") from error
    return manifest


def is_base(path: Path) -> bool:
    """Whether a folder without a record never had one: a trainer that drops it keeps what config.json says."""
    config = path / CONFIG_FILE
    return config.is_file() and CONFIG_KEY not in read_json(config)


def _check_values(content: Mapping[str, Any]) -> None:
    """Check the kinds of all values, so that a spoiled one is noticed here, before anything relies on it."""
    wrong = list(misfits(content, Manifest)) or list(part_problems(content))
    if wrong:
        raise PlanError(in_one_line(wrong))


def _base_config(manifest: Manifest) -> dict[str, Any] | None:
    """config.json of the base; a text that is missing is named where the texts of all files are looked at."""
    text = manifest.replaced.get(CONFIG_FILE)
    config = None if text is None else parse_json(text)
    if text is not None and not isinstance(config, dict):
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
        raise CheckpointError(
            f"{path}: is fused, its blocks are joined with the base's tensors; expected blocks of their own. Take them "
            "apart first: scale-surgery merge --to blocks."
        )


def refuse_linked(path: Path, manifest: OnBase) -> None:
    """Refuse a model that would not be whole elsewhere, since a file of it is a link that is never taken along.

    Raises:
        CheckpointError: If it is one; every link is named.
    """
    stored = dict.fromkeys([*(entry.stored_as for entry in manifest.base_files.values()), *manifest.code])
    problems = [
        f"{name}: is a symbolic link that leads out of {path}, expected the file that {manifest.record_file} names. "
        "Put the file itself in its place."
        for name in stored
        if name is not None and is_left_link(path, name)
    ]
    if problems:
        raise CheckpointError.from_problems(problems)


def _check_plan(file: Path, plan: Plan, base_tensors: Mapping[str, str]) -> None:
    check_layers(plan.architecture, plan.sizes.layers, base_tensors)
    for tensor in plan.tensors:
        # outside the layers a tied head has no tensor of its own in the base
        if tensor.layer is not None and tensor.source not in base_tensors and tensor.init != "one":
            raise PlanError(f"plan.tensors, {tensor.name}: init {tensor.init!r} of {tensor.source!r}")
    both = [tensor.name for tensor in plan.tensors if tensor.name in base_tensors]
    if both:
        raise CheckpointError.from_problems(
            f"{file}: {name} is said to be a base tensor and a new one. Do not use this checkpoint before you know who "
            "made it."
            for name in both[:10]
        )


def check_numbering(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Check that config.json names layers, and the same duplicated ones as surgery.json, by which tensors have names.

    Raises:
        CheckpointError: If not.
    """
    found, wanted = numbering_of(checkpoint.config.get(CONFIG_KEY)), manifest.plan.numbering
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
    problems = list(header_problems({shard: own["header"] for shard, own in fused["shards"].items()}, "fused.shards"))
    if problems or not fused["shards"]:
        raise PlanError(in_one_line(problems or ["fused.shards is empty"]))
    return [*fused["shards"], *fused["texts"]]


def are_numbers(values: Iterable[object]) -> bool:
    """Whether values are numbers, all of them."""
    return all(isinstance(value, int | float) for value in values)


def _check_renumbered(manifest: Manifest) -> None:
    headers = manifest.renumbered
    known = {entry.stored_as for entry in manifest.base_files.values()}
    are_shards = known.issuperset(headers) and all(name.endswith(".safetensors") for name in headers)
    problems = list(header_problems(headers, "renumbered"))
    if problems or not are_shards or (headers and manifest.plan.numbering is None):
        raise PlanError(in_one_line(problems or ["renumbered"]))


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
    if CONFIG_FILE not in files:
        problems.append(
            f"{file}: is incomplete, the base's {CONFIG_FILE} is missing. Restore it from where you got it."
        )
    if problems:
        raise CheckpointError.from_problems(problems)
