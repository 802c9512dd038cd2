"""Set text aside that is not learned: some to choose the numbers of a router with, some to measure on.

FILES --read twice-->  OUT/learn.jsonl  OUT/calibrate.jsonl  OUT/measure.jsonl

Documents are drawn by a hash of what they say, so equal ones go the same way, and so do all in a second run. Of few
long documents the ends are set aside.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, get_args

from scale_surgery.checkpoint.file_stat import take_stamps
from scale_surgery.checkpoint.sources import listed
from scale_surgery.checkpoint.staging import check_target, staged
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.fields import NO_OPTION, Count, Range, Seed, choice_problems, problems_of
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.text.documents import Document, read_documents
from scale_surgery.text.sources import parse_source, paths_of

TextSide = Literal["calibrate", "measure"]
ASIDE: tuple[TextSide, ...] = get_args(TextSide)
CALIBRATE, MEASURE = ASIDE
LEARN = "learn"
# of fewer documents no whole ones are set aside, but the end of each
ENOUGH_DOCUMENTS = 20
LARGEST_SHARE = 0.5
# characters of a short document, which limits how many documents are set aside
USUAL_DOCUMENT = 20
# parts of a long document that calibrate a router, and the fewest characters of one
PIECES, SHORTEST_PIECE = 20, 200
HASHED_AT_ONCE = 2**20


@dataclass(frozen=True)
class HoldOutSettings:
    """How much text is set aside.

    Attributes:
        share: Share of the text in each held-out part. 0.5 leaves no text to learn.
        most_characters: Approximate maximum of characters in each held-out part. More text takes longer to measure.
        seed: Seed of the draw.
        parts: Held-out parts to write.
    """

    share: Annotated[float, Range(above=0, most=LARGEST_SHARE, noun="a share")] = 0.1
    most_characters: Count = field(default=200_000, metadata=NO_OPTION)
    seed: Seed = field(default=0, metadata=NO_OPTION)
    parts: tuple[TextSide, ...] = ASIDE


@dataclass(frozen=True)
class HeldOut:
    """Result of `hold_out`.

    Attributes:
        path: The folder, with a file for each part.
        documents: Documents in each part: "learn", "calibrate", "measure".
        characters: Characters in each part.
    """

    path: Path
    documents: Mapping[str, int]
    characters: Mapping[str, int]


@dataclass(frozen=True)
class Drawn:
    """The documents to set aside, by their hashes; or the share of each document's end."""

    parts: Mapping[bytes, str]
    ends: float


def part_file(folder: Path, part: str) -> Path:
    """The file of a part."""
    return folder / f"{part}.jsonl"


def hold_out(
    data: str | Path | Sequence[str | Path],
    output: str | Path,
    settings: HoldOutSettings = HoldOutSettings(),
    *,
    track: Track = no_track,
) -> HeldOut:
    """Set text aside: some to choose the numbers of a router with, some to measure on; the rest is to be learned.

    Args:
        data: A text, or several: files, folders, datasets; see `documents.read_documents`. They are only read.
        output: Folder to be, with learn.jsonl, calibrate.jsonl and measure.jsonl.
        settings: How much is set aside.
        track: Makes progress bars.

    Returns:
        What each part holds.

    Raises:
        PlanError: If a setting is out of range.
        DataError: If a file cannot be read, or there is too little text for each part to get some.
        CheckpointError: If the output exists or cannot be written.
    """
    if problems := [*problems_of(settings), *choice_problems(settings, "parts")]:
        raise PlanError(*problems)
    files, target = list(map(str, listed(data))), Path(output)
    check_target(target, paths_of(files), overwrite=False)
    # a missing file is an error where it is read
    stamps = take_stamps(text_files(files))
    # every file is read twice
    with track("texts", 2 * sum(stamp.bytes for stamp in stamps.values())) as advance:
        drawn = _draw(files, settings, advance)
        with staged(target, {"hold_out": asdict(settings)}, stamps, overwrite=False) as folder:
            counted = _write(files, folder, drawn, settings, advance)
    return HeldOut(target, *({part: numbers[part] for part in (LEARN, *ASIDE) if numbers[part]} for numbers in counted))


def text_files(given: Sequence[str]) -> list[Path]:
    """The given files and those in folders; none for datasets of the Hub."""
    return [file for name in given for file in parse_source(name).files]


