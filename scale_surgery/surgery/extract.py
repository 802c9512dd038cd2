"""Take an expansion alone out of an expanded checkpoint: a folder without the base, which names its base.

expansion shards, *.py                   --as files-->   the same
config.json, surgery.json                --as texts->    the same; of several expansions this one alone
model.safetensors.index.json             --as a text->   expanded.index.json
files of the base, or of other expansions                stay out; extract.json lists those of the base
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from scale_surgery.checkpoint.files import (
    BaseWeights,
    as_json,
    check_base_weights,
)
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.licence import read_licence
from scale_surgery.checkpoint.listing import is_private
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    EXTRACT_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    STORED_INDEX,
    TRAINING_FOLDER,
)
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.extract_folder import (
    EXTRACT_FORMAT,
    ExpansionFile,
    ExtractRecord,
    content_problems,
    name_in_extract,
)
from scale_surgery.folder.folder import Folder, open_folder, refuse_fused, refuse_linked
from scale_surgery.folder.layout import Content, lay_out, make_index, room_for, total_bytes
from scale_surgery.folder.record import Manifest, tool_versions
from scale_surgery.folder.write import tokenizer_beside
from scale_surgery.progress import Track, no_track

# expansion tensors are made from base tensors, so the terms of the base go with them
LICENCE = re.compile(r"(licen[cs]e|notice|copying|use_policy)", re.IGNORECASE)


@dataclass(frozen=True)
class Extracted:
    """Result of `extract`.

    Attributes:
        path: The extract.
        base_name: What the base model is called.
        base_revision: Commit of its Hub repository, where known.
        tensors: Number of expansion tensors.
        files: Files of the expanded folder that lie in the extract, with their bytes.
        licences: Licence files of the base, which lie in it too.
        bytes: Bytes of all these files.
        base_bytes: Bytes of the base's files, which stayed out.
        left_out: Files of the expanded folder that are neither: training checkpoints, weights in other formats, links
            that lead out of it.
    """

    path: Path
    base_name: str
    base_revision: str | None
    tensors: int
    files: dict[str, int]
    licences: tuple[str, ...]
    bytes: int
    base_bytes: int
    left_out: tuple[str, ...]


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
        expanded: Folder of an expanded checkpoint.
        output: Folder to be.
        name: Which expansion, where there are several.
        base_weights: How shards are taken over, here those of the expansion: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was written.

    Raises:
        CheckpointError: If this is no expanded checkpoint, it is fused, it is not what the expansion wrote, or the
            output cannot be written; every problem is named.
        PlanError: If there is no such expansion, or there are several and none is named.
    """
    check_base_weights(base_weights)
    path, target = Path(expanded), Path(output)
    folder = open_folder(path).one(name)
    manifest = folder.manifest
    refuse_fused(folder)
    refuse_linked(folder)
    check_target(target, [path], overwrite=overwrite)
    if taken := [file for file in (EXTRACT_FILE, STORED_INDEX) if file in folder.side_files]:
        raise CheckpointError(*(Problem("extract-name-taken", path / file) for file in taken))
    texts, alone = _written_for_one(folder)
    from_base = tuple(file.stored_as for file in alone.base_files.values() if file.stored_as is not None)
    files, left_out = _expansion_files(folder, from_base, texts)
    refuse_damaged(folder, track, content_problems(folder, files))
    licences = tuple(file for file in from_base if LICENCE.match(PurePosixPath(file).name))
    contents: dict[str, Content] = {name_in_extract(file): texts.get(file, path / file) for file in (*files, *licences)}
    check_space(target, room_for(contents, target, base_weights))
    size = total_bytes(contents)
    record = ExtractRecord(
        format=EXTRACT_FORMAT,
        base_name=manifest.base_name,
        base_revision=manifest.base_revision,
        files=files,
        from_base=from_base,
        licence=_named_licence(path, manifest, from_base),
        licences=licences,
        tool=tool_versions(),
    )
    state = {"extract": asdict(record), "base_weights": base_weights}
    contents[EXTRACT_FILE] = as_json(asdict(record))
    with (
        staged(target, state, folder.stamps, overwrite=overwrite) as partial,
        track("files", total_bytes(contents)) as advance,
    ):
        lay_out(contents, partial, base_weights, advance)
    return Extracted(
        path=target,
        base_name=manifest.base_name,
        base_revision=manifest.base_revision,
        tensors=len(manifest.plan.tensors),
        files={file: entry.bytes for file, entry in files.items()},
        licences=licences,
        bytes=size,
        base_bytes=sum((path / file).stat().st_size for file in from_base),
        left_out=left_out,
    )


def _named_licence(path: Path, manifest: Manifest, from_base: tuple[str, ...]) -> dict[str, Any]:
    """Return the licence that the base's card names, for the card of the extract."""
    card = manifest.base_files.get("README.md")
    if card is None or card.stored_as not in from_base:
        return {}
    return read_licence(read_bytes(path / str(card.stored_as)).decode("utf-8", errors="replace"))


def _written_for_one(folder: Folder) -> tuple[dict[str, str], Manifest]:
    """Return the texts of a folder rewritten for one of several expansions, and their record."""
    manifest = folder.manifest
    if folder.whole is None:
        return {}, manifest
    # where another one adds tokens, the tokenizer is the base's again
    tokenizer, alone = tokenizer_beside(folder, manifest)
    return {
        CONFIG_FILE: as_json(folder.config),
        INDEX_FILE: as_json(make_index(folder.tensors.values())),
        MANIFEST_FILE: as_json(alone.to_json()),
        **{file: text for file, text in tokenizer.items() if alone.base_files[file].stored_as is None},
    }, alone


def _expansion_files(
    folder: Folder, from_base: tuple[str, ...], texts: Mapping[str, str]
) -> tuple[dict[str, ExpansionFile], tuple[str, ...]]:
    """Return the files that are not the base's, with their hashes, and the files that are left out."""
    others = [file for file in (*folder.shards, *folder.side_files, MANIFEST_FILE) if file not in from_base]
    known = {*folder.shards, *folder.manifest.base_files}
    left_out = tuple(
        file
        for file in others
        if file not in known
        # logs of a folder of several are of whichever was trained last
        and (is_private(folder.path, file) or (texts and file.startswith(f"{TRAINING_FOLDER}/")))
    )
    taken = [file for file in others if file not in left_out]
    hashes = hash_files(folder.path, [file for file in taken if file not in texts])
    files = {}
    for file in taken:
        if file in texts:
            text = texts[file].encode("utf-8")
            files[file] = ExpansionFile(sha256(text).hexdigest(), len(text))
        else:
            files[file] = ExpansionFile(hashes[file], (folder.path / file).stat().st_size)
    return files, (*left_out, *folder.left_out)
