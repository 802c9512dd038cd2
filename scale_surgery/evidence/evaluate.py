"""Forgetting and learning: scores of several models on old and new text, and on probes.

`evaluate_models` defines the rows of a model. Every model reads with its own tokenizer, and long texts are read in
overlapping windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import specs_of_expansions
from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.names import MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import listed
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.evidence.answer_scores import encode_instructions
from scale_surgery.evidence.eval_targets import (
    Subject,
    choose_lengths,
    open_subjects,
    read_sides,
    sequences_of,
    tokens_before,
)
from scale_surgery.evidence.evaluate_models import Asked, MeasuredRow, Meter, Score
from scale_surgery.evidence.evaluate_settings import OF_INSTRUCTION, OF_PROBE, EvaluationSettings
from scale_surgery.evidence.forgetting_limit import ForgettingLimit, limit_of
from scale_surgery.evidence.probe_file import Probe, encode_probes, read_probes
from scale_surgery.evidence.rehearsed import rehearsed_texts
from scale_surgery.fields import problems_of
from scale_surgery.progress import Finding, Track, no_track
from scale_surgery.running.loss import Measurement
from scale_surgery.running.options import Dtype, RunOptions
from scale_surgery.running.processes import join_processes
from scale_surgery.running.strength import check_strength, strength_problems

if TYPE_CHECKING:
    from accelerate import PartialState

    from scale_surgery.text.documents import Document


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        scores: One row per measured model.
        old: Files of old text.
        new: Files of new text.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: Dtype that weights were cast to; None for the stored dtype.
        notes: Notes on the numbers.
        limit: The limit of forgetting, and the models above it; None without a limit.
    """

    scores: tuple[Score, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    notes: tuple[str, ...]
    limit: ForgettingLimit | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values, with values derived from the sums."""
        content = asdict(self)
        for row, score in zip(content["scores"], self.scores, strict=True):
            row |= {"old": _measurement_to_json(score.old), "new": _measurement_to_json(score.new)}
            row |= {"probes": None if score.probes is None else score.probes.to_json()}
            row |= {"answers": None if score.answers is None else score.answers.to_json()}
        # JSON has neither NaN nor infinity, so they become texts
        return plain_json(content)


def evaluate(
    models: str | Path | Sequence[str | Path],
    old: str | Path | Sequence[str | Path] = (),
    new: str | Path | Sequence[str | Path] = (),
    *,
    settings: EvaluationSettings = EvaluationSettings(),
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    track: Track = no_track,
) -> Evaluation:
    """Measure loss, perplexity and first-token accuracy of models on old and on new text.

    A base is measured once, even if several expanded models share it or it is also given. A model without expansion
    is compared with the base if there is only one. Processes of a launcher share the texts. Each holds the whole
    model, and gets the whole result.

    Args:
        models: A folder or Hub id, or several.
        old: Old text, which the base knows: a file or saved dataset, or several; see `documents.read_documents`.
        new: New text, which the expansion was to learn, in the same form. Old or new text, probes or instructions are
            required.
        settings: Windows of texts, strengths to measure, probes and instructions to ask, and the limit of forgetting.
        run: Options of the run: device, dtype, trust_remote_code, batch_size.
        revision: Branch, tag or commit of Hub repositories.
        track: Makes progress bars.

    Returns:
        Rows for each model, with forgetting and learning against its base.

    Raises:
        DataError: If a file cannot be read or holds nothing to score, the lengths do not fit, or a model has no
            tokenizer that loads.
        CheckpointError: If a model cannot be found or loaded.
        PlanError: If a setting is out of range, or an expansion has no strength.
    """
    unfit, most = problems_of(settings), settings.max_forgetting
    if settings.probes_file is not None and most is not None and most > 1:
        unfit.append(Problem("value-unfit", "--max-forgetting", value=most, kind="a share from 0 to 1, with --probes"))
    if unfit:
        raise PlanError(*unfit)
    old_files, new_files = listed(old), listed(new)
    documents = read_sides({"old": old_files, "new": new_files})
    probes = read_probes(settings.probes_file, run_python=settings.run_python)
    if not any(documents.values()) and not probes and settings.instructions is None:
        raise DataError(Problem("texts-missing"))
    if settings.max_forgetting is not None and not (documents["old"] or probes):
        raise DataError(Problem("limit-without-measure", "--max-forgetting"))
    processes, run = join_processes(run)
    # bases come first, as in a run with an expanded model alone
    subjects = sorted(open_subjects(listed(models), run, revision=revision), key=lambda subject: not subject.is_base)
    _check_strengths(subjects, settings.strengths)
    length, step = choose_lengths(subjects, settings.sequence_length, settings.step)
    scored = {side: sum(len(text.text.encode()) for text in some) for side, some in documents.items()}
    meters = [
        _meter(subject, documents, probes, (length, step, before), scored, settings, run, processes)
        for subject, before in zip(subjects, tokens_before(subjects), strict=True)
    ]
    rows = _measure_all(subjects, meters, track)
    scores = tuple(_compare(row, rows) for row in rows)
    return Evaluation(
        scores=scores,
        old=tuple(map(str, old_files)),
        new=tuple(map(str, new_files)),
        sequence_length=length,
        step=step,
        dtype=run.dtype,
        notes=(*_notes(subjects, rows), *_notes_on_instructions(subjects, meters)),
        limit=None if settings.max_forgetting is None else limit_of(scores, settings.max_forgetting, bool(probes)),
    )


def _check_strengths(subjects: Sequence[Subject], strengths: Sequence[float]) -> None:
    """Refuse strengths that are out of range, and expansions that have none."""
    if not strengths:
        return
    for strength in strengths:
        check_strength(strength)
    expanded = [subject for subject in subjects if subject.is_expanded]
    problems = [] if expanded else [Problem("strength-without-expansion", "--strength")]
    for subject in expanded:
        for entry in specs_of_expansions(subject.checkpoint.config[CONFIG_KEY]):
            new_tokens = entry.get("head", {}).get("new_tokens", 0)
            problems += strength_problems(entry.get("variant"), new_tokens, subject.name)
    if problems:
        raise PlanError(*problems)


def _meter(
    subject: Subject,
    documents: Mapping[str, Sequence[Document]],
    probes: Sequence[Probe],
    windows: tuple[int, int, Sequence[int]],
    scored: Mapping[str, int],
    settings: EvaluationSettings,
    run: RunOptions,
    processes: PartialState | None,
) -> Meter:
    def read(tokenizer: Any) -> Asked:
        most, chosen = settings.max_new_tokens, settings.instructions
        encoded = encode_probes(probes, subject, tokenizer, most or OF_PROBE) if probes else None
        instructions = encode_instructions(chosen, subject, tokenizer, most or OF_INSTRUCTION) if chosen else None
        return Asked(sequences_of(subject, tokenizer, documents, *windows), encoded, instructions)

    asked = read(subject.tokenizer)
    is_same = subject.base_tokenizer is subject.tokenizer
    asked_of_base = asked if is_same else read(subject.base_tokenizer)
    return Meter(asked, asked_of_base, scored, settings, run, processes)


def _measure_all(subjects: Sequence[Subject], meters: Sequence[Meter], track: Track) -> list[MeasuredRow]:
    # a shared base is measured with the first of its models, or on its own if it is given
    first_with = {subject.base: subject for subject in reversed(subjects) if subject.is_expanded}
    first_with |= {subject.base: subject for subject in subjects if subject.is_base}
    brings_base = [
        subject.is_expanded and subject.base is not None and first_with[subject.base] is subject for subject in subjects
    ]
    jobs = list(zip(subjects, meters, brings_base, strict=True))
    total = sum(meter.tokens(subject, with_base=with_base) for subject, meter, with_base in jobs)
    rows: list[MeasuredRow] = []
    with track("evaluate", total) as advance:
        for place, (subject, meter, with_base) in enumerate(jobs, start=1):
            measured = [meter.measure_base(subject, advance)] if with_base else []
            measured += meter.measure_subject(subject, advance)
            rows += measured
            # if the next model fails, there is no table: a log keeps the rows
            for row in measured[: None if place < len(jobs) else 0]:
                advance(0, Finding(f"{row.score.name}: {_summary(row.score)}"))
    return rows


def _summary(score: Score) -> str:
    """Describe the numbers of a row in one line."""
    sides = {"old": score.old, "new": score.new}
    losses = [f"{side} {text.nats_per_token:.4f}" for side, text in sides.items() if text is not None]
    parts = [f"{', '.join(losses)} nats per token"] * bool(losses)
    if score.probes is not None:
        parts.append(f"{score.probes.total.right} of {score.probes.total.asked} probes right")
    if score.answers is not None:
        parts.append(f"{score.answers.ended} of {score.answers.asked} answers end")
    return "; ".join(parts) or "nothing of its own"


def _compare(row: MeasuredRow, rows: Sequence[MeasuredRow]) -> Score:
    """Add forgetting and learning against the base, if there is one that reads the same text."""
    score = row.score
    name = _base_of(row, rows)
    base = next((candidate for candidate in rows if candidate.score.name == name), None)
    # an expanded model may add tokens: it reads the same text in other tokens than its base
    is_same_text = score.kind != "other" or (base is not None and base.fingerprints == row.fingerprints)
    if base is not None and base.score.probes is not None and score.probes is not None:
        # answers are compared as text, whatever the tokens
        score = replace(score, probes=score.probes.against(base.score.probes))
    if base is not None and base.score.answers is not None and score.answers is not None:
        score = replace(score, answers=score.answers.against(base.score.answers))
    if base is None or not is_same_text:
        return replace(score, base=None)
    return replace(
        score,
        base=base.score.name,
        forgetting=_loss_against(score.old, base.score.old),
        learning=None if (lost := _loss_against(score.new, base.score.new)) is None else 0.0 - lost,
    )


def _base_of(row: MeasuredRow, rows: Sequence[MeasuredRow]) -> str | None:
    bases = {candidate.score.base for candidate in rows} - {None}
    if row.score.kind == "other" and len(bases) == 1:
        return bases.pop()
    return row.score.base


def _loss_against(score: Measurement | None, base: Measurement | None) -> float | None:
    return None if score is None or base is None else score.loss_against(base)


def _notes(subjects: Sequence[Subject], rows: Sequence[MeasuredRow]) -> Iterator[str]:
    for subject in subjects:
        if subject.is_fused and len(subjects) == 1:
            yield (
                f"{subject.name}: is fused and holds no base that could be measured with it. What it forgot and "
                "learned shows beside its base: give that as one more model."
            )
        if subject.is_expanded and subject.manifest is None:
            yield (
                f"{subject.name}: has no {MANIFEST_FILE}, so its base cannot be given back as files; it is compared "
                "with itself, expansion disabled. Make an expanded folder of it: "
                f"{adopt_line(subject.path)}"
            )
        if texts := rehearsed_texts(subject.runs):
            yield (
                f"{subject.name}: was asked to stay what its base is, on {texts}. What that keeps is measured, on "
                "these texts, and not proved."
            )
    first, *rest = rows
    for row in rest:
        if row.score.kind == "expanded" and row.fingerprints != first.fingerprints:
            yield (
                f"{row.score.name}: reads other tokens than {first.score.name}. Compare bits/byte, not losses per "
                "token; forgetting and learning are of the same text, in nats per token of the base."
            )
        if row.score.kind == "other" and row.fingerprints != first.fingerprints:
            yield (
                f"{row.score.name}: reads other tokens than {first.score.name}; their losses cannot be compared, "
                "accuracies can."
            )


def _notes_on_instructions(subjects: Sequence[Subject], meters: Sequence[Meter]) -> Iterator[str]:
    for subject, meter in zip(subjects, meters, strict=True):
        if (encoded := meter.asked.instructions) is None:
            continue
        if not encoded.begins.is_chat:
            yield f"{subject.name}: has no chat template; it continued the instructions as plain text."
        for note in encoded.begins.notes:
            yield f"{subject.name}: {note}."


def _measurement_to_json(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    names = ("nats_per_token", "perplexity", "bits_per_byte", "accuracy")
    derived = {name: getattr(measurement, name) for name in names}
    return derived | asdict(measurement)
