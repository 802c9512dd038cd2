"""Describe a checkpoint from its headers and config: family, sizes, parameters, and its expansions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import (
    DEFAULT_NAME,
    ROUTER_KEY,
    expansion_of,
    place_of_specs,
    specs_of_expansions,
)
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, numbering_of
from scale_surgery.checkpoint.records import open_record, read_record, reading
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.deriving.base import base_config, code_folder, derive_config, read_base
from scale_surgery.evidence.verification import changed_since
from scale_surgery.folder.record import StoredManifest, read_stored
from scale_surgery.folder.routers import read_router
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.base import check_layers, quantisation_of, remarks_on
from scale_surgery.planning.methods import method_of_variant
from scale_surgery.planning.plan import Origin
from scale_surgery.planning.specs import Collaboration, Widths
from scale_surgery.planning.treatments import treatment_rows
from scale_surgery.running.freeze import group_of
from scale_surgery.running.loading import needs_own_code
from scale_surgery.running.options import RunOptions


@dataclass(frozen=True)
class ExpansionSummary:
    """Summary of an expansion.

    Attributes:
        method: "scale", "grow" or "depth".
        variant: The variant, such as "preserve" or "adapt".
        layers: Expanded layers, by their numbers in the base.
        new_layers: Positions of the copies in a model with duplicated layers; otherwise empty.
        collaborative_layers: Layers with W12.
        collaborative_groups: Groups with W12 in them, "attn" and "ffn".
        up_width: Features added to the residual stream.
        up_kv_heads: Key/value heads added in each expanded layer.
        up_inner_width: Features added inside each expanded MLP.
        copies: MLPs in each layer of a grown model, including the original; otherwise None.
        parameters_by_block: Parameters added, by block name; for copied layers by group ("attn", "ffn", "norms"). All
            of them train.
        is_fused: True if base weights and blocks are one matrix for each linear, so that nothing trains.
        steps: Steps of all training runs.
        strength: Factor of what was learned, where a merge set one.
    """

    method: str
    variant: str
    layers: tuple[int, ...]
    new_layers: tuple[int, ...]
    collaborative_layers: tuple[int, ...]
    collaborative_groups: tuple[str, ...]
    up_width: int
    up_kv_heads: int
    up_inner_width: int
    copies: int | None
    parameters_by_block: Mapping[str, int]
    is_fused: bool
    steps: int
    strength: float = 1.0

    @property
    def parameters(self) -> int:
        """Number of added parameters."""
        return sum(self.parameters_by_block.values())


@dataclass(frozen=True)
class FolderSummary:
    """Summary of an expanded folder.

    Attributes:
        base_name: Hub id or folder name of the base model; None if unknown.
        base_revision: Commit of the Hub repository, if known.
        expansions: Each expansion, by its name, in the order of the paths.
        routing: The router, or None.
        verified: Date of the last verification with its result, or None.
        passed: Result of that verification; None without one.
        changed_since: Changes since then, according to the records: tensors, the router or its numbers; None if there
            are none.
        adopt: Command that makes an expanded folder from another trainer's output; None if it already is one.
    """

    base_name: str | None
    base_revision: str | None
    expansions: Mapping[str, ExpansionSummary]
    routing: Router | None
    verified: str | None
    passed: bool | None
    changed_since: str | None
    adopt: str | None

    @property
    def is_current(self) -> bool:
        """True if its present state was verified, and passed."""
        return bool(self.passed) and not self.changed_since


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    Attributes:
        name: Hub id or folder name.
        family: `model_type` of the base model.
        treatments: Possible expansion of each kind of layer, by the layers.
        sizes: Sizes of the base model.
        dtype: Dtype of most parameters, in safetensors' name.
        shards: Safetensors files with their bytes.
        tensors: Number of tensors.
        parameters_stored: Parameters in the files.
        parameters_unique: The same without a head that is stored although it is tied to the embedding.
        bytes: Bytes of all tensors.
        left_out: Files with weights in other formats, and links that lead out of the folder.
        expanded: The expansions, for an expanded model.
        quantisation: Reason why a base cannot be expanded as it is stored, or None.
        not_loaded: Paths of tensors that a base's class does not load.
        has_own_head: True if a base's head differs from its embedding although config.json ties them.
        remarks: Surprising facts of a base: tensors that are not loaded, and a head that is not tied after all.
        not_found: Parts of the model that the base's files lack; such a base cannot be expanded.
    """

    name: str
    family: str
    treatments: Mapping[str, str]
    sizes: Sizes
    dtype: str
    shards: Mapping[str, int]
    tensors: int
    parameters_stored: int
    parameters_unique: int
    bytes: int
    left_out: tuple[str, ...]
    expanded: FolderSummary | None
    quantisation: str | None = None
    not_loaded: tuple[str, ...] = ()
    has_own_head: bool = False
    remarks: tuple[str, ...] = ()
    not_found: tuple[str, ...] = ()


