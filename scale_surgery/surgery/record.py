"""surgery.json: what an expanded checkpoint stands on, what was done, and how to take it back.

It records sha256 of every base file and tensor, the text of each base file that the expansion replaces, the
plan, the versions, and the last verification. It is enough to verify and to strip without the base at hand.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    Checkpoint,
    check_folder,
    is_inside,
    read_json,
)
from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.errors import CheckpointError, PlanError, name_some
from scale_surgery.fields import problems_of
from scale_surgery.planning.base import check_layers
from scale_surgery.planning.families import read_sizes
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.routing_specs import Routing
from scale_surgery.planning.saved import read_plan

MANIFEST_FORMAT = 1
# what a stock export holds in place of surgery.json
STOCK_RECORD_FILE = "merge.json"


@dataclass(frozen=True)
class BaseFile:
    """A file of the base model: its sha256, its size, and the name it has in the expanded folder.

    `stored_as` is None for a file that the expansion replaces; its text then stands in `Manifest.replaced`.
    """

    sha256: str
    bytes: int
    stored_as: str | None


@dataclass(frozen=True)
class Manifest:
    """The content of surgery.json."""

    base_name: str
    base_revision: str | None
    base_fingerprint: str
    base_files: Mapping[str, BaseFile]
    base_tensors: Mapping[str, str]
    left_out: tuple[str, ...]
    replaced: Mapping[str, str]
    expansion_tensors: Mapping[str, str]
    code: Mapping[str, str]
    plan: Plan
    tool: Mapping[str, str] = field(default_factory=dict)
    verification: Mapping[str, Any] | None = None
    # one entry a training run: settings, data, steps, what was measured
    training: tuple[Mapping[str, Any], ...] = ()
    # of a routed model: its router, and what config.json and the code were before
    routing: Mapping[str, Any] | None = None
    # of a fused model: headers and texts of what it was made of, and the drift that was measured
    fused: Mapping[str, Any] | None = None
    # of an expansion that `apply --force` put on another base: the base that it was made on, and what differs
    forced_base: Mapping[str, Any] | None = None
    # of a model with duplicated layers: the base's header of each shard in which tensors got other names
    renumbered: Mapping[str, str] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def joined_shards(self) -> Mapping[str, Mapping[str, str]]:
        """Shards that a fused model was made of, whose tensors now lie in joined ones; none where it has its blocks."""
        return {} if self.fused is None else self.fused["shards"]


def tool_versions() -> dict[str, str]:
    """Versions of this program and of what it stands on."""
    names = ("scale-surgery", "torch", "transformers", "safetensors")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def read_manifest(path: Path) -> Manifest:
    """Read surgery.json of an expanded checkpoint.

    Raises:
        CheckpointError: If it is missing, is of another format or is incomplete.
    """
    file = path / MANIFEST_FILE
    check_folder(path)
    if not file.is_file() and (path / STOCK_RECORD_FILE).is_file():
        raise CheckpointError(
            f"{path}: is a plain checkpoint that scale-surgery merge --to stock made, it has no blocks. Give the "
            "expanded model that it was made from."
        )
    if path.is_dir() and not file.is_file():
        raise CheckpointError(
            f"{path}: has no {MANIFEST_FILE}, expected a model made by scale-surgery expand. A trainer does not save "
            "it: docs/commands.md, Other trainers, says how to bring trained blocks back."
        )
    content = read_json(file)
    if content.get("format") != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{file}: format {content.get('format')!r}, expected {MANIFEST_FORMAT}. Use the release that made it."
        )
    try:
        files = {name: BaseFile(**entry) for name, entry in content["base_files"].items()}
        _check_values(file, content, files)
        plan = read_plan(content["plan"])
        _check_plan(file, plan, content["base_tensors"], json.loads(content["replaced"].get(CONFIG_FILE, "null")))
        later = [*_routing_names(file, content.get("routing")), *_fused_names(file, content.get("fused"))]
        _check_names(file, files, content["replaced"], [*content["code"], *later])
        _check_training(content.get("training", ()))
        _check_forced(content.get("forced_base"))
        _check_renumbered(file, content, files, plan.numbering)
        lists = {"left_out": tuple(content["left_out"]), "training": tuple(content.get("training", ()))}
        return Manifest(**{**content, "plan": plan, "base_files": files, **lists})
    except (KeyError, TypeError, AttributeError, ValueError, PlanError) as error:
        raise CheckpointError(f"{file}: is incomplete ({error}). Restore it from where you got it.") from error


def _check_values(file: Path, content: Mapping[str, Any], files: Mapping[str, BaseFile]) -> None:
    """Check the kinds of values that other rooms rely on, so that a spoiled one is noticed here."""
    names = ("base_tensors", "replaced", "expansion_tensors", "code")
    wrong = [name for name in names if not _are_texts(content[name])]
    wrong += [
        f"base_files.{name}"
        for name, entry in files.items()
        if not (isinstance(entry.sha256, str) and isinstance(entry.bytes, int))
    ]
    wrong += [] if isinstance(content["base_name"], str) else ["base_name"]
    wrong += [] if all(isinstance(name, str) for name in content["left_out"]) else ["left_out"]
    verification = content.get("verification")
    if verification is not None and not isinstance(verification.get("passed"), bool):
        wrong.append("verification")
    if not wrong and not isinstance(json.loads(content["replaced"].get(CONFIG_FILE, "{}")), dict):
        wrong.append(f"replaced.{CONFIG_FILE}")
    if wrong:
        raise CheckpointError(f"{file}: is incomplete ({name_some(wrong, 10)}). Restore it from where you got it.")


def _are_texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


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


def _check_plan(file: Path, plan: Plan, base_tensors: Mapping[str, str], base_config: Mapping[str, Any] | None) -> None:
    # a text that is missing is named where the texts of all files are looked at
    if base_config is not None and read_sizes(plan.architecture, base_config) != plan.sizes:
        raise PlanError("plan.sizes are not those of the base's config.json")
    check_layers(plan.architecture, plan.sizes.layers, base_tensors)
    for tensor in plan.tensors:
        # outside the layers a tied head has no tensor of its own in the base
        if tensor.layer is not None and tensor.source not in base_tensors:
            raise PlanError(f"plan.tensors, {tensor.name}: init {tensor.init!r} of {tensor.source!r}")
    both = [tensor.name for tensor in plan.tensors if tensor.name in base_tensors]
    if both:
        raise CheckpointError.from_problems(
            f"{file}: {name} is said to be a base tensor and a new one. Do not use this checkpoint before you know who "
            "made it."
            for name in both[:10]
        )


def check_numbering(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Check that config.json and surgery.json name the same duplicated layers, by which tensors have their names.

    Raises:
        CheckpointError: If not.
    """
    found, wanted = numbering_of(checkpoint.config.get(CONFIG_KEY)), manifest.plan.numbering
    if found != wanted:
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: {CONFIG_KEY} names {_copied(found)} as duplicated, expected "
            f"{_copied(wanted)} from {MANIFEST_FILE}. Restore config.json from where you got it."
        )


