"""Probes of a file: prompts whose answers a rule judges, so that forgetting can be counted.

FILE.jsonl has an object a line: {"prompt", "kind", "answer"} or {"prompt", "kind": "python", "test"}, optionally with
{"group", "max_new_tokens"}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scale_surgery.checkpoint.records import RecordError, read_record
from scale_surgery.errors import DataError, Problem
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.evidence.greedy import Prompts
from scale_surgery.evidence.probe_rules import first_number
from scale_surgery.fields import Count
from scale_surgery.progress import no_progress
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.text.text_files import BLANK, Unread, read_lines

ProbeKind = Literal["exact", "number", "python"]


@dataclass(frozen=True)
class Probe:
    """A prompt with the rule that judges its answer.

    Attributes:
        prompt: Text that a model continues, as it is, without a chat template.
        kind: Rule: "exact", "number" or "python"; see `probe_rules`.
        answer: Right answer; not read for "python".
        group: Group in which it is counted. Default: its kind.
        test: Python code that runs after prompt and answer, for "python".
        max_new_tokens: Most tokens of its answer. Default: the option's.
    """

    prompt: str
    kind: ProbeKind
    answer: str | int | float = ""
    group: str = ""
    test: str = ""
    max_new_tokens: Count | None = None


@dataclass(frozen=True)
class EncodedProbes:
    """Probes, and their prompts in the tokens of a model."""

    probes: Sequence[Probe]
    prompts: Prompts


def read_probes(file: Path | None, *, run_python: bool) -> tuple[Probe, ...]:
    """Read the probes of a file; none without a file.

    Raises:
        DataError: If a line is no probe, or has code that may not run.
    """
    if file is None:
        return ()
    probes, problems = list[Probe](), list[Problem]()
    for number, row in read_lines(file, no_progress):
        place = f"{file}, line {number}"
        if row is BLANK:
            continue
        if isinstance(row, Unread):
            problems.append(Problem(row.problem.code, place, **row.problem.values))
            continue
        try:
            probe = read_record(row, Probe)
        except RecordError as error:
            problems += [problem.within(place) for problem in error.problems]
            continue
        problems += _problems(probe, place)
        probes.append(probe)
    if not probes and not problems:
        problems.append(Problem("file-without-probes", file))
    if not run_python and any(probe.kind == "python" for probe in probes):
        count = sum(probe.kind == "python" for probe in probes)
        problems.append(Problem("probes-run-code", file, count=count))
    if problems:
        raise DataError(*problems)
    return tuple(probes)


def encode_probes(probes: Sequence[Probe], subject: Subject, tokenizer: Any, new_tokens: int) -> EncodedProbes:
    """Encode the prompts of probes for a model, and check that it can read them and generate the answers."""
    from scale_surgery.text.tokenizing import tokenize_prompts

    ids = tokenize_prompts([probe.prompt for probe in probes], tokenizer)
    lengths = [probe.max_new_tokens or new_tokens for probe in probes]
    check_token_ids(subject.name, max((max(row, default=0) for row in ids), default=0), subject.vocabulary, "a probe")
    problems = [
        Problem("probe-over-context", f"probe {number}", tokens=len(row), new=length, **_context(subject))
        for number, (row, length) in enumerate(zip(ids, lengths, strict=True), start=1)
        if subject.context is not None and len(row) + length > subject.context
    ]
    if problems:
        raise DataError(*problems)
    return EncodedProbes(probes, Prompts(ids, lengths, tokenizer))


def _context(subject: Subject) -> Mapping[str, Any]:
    return {"context": subject.context, "model": subject.name}


def _problems(probe: Probe, place: str) -> Iterator[Problem]:
    needed = "test" if probe.kind == "python" else "answer"
    if not probe.prompt.strip():
        yield Problem("probe-field-missing", place, field="prompt", kind=probe.kind)
    if not str(getattr(probe, needed)).strip():
        yield Problem("probe-field-missing", place, field=needed, kind=probe.kind)
    elif probe.kind == "number" and first_number(str(probe.answer)) is None:
        yield Problem("probe-without-number", place, answer=probe.answer)
