"""The effect of training on an expanded checkpoint: the size of each block, and the drift of the base stream.

surgery.json, base tensors --initialisation of expand-->    the initial values of each tensor
expansion tensors          --norms-->                       its change
probe text                 --both models-->                 drift and cosine of the base stream, layer by layer

Nothing is written: the page is made by `show.pages.report`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import LOG_FILE, SETTINGS_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.checkpoint.sources import listed
from scale_surgery.errors import CheckpointError, PlanError, Problem, name_some
from scale_surgery.evidence.report_blocks import Comparison
from scale_surgery.evidence.report_records import CURVES, Report, Streams, by_layer
from scale_surgery.evidence.report_streams import compare_streams
from scale_surgery.folder.folder import Folder, open_folder, refuse_fused
from scale_surgery.folder.record import Manifest
from scale_surgery.progress import Track, no_track
from scale_surgery.running.options import RunOptions


def report(
    expanded: str | Path,
    texts: str | Path | Sequence[str | Path] = (),
    *,
    name: str | None = None,
    files_only: bool = False,
    sequence_length: int | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Report:
    """Report the effect of training on an expansion.

    Norms are Frobenius norms. Each block is compared with its initial values, computed again from the base inside.

    Args:
        expanded: Folder of the expanded checkpoint.
        texts: Probe text for the base stream: a file or saved dataset, or several, as for
            `documents.read_documents`; by default the built-in prompts of `verify`.
        name: Name of the expansion if there are several.
        files_only: Read tensors and run no model; the report then lacks the base stream.
        sequence_length: Most tokens of a window; by default the context, at most 1024.
        run: Options of the run: device, trust_remote_code, batch_size. Hidden states of all layers are held for a
            batch, so it is one window by default.
        track: Makes progress bars.

    Returns:
        Every expansion tensor, each layer, the base stream, and the measurements of the training runs.

    Raises:
        CheckpointError: If this is no expanded checkpoint, it is fused, tensors are missing or of a wrong shape (all
            are named), or it cannot be loaded.
        DataError: If a text cannot be read.
        PlanError: If texts are given and no model is to run, or there are several expansions and none is named.
    """
    path, files = Path(expanded), listed(texts)
    if files and files_only:
        raise PlanError(Problem("text-unread", "--text"))
    if sequence_length is not None and not files:
        raise PlanError(Problem("length-without-text", "--sequence-length", length=sequence_length))
    folder = open_folder(path).one(name)
    refuse_fused(folder)
    _check_tensors(folder)
    manifest, plan = folder.manifest, folder.manifest.plan
    comparison = Comparison(folder, run.placed().device)
    with track("blocks", sum(tensor.bytes for tensor in plan.tensors)) as advance:
        tensors = tuple(comparison.changes(advance))
    streams = None
    if not files_only:
        streams = compare_streams(folder, files, sequence_length, run, track)
    state: Any = "trained" if any(tensor.is_trained for tensor in tensors) else "initial"
    return Report(
        path=path,
        base_name=manifest.base_name,
        method=plan.method.name,
        variant=plan.variant,
        routing=manifest.routing,
        state=state,
        parameters=sum(tensor.elements for tensor in plan.tensors),
        tensors=tensors,
        layers=by_layer(tensors),
        streams=streams,
        runs=manifest.training,
        log=tuple(_read_log(folder)),
        notes=tuple(_notes(manifest, comparison, streams, state)),
    )


def _check_tensors(folder: Folder) -> None:
    """Refuse a folder with missing tensors, or tensors of another dtype or shape than planned; all are named."""
    planned = {tensor.name: tensor for tensor in folder.manifest.plan.tensors}
    problems = [
        Problem("tensor-missing", name)
        for name in (*folder.manifest.base_tensors, *planned)
        if name not in folder.tensors
    ]
    for name, tensor in planned.items():
        if name in folder.tensors:
            problems += folder.tensors[name].differences(tensor.dtype, tensor.shape)
    if problems:
        raise CheckpointError(Problem("shards-damaged", folder.path, *problems))


def _read_log(folder: Folder) -> Iterator[Mapping[str, Any]]:
    """Generate the log of the last training run, without truncated lines and lines without numbers.

    The log of a folder of several expansions is of the one that was trained last.
    """
    training = folder.path / TRAINING_FOLDER
    settings = training / SETTINGS_FILE
    if folder.whole is not None and settings.is_file() and read_json(settings).get("name") != folder.manifest.name:
        return
    file = training / LOG_FILE
    lines = read_bytes(file, most=sys.maxsize).decode("utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            drawn = (entry[key] for key in CURVES if entry.get(key) is not None)
            if all(isinstance(value, int | float) for value in (entry.get("step"), *drawn)):
                yield entry


def _notes(manifest: Manifest, comparison: Comparison, streams: Streams | None, state: str) -> Iterator[str]:
    if state == "initial":
        yield "Nothing was trained: every expansion tensor has the bytes that the expansion wrote."
    if (strength := manifest.expansions[manifest.name].strength) != 1:
        yield f"Strength {strength:g}: the tensors have it, and the training run was measured at strength 1."
    if comparison.spoiled:
        yield f"NaN or infinity in {name_some(comparison.spoiled)}: the model is broken."
    if comparison.differing:
        yield (
            f"The start of {name_some(comparison.differing)} was made again and has another sha256 than the one that "
            "was written: another machine, device or release rounds the last bits another way. Changes hold up to that."
        )
    if streams is not None and streams.path == "adapt":
        yield (
            "Routed: these numbers are of the adapt path, routing disabled; the preserve path always equals the base "
            "bit for bit."
        )
