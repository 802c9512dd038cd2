"""Settings of a router, and what a model scores with each on old and on new text, which it reads once.

cosine      the paper's threshold, round ones, and those that part the cosines of the text into shares
posterior   priors times switch rates
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.subjects import Subject
from scale_surgery.planning.routing_specs import Routing, router_settings
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.routing.noise import estimate
from scale_surgery.routing.outcome import Outcome
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch, Reading, Weigh
    from scale_surgery.routing.short_prompts import Beginnings
    from scale_surgery.running.sequences import Sequences

# of settings that score the same the first wins, so defaults and round numbers stand first
PRIORS = (0.5, 0.2, 0.8, 0.05, 0.95, 0.01, 0.99)
SWITCH_RATES = (0.01, 0.0, 0.001, 0.1, 0.003, 0.03, 0.0001)
THRESHOLDS = (0.5, 0.0, -1.0, 1.0, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# logits of two paths are similar almost everywhere, so most cosines lie near 1, where round numbers are far apart
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Sweep:
    """What a model scores.

    Attributes:
        base: What its base model scores.
        adapt: What its adapt path alone scores.
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


def sweep_model(subject: Subject, texts: Texts, present: Routing, run: RunOptions, track: Track) -> Sweep:
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
    from scale_surgery.routing.path_scores import read_paths, reading_order

    numbers = tuple(texts.numbers[row] for row in reading_order(texts.new))
    sides = (texts.old, texts.new, texts.short)
    total = sum(len(side.ids) for side in sides)
    with loaded_whole(subject.path, subject.name, run) as model, track("read", total) as advance:
        old, new, short = (read_paths(model, side, run.windows(), advance) for side in sides)
        read = PathTexts(old, new, short, numbers)
        router = model.router
    settings = settings_of(present, read.old, read.new)
    with track("settings", len(settings)) as advance:
        found = sweep(router, read, settings, advance)
    _check_finite(subject, found)
    return found


def _check_finite(subject: Subject, found: Sweep) -> None:
    named = [("the base model", found.base), ("the adapt path", found.adapt)]
    named += [(outcome.routing.description, outcome) for outcome in found.outcomes if outcome.routing is not None]
    for name, outcome in named:
        for side, measured in (("old", outcome.old), ("new", outcome.new)):
            if not math.isfinite(measured.nats):
                raise CheckpointError(
                    f"{subject.name}: the loss of {name} on {side} text is {measured.nats}, expected a finite number. "
                    "Its weights are damaged, or --dtype is too narrow for them: see scale-surgery verify."
                )


def sweep(router: Any, texts: PathTexts, settings: Sequence[Routing], advance: Progress = no_progress) -> Sweep:
    """Measure settings on texts that were read.

    Args:
        router: The model's router.
        texts: What both paths say of texts.
        settings: What to try, the present setting first.
        advance: Called after each setting.

    Returns:
        What the base model, the adapt path alone and each setting score.
    """
    from scale_surgery.routing.path_scores import adapt_alone, base_alone, routed_by

    base, adapt = texts.measure(base_alone), texts.measure(adapt_alone)
    reference = Reference(base, adapt, present=texts.measure(routed_by(with_numbers(router, settings[0]))))
    outcomes = []
    for routing in settings:
        own = texts.measure(routed_by(with_numbers(router, routing)))
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

    def outcome(self, routing: Routing | None, own: Measured) -> Outcome:
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
    numbers = {name: value for name, value in router_settings(routing).items() if name not in ("router", "strict")}
    return replace(router, **numbers)


def settings_of(present: Routing, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> tuple[Routing, ...]:
    """Choose what to try.

    Args:
        present: How the model routes now.
        old: What both paths say of old text, which gives thresholds that are worth trying.
        new: The same of new text.

    Returns:
        Settings of the same router, the present one first, none twice.
    """
    if present.router == "posterior":
        tried = [replace(present, prior=prior, switch_rate=rate) for prior, rate in product(PRIORS, SWITCH_RATES)]
    else:
        tried = [replace(present, threshold=threshold) for threshold in (*THRESHOLDS, *_parting(old), *_parting(new))]
    return tuple(dict.fromkeys([present, *tried]))


def _parting(side: Sequence[PathBatch]) -> Iterator[float]:
    """Thresholds that part the cosines of a text into shares."""
    from scale_surgery.routing.path_scores import scored_cosines

    cosines = scored_cosines(side)
    yield from (round_threshold(float(cosines[int(share * (len(cosines) - 1))])) for share in SHARES)


def round_threshold(cosine: float) -> float:
    """Round a cosine to two figures of its distance from 1, where most cosines lie."""
    return max(-1.0, min(1.0, round(1 - float(f"{1 - cosine:.2g}"), 12)))
