"""Prove on a tiny twin that an expansion keeps its promises, before a plan relies on the facts about an architecture.

    stock twin  --expanded as facts say-->  expanded twin      logits and cached generation bit for bit, in two dtypes
                                                               what trains, exactly; W12 and head alive; gradients

Where a check fails, blocks are treated in a weaker way and all is checked again. The real checkpoint is larger, and
kernels may take other paths there: `verify` on it stays the last word.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import BASE_KEY, DEFAULT_NAME, EXPANSIONS_KEY, INFIX
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.deriving.build import SEED, stock_classes, token_ids
from scale_surgery.deriving.fallback import hooked, weaker
from scale_surgery.errors import Problem, SurgeryError, UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.paths import base_specs
from scale_surgery.planning.specs import Collaboration, Spec, Widths, build_specs
from scale_surgery.running.loading import quiet_transformers
from scale_surgery.running.own_generation import generate_with

DTYPES = (torch.float32, torch.bfloat16)
# the second new token already needs the cache
GENERATE: Mapping[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# each costs a few forwards of a tiny model; blocks are of few classes, and each has at most three weaker treatments
MOST_TRIES = 16
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
# where all layers are split alike the first expansion proves the other two
FORMS = "all this with W12 in every expanded layer, with none, and with it in the attention of the upper ones alone"


@dataclass(frozen=True)
class Given:
    """Outputs of the stock twin in one dtype: logits of two rows and of one, and tokens where it generates."""

    logits: tuple[Tensor, Tensor]
    tokens: Tensor | None


@dataclass(frozen=True)
class Twin:
    """A stock model in float32 with the facts in its sizes, its kinds (see `RealModel`), and its outputs by dtype."""

    stock: PreTrainedModel
    architecture: Architecture
    sizes: Sizes
    kinds: tuple[int, ...]
    given: Mapping[torch.dtype, Given]


def given_by(stock: PreTrainedModel) -> dict[torch.dtype, Given]:
    """Outputs of a twin before anything is expanded, by dtype."""
    models: list[Any] = [copy.deepcopy(stock) for _ in DTYPES]
    ids = token_ids(stock.config)
    with quiet_transformers():
        copies = [model.to(dtype=dtype) for model, dtype in zip(models, DTYPES, strict=True)]
        return {model.dtype: Given(_both_logits(model, ids), _generated(model, ids)) for model in copies}


def failure_of(twin: Twin) -> Problem | None:
    """Find the first check that an expanded twin fails; None if it passes all."""
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        try:
            shown = (_failures(twin, specs, in_short=n > 0) for n, specs in enumerate(expansions(twin)))
            return next(chain.from_iterable(shown), None)
        # a stock forward may fail on a wider stream; its error says why
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            return Problem("other-program", error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        except UnsupportedFamilyError as error:
            return error.problems[0]


def checks_of(twin: Twin) -> list[str]:
    """The checks of a twin, in words."""
    generates = all(given.tokens is not None for given in twin.given.values())
    return [*CHECKS, *([GENERATION] * generates), *([] if twin.architecture.is_uniform else [FORMS])]


def refuse_without_states(twin: Twin) -> None:
    """Refuse a model without hidden states, which later checks read."""
    with quiet_transformers(), torch.no_grad():
        output = twin.stock(input_ids=token_ids(twin.stock.config), use_cache=False, output_hidden_states=True)
    if getattr(output, "hidden_states", None) is None:
        raise UnsupportedFamilyError(Problem("hidden-states-missing", type(twin.stock).__name__))


def expansions(twin: Twin) -> Iterator[Spec]:
    """Expansions in which each kind of layer is expanded with W12, expanded without it, and not expanded."""
    layers = _expanded_layers(twin)
    yield _expansion(twin, layers, Collaboration(layers, ("attn", "ffn")))
    if twin.architecture.is_uniform:
        return
    yield _expansion(twin, layers, Collaboration())
    other_layers = _other_layers(twin, layers)
    yield _expansion(twin, other_layers, Collaboration(other_layers[len(other_layers) // 2 :], ("attn",)))


def _expanded_layers(twin: Twin) -> tuple[int, ...]:
    """Return all layers but one, not the first, whose kind occurs again; all layers if no kind does."""
    kinds = twin.kinds
    left_out = [layer for layer in range(1, len(kinds)) if kinds.count(kinds[layer]) > 1]
    return tuple(layer for layer in range(len(kinds)) if layer not in left_out[:1])


def _other_layers(twin: Twin, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return all layers but one of each kind that `layers` holds completely; at least one."""
    kinds, count = twin.architecture.kind_of_layer, twin.sizes.layers
    passed = {kinds[layer] for layer in range(count) if layer not in layers}
    left_out = {number: layer for layer, number in enumerate(kinds) if number not in passed}.values()
    return tuple(layer for layer in range(count) if layer not in left_out) or (0,)


