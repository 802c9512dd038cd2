"""Text sampled from a base model for its own rehearsal, stored with the run.

The file has one JSON object per sample and line, with the text for people and the tokens that are rehearsed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import DataError, Problem, TrainingError, problems_of
from scale_surgery.folder.folder import Folder
from scale_surgery.progress import Finding, Progress, Track
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import quiet_transformers
from scale_surgery.running.loss import evaluating
from scale_surgery.running.own_generation import generate_with
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.text.documents import read_questions
from scale_surgery.text.sequences import Sequences, concatenate
from scale_surgery.text.tokenizing import pack, tokenize_prompts
from scale_surgery.training.kept_samples import OwnText, identity_of, kept_or_drawn, made_of
from scale_surgery.training.sampling import Sampling, sampling_of
from scale_surgery.training.settings import TrainingSettings

# tokens per row after which the speed is known; seconds of remaining time that are worth a line
TIMED, WAIT = 4, 10.0


def write_own_text(
    model: Any,
    folder: Folder,
    tokenizer: Any,
    settings: TrainingSettings,
    batches: int,
    cache: Path | None,
    track: Track,
) -> OwnText:
    """Let the base write its rehearsal text, or find the text of an earlier run."""
    name, prompts = folder.path.name, settings.rehearsal_prompts
    context = {name: context_of(folder.config)}
    sequence = choose_length(settings.sequence_length, context)
    length = choose_length(settings.rehearsal_length or settings.sequence_length, context)
    sampling = sampling_of(settings, batches, sequence, length)
    begins = begin_tokens(tokenizer, read_questions([Path(prompts)]) if prompts else [], name)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    check_token_ids(name, max(chain.from_iterable(begins), default=0), vocabulary, "the rehearsal prompts")

    def draw() -> Sequences:
        with quiet_transformers():
            return sample_base(model, begins, sampling, tokenizer, track)

    base = [*identity_of(folder.manifest), settings.base_quantization]
    own = kept_or_drawn(draw, made_of(model, base, begins, sampling, tokenizer), cache, track)
    return own if prompts else replace(own, texts=as_documents(own.texts, tokenizer))


def as_documents(samples: Sequences, tokenizer: Any) -> Sequences:
    """Return the samples without their first token if the tokenizer starts no document with it."""
    (start,) = tokenize_prompts([""], tokenizer)
    if start:
        return samples
    # otherwise a model could tell samples from documents
    cut = (samples[place]["input_ids"].int()[1:] for place in range(len(samples)))
    return concatenate(Sequences(ids, ids, (0, len(ids))) for ids in cut)


def as_learned(samples: Sequences, settings: TrainingSettings, checkpoint: Checkpoint) -> Sequences:
    """Return samples in the same form as the texts to learn: packed, or one per sequence."""
    # if the form differed, a model could tell them apart: it would stay at its base at the start of every sequence, and
    # learn only in the middle of packed ones
    length = choose_length(settings.sequence_length, {checkpoint.path.name: context_of(checkpoint.config)})
    return pack(_shifted(samples, length), length) if settings.packing else samples


def _shifted(samples: Sequences, length: int) -> Sequences:
    """Drop half of the first sample if it fills a sequence, so that not every long sample starts a sequence."""
    first, second = samples.starts[:2]
    cut = length // 2 if second - first >= length else 0
    starts = (0, *(start - cut for start in samples.starts[1:]))
    return Sequences(samples.ids[cut:], samples.labels[cut:], starts)


def begin_tokens(tokenizer: Any, prompts: Sequence[str], place: str) -> list[list[int]]:
    """Return the token ids at the start of samples: the prompts, or the token that starts a text."""
    if prompts:
        return [ids for ids in tokenize_prompts(prompts, tokenizer) if ids]
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise DataError(Problem("first-token-missing", place))
    return [[begin]]


def sample_base(
    model: Any, begins: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, track: Track
) -> Sequences:
    """Sample texts from the base inside an expanded model: `sample_texts` with the expansion disabled."""
    with expansion_disabled(model):
        return sample_texts(model, begins, sampling, tokenizer, track)


def sample_texts(
    model: Any, begins: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, track: Track
) -> Sequences:
    """Sample texts from a model."""
    parts: list[Sequences] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        evaluating(model),
        track("samples", sampling.tokens) as advance,
    ):
        torch.manual_seed(sampling.seed)
        progress = _Progress(sampling, len(begins), tokenizer.eos_token_id, advance)
        for begin, places in _in_turns(begins, sampling.count, sampling.rows(len(begins))):
            made = _generate(model, begin, len(places), sampling, tokenizer, progress.take)
            drawn = [_row(ids, len(begin), tokenizer.eos_token_id) for ids in made.cpu()]
            parts += drawn
            progress.end(parts)
            if sampling.enough is not None and progress.tokens >= sampling.enough:
                parts = _until(parts, sampling.enough)
                break
    return concatenate(parts)


def _until(parts: Sequence[Sequences], enough: int) -> list[Sequences]:
    """Return the first texts that together reach `enough` tokens."""
    before = accumulate((part.tokens for part in parts), initial=0)
    return [part for part, tokens in zip(parts, before, strict=False) if tokens < enough]


class _Progress:
    """Progress of sampling, token by token."""

    def __init__(self, sampling: Sampling, begins: int, end: int | None, advance: Progress) -> None:
        self.sampling, self.end_id, self.advance = sampling, end, advance
        # tokens of complete batches, and these plus the current batch
        self.tokens = self.reached = self.done = self.steps = 0
        self.note, self.began = sampling.describe(begins), time.monotonic()
        advance(0, Finding(self.note, self.note))

    def take(self, ids: Tensor) -> None:
        """Count the newest token of each row that has not ended."""
        self.reached += len(ids) if self.end_id is None else int((ids[:, -2] != self.end_id).sum())
        self.steps += 1
        self._report(self.reached, is_timed=self.steps == TIMED)

    def end(self, parts: Sequence[Sequences]) -> None:
        """Count all samples at the end of a batch."""
        self.tokens = self.reached = sum(part.tokens for part in parts)
        # texts may end early, with fewer tokens than forecast
        self._report(max(self.tokens, self.sampling.tokens * len(parts) // self.sampling.count), is_timed=False)

    def _report(self, reached: int, *, is_timed: bool) -> None:
        before, self.done = self.done, max(self.done, min(reached, self.sampling.tokens))
        seconds = (time.monotonic() - self.began) / max(1, self.done) * (self.sampling.tokens - self.done)
        is_long = is_timed and seconds > WAIT
        self.advance(self.done - before, Finding(self.note, self.note) if is_long else self.note)


def tokens_per_second(model: Any, begin: Sequence[int], rows: int, tokenizer: Any) -> float | None:
    """Measure over a few tokens how fast a model writes `rows` texts at once; None if all end at their first token."""
    times: list[float] = []
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), evaluating(model):
        sampling = Sampling(rows, len(begin) + TIMED, 1.0, 0)
        _generate(model, begin, rows, sampling, tokenizer, lambda ids: times.append(time.monotonic()))
    return rows * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None


def _in_turns(begins: Sequence[Sequence[int]], count: int, rows: int) -> list[tuple[Sequence[int], range]]:
    """Return the batches of samples, each with one prompt; prompts get equal shares and take turns."""
    each = [count // len(begins) + (place < count % len(begins)) for place in range(len(begins))]
    batches = [
        (begin, range(start, min(start + rows, total)))
        for begin, total in zip(begins, each, strict=True)
        for start in range(0, total, rows)
    ]
    return sorted(batches, key=lambda batch: batch[1].start)


def _generate(
    model: Any,
    begin: Sequence[int],
    rows: int,
    sampling: Sampling,
    tokenizer: Any,
    on_token: Callable[[Tensor], None],
) -> Tensor:
    """Sample from the base's whole distribution."""
    ids = torch.tensor([list(begin)[: sampling.length - 1]] * rows, device=model.device)
    end = tokenizer.eos_token_id
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": sampling.length - ids.shape[1],
        "eos_token_id": end,
        "pad_token_id": 0 if end is None else end,
    }
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made: Tensor = generate_with(model, inputs, on_token=on_token, **options)
    return made


def _row(ids: Tensor, begun: int, end: int | None) -> Sequences:
    """Return a sample, cut after its end token."""
    ends = (ids[begun:] == end).nonzero() if end is not None else ids[:0]
    kept = ids[: begun + int(ends[0]) + 1] if len(ends) else ids
    return Sequences(kept.int(), kept.int(), (0, len(kept)))


def write_samples(file: Path, samples: Sequences, tokenizer: Any) -> None:
    """Write samples, for people and for a resumed run."""
    rows = [samples[place]["input_ids"].tolist() for place in range(len(samples))]
    write_text(file, "".join(json.dumps({"text": tokenizer.decode(ids), "ids": ids}) + "\n" for ids in rows))


def read_samples(file: Path) -> Sequences:
    """Read the samples of an interrupted run."""
    try:
        rows = [json.loads(line)["ids"] for line in read_bytes(file).decode().splitlines()]
        parts = [torch.tensor(ids, dtype=torch.int32) for ids in rows]
        return concatenate(Sequences(ids, ids, (0, len(ids))) for ids in parts)
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise TrainingError(Problem("samples-unreadable", file, *problems_of(error))) from error
