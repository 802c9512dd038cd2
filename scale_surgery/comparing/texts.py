"""The texts of a comparison as tokens, the same for all methods, and what a model scores on them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scale_surgery.comparing.comparison import Losses
from scale_surgery.comparing.methods import Place
from scale_surgery.comparing.settings import FOLDERS
from scale_surgery.comparing.training import Lesson
from scale_surgery.learning.hold_out import CALIBRATE, LEARN, MEASURE, part_file
from scale_surgery.progress import Progress
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.loss import measure
from scale_surgery.running.own_generation import generate_with
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.text.documents import read_documents
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import pack, start_tokens, stride, tokenize, without_unscored
from scale_surgery.training.rehearsal import make_rehearsal
from scale_surgery.training.settings import TrainingSettings

# longest sequences, unless the settings say more
LONGEST = 512
# share of the tokens on which a rate is tried, and the fewest steps: the first steps of AdamW are large for any
# gradient, so fewer would find every rate too high
TRIED, FEWEST = 1 / 24, 8
# share of a window that is only context, which the window before has scored
OVERLAP = 1 / 8
# tokens of each text on which a try of a rate is measured, as a share of those that it learns, and the fewest
TRY_MEASURED, FEWEST_MEASURED = 1 / 4, 2_000
# tokens of an answer whose speed is measured, and of its prompt
ANSWERED, PROMPT = 24, 16


@dataclass(frozen=True)
class Texts:
    """The texts of a comparison.

    Attributes:
        tokenizer: Tokenizer of the base.
        training: Settings of training that all methods share.
        trying: The same for a try of a rate; its batches are smaller if few steps would not be enough.
        to_learn: Sequences to learn.
        held_out: Windows of the held-out texts, by side and part.
        steps: Optimizer steps with all tokens.
        steps_of_try: Optimizer steps on which a rate is tried.
    """

    tokenizer: Any
    training: TrainingSettings
    trying: TrainingSettings
    to_learn: Sequences
    held_out: Mapping[tuple[str, str], Sequences]
    steps: int
    steps_of_try: int

    @property
    def highest(self) -> int:
        """Highest token id of all texts."""
        return max(texts.highest for texts in (self.to_learn, *self.held_out.values()))

    def lesson(self, own: Sequences | None) -> Lesson:
        """Return what a method learns, with own samples or without."""
        return Lesson(self.to_learn, make_rehearsal(own, self.training), self.training, self.steps)

    def trial(self, own: Sequences | None) -> Lesson:
        """Return what it learns with a rate that is tried."""
        return Lesson(self.to_learn, make_rehearsal(own, self.trying), self.trying, self.steps_of_try)

    def measured(self, part: str) -> int:
        """Return the tokens of both texts on which a model is measured."""
        return sum(self.held_out[side, part].tokens for side in FOLDERS)

    def losses(self, model: Any, part: str, advance: Progress) -> Losses:
        """Measure a model on a held-out part of both texts."""
        size = self.training.batch_size
        old, new = (measure(model, self.held_out[side, part], size, advance) for side in ("old", "new"))
        return Losses(old, new)

    def seconds_of_batch(self, model: Any) -> float:
        """Return the seconds in which a model reads a batch."""
        batch = self.to_learn.some(self.training.batch_size)
        # the first time includes what is done once, such as taking memory
        measure(model, batch, self.training.batch_size)
        started = time.monotonic()
        measure(model, batch, self.training.batch_size)
        return time.monotonic() - started

    def seconds_of_token(self, model: Any) -> float:
        """Return the median of the seconds between the tokens of an answer."""
        ids, times = self.to_learn[0]["input_ids"][None, :PROMPT].to(model.device), list[float]()
        inputs = {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)}
        settings = {"max_new_tokens": ANSWERED, "do_sample": False, "pad_token_id": 0}
        generate_with(model, inputs, on_token=lambda ids: times.append(time.monotonic()), **settings)
        return statistics.median(end - start for start, end in pairwise(times))


def read_texts(place: Place) -> Texts:
    """Read the texts that were held out and are to be learned."""
    settings, limits = place.settings, {place.name: context_of(place.checkpoint.config)}
    tokenizer = need_tokenizer(place.checkpoint.path, place.name, place.run)
    length = choose_length(settings.sequence_length or min(LONGEST, choose_length(None, limits)), limits)

    start = start_tokens(tokenizer)

    def read(side: str, part: str) -> Sequences:
        return tokenize(list(read_documents([part_file(place.folder / FOLDERS[side], part)])), tokenizer)

    training, step = settings.training(length), length - math.floor(length * OVERLAP)
    to_learn = without_unscored(pack(read("new", LEARN), length, start))
    steps = max(1, round(settings.tokens * len(to_learn) / (to_learn.tokens * training.batch_size)))
    steps_of_try = min(steps, max(FEWEST, round(steps * TRIED)))
    rows = min(training.batch_size, max(1, round(steps * TRIED * training.batch_size / steps_of_try)))
    trying = replace(training, batch_size=rows)
    few = max(FEWEST_MEASURED, math.ceil(steps_of_try * rows * length * TRY_MEASURED))
    held_out = dict[tuple[str, str], Sequences]()
    for side in FOLDERS:
        every = without_unscored(stride(read(side, CALIBRATE), length, step, start))
        held_out[side, CALIBRATE] = every.some(math.ceil(len(every) * few / every.tokens))
        held_out[side, MEASURE] = stride(read(side, MEASURE), length, step, start)
    return Texts(tokenizer, training, trying, to_learn, held_out, steps, steps_of_try)
