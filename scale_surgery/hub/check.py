"""What is checked of a folder before a push: the bytes that its own record names, and the structure."""

from __future__ import annotations

from collections.abc import Iterator

from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.names import STOCK_FILE
from scale_surgery.errors import CheckpointError, shorten
from scale_surgery.evidence.verification import Verification
from scale_surgery.evidence.verify import verify
from scale_surgery.hub.repository import CARD_FILE, Contents, names_code
from scale_surgery.progress import Track
from scale_surgery.surgery.extract_folder import check_own_files, open_extract


def check_contents(contents: Contents, track: Track) -> Verification | None:
    """Check what files alone can show; gives what was found of an expanded folder, and None for other forms."""
    if contents.form == "extract":
        check_own_files(open_extract(contents.path), track)
        return None
    if contents.form == "stock":
        _check_stock(contents, track)
        return None
    result = verify(contents.path, probes=None, record=False, track=track)
    if not result.passed:
        broken = [promise for promise in result.promises if promise.name in result.required and not promise.holds]
        problems = list(dict.fromkeys([*result.problems, *(line for promise in broken for line in promise.problems)]))
        advice = f"{contents.path}: not pushed, it does not verify. scale-surgery verify {contents.path} shows all."
        _refuse(contents, problems, advice)
    return result


def _check_stock(contents: Contents, track: Track) -> None:
    written = contents.record.get("files")
    if written is None:
        raise CheckpointError(
            f"{contents.path / STOCK_FILE}: lists no files, expected the sha256 of each. Make it again with "
            "scale-surgery merge --to stock, or give --no-verify."
        )
    problems = list(_stock_problems(contents, {name: entry["sha256"] for name, entry in written.items()}, track))
    if problems:
        _refuse(contents, problems, f"{contents.path}: not pushed, it is not what merge wrote. Restore what is named.")


def _stock_problems(contents: Contents, written: dict[str, str], track: Track) -> Iterator[str]:
    present = [name for name in written if name in contents.files]
    yield from (f"{name}: not found in {contents.path}." for name in written if name not in present)
    with track("hashes", sum((contents.path / name).stat().st_size for name in present)) as advance:
        hashes = hash_files(contents.path, present, advance)
    for name, digest in hashes.items():
        if digest != written[name]:
            yield f"{name}: sha256 {digest[:16]}..., expected {written[name][:16]}... from {STOCK_FILE}."
    for name in contents.files:
        if name not in written and names_code(contents.path, name):
            yield f"{name}: is code, or names some, and merge did not write it. Read it before you let it run."


def _refuse(contents: Contents, problems: list[str], advice: str) -> None:
    card = []
    if any(problem.startswith(f"{CARD_FILE}: ") for problem in problems):
        card = [f"{CARD_FILE}: has to stay the base's, so that strip gives it back. Give a card of your own by --card."]
    raise CheckpointError.from_problems([*shorten(problems), *card, advice])
