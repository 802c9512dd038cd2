"""Score every router setting worth trying on old and new text, which the model reads once.

cosine      the paper's threshold, round ones, and quantiles of the cosines of the text
posterior   weights of the base, times ways to split the rest, times switch rates
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.folder.routers import describe_router, is_even
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.routing.outcome import Outcome, mean_with_error
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.loss import Measurement, measure
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch, PathLosses, Weigh
    from scale_surgery.text.sequences import Sequences

# of equal settings the first wins, so defaults and round numbers come first
PRIORS = (0.5, 0.2, 0.8, 0.05, 0.95, 0.01, 0.99)
SWITCH_RATES = (0.01, 0.0, 0.001, 0.1, 0.003, 0.03, 0.0001)
THRESHOLDS = (0.5, 0.0, -1.0, 1.0, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# logits of two paths are similar almost everywhere, so most cosines are near 1, and round numbers are too coarse
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Sweep:
    """Scores of the base, of the adapt path (or the best of many paths in each window), and of each setting."""

    base: Outcome
    adapt: Outcome
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class SweepTexts:
    """Windows of old and new texts, beginnings of old texts, and the index of the text of each new window.

    If an expansion adds tokens, `of_base` has old and new texts as the base's tokenizer reads them.
    """

    old: Sequences
    new: Sequences
    short: Sequences
    numbers: tuple[int, ...]
    of_base: tuple[Sequences, ...] = ()


def sweep_model(
    subject: Subject, texts: SweepTexts, present: Router, run: RunOptions, track: Track, *, has_several: bool
) -> Sweep:
    """Read old and new text once, and score every setting worth trying, the present one first."""
    from scale_surgery.routing.path_scores import adapt_alone, best_alone, read_paths
    from scale_surgery.running.loss import reading_order

    numbers = tuple(texts.numbers[row] for row in reading_order(texts.new))
    sides = (texts.old, texts.new, texts.short)
    total = sum(len(side.ids) for side in sides)
    with loaded_whole(subject.checkpoint, subject.name, run) as model, track("read", total) as advance:
        old, new, short = (read_paths(model, side, run.windows(), advance) for side in sides)
        with model.expansion_disabled():
            of_base = tuple(measure(model, side, run.windows()) for side in texts.of_base)
        read = PathTexts(old, new, short, numbers, of_base)
    settings = settings_of(present, read.old, read.new)
    with track("settings", len(settings)) as advance:
        swept = sweep(best_alone if has_several else adapt_alone, read, settings, advance)
    _check_finite(subject, swept, "best path" if has_several else "adapt path")
    return swept


def _check_finite(subject: Subject, swept: Sweep, best_name: str) -> None:
    named = [("base model", swept.base), (best_name, swept.adapt)]
    named += [(describe_router(outcome.routing), outcome) for outcome in swept.outcomes if outcome.routing is not None]
    for name, outcome in named:
        for side, measured in (("old", outcome.old), ("new", outcome.new)):
            if not math.isfinite(measured.nats):
                raise CheckpointError(
                    Problem("path-loss-not-finite", subject.name, path=name, side=side, loss=measured.nats)
                )


def sweep(alone: Weigh, texts: PathTexts, settings: Sequence[Router], advance: Progress = no_progress) -> Sweep:
    """Measure settings on texts that were already read."""
    from scale_surgery.routing.path_scores import routed_by, weigh_base

    base, adapt, present = (texts.measure(weigh) for weigh in (weigh_base, alone, routed_by(settings[0])))
    if texts.of_base:
        old, new = (replace(side, total=total) for side, total in zip((base.old, base.new), texts.of_base, strict=True))
        base = replace(base, old=old, new=new)
    reference = Reference(base, adapt, present)
    outcomes = []
    for setting in settings:
        outcomes.append(reference.outcome(setting, texts.measure(routed_by(setting))))
        advance(1)
    return Sweep(reference.outcome(None, base), reference.outcome(None, adapt), tuple(outcomes))


@dataclass(frozen=True)
class Measured:
    """Losses with one setting on old and new text, and on the beginnings of old texts."""

    old: PathLosses
    new: PathLosses
    short: PathLosses


@dataclass(frozen=True)
class PathTexts:
    """Scores of all paths on `SweepTexts`; numbers are in reading order."""

    old: Sequence[PathBatch]
    new: Sequence[PathBatch]
    short: Sequence[PathBatch]
    numbers: tuple[int, ...]
    of_base: tuple[Measurement, ...] = ()

    def measure(self, weigh: Weigh) -> Measured:
        """Score all texts with one routing."""
        from scale_surgery.routing.path_scores import measure_batches

        old, new, short = (measure_batches(side, weigh) for side in (self.old, self.new, self.short))
        return Measured(old, new.by_text(self.numbers), short)


@dataclass(frozen=True)
class Reference:
    """Measurements to compare outcomes with: the base, the adapt path alone, and the present setting."""

    base: Measured
    adapt: Measured
    present: Measured

    def outcome(self, routing: Router | None, measured: Measured) -> Outcome:
        """Compare the measurements of a setting with the reference."""
        learning, most = (0.0 - side.new.total.loss_against(self.base.new.total) for side in (measured, self.adapt))
        return Outcome(
            routing=routing,
            old=measured.old.total,
            new=measured.new.total,
            forgetting=measured.old.total.loss_against(self.base.old.total),
            learning=learning,
            kept=learning / most if most > 0 else None,
            routed_old=measured.old.share,
            routed_new=measured.new.share,
            gain=mean_with_error(self.present.new.nats - measured.new.nats, measured.new.scored),
            short=mean_with_error(measured.short.nats - self.base.short.nats, measured.short.scored),
        )


def settings_of(present: Router, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> tuple[Router, ...]:
    """Return the settings to try, the present one first; any other kind of router keeps its present one only."""
    candidates = CANDIDATES.get(type(present))
    return tuple(dict.fromkeys([present, *(candidates(present, old, new) if candidates else ())]))


def _thresholds(present: CosineRouter, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> Iterator[CosineRouter]:
    return (replace(present, threshold=threshold) for threshold in (*THRESHOLDS, *_quantiles(old), *_quantiles(new)))


def _priors(present: PosteriorRouter, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> Iterator[PosteriorRouter]:
    splits = _splits(new)
    bases = dict.fromkeys((1 / (1 + len(splits[0])), *PRIORS))
    priors = [(base, *((1 - base) * share for share in split)) for split, base in product(splits, bases)]
    # even weights are spelled exactly like the default
    priors = [(1 / len(prior),) * len(prior) if is_even(prior) else prior for prior in priors]
    return (replace(present, prior=prior, switch_rate=rate) for prior, rate in product(priors, SWITCH_RATES))


# generators of settings by kind of router
CANDIDATES: Mapping[type, Callable[..., Iterator[Router]]] = {
    CosineRouter: _thresholds,
    PosteriorRouter: _priors,
}


def _quantiles(side: Sequence[PathBatch]) -> Iterator[float]:
    """Generate quantiles of the cosines of a text, as thresholds."""
    from scale_surgery.routing.path_scores import scored_cosines

    cosines = scored_cosines(side)
    yield from (round_threshold(float(cosines[int(share * (len(cosines) - 1))])) for share in SHARES)


def round_threshold(cosine: float) -> float:
    """Round a cosine to two digits of its distance from 1, since most cosines are near 1."""
    return max(-1.0, min(1.0, round(1 - float(f"{1 - cosine:.2g}"), 12)))


def _splits(new: Sequence[PathBatch]) -> list[tuple[float, ...]]:
    """Return splits of the weight not given to the base: even, and by the number of new windows each predicts best."""
    import torch

    from scale_surgery.routing.path_scores import best_of

    expansions = new[0].scores.sides.shape[-1] - 1
    best = torch.cat([best_of(batch, first=1) for batch in new]) - 1
    # half a window is added for each expansion
    counts = torch.bincount(best, minlength=expansions).double() + 0.5
    wanted = tuple((counts / counts.sum()).tolist())
    return list(dict.fromkeys([(1 / expansions,) * expansions, wanted]))
