"""The treatment of each token of a text by a routed model: each path's log-probability, and the paths' weights.

Texts are read as by `evaluate`: the same documents, tokens and overlapping windows, so that totals are its losses.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.sources import listed
from scale_surgery.evidence.eval_targets import Subject, choose_lengths, open_subjects, sequences_of
from scale_surgery.folder.routers import routing_of
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.routing.records import DocumentRoute, FileRoute, RouteReport, token_of, totals_of
from scale_surgery.routing.token_texts import token_texts
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.text.documents import Document
    from scale_surgery.text.sequences import Sequences


@dataclass(frozen=True)
class FileTokens:
    """A file: its documents, each as one sequence, and the windows in which they are read."""

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
) -> RouteReport:
    """Return each token of texts with its log-probability on each path of a routed model, and the weights of the paths.

    Args:
        model: A routed model, a folder or Hub id.
        texts: A file or saved dataset, or several, as for `documents.read_documents`.
        sequence_length: Most tokens of a window; by default the model's context, at most 1024.
        step: Tokens from one window of a longer text to the next; by default half of that.
        run: Options of the run: device, dtype, trust_remote_code, batch_size.
        revision: Branch, tag or commit of a Hub repository.
        track: Makes progress bars.

    Returns:
        Every token of every file, and totals by file.

    Raises:
        DataError: If a text cannot be read or holds nothing to score, the lengths do not fit, or no tokenizer of the
            model loads.
        CheckpointError: If the model cannot be found or loaded, is not expanded, or has no router.
    """
    from scale_surgery.text.documents import read_files

    documents = read_files(listed(texts))
    (subject,) = open_subjects([model], run, revision=revision)
    # of the files that are scored: of a Hub id, an older commit may lie in the cache
    routing, paths = routing_of(model, subject.checkpoint)
    length, step = choose_lengths([subject], sequence_length, step)
    files_read = _read(subject, documents, length, step)
    total = sum(len(reading.windows.ids) for reading in files_read)
    with track("route-report", total) as advance, loaded_whole(subject.checkpoint, subject.name, run) as network:
        scores = [_score(network, reading.windows, run.windows(), advance) for reading in files_read]
    base = None if subject.manifest is None else subject.manifest.base_name
    base = base or f"{subject.name}, expansion disabled"
    pairs = zip(files_read, scores, strict=True)
    files = tuple(_join(reading, file_scores, subject.tokenizer) for reading, file_scores in pairs)
    return RouteReport(subject.name, base, routing, paths, length, step, run.dtype, files, subject.base_vocabulary)


def write_tokens(report: RouteReport, file: Path) -> None:
    """Write one line of JSON per token, all or nothing; replace an existing file."""
    write_text(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in report.records()))


def _read(subject: Subject, documents: Mapping[str, Sequence[Document]], length: int, step: int) -> list[FileTokens]:
    from scale_surgery.text.sequences import Sequences
    from scale_surgery.text.tokenizing import start_tokens, stride

    # no document is as long as this, so each is one sequence
    whole = sequences_of(subject, subject.tokenizer, documents, sys.maxsize, 1)
    # labels are the ids, so that the tokens of a prompt are shown too, each once
    scored = {file: Sequences(sequences.ids, sequences.ids, sequences.starts) for file, sequences in whole.items()}
    start = start_tokens(subject.tokenizer)
    windows = {file: stride(sequences, length, step, start) for file, sequences in scored.items()}
    return [FileTokens(file, documents[file], sequences, windows[file]) for file, sequences in whole.items()]


def _score(model: Any, windows: Sequences, batch_size: int, advance: Progress) -> Tensor:
    """Score every token that was in no earlier window; (numbers of a token, tokens), NaN if nothing predicts it."""
    import torch

    from scale_surgery.routing.path_scores import read_paths
    from scale_surgery.running.loss import reading_order

    rows = iter(reading_order(windows))
    scores = torch.empty(0)
    for batch in read_paths(model, windows, batch_size, advance):
        base, sides, weights, routed, cosine = batch.scores
        cosine = torch.full_like(base, math.nan) if cosine is None else cosine
        columns = torch.cat((torch.stack((base, routed, cosine), -1), sides, weights), -1).double()
        if not len(scores):
            scores = torch.full((len(windows.ids), columns.shape[-1]), math.nan, dtype=torch.float64)
        for window, row in zip(columns, rows, strict=False):
            start, end = windows.starts[row : row + 2]
            scores[start + 1 : end] = window[: end - start - 1]
    return scores[windows.labels >= 0].T


def _join(reading: FileTokens, scores: Tensor, tokenizer: Any) -> FileRoute:
    """Join the texts and the scores of a file."""
    sequences = reading.sequences
    is_counted = sequences.labels >= 0
    is_counted[list(sequences.starts[:-1])] = False
    documents = []
    for document, start, end in zip(reading.documents, sequences.starts[:-1], sequences.starts[1:], strict=True):
        ids = sequences.ids[start:end].tolist()
        pieces = map(str, tokenizer.convert_ids_to_tokens(ids))
        names = zip(token_texts(document, ids, tokenizer), pieces, ids, strict=True)
        rows = zip(names, is_counted[start:end].tolist(), scores[:, start:end].T.tolist(), strict=True)
        tokens = tuple(token_of(place, *row) for place, row in enumerate(rows))
        documents.append(DocumentRoute(document.source, tokens))
    means = scores[:, is_counted].mean(1).tolist()
    totals = totals_of(len(documents), int(is_counted.sum()), means)
    return FileRoute(reading.file, totals, tuple(documents))
