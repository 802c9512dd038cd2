"""The drift of an expanded model's base stream from the base model's, layer by layer, on probe text.

One model in memory gives both: with its expansion disabled it is its base, bit for bit. A routed model is compared by
its adapt path, because its preserve path is the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.evidence.eval_targets import choose_lengths, open_subjects, sequences_of
from scale_surgery.evidence.report_records import Streams
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import tokenizer_alone
from scale_surgery.progress import Progress, Track
from scale_surgery.running.drift import cosines, largest_difference
from scale_surgery.running.freeze import base_states, expansion_disabled
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import REPORT_WINDOWS, Probes, RunOptions

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.evidence.probes import Layer
    from scale_surgery.running.prompts import Batch


def compare_streams(
    folder: Folder,
    texts: Sequence[str | Path],
    sequence_length: int | None,
    run: RunOptions,
    track: Track,
) -> Streams:
    """Run an expanded model and the base inside it on probe text, and compare the base stream after each layer."""
    path, plan = folder.path, folder.manifest.plan
    if texts:
        batches = _text_batches(folder, texts, sequence_length, run)
        source = ", ".join(map(str, texts))
    else:
        batches, source = _prompt_batches(folder, run)
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    stored = replace(run, dtype=None)  # models are compared in their stored dtype
    with track("base stream", tokens) as advance, loaded_whole(folder.of_all, path.name, stored) as model:
        layers, dtype = _compare(model, plan.request.name, batches, plan.sizes.hidden, advance)
        is_routed = bool(getattr(model, "is_routing_enabled", False))
    return Streams(layers, source, tokens, dtype, "adapt" if is_routed else "expanded")


def _prompt_batches(folder: Folder, run: RunOptions) -> tuple[list[Batch], str]:
    """Return the prompts of `verify` as one batch; random ids if the model has no tokenizer."""
    from scale_surgery.running.prompts import encode_prompts

    # this expansion does not read the new tokens of another one
    is_other = folder.of_all.manifest.adds_tokens and not folder.manifest.adds_tokens
    tokenizer = tokenizer_alone(folder, run) if is_other else None
    encoded = encode_prompts(folder.path, Probes(max_new_tokens=0), run, tokenizer)
    source = "built-in prompts" if encoded.tokenizer is not None else "random ids, there is no tokenizer"
    return [encoded.batch], source


def _text_batches(folder: Folder, texts: Sequence[str | Path], length: int | None, run: RunOptions) -> list[Batch]:
    """Return batches of consecutive windows of the texts, including prompts of questions."""
    from scale_surgery.running.prompts import Batch
    from scale_surgery.text.documents import read_files
    from scale_surgery.text.tokenizing import collate, start_tokens

    documents = [document for file_documents in read_files(texts).values() for document in file_documents]
    (subject,) = open_subjects([folder.path], run)
    length, _ = choose_lengths([subject], length, None)
    called, tokenizer = " ".join(map(str, texts)), subject.tokenizer_of(folder.manifest.name)
    # each window begins with the tokens that start a text, and the next one reads those whose place they take
    step = max(1, length - len(start_tokens(tokenizer)))
    windows = sequences_of(subject, tokenizer, {called: documents}, length, step)[called]
    batches = []
    at_once = run.windows(REPORT_WINDOWS)
    for start in range(0, len(windows), at_once):
        rows = collate([windows[row] for row in range(start, min(start + at_once, len(windows)))])
        batches.append(Batch(rows["input_ids"], rows["attention_mask"]))
    return batches


def _compare(
    model: Any, name: str, batches: Sequence[Batch], width: int, advance: Progress
) -> tuple[tuple[Layer, ...], str]:
    from scale_surgery.evidence.probes import Layer

    drifts: list[list[float]] = []
    sums: list[list[float]] = []
    dtype, tokens = "", 0
    for batch in batches:
        pairs = list(_states(model, name, batch, width))
        drifts.append([largest_difference(*pair) for pair in pairs])
        sums.append([float(cosines(*pair).sum()) for pair in pairs])
        dtype = str(pairs[0][0].dtype).removeprefix("torch.")
        tokens += int(batch.mask.sum())
        advance(int(batch.mask.sum()))
    # NaN is the worst, but Python's max does not return it
    largest = [math.nan if any(map(math.isnan, column)) else max(column) for column in zip(*drifts, strict=True)]
    means = [sum(column) / tokens for column in zip(*sums, strict=True)]
    layers = zip(range(-1, len(means)), largest, means, strict=False)
    return tuple(Layer(layer, drift, cosine, drift == 0) for layer, drift, cosine in layers), dtype


def _states(model: Any, name: str, batch: Batch, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Generate the base stream of the base and of the expanded model after each layer, (tokens, d), without padding."""
    with expansion_disabled(model):
        before = base_states(model, _run(model, batch))
    # a model with duplicated layers has only one expansion
    with model.use_expansion(name) if hasattr(model, "use_expansion") else nullcontext():
        after = base_states(model, _run(model, batch))
    real = batch.mask.bool().to(before[0].device)
    for first, second in zip(before, after, strict=True):
        yield first[real][:, :width], second[real][:, :width]


def _run(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Return the hidden states of the model, without running its head."""
    import torch

    with torch.no_grad():
        inputs = batch.inputs(next(model.parameters()).device)
        output = model.base_model(**inputs, output_hidden_states=True, use_cache=False)
    states: tuple[Tensor, ...] = output.hidden_states
    return states
