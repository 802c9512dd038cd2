"""The check of a folder before a push: the bytes listed in its own record, and the structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.names import CARD_FILE, STOCK_FILE
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.integrity import fingerprint_of
from scale_surgery.evidence.verify import verify
from scale_surgery.folder.extract_folder import Extract, check_own_files, open_extract
from scale_surgery.folder.parts import hash_parts
from scale_surgery.hub.repository import Contents, names_code
from scale_surgery.progress import Track


class Checked(NamedTuple):
    """The certificate of the present tensors, router and code, or None if there is none; and warnings."""

    certificate: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()


def check_contents(contents: Contents, track: Track) -> Checked:
    """Check a folder by its files alone."""
    recorded: Mapping[str, Any] = contents.record.get("verification") or {}
    if contents.form == "extract":
        extract = open_extract(contents.path)
        check_own_files(extract, track)
        return Checked(recorded if recorded and _is_of(recorded, extract, track) else None)
    if contents.form == "stock":
        _check_stock(contents, track)
        return Checked()
    result = verify(contents.path, probes=None, record=False, track=track)
    if not result.passed:
        found = [Problem("verify-finding", text=line.removesuffix(".")) for line in result.findings]
        _refuse("push-unverified", contents, found)
    is_current = recorded.get("fingerprint") == result.fingerprint
    return Checked(recorded if is_current else result.to_json(), result.warnings)


def _is_of(certificate: Mapping[str, Any], extract: Extract, track: Track) -> bool:
    """Return True if a certificate is of an extract's tensors, with the base that was recorded."""
    manifest = extract.manifest
    with track("extract tensors", sum(info.bytes for info in extract.tensors.values())) as advance:
        expansion = hash_parts(extract, manifest.planned, advance)
    present = fingerprint_of(manifest, {**manifest.base_hashes, **expansion})
    return bool(certificate.get("fingerprint") == present)


def _check_stock(contents: Contents, track: Track) -> None:
    written = contents.record.get("files")
    if written is None:
        raise CheckpointError(Problem("stock-without-hashes", contents.path / STOCK_FILE))
    problems = list(_stock_problems(contents, {name: entry["sha256"] for name, entry in written.items()}, track))
    if problems:
        _refuse("push-not-merged", contents, problems)


def _stock_problems(contents: Contents, written: dict[str, str], track: Track) -> Iterator[Problem]:
    present = [name for name in written if name in contents.files]
    yield from (Problem("file-missing", name) for name in written if name not in present)
    with track("hashes", sum((contents.path / name).stat().st_size for name in present)) as advance:
        hashes = hash_files(contents.path, present, advance)
    for name, digest in hashes.items():
        if digest != written[name]:
            yield Problem("stock-file-changed", name, found=digest, recorded=written[name])
    for name in contents.files:
        if name not in written and names_code(contents.path, name):
            yield Problem("stock-code-added", name)


def _refuse(code: str, contents: Contents, problems: list[Problem]) -> None:
    if any(problem.phrase.startswith(f"{CARD_FILE}: ") for problem in problems):
        problems.append(Problem("card-of-base-changed", CARD_FILE))
    raise CheckpointError(Problem(code, contents.path, *problems))
