"""Settings of a router that are worth trying on texts that were read.

cosine      the paper's threshold, round ones, and those that part the cosines of the text into shares
posterior   priors times switch rates
composed    weights of the base, times ways to split the rest, times switch rates
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from scale_surgery.composition.paths import MixedPaths
from scale_surgery.planning.routing_specs import Routing

if TYPE_CHECKING:
    from scale_surgery.routing.path_scores import PathBatch

# of settings that score the same the first wins, so defaults and round numbers stand first
PRIORS = (0.5, 0.2, 0.8, 0.05, 0.95, 0.01, 0.99)
SWITCH_RATES = (0.01, 0.0, 0.001, 0.1, 0.003, 0.03, 0.0001)
THRESHOLDS = (0.5, 0.0, -1.0, 1.0, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# logits of two paths are similar almost everywhere, so most cosines lie near 1, where round numbers are far apart
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


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


def mixings_of(present: MixedPaths, new: Sequence[PathBatch]) -> tuple[MixedPaths, ...]:
    """Choose what to try: weights of the base, the rest split alike or as new text asks for, times switch rates.

    Args:
        present: How the model mixes now.
        new: What all paths say of new text.

    Returns:
        Settings, the present one first, none twice.
    """
    others, even = len(present.names) - 1, 1 / len(present.names)
    splits = dict.fromkeys([(1 / others,) * others, _wanted(new, others)])
    pairs = product(splits, dict.fromkeys((even, *PRIORS)))
    priors = [(base, *((1 - base) * share for share in split)) for split, base in pairs]
    tried = [replace(present, prior=prior, switch_rate=rate) for prior, rate in product(priors, SWITCH_RATES)]
    return tuple(dict.fromkeys([present, *tried]))


def _wanted(new: Sequence[PathBatch], others: int) -> tuple[float, ...]:
    """Share of the windows of new text that each expansion predicts best, half a window added for each of them."""
    import torch

    from scale_surgery.routing.many_paths import best_expansions

    counts = torch.bincount(best_expansions(new), minlength=others).double() + 0.5
    return tuple((counts / counts.sum()).tolist())
