"""Merge an expansion into its base: one matrix for each linear, in a form for serving, or in a stock checkpoint.

fused   expanded model -> the same model with joined linears, same remote code; goes back to blocks bit for bit
blocks  fused model -> the expanded model, every file byte for byte
stock   expanded model without an up stream -> a plain checkpoint of the base's own architecture

A merged model's logits are compared with those of the model it was made from before the folder gets its name.

With a strength between 0 and 1, the expansion is scaled first, in a temporary folder (see `strength`), and that model
is merged. At 0 nothing of the expansion is left, and the base's own files are written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.headers import DTYPE_BYTES
from scale_surgery.checkpoint.listing import list_files
from scale_surgery.checkpoint.locks import locked_scratch
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    STOCK_FILE,
)
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.check import bytes_of_model, check_integrity, refuse_damaged
from scale_surgery.folder.config import code_texts, hash_texts
from scale_surgery.folder.folder import Folder, open_folder, refuse_linked
from scale_surgery.folder.joining import count_differences, damaged_pieces
from scale_surgery.folder.layout import lay_out, total_bytes
from scale_surgery.folder.record import Manifest, strength_entry, tool_versions
from scale_surgery.folder.record_schema import Strength
from scale_surgery.folder.write import write_record, write_router
from scale_surgery.planning.architecture import Sizes
from scale_surgery.planning.methods import refuse
from scale_surgery.progress import Track, no_track
from scale_surgery.running.drift import Drift, measure_drift
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.strength import check_strength
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.fused import check_fusible, fused_shards, write_blocks, write_fused
from scale_surgery.surgery.merge_stock import check_stock, write_stock
from scale_surgery.surgery.strength import check_scalable, write_scaled
from scale_surgery.surgery.strip import strip

MergedForm = Literal["fused", "stock", "blocks"]


@dataclass(frozen=True)
class MergedPart:
    """The part of an expanded model that `merge` joins with the base.

    Attributes:
        name: Expansion to merge, if there are several. The others are left out.
        strength: Factor of what the expansion writes into the hidden state and the logits of the base: a dial between
            the base and what was learned. At 0 the output is the base's checkpoint, file by file, whichever form was
            asked for.
    """

    name: str | None = None
    strength: Strength = 1.0


@dataclass(frozen=True)
class Merged:
    """Result of `merge`.

    Attributes:
        path: The new checkpoint.
        form: What it is: "fused", "stock" or "blocks".
        base_name: What its base model is called.
        parameters_before: Stored parameters of the model that it was made from.
        parameters: Its stored parameters.
        differences: How many more it has than that model, by reason: "zeros" in place of blocks, a "head" that is a
            matrix of its own, a "copy" of the embedding as the head, the "router"; at "strength" 0 the expansion.
        bytes_written: Bytes of its shards.
        drift: How far its logits are from those of the model it was made from; None for "blocks", whose files are
            compared by hash.
        left_out: Files that were not taken along.
        warnings: What a server may refuse.
    """

    path: Path
    form: MergedForm
    base_name: str
    parameters_before: int
    parameters: int
    differences: Mapping[str, int]
    bytes_written: int
    drift: Drift | None
    left_out: tuple[str, ...]
    warnings: tuple[str, ...] = ()


# fewer features a head are not taken by vLLM's attention on a CPU (0.32)
SMALLEST_SERVED_HEAD = 32


def merge(
    expanded: str | Path,
    output: str | Path,
    to: MergedForm = "fused",
    *,
    part: MergedPart = MergedPart(),
    probes: Probes = Probes(),
    run: RunOptions = RunOptions(),
    overwrite: bool = False,
    track: Track = no_track,
) -> Merged:
    """Merge an expanded checkpoint, or take a fused one apart again.

    Args:
        expanded: Folder of an expanded checkpoint; for "blocks" of a fused one.
        output: Folder to be.
        to: "fused", "stock" or "blocks".
        part: Expansion to merge, and its strength.
        probes: Prompts to measure the drift on, and tokens to generate for each.
        run: How the models run: device, trust_remote_code, memory_bytes.
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        PlanError: If this model cannot have that form or that strength; every reason is given.
        CheckpointError: If this is no expanded checkpoint, its logits drift further than rounding explains, or the
            output cannot be written. Then nothing is left under its name.
    """
    from scale_surgery.running.prompts import read_prompts

    source, target = Path(expanded), Path(output)
    check_strength(part.strength)
    folder = open_folder(source).one(part.name)
    refuse_linked(folder)
    _check_form(source, folder, to)
    if part.strength != 1:
        _check_strength(folder, to, part.strength)
    read_prompts(probes.prompts_file)  # what cannot be read is known before anything is written
    inputs = [source, *([Path(probes.prompts_file)] if probes.prompts_file else [])]
    check_target(target, inputs, overwrite=overwrite)
    if part.strength == 0:
        return _write_base(folder, target, track, overwrite=overwrite)
    if to == "fused":
        check_fusible(folder)
    elif to == "stock":
        check_stock(folder)
    if folder.whole is not None or part.strength != 1:
        with _prepared(folder, target, part.strength, run, track) as alone:
            done = merge(alone, target, to, probes=probes, run=run, overwrite=overwrite, track=track)
        return replace(done, left_out=_left_out(folder, target, to))
    check_space(target, _needed_bytes(folder, to))
    refuse_damaged(folder, track, is_trusted=run.trust_remote_code)
    drift = None
    with staged(target, _state(folder.manifest, to), folder.stamps, overwrite=overwrite) as partial:
        remembered = _write(folder, partial, to, track)
        if to == "blocks":
            _check_blocks(source, partial, track)
        else:
            drift = measure_drift(folder, partial, probes, run=run, track=track)
            _check_drift(partial, target, drift)
            if to == "fused":
                write_record(partial, _fused_record(folder.manifest, remembered, drift))
            else:
                write_json(partial / STOCK_FILE, _stock_record(partial, folder.manifest, drift, track))
    return _describe(target, to, folder, drift)


@contextmanager
def _prepared(folder: Folder, target: Path, strength: float, run: RunOptions, track: Track) -> Iterator[Path]:
    """Yield a temporary folder of one expansion alone on the base, at its strength."""
    name = folder.path.resolve().name
    with locked_scratch(target) as scratch:
        if folder.whole is not None:
            folder = _isolated(folder, scratch / name, track)
        if strength == 1:
            yield folder.path
            return
        with tempfile.TemporaryDirectory(dir=scratch) as beside:
            write_scaled(folder, Path(beside) / name, strength, track, is_trusted=run.trust_remote_code)
            yield Path(beside) / name


def _isolated(folder: Folder, alone: Path, track: Track) -> Folder:
    """Write a folder of one expansion alone, without a router."""
    others = [name for name in folder.of_all.manifest.expansions if name not in folder.manifest.expansions]
    compose(folder.path, (), alone, remove=others, track=track)
    write_router(alone, open_folder(alone), None)
    return open_folder(alone)


def _write_base(folder: Folder, target: Path, track: Track, *, overwrite: bool) -> Merged:
    """Write the base's checkpoint: joined matrices would round its sums in another order."""
    strip(folder.path, target, overwrite=overwrite, track=track)
    before = sum(info.elements for info in folder.tensors.values())
    written = open_checkpoint(target).tensors.values()
    after = sum(info.elements for info in written)
    return Merged(
        path=target,
        form="stock",
        base_name=folder.manifest.base_name,
        parameters_before=before,
        parameters=after,
        differences={"strength": after - before},
        bytes_written=sum(info.bytes for info in written),
        drift=None,
        left_out=_left_out(folder, target, "stock"),
    )


