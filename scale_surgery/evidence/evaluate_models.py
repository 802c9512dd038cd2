"""Measure models on the same windows, with one row of the table for each form of a model.

An expanded model is measured three times: its base model by the stock class, the whole model, and the model with its
expansion disabled. A routed model is also measured with its routing disabled, which leaves its adapt path. A composed
model is also measured with each of its expansions alone. Each expansion can also be measured at several strengths.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scale_surgery.evidence.answer_scores import AnswerScore, EncodedInstructions, ask_instructions
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.evidence.evaluate_settings import EvaluationSettings
from scale_surgery.evidence.probe_file import EncodedProbes
from scale_surgery.evidence.probe_scores import ProbeScore, ask_probes
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import link_base
from scale_surgery.progress import Progress
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.loss import Measurement, measure
from scale_surgery.running.options import RunOptions
from scale_surgery.running.strength import at_strength

if TYPE_CHECKING:
    from accelerate import PartialState

    from scale_surgery.text.sequences import Sequences

MeterKind = Literal["base", "expanded", "adapt", "path", "strength", "disabled", "other"]


@dataclass(frozen=True)
class Score:
    """The score of one model, a row of the table.

    Attributes:
        name: Name of the model.
        kind: "base", the base model of an expanded one; "expanded"; "adapt", a routed model with its routing disabled;
            "path", a composed model with one expansion alone; "strength", one expansion alone at a strength;
            "disabled", an expanded model with its expansion disabled; or "other", a model without expansion.
        base: Name of the row of its base, or None.
        old: Its score on old text; None without text.
        new: Its score on new text; None without text.
        forgetting: Its nats per token on old text minus those of the base, or None.
        learning: The base's nats per token on new text minus its own, or None.
        probes: Its answers to probes; None without probes, and if they are those of its base.
        answers: Its answers to instructions; None in the same cases.
        strength: Strength of its expansion, for kind "strength".
    """

    name: str
    kind: MeterKind
    base: str | None
    old: Measurement | None = None
    new: Measurement | None = None
    forgetting: float | None = None
    learning: float | None = None
    probes: ProbeScore | None = None
    strength: float | None = None
    answers: AnswerScore | None = None


@dataclass(frozen=True)
class MeasuredRow:
    """A score with the sha256 of its token ids and windows, by side.

    Losses with equal hashes can be compared.
    """

    score: Score
    fingerprints: Mapping[str, str]


@dataclass(frozen=True)
class Asked:
    """Texts and prompts that models read to be measured, in the tokens of one tokenizer.

    Attributes:
        texts: Windows by side.
        probes: Probes; None without any.
        instructions: Instructions; None without any.
    """

    texts: Mapping[str, Sequences]
    probes: EncodedProbes | None
    instructions: EncodedInstructions | None

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The sha256 of the windows, by side."""
        return {side: text.fingerprint() for side, text in self.texts.items()}

    @property
    def tokens(self) -> int:
        """Tokens of the windows."""
        return sum(len(text.ids) for text in self.texts.values())

    @property
    def answered(self) -> int:
        """Most tokens that are read and generated for answers."""
        return sum(some.prompts.tokens for some in (self.probes, self.instructions) if some is not None)


