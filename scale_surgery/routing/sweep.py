"""Settings of a router, and what a model scores with each on old and on new text, which it reads once.

cosine      the paper's threshold, round ones, and those that part the cosines of the text into shares
posterior   priors times switch rates
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.subjects import Subject
from scale_surgery.planning.routing_specs import Routing, router_settings
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.loss import Measurement
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch
    from scale_surgery.running.texts import Sequences

# of settings that score the same the first wins, so defaults and round numbers stand first
PRIORS = (0.5, 0.2, 0.8, 0.05, 0.95, 0.01, 0.99)
SWITCH_RATES = (0.01, 0.0, 0.001, 0.1, 0.003, 0.03, 0.0001)
THRESHOLDS = (0.5, 0.0, -1.0, 1.0, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# logits of two paths are similar almost everywhere, so most cosines lie near 1, where round numbers are far apart
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Outcome:
    """What a model scores with one setting of its router.

    Attributes:
        routing: The setting; None for the base model and for the adapt path alone.
        old: What it scores on old text.
        new: The same on new text.
        forgetting: Its nats per token on old text minus those of the base.
        learning: The base's nats per token on new text minus its own.
        kept: Learning as a share of what the adapt path alone learns; None where that learns nothing.
        routed_old: Routed share of old text: the mean weight of the adapt path over the scored tokens.
        routed_new: The same of new text.
    """

    routing: Routing | None
    old: Measurement
    new: Measurement
    forgetting: float
    learning: float
    kept: float | None
    routed_old: float
    routed_new: float

    @property
    def numbers(self) -> str:
        """The numbers of the setting, in words; empty where there is none."""
        if self.routing is None:
            return ""
        if self.routing.router == "cosine":
            return f"threshold {self.routing.threshold:.10g}"
        return f"prior {self.routing.prior:g}, switch rate {self.routing.switch_rate:g}"

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON values, with what follows from the sums."""
        content = asdict(self) | {"routing": None if self.routing is None else router_settings(self.routing)}
        for side, found in (("old", self.old), ("new", self.new)):
            content[side] |= {"nats_per_token": found.nats_per_token, "accuracy": found.accuracy}
        return content


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


def sweep_model(
    subject: Subject,
    texts: Mapping[str, Sequences],
    present: Routing,
    run: RunOptions,
    track: Track,
) -> Sweep:
    """Let a model read old and new text, and measure every setting that is worth trying.

    Args:
        subject: The model.
        texts: Windows by side, "old" and "new".
        present: How it routes now.
        run: How it runs: device, dtype, trust_remote_code, batch_size.
        track: Makes progress bars.

    Returns:
        What it scores, the present setting first.

    Raises:
        CheckpointError: If it cannot be loaded, or a loss is not finite.
    """
    from scale_surgery.routing.path_scores import read_paths

    tokens = sum(len(text.ids) for text in texts.values())
    with loaded_whole(subject.path, subject.name, run) as model, track("read", tokens) as advance:
        old, new = (read_paths(model, texts[side], run.windows(), advance) for side in ("old", "new"))
        router = model.router
    settings = settings_of(present, old, new)
    with track("settings", len(settings)) as advance:
        found = sweep(router, old, new, settings, advance)
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


def sweep(
    router: Any,
    old: Sequence[PathBatch],
    new: Sequence[PathBatch],
    settings: Sequence[Routing],
    advance: Progress = no_progress,
) -> Sweep:
    """Measure settings on texts that were read.

    Args:
        router: The model's router.
        old: What both paths say of old text.
        new: The same of new text.
        settings: What to try.
        advance: Called after each setting.

    Returns:
        What the base model, the adapt path alone and each setting score.
    """
    from scale_surgery.routing.path_scores import measure_adapt, measure_base, measure_router

    base, adapt = ([measure(side) for side in (old, new)] for measure in (measure_base, measure_adapt))
    reference = Reference(base[0], base[1], base[1].nats_per_token - adapt[1].nats_per_token)
    outcomes = []
    for routing in settings:
        own = with_numbers(router, routing)
        (on_old, routed_old), (on_new, routed_new) = (measure_router(side, own) for side in (old, new))
        outcomes.append(reference.outcome(routing, on_old, on_new, routed_old, routed_new))
        advance(1)
    return Sweep(
        base=reference.outcome(None, base[0], base[1], 0.0, 0.0),
        adapt=reference.outcome(None, adapt[0], adapt[1], 1.0, 1.0),
        outcomes=tuple(outcomes),
    )


@dataclass(frozen=True)
class Reference:
    """What outcomes are compared with: the base on old and on new text, and what the adapt path alone learns."""

    old: Measurement
    new: Measurement
    learning: float

    def outcome(
        self, routing: Routing | None, old: Measurement, new: Measurement, routed_old: float, routed_new: float
    ) -> Outcome:
        """Compare."""
        learning = self.new.nats_per_token - new.nats_per_token
        return Outcome(
            routing=routing,
            old=old,
            new=new,
            forgetting=old.nats_per_token - self.old.nats_per_token,
            learning=learning,
            kept=learning / self.learning if self.learning > 0 else None,
            routed_old=routed_old,
            routed_new=routed_new,
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
