"""Text that a base model writes itself, for rehearsal: sampled from its own distribution, and kept with the run.

The file has a line of JSON for each sample, with the text to read and the tokens that are rehearsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import DataError, TrainingError
from scale_surgery.progress import Track
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import quiet_transformers
from scale_surgery.running.loss import evaluating
from scale_surgery.running.own_generation import generate_with
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.text.documents import read_questions
from scale_surgery.text.sequences import Sequences, concatenate
from scale_surgery.text.tokenizing import pack, tokenize_prompts
from scale_surgery.training.settings import TrainingSettings
from scale_surgery.training.training_texts import made_by_one

# samples in one call of generate, of short sequences; fewer of long ones
TOGETHER, TOKENS_TOGETHER = 64, 16_384
GIVE_BEGINNINGS = "Give beginnings with --set rehearsal_prompts=FILE, or texts with --rehearse FILE."


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn; `length` is in tokens, the first one included."""

    count: int
    length: int
    temperature: float
    seed: int


def sample_rehearsal(
    model: Any, checkpoint: Checkpoint, tokenizer: Any, settings: TrainingSettings, processes: Any, track: Track
) -> Sequences:
    """Let the base write its rehearsal text, in one process for all."""
    samples: Sequences = made_by_one(
        processes, lambda: _write_samples(model.to(processes.device), checkpoint, tokenizer, settings, track)
    )
    return samples


def _write_samples(
    model: Any, checkpoint: Checkpoint, tokenizer: Any, settings: TrainingSettings, track: Track
) -> Sequences:
    name, prompts = checkpoint.path.name, settings.rehearsal_prompts
    context = {name: context_of(checkpoint.config)}
    length = choose_length(settings.rehearsal_length or settings.sequence_length, context)
    begins = begin_tokens(tokenizer, read_questions([Path(prompts)]) if prompts else [], name)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    check_token_ids(name, max(chain.from_iterable(begins), default=0), vocabulary, "the rehearsal prompts")
    sampling = Sampling(settings.rehearsal_samples, length, settings.rehearsal_temperature, settings.seed)
    with quiet_transformers():
        samples = sample_base(model, begins, sampling, tokenizer, track)
    return samples if prompts else as_documents(samples, tokenizer)


def as_documents(samples: Sequences, tokenizer: Any) -> Sequences:
    """Samples without their first token, where the tokenizer starts no document with it."""
    (start,) = tokenize_prompts([""], tokenizer)
    if start:
        return samples
    # otherwise a model could tell samples from documents
    cut = (samples[place]["input_ids"].int()[1:] for place in range(len(samples)))
    return concatenate(Sequences(ids, ids, (0, len(ids))) for ids in cut)


def as_learned(samples: Sequences, settings: TrainingSettings, checkpoint: Checkpoint) -> Sequences:
    """Samples in the form of the texts to learn: packed like them, or each by itself."""
    # where the form tells them apart, a model keeps to its base at the start of every sequence, and learns only in the
    # middle of packed ones
    length = choose_length(settings.sequence_length, {checkpoint.path.name: context_of(checkpoint.config)})
    return pack(_shifted(samples, length), length) if settings.packing else samples


def _shifted(samples: Sequences, length: int) -> Sequences:
    """Samples without half of the first one where it fills a sequence, so that not all long ones begin a sequence."""
    first, second = samples.starts[:2]
    cut = length // 2 if second - first >= length else 0
    starts = (0, *(start - cut for start in samples.starts[1:]))
    return Sequences(samples.ids[cut:], samples.labels[cut:], starts)


def begin_tokens(tokenizer: Any, prompts: Sequence[str], place: str, advice: str = GIVE_BEGINNINGS) -> list[list[int]]:
    """Token ids with which samples begin: prompts, or the token with which texts begin."""
    if prompts:
        return [ids for ids in tokenize_prompts(prompts, tokenizer) if ids]
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise DataError(
            f"{place}: its tokenizer has no token that begins a text, so its base cannot write one. {advice}"
        )
    return [[begin]]


def sample_base(
    model: Any, begins: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, track: Track
) -> Sequences:
    """Let the base inside an expanded model write text: `sample_texts`, with the expansion switched off."""
    with expansion_disabled(model):
        return sample_texts(model, begins, sampling, tokenizer, track)


def sample_texts(
    model: Any, begins: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, track: Track
) -> Sequences:
    """Let a model write text."""
    parts: list[Sequences] = []
    rows = max(1, min(TOGETHER, TOKENS_TOGETHER // sampling.length))
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        evaluating(model),
        track("samples", sampling.count) as advance,
    ):
        torch.manual_seed(sampling.seed)
        for begin, places in _in_turns(begins, sampling.count, rows):
            made = _generate(model, begin, len(places), sampling, tokenizer)
            parts += [_row(ids, len(begin), tokenizer.eos_token_id) for ids in made.cpu()]
            advance(len(places))
    return concatenate(parts)


def _in_turns(begins: Sequence[Sequence[int]], count: int, rows: int) -> list[tuple[Sequence[int], range]]:
    """Batches of samples, each of one beginning; beginnings take equal parts."""
    each = [count // len(begins) + (place < count % len(begins)) for place in range(len(begins))]
    return [
        (begin, range(start, min(start + rows, total)))
        for begin, total in zip(begins, each, strict=True)
        for start in range(0, total, rows)
    ]


def _generate(model: Any, begin: Sequence[int], rows: int, sampling: Sampling, tokenizer: Any) -> Tensor:
    """Sample from the base's own distribution, whole."""
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
    made: Tensor = generate_with(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)
    return made


def _row(ids: Tensor, begun: int, end: int | None) -> Sequences:
    """A sample without what follows its end."""
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
        raise TrainingError(f"{file}: the samples of this run cannot be read ({error}). Begin it anew.") from error