@dataclass(frozen=True)
class Meter:
    """A meter that measures models on the same windows.

    Attributes:
        asked: Texts and prompts in the tokens of this model.
        asked_of_base: The same in the tokens of the base's tokenizer if tokens were added to it; otherwise `asked`.
        bytes: Bytes of the scored texts, by side.
        settings: Strengths at which expansions are measured, and seconds for the code of a probe.
        run: Options of the models' runs.
        processes: The processes that share the windows; None for one.
    """

    asked: Asked
    asked_of_base: Asked
    bytes: Mapping[str, int]
    settings: EvaluationSettings
    run: RunOptions
    processes: PartialState | None = None

    def tokens(self, subject: Subject, *, with_base: bool) -> int:
        """Return the number of tokens read to measure a model, including its base if `with_base`."""
        parts = len(subject.expansions) or (subject.is_expanded and subject.is_routed)
        dialled = subject.is_expanded * len(self.settings.strengths) * (len(subject.expansions) or 1)
        rows = 1 + parts + dialled + with_base
        # the row without its expansion answers nothing, unless it is the only base
        read, answered = self.asked.tokens, self.asked.answered
        return (read + answered) * rows + subject.is_expanded * (read + (0 if subject.base else answered))

    def measure_base(self, subject: Subject, advance: Progress) -> MeasuredRow:
        """Measure the base model inside an expanded one, by the stock class."""
        assert subject.base is not None and isinstance(subject.checkpoint, Folder)
        with tempfile.TemporaryDirectory() as folder:
            renamed = link_base(subject.checkpoint, Path(folder))
            with loaded_whole(Path(folder), subject.base, self.run, renamed=renamed) as model:
                return self._measure(model, Score(subject.base, "base", None), advance, is_base=True)

    def measure_subject(self, subject: Subject, advance: Progress) -> list[MeasuredRow]:
        """Measure a model; for an expanded one also each part alone, and last its base."""
        with loaded_whole(subject.checkpoint, subject.name, self.run) as model:
            if not subject.is_expanded:
                of_base = Score(subject.base or "", "base", None)
                score = of_base if subject.is_base else Score(subject.name, "other", subject.base)
                return [self._measure(model, score, advance)]
            disabled = f"{subject.name}, expansion disabled"
            rows = [self._measure(model, Score(subject.name, "expanded", subject.base or disabled), advance)]
            for score, reads_new_tokens, chosen in self._parts(subject, model, disabled):
                with chosen:
                    rows.append(self._measure(model, score, advance, is_base=not reads_new_tokens))
            return rows

    def _measure(self, model: Any, score: Score, advance: Progress, *, is_base: bool = False) -> MeasuredRow:
        report = partial(advance, note=score.name)
        asked = self.asked_of_base if is_base else self.asked
        measured = {
            side: replace(
                measure(model, text, self.run.windows(), report, self.processes),
                bytes=self.bytes[side],
            )
            for side, text in asked.texts.items()
        }
        answers = score.kind != "disabled" or score.base is None
        rows, how = self.run.windows(), (report, self.processes)
        if asked.probes is not None and answers:
            judged = ask_probes(model, asked.probes, rows, self.settings.python_seconds, *how)
            score = replace(score, probes=judged)
        if asked.instructions is not None and answers:
            score = replace(score, answers=ask_instructions(model, asked.instructions, rows, *how))
        return MeasuredRow(replace(score, old=measured.get("old"), new=measured.get("new")), asked.fingerprints)

    def _parts(
        self, subject: Subject, model: Any, disabled: str
    ) -> Iterator[tuple[Score, bool, AbstractContextManager[Any]]]:
        """Generate the parts of a model that run alone: score, use of new tokens, and a context to select it."""
        base = subject.base or disabled
        for name in subject.expansions:
            score = Score(f"{subject.name}, {name} alone", "path", base)
            yield score, subject.reads_new_tokens(name), model.use_expansion(name)
        if subject.is_routed and not subject.expansions:
            yield Score(f"{subject.name}, routing disabled", "adapt", base), True, model.routing_disabled()
        for name in (subject.expansions or tuple(model.expansions)) if self.settings.strengths else ():
            title = f"{subject.name}, {name} alone" if subject.expansions else subject.name
            for strength in self.settings.strengths:
                score = Score(f"{title}, strength {strength:g}", "strength", base, strength=strength)
                yield score, False, _alone_at(model, name, strength)
        yield Score(disabled, "disabled", subject.base), False, expansion_disabled(model)


@contextmanager
def _alone_at(model: Any, name: str, strength: float) -> Iterator[None]:
    """Run one expansion alone at a strength inside a `with` block."""
    with at_strength(model, strength, name), model.use_expansion(name):
        yield
