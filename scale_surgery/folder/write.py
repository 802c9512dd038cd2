"""Write an expanded folder around its new tensors: files of the base, code and config, index and record.

base shards     --as files-->  model-*.safetensors       (same bytes; above a duplicated layer under other names)
config.json     --edited-->    config.json, *.py         (own model_type, own classes)
everything else --as files-->  everything else
                               model.safetensors.index.json, surgery.json   (last)
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.files import BaseWeights, as_json
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.hashes import hash_all, hash_tensors
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TRAINING_FOLDER,
)
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.folder.config import (
    code_texts,
    hash_texts,
    stored_shard,
    with_router,
    written_config,
)
from scale_surgery.folder.folder import Folder, with_record
from scale_surgery.folder.layout import (
    Content,
    bytes_of,
    lay_out,
    make_index,
    needed_bytes,
    room_for,
    tensors_in,
    total_bytes,
)
from scale_surgery.folder.record import BaseFile, ExpansionRecord, Manifest, base_tensors, tool_versions
from scale_surgery.folder.renumbered import hash_stored, renumbered_shards, stored_shards
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.new_tokens import extended_tokenizer, extended_tokenizer_config
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Track
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import pin_tokenizer_class

# what new tokens are written into
EXTENDED = {TOKENIZER_FILE: extended_tokenizer, TOKENIZER_CONFIG_FILE: extended_tokenizer_config}


@dataclass(frozen=True)
class WrittenFolder:
    """An expanded folder that was written.

    Attributes:
        folder: The folder, as it is found again.
        base_bytes: Bytes of base shards that were written; 0 with hard links.
        pinned_tokenizer: The tokenizer class that tokenizer_config.json now names, where it had to.
        left_out: Files of the given folder that were not taken along.
    """

    folder: Folder
    base_bytes: int
    pinned_tokenizer: str | None = None
    left_out: tuple[str, ...] = ()


def write_config(folder: Path, manifest: Manifest, base: Mapping[str, Any] | None = None) -> None:
    """Write config.json of an expanded folder, of that of its base: by default the recorded one."""
    text = as_json(written_config(manifest, manifest.base_config if base is None else base))
    lay_out({CONFIG_FILE: text}, folder)


def write_index(folder: Path, tensors: Iterable[TensorInfo]) -> None:
    """Write the index of an expanded folder with these tensors."""
    lay_out({INDEX_FILE: as_json(make_index(tensors))}, folder)


def write_record(folder: Path, manifest: Manifest) -> None:
    """Write surgery.json, the last file of an expanded folder."""
    lay_out({MANIFEST_FILE: as_json(manifest.to_json())}, folder)


def write_router(target: Path, folder: Folder, routing: Router | None) -> None:
    """Write config.json and surgery.json of a folder, with a router or without."""
    lay_out({CONFIG_FILE: as_json(with_router(folder.config, routing))}, target)
    write_record(target, replace(folder.manifest, routing=routing))


def tool_on(run: RunOptions) -> dict[str, str]:
    """Return the versions and the device that make the new tensors; the same give the same bytes."""
    return tool_versions() | {"device": run.device}


def room_for_base(given: Checkpoint, plan: Plan, target: Path, how: BaseWeights) -> int:
    """Bytes that the shards of a base, or of the base in a folder, need on the disk of a new folder; see `room_for`."""
    if isinstance(given, Folder):
        return room_for({shard: given.path / shard for shard in given.base_shards}, target, how)
    return room_for(stored_shards(given, plan.numbering), target, how)


def write_folder(
    given: Checkpoint,
    expansions: Mapping[str, ExpansionRecord],
    routing: Router | None,
    partial: Path,
    how: BaseWeights,
    track: Track,
    run: RunOptions = RunOptions(),
) -> WrittenFolder:
    """Write all of an expanded folder but the shards of new expansions, which lie in it already.

    `given` is the base, or a `Folder`, whose files stay as they are. Expansions come in the order of the paths. Those
    without hashes of their tensors are hashed as they lie in the new folder; shards that it lacks are taken over.
    """
    if isinstance(given, Folder):
        return _write_around_expansions(given, expansions, routing, partial, how, track)
    return _write_around_base(given, expansions, routing, partial, how, run, track)


def _write_around_base(
    base: Checkpoint,
    expansions: Mapping[str, ExpansionRecord],
    routing: Router | None,
    partial: Path,
    how: BaseWeights,
    run: RunOptions,
    track: Track,
) -> WrittenFolder:
    plans = [expansion.plan for expansion in expansions.values()]
    plan = plans[0]
    shards = stored_shards(base, plan.numbering)
    with track("base shards", total_bytes(shards)) as advance:
        lay_out(shards, partial, how, advance)
    code = code_texts(plan)
    beside = {file: base.path / file for file in base.side_files if file not in (CONFIG_FILE, INDEX_FILE)}
    lay_out({**beside, **code, **extended_texts(base.path, plans)}, partial)
    manifest = Manifest(
        base_name=plan.base_name,
        base_revision=plan.base_revision,
        base_files={},
        base_tensors=base_tensors(base, dict.fromkeys(base.tensors, "")),
        left_out=base.left_out,
        replaced={},
        code=hash_texts(code),
        expansions=expansions,
        tool=tool_on(run),
        routing=routing,
        renumbered=renumbered_shards(base, plan.numbering),
    )
    write_config(partial, manifest, base.config)
    pinned = pin_tokenizer_class(base.path, partial, run)
    write_index(partial, tensors_in(partial, (*shards, *(shard for plan in plans for shard in plan.shards))))
    written = open_checkpoint(partial)
    replaced = {
        file: read_text(base, file)
        for file in base.side_files
        if file in (CONFIG_FILE, INDEX_FILE) or not filecmp.cmp(base.path / file, partial / file, shallow=False)
    }
    manifest = replace(manifest, replaced=replaced, expansions=_with_hashes(expansions, written))
    manifest = _with_base_hashes(manifest, base, written, track)
    write_record(partial, manifest)
    base_bytes = needed_bytes(shards, "auto" if how == "link" else "copy")
    return WrittenFolder(with_record(written, manifest), base_bytes, pinned)


def _write_around_expansions(
    given: Folder,
    expansions: Mapping[str, ExpansionRecord],
    routing: Router | None,
    partial: Path,
    how: BaseWeights,
    track: Track,
) -> WrittenFolder:
    manifest = replace(given.of_all.manifest, expansions=expansions, routing=routing, verification=None)
    new = {name for name, plan in manifest.plans.items() if all((partial / shard).exists() for shard in plan.shards)}
    taken = dict.fromkeys(
        info.file
        for name, info in given.tensors.items()
        if name in manifest.base_tensors or expansion_of(name) in manifest.expansions.keys() - new
    )
    # logs are of the expansions as they were
    logs = tuple(file for file in given.side_files if file.startswith(f"{TRAINING_FOLDER}/"))
    side_files = [file for file in given.side_files if file not in (CONFIG_FILE, INDEX_FILE, *logs)]
    files: dict[str, Content] = {file: given.path / file for file in (*taken, *side_files)}
    with track("files", total_bytes(files)) as advance:
        lay_out(files, partial, how, advance)
    tokenizer, manifest = tokenizer_beside(given, manifest)
    lay_out(tokenizer, partial)
    write_config(partial, manifest)
    added = (shard for name in new for shard in manifest.plans[name].shards)
    write_index(partial, tensors_in(partial, (*taken, *added)))
    written = open_checkpoint(partial)
    manifest = replace(manifest, expansions=_with_hashes(manifest.expansions, written))
    write_record(partial, manifest)
    base_bytes = 0 if how == "link" else sum(bytes_of(files[shard]) for shard in given.base_shards)
    return WrittenFolder(with_record(written, manifest), base_bytes, left_out=logs)


def tokenizer_texts(plans: Iterable[Plan], texts: Mapping[str, str]) -> Mapping[str, str]:
    """Texts of the base's tokenizer beside these expansions, of which one may add tokens."""
    for plan in plans:
        if (new := plan.request.new_tokens) is not None:
            return {file: EXTENDED[file](text, plan.sizes.embedded, new) for file, text in texts.items()}
    return texts


