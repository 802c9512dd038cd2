"""Take an expansion off again: the base checkpoint, every file byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, take_over
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.forms import refuse_extract
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.names import EXTRACT_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.surgery.parts import check_present, rebuild_shard, restore
from scale_surgery.surgery.record import Manifest, read_manifest
from scale_surgery.surgery.renumbered import write_base_shard


@dataclass(frozen=True)
class Stripped:
    """What `strip` did.

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
    total = sum(file.bytes for file in manifest.base_files.values())
    is_written = base_weights == "copy" or manifest.joined_shards or manifest.renumbered
    check_space(target, total if is_written else 0)
    check_present(path, manifest)
    state = {
        "strip": {name: file.sha256 for name, file in manifest.base_files.items()},
        "base_weights": base_weights,
    }
    joined = open_checkpoint(path) if manifest.joined_shards else None
    with staged(target, state, overwrite=overwrite, keeps_refused=True) as partial:
        with track("files", sum(file.bytes for file in manifest.base_files.values() if file.stored_as)) as advance:
            restore(path, partial, manifest, _placing(path, manifest, joined, base_weights, advance))
        files = check_restored(partial, manifest, track, total)
    return Stripped(target, manifest.base_name, files, manifest.left_out)


def _placing(
    path: Path, manifest: Manifest, joined: Checkpoint | None, base_weights: BaseWeights, advance: Progress
) -> Callable[[Path, Path], None]:
    """How a stored file gets into the new folder: as a file, or its shard is written again as it was."""

    def place(source: Path, file: Path) -> None:
        shard = source.relative_to(path).as_posix()
        if joined is not None and shard in manifest.joined_shards:
            rebuild_shard(joined, manifest, shard, file, advance)
        elif shard in manifest.renumbered:
            write_base_shard(path, manifest, shard, file, advance)
        else:
            take_over(source, file, base_weights, advance)

    return place


def check_restored(folder: Path, manifest: Manifest, track: Track, total: int) -> dict[str, str]:
    """Check the files of a base that was given back by hash; those that differ are taken away.

    Args:
        folder: Where they lie.
        manifest: surgery.json.
        track: Makes progress bars.
        total: Bytes of all files.

    Returns:
        sha256 of each file.

    Raises:
        CheckpointError: If some differ; each is named.
    """
    with track("check by hash", total) as advance:
        hashes = hash_files(folder, list(manifest.base_files), advance)
    changed = [
        f"{name}: sha256 {hashes[name]}, expected {file.sha256} from {MANIFEST_FILE}. The file was changed "
        "after the expansion: the base cannot be given back from this folder."
        for name, file in manifest.base_files.items()
        if hashes[name] != file.sha256
    ]
    if changed:
        for name, file in manifest.base_files.items():
            if hashes[name] != file.sha256:
                (folder / name).unlink()  # a second run takes it over anew
        raise CheckpointError.from_problems(changed)
    return hashes