def _check_form(source: Path, folder: Folder, to: MergedForm) -> None:
    manifest = folder.manifest
    refuse(manifest.plan.method, "merge", source)
    if to == "blocks" and manifest.fused is None:
        refuse_form(source, "expanded", "fused")
    if to != "blocks" and manifest.fused is not None:
        refuse_form(source, "fused", "expanded")
    if to != "blocks" and (problems := damaged_pieces(folder.tensors, manifest)):
        raise CheckpointError(Problem("blocks-damaged", source, *problems))


def _check_strength(folder: Folder, to: MergedForm, strength: float) -> None:
    if to == "blocks":
        raise PlanError(Problem("strength-of-blocks", "--to blocks", strength=strength))
    check_scalable(folder)


def _needed_bytes(folder: Folder, to: MergedForm) -> int:
    if to == "stock":
        assert folder.manifest.plan.costs.stock is not None
        return folder.manifest.plan.costs.stock.parameters * DTYPE_BYTES[folder.dtype]
    if to == "fused":
        return total_bytes(fused_shards(folder))
    return sum(info.bytes for info in folder.tensors.values())


def _state(manifest: Manifest, to: MergedForm) -> dict[str, Any]:
    """Return the state that an unfinished folder must have to be continued."""
    return {"merge": to, "base": manifest.first_plan.base_fingerprint, "tool": tool_versions()}


def _write(folder: Folder, partial: Path, to: MergedForm, track: Track) -> dict[str, Any]:
    """Write all but the record, and return the texts and headers that a fused model's surgery.json keeps."""
    if to == "stock":
        write_stock(folder, partial, track)
        return {}
    if to == "fused":
        remembered = write_fused(folder, partial, track)
    else:
        write_blocks(folder, partial, track)
        remembered = {}
    left = (INDEX_FILE, *folder.manifest.code, *folder.left_out)
    beside = [file for file in folder.side_files if file not in left and not (partial / file).exists()]
    lay_out({file: folder.path / file for file in beside}, partial)
    return remembered


