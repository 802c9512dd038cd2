"""Take an expansion off again: the base checkpoint, every file byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.checkpoint.forms import refuse_extract
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.names import EXTRACT_FILE
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.layout import lay_out, room_for, total_bytes
from scale_surgery.folder.parts import base_contents
from scale_surgery.folder.record import read_manifest
from scale_surgery.progress import Track, no_track


@dataclass(frozen=True)
class Stripped:
    """Result of `strip`.

    Attributes:
        path: The base checkpoint.
        base_name: What the base model is called.
        files: Its files, each with the sha256 that was checked.
        left_out: Files of the original folder that the expansion had not taken along.
    """

    path: Path
    base_name: str
    files: dict[str, str]
    left_out: tuple[str, ...]


def strip(
    expanded: str | Path,
    output: str | Path,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Stripped:
    """Write the base checkpoint that an expanded checkpoint stands on, and check every file by hash.

    Args:
        expanded: Folder of the expanded checkpoint.
        output: Folder to be.
        base_weights: How files are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was written.

    Raises:
        CheckpointError: If this is no expanded checkpoint, the output cannot be written, or a file is not what
            it was; then nothing is written, and every such file is named.
    """
    path, target = Path(expanded), Path(output)
    refuse_extract(path, [file.name for file in path.glob(EXTRACT_FILE)])
    manifest = read_manifest(path)
    check_target(target, [path], overwrite=overwrite)
    missing = [
        Problem("base-file-missing", file.stored_as, file=name)
        for name, file in manifest.base_files.items()
        if file.stored_as not in (None, *manifest.joined_shards) and not (path / str(file.stored_as)).is_file()
    ]
    if missing:
        raise CheckpointError(*missing)
    contents = base_contents(path, manifest)
    check_space(target, room_for(contents, target, base_weights))
    state = {
        "strip": {name: file.sha256 for name, file in manifest.base_files.items()},
        "base_weights": base_weights,
    }
    with staged(target, state, overwrite=overwrite, keeps_refused=True) as partial:
        with track("files", total_bytes(contents)) as advance:
            lay_out(contents, partial, base_weights, advance)
        with track("check by hash", sum(file.bytes for file in manifest.base_files.values())) as advance:
            hashes = hash_files(partial, list(manifest.base_files), advance)
        changed = [
            Problem("base-not-given-back", name, sha256=hashes[name], recorded=file.sha256)
            for name, file in manifest.base_files.items()
            if hashes[name] != file.sha256
        ]
        for problem in changed:
            (partial / problem.where).unlink()  # a second run takes it over anew
        if changed:
            raise CheckpointError(*changed)
    return Stripped(target, manifest.base_name, hashes, manifest.left_out)