def extended_texts(base: Path, plans: Sequence[Plan]) -> dict[str, str]:
    """Return the texts of a base's tokenizer that differ with the tokens that an expansion adds, if one does."""
    if not any(plan.widths.new_tokens for plan in plans):
        return {}
    before = {file: read_bytes(base / file).decode() for file in EXTENDED if (base / file).is_file()}
    return {file: text for file, text in tokenizer_texts(plans, before).items() if text != before[file]}


def tokenizer_beside(given: Folder, manifest: Manifest) -> tuple[dict[str, str], Manifest]:
    """Texts of the tokenizer of other expansions than a folder has, and their record with what these replace."""
    before = given.of_all.manifest
    if not (before.adds_tokens or manifest.adds_tokens):
        return {}, manifest
    now = {file: read_text(given, file) for file in EXTENDED if file in manifest.base_files}
    base = {file: before.replaced.get(file, text) for file, text in now.items()}
    files, replaced, texts = dict(manifest.base_files), {**manifest.replaced}, dict[str, str]()
    for file, text in tokenizer_texts(manifest.plans.values(), base).items():
        content, known = parse_json(text), parse_json(now[file])
        if content.get("tokenizer_class") != known.get("tokenizer_class"):
            # pinned when the base was expanded
            pinned = {"tokenizer_class": known["tokenizer_class"]} if "tokenizer_class" in known else {}
            text = as_json({name: value for name, value in content.items() if name != "tokenizer_class"} | pinned)
        texts[file] = text
        is_replaced = text != base[file]
        files[file] = replace(files[file], stored_as=None if is_replaced else file)
        replaced = {name: old for name, old in replaced.items() if name != file}
        replaced |= {file: base[file]} if is_replaced else {}
    return texts, replace(manifest, base_files=files, replaced=replaced)


