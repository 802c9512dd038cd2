"""What a routed or composed model does with each token of a text: each path's log-probability, and which one gave it.

Texts are read as by `evaluate`: the same documents, tokens and overlapping windows, so that totals are its losses.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.sources import listed, open_model
from scale_surgery.composition.paths import MixedPaths, base_name_in, read_paths
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.subjects import Subject, choose_lengths, open_subjects, read_texts
from scale_surgery.planning.routing_specs import Routing, read_routing
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.routing.path_records import PathReport, token_of_paths, totals_of_paths
from scale_surgery.routing.records import (
    DocumentRoute,
    FileRoute,
    OneToken,
    RouteReport,
    Sums,
    TokenRoute,
    Totals,
    rounded,
)
from scale_surgery.routing.token_texts import token_texts
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.running.documents import Document
    from scale_surgery.running.sequences import Sequences


@dataclass(frozen=True)
class Reading:
    """A file as the model reads it.

    Attributes:
        file: Its name.
        documents: Its documents.
        sequences: Their tokens, a sequence each; labels are negative where totals do not count.
        windows: The same in overlapping windows; labels are negative where a token was in the window before.
    """

    file: str
    documents: Sequence[Document]
    sequences: Sequences
    windows: Sequences


def route_report(
    model: str | Path,
    texts: str | Path | Sequence[str | Path],
    *,
    sequence_length: int | None = None,
    step: int | None = None,
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    track: Track = no_track,
) -> RouteReport | PathReport:
    """Show for each token of texts what each path of a routed or composed model makes of it, and which it came from.

    Args:
        model: A routed or composed model, a folder or Hub id.
        texts: A file or saved dataset, or several, as for `data.read_documents`.
        sequence_length: Most tokens that are read at once; by default the model's context, at most 1024.
        step: Tokens from one window of a longer text to the next; by default half of that.
        run: How the model runs: device, dtype, trust_remote_code, batch_size.
        revision: Branch, tag or commit of a Hub repository.
        track: Makes progress bars.

    Returns:
        Every token of every file, and totals by file; of a composed model for all of its paths.

    Raises:
        DataError: If a text cannot be read or holds nothing to score, the lengths do not fit, or the model has no
            tokenizer that loads.
        CheckpointError: If the model cannot be found or loaded, is not expanded, or has no router.
    """
    from scale_surgery.running.documents import read_files

    documents = read_files(listed(texts))
    routing = _read_routing(model, revision)
    (subject,) = open_subjects([model], run, revision=revision)
    length, step = choose_lengths([subject], sequence_length, step)
    readings = _read(subject, documents, length, step)
    total = sum(len(reading.windows.ids) for reading in readings)
    with track("route-report", total) as advance, loaded_whole(subject.path, subject.name, run) as network:
        scores = [_score(network, reading.windows, run.windows(), advance) for reading in readings]
    found = [(reading, own, subject.tokenizer) for reading, own in zip(readings, scores, strict=True)]
    numbers = length, step, run.dtype
    if isinstance(routing, MixedPaths):
        composed = tuple(_join(*own, token_of_paths, totals_of_paths) for own in found)
        return PathReport(subject.name, base_name_in(subject.path) or "base", routing, *numbers, composed)
    base = f"{subject.name}, expansion disabled" if subject.manifest is None else subject.manifest.base_name
    routed = tuple(_join(*own, partial(_token, routing=routing), _totals) for own in found)
    return RouteReport(subject.name, base, routing, *numbers, routed)


def write_jsonl(report: RouteReport | PathReport, file: Path) -> None:
    """Write a line of JSON for each token, whole or not at all; an existing file is replaced."""
    write_text(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in report.records()))


def _read_routing(model: str | Path, revision: str | None) -> Routing | MixedPaths:
    """How a model's config.json says that it routes; its numbers are checked when it is loaded."""
    _, checkpoint = open_model(model, revision)
    specs = checkpoint.config.get("scale_surgery")
    if specs is None:
        raise CheckpointError(
            f"{model}: is not expanded and has one path only, expected a model made by scale-surgery expand and "
            "scale-surgery route-export."
        )
    routing = read_paths(specs) or read_routing(specs)
    if routing is None:
        raise CheckpointError(f"{model}: has no router: write one with scale-surgery route-export.")
    return routing


