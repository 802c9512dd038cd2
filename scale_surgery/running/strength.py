"""The strength of an expansion: a factor of what it writes into the base stream and into the logits.

    y + s W12 x_up        logits + s head_up x_up        s = 0 gives the base, s = 1 the learned model

The up stream is computed as it was learned. The factor is in the tensors, so that no forward pass computes more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.methods import method_of_variant

if TYPE_CHECKING:
    from torch import Tensor, nn

# groups of tensors that write into the base stream or the logits
WRITING_GROUPS = ("w12", "head")


def set_strength(model: Any, strength: float, name: str | None = None) -> Any:
    """Set the strength of an expansion of a loaded model, for inference.

    At 0 the logits are the base's bit for bit, at 1 those of the learned model. In between, the tensors that write into
    the base stream and the logits are scaled, rounded once to their dtype, and frozen. They equal those that
    `merge(..., strength=...)` writes. The learned tensors are kept beside them until the strength is 1 again. Set 1
    before the model is trained, saved, cast or moved to another device. Exception: a posterior router sums
    probabilities of two equal paths at 0, which rounds.

    Args:
        model: An expanded model, as `from_pretrained` or `load_expansion` gives it.
        strength: From 0 to 1, of the learned model: 0.5 after 0.5 changes nothing.
        name: Expansion to scale. Default: all expansions.

    Returns:
        The same model.

    Raises:
        PlanError: If the strength is out of range, the model has no such expansion, or its expansion has no strength:
            copies of an MLP or of layers, new tokens, a fused model, weights that are streamed from files.
    """
    check_strength(strength)
    names = plans_of(model) if name is None else [name]
    if problems := [*_model_problems(model, names), *_offloaded(model, names)]:
        raise PlanError(*problems)
    for blocks, tensor in _writing(model, names):
        learned = vars(blocks).setdefault("learned", {})
        # the learned tensor is the parameter itself at strength 1
        original = learned.setdefault(tensor, blocks._parameters[tensor])
        blocks._parameters[tensor] = _at(original, strength)
        if strength == 1:
            del learned[tensor]
    for each in names:
        model.strengths[each] = strength
    model.strengths = {each: value for each, value in model.strengths.items() if value != 1}
    return model


@contextmanager
def at_strength(model: Any, strength: float, name: str | None = None) -> Iterator[None]:
    """Set the strength of an expansion inside a `with` block, and 1 behind it."""
    set_strength(model, strength, name)
    try:
        yield
    finally:
        set_strength(model, 1, name)


def check_strength(strength: float) -> None:
    """Refuse a strength that is not from 0 to 1."""
    if not 0 <= strength <= 1:
        raise PlanError(Problem("strength-out-of-range", "strength", strength=strength))


def strength_problems(variant: object, new_tokens: int, where: object) -> list[Problem]:
    """List the reasons why an expansion has no strength between its base's and its own."""
    problems = method_of_variant(variant).refusal("strength", where)
    return problems + ([Problem("strength-new-tokens", where, tokens=new_tokens)] if new_tokens else [])


def scaled(tensor: Tensor, strength: float) -> Tensor:
    """Multiply a tensor by a strength, and round once to its dtype."""
    import torch

    exact = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(exact) * strength).to(tensor.dtype)


def plans_of(model: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of a loaded model's expansions in its config, by name; empty without blocks."""
    plans: Mapping[str, Mapping[str, Any]] = getattr(model, "plans", {})
    return plans


def _at(original: nn.Parameter, strength: float) -> nn.Parameter | None:
    from torch import nn

    if strength == 1:
        return original
    # a block that is missing is never multiplied: 0 times infinity is NaN, and -0.0 + 0.0 is 0.0
    return None if strength == 0 else nn.Parameter(scaled(original.detach(), strength), requires_grad=False)


def _model_problems(model: Any, names: Any) -> Iterator[Problem]:
    plans = plans_of(model)
    if not plans:
        yield from _without_blocks(model)
    for name in names:
        if name not in plans:
            yield Problem("path-unknown", f"expansion {name}", model=type(model).__name__, paths=list(plans))
            continue
        plan = plans[name]
        yield from strength_problems(plan.get("variant"), plan["head"].get("new_tokens", 0), f"expansion {name}")


def _without_blocks(model: Any) -> Iterator[Problem]:
    specs = getattr(model.config, CONFIG_KEY, None) or {}
    if getattr(model, "is_fused", False):
        yield Problem("strength-fused", "model")
    elif "variant" in specs:
        yield from strength_problems(specs["variant"], 0, "model")
    else:
        yield Problem("model-without-expansion", "model", key=CONFIG_KEY)


def _offloaded(model: Any, names: Any) -> Iterator[Problem]:
    learned = [blocks._parameters[tensor] for blocks, tensor in _writing(model, names)]
    if any(tensor is not None and tensor.is_meta for tensor in learned):
        yield Problem("strength-offloaded", "model")


def _writing(model: Any, names: Any) -> Iterator[tuple[Any, str]]:
    """Yield the blocks and names of the tensors by which these expansions write; those that are set to 0 too."""
    if not plans_of(model):
        return
    for path, blocks in model.named_modules():
        module, _, name = path.rpartition(".")
        if name not in names or not module.endswith(".expansions"):
            continue
        for tensor, group in blocks.group_of.items():
            is_there = blocks._parameters.get(tensor) is not None or tensor in vars(blocks).get("learned", {})
            if group in WRITING_GROUPS and is_there:
                yield blocks, tensor