@open_record
@dataclass(frozen=True)
class _Specs:
    """The keys of an expansion in config.json that `inspect` shows."""

    variant: str
    expanded_layers: tuple[int, ...]
    name: str = DEFAULT_NAME
    widths: Widths = field(default_factory=Widths)
    collaborative: Collaboration = field(default_factory=Collaboration)
    expanded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kinds: tuple[Mapping[str, Any], ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    fused: bool = False
    origin: Origin | None = None


def inspect(model: str | Path, *, revision: str | None = None, run: RunOptions = RunOptions()) -> Inspection:
    """Describe a checkpoint; weights are not read, except a stored head that config.json declares tied.

    Args:
        model: A folder or a Hub id, a base model or an expanded one.
        revision: Branch, tag or commit of a Hub repository.
        run: Permission to run the model's own code if transformers lacks its type: trust_remote_code.

    Returns:
        The description.

    Raises:
        CheckpointError: If the model cannot be read.
        UnsupportedFamilyError: If its architecture is not supported.
    """
    source, checkpoint = open_model(model, revision)
    if CONFIG_KEY in checkpoint.config and checkpoint.recorded is None and needs_own_code(checkpoint.config):
        # only the record names the base's classes
        refuse_form(model, "saved", "expanded")
    code = code_folder(checkpoint, run)
    derived = derive_config(base_config(checkpoint), str(source.path), len(checkpoint.tensors), code)
    architecture, sizes = derived.architecture, derived.sizes
    if (numbering := numbering_of(checkpoint.config.get(CONFIG_KEY))) is not None:
        sizes = replace(sizes, layers=sizes.layers - len(numbering.new))
    check_layers(architecture, sizes.layers, checkpoint.tensors)
    is_base = CONFIG_KEY not in checkpoint.config
    base = read_base(checkpoint, run) if is_base else None
    quantised = None if base is None else quantisation_of(base)
    record = _record_of(checkpoint)
    facts = [base.facts] if base else [] if record is None else [each.facts for each in record.expansions.values()]
    has_own_head = any(each.has_own_head for each in facts)
    sizes = replace(sizes, is_tied=sizes.is_tied and not has_own_head) if base is None else base.sizes
    stored = sum(info.elements for info in checkpoint.tensors.values())
    shards: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        shards[info.file] = shards.get(info.file, 0) + info.bytes
    return Inspection(
        name=source.name,
        family=architecture.model_type,
        treatments=dict(treatment_rows(architecture)),
        sizes=sizes,
        dtype=checkpoint.dtype,
        shards=shards,
        tensors=len(checkpoint.tensors),
        parameters_stored=stored,
        parameters_unique=stored - _tied_copy(checkpoint, architecture, sizes),
        bytes=sum(shards.values()),
        left_out=checkpoint.left_out,
        expanded=None if is_base else _summarise(checkpoint, str(model), record),
        quantisation=None if quantised is None else str(quantised),
        not_loaded=() if base is None else base.facts.not_loaded,
        has_own_head=has_own_head,
        remarks=() if base is None else remarks_on(base.facts),
        not_found=() if base is None else tuple(map(str, base.not_found)),
    )


def _record_of(checkpoint: Checkpoint) -> StoredManifest | None:
    """Return the record of an expanded model; None for a base, and for what a trainer saved."""
    file = checkpoint.path / MANIFEST_FILE
    return read_stored(file) if CONFIG_KEY in checkpoint.config and file.is_file() else None


def _tied_copy(checkpoint: Checkpoint, architecture: Architecture, sizes: Sizes) -> int:
    copy = checkpoint.tensors.get(f"{architecture.head}.weight") if sizes.is_tied else None
    return 0 if copy is None else copy.elements


def _summarise(checkpoint: Checkpoint, title: str, stored: StoredManifest | None) -> FolderSummary:
    key = checkpoint.config[CONFIG_KEY]
    with reading(checkpoint.path / CONFIG_FILE):
        plain = specs_of_expansions(key)
        specs = [read_record(entry, _Specs, place_of_specs(key, number)) for number, entry in enumerate(plain)]
        base = stored or specs[0].origin
        verified, passed, changed = None, None, None
        if stored and (verification := stored.verification):
            passed = verification["passed"]
            verified = f"{'passed' if passed else 'FAILED'} {verification['date']}"
            runs = [run for expansion in stored.expansions.values() for run in expansion.training]
            changed = changed_since(verification, runs, stored.routing)
        return FolderSummary(
            base_name=None if base is None else base.base_name,
            base_revision=None if base is None else base.base_revision,
            expansions={spec.name: _read_expansion(checkpoint, spec, stored) for spec in specs},
            routing=read_router(key.get(ROUTER_KEY), len(specs), f"{CONFIG_KEY}.{ROUTER_KEY}"),
            verified=verified,
            passed=passed,
            changed_since=changed,
            adopt=None if stored else adopt_line(title),
        )


def _read_expansion(checkpoint: Checkpoint, specs: _Specs, stored: StoredManifest | None) -> ExpansionSummary:
    # a model with duplicated layers has one expansion
    numbering = numbering_of(checkpoint.config[CONFIG_KEY])
    known = stored.expansions.get(specs.name) if stored else None
    runs = () if known is None else known.training
    copies = None if numbering is None else _count_copies(checkpoint, specs.groups)
    return ExpansionSummary(
        method=method_of_variant(specs.variant).name,
        variant=specs.variant,
        layers=specs.expanded_layers,
        new_layers=() if numbering is None else numbering.new,
        collaborative_layers=specs.collaborative.layers,
        collaborative_groups=specs.collaborative.groups,
        up_width=specs.widths.up_width,
        up_kv_heads=specs.widths.up_kv_heads,
        up_inner_width=specs.widths.up_inner_width,
        copies=_count_mlps(specs),
        parameters_by_block=_count_blocks(checkpoint, specs.name) if copies is None else copies,
        is_fused=specs.fused,
        steps=int(sum(run.get("steps", 0) for run in runs)),
        strength=1.0 if known is None else known.strength,
    )


def _count_blocks(checkpoint: Checkpoint, expansion: str) -> dict[str, int]:
    counts = dict.fromkeys(("w12", "w21", "w22", "w11", "gate", "up_weight", "up_bias", "bias11", "new_rows"), 0)
    for info in checkpoint.tensors.values():
        block = info.name.rpartition(".")[2]
        if expansion_of(info.name) == expansion and block in counts:
            counts[block] += info.elements
    return {block: count for block, count in counts.items() if count}


def _count_mlps(specs: _Specs) -> int | None:
    """Return the number of MLPs in a layer of a grown model: one over the share of its down projections."""
    modules = (specs.expanded, *(kind.get("expanded", {}) for kind in specs.kinds))
    shares = [spec["share"] for specs in modules for spec in specs.values() if "share" in spec]
    return round(1 / shares[0]) if shares else None


def _count_copies(checkpoint: Checkpoint, groups: Mapping[str, str]) -> dict[str, int]:
    """Return the parameters of copied layers by group."""
    counts = dict.fromkeys(("attn", "ffn", "norms"), 0)
    for info in checkpoint.tensors.values():
        _, is_copy, inside = info.name.partition(f".{AFTER}")
        if is_copy:
            counts[group_of(inside, groups)] += info.elements
    return {group: count for group, count in counts.items() if count}