def _copied(numbering: Numbering | None) -> str:
    return "no layer" if numbering is None else f"layers {', '.join(map(str, numbering.copied))}"


def _routing_names(file: Path, routing: Mapping[str, Any] | None) -> list[str]:
    """Names of files that un-routing writes; touches what it reads."""
    if routing is None:
        return []
    before = routing["before"]
    _ = before["training_runs"], before["verification"], before["files"][CONFIG_FILE]
    if wrong := problems_of(Routing(**routing["settings"])):
        raise PlanError(f"routing.settings: {wrong[0]}")
    names = [*before["files"], *before["code"]]
    numbers = [number for number in routing["settings"].values() if not isinstance(number, str)]
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    texts = (*names, *before["files"].values(), *before["keys"])
    if not (are_numbers and all(isinstance(text, str) for text in texts)):
        raise CheckpointError(f"{file}: is incomplete (routing.before). Restore it from where you got it.")
    return names


def _fused_names(file: Path, fused: Mapping[str, Any] | None) -> list[str]:
    """Names of files that un-fusing writes; touches what it reads."""
    if fused is None:
        return []
    texts = [text for record in fused["shards"].values() for text in (record["header"], record["sha256"])]
    names = [*fused["shards"], *fused["texts"]]
    _ = [json.loads(record["header"]).items() for record in fused["shards"].values()]
    _ = fused["drift"]["drift"] + 0, fused["drift"]["dtype"]
    if not fused["shards"] or not all(isinstance(text, str) for text in (*names, *texts, *fused["texts"].values())):
        raise CheckpointError(f"{file}: is incomplete (fused). Restore it from where you got it.")
    return names


def are_numbers(values: Iterable[object]) -> bool:
    """Whether values are numbers, all of them."""
    return all(isinstance(value, int | float) for value in values)


def _check_training(training: Iterable[Mapping[str, Any]]) -> None:
    for run in training:
        measured = (value for value in (run.get("measured") or {}).values() if value is not None)
        if not are_numbers([run.get("steps", 0), *measured]):
            raise PlanError("training")


def _check_forced(forced: Mapping[str, Any] | None) -> None:
    if forced is not None:
        _ = forced["expected_name"], len(forced["differing"])


def _check_renumbered(
    file: Path, content: Mapping[str, Any], files: Mapping[str, BaseFile], numbering: Numbering | None
) -> None:
    headers = content.get("renumbered", {})
    known = {entry.stored_as for entry in files.values()}
    are_headers = _are_texts(headers) and all(isinstance(json.loads(header), dict) for header in headers.values())
    are_shards = known.issuperset(headers) and all(name.endswith(".safetensors") for name in headers)
    if not are_headers or not are_shards or (headers and numbering is None):
        raise CheckpointError(f"{file}: is incomplete (renumbered). Restore it from where you got it.")


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


def routing_of(manifest: Manifest) -> Routing | None:
    """How a checkpoint routes, as surgery.json says; None where it does not."""
    return None if manifest.routing is None else Routing(**manifest.routing["settings"])
