"""Text sampled from a base model for its own rehearsal, stored with the run.

The file has one JSON object per sample and line, with the text for people and the tokens that are rehearsed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
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
from scale_surgery.text.beginnings import Beginnings, find_beginnings
from scale_surgery.text.sequences import Sequences, concatenate
from scale_surgery.text.tokenizing import pack, start_tokens
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
    name = folder.path.name
    context = {name: context_of(folder.config)}
    sequence = choose_length(settings.sequence_length, context)
    length = sequence
    if settings.rehearsal_length is not None:
        length = choose_length(settings.rehearsal_length, context, "rehearsal_length")
    sampling = sampling_of(settings, batches, sequence, length)
    begins = find_beginnings(tokenizer, name, length, settings.rehearsal_prompts, raw=settings.rehearsal_raw)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    check_token_ids(name, begins.highest, vocabulary, "the rehearsal prompts")

    def draw() -> Sequences:
        with quiet_transformers():
            return sample_base(model, begins, sampling, track)

    base = [*identity_of(folder.manifest), settings.base_quantization]
    own = kept_or_drawn(draw, made_of(model, base, begins, sampling), cache, track)
    # a sample of a chat is rehearsed whole, as it was: instruction, answer and the end of the turn. The divergence is
    # computed over all of it and not over the answer alone. It compares distributions, so words of the instruction are
    # not learned as text; that the model reads them as its base does is a part of answering as its base does
    texts = own.texts if begins.asked else as_documents(own.texts, tokenizer)
    return replace(own, texts=texts, begun=begins.describe(len(own.texts)))


def as_documents(samples: Sequences, tokenizer: Any) -> Sequences:
    """Return the samples without their first token if the tokenizer starts no document with it."""
    if start_tokens(tokenizer):
        return samples
    # otherwise a model could tell samples from documents
    cut = (samples[place]["input_ids"].int()[1:] for place in range(len(samples)))
    return concatenate(Sequences(ids, ids, (0, len(ids))) for ids in cut)


def as_learned(samples: Sequences, settings: TrainingSettings, checkpoint: Checkpoint, tokenizer: Any) -> Sequences:
    """Return samples in the same form as the texts to learn: packed, or one per sequence."""
    # if the form differed, a model could tell them apart: it would stay at its base at the start of every sequence, and
    # learn only in the middle of packed ones
    length = choose_length(settings.sequence_length, {checkpoint.path.name: context_of(checkpoint.config)})
    return pack(_shifted(samples, length), length, start_tokens(tokenizer)) if settings.packing else samples


def _shifted(samples: Sequences, length: int) -> Sequences:
    """Drop half of the first sample if it fills a sequence, so that not every long sample starts a sequence."""
    first, second = samples.starts[:2]
    cut = length // 2 if second - first >= length else 0
    starts = (0, *(start - cut for start in samples.starts[1:]))
    return Sequences(samples.ids[cut:], samples.labels[cut:], starts)


def sample_base(model: Any, begins: Beginnings, sampling: Sampling, track: Track) -> Sequences:
    """Sample texts from the base inside an expanded model: `sample_texts` with the expansion disabled."""
    with expansion_disabled(model):
        return sample_texts(model, begins, sampling, track)


def sample_texts(model: Any, begins: Beginnings, sampling: Sampling, track: Track) -> Sequences:
    """Sample texts from a model, each up to and including the token that ends it."""
    parts: list[Sequences] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        evaluating(model),
        track("samples", sampling.tokens) as advance,
    ):
        torch.manual_seed(sampling.seed)
        progress = _Progress(sampling, begins, advance)
        for places in _turns(sampling, begins.lengths, parts):
            begun = [begins.ids[place] for place in places]
            made = _generate(model, begun, sampling, begins.ends, progress.take)
            parts += [_row(ids, len(begun[0]), begins.ends) for ids in made.cpu()]
            progress.end(parts)
    return concatenate(parts if sampling.enough is None else _until(parts, sampling.enough))


def _turns(sampling: Sampling, lengths: Sequence[int], parts: Sequence[Sequences]) -> Iterator[list[int]]:
    """Generate batches of texts until those that were sampled are enough."""
    for places in sampling.batches(lengths):
        while places and (rows := sampling.missing(len(parts), sum(part.tokens for part in parts))):
            yield places[:rows]
            places = places[rows:]


def _until(parts: Sequence[Sequences], enough: int) -> list[Sequences]:
    """Return the first texts that together reach `enough` tokens."""
    before = accumulate((part.tokens for part in parts), initial=0)
    return [part for part, tokens in zip(parts, before, strict=False) if tokens < enough]


class _Progress:
    """Progress of sampling, token by token."""

    def __init__(self, sampling: Sampling, begins: Beginnings, advance: Progress) -> None:
        self.sampling, self.ends, self.advance = sampling, torch.tensor(begins.ends, dtype=torch.long), advance
        # tokens of complete batches, and these plus the current batch
        self.tokens = self.reached = self.done = self.steps = 0
        self.note, self.began = sampling.describe(begins.lengths), time.monotonic()
        advance(0, Finding(self.note, self.note))

    def take(self, ids: Tensor) -> None:
        """Count the newest token of each row that has not ended."""
        self.reached += int((~torch.isin(ids[:, -2], self.ends.to(ids.device))).sum())
        self.steps += 1
        # the last batch may hold more tokens than are needed, and goes on until its longest row ends
        left, share = self.sampling.tokens - self.tokens, ids.shape[1] / self.sampling.length
        self._report(min(self.reached, self.tokens + int(left * share)), is_timed=self.steps == TIMED)

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


def tokens_per_second(model: Any, begins: Beginnings, sampling: Sampling) -> float | None:
    """Measure over a few tokens how fast a model writes texts; None if the first has no second token."""
    times: list[float] = []
    begun = [begins.ids[0]] * sampling.rows_at_once(begins.lengths)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), evaluating(model):
        tried = Sampling(len(begun), min(len(begun[0]) + TIMED, sampling.length), 1.0, 0)
        _generate(model, begun, tried, begins.ends, lambda ids: times.append(time.monotonic()))
    return len(begun) * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None


def _generate(
    model: Any,
    begun: Sequence[Sequence[int]],
    sampling: Sampling,
    ends: Sequence[int],
    on_token: Callable[[Tensor], None],
) -> Tensor:
    """Sample from the base's whole distribution, from beginnings of equal lengths."""
    ids = torch.tensor([list(begin) for begin in begun], device=model.device)
    left = sampling.length - ids.shape[1]
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": left if sampling.new_tokens is None else min(left, sampling.new_tokens),
        "eos_token_id": list(ends) or None,
        # what follows the end of a row is cut
        "pad_token_id": min(ends, default=0),
    }
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made: Tensor = generate_with(model, inputs, on_token=on_token, **options)
    return made


def _row(ids: Tensor, begun: int, ends: Sequence[int]) -> Sequences:
    """Return a sample, cut after its end token."""
    found = torch.isin(ids[begun:], torch.tensor(ends, dtype=ids.dtype)).nonzero()
    kept = ids[: begun + int(found[0]) + 1] if len(found) else ids
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
