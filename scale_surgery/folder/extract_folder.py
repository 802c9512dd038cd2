"""The folder that `extract` writes: an expansion without its base, and the records to put it back.

expansion-*.safetensors, config.json, surgery.json, *.py, training/   as they lie in the expanded folder
expanded.index.json    its index, under a name by which no loader takes the folder for a whole model
LICENSE, NOTICE, ...   those of the base: the expansion's tensors are made from its tensors
extract.json           which base, and which files are the expansion's and the base's
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from scale_surgery.checkpoint.expansions import renamed
from scale_surgery.checkpoint.file_stat import take_stamps
from scale_surgery.checkpoint.folder import name_tensors, read_config, read_json
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.headers import read_header
from scale_surgery.checkpoint.names import (
    CHANGED_FILES,
    CONFIG_FILE,
    EXTRACT_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    OTHER_WEIGHT_SUFFIXES,
    STORED_INDEX,
    is_inside,
)
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.records import read_record_file, reading
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.fields import Range
from scale_surgery.folder.config import config_problems
from scale_surgery.folder.folder import Folder, refuse_linked
from scale_surgery.folder.layout import Content, Headed
from scale_surgery.folder.record import Manifest, read_manifest
from scale_surgery.folder.renumbered import aligned_header
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Track, no_track
from scale_surgery.running.tokenizer import TOKENIZER_FILES

EXTRACT_FORMAT = 1


@dataclass(frozen=True)
class ExpansionFile:
    """A file of the expanded folder that is not the base's: its sha256 and size."""

    sha256: str
    bytes: Annotated[int, Range(least=0)]


@dataclass(frozen=True)
class ExtractRecord:
    """The content of extract.json.

    Attributes:
        format: Version of the record.
        base_name: What the base model is called.
        base_revision: Commit of its Hub repository, where known.
        files: Files of the expanded folder that lie in the extract, by their names there.
        from_base: Files of the expanded folder that are the base's, by their names there.
        licence: The licence that the base's card names.
        licences: Licence files of the base, which lie in the extract too.
        tool: Versions of what wrote it.
    """

    format: int
    base_name: str
    base_revision: str | None
    files: Mapping[str, ExpansionFile]
    from_base: tuple[str, ...]
    licence: Mapping[str, Any]
    licences: tuple[str, ...]
    tool: Mapping[str, str]


@dataclass(frozen=True)
class Extract(Folder):
    """An expansion without its base: a folder that holds the tensors of one expansion alone.

    Attributes:
        name: What it is called.
        listing: Its extract.json.
    """

    name: str = field(kw_only=True)
    listing: ExtractRecord = field(kw_only=True)


def name_in_extract(file: str) -> str:
    """Return the name in the extract of a file of the expanded folder."""
    return STORED_INDEX if file == INDEX_FILE else file


def open_extract(extract: str | Path, revision: str | None = None) -> Extract:
    """Read and check an extract, a folder or a Hub id; nothing in it is trusted, and no tensor is read."""
    source = find_source(extract, revision)
    path, file = source.path, source.path / EXTRACT_FILE
    if not file.is_file():
        raise CheckpointError(Problem("extract-without-record", extract))
    stamps = take_stamps(child for child in path.rglob("*") if child.is_file())
    listing, manifest = read_extract(file), read_manifest(path)
    if manifest.fused is not None:
        refuse_form(path, "fused", "expanded")
    with reading(file):
        _check_names(path, listing.files, (*listing.from_base, *listing.licences))
        shards = tuple(sorted(name for name in listing.files if name.endswith(".safetensors")))
        tensors = {name: info for shard in shards for name, info in read_header(path, shard).items()}
        opened = Extract(
            path=path,
            config=read_config(path / CONFIG_FILE),
            tensors=name_tensors(tensors, manifest.plan.numbering),
            shards=shards,
            side_files=tuple(name for name in listing.files if name not in (*shards, MANIFEST_FILE)),
            left_out=(),
            stamps={path / name: stamps[path / name] for name in map(name_in_extract, listing.files)},
            manifest=manifest,
            name=source.name,
            listing=listing,
        )
        refuse_linked(opened)
        problems = content_problems(opened, listing.files)
        stored = {entry.stored_as for entry in manifest.base_files.values() if entry.stored_as is not None}
        # what is the base's comes from the base: an extract may neither bring such a file nor leave one out
        problems += [
            Problem("extract-not-base", EXTRACT_FILE, file=name)
            for name in sorted({*listing.from_base} ^ stored | {*listing.files} & stored)
        ]
    if problems:
        raise CheckpointError(*problems)
    return opened


