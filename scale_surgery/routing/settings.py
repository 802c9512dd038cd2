"""Settings of a router that are worth trying on texts that were read.

cosine      the paper's threshold, round ones, and those that part the cosines of the text into shares
posterior   weights of the base, times ways to split the rest, times switch rates
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.surgery.routers import is_even

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch

# of settings that score the same the first wins, so defaults and round numbers stand first
PRIORS = (0.5, 0.2, 0.8, 0.05, 0.95, 0.01, 0.99)
SWITCH_RATES = (0.01, 0.0, 0.001, 0.1, 0.003, 0.03, 0.0001)
THRESHOLDS = (0.5, 0.0, -1.0, 1.0, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# logits of two paths are similar almost everywhere, so most cosines lie near 1, where round numbers are far apart
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def settings_of(present: Router, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> tuple[Router, ...]:
    """Choose what to try."""
    candidates = CANDIDATES.get(type(present))
    return tuple(dict.fromkeys([present, *(candidates(present, old, new) if candidates else ())]))


def _thresholds(present: CosineRouter, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> Iterator[CosineRouter]:
    return (replace(present, threshold=threshold) for threshold in (*THRESHOLDS, *_parting(old), *_parting(new)))


def _priors(present: PosteriorRouter, old: Sequence[PathBatch], new: Sequence[PathBatch]) -> Iterator[PosteriorRouter]:
    splits = _splits(new)
    bases = dict.fromkeys((1 / (1 + len(splits[0])), *PRIORS))
    priors = [(base, *((1 - base) * share for share in split)) for split, base in product(splits, bases)]
    # even weights are written as they are by default
    priors = [(1 / len(prior),) * len(prior) if is_even(prior) else prior for prior in priors]
    return (replace(present, prior=prior, switch_rate=rate) for prior, rate in product(priors, SWITCH_RATES))


# by kind of router
CANDIDATES: Mapping[type, Callable[..., Iterator[Router]]] = {
    CosineRouter: _thresholds,
    PosteriorRouter: _priors,
}


def _parting(side: Sequence[PathBatch]) -> Iterator[float]:
    """Thresholds that part the cosines of a text into shares."""
    from scale_surgery.routing.path_scores import scored_cosines

    cosines = scored_cosines(side)
    yield from (round_threshold(float(cosines[int(share * (len(cosines) - 1))])) for share in SHARES)


def round_threshold(cosine: float) -> float:
    """Round a cosine to two figures of its distance from 1, where most cosines lie."""
    return max(-1.0, min(1.0, round(1 - float(f"{1 - cosine:.2g}"), 12)))


def _splits(new: Sequence[PathBatch]) -> list[tuple[float, ...]]:
    """Ways to share what is not the base's: alike, and by the windows of new text that each expansion predicts best.

    Half a window is added for each.
    """
    import torch

    from scale_surgery.routing.path_scores import best_of

    expansions = new[0].scores.sides.shape[-1] - 1
    best = torch.cat([best_of(batch, first=1) for batch in new]) - 1
    counts = torch.bincount(best, minlength=expansions).double() + 0.5
    wanted = tuple((counts / counts.sum()).tolist())
    return list(dict.fromkeys([(1 / expansions,) * expansions, wanted]))
