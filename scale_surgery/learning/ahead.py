"""What a job will take, before it starts: its stages, tokens, memory and disk; time is measured, never forecast.

Numbers that nobody can know before a pilot has chosen layers are taken as if its budget were spent.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.errors import CheckpointError
from scale_surgery.learning.stages import Kept, Stage, Work
from scale_surgery.learning.token_count import bytes_of, count_tokens
from scale_surgery.planning.costs import PROCESS_BYTES
from scale_surgery.planning.plan import Plan
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.tokenizer import need_tokenizer

# float32: the number that trains, its gradient, and two moments of AdamW
TRAINED_BYTES = 16
# numbers kept for the backward pass, for each token and layer, as a multiple of the hidden size
KEPT_ACTIVATIONS = 24
# logits, their gradient, and both in float32
LOGIT_BYTES = 16


@dataclass(frozen=True)
class StageAhead:
    """A stage before it starts: its line, and whether an earlier run did it."""

    name: str
    line: str
    is_done: bool


@dataclass(frozen=True)
class Ahead:
    """What a job will take.

    Attributes:
        stages: Its stages.
        tokens: Tokens to learn in one pass.
        memory_bytes: Peak memory of the largest stage.
        disk_bytes: What its folder will hold, but for base shards that reflinks or links share with MODEL.
        free_bytes: What is free there.
        notes: What it does not do, and why.
    """

    stages: tuple[StageAhead, ...]
    tokens: int
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What estimates are made of: numbers of the model, of the plan, and of the texts."""

    parameters: int
    base_bytes: int
    added: int
    layers: int
    hidden: int
    vocabulary: int
    length: int
    text_bytes: int
    expand_memory: int


def look_ahead(
    work: Work,
    stages: Sequence[Stage],
    checkpoint: Checkpoint,
    plan: Plan,
    kept: Mapping[str, Kept],
    notes: Sequence[str],
) -> Ahead:
    """Estimate what a job will take.

    Args:
        work: The job.
        stages: Its stages.
        checkpoint: The base model.
        plan: Its expansion; of all layers where a pilot will choose.
        kept: What stages that are done have kept.
        notes: What the job does not do, and why.

    Raises:
        DataError: If there is nothing to learn, or the model has no tokenizer.
        CheckpointError: If the disk has no room for it.
    """
    sizes = _sizes(work, checkpoint, plan)
    tokenizer = need_tokenizer(checkpoint.path, work.recipe.model, work.recipe.running)
    ahead = Ahead(
        stages=tuple(StageAhead(stage.name, stage.line(kept), stage.name in kept) for stage in stages),
        tokens=count_tokens(work.recipe.data, tokenizer),
        memory_bytes=_memory(work, sizes),
        disk_bytes=_disk(work, sizes),
        free_bytes=shutil.disk_usage(_existing(work.folder)).free,
        notes=tuple(notes),
    )
    left = ahead.disk_bytes - sum(file.stat().st_size for file in work.folder.rglob("*") if file.is_file())
    if left > ahead.free_bytes:
        raise CheckpointError(
            f"{work.folder}: about {left:,} bytes are needed, {ahead.free_bytes:,} are free. Free some space, choose "
            "another folder, or set base_weights to link."
        )
    return ahead


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())


def _sizes(work: Work, checkpoint: Checkpoint, plan: Plan) -> Sizes:
    recipe, costs = work.recipe, plan.costs
    added, base = costs.parameters_added, costs.parameters_before
    if recipe.chooses_layers:
        from scale_surgery.training.rank_layers import read_budget

        added = min(added, read_budget(recipe.ranking.budget, base))
    return Sizes(
        parameters=base,
        base_bytes=sum(info.bytes for info in checkpoint.tensors.values()),
        added=added,
        layers=plan.sizes.layers,
        hidden=plan.sizes.hidden,
        vocabulary=plan.sizes.vocabulary,
        length=choose_length(recipe.training.sequence_length, {recipe.model: context_of(checkpoint.config)}),
        text_bytes=sum(map(bytes_of, (*recipe.data, *recipe.old))),
        expand_memory=costs.peak_memory_bytes,
    )


def _memory(work: Work, sizes: Sizes) -> int:
    """Peak memory of the stage that needs most: the expansion, the pilot, or the training."""
    training, pilot = work.recipe.training, work.recipe.ranking

    def running(batch: int, length: int, trained: int, layers: float) -> int:
        batched = batch * min(length, sizes.length)
        kept = batched * (KEPT_ACTIVATIONS * 4 * sizes.hidden * layers + LOGIT_BYTES * sizes.vocabulary)
        return round(PROCESS_BYTES + sizes.base_bytes + TRAINED_BYTES * trained + kept)

    candidates = [sizes.expand_memory, running(training.batch_size, sizes.length, sizes.added, sizes.layers)]
    if work.recipe.chooses_layers:
        # the matrices of MLPs are about two thirds of a model
        trained = 2 * sizes.parameters // 3
        candidates.append(running(pilot.batch_size, pilot.sequence_length or sizes.length, trained, sizes.layers))
    return max(candidates)


def _disk(work: Work, sizes: Sizes) -> int:
    """What the folder will hold; the base's shards once, where they are copied."""
    folders = 3 if work.routes else 2
    base = 0 if work.recipe.base_weights == "link" else sizes.base_bytes
    copies = folders if work.taking == "copy" else 1
    # while it trains, AdamW's moments and the numbers in float32 are on disk too
    return round(base * copies + sizes.added * (4 * folders + TRAINED_BYTES) + 1.1 * sizes.text_bytes)
