"""The repository of a folder, made as a folder of links: its files and their names.

DIR/*                       --linked-->    the same, byte for byte
DIR/README.md of the base   --linked-->    README.base.md, since README.md is the model card
surgery.json, merge.json    --edited-->    the base's README.md is README.base.md, so that strip finds it
states of trainers, weights in other formats, files missing from the index,
hidden files, links to outside files                                   left out

A download of the repository verifies and strips like the folder. The folder itself is only read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scale_surgery.checkpoint.file_stat import Stamps, take_stamps
from scale_surgery.checkpoint.files import as_json, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.forms import RECORDS, Form, form_of, refuse_form
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.licence import LICENCE_KEYS
from scale_surgery.checkpoint.listing import is_left_link, is_private, list_files
from scale_surgery.checkpoint.names import (
    CARD_FILE,
    EXTRACT_FILE,
    MANIFEST_FILE,
    OTHER_WEIGHT_SUFFIXES,
    STOCK_FILE,
)
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.checkpoint.records import read_record, reading
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.extract_folder import name_in_extract, read_extract
from scale_surgery.folder.folder import Folder, open_given, refuse_linked
from scale_surgery.folder.record import Manifest, read_manifest
from scale_surgery.folder.record_schema import StockRecord
from scale_surgery.running.tokenizer import ASKING_FILES, MORE_TEMPLATES, TOKENIZER_FILES, VOCABULARY_FILES

MARK = re.compile(r"\n<!-- written by scale-surgery push, sha256 ([0-9a-f]{64}) -->\n$")


FileOrigin = Literal["base", "model", "written"]
CardOrigin = Literal["written", "own", "kept"]
RECORD_OF: dict[Form, str] = {"stock": STOCK_FILE}
UNFINISHED_SUFFIXES = (".tmp", ".lock", ".partial.json")


@dataclass(frozen=True)
class Card:
    """The text of README.md, its origin, and notes for the user; the text is None if the repository's card stays."""

    text: str | None
    origin: CardOrigin = "written"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepositoryFile:
    """A file of a repository.

    Attributes:
        name: Its name there.
        bytes: Its size.
        origin: "base" for a file of the base model, byte for byte, which the Hub need not store twice; "model" for
            another file of the folder; "written" for a file that was written or edited for the repository.
    """

    name: str
    bytes: int
    origin: FileOrigin


@dataclass(frozen=True)
class Contents:
    """The content of a folder that belongs in a repository; no weight has been read."""

    path: Path
    form: Form
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    manifest: Manifest | None  # surgery.json; None for a stock export
    record: Mapping[str, Any]  # parsed surgery.json or merge.json
    base_card: str | None  # file of the base's README.md
    has_own_card: bool  # True if the user wrote README.md
    stamps: Stamps  # of its files

    @property
    def base_files(self) -> set[str]:
        """Names of the base's files in the folder, byte for byte."""
        if self.manifest is None or self.form == "extract":
            return set()
        stored = {entry.stored_as for entry in self.manifest.base_files.values()}
        return {name for name in stored if name is not None and name not in self.manifest.renumbered}

    @property
    def record_file(self) -> str:
        """Name of the file of `record`."""
        return RECORD_OF.get(self.form, MANIFEST_FILE)

    @property
    def code(self) -> tuple[str, ...]:
        """Names of files that `trust_remote_code` runs: Python files, and configs that name Python files."""
        return tuple(name for name in self.files if names_code(self.path, name))

    @property
    def licence(self) -> dict[str, Any]:
        """The licence that an extract took from its base's card."""
        licence = read_json(self.path / EXTRACT_FILE).get("licence") if self.form == "extract" else None
        return {key: licence[key] for key in LICENCE_KEYS if key in licence} if licence else {}

    @property
    def free_name(self) -> str:
        """An unused name for the base's README.md."""
        names = ("README.base.md", *(f"README.base-{number}.md" for number in range(2, len(self.files) + 3)))
        return next(name for name in names if name not in self.files)


def read_contents(path: Path) -> Contents:
    """Read the form of a folder, and select its files for a repository."""
    names = list_files(path)
    form = _find_form(path)
    checkpoint = None if form == "extract" else open_given(path)
    manifest = read_manifest(path) if checkpoint is None else None
    if checkpoint is not None:
        manifest = checkpoint.manifest if isinstance(checkpoint, Folder) else None
        refuse_linked(checkpoint)
    record = read_json(path / RECORD_OF.get(form, MANIFEST_FILE))
    _check_record(path, form, record)
    known = {*(checkpoint.shards if checkpoint else ()), *_recorded(path, form, record)}
    # nobody vouches for what an extract does not list
    strays = (name for name in names if name not in known and (is_part_of_a_model(name) or names_code(path, name)))
    foreign = checkpoint.left_out if checkpoint else tuple(strays)
    stays = {name for name in names if is_private(path, name) or name.endswith(UNFINISHED_SUFFIXES)} - known
    left_out = tuple(name for name in names if name in foreign or name in stays)
    left_out += tuple(name for name in foreign if name not in names)
    files = tuple(name for name in names if name not in left_out)
    base_card = None if form == "extract" else _find_base_card(path, files, record)
    is_own = CARD_FILE in files and base_card != CARD_FILE and not is_written_card(read_card(path / CARD_FILE))
    stamps = take_stamps(path / name for name in files)
    return Contents(path, form, files, left_out, manifest, record, base_card, is_own, stamps)