def _with_hashes(expansions: Mapping[str, ExpansionRecord], written: Checkpoint) -> dict[str, ExpansionRecord]:
    """Add hashes to records that have none; their tensors lie in the folder as they begin."""
    return {
        name: record
        if record.tensors
        else replace(record, tensors=hash_tensors(written, [tensor.name for tensor in record.plan.tensors]))
        for name, record in expansions.items()
    }


def _with_base_hashes(manifest: Manifest, base: Checkpoint, written: Checkpoint, track: Track) -> Manifest:
    """Hash the base as it was written: what is recorded is what `strip` gives back, whatever becomes of the base."""
    places = {file: stored_shard(file) for file in (*base.shards, *base.side_files)}
    taken = {file: stored for file, stored in places.items() if file not in manifest.replaced}
    sizes = {file: base.stamps[base.path / file].bytes for file in places}
    # the file of a renumbered shard is hashed with the base's header, and its tensors by themselves
    moved = [place for place in taken.values() if place in manifest.renumbered]
    beside = [name for name in base.tensors if written.tensors[name].file in moved]
    total = sum(sizes[file] for file in taken) + sum(written.tensors[name].bytes for name in beside)
    with track("base hashes", total) as advance:
        sums = hash_all(written, [place for place in taken.values() if place not in moved], advance)
        stored = sums.files | hash_stored(written.path, manifest, moved, advance)
        tensors = sums.tensors | hash_tensors(written, beside, advance)
    hashes = {file: stored[place] for file, place in taken.items()}
    hashes |= hash_texts(manifest.replaced)
    files = {file: BaseFile(hashes[file], sizes[file], taken.get(file)) for file in places}
    return replace(manifest, base_files=files, base_tensors=base_tensors(base, tensors))
