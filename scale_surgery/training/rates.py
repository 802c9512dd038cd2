"""The default learning rate, by the width of the widened model.

In one step AdamW moves every number by about the learning rate, for any gradient. A product over n features then
moves by rate * sum |x|, which grows with n. So the rate falls with 1 / n, as in maximal update parametrisation
(arXiv 2203.03466). Here n is the total width of the residual stream and the up stream.

In `preserve` without new tokens only the new columns of the head read the up stream. They start at zero and are few, so
the rate is three times as high. In `grow` copies of whole MLPs are trained, as matrices are in full fine-tuning: the
rate is an eighth.
"""

from __future__ import annotations

from dataclasses import replace

from scale_surgery.planning.plan import Plan
from scale_surgery.training.settings import TrainingSettings

# 3e-3 is best for the shipped model, which is 128 + 16 wide, and 9e-3 in `preserve` (benchmarks/rates.md)
RATE_TIMES_WIDTH = 0.4
PRESERVE_FACTOR = 3
# of copies of MLPs, and of the base's own matrices
OF_WHOLE_MATRICES = 1 / 8


def default_rate(plan: Plan) -> float:
    """Return the default learning rate of an expansion, to two digits."""
    width = plan.sizes.hidden + plan.widths.up_width
    return float(f"{_factor(plan) * RATE_TIMES_WIDTH / width:.2g}")


def _factor(plan: Plan) -> float:
    if any(tensor.block == "w12" and tensor.init == "copy" for tensor in plan.tensors):
        return OF_WHOLE_MATRICES
    writes_into_base = {"w12", "new_rows"} & {tensor.block for tensor in plan.tensors} or not plan.widths.up_width
    return 1 if writes_into_base else PRESERVE_FACTOR


def with_rate(settings: TrainingSettings, plan: Plan) -> TrainingSettings:
    """Return the settings, with the default learning rate if they have none."""
    return settings if settings.learning_rate is not None else replace(settings, learning_rate=default_rate(plan))
