"""An extracted expansion on a base whose files are other than those that it was made on.

base files       --as files-->    the same, under the names that `expand` would give them
expansion shards --as files-->    the same
config.json      --edited anew--> where the base's is another; tokenizer_config.json likewise
index, surgery.json               written for this base, so that `strip` gives its files back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import BaseWeights, take_over, write_json
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.checkpoint.sources import Source
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.base import Base
from scale_surgery.planning.plan import plan_expansion
from scale_surgery.planning.reserved import name_clash, reserved_names
from scale_surgery.progress import Track
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import TOKENIZER_CONFIG_FILE
from scale_surgery.surgery.config import make_index, stored_shard, written_config
from scale_surgery.surgery.extract_folder import Extract, name_in_extract
from scale_surgery.surgery.record import BaseFile, Manifest, base_tensors, tool_versions
from scale_surgery.surgery.renumbered import renumbered_shards
from scale_surgery.surgery.write_folder import running_dtype, take_over_shards

# written for each base, never taken over from the extract as they are
WRITTEN = (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE)


@dataclass(frozen=True)
class ComparedBase:
    """A base model, compared with the one that an expansion was made on.

    Attributes:
        source: Where it is.
        checkpoint: Its config and headers.
        files: sha256 of each of its files.
        tensors: sha256 of each of its tensors.
        differing: How tensors differ, by name.
        other_files: Names of files that are changed, new or missing.
    """

    source: Source
    checkpoint: Checkpoint
    files: Mapping[str, str]
    tensors: Mapping[str, str]
    differing: Mapping[str, str]
    other_files: tuple[str, ...]


def check_names(extract: Extract, base: ComparedBase) -> None:
    """Check that no two files would have one name; a side file that the expansion replaced before is no clash.

    Args:
        extract: The expansion.
        base: The base.

    Raises:
        CheckpointError: If they would; every name is listed.
    """
    own, places = _own_names(extract, base), _base_places(extract, base)
    known = {file.stored_as or name for name, file in extract.manifest.base_files.items()}
    replacing = {name for name in own if name in known and not name.endswith(".safetensors")}
    uses = Counter([*places.values(), *(name for name in own if name not in replacing)])
    clashing = sorted({*reserved_names(base.checkpoint), *(name for name, count in uses.items() if count > 1)})
    if clashing:
        raise CheckpointError.from_problems(map(name_clash, clashing))


def rebase(extract: Extract, base: ComparedBase, folder: Path, how: BaseWeights, run: RunOptions, track: Track) -> None:
    """Write an expanded checkpoint around the files of a base.

    Args:
        extract: The expansion.
        base: The base; names and shapes of its tensors fit.
        folder: Where the files go.
        how: How shards are taken over.
        run: How the base's tokenizer is loaded: trust_remote_code.
        track: Makes progress bars.

    Raises:
        CheckpointError: If a file of the base that the expansion replaces is no text.
    """
    own, places = _own_names(extract, base), _base_places(extract, base)
    # where both have a file, that of the expansion stays: somebody changed it there on purpose
    checkpoint, numbering = base.checkpoint, extract.manifest.plan.numbering
    side_files = {name: stored for name, stored in places.items() if name not in checkpoint.shards}
    taken = {stored: checkpoint.path / name for name, stored in side_files.items() if stored not in own}
    taken |= {name: extract.path / name_in_extract(name) for name in own}
    shard_bytes = sum((checkpoint.path / shard).stat().st_size for shard in checkpoint.shards)
    with track("files", shard_bytes + sum(file.stat().st_size for file in taken.values())) as advance:
        take_over_shards(checkpoint, folder, numbering, how, advance)
        for name, file in taken.items():
            take_over(file, folder / name, how, advance)
    _write_config(extract, base, folder, run)
    _write_index(extract, base.checkpoint, folder)
    write_json(folder / MANIFEST_FILE, _manifest(extract, base, folder, places).to_json())


def _own_names(extract: Extract, base: ComparedBase) -> list[str]:
    """Files that are taken over from the extract; the tokenizer's class is pinned for each base."""
    repinned = {TOKENIZER_CONFIG_FILE}.intersection(base.other_files)
    return [name for name in extract.files if name not in WRITTEN and name not in repinned]


