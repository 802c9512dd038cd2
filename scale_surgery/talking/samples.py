"""Replacement for missing old text: samples from the base, drawn as those of rehearsal are, but other ones.

A model with a chat template answers instructions, and each row of the file is a conversation. Other models write texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.staging import check_output_files
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.fields import problems_of
from scale_surgery.progress import Track, no_track
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import translated
from scale_surgery.running.options import RunOptions
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.talking.speaker import loaded_speaker, open_subject
from scale_surgery.text.beginnings import Beginnings, find_beginnings
from scale_surgery.text.conversations import ANSWERS
from scale_surgery.training.base_samples import sample_texts
from scale_surgery.training.kept_samples import identity_in, kept_or_drawn, made_of
from scale_surgery.training.sampling import Sampling

# settings that apply, since samples are drawn from the base's whole distribution
SAMPLED_BY = ("raw", "max_new_tokens", "temperature", "seed")
# a run that rehearses with the same seed draws other texts, so that forgetting is measured on none that it rehearsed
ASIDE = 0x9E3779B9
OPENED = re.compile(r"<think>\s*\Z")


@dataclass(frozen=True)
class Samples:
    """A file of texts that a base wrote, one {"text"} per line, or one {"messages"} for a model with a chat template.

    Attributes:
        path: The file.
        texts: Number of texts.
        tokens: Tokens that the base wrote, with the ends of texts.
        found: Note that an earlier run of the same base drew them, or why the next will not find them; else empty.
        begun: Instructions that it answered, and those that were left out; empty for plain texts.
    """

    path: Path
    texts: int
    tokens: int
    found: str
    begun: str = ""


def write_samples_of(
    model: str | Path,
    output: str | Path,
    count: int,
    settings: GenerationSettings = GenerationSettings(),
    *,
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    track: Track = no_track,
) -> Samples:
    """Let the base of a model write texts into a JSONL file, others than rehearsal draws with the same seed.

    A line is {"text"}, or {"messages"} with an instruction and its answer if the model has a chat template. An answer
    that reached the limit has no end there; it gets one when the file is read.
    """
    check_output_files([Path(output)], [model])
    usual = GenerationSettings()
    useless = [
        Problem("option-without-effect", f"--{field.name.replace('_', '-')}")
        for field in fields(settings)
        if field.name not in SAMPLED_BY and getattr(settings, field.name) != getattr(usual, field.name)
    ]
    if settings.temperature == 0:
        useless.append(Problem("samples-alike", "--temperature"))
    if count < 1:
        useless.append(Problem("samples-too-few", "--samples", count=count))
    if problems := [*problems_of(settings), *useless]:
        raise PlanError(*problems)
    subject = open_subject(model, usual, run=run, revision=revision)
    if subject.is_fused:
        raise PlanError(Problem("base-fused", "--samples", model=subject.name))
    tokenizer = subject.base_tokenizer
    begins, length = _begin(subject, settings)
    temperature = 1.0 if settings.temperature is None else settings.temperature
    sampling = Sampling(count, length, temperature, settings.seed ^ ASIDE, new_tokens=settings.max_new_tokens)
    with loaded_speaker(subject, run, track) as speaker:
        alone = expansion_disabled(speaker.network) if subject.is_expanded else nullcontext()
        with alone, translated("model-not-run", subject.name):
            # as in training with a base that is not quantised
            base = [*identity_in(subject.checkpoint), None]
            drawn_of = made_of(speaker.network, base, begins, sampling)
            own = kept_or_drawn(lambda: sample_texts(speaker.network, begins, sampling, track), drawn_of, None, track)
    places = list(chain.from_iterable(sampling.batches(begins.lengths)))
    rows = [own.texts[number]["input_ids"].tolist() for number in range(len(own.texts))]
    written = [_Written(begins, place, ids, tokenizer) for place, ids in zip(places, rows, strict=True)]
    lines = [each.line for each in written if each.is_whole]
    if not lines:
        raise DataError(Problem("samples-empty", subject.name))
    write_text(Path(output), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    tokens = sum(len(each.ids) - len(each.begin) for each in written)
    return Samples(Path(output), len(lines), tokens, own.found, begins.describe(count))


def _begin(subject: Subject, settings: GenerationSettings) -> tuple[Beginnings, int]:
    """Return the beginnings of samples, and the most tokens of a sample with its beginning."""
    begins = find_beginnings(subject.base_tokenizer, subject.name, subject.context, raw=settings.raw)
    most = settings.max_new_tokens + max(begins.lengths)
    return begins, most if subject.context is None else min(most, subject.context)


@dataclass(frozen=True)
class _Written:
    """A sample as a row of a file."""

    begins: Beginnings
    place: int
    ids: Sequence[int]
    tokenizer: Any

    @property
    def begin(self) -> tuple[int, ...]:
        """Its beginning."""
        return self.begins.ids[self.place]

    @property
    def text(self) -> str:
        """The text that the base wrote, without the end token: texts and answers get theirs when they are read."""
        ids = self.ids[:-1] if self.ids[-1] in self.begins.ends and len(self.ids) > len(self.begin) else self.ids
        if self.begins.asked is None:
            return self._decode(ids[len(self.begin) :])
        begun = self._decode(self.begin)
        # what asks for an answer may open its thought
        opened = OPENED.search(begun)
        # after its beginning, since some tokenizers drop the blanks at the start of a text
        return (opened[0] if opened else "") + self._decode(ids).removeprefix(begun)

    @property
    def is_whole(self) -> bool:
        """True if it has words, and not only a thought that was cut."""
        return bool(self.text.strip()) and ("<think>" not in self.text or "</think>" in self.text)

    @property
    def line(self) -> dict[str, Any]:
        """Its row."""
        if self.begins.asked is None:
            return {"text": self.text}
        asked = map(dict, self.begins.asked[self.place].messages)
        return {"messages": [*asked, {"role": ANSWERS, "content": self.text}]}

    def _decode(self, ids: Sequence[int]) -> str:
        # other special tokens stay, since they are tokenized back to themselves
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
