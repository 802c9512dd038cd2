"""What a ranking of layers would be with any text: AdamW moves every weight by about the same, whatever it learns.

The first steps of AdamW are as large as the learning rate, so |W' - W| / |W| is about 1 / |W|, up to a factor. Pilots
that start at the same W agree about that, and know nothing of the text for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import correlation, pvariance
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scale_surgery.training.ranking import LayerScore

# an order is that of any text where ranks hardly differ, and where the sizes of steps hold hardly any of the variance:
# ranks alone would hide one layer among many that moved three times as much, variance alone a few that changed places
LEAST_CORRELATION = 0.9
MOST_LEFT = 0.1


def is_of_any_text(layers: Sequence[LayerScore]) -> bool:
    """Whether relative norms are those of equal steps everywhere, so that they say nothing of the text.

        log |W'_l - W_l| / |W_l| = log of what equal steps give + log of the own size of the steps of layer l

    Args:
        layers: Scores of the layers.

    Returns:
        Whether the order is that of equal steps, and at most MOST_LEFT of the variance is that of the last term.
    """
    pairs = [(layer.relative_norm, layer.equal_steps) for layer in layers]
    if len(pairs) < 2 or not all(0 < number < math.inf for pair in pairs for number in pair):
        return False
    found, expected = ([math.log(number) for number in side] for side in zip(*pairs, strict=True))
    own = [one - other for one, other in zip(found, expected, strict=True)]
    is_alike = correlation(_ranks(found), _ranks(expected)) >= LEAST_CORRELATION
    return is_alike and pvariance(own) <= MOST_LEFT * pvariance(found)


def _ranks(numbers: Sequence[float]) -> list[int]:
    order = sorted(range(len(numbers)), key=lambda place: numbers[place])
    return [order.index(place) for place in range(len(numbers))]
