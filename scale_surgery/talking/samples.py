"""Replacement for missing old text: samples from the base, starting with the token that begins a text."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from torch import Tensor

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.staging import check_output_files
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.fields import problems_of
from scale_surgery.progress import Track, no_track
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import translated
from scale_surgery.running.options import RunOptions
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.talking.speaker import loaded_speaker, open_subject
from scale_surgery.training.base_samples import begin_tokens, sample_texts
from scale_surgery.training.kept_samples import identity_in, kept_or_drawn, made_of
from scale_surgery.training.sampling import Sampling

# settings that apply, since samples are drawn from the base's whole distribution
SAMPLED_BY = ("max_new_tokens", "temperature", "seed")


@dataclass(frozen=True)
class Samples:
    """A file of texts that a base wrote, one {"text"} per line.

    Attributes:
        path: The file.
        texts: Number of texts.
        tokens: Tokens in them, with the ends of texts.
        found: Note that an earlier run of the same base drew them, or why the next will not find them; else empty.
    """

    path: Path
    texts: int
    tokens: int
    found: str


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
    """Let the base of a model write texts into a JSONL file, one {"text"} per line, as rehearsal does."""
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
    tokenizer, most = subject.tokenizer, settings.max_new_tokens + 1
    begins = begin_tokens(tokenizer, [], subject.name)
    length = most if subject.context is None else min(most, subject.context)
    temperature = 1.0 if settings.temperature is None else settings.temperature
    sampling = Sampling(count, length, temperature, settings.seed)
    with loaded_speaker(subject, run, track) as speaker:
        alone = expansion_disabled(speaker.network) if subject.is_expanded else nullcontext()
        with alone, translated("model-not-run", subject.name):
            # as in training with a base that is not quantised
            base = [*identity_in(subject.checkpoint), None]
            drawn_of = made_of(speaker.network, base, begins, sampling, tokenizer)
            own = kept_or_drawn(
                lambda: sample_texts(speaker.network, begins, sampling, tokenizer, track), drawn_of, None, track
            )
    samples = own.texts
    written = [_without_ends(samples[place]["input_ids"], tokenizer.eos_token_id) for place in range(count)]
    # other special tokens stay, since they are tokenized back to themselves
    texts = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in written]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(Problem("samples-empty", subject.name))
    write_text(Path(output), "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return Samples(Path(output), len(texts), len(samples.ids) - count, own.found)


def _without_ends(ids: Tensor, end: int | None) -> list[int]:
    """Return a sample without its start token and its end token: texts get theirs when they are read."""
    inside: list[int] = ids[1:].tolist()
    return inside[:-1] if inside and inside[-1] == end else inside