def _check_drift(partial: Path, target: Path, drift: Drift) -> None:
    if drift.holds:
        return
    measured = {"share": drift.share, "drift": drift.drift, "largest": drift.largest_logit}
    allowed = {"tolerance": drift.tolerance, "dtype": drift.dtype}
    raise CheckpointError(Problem("merge-drift", target, **measured, **allowed, folder=partial.parent))


def _check_blocks(source: Path, partial: Path, track: Track) -> None:
    """Check the restored folder against its restored surgery.json."""
    try:
        folder = open_folder(partial)
        with track("hashes", bytes_of_model(folder)) as advance:
            damage = CheckpointError(*check_integrity(folder, advance).problems)
    except CheckpointError as error:
        damage = error
    if damage.problems:
        raise CheckpointError(Problem("blocks-not-restored", source, *damage.problems))


def _fused_record(manifest: Manifest, remembered: Mapping[str, Any], drift: Drift) -> Manifest:
    """Return the record of a fused model."""
    code = hash_texts(code_texts(manifest.plan, is_fused=True))
    return replace(manifest, fused={**remembered, "drift": asdict(drift)}, code=code, verification=None)


def _stock_record(partial: Path, manifest: Manifest, drift: Drift, track: Track) -> dict[str, Any]:
    """Return merge.json: the origin of a stock export, the drift of its logits, and its files."""
    assert manifest.plan.costs.stock is not None
    sizes = {name: (partial / name).stat().st_size for name in list_files(partial) if name != STOCK_FILE}
    with track("hashes", sum(sizes.values())) as advance:
        written = hash_files(partial, list(sizes), advance)
    return {
        "form": "stock",
        "base_name": manifest.base_name,
        "base_revision": manifest.base_revision,
        "base_fingerprint": manifest.first_plan.base_fingerprint,
        "request": asdict(manifest.plan.request),
        "training": list(manifest.training),
        **strength_entry(manifest.expansions[manifest.name].strength),
        "base_files": {
            name: {"sha256": file.sha256, "bytes": file.bytes}
            for name, file in manifest.base_files.items()
            if name != STOCK_FILE
        },
        "files": {name: {"sha256": digest, "bytes": sizes[name]} for name, digest in written.items()},
        **asdict(manifest.plan.costs.stock),
        "drift": asdict(drift),
        "tool": tool_versions(),
    }


def _describe(target: Path, to: MergedForm, folder: Folder, drift: Drift | None) -> Merged:
    manifest = folder.manifest
    written = open_checkpoint(target)
    return Merged(
        path=target,
        form=to,
        base_name=manifest.base_name,
        parameters_before=sum(info.elements for info in folder.tensors.values()),
        parameters=sum(info.elements for info in written.tensors.values()),
        differences=_differences(manifest, to),
        bytes_written=sum(info.bytes for info in written.tensors.values()),
        drift=drift,
        left_out=_left_out(folder, target, to),
        warnings=() if to == "blocks" else _warnings(manifest.plan.sizes),
    )


def _left_out(folder: Folder, target: Path, to: MergedForm) -> tuple[str, ...]:
    """Return the files that were not taken along: of a stock form, also those that the base did not have."""
    if to == "stock":
        manifest = folder.of_all.manifest
        known = {file.stored_as for file in manifest.base_files.values()}
        known |= {CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, *manifest.replaced, *manifest.code}
        missing = [name for name in folder.side_files if name not in known]
    else:
        written = {INDEX_FILE, *folder.manifest.code}
        missing = [name for name in folder.side_files if name not in written and not (target / name).exists()]
    return tuple(dict.fromkeys((*folder.left_out, *missing)))


def _differences(manifest: Manifest, to: MergedForm) -> dict[str, int]:
    if to == "stock":
        assert manifest.plan.costs.stock is not None
        padding = manifest.plan.costs.stock.padding
        return {"zeros": padding} if padding else {}
    counts = count_differences(manifest)
    return {reason: -count for reason, count in counts.items()} if to == "blocks" else counts


def _warnings(sizes: Sizes) -> tuple[str, ...]:
    # 0 is an attention that is not split, or none
    if sizes.head_size >= SMALLEST_SERVED_HEAD or not sizes.head_size:
        return ()
    return (
        f"a head has {sizes.head_size} features: vLLM's attention on a CPU takes {SMALLEST_SERVED_HEAD} or more. "
        "transformers and scale-surgery serve run it.",
    )