def made_files(extract: Extract) -> set[str]:
    """Return the names of files that are written anew for another base, or beside other expansions."""
    made = {*extract.manifest.code_files, *CHANGED_FILES, MANIFEST_FILE}
    # a tokenizer where the base has none is the user's
    has_tokenizer = not extract.manifest.base_files.keys().isdisjoint(TOKENIZER_FILES)
    return made if has_tokenizer else made.difference(TOKENIZER_FILES)


def shards_of(extract: Extract, plan: Plan) -> dict[str, Content]:
    """Return the shards of an expansion as another plan names them, with its tensors under the name there."""
    made, name, contents = extract.manifest.plan, plan.request.name, dict[str, Content]()
    shards = {extract.tensors[old.name].file: new.shard for old, new in zip(made.tensors, plan.tensors, strict=True)}
    for file, shard in shards.items():
        if made.request.name == name:
            contents[shard] = extract.path / file
            continue
        header = header_bytes(extract.path / file)[8:].decode("utf-8")
        entries = {
            key if key == "__metadata__" else renamed(key, name): entry for key, entry in json.loads(header).items()
        }
        contents[shard] = Headed(extract.path / file, aligned_header(entries, header))
    return contents


def read_extract(file: Path) -> ExtractRecord:
    """Read extract.json, and refuse it if it is missing, of another format, or has unknown content."""
    return read_record_file(file, ExtractRecord, EXTRACT_FORMAT)


def check_own_files(extract: Extract, track: Track = no_track) -> None:
    """Compare the files of an extract with the hashes in extract.json, and name each that differs."""
    names = {name_in_extract(name): file for name, file in extract.listing.files.items()}
    with track("extract hashes", sum(file.bytes for file in names.values())) as advance:
        hashes = hash_files(extract.path, list(names), advance)
    changed = [
        Problem("extract-file-changed", name, found=hashes[name], recorded=file.sha256)
        for name, file in names.items()
        if hashes[name] != file.sha256
    ]
    if changed:
        raise CheckpointError(*changed)


def content_problems(folder: Folder, files: Mapping[str, ExpansionFile]) -> list[Problem]:
    """List problems of an expansion: tensors that no plan names, a changed config.json, unknown code, pickles.

    `folder` is an extract, or an expanded folder; `files` are those that are not the base's.
    """
    manifest = folder.manifest
    return [
        *_tensor_problems(folder),
        *(Problem("base-text-changed", MANIFEST_FILE, file=name) for name in manifest.changed_texts),
        *config_problems(manifest, folder.config),
        *_code_problems(manifest, files),
        *_remote_code_problems(folder.path, manifest, files),
    ]


def _tensor_problems(folder: Folder) -> Iterator[Problem]:
    planned = {tensor.name: tensor for tensor in folder.manifest.plan.tensors}
    yield from (Problem("tensor-missing", name) for name in planned if name not in folder.tensors)
    for name, info in folder.tensors.items():
        if isinstance(folder, Extract) or name not in folder.manifest.base_tensors:
            if name not in planned:
                yield Problem("tensor-unplanned", name, shard=info.file)
            else:
                yield from info.differences(planned[name].dtype, planned[name].shape)


def _code_problems(manifest: Manifest, files: Mapping[str, ExpansionFile]) -> Iterator[Problem]:
    code = {name for name in files if name.endswith(".py")}
    planned = set(manifest.plan.code_files)
    yield from (Problem("code-unknown", name) for name in sorted(code - planned))
    for name in sorted(code & planned):
        if manifest.code.get(name) != files[name].sha256:
            yield Problem("code-changed", name)
    yield from (Problem("file-missing", name) for name in sorted(set(manifest.code) - code))
    pickles = sorted(name for name in files if name.endswith(OTHER_WEIGHT_SUFFIXES))
    yield from (Problem("extract-other-weights", name) for name in pickles)


def _remote_code_problems(path: Path, manifest: Manifest, files: Mapping[str, ExpansionFile]) -> Iterator[Problem]:
    """Generate a problem for each tokenizer or processor config that names code and is not the base's."""
    for name in files:
        if not name.endswith("_config.json"):
            continue
        base = parse_json(manifest.replaced.get(name, "{}"))
        if read_json(path / name).get("auto_map") not in (None, base.get("auto_map")):
            yield Problem("code-not-of-base", f"{name}: auto_map")


def _check_names(path: Path, files: Mapping[str, ExpansionFile], from_base: tuple[str, ...]) -> None:
    file = path / EXTRACT_FILE
    problems = [Problem("record-escape", file, name=name) for name in (*files, *from_base) if not is_inside(name)]
    needed = {CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, *files}
    if not problems:
        problems = [
            Problem("extract-file-missing", name_in_extract(name), folder=path)
            for name in sorted(needed)
            if name not in files or not (path / name_in_extract(name)).is_file()
        ]
    if problems:
        raise CheckpointError(*problems)
