"""What a model scores with each setting of its router on old and on new text, which it reads once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scale_surgery.composition.paths import MixedPaths
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.subjects import Subject
from scale_surgery.planning.routing_specs import Routing
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.routing.noise import estimate
from scale_surgery.routing.outcome import Outcome, Setting
from scale_surgery.routing.settings import mixings_of, settings_of
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch, Reading, Weigh
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
class Texts:
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


def sweep_model(subject: Subject, texts: Texts, present: Setting, run: RunOptions, track: Track) -> Sweep:
    """Let a model read old and new text, and measure every setting that is worth trying.

    Args:
        subject: The model.
        texts: What it reads.
        present: How it routes now.
        run: How it runs: device, dtype, trust_remote_code, batch_size.
        track: Makes progress bars.

    Returns:
        What it scores, the present setting first.

    Raises:
        CheckpointError: If it cannot be loaded, or a loss is not finite.
    """
    from scale_surgery.routing.many_paths import best_alone, mixed_by, read_many
    from scale_surgery.routing.path_scores import adapt_alone, read_paths, reading_order

    read_texts = read_many if isinstance(present, MixedPaths) else read_paths
    numbers = tuple(texts.numbers[row] for row in reading_order(texts.new))
    sides = (texts.old, texts.new, texts.short)
    total = sum(len(side.ids) for side in sides)
    with loaded_whole(subject.path, subject.name, run) as model, track("read", total) as advance:
        old, new, short = (read_texts(model, side, run.windows(), advance) for side in sides)
        read = PathTexts(old, new, short, numbers)
        router = getattr(model, "router", None)
    settings: Sequence[Setting]
    ways: Ways
    if isinstance(present, MixedPaths):
        settings, ways = mixings_of(present, read.new), Ways("the best path", best_alone, mixed_by)
    else:
        settings = settings_of(present, read.old, read.new)
        ways = Ways("the adapt path", adapt_alone, partial(_routed_by, router))
    with track("settings", len(settings)) as advance:
        found = sweep(ways, read, settings, advance)
    _check_finite(subject, found, ways.name)
    return found


@dataclass(frozen=True)
class Ways:
    """How a kind of model can be routed.

    Attributes:
        name: Of what there is beside the base: the adapt path, or the best path of each window.
        alone: Routes everything to that.
        by: Routes as a setting says.
    """

    name: str
    alone: Weigh
    by: Callable[[Any], Weigh]


def _routed_by(router: Any, routing: Routing) -> Weigh:
    """Route as a model's router does, with the numbers of a setting."""
    from scale_surgery.routing.path_scores import routed_by

    return routed_by(with_numbers(router, routing))


def _check_finite(subject: Subject, found: Sweep, other: str) -> None:
    named = [("the base model", found.base), (other, found.adapt)]
    named += [(outcome.routing.description, outcome) for outcome in found.outcomes if outcome.routing is not None]
    for name, outcome in named:
        for side, measured in (("old", outcome.old), ("new", outcome.new)):
            if not math.isfinite(measured.nats):
                raise CheckpointError(
                    f"{subject.name}: the loss of {name} on {side} text is {measured.nats}, expected a finite number. "
                    "Its weights are damaged, or --dtype is too narrow for them: see scale-surgery verify."
                )


def sweep(ways: Ways, texts: PathTexts, settings: Sequence[Setting], advance: Progress = no_progress) -> Sweep:
    """Measure settings on texts that were read.

    Args:
        ways: How texts can be routed.
        texts: What both paths say of texts.
        settings: What to try, the present setting first.
        advance: Called after each setting.

    Returns:
        What the base model, the adapt path alone and each setting score.
    """
    from scale_surgery.routing.path_scores import base_alone

    base, adapt = texts.measure(base_alone), texts.measure(ways.alone)
    reference = Reference(base, adapt, present=texts.measure(ways.by(settings[0])))
    outcomes = []
    for routing in settings:
        own = texts.measure(ways.by(routing))
        outcomes.append(reference.outcome(routing, own))
        advance(1)
    return Sweep(reference.outcome(None, base), reference.outcome(None, adapt), tuple(outcomes))


@dataclass(frozen=True)
class Measured:
    """What texts score with one setting: old and new text, and the beginnings of old texts."""

    old: Reading
    new: Reading
    short: Beginnings


@dataclass(frozen=True)
class PathTexts:
    """What both paths say of old and of new text, and of the beginnings of old texts.

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
        from scale_surgery.routing.path_scores import measure
        from scale_surgery.routing.short_prompts import read_beginnings

        new = measure(self.new, weigh).by_text(self.numbers)
        return Measured(measure(self.old, weigh), new, read_beginnings(self.short, weigh))


@dataclass(frozen=True)
class Reference:
    """What outcomes are compared with: the base, what the adapt path alone learns, and the present setting."""

    base: Measured
    adapt: Measured
    present: Measured

    def outcome(self, routing: Setting | None, own: Measured) -> Outcome:
        """Compare."""
        from scale_surgery.routing.short_prompts import summarise

        learning, most = (self.base.new.nats_per_token - one.new.nats_per_token for one in (own, self.adapt))
        return Outcome(
            routing=routing,
            old=own.old.total,
            new=own.new.total,
            forgetting=own.old.nats_per_token - self.base.old.nats_per_token,
            learning=learning,
            kept=learning / most if most > 0 else None,
            routed_old=own.old.share,
            routed_new=own.new.share,
            gain=estimate(self.present.new.nats - own.new.nats, own.new.scored),
            short=summarise(own.short, self.present.short),
        )


def with_numbers(router: Any, routing: Routing) -> Any:
    """A model's router with the numbers of a setting."""
    numbers = {name: value for name, value in routing.settings.items() if name not in ("router", "strict")}
    return replace(router, **numbers)