def _draw(files: Sequence[str], settings: HoldOutSettings, advance: Progress) -> Drawn:
    """Choose the documents to set aside, those of the lowest hashes; no more hashes are kept than can be chosen."""
    count, characters = 0, 0
    most = max(2, len(settings.parts) * settings.most_characters // USUAL_DOCUMENT)

    def hashed() -> Iterator[tuple[bytes, int]]:
        nonlocal count, characters
        for document in read_documents(files, advance):
            size = len(document.prompt) + len(document.text)
            count, characters = count + 1, characters + size
            yield _hash(document, settings.seed), size

    lowest = heapq.nsmallest(most, hashed())
    if not count:
        raise DataError(Problem("texts-without-documents", ", ".join(files)))
    wanted = min(settings.share * characters, settings.most_characters)
    if count < ENOUGH_DOCUMENTS:
        return Drawn({}, wanted / characters)
    return Drawn(_share_out(lowest, settings.parts, wanted, math.ceil(settings.share * count)), 0.0)


def _hash(document: Document, seed: int) -> bytes:
    """Hash the JSON text of seed, prompt and text; a piece at a time, since a text may be as large as memory."""
    digest = hashlib.blake2b(f"[{seed}".encode(), digest_size=16)
    for text in (document.prompt, document.text):
        digest.update(b', "')
        for start in range(0, len(text), HASHED_AT_ONCE):
            digest.update(json.dumps(text[start : start + HASHED_AT_ONCE])[1:-1].encode())
        digest.update(b'"')
    digest.update(b"]")
    return digest.digest()


def _share_out(
    lowest: Sequence[tuple[bytes, int]], aside: Sequence[TextSide], wanted: float, most: int
) -> dict[bytes, TextSide]:
    """Give documents to the smallest part until each has the wanted characters or the most documents, at least one."""
    parts: dict[bytes, TextSide] = {}
    sizes: dict[TextSide, list[int]] = {part: [] for part in aside}
    short = [(key, size) for key, size in lowest if size <= wanted]
    for key, size in short or lowest:
        smallest = min(aside, key=lambda part: sum(sizes[part]))
        is_enough = sum(sizes[smallest]) + size / 2 > wanted or len(sizes[smallest]) >= most
        if sizes[smallest] and is_enough:
            break
        sizes[parts.setdefault(key, smallest)].append(size)
    return parts


def _write(
    files: Sequence[str], folder: Path, drawn: Drawn, settings: HoldOutSettings, advance: Progress
) -> tuple[Counter[str], Counter[str]]:
    documents: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    with ExitStack() as stack:
        streams = {
            part: stack.enter_context(part_file(folder, part).open("w", encoding="utf-8"))
            for part in (LEARN, *settings.parts)
        }
        for document in read_documents(files, advance):
            for part, piece in _pieces(document, drawn, settings):
                streams[part].write(_line(piece))
                documents[part] += 1
                characters[part] += len(piece.prompt) + len(piece.text)
    if missing := [part for part in settings.parts if not documents[part]]:
        values = {"documents": sum(documents.values()), "parts": missing, "least": ENOUGH_DOCUMENTS}
        raise DataError(Problem("documents-too-few", ", ".join(files), **values))
    if not documents[LEARN]:
        part_file(folder, LEARN).unlink()
    return documents, characters


def _line(document: Document) -> str:
    row = {"prompt": document.prompt, "completion": document.text} if document.prompt else {"text": document.text}
    return json.dumps(document.chat or row, ensure_ascii=False) + "\n"


def _pieces(document: Document, drawn: Drawn, settings: HoldOutSettings) -> Iterator[tuple[str, Document]]:
    """The document and its part; where documents are few, its beginning and ends, each with a part."""
    if not drawn.ends:
        part = drawn.parts.get(_hash(document, settings.seed), LEARN)
        yield part, document
        return
    if not document.is_plain:
        yield LEARN, document  # an answer is not cut: its end says little without the question
        return
    bounds = [0, *_cut(document.text, drawn.ends, len(settings.parts)), len(document.text)]
    for part, start, end in zip((LEARN, *settings.parts), bounds, bounds[1:], strict=False):
        text = document.text[start:end]
        # a router is calibrated on several texts, since one has no standard error
        cuts = _cut(text, 1 / PIECES, PIECES) if part == CALIBRATE and len(text) > PIECES * SHORTEST_PIECE else []
        for first, last in pairwise([0, *cuts[1:], len(text)]):
            if (piece := text[first:last].strip("\n")).strip():
                yield part, Document("", piece, document.source)


def _cut(text: str, share: float, count: int) -> list[int]:
    """Return the positions at which a text can be cut into shares: between paragraphs, lines or words."""
    size = max(1, math.floor(share * len(text)))
    wanted = [len(text) - size * number for number in range(count, 0, -1)]
    # what rounding leaves belongs to the first end
    wanted[0] = wanted[0] if wanted[0] >= count else 0
    for gap in ("\n\n", "\n", " "):
        bounds = [place and text.rfind(gap, 0, place) + len(gap) for place in wanted]
        # a gap lies before each place, and no end is longer than wanted by more than half
        pairs = zip(bounds, wanted, strict=True)
        fits = (bound == place == 0 or bound >= max(len(gap), place - size / 2) for bound, place in pairs)
        if all(fits) and len(set(bounds)) == count:
            return bounds
    return []
