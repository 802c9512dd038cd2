"""From what pilots changed to the scores of layers: means over pilots, and every measurement by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scale_surgery.training.ranking import LayerScore, MatrixScore, ScoreName
from scale_surgery.training.update_scores import effective_rank, equal_steps, relative_norm

if TYPE_CHECKING:
    from scale_surgery.training.pilot import PilotRun


def score_layers(runs: Sequence[PilotRun], layers: Sequence[int]) -> tuple[LayerScore, ...]:
    """Score layers by what pilots changed in them.

    Args:
        runs: The pilots.
        layers: Numbers of the layers.

    Returns:
        Their scores, in the order of the numbers.
    """
    norms, ranks = (
        [{layer: score(list(run.updates[layer].values())) for layer in layers} for run in runs]
        for score in (relative_norm, effective_rank)
    )
    measured: dict[ScoreName, list[Mapping[int, float]]] = {
        "relative-norm": [*norms, *(run.halfway for run in runs)],
        "effective-rank": [*ranks],
    }
    return tuple(
        LayerScore(
            layer=layer,
            relative_norm=mean([found[layer] for found in norms]),
            effective_rank=mean([found[layer] for found in ranks]),
            equal_steps=equal_steps(list(runs[0].updates[layer].values())),
            matrices=_score_matrices(runs, layer),
            shares={name: tuple(_share(found, layer, layers) for found in some) for name, some in measured.items()},
        )
        for layer in layers
    )


def _score_matrices(runs: Sequence[PilotRun], layer: int) -> dict[str, MatrixScore]:
    first = runs[0].updates[layer]
    return {
        role: MatrixScore(
            mean([relative_norm([run.updates[layer][role]]) for run in runs]),
            mean([effective_rank([run.updates[layer][role]]) for run in runs]),
            len(first[role].values),
        )
        for role in first
    }


def _share(found: Mapping[int, float], layer: int, layers: Sequence[int]) -> float:
    """A layer's score over the mean of all; 0 where nothing changed."""
    whole = mean([found[other] for other in layers])
    return found[layer] / whole if whole else 0.0


def mean(values: Sequence[float]) -> float:
    """Mean of some numbers."""
    return sum(values) / len(values)
