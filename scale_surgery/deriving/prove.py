"""Prove on a tiny twin that an expansion keeps its promises, before a plan relies on the facts about an architecture.

    stock twin  --expanded as facts say-->  expanded twin      logits and cached generation bit for bit, in two dtypes
                                                               what trains, exactly; W12 and head alive; gradients

The real checkpoint is larger, and kernels may take other paths there: `verify` on it stays the last word.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery import modeling
from scale_surgery.deriving.build import SEED, stock_classes, token_ids
from scale_surgery.errors import UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.specs import Collaboration, Spec, Widths, build_specs
from scale_surgery.running.loading import quiet_transformers

DTYPES = (torch.float32, torch.bfloat16)
# one token more than a prompt is enough to need the cache, and a few make it long
NEW_TOKENS = 5
INNER = 24
SPREAD = 0.2
CHECKS = (
    "logits of two rows and of one are the base's bit for bit, in float32 and in bfloat16",
    "the new tensors train, and nothing else",
    "W12 and the head's up part change the logits as soon as they are not zero",
    "every new tensor that reads what is not zero gets a gradient",
)


# where the stock model generates
GENERATION = "cached generation gives the base's tokens"


@dataclass(frozen=True)
class Twin:
    """A stock model to prove facts on.

    Attributes:
        stock: The model, in float32.
        architecture: The facts with its numbers.
        sizes: Its sizes.
    """

    stock: PreTrainedModel
    architecture: Architecture
    sizes: Sizes


def failure_of(twin: Twin) -> str | None:
    """What does not hold when a twin is expanded as its facts say; None where everything does.

    Args:
        twin: The twin.
    """
    specs = expansion_specs(twin)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        try:
            return next(_failures(twin, specs), None)
        # a stock forward may stumble over a wider stream in its own way, and that says what is in the way
        except (UnsupportedFamilyError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def checks_of(twin: Twin) -> list[str]:
    """What is checked of a twin, in words.

    Raises:
        UnsupportedFamilyError: If it gives no hidden states, which every later check of a real model reads.
    """
    ids, stock = token_ids(twin.stock.config), twin.stock
    with quiet_transformers():
        tokens = _generated(stock, ids)
        with torch.no_grad():
            output = stock(input_ids=ids, use_cache=False, output_hidden_states=True)
    if getattr(output, "hidden_states", None) is None:
        raise UnsupportedFamilyError(
            f"{type(stock).__name__}: gives no hidden states with output_hidden_states=True, expected those of all "
            "layers, as models of transformers give them."
        )
    return [*CHECKS, *([] if tokens is None else [GENERATION])]


def expansion_specs(twin: Twin) -> Spec:
    """An expansion of a twin in which everything takes part: the first and the last layer, W12 in both groups."""
    sizes, count = twin.sizes, twin.sizes.layers
    # where the up stream enters as zeros, a middle layer is left out, and the first is not
    layers = tuple(sorted({0, *range(2, count)}))
    widths = Widths(2 * max(8, sizes.head_size), int(bool(sizes.key_value_heads)), INNER)
    specs = build_specs(twin.architecture, sizes, widths, layers, Collaboration(layers, ("attn", "ffn")))
    return specs | {"variant": "adapt", "dtype": None}


def expanded_twin(twin: Twin, specs: Spec) -> Any:
    """The expanded form of a twin: the same base tensors, new ones at random, what has to be zero zero."""
    config = type(twin.stock.config)
    classes = modeling.expanded_classes(stock_classes(twin.stock.config), config)
    widest = next(classes[name] for name in modeling.AUTO_CLASSES if name in classes)
    plain = copy.deepcopy(twin.stock.config).to_dict() | {"scale_surgery": specs}
    plain.pop("model_type", None)
    model = widest._from_config(classes["AutoConfig"].from_dict(plain), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(twin.stock.state_dict(), strict=False)
    if unexpected or not set(missing) <= set(expansion_of(model)):
        raise UnsupportedFamilyError(f"its expanded form has other base tensors: {[*unexpected, *missing][:3]}.")
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in expansion_of(model).items():
            parameter.copy_(torch.randn_like(parameter) * SPREAD + (parameter.dim() == 1))
            if name.endswith((".w12", ".up_bias")):
                parameter.zero_()
        if (head := head_part(model)) is not None:
            head.zero_()
    return model


def expansion_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The new tensors of an expanded model."""
    added = modeling.expansion_names()
    return {name: own for name, own in model.named_parameters() if name.rpartition(".")[2] in added}


def head_part(model: Any) -> nn.Parameter | None:
    """The up part of its head."""
    found: nn.Parameter | None = getattr(model.get_output_embeddings(), "up_weight", None)
    return found


def _failures(twin: Twin, specs: Spec) -> Iterator[str]:
    ids = token_ids(twin.stock.config)
    for dtype in DTYPES:
        base: Any = copy.deepcopy(twin.stock)
        base = base.to(dtype=dtype)
        expanded = expanded_twin(twin, specs).to(dtype=dtype)
        yield from _differences(base, expanded, ids, str(dtype).removeprefix("torch."))
    expanded = expanded_twin(twin, specs)
    expected = set(expansion_of(expanded))
    if {name for name, own in expanded.named_parameters() if own.requires_grad} != expected:
        yield "other tensors than the new ones train"
    yield from _dead_parts(expanded, ids, set() if twin.architecture.enters == "embedding" else {0})


def _differences(base: Any, expanded: Any, ids: Tensor, dtype: str) -> Iterator[str]:
    for rows in (ids, ids[:1, :7]):
        found = [_logits(model, rows) for model in (base, expanded)]
        if not torch.equal(*found):
            yield f"logits of {len(rows)} rows in {dtype} differ by {float((found[0] - found[1]).abs().max()):.1e}"
    tokens = _generated(base, ids)
    if tokens is not None and not torch.equal(tokens, expanded.generate(ids, **_options(base))):
        yield f"cached generation in {dtype} gives other tokens"


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def _generated(model: Any, ids: Tensor) -> Tensor | None:
    """What a stock model generates; None where it cannot, and then no expanded one has to."""
    try:
        found: Tensor = model.generate(ids, **_options(model))
    except Exception:
        return None
    return found


def _options(model: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def _dead_parts(model: Any, ids: Tensor, without_stream: set[int]) -> Iterator[str]:
    """Parts that change nothing, or learn nothing, once nothing is zero any more."""
    head = head_part(model)
    w12 = [own for name, own in expansion_of(model).items() if name.endswith(".w12")]
    groups = {"W12": w12, "the head": [] if head is None else [head]}
    for title, parameters in groups.items():
        before = _logits(model, ids)
        with torch.no_grad():
            for own in parameters:
                own.normal_(0, SPREAD / 4)
        if torch.equal(_logits(model, ids), before):
            yield f"{title}: changes nothing"
    model(input_ids=ids, use_cache=False).logits.float().pow(2).mean().backward()
    layers = f"{model.config.scale_surgery['layers']}."
    for name, own in expansion_of(model).items():
        number = f".{name}".rpartition(f".{layers}")[2].partition(".")[0]
        is_idle = number.isdecimal() and int(number) in without_stream
        if not is_idle and (own.grad is None or not own.grad.any()):
            yield f"{name}: gets no gradient"
    if frozen := [name for name, own in model.named_parameters() if own.grad is not None and not own.requires_grad]:
        yield f"{frozen[0]}: is frozen, and has a gradient"
