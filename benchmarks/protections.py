"""Ways to learn that protect what a base knows, beside expansions: by PEFT where it has them, else from their papers.

L2 pulls back to where training began, as a part of the loss. SSU (source-shielded updates, arXiv 2512.04844) leaves
columns alone that matter to text of the base, OSF (orthogonal subspace fine-tuning, arXiv 2504.07097) the largest
singular directions. CorDA (arXiv 2406.05223, knowledge-preserved) lets adapters begin where text of the base has least.
After training: intruder reduction (arXiv 2410.21228), and weights between those of the base and of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.biography.methods import adapted, whole, with_adapter

MLP = ["gate_proj", "up_proj", "down_proj"]
# by name: what prepares CorDA takes "all-linear" for the name of a module
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]
# of the columns of a matrix, as in the paper
SHIELDED = 0.5


def pulled(base: Path, seed: int, *, weight: float) -> Any:
    """Load the base, all of it trainable, with `weight` times the squared distance from it in the loss."""
    model = whole(base, seed)
    for parameter in model.parameters():
        parameter.register_hook(partial(_pull, parameter, parameter.detach().clone(), weight))
    return model


def _pull(parameter: Tensor, start: Tensor, weight: float, gradient: Tensor) -> Tensor:
    return gradient + 2 * weight * (parameter.detach() - start)


def shielded(base: Path, seed: int, *, samples: Callable[[Any], Tensor]) -> Any:
    """Load the base with half of the columns of each linear frozen, those of largest |W| |x| on its own samples."""
    model = whole(base, seed)
    for module, norms in _input_norms(model, samples(model)).items():
        importance = (module.weight.detach().abs() * norms).sum(0)
        kept = importance.topk(round(SHIELDED * len(importance))).indices
        mask = torch.ones_like(importance).index_fill_(0, kept, 0)
        module.weight.register_hook(mask.mul)
    return model


def _input_norms(model: Any, rows: Tensor) -> dict[nn.Linear, Tensor]:
    """Root of the summed squares of each input feature of each linear but the head, over rows of tokens."""
    squares: dict[nn.Linear, Tensor] = {}

    def add(module: nn.Linear, given: tuple[Tensor], _: Tensor) -> None:
        squares[module] = squares.get(module, 0) + given[0].detach().float().square().sum((0, 1))

    linears = [module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [linear.register_forward_hook(add) for linear in linears]
    _read(model, rows)
    for hook in hooks:
        hook.remove()
    return {module: total.sqrt() for module, total in squares.items()}


def _read(model: Any, rows: Tensor) -> None:
    # row by row, in float32: what prepares CorDA asks for it
    with torch.no_grad():
        for part in rows.split(1):
            model(input_ids=part.to(model.device), use_cache=False)


def subspaced(base: Path, seed: int) -> Any:
    """Load the base with OSF."""
    return with_subspaces(whole(base, seed), seed)


def with_subspaces(model: Any, seed: int) -> Any:
    """The model with OSF on every linear of attention and MLP, at the default of PEFT: half of the directions."""
    from peft import OSFConfig

    torch.manual_seed(seed)
    return with_adapter(model, OSFConfig(target_modules=LINEARS))


def knowledge_preserved(base: Path, seed: int, *, rank: int, samples: Callable[[Any], Tensor]) -> Any:
    """Load the base with CorDA's adapters on every linear of attention and MLP, oriented by its own samples."""
    from peft import LoraConfig
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    torch.manual_seed(seed)
    model = whole(base, seed)
    rows = samples(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=LINEARS,
        init_lora_weights="corda",
        corda_config=CordaConfig(corda_method="kpm"),
    )
    preprocess_corda(model, config, run_model=lambda: _read(model, rows))
    return with_adapter(model, config)


on_mlps = partial(adapted, start=True, target_modules=MLP)


def without_intruders(base: Path, model: Any) -> Any:
    """The model with intruder dimensions of its LoRA reduced, at the defaults of PEFT."""
    from peft.tuners.lora.intruders import reduce_intruder_dimension

    reduced = deepcopy(model)
    reduce_intruder_dimension(reduced, logging_sink=None)
    return reduced


def between(share: float, make: Callable[..., Any], base: Path, model: Any) -> Any:
    """The model with weights so far from where training began, as a share of the way to where it ended."""
    blended = deepcopy(model)
    start = dict(make(base, 0).named_parameters())
    with torch.no_grad():
        for name, parameter in blended.named_parameters():
            if parameter.requires_grad:
                parameter.lerp_(start[name].to(parameter), 1 - share)
    return blended
