"""Gates of an expansion in a loaded model, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def gated_blocks(model: Any) -> list[Any]:
    """Return the modules of an expansion that read its up stream through a gate."""
    return [module for module in model.modules() if module._parameters.get("gate") is not None]


@contextmanager
def keeping_scores(model: Any) -> Iterator[None]:
    """Make gates keep the scores of their last forward pass inside a `with` block."""
    for blocks in gated_blocks(model):
        blocks.keeps_scores = True
    try:
        yield
    finally:
        take_scores(model)
        for blocks in gated_blocks(model):
            blocks.keeps_scores = False


def take_scores(model: Any) -> list[Tensor]:
    """Return the scores of each gate in the last forward pass (b, t, 1), and drop them from the gates."""
    return [scores for blocks in gated_blocks(model) if (scores := vars(blocks).pop("scores", None)) is not None]


def shut_so_far(model: Any, mask: Tensor) -> Tensor | None:
    """Return a mask of the tokens up to which all gates were closed (b, t), or None without gates."""
    import torch

    from scale_surgery.modeling.expanded_stock import opened

    # kept from the model's last forward pass
    scores = take_scores(model)
    if not scores:
        return None
    is_open = (opened(torch.cat(scores, -1)) != 0).any(-1).to(mask.device)
    return (is_open & mask.bool()).cumsum(-1) == 0
