"""Train gates: open on the text to learn, shut on rehearsal text.

    loss = 0.3 mean softplus(-z) on text to learn + mean softplus(z) on rehearsal text      z: scores of a gate

The text to learn weighs less, so that text found in both is left to the base. Neutral Residues (arXiv 2410.02744) also
uses a loss that shuts gates on old text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scale_surgery.running.gates import take_scores

NEW_WEIGHT = 0.3


def loss_of_gates(model: Any, mask: Tensor, *, is_new: bool) -> Tensor:
    """Return the loss of all gates in the last forward pass, a mean over gates and the tokens of the mask (b, t)."""
    sign, weight = (-1.0, NEW_WEIGHT) if is_new else (1.0, 1.0)
    share = mask.float() / mask.sum()
    losses = [
        (functional.softplus(sign * scores[..., 0]) * share.to(scores.device)).sum() for scores in take_scores(model)
    ]
    return weight * torch.stack(losses).mean()
