"""What a job will take, before it starts: time, memory and disk of each stage; estimates, right within a factor of few.

Time is arithmetic over what this machine does: a product of the model's own width is timed for a moment. Numbers that
nobody can know before a pilot has chosen layers are taken as if its budget were spent.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.errors import CheckpointError
from scale_surgery.learning.hold_out import LARGEST_SHARE
from scale_surgery.learning.stages import Kept, Stage, Work
from scale_surgery.learning.token_count import bytes_of, count_tokens
from scale_surgery.planning.costs import BYTES_PER_SECOND, PROCESS_BYTES
from scale_surgery.planning.plan import Plan
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.device import choose_device
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.training.settings import TrainingSettings

if TYPE_CHECKING:
    from torch import device as Device

# share of the speed of products that whole models reach: norms, softmaxes and the loss are none; and what a layer costs
# beside them in one pass
EFFICIENCY = 0.3
SECONDS_PER_LAYER = 1e-3
START_SECONDS = 2.0
TIMED_SECONDS = 0.2
# passes of weights through memory that verify and report take, on few tokens
CHECKING_PASSES = 12
# float32: the number that trains, its gradient, and two moments of AdamW
TRAINED_BYTES = 16
# numbers kept for the backward pass, for each token and layer, as a multiple of the hidden size
KEPT_ACTIVATIONS = 24
# logits, their gradient, and both in float32
LOGIT_BYTES = 16


@dataclass(frozen=True)
class StageAhead:
    """A stage before it starts: its line, the seconds that it may take, and whether an earlier run did it."""

    name: str
    line: str
    seconds: float
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

    @property
    def seconds(self) -> float:
        """Seconds of the stages that are left."""
        return sum(stage.seconds for stage in self.stages if not stage.is_done)


@dataclass(frozen=True)
class Sizes:
    """What estimates are made of: numbers of the model, of the plan, and of the texts, in tokens."""

    parameters: int
    base_bytes: int
    added: int
    forward: float
    reached: float
    carries_base: bool
    layers: int
    hidden: int
    vocabulary: int
    length: int
    tokens: Mapping[str, int]
    text_bytes: int
    expand_seconds: float
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
    seconds = _seconds(work, sizes)
    ahead = Ahead(
        stages=tuple(
            StageAhead(stage.name, stage.line(kept), START_SECONDS + seconds.get(stage.name, 0.0), stage.name in kept)
            for stage in stages
        ),
        tokens=sizes.tokens["learn"],
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
    chosen = not recipe.chooses_layers
    added, base = costs.parameters_added, costs.parameters_before
    if not chosen:
        from scale_surgery.training.budget import read_budget

        added = min(added, read_budget(recipe.ranking.budget, base))
    share = added / max(1, costs.parameters_added)
    layers = plan.sizes.layers
    first = costs.up_stream_from if chosen else round(layers * (1 - share))
    return Sizes(
        parameters=base,
        base_bytes=sum(info.bytes for info in checkpoint.tensors.values()),
        added=added,
        forward=1 + (costs.forward_factor - 1) * share,
        reached=(layers - first) / layers,
        carries_base=plan.variant in plan.method.preserving,
        layers=layers,
        hidden=plan.sizes.hidden,
        vocabulary=plan.sizes.vocabulary,
        length=choose_length(recipe.training.sequence_length, {recipe.model: context_of(checkpoint.config)}),
        tokens=_tokens(work, checkpoint),
        text_bytes=sum(map(bytes_of, (*recipe.data, *recipe.old))),
        expand_seconds=costs.seconds * share,
        expand_memory=costs.peak_memory_bytes,
    )


def _tokens(work: Work, checkpoint: Checkpoint) -> dict[str, int]:
    """Tokens of each part, by those of the beginning of the texts."""
    recipe = work.recipe
    tokenizer = need_tokenizer(checkpoint.path, recipe.model, recipe.running)
    found = {"learn": count_tokens(recipe.data, tokenizer), "old": count_tokens(recipe.old, tokenizer)}
    settings = recipe.hold_out
    for side, whole, share in (("new", "learn", settings.share), ("old", "old", LARGEST_SHARE)):
        # a token has about four characters
        found[f"{side} aside"] = round(min(share * found[whole], settings.most_characters / 4))
    return found


def _seconds(work: Work, sizes: Sizes) -> dict[str, float]:
    """Seconds by the name of a stage."""
    recipe, tokens = work.recipe, sizes.tokens
    speed = EFFICIENCY * _products_per_second(sizes, work)
    # of each token: every weight once, and keys and values of its whole sequence
    forward = (2 * sizes.parameters + 4 * sizes.layers * sizes.length * sizes.hidden) / speed
    overhead = SECONDS_PER_LAYER * sizes.layers
    copying, loading = sizes.base_bytes / BYTES_PER_SECOND, 2 * sizes.base_bytes / BYTES_PER_SECOND

    def passes(count: float, times: float) -> float:
        return times * (count * forward + math.ceil(count / (8 * sizes.length)) * overhead)

    training = recipe.training
    step = training.batch_size * training.gradient_accumulation * sizes.length
    steps = training.steps or max(1, math.ceil(tokens["learn"] * training.epochs / step))
    pilot_tokens = min(recipe.pilot.tokens, 4 * tokens["learn"])
    measured = tokens["new aside"] + tokens["old aside"]
    # the base writes token by token
    written = training.rehearsal_samples * sizes.length if training.rehearses_itself else 0
    ahead = {
        "texts-new": sizes.text_bytes / 2e7,
        "texts-old": sizes.text_bytes / 2e7,
        "layers": min(60 * recipe.pilot.minutes, passes(pilot_tokens, 3)) + passes(tokens["old aside"], 6) + loading,
        "expand": sizes.expand_seconds + copying,
        # ten measurements during the run
        "train": steps
        * (step * forward * passes_of_a_step(sizes, training) + 3 * training.gradient_accumulation * overhead)
        + passes(measured, 12 * sizes.forward)
        + passes(written, 2)
        + loading
        + copying,
        "route": copying,
        "calibrate": passes(measured, 2 * sizes.forward) + loading,
        "evaluate": passes(measured, 2 + 3 * sizes.forward) + 2 * loading,
        "verify": CHECKING_PASSES * (loading + passes(162, 1)),
        "report": CHECKING_PASSES * (loading + passes(162, 1)),
    }
    return ahead


def passes_of_a_step(sizes: Sizes, training: TrainingSettings) -> float:
    """Forward passes of the base that a training step is as long as, over the tokens to learn.

    Args:
        sizes: Numbers of the model and of the plan.
        training: How it is trained.
    """
    back = sizes.forward * (1 + 2 * sizes.reached)
    # the base's predictions come from the same forward where its stream stays the base's, else from one more
    beside = back if sizes.carries_base else back + 1
    return back + (beside * training.rehearsed_rows / training.batch_size if training.rehearse else 0.0)


def _products_per_second(sizes: Sizes, work: Work) -> float:
    """Floating point operations a second of a product that is as wide as the model, where it will run."""
    import torch

    place = torch.device(choose_device(work.recipe.running.device))
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    one = torch.ones(1024, sizes.hidden, device=place, dtype=dtype)
    other = torch.ones(sizes.hidden, 4 * sizes.hidden, device=place, dtype=dtype)
    rounds = 0
    _wait(place)
    one @ other
    _wait(place)
    started = time.perf_counter()
    while time.perf_counter() - started < TIMED_SECONDS:
        one @ other
        _wait(place)
        rounds += 1
    return rounds * 2 * one.numel() * other.shape[1] / (time.perf_counter() - started)


def _wait(place: Device) -> None:
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _memory(work: Work, sizes: Sizes) -> int:
    """Peak memory of the stage that needs most: the expansion, the pilots, or the training."""
    training, pilot = work.recipe.training, work.recipe.pilot

    def running(batch: int, length: int, trained: int, layers: float) -> int:
        batched = batch * min(length, sizes.length)
        kept = batched * (KEPT_ACTIVATIONS * 4 * sizes.hidden * layers + LOGIT_BYTES * sizes.vocabulary)
        return round(PROCESS_BYTES + sizes.base_bytes + TRAINED_BYTES * trained + kept)

    candidates = [sizes.expand_memory, running(training.batch_size, sizes.length, sizes.added, sizes.layers)]
    if work.recipe.chooses_layers:
        # the matrices of MLPs are about two thirds of a model
        trained = sizes.parameters if pilot.trains == "full" else 2 * sizes.parameters // 3
        candidates.append(running(pilot.batch_size, pilot.sequence_length or sizes.length, trained, sizes.layers))
    return max(candidates)


def _disk(work: Work, sizes: Sizes) -> int:
    """What the folder will hold; the base's shards once, where they are copied."""
    folders = 3 if work.routes else 2
    base = 0 if work.recipe.base_weights == "link" else sizes.base_bytes
    copies = folders if work.taking == "copy" else 1
    # while it trains, AdamW's moments and the numbers in float32 are on disk too
    return round(base * copies + sizes.added * (4 * folders + TRAINED_BYTES) + 1.1 * sizes.text_bytes)