def _base_places(extract: Extract, base: ComparedBase) -> dict[str, str]:
    """Names that the base's files get; config and index are written anew."""
    recorded = {name: file.stored_as or name for name, file in extract.manifest.base_files.items()}
    places = {shard: stored_shard(shard) for shard in base.checkpoint.shards}
    side_files = (file for file in base.checkpoint.side_files if file not in WRITTEN)
    return places | {file: recorded.get(file, file) for file in side_files}


def _write_config(extract: Extract, base: ComparedBase, folder: Path, run: RunOptions) -> None:
    from scale_surgery.running.tokenizer import pin_tokenizer_class

    # it names the base
    manifest, dtype = _named(extract.manifest, base), running_dtype(base.checkpoint)
    write_json(folder / CONFIG_FILE, written_config(manifest, base.checkpoint.config, dtype))
    if TOKENIZER_CONFIG_FILE in base.other_files:
        pin_tokenizer_class(base.checkpoint.path, folder, run)


def _write_index(extract: Extract, base: Checkpoint, folder: Path) -> None:
    shards = {name: stored_shard(info.file) for name, info in base.tensors.items()}
    shards |= {name: info.file for name, info in extract.tensors.items()}
    total = sum(info.bytes for info in (*base.tensors.values(), *extract.tensors.values()))
    write_json(folder / INDEX_FILE, make_index(shards, extract.manifest.plan.specs, total))


def _manifest(extract: Extract, base: ComparedBase, folder: Path, places: Mapping[str, str]) -> Manifest:
    """surgery.json for this base."""
    before, given = _named(extract.manifest, base), base.checkpoint
    renumbered = renumbered_shards(given, before.plan.numbering)
    replaced = {
        name: _text(given.path / name)
        for name in given.side_files
        if name in WRITTEN or hash_file(folder / places[name]) != base.files[name]
    }
    files = {
        name: BaseFile(digest, (given.path / name).stat().st_size, None if name in replaced else places[name])
        for name, digest in base.files.items()
    }
    return replace(
        before,
        base_files=files,
        base_tensors=base_tensors(given, base.tensors),
        left_out=given.left_out,
        replaced=replaced,
        tool=tool_versions(),
        verification=None,
        renumbered={places[shard]: header for shard, header in renumbered.items()},
    ).with_expansion(forced_base=_forced(extract.manifest, base) if base.differing else before.forced_base)


def _named(manifest: Manifest, base: ComparedBase) -> Manifest:
    """A record that names this base, in its plan too."""
    name, revision, made = base.source.name, base.source.revision, manifest.plan
    given = Base(base.checkpoint, made.facts)
    plan = plan_expansion(given, made.request, name=name, revision=revision)
    dtypes = {tensor.dtype for tensor in made.tensors}
    if [tensor.dtype for tensor in plan.tensors] != [tensor.dtype for tensor in made.tensors]:
        # put by force on a base that was cast: blocks stay what they are, and the request says so
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{name}: is of other dtypes than the base that the expansion was made on, whose blocks are of several "
                f"({', '.join(sorted(dtypes))}), expected the dtypes of that base. Cast this one."
            )
        dtype: Any = next(called for called, stored in FLOAT_DTYPES.items() if stored in dtypes)
        plan = plan_expansion(given, replace(made.request, dtype=dtype), name=name, revision=revision)
    return replace(manifest, base_name=name, base_revision=revision).with_expansion(plan=plan)


def _text(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file.name}: the expansion has another file of this name, and the base's is no text that surgery.json "
            "could keep. Take it out of the base."
        ) from error


def _forced(manifest: Manifest, base: ComparedBase) -> dict[str, Any]:
    return {
        "expected_name": manifest.base_name,
        "expected_revision": manifest.base_revision,
        "differing": list(base.differing),
    }
