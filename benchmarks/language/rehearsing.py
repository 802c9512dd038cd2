"""Rehearsal in benchmarks/language: the loss of `scale-surgery train --rehearse`, for every method that is compared.

    loss = cross entropy (new text) + weight * KL(base || model) on rehearsal text

The base is a frozen copy here, because most methods that are compared do not carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.language.base import Size
from benchmarks.language.precision import mixed
from scale_surgery.training.rehearsal import Divergence

SAMPLED_TOGETHER = 64
# rehearsed tokens, as a share of what the base was trained on
SHARES = {"own": 0.01, "own x4": 0.04, "old": 0.01}


@dataclass(frozen=True)
class Rehearsal:
    """Text on which a model is asked to stay what the base is.

    Attributes:
        base: The base, frozen.
        rows: The text, (rows, context).
        together: Rows beside each batch, half as many as in it.
        seed: Of their order.
    """

    base: Any
    rows: Tensor
    together: int
    seed: int

    def loss(self, model: Any, step: int) -> Tensor:
        """KL(base || model) on the rows of a step, in nats per token."""
        rows = self.rows[[self._place(step * self.together + row) for row in range(self.together)]]
        with mixed(rows.device.type):
            with torch.no_grad():
                wanted = self.base(input_ids=rows, use_cache=False).logits
            logits = model(input_ids=rows, use_cache=False).logits
        loss: Tensor = Divergence.apply(logits.flatten(0, 1), wanted.flatten(0, 1))  # type: ignore[no-untyped-call]
        return loss

    def _place(self, row: int) -> int:
        number, place = divmod(row, len(self.rows))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + number))
        return int(order[place])


def rehearsal_of(
    folder: Path, rehearse: str, old: Callable[[], Tensor], size: Size, seed: int, device: torch.device
) -> Rehearsal | None:
    """Say what is rehearsed; None where nothing is."""
    if rehearse == "none":
        return None
    base = AutoModelForCausalLM.from_pretrained(folder).to(device).requires_grad_(False).eval()
    # what the base was trained on, (rows, context), comes in a random order already
    rows = old()[: _count(size, rehearse)] if rehearse == "old" else own_samples(folder, size, base, rehearse)
    return Rehearsal(base, rows.to(device), size.rows // 2, seed)


def _count(size: Size, rehearse: str) -> int:
    return max(1, round(SHARES[rehearse] * size.tokens / size.context))


def own_samples(folder: Path, size: Size, base: Any, rehearse: str = "own") -> Tensor:
    """Let the base write text from its begin token at temperature 1, once; (samples, context)."""
    samples, context = _count(size, rehearse), size.context
    file = folder.with_name(f"{folder.name}-{samples}-samples.safetensors")
    if not file.exists():
        torch.manual_seed(0)
        counts = [len(some) for some in torch.arange(samples).split(SAMPLED_TOGETHER)]
        written = file.with_name(f".{file.name}")
        save_file({"rows": torch.cat([_write(base, count, context) for count in counts])}, written)
        written.rename(file)
    rows = load_file(file)["rows"]
    # rows of text begin anywhere in a document, so rows of samples may too: see benchmarks/rehearsal.md
    return rows.flatten().roll(context // 2).view_as(rows)


def _write(base: Any, rows: int, context: int) -> Tensor:
    """Sample whole rows; after the end of a text comes the next one."""
    written = torch.full((rows, 1), base.config.bos_token_id, device=base.device)
    cache = None
    with torch.inference_mode(), mixed(base.device.type):
        while written.shape[1] < context:
            made = base(input_ids=written[:, -1:], use_cache=True, cache=cache)
            cache = made.cache
            chosen = torch.multinomial(made.logits[:, -1].float().softmax(-1), 1)
            written = torch.cat([written, chosen], -1)
    return written.cpu()
