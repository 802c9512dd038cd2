"""The pilot: a short training run of a base model that measures the size of each layer's change.

A trained parameter takes 12 bytes: float32 and two moments of AdamW. Its initial value stays in main memory in the
stored dtype. All other parameters keep their stored dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from scale_surgery.errors import Problem, TrainingError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.progress import Track
from scale_surgery.running.device import has_bfloat16
from scale_surgery.running.pieces import Tail
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import collate
from scale_surgery.training.arguments import WARM_UP
from scale_surgery.training.chunked_loss import find_pieces, loss_in_pieces
from scale_surgery.training.ranking import RankingSettings

# the first and the last loss are means over this share of the steps
REPORTED_SHARE = 0.05


@dataclass(frozen=True)
class Pilot:
    """The result of a pilot: losses of its first and last steps, trained parameters, and the change of each layer."""

    first_loss: float
    last_loss: float
    trained_parameters: int
    changes: Mapping[int, float]


def run_pilot(
    model: Any, facts: Architecture, text: Sequences, settings: RankingSettings, steps: int, track: Track
) -> Pilot:
    """Train a base model in place for a few steps, and measure how much each layer changed."""
    if model.dtype != torch.float32 and not has_bfloat16(model.device.type):
        # as `train` widens a base
        model.float()
    precision = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.dtype != torch.float32)
    matrices = find_matrices(model, facts)
    start = {layer: [matrix.detach().to("cpu", copy=True) for matrix in some] for layer, some in matrices.items()}
    model.requires_grad_(False)
    losses = []
    with ExitStack() as hooks, track("pilot", steps) as advance:
        for matrix in chain.from_iterable(matrices.values()):
            # bfloat16 would lose an update of less than a 256th of a number
            matrix.data = matrix.data.float()
            matrix.requires_grad_(True)
            hooks.callback(_step_in_backward(matrix, settings, steps).remove)
        for loss in _train(model, text, settings, steps, precision):
            losses.append(loss)
            advance(1, f"loss {loss:.3f}")
    part = math.ceil(REPORTED_SHARE * len(losses))
    return Pilot(
        first_loss=sum(losses[:part]) / part,
        last_loss=sum(losses[-part:]) / part,
        trained_parameters=sum(matrix.numel() for matrix in chain.from_iterable(matrices.values())),
        changes={layer: _change(layer, start[layer], some) for layer, some in matrices.items()},
    )


def find_matrices(model: Any, facts: Architecture) -> dict[int, list[nn.Parameter]]:
    """Return the matrices of each layer's MLP or mixture, or of all its blocks if it has neither."""
    matrices = {}
    for number, layer in enumerate(model.get_submodule(facts.layers_path)):
        blocks = facts.kind(number).blocks
        wanted = [block for block in blocks if block.group == "ffn"] or blocks
        names = [name for block in wanted for name in [linear.name for linear in block.linears] or [block.name]]
        parameters = chain.from_iterable(layer.get_submodule(name).parameters() for name in names)
        matrices[number] = [matrix for matrix in parameters if matrix.dim() > 1 and matrix.is_floating_point()]
    return matrices


def _step_in_backward(matrix: nn.Parameter, settings: RankingSettings, steps: int) -> Any:
    """Let AdamW update a matrix as soon as it has a gradient, so that only one gradient is held at a time.

    Returns the handle of the hook: the hook holds the matrix and its moments, and the matrix holds the hook.
    """
    optimizer = torch.optim.AdamW([matrix], lr=settings.learning_rate, weight_decay=0.0)
    warm_up = math.ceil(WARM_UP * steps)
    schedule = LambdaLR(optimizer, lambda step: share_of_rate(step + 1, steps, warm_up))

    def step(_: Tensor) -> None:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return matrix.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


def share_of_rate(step: int, steps: int, warm_up: int) -> float:
    """Return the share of the highest learning rate at a step, from 1: a linear rise, then a linear fall to zero."""
    return step / warm_up if step <= warm_up else (steps + 1 - step) / (steps + 1 - warm_up)


def _train(model: Any, text: Sequences, settings: RankingSettings, steps: int, precision: torch.autocast) -> Any:
    tail: Tail | None = None
    model.train()
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        # renamed within transformers 5
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    order = torch.Generator().manual_seed(settings.seed)
    loader: Any = DataLoader(
        text,  # type: ignore[arg-type]
        settings.batch_size,
        shuffle=True,
        collate_fn=collate,
        generator=order,
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)  # for randomness inside models, such as dropout
        for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), steps), start=1):
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
            if step == 1:
                # in a context of its own: torch before 2.11 keeps the casts that it makes without gradients
                with precision:
                    tail = find_pieces(model, model, inputs)
            with precision, nullcontext() if tail is None else loss_in_pieces(model, tail, inputs):
                loss = model(**inputs)["loss"]
            number = float(loss.detach())
            if not math.isfinite(number):
                rate = settings.learning_rate
                raise TrainingError(Problem("pilot-loss-not-finite", "pilot", loss=number, step=step, rate=rate))
            loss.backward()
            yield number


@torch.no_grad()
def _change(layer: int, start: Sequence[Tensor], end: Sequence[Tensor]) -> float:
    """Return |W' - W| / |W| of all matrices of a layer together."""
    norm = torch.linalg.vector_norm
    changes = [float(norm(new.cpu() - old, dtype=torch.float64)) for old, new in zip(start, end, strict=True)]
    changed, whole = math.hypot(*changes), math.hypot(*(float(norm(old, dtype=torch.float64)) for old in start))
    if not math.isfinite(changed):
        raise TrainingError(Problem("pilot-layer-not-finite", "pilot", layer=layer))
    return changed / whole if whole else math.inf
