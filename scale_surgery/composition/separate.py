"""Take a folder apart again: its base, or an expansion, byte for byte, out of a composed folder or an expanded one."""

from __future__ import annotations

from pathlib import Path

from scale_surgery.checkpoint.composed import refuse_lost_record
from scale_surgery.checkpoint.files import BaseWeights, check_base_weights, take_over
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.composition.members import give_out, known_files
from scale_surgery.composition.record import is_composition, read_composed_record
from scale_surgery.errors import PlanError
from scale_surgery.progress import Track, no_track
from scale_surgery.surgery import extract as single
from scale_surgery.surgery import strip as expanded_base
from scale_surgery.surgery.extract import Extracted
from scale_surgery.surgery.extract_folder import check_own_files, open_extract
from scale_surgery.surgery.parts import check_present, restore
from scale_surgery.surgery.strip import Stripped, check_files


def strip(
    expanded: str | Path,
    output: str | Path,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Stripped:
    """Write the base checkpoint that an expanded or composed folder stands on, and check every file by hash.

    Args:
        expanded: The folder.
        output: Folder to be.
        base_weights: How files are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was written.

    Raises:
        CheckpointError: If this is no expanded or composed folder, the output cannot be written, or a file is not what
            it was; then nothing is written, and every such file is named.
        PlanError: If there is no such way to take files over.
    """
    check_base_weights(base_weights)
    path, target = Path(expanded), Path(output)
    if not is_composition(path):
        return expanded_base.strip(path, target, base_weights=base_weights, overwrite=overwrite, track=track)
    record = read_composed_record(path)
    check_target(target, [path], overwrite=overwrite)
    total = sum(file.bytes for file in record.base_files.values())
    check_space(target, total if base_weights == "copy" else 0)
    check_present(path, record)
    state = {"strip": {name: file.sha256 for name, file in record.base_files.items()}, "base_weights": base_weights}
    with staged(target, state, overwrite=overwrite, keeps_refused=True) as partial:
        with track("files", total) as advance:

            def place(source: Path, file: Path) -> None:
                take_over(source, file, base_weights)
                advance(file.stat().st_size)

            restore(path, partial, record, place)
        files = check_files(partial, record, track, total)
    return Stripped(target, record.base_name, files, record.left_out)


def extract(
    expanded: str | Path,
    output: str | Path,
    *,
    name: str | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Extracted:
    """Write an expansion alone, and what is needed to put it back on its base.

    Args:
        expanded: Folder of an expanded checkpoint, or a composed folder.
        output: Folder to be.
        name: Which expansion of a composed folder.
        base_weights: How shards are taken over, here those of the expansion: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was written.

    Raises:
        CheckpointError: If this is no expanded or composed folder, it is not what was written, or the output cannot be
            written; every problem is named.
        PlanError: If a composed folder has no such expansion, or a name is given with one that has no names.
    """
    check_base_weights(base_weights)
    path, target = Path(expanded), Path(output)
    if is_composition(path):
        return _extract(path, target, name, base_weights, track, overwrite=overwrite)
    refuse_lost_record(path)
    if name is not None:
        raise PlanError(f"{path}: holds one expansion, which has no name, expected a composed folder. Leave out name.")
    return single.extract(path, target, base_weights=base_weights, overwrite=overwrite, track=track)


def _extract(
    path: Path, target: Path, name: str | None, how: BaseWeights, track: Track, *, overwrite: bool
) -> Extracted:
    record = read_composed_record(path)
    if name is None or name not in record.expansions:
        given = "missing" if name is None else name
        raise PlanError(f"name: is {given}, expected an expansion of {path}: {' or '.join(record.names)}.")
    check_target(target, [path], overwrite=overwrite)
    files = known_files(path, name)
    check_space(target, files.total)
    state = {"extract": name, "files": dict(files.sizes), "base_weights": how}
    with staged(target, state, overwrite=overwrite) as partial:
        with track("files", files.total) as advance:
            give_out(path, record, name, partial, how, advance)
        found = open_extract(partial)
        check_own_files(found, track)
    return Extracted(
        path=target,
        base_name=record.base_name,
        base_revision=record.base_revision,
        tensors=len(found.tensors),
        files={file: own.bytes for file, own in found.files.items()},
        licences=found.licences,
        bytes=files.total,
        base_bytes=sum(file.bytes for file in record.base_files.values() if file.stored_as is not None),
        left_out=(),
    )
