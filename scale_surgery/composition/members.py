"""The expansions inside a composed folder: extracts, whose shards name tensors by what the expansion is called there.

    in the extract          [length][header: model.layers.3.mlp.up_proj.expansions.default.w21 ][data]
    in the composed folder  [length][header: model.layers.3.mlp.up_proj.expansions.medicine.w21][data]

A shard that names them so already is taken over as a file. Of any other, composed.json keeps the header of the extract,
so that the extract comes back byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.expansions import expansion_of, renamed
from scale_surgery.checkpoint.files import BaseWeights, take_over
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.listing import leads_out, list_files
from scale_surgery.checkpoint.names import EXTRACT_FILE
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.composition.record import Composition, Member, folder_of
from scale_surgery.errors import CheckpointError
from scale_surgery.progress import Progress, no_progress
from scale_surgery.surgery.extract_folder import Extract, name_in_extract, read_record
from scale_surgery.surgery.record import Manifest, read_manifest
from scale_surgery.surgery.renumbered import aligned_header, with_length, write_with_header


@dataclass(frozen=True)
class Files:
    """Files of an expansion, by their names in its extract, and their sizes in bytes."""

    folder: Path
    sizes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.sizes.values())


def files_of(extract: Extract) -> Files:
    """What of an extract goes into a composed folder: its own files, and the licences of the base."""
    return _sizes(extract.path, [*map(name_in_extract, extract.files), *extract.licences, EXTRACT_FILE])


def files_in(path: Path, name: str) -> Files:
    """What of an expansion lies in a composed folder."""
    folder = path / folder_of(name)
    return _sizes(folder, list_files(folder))


def known_files(path: Path, name: str) -> Files:
    """Those files of an expansion in a composed folder that its extract had, and no others that came in later.

    Raises:
        CheckpointError: If its folder is not there, or one is a link that leads out of it.
    """
    folder = path / folder_of(name)
    record = read_record(folder / EXTRACT_FILE)
    wanted = {*map(name_in_extract, record.files), *record.licences, EXTRACT_FILE}
    known = [file for file in list_files(folder) if file in wanted]
    if links := [file for file in known if leads_out(path, f"{folder_of(name)}/{file}")]:
        raise CheckpointError.from_problems(
            f"{folder / file}: is a link that leads out of {path}, expected the file itself. Put it in its place."
            for file in links
        )
    return _sizes(folder, known)


def _sizes(folder: Path, names: list[str]) -> Files:
    return Files(folder, {name: (folder / name).stat().st_size for name in names})


def member_of(extract: Extract, name: str) -> Member:
    """What composed.json says of an extract.

    Args:
        extract: The extract.
        name: What the expansion is called in the composed folder.
    """
    others = sorted({info.file for tensor, info in extract.tensors.items() if renamed(tensor, name) != tensor})
    return Member({shard: header_bytes(extract.path / shard)[8:].decode("utf-8") for shard in others})


def stored_header(name: str, header: str) -> bytes:
    """Header of a shard in a composed folder, with its length before it.

    Args:
        name: Of the expansion.
        header: Text of the header that the shard has in its extract.
    """
    entries = json.loads(header)
    named = {key if key == "__metadata__" else renamed(key, name): entry for key, entry in entries.items()}
    return aligned_header(named, header)


def place_files(
    files: Files, folder: Path, headers: Mapping[str, bytes], how: BaseWeights, advance: Progress = no_progress
) -> None:
    """Put the files of an expansion into a folder.

    Args:
        files: The files.
        folder: Where they go.
        headers: Of shards that get another header, with its length before it; these are written.
        how: How the others are taken over.
        advance: Called with the bytes done.
    """
    for file, size in files.sizes.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if file in headers:
            write_with_header(files.folder / file, folder / file, headers[file], advance)
        else:
            take_over(files.folder / file, folder / file, how)
            advance(size)


def stored_headers(name: str, member: Member) -> dict[str, bytes]:
    """Headers that shards of an expansion get in a composed folder, with their lengths before them."""
    return {shard: stored_header(name, header) for shard, header in member.headers.items()}


def give_out(
    path: Path, record: Composition, name: str, folder: Path, how: BaseWeights, advance: Progress = no_progress
) -> None:
    """Write the extract of an expansion that lies in a composed folder.

    Args:
        path: The composed folder.
        record: Its composed.json.
        name: The expansion.
        folder: Where the extract goes.
        how: How files are taken over; shards that get another header are written.
        advance: Called with the bytes done.
    """
    files, headers = known_files(path, name), record.expansions[name].headers
    for shard in headers:
        if shard in files.sizes:
            check_header(path, record, name, shard)
    before = {shard: with_length(text.encode("utf-8")) for shard, text in headers.items()}
    place_files(files, folder, before, how, advance)


def check_header(path: Path, record: Composition, name: str, shard: str) -> None:
    """Check that a shard has the header that `compose` gave it.

    Raises:
        CheckpointError: If not.
    """
    file = path / folder_of(name) / shard
    if header_bytes(file) != stored_header(name, record.expansions[name].headers[shard]):
        raise CheckpointError(
            f"{file}: its header is not the one that compose wrote. Restore the file from where you got it."
        )


def manifest_of(path: Path, name: str) -> Manifest:
    """surgery.json of an expansion in a composed folder."""
    return read_manifest(path / folder_of(name))


def tensors_of(checkpoint: Checkpoint, name: str) -> list[str]:
    """Names of the tensors of an expansion in a composed folder."""
    return [tensor for tensor in checkpoint.tensors if expansion_of(tensor) == name]
