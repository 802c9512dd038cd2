"""Estimate stages, tokens, memory and disk of a job before it starts; only progress bars show time.

Numbers that nobody can know before a pilot has chosen layers are taken as if its budget were spent.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.files import nearest_folder
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.sources import find_beside_weights
from scale_surgery.errors import DataError, Problem
from scale_surgery.learning.stages import Kept, Stage, Work
from scale_surgery.planning.costs import PROCESS_BYTES
from scale_surgery.planning.plan import Plan
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import loaded_whole, translated
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.show.tables import format_bytes
from scale_surgery.text.answers import ChatReader
from scale_surgery.text.beginnings import find_beginnings
from scale_surgery.text.documents import Document, read_text
from scale_surgery.text.folders import texts_in
from scale_surgery.text.saved_datasets import DATA_FILES, share_of_rows
from scale_surgery.text.sources import TextSource, parse_source
from scale_surgery.text.text_files import ARRAY, LINES, TABLES, share_of_lines, suffix_of
from scale_surgery.training.arguments import choose_precision
from scale_surgery.training.memory import TRAINED_BYTES, forecast_measuring, forecast_memory, free_bytes
from scale_surgery.training.rank_layers import read_budget
from scale_surgery.training.rates import default_rate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# bytes in float32 of a pilot, which frees gradients at once: parameter and two moments
PILOT_BYTES = 12
SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 1000, 100_000


@dataclass(frozen=True)
class TokenCount:
    """About how many tokens there are to read, prompts included; or the least, where texts end nobody knows where."""

    tokens: int
    is_least: bool


@dataclass(frozen=True)
class ToSample:
    """Samples drawn from the base before its training.

    Attributes:
        texts: Texts, at most.
        tokens: Tokens in them, about.
        seconds: How long that takes by the speed of a few tokens; None if the base is too large to try.
    """

    texts: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class StageLine:
    """A stage before it starts.

    Attributes:
        name: Name of the stage.
        line: The line to type.
        is_done: Whether an earlier run did it.
        remark: Note on an option that the line lacks until an earlier stage chooses its value.
    """

    name: str
    line: str
    is_done: bool
    remark: str | None = None


@dataclass(frozen=True)
class Estimate:
    """Estimated tokens, memory and disk of a job.

    Attributes:
        stages: Its stages.
        tokens: Tokens to read in one pass, prompts included, about.
        learning_rate: Highest learning rate of the training.
        is_least: Whether there are more tokens, and nobody knows how many: of a dataset of the Hub, or a
            folder of compressed or .json files, that is longer than a sample of it.
        to_sample: What the base writes for rehearsal, unless an earlier run of it kept that; None if it writes nothing.
        memory_bytes: Peak memory of the largest stage, about: of a pilot without its activations.
        disk_bytes: Bytes of its folder, without base shards that reflinks or links share with MODEL.
        free_bytes: Free bytes there.
        missing_bytes: Bytes that have to be freed before the job can run; files of an earlier run count as written.
        notes: Stages that it leaves out, with the reason.
    """

    stages: tuple[StageLine, ...]
    tokens: int
    is_least: bool
    to_sample: ToSample | None
    learning_rate: float
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    missing_bytes: int
    notes: tuple[str, ...]

    @property
    def disk_problem(self) -> Problem | None:
        """Return the problem of missing disk space, or None."""
        if not self.missing_bytes:
            return None
        return Problem("job-without-space", needed=self.free_bytes + self.missing_bytes, free=self.free_bytes)


def estimate_cost(
    work: Work,
    stages: Sequence[Stage],
    checkpoint: Checkpoint,
    plan: Plan,
    kept: Mapping[str, Kept],
    notes: Sequence[str],
) -> Estimate:
    """Estimate tokens, memory and disk of a job."""
    folder = find_beside_weights(work.recipe.model, work.recipe.revision)
    tokenizer = need_tokenizer(folder, work.recipe.model, work.recipe.running)
    added = plan.costs.parameters_added
    if work.has_pilot:
        added = min(added, read_budget(work.recipe.ranking.budget, plan.costs.parameters_before))
    base_bytes = sum(info.bytes for info in checkpoint.tensors.values())
    count = count_tokens(work.recipe.data, tokenizer)
    calls = {stage.name: stage.call(kept) for stage in stages}
    memory = _peak_memory(work, plan, checkpoint, added)
    disk, free = _disk(work, base_bytes, added), shutil.disk_usage(nearest_folder(work.folder)).free
    # the models of a job share files by hard links
    inodes = (file.stat() for file in work.folder.rglob("*") if file.is_file())
    written = sum({(each.st_dev, each.st_ino): each.st_size for each in inodes}.values())
    return Estimate(
        stages=tuple(StageLine(name, call.line, name in kept, call.remark) for name, call in calls.items()),
        tokens=count.tokens,
        is_least=count.is_least,
        learning_rate=work.training.learning_rate or default_rate(plan),
        to_sample=None if "train" in kept else _to_sample(work, checkpoint, tokenizer, count.tokens, base_bytes),
        memory_bytes=memory,
        disk_bytes=disk,
        free_bytes=free,
        missing_bytes=max(0, disk - written - free),
        notes=(*notes, *_notes_on_memory(memory, work.recipe.running)),
    )


def _notes_on_memory(needed: int, run: RunOptions) -> Iterator[str]:
    """Generate a note if the device has less free memory than the largest stage takes."""
    device = run.placed().device
    if (free := free_bytes(device)) is not None and needed > free:
        yield (
            f"{device} has {format_bytes(free)} of free memory, and the largest stage takes about "
            f"{format_bytes(needed)}: give a smaller --batch-size or --sequence-length, or --set "
            "training.gradient_checkpointing=true"
        )


def _peak_memory(work: Work, plan: Plan, checkpoint: Checkpoint, added: int) -> int:
    """Memory of the stage that needs most: the expansion, the pilot, the training, or the measurements."""
    base_bytes = sum(info.bytes for info in checkpoint.tensors.values())
    settings, run = work.recipe.training, work.recipe.running
    length = choose_length(settings.sequence_length, {work.recipe.model: context_of(checkpoint.config)})
    precision = choose_precision(checkpoint.running_dtype, settings, run)
    candidates = [
        plan.costs.peak_memory_bytes,
        forecast_memory(plan, checkpoint, added, settings, precision, length),
    ]
    if work.routes:
        candidates.append(forecast_measuring(plan, checkpoint, settings.batch_size * length))
    if work.has_pilot:
        # the matrices of MLPs are about two thirds of a model; as they were, they stay in memory too
        trained = 2 * plan.costs.parameters_before // 3
        candidates.append(PROCESS_BYTES + base_bytes + PILOT_BYTES * trained)
    return max(candidates)


def _disk(work: Work, base_bytes: int, added: int) -> int:
    """Return the bytes that the folder will hold."""
    folders = 3 if work.routes else 2
    base = 0 if work.recipe.base_weights == "link" else base_bytes
    copies = folders if work.taking == "copy" else 1
    text_bytes = sum(parse_source(name).bytes for name in (*work.recipe.data, *work.recipe.old))
    # during training, moments of AdamW and float32 parameters are on disk too
    return round(base * copies + added * (4 * folders + TRAINED_BYTES) + 1.1 * text_bytes)


def _to_sample(
    work: Work, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, tokens: int, base_bytes: int
) -> ToSample | None:
    """Forecast the own samples of the base, and the time to draw them."""
    # imports torch
    from scale_surgery.training.base_samples import tokens_per_second
    from scale_surgery.training.sampling import sampling_of

    recipe, settings = work.recipe, work.recipe.training
    if not settings.rehearses_itself:
        return None
    context = {recipe.model: context_of(checkpoint.config)}
    sequence = choose_length(settings.sequence_length, context)
    together = settings.batch_size * settings.gradient_accumulation * recipe.processes
    steps = settings.steps or math.ceil(settings.epochs * math.ceil(tokens / (sequence * together)))
    batches = steps * settings.gradient_accumulation * recipe.processes
    length = sequence
    if settings.rehearsal_length is not None:
        length = choose_length(settings.rehearsal_length, context, "rehearsal_length")
    sampling = sampling_of(settings, batches, sequence, length)
    begins = find_beginnings(tokenizer, recipe.model, length, settings.rehearsal_prompts, raw=settings.rehearsal_raw)
    speed = None
    if base_bytes <= recipe.running.memory_bytes:
        with loaded_whole(checkpoint, recipe.model, recipe.running) as model:
            alone = expansion_disabled(model) if work.is_one_of_several else nullcontext()
            with alone, translated("model-not-run", recipe.model):
                speed = tokens_per_second(model, begins, sampling)
    return ToSample(sampling.count, sampling.tokens, None if speed is None else sampling.tokens / speed)


def count_tokens(files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> TokenCount:
    """Estimate the tokens of texts, by those of their beginnings."""
    counts = [_count(file, tokenizer) for file in files]
    return TokenCount(sum(count.tokens for count in counts), any(count.is_least for count in counts))


def _count(file: str, tokenizer: PreTrainedTokenizerBase) -> TokenCount:
    texts, begun = texts_in(parse_source(file)), list[TextSource]()
    count, characters, sample, last, chats = 0, -1, "", None, ChatReader(tokenizer)
    for text in texts:
        begun.append(text)
        # a file of JSON is read whole, as it may be one array
        most = None if suffix_of(text.path) == ARRAY else SAMPLED_DOCUMENTS - count
        for last in islice(read_text(text), most):
            words = last.prompt + last.text
            count, characters = count + 1, characters + len(words) + 1
            if last.chat is not None:
                chats.read(last.chat, last.source)  # an unreadable chat is refused before any work
            # texts may be larger than memory together
            sample += f"{words[:SAMPLED_CHARACTERS]}\n" if len(sample) <= SAMPLED_CHARACTERS else ""
        if count >= SAMPLED_DOCUMENTS:
            break
    if last is None:
        raise DataError(Problem("texts-without-documents", file))
    sample = sample[:-1][:SAMPLED_CHARACTERS]
    tokens = len(tokenizer(sample, verbose=False)["input_ids"])
    share = 1.0 if count < SAMPLED_DOCUMENTS else _share(texts, begun, last)
    return TokenCount(max(1, round(tokens * characters / len(sample) / (share or 1.0))), is_least=share is None)


def _share(texts: Sequence[TextSource], begun: Sequence[TextSource], last: Document) -> float | None:
    """Return the share of the texts before the document that was begun last; None if unknown."""
    text, suffix = begun[-1], suffix_of(begun[-1].path)
    # where a document stands ends with the number of its row or line
    number = last.source.removeprefix(f"{text.name}, ").rpartition(" ")[2]
    if text.is_on_hub:
        share = None
    elif text.is_folder or suffix in DATA_FILES:
        share = share_of_rows(text, int(number))
    elif suffix in (*LINES, *TABLES):
        share = share_of_lines(text.path, int(number))
    else:
        share = 1.0  # plain text, or an array: read to its end
    read = sum(text.bytes for text in begun[:-1])
    return None if share is None else (read + share * text.bytes) / (sum(text.bytes for text in texts) or 1)
