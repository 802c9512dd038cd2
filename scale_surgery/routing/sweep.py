"""What a model scores with each setting of its router on old and on new text, which it reads once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.routing.noise import mean_with_error
from scale_surgery.routing.outcome import Outcome
from scale_surgery.routing.settings import settings_of
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.routers import describe_router

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch, PathLosses, Weigh
    from scale_surgery.routing.short_prompts import Beginnings
    from scale_surgery.running.sequences import Sequences


@dataclass(frozen=True)
class Sweep:
    """What a model scores.

    Attributes:
        base: What its base model scores.
        adapt: What its adapt path alone scores; of many paths the best one of each window.
        outcomes: What it scores with each setting, in the order in which they were given.
    """

    base: Outcome
    adapt: Outcome
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class SweepTexts:
    """What a model reads.

    Attributes:
        old: Windows of old texts.
        new: Windows of new texts.
        short: The beginnings of old texts.
        numbers: Of which new text each of its windows is, from 0.
    """

    old: Sequences
    new: Sequences
    short: Sequences
    numbers: tuple[int, ...]


def sweep_model(
    subject: Subject, texts: SweepTexts, present: Router, run: RunOptions, track: Track, *, has_several: bool
) -> Sweep:
    """Let a model read old and new text, and measure every setting that is worth trying."""
    from scale_surgery.routing.path_scores import adapt_alone, best_alone, read_paths, reading_order

    numbers = tuple(texts.numbers[row] for row in reading_order(texts.new))
    sides = (texts.old, texts.new, texts.short)
    total = sum(len(side.ids) for side in sides)
    with loaded_whole(subject.path, subject.name, run) as model, track("read", total) as advance:
        old, new, short = (read_paths(model, side, run.windows(), advance) for side in sides)
        read = PathTexts(old, new, short, numbers)
    settings = settings_of(present, read.old, read.new)
    with track("settings", len(settings)) as advance:
        swept = sweep(best_alone if has_several else adapt_alone, read, settings, advance)
    _check_finite(subject, swept, "the best path" if has_several else "the adapt path")
    return swept


def _check_finite(subject: Subject, swept: Sweep, best_name: str) -> None:
    named = [("the base model", swept.base), (best_name, swept.adapt)]
    named += [(describe_router(outcome.routing), outcome) for outcome in swept.outcomes if outcome.routing is not None]
    for name, outcome in named:
        for side, measured in (("old", outcome.old), ("new", outcome.new)):
            if not math.isfinite(measured.nats):
                raise CheckpointError(
                    f"{subject.name}: the loss of {name} on {side} text is {measured.nats}, expected a finite number. "
                    "Its weights are damaged, or --dtype is too narrow for them: see scale-surgery verify."
                )


def sweep(alone: Weigh, texts: PathTexts, settings: Sequence[Router], advance: Progress = no_progress) -> Sweep:
    """Measure settings on texts that were read."""
    from scale_surgery.routing.path_scores import routed_by, weigh_base

    base, adapt, present = (texts.measure(weigh) for weigh in (weigh_base, alone, routed_by(settings[0])))
    reference = Reference(base, adapt, present)
    outcomes = []
    for setting in settings:
        outcomes.append(reference.outcome(setting, texts.measure(routed_by(setting))))
        advance(1)
    return Sweep(reference.outcome(None, base), reference.outcome(None, adapt), tuple(outcomes))


@dataclass(frozen=True)
class Measured:
    """What texts score with one setting: old and new text, and the beginnings of old texts."""

    old: PathLosses
    new: PathLosses
    short: Beginnings


@dataclass(frozen=True)
class PathTexts:
    """What the paths say of old and of new text, and of the beginnings of old texts.

    Attributes:
        old: Windows of old texts.
        new: Windows of new texts.
        short: The beginnings of old texts.
        numbers: Of which new text each window is, from 0, in the order in which they were read.
    """

    old: Sequence[PathBatch]
    new: Sequence[PathBatch]
    short: Sequence[PathBatch]
    numbers: tuple[int, ...]

    def measure(self, weigh: Weigh) -> Measured:
        """Score them as they are routed."""
        from scale_surgery.routing.path_scores import measure_batches
        from scale_surgery.routing.short_prompts import read_beginnings

        new = measure_batches(self.new, weigh).by_text(self.numbers)
        return Measured(measure_batches(self.old, weigh), new, read_beginnings(self.short, weigh))


@dataclass(frozen=True)
class Reference:
    """What outcomes are compared with: the base, what the adapt path alone learns, and the present setting."""

    base: Measured
    adapt: Measured
    present: Measured

    def outcome(self, routing: Router | None, measured: Measured) -> Outcome:
        """Compare."""
        from scale_surgery.routing.short_prompts import summarise_prompts

        learning, most = (self.base.new.nats_per_token - side.new.nats_per_token for side in (measured, self.adapt))
        return Outcome(
            routing=routing,
            old=measured.old.total,
            new=measured.new.total,
            forgetting=measured.old.nats_per_token - self.base.old.nats_per_token,
            learning=learning,
            kept=learning / most if most > 0 else None,
            routed_old=measured.old.share,
            routed_new=measured.new.share,
            gain=mean_with_error(self.present.new.nats - measured.new.nats, measured.new.scored),
            short=summarise_prompts(measured.short, self.present.short),
        )