def _read(subject: Subject, documents: Mapping[str, Sequence[Document]], length: int, step: int) -> list[Reading]:
    from scale_surgery.running.sequences import Sequences
    from scale_surgery.running.texts import stride

    # no document is as long as this, so each is one sequence
    whole = read_texts(subject, documents, sys.maxsize, 1)
    # ids as labels: of a prompt, too, each token is shown once
    windows = {file: stride(Sequences(own.ids, own.ids, own.starts), length, step) for file, own in whole.items()}
    return [Reading(file, documents[file], own, windows[file]) for file, own in whole.items()]


def _score(model: Any, windows: Sequences, batch_size: int, advance: Progress) -> Tensor:
    """Score every token that was in no window before; (numbers of a token, tokens), NaN where nothing predicts."""
    import torch

    from scale_surgery.running.texts import collate

    scores = torch.empty(0)
    device = next(model.parameters()).device
    for rows in _batches(windows, batch_size):
        batch = collate([windows[row] for row in rows])
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        found = _numbers(model.score_tokens(**inputs)).cpu().double()
        if not len(scores):
            scores = torch.full((len(found), len(windows.ids)), math.nan, dtype=torch.float64)
        for place, row in enumerate(rows):
            start, end = windows.starts[row : row + 2]
            scores[:, start + 1 : end] = found[:, place, : end - start - 1]
        advance(int(batch["attention_mask"].sum()))
    return scores[:, windows.labels >= 0]


def _batches(windows: Sequences, batch_size: int) -> Iterator[list[int]]:
    """Rows of windows, the longest first, so that memory runs out at once or never, and equal lengths need no pad."""
    sizes = [end - start for start, end in pairwise(windows.starts)]
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def _numbers(scores: Any) -> Tensor:
    """What a model says of tokens (numbers of a token, b, t - 1): a number, or one for each path."""
    import torch

    return torch.cat([part[None] if part.dim() == 2 else part.movedim(-1, 0) for part in scores])


def _join(
    reading: Reading,
    scores: Tensor,
    tokenizer: Any,
    make_token: Callable[[int, tuple[str, str, int], bool, Sequence[float]], OneToken],
    make_totals: Callable[[int, int, Sequence[float]], Sums],
) -> FileRoute[OneToken, Sums]:
    """Put the texts and the numbers of a file together."""
    own = reading.sequences
    is_counted = own.labels >= 0
    is_counted[list(own.starts[:-1])] = False
    documents = []
    for document, start, end in zip(reading.documents, own.starts[:-1], own.starts[1:], strict=True):
        ids = own.ids[start:end].tolist()
        pieces = map(str, tokenizer.convert_ids_to_tokens(ids))
        names = zip(token_texts(document, ids, tokenizer), pieces, ids, strict=True)
        rows = zip(names, is_counted[start:end].tolist(), scores[:, start:end].T.tolist(), strict=True)
        documents.append(
            DocumentRoute(document.source, tuple(make_token(place, *row) for place, row in enumerate(rows)))
        )
    totals = make_totals(len(documents), int(is_counted.sum()), scores[:, is_counted].mean(1).tolist())
    return FileRoute(reading.file, totals, tuple(documents))


def _totals(documents: int, tokens: int, means: Sequence[float]) -> Totals:
    base, preserve, adapt, routed, _, weight = means
    return Totals(documents, tokens, -base, -preserve, -adapt, -routed, weight)


def _token(
    place: int, names: tuple[str, str, int], is_counted: bool, scores: Sequence[float], routing: Routing
) -> TokenRoute:
    if not place:
        return TokenRoute(place, *names, is_counted)
    base, preserve, adapt, routed, cosine, weight = map(rounded, scores)
    decision: Any = None if routing.router != "cosine" else "adapt" if weight == 1 else "preserve"
    return TokenRoute(place, *names, is_counted, base, preserve, adapt, routed, cosine, weight, decision)