def _expansion(twin: Twin, layers: tuple[int, ...], collaboration: Collaboration) -> Spec:
    sizes = twin.sizes
    # an up width that is no multiple of the head size, nor of eight
    widths = Widths(2 * max(8, sizes.head_size) + 3, int(bool(sizes.key_value_heads)), INNER)
    specs = build_specs(twin.architecture, sizes, widths, layers, collaboration)
    return specs | {"variant": "adapt" if collaboration.layers else "preserve", "dtype": None}


def expanded_twin(twin: Twin, specs: Spec) -> Any:
    """The expanded twin: the same base tensors, random new ones, zeros where an expansion starts with zeros."""
    config = type(twin.stock.config)
    classes = modeling.expanded_classes(stock_classes(twin.stock.config), config)
    widest = next(classes[name] for name in modeling.AUTO_CLASSES if name in classes)
    plain = copy.deepcopy(twin.stock.config).to_dict()
    plain[CONFIG_KEY] = {BASE_KEY: base_specs(twin.architecture, twin.sizes, plain), EXPANSIONS_KEY: [specs]}
    plain.pop("model_type", None)
    model = widest._from_config(classes["AutoConfig"].from_dict(plain), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(twin.stock.state_dict(), strict=False)
    if unexpected or not set(missing) <= set(expansion_tensors(model)):
        raise UnsupportedFamilyError(Problem("twin-tensors-differ", names=[*unexpected, *missing]))
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in expansion_tensors(model).items():
            parameter.copy_(torch.randn_like(parameter) * SPREAD + (parameter.dim() == 1))
            if name.endswith((".w12", ".up_bias")):
                parameter.zero_()
        if (head := head_part(model)) is not None:
            head.zero_()
    return model


def expansion_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The new tensors of an expanded model."""
    return {name: tensor for name, tensor in model.named_parameters() if INFIX in name}


def head_part(model: Any) -> nn.Parameter | None:
    """The up part of its head."""
    expansions: Any = getattr(model.get_output_embeddings(), "expansions", {})
    up_weight: nn.Parameter | None = expansions[DEFAULT_NAME].up_weight if DEFAULT_NAME in expansions else None
    return up_weight


def _failures(twin: Twin, specs: Spec, *, in_short: bool) -> Iterator[Problem]:
    """Checks that one expansion fails; `in_short` leaves out those that another expansion covers."""
    ids, expanded = token_ids(twin.stock.config), expanded_twin(twin, specs)
    for dtype in DTYPES:
        model = expanded if dtype == torch.float32 else expanded_twin(twin, specs).to(dtype)
        given = twin.given[dtype]
        if in_short and dtype != torch.float32:
            given = replace(given, tokens=None)
        yield from differences(given, model, ids, str(dtype).removeprefix("torch."))
    expected = set(expansion_tensors(expanded))
    if {name for name, tensor in expanded.named_parameters() if tensor.requires_grad} != expected:
        yield Problem("twin-trains-others")
    if not in_short:
        yield from _dead_parts(expanded, ids)
    yield from _without_gradient(expanded, ids, specs)


def differences(given: Given, expanded: Any, ids: Tensor, dtype: str) -> Iterator[Problem]:
    """Compare logits and generation with those of the stock twin."""
    for base, logits in zip(given.logits, _both_logits(expanded, ids), strict=True):
        if not torch.equal(base, logits):
            most = float((base - logits).abs().max())
            yield Problem("twin-logits-differ", rows=len(base), dtype=dtype, most=most)
    if given.tokens is not None and not torch.equal(given.tokens, _write(expanded, ids)):
        yield Problem("twin-tokens-differ", dtype=dtype)


def _both_logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of two rows, and of a shorter one alone: kernels are chosen by shapes."""
    return _logits(model, ids), _logits(model, ids[:1, :7])


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _generated(model: Any, ids: Tensor) -> Tensor | None:
    """Tokens that a model generates; None where it cannot, and then the expanded one need not."""
    try:
        return _write(model, ids)
    except Exception:
        return None


def _write(model: Any, ids: Tensor) -> Tensor:
    made: Tensor = generate_with(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **GENERATE)
    return made


def _dead_parts(model: Any, ids: Tensor) -> Iterator[Problem]:
    """Parts that change nothing as soon as they are not zero."""
    for title, parameters in _zeros(model).items():
        before = _logits(model, ids)
        with torch.no_grad():
            for tensor in parameters:
                tensor.normal_(0, SPREAD / 4)
        if torch.equal(_logits(model, ids), before):
            yield Problem("part-without-effect", title)


def _zeros(model: Any) -> dict[str, list[nn.Parameter]]:
    """Parts that begin as zeros."""
    head = head_part(model)
    w12 = [tensor for name, tensor in expansion_tensors(model).items() if name.endswith(".w12")]
    return {"W12": w12, "the head": [] if head is None else [head]}


def _without_gradient(model: Any, ids: Tensor, specs: Spec) -> Iterator[Problem]:
    """New tensors without a gradient where nothing is zero, and frozen ones with one."""
    with torch.no_grad():
        for tensor in (tensor for parameters in _zeros(model).values() for tensor in parameters):
            tensor.normal_(0, SPREAD / 4)
    model(input_ids=ids, use_cache=False).logits.float().pow(2).mean().backward()
    # where the up stream enters as zeros, the first expanded layer may have none
    is_entered = any(spec["kind"] == "embedding" for spec in specs["model"].values())
    idle = "" if is_entered else f".{specs['layers']}.{specs['expanded_layers'][0]}."
    for name, tensor in expansion_tensors(model).items():
        is_idle = bool(idle) and idle in f".{name}"
        if not is_idle and (tensor.grad is None or not tensor.grad.any()):
            yield Problem("gradient-missing", name)
    with_gradient = [(name, tensor) for name, tensor in model.named_parameters() if tensor.grad is not None]
    if frozen := [name for name, tensor in with_gradient if not tensor.requires_grad]:
        yield Problem("gradient-of-frozen", frozen[0])


def prove(architecture: Architecture, twin: Twin) -> tuple[Architecture, Twin]:
    """Find the strongest treatments with which an expanded twin keeps its promises; the twin gets the same facts."""
    waiting, seen = [(architecture, twin.architecture)], list[tuple[Architecture, Architecture]]()
    first: Problem | None = None
    while waiting and len(seen) < MOST_TRIES:
        real, tiny = waiting.pop(0)
        seen.append((real, tiny))
        candidate = replace(twin, architecture=tiny)
        failure = failure_of(candidate)
        if failure is None:
            return real, candidate
        first = first or failure
        waiting += [pair for pair in _weaker_pairs(real, tiny) if pair not in seen and pair not in waiting]
    assert first is not None
    raise UnsupportedFamilyError(Problem("promises-not-kept", architecture.config_class, first, ways=len(seen)))


def fixed_vocabulary(twin: Twin) -> str:
    """Find why tokens cannot be added to a model, tried on its twin; empty where they can."""
    sizes = twin.sizes
    if sizes.unpredicted:
        return f"its embedding has {sizes.embedded} rows and its head {sizes.vocabulary}, expected one vocabulary"
    if others := _other_readers(twin):
        return f"{others[0]} reads token ids too, and has no rows for new ones, expected one embedding"
    specs = build_specs(twin.architecture, sizes, Widths(new_tokens=1), (), Collaboration())
    ids, known = token_ids(twin.stock.config), sizes.vocabulary
    try:
        with torch.random.fork_rng(devices=[]):
            model = expanded_twin(twin, specs | {"variant": "preserve", "dtype": None})
        logits = _logits(model, ids)
        if logits.shape[-1] != known + 1 or not torch.equal(logits[..., :known], twin.given[torch.float32].logits[0]):
            return "beside a new one the logits of its own tokens are others"
        with model.expansion_disabled():
            if _logits(model, ids).softmax(-1)[..., known:].any():
                return "its logits are capped after the head, where the base alone has to give new tokens probability 0"
        model(input_ids=ids.index_fill(1, torch.tensor([1]), known), use_cache=False).logits.pow(2).mean().backward()
    # a stock forward may use the number of tokens; its error says how
    except (SurgeryError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        return f"its tiny twin with one more fails ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
    idle = [name for name, tensor in expansion_tensors(model).items() if tensor.grad is None or not tensor.grad.any()]
    return f"{idle[0]} gets no gradient" if idle else ""


@torch.no_grad()
def _other_readers(twin: Twin) -> list[str]:
    """Modules with weights, beside the embedding, that read token ids."""
    ids, readers = token_ids(twin.stock.config), list[str]()
    model: Any = copy.deepcopy(twin.stock)
    embedding = model.get_input_embeddings()

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_read = any(
            isinstance(argument, Tensor) and argument.dtype == ids.dtype and torch.equal(argument, ids)
            for argument in args
        )
        if is_read and module is not embedding and module._parameters:
            readers.append(name)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(note, name))
    model(input_ids=ids, use_cache=False)
    return readers


def _weaker_pairs(real: Architecture, twin: Architecture) -> Iterator[tuple[Architecture, Architecture]]:
    """Facts of both models with the blocks of one class treated in the next weaker way, or with another start."""
    kinds = dict.fromkeys(block.kind for kind in real.kinds for block in kind.blocks)
    pairs = [(weaker(real, kind), weaker(twin, kind)) for kind in kinds]
    pairs.append((hooked(real), hooked(twin)))
    yield from ((real, twin) for real, twin in pairs if real is not None and twin is not None)