def _check_record(path: Path, form: Form, record: Mapping[str, Any]) -> None:
    """Check the types of the values that a push uses; surgery.json was checked when it was read."""
    if form == "stock":
        with reading(path / STOCK_FILE):
            read_record(record, StockRecord)
    elif form == "extract":
        read_extract(path / EXTRACT_FILE)


def read_card(file: Path) -> str:
    """Read the text of a model card in any encoding."""
    try:
        return read_bytes(file).decode("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(Problem("file-unreadable", file, error=error.strerror or error)) from error


def assemble(contents: Contents, folder: Path, card: Card) -> tuple[RepositoryFile, ...]:
    """Fill an empty folder with links to the files of a repository, and with the files written for it."""
    names = {name: name for name in contents.files if name != CARD_FILE}
    if contents.base_card == CARD_FILE:
        names[CARD_FILE] = contents.free_name
    origins: dict[str, FileOrigin] = {}
    for name, linked in names.items():
        (folder / linked).parent.mkdir(parents=True, exist_ok=True)
        (folder / linked).symlink_to((contents.path / name).resolve())
        origins[linked] = "base" if name in contents.base_files else "model"
    for file, content in _edited(contents, card).items():
        (folder / file).unlink()
        write_json(folder / file, content)
        origins[file] = "written"
    if card.text is not None:
        (folder / CARD_FILE).write_bytes(card.text.encode())
        origins[CARD_FILE] = "written" if card.origin == "written" else "model"
    return tuple(RepositoryFile(name, (folder / name).stat().st_size, origins[name]) for name in sorted(origins))


def is_part_of_a_model(name: str) -> bool:
    """Return True if a file affects the model that a repository loads as; a foreign file would change that model."""
    is_asked = name in (*TOKENIZER_FILES, *VOCABULARY_FILES, *ASKING_FILES) or name.startswith(MORE_TEMPLATES)
    ends = (".safetensors", ".safetensors.index.json", ".py", *OTHER_WEIGHT_SUFFIXES)
    return name in RECORDS or is_asked or name.endswith(ends)


def names_code(path: Path, name: str) -> bool:
    """Return True if a file of a folder is Python, or a config with an `auto_map`."""
    return name.endswith(".py") or (name.endswith("config.json") and bool(read_json(path / name).get("auto_map")))


def is_same_base(record: Mapping[str, Any], there: str) -> bool:
    """Return True if a repository's record, surgery.json or merge.json, has the same base shards as `record`."""
    try:
        shards, shards_there = (
            {entry["sha256"] for name, entry in each["base_files"].items() if name.endswith(".safetensors")}
            for each in (record, parse_json(there))
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return False
    return shards == shards_there


def _find_form(path: Path) -> Form:
    form = form_of(path)
    if form in RECORDS.values():
        return form
    if form == "saved":
        refuse_form(path, form, "expanded")
    raise CheckpointError(Problem("folder-not-ours", path, records=(MANIFEST_FILE, EXTRACT_FILE, STOCK_FILE)))


def _recorded(path: Path, form: Form, record: Mapping[str, Any]) -> set[str]:
    """Return the names of files whose hashes are in the folder's own record, including hidden files."""
    files = read_json(path / EXTRACT_FILE)["files"] if form == "extract" else record.get("base_files", {})
    named = name_in_extract if form == "extract" else str
    names = {named(str(entry.get("stored_as") or name)) for name, entry in files.items()} | {*RECORDS}
    return {name for name in names if not is_left_link(path, name)}


def _find_base_card(path: Path, files: tuple[str, ...], record: Mapping[str, Any]) -> str | None:
    entry = record.get("base_files", {}).get(CARD_FILE)
    if entry is None or entry.get("stored_as", CARD_FILE) not in files:
        return None
    name = str(entry.get("stored_as", CARD_FILE))
    return name if hash_file(path / name) == entry["sha256"] else None


def _edited(contents: Contents, card: Card) -> dict[str, dict[str, Any]]:
    """Return the JSON files whose content differs between repository and folder."""
    if contents.base_card == CARD_FILE:
        return {contents.record_file: _with_moved_card(contents.record, contents.free_name)}
    if contents.form == "extract" and CARD_FILE in contents.files and card.text != read_card(contents.path / CARD_FILE):
        # a new card replaces the card of an earlier push
        content = read_json(contents.path / EXTRACT_FILE)
        files = {name: entry for name, entry in content["files"].items() if name != CARD_FILE}
        return {EXTRACT_FILE: {**content, "files": files}} if files != content["files"] else {}
    return {}


def _with_moved_card(record: Mapping[str, Any], stored_as: str) -> dict[str, Any]:
    """Return a record with the new name of the base's README.md, also in a fused model's copy of its record."""
    files = record["base_files"]
    changed = {**record, "base_files": {**files, CARD_FILE: {**files[CARD_FILE], "stored_as": stored_as}}}
    if CARD_FILE in (written := record.get("files", {})):
        changed["files"] = {stored_as if name == CARD_FILE else name: entry for name, entry in written.items()}
    fused = record.get("fused")
    if fused is not None and MANIFEST_FILE in fused["texts"]:
        before = as_json(_with_moved_card(json.loads(fused["texts"][MANIFEST_FILE]), stored_as))
        changed["fused"] = {**fused, "texts": {**fused["texts"], MANIFEST_FILE: before}}
    return changed


def is_written_card(text: str) -> bool:
    """Return True if this program wrote the card and nobody has edited it."""
    mark = MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def marked(text: str) -> str:
    """Return a card with its hash in the last line, which shows later whether it was edited."""
    return f"{text}\n<!-- written by scale-surgery push, sha256 {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
