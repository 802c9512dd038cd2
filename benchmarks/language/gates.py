"""Gates through which an expansion writes into the base stream and into the logits, on trial.

    y = W x + g W12 x_up,   logits = head x + g head_up x_up,   g = clamp(1.2 sigmoid(w [x | x_up] + b) - 0.1, 0, 1)

A gate stands before each layer and before the head, and reads both streams there, each scaled to a mean square of 1;
the base stream is read without gradient. The gates learn to be open on new text and shut on text that the base wrote,
by cross entropy. What a gate of exactly zero stands before is the base's. Gates that a loss holds shut on old text:
Neutral Residues (arXiv 2410.02744).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.language.precision import mixed
from scale_surgery.modeling.expanded_modules import HeadBlocks, LinearBlocks
from scale_surgery.modeling.expanded_streams import product

# so that a sigmoid becomes exactly 0 and 1 (hard concrete, arXiv 1712.01312)
STRETCH = 0.1
# gates begin open
BIAS = 2.0
# of the loss on new text, beside that on old text: a token that stands in both is rather left to the base
NEW_WEIGHT = 0.3
READ_TOGETHER = 16


class Gates(nn.Module):
    """The gates of a model, which it keeps as a part of it.

    Attributes:
        linears: What each gate makes of the streams, by its number; the last one stands before the head.
        read: What they made of them in the last forward, by number: (rows, tokens, 1) before the sigmoid.
    """

    def __init__(self, model: Any, base_width: int, up_width: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.linears = nn.ModuleList(nn.Linear(base_width + up_width, 1) for _ in range(len(layers) + 1))
        for linear in self.linears:
            nn.init.zeros_(linear.weight)
            nn.init.constant_(linear.bias, BIAS)
        self.base_width, self.read = base_width, dict[int, Tensor]()
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, number), with_kwargs=True)
        for module in model.modules():
            if isinstance(module, LinearBlocks) and module.w12 is not None:
                module.forward = partial(self._write, module)  # type: ignore[method-assign]
            elif isinstance(module, HeadBlocks):
                module.forward = partial(self._answer, module)  # type: ignore[method-assign]

    def loss(self, *, is_new: bool) -> Tensor:
        """Cross entropy of the gates in the last forward, a mean over gates and tokens."""
        sign, weight = (-1, NEW_WEIGHT) if is_new else (1, 1.0)
        return weight * torch.stack([nn.functional.softplus(sign * own).mean() for own in self.read.values()]).mean()

    def _before(self, number: int, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._open(number, hidden[..., : self.base_width], hidden[..., self.base_width :])

    def _open(self, number: int, base: Tensor, up: Tensor) -> Tensor:
        streams = (base.detach().float(), up.float())
        scaled = [own * torch.rsqrt(own.square().mean(-1, keepdim=True) + 1e-6) for own in streams]
        self.read[number] = self.linears[number](torch.cat(scaled, -1)).float()
        # what it lets through trains the blocks; whether it should is told by its own loss
        self.gate = opened(self.read[number]).detach()
        return self.gate

    def _write(
        self, blocks: LinearBlocks, base: Tensor, up: Tensor, y: Tensor, has_w12: bool
    ) -> tuple[Tensor, Tensor | None]:
        y, y_up = LinearBlocks.forward(blocks, base, up, y, False)
        return y + self.gate.to(y.dtype) * product(up, blocks.w12, y) if has_w12 else y, y_up

    def _answer(self, blocks: HeadBlocks, base: Tensor, up: Tensor, y: Tensor, has_w12: bool) -> tuple[Tensor, None]:
        gate = self._open(len(self.linears) - 1, base, up)
        return y + gate.to(y.dtype) * product(up, blocks.up_weight, y), None


def opened(read: Tensor) -> Tensor:
    """How far gates are open, from 0 to 1, both of which they reach."""
    return (torch.sigmoid(read) * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)


def gated(base: Path, seed: int, *, make: Callable[..., Any]) -> Any:
    """An expansion with gates."""
    model = make(base, seed)
    embedding = model.model.embed_tokens
    model.gates = Gates(model, embedding.weight.shape[1], embedding.expansions["default"].up_weight.shape[1])
    return model


def shut(model: Any, rows: Tensor) -> float:
    """Share of the tokens at which every gate is exactly zero."""
    shares = []
    for part in rows.split(READ_TOGETHER):
        with torch.inference_mode(), mixed(model.device.type):
            model(input_ids=part.to(model.device), use_cache=False)
        shares.append(torch.stack([opened(own) == 0 for own in model.gates.read.values()]).all(0))
    return float(torch.cat(shares).double().mean())
