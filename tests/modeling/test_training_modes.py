"""Every way of training gives the blocks the gradients that one plain dense block matrix would get.

The reference computes in float64 and detaches nothing: see `tests.dense_reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from scale_surgery.modeling.expanded_blocks import LinearBlocks
from scale_surgery.modeling.expanded_modules import ExpandedHeadNorm, ExpandedModule
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from tests.conftest import load
from tests.dense_reference import dense_gradients
from tests.each import FEW, each_way, mostly, woven
from tests.modeling.test_gradients import always_detached, never_detached
from tests.routed import train
from tests.tiny import FAMILIES, save_tiny

# largest relative error of one tensor's gradient, norm over norm; the largest found in float32 is 1.2e-5
ALLOWED = 1e-4
# in bfloat16: times what bfloat16 costs the dense block matrix itself; the largest found is 2.9
ALLOWED_NOISE = 4
KINDS = ("llama", "gpt2", "phi3", "gemma3_text", "gpt_neox")  # plain, Conv1D, fused by section, head norms, by head
REQUESTS = {
    "preserve": Request("1-2", init_w22="random"),
    # layer 0 is detached, layer 1 lets the up stream pass, layer 2 collaborates
    "adapt": Request("0,2", variant="adapt", collaborative_layers="2", collaborate="both", init_w22="random"),
    "adapt_without_up_stream": Request("1", variant="adapt", up_width=0, init_w22="random"),
}
NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}
HOOKS, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
CHECKPOINTING = (None, HOOKS, REENTRANT)

Gradients = dict[str, Tensor]
each_kind = pytest.mark.parametrize("family", mostly(KINDS, ("llama", "gpt2", "gemma3_text").__contains__))


def batch(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Four rows, of which the second is padded on the right, so that the halves count different numbers of tokens."""
    ids = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Expand a tiny base model without dropout; a bfloat16 base gets a float32 expansion."""

    @functools.cache
    def make(family: str, request_name: str, dtype: str = "float32") -> Path:
        folder = tmp_path_factory.mktemp(f"{family}_{request_name}_{dtype}")
        base = save_tiny(folder / "base", family, dtype=getattr(torch, dtype), **NO_DROPOUT.get(family, {}))
        return expand(base, replace(REQUESTS[request_name], dtype="float32"), folder / "expanded").path

    return make


@pytest.fixture(scope="module")
def model_of(path_of: Callable[..., Path]) -> Callable[..., Any]:
    """Load an expanded model for training; every tensor that may train has moved, so nothing hides behind a zero."""

    return lambda *which: train(load(path_of(*which))).train()


@pytest.fixture(scope="module")
def wanted_of(model_of: Callable[..., Any]) -> Callable[..., Gradients]:
    """Gradients of the dense block matrices, in float64."""

    @functools.cache
    def make(*which: str) -> Gradients:
        return dense_gradients(model_of(*which), **batch())

    return make


@pytest.fixture(scope="module")
def noise_of(model_of: Callable[..., Any], wanted_of: Callable[..., Gradients]) -> Callable[..., dict[str, float]]:
    """Errors of the dense block matrices themselves, computed with bfloat16 products."""

    @functools.cache
    def make(*which: str) -> dict[str, float]:
        with autocast():
            return errors(dense_gradients(model_of(*which), dtype=torch.float32, **batch()), wanted_of(*which))

    return make


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget compiled graphs, before and after."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def autocast(device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, torch.bfloat16)


def enable_checkpointing(model: Any, options: dict[str, Any] | None) -> None:
    """Switch activation checkpointing on, by the name that this transformers release has for it."""
    new_name = getattr(model, "activation_checkpointing_enable", None)
    (new_name or model.gradient_checkpointing_enable)(options)


def gradients(model: Any, run: Callable[..., Any] | None = None, context: Callable[[], Any] = nullcontext) -> Gradients:
    """Gradients of one step on the batch."""
    with context():
        loss = (run or model)(**batch(model.device)).loss
    loss.backward()
    return collected(model)


def accumulated(model: Any, context: Callable[[], Any] = nullcontext) -> Gradients:
    """Gradients of the same step taken in two halves, each divided by the number of tokens of both."""
    inputs = batch(model.device)
    tokens = (inputs["labels"][:, 1:] != -100).sum()
    for rows in (slice(0, 2), slice(2, 4)):
        half = {name: tensor[rows] for name, tensor in inputs.items()}
        with context():
            loss = model(**half, num_items_in_batch=tokens).loss
        loss.backward()
    return collected(model)


def collected(model: Any) -> Gradients:
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors(actual: Gradients, wanted: Gradients) -> dict[str, float]:
    """Relative error of each tensor's gradient; what has no gradient in the reference must have none."""
    assert actual.keys() == wanted.keys()
    distances = {name: (actual[name].double() - gradient).norm().item() for name, gradient in wanted.items()}
    sizes = {name: gradient.norm().item() for name, gradient in wanted.items()}
    assert all(distances[name] == 0 for name, size in sizes.items() if size == 0)
    return {name: distances[name] / size for name, size in sizes.items() if size}


def check(actual: Gradients, wanted: Gradients) -> None:
    """Check gradients of float32 products."""
    found_errors = errors(actual, wanted)
    worst = max(found_errors, key=found_errors.__getitem__)
    assert found_errors[worst] < ALLOWED, f"{worst}: relative error {found_errors[worst]:.1e}"


def check_noise(actual: Gradients, wanted: Gradients, noise: dict[str, float]) -> None:
    """Check gradients of bfloat16 products: as near to the exact ones as the dense matrix comes, up to a factor."""
    usual = sorted(noise.values())[len(noise) // 2]
    for name, error in errors(actual, wanted).items():
        assert error < ALLOWED_NOISE * (noise[name] + usual), f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(("family", "request_name"), woven(FEW, list(REQUESTS), among=FAMILIES))
def test_plain(model_of: Any, wanted_of: Any, family: str, request_name: str) -> None:
    model, wanted = model_of(family, request_name), wanted_of(family, request_name)
    assert wanted.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # where layer 0 is not expanded, what reads the up stream in the first expanded layer reads zeros
    of_zeros = [name for name, gradient in wanted.items() if not gradient.any()]
    assert all("layers.1." in name or "h.1." in name for name in of_zeros), of_zeros
    check(gradients(model), wanted)


@pytest.mark.parametrize(
    ("family", "request_name", "options"),
    mostly(
        product(KINDS, ("preserve", "adapt"), CHECKPOINTING),
        [("llama", "preserve", None), ("gpt2", "adapt", HOOKS), ("gemma3_text", "adapt", REENTRANT)].__contains__,
    ),
    ids=str,
)
def test_activation_checkpointing(
    model_of: Any, wanted_of: Any, family: str, request_name: str, options: dict[str, Any] | None
) -> None:
    model, runs = model_of(family, request_name), []
    last_block = [module for module in model.modules() if isinstance(module, LinearBlocks)][-1]
    last_block.register_forward_pre_hook(lambda *_: runs.append(1))
    enable_checkpointing(model, options)
    model_gradients = gradients(model)
    assert len(runs) == 2, "the layer was computed once more on the way back"
    check(model_gradients, wanted_of(family, request_name))


def test_reentrant_checkpointing_of_a_release_that_prepares_no_inputs(model_of: Any, wanted_of: Any) -> None:
    """transformers 4.57 does no more than this; without a gradient for its input a layer would give none at all."""
    model = model_of("llama", "preserve")
    run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    check(gradients(model), wanted_of("llama", "preserve"))


# the step whole or in two halves, in what precision, of a base of which dtype, checkpointed or not
WAYS_TO_STEP = {
    "accumulated": (accumulated, nullcontext, "float32", False),
    "autocast": (gradients, autocast, "float32", False),
    "autocast of a bfloat16 base": (gradients, autocast, "bfloat16", False),
    "a bfloat16 base": (gradients, nullcontext, "bfloat16", False),
    "all of it at once": (accumulated, autocast, "bfloat16", True),
}


@pytest.mark.parametrize(
    ("family", "request_name", "way"),
    mostly(
        product(KINDS, ("preserve", "adapt"), WAYS_TO_STEP),
        [
            ("llama", "preserve", "all of it at once"),
            ("gpt2", "preserve", "accumulated"),
            ("gemma3_text", "adapt", "all of it at once"),
        ].__contains__,
    ),
)
def test_other_ways_to_step(
    model_of: Any, wanted_of: Any, noise_of: Any, family: str, request_name: str, way: str
) -> None:
    """The expansion is in float32 whatever the base is."""
    step, context, dtype, is_checkpointed = WAYS_TO_STEP[way]
    which = (family, request_name, dtype)
    model = model_of(*which)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, getattr(torch, dtype)}
    if is_checkpointed:
        enable_checkpointing(model, None)
    step_gradients = step(model, context=context)
    assert {gradient.dtype for gradient in step_gradients.values()} == {torch.float32}
    if way == "accumulated":
        check(step_gradients, wanted_of(*which))
    else:
        check_noise(step_gradients, wanted_of(*which), noise_of(*which))


COMPILED = [
    (family, name, use_cache) for family in KINDS for name in ("preserve", "adapt") for use_cache in (True, False)
]


@pytest.mark.parametrize(
    ("family", "request_name", "use_cache"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED],
)
def test_compile(
    model_of: Any, wanted_of: Any, compiler: None, family: str, request_name: str, use_cache: bool
) -> None:
    """One graph, without a break; the cache decides how keys and values lie in memory."""
    model = model_of(family, request_name)
    # transformers reads the loss from a class's name; GPT-2's does not say it, and the warning would break the graph
    model.loss_type = "ForCausalLM"
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check(gradients(model, lambda **inputs: compiled(**inputs, use_cache=use_cache)), wanted_of(family, request_name))
    assert counters["stats"]["unique_graphs"] == 1


def weights_kept(model: Any, context: Any = None) -> set[str]:
    """Names of the frozen tensors that autograd keeps for a backward pass: those whose input gets a gradient."""
    # a norm inside each head is left out: the new heads share it, and they do get gradients
    shared = {module.weight for module in model.modules() if isinstance(module, ExpandedHeadNorm)}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and p not in shared}
    names = {parameter.untyped_storage().data_ptr(): name for name, parameter in frozen.items()}
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(**batch())
    return {name for address, name in names.items() if address in kept}


@each_way
def test_below_the_first_collaborative_layer_nothing_passes_through_the_base(model_of: Any, family: str) -> None:
    assert weights_kept(model_of(family, "preserve")) == set()
    kept = weights_kept(model_of(family, "adapt"))
    in_layers = {name for name in kept if "layers." in name or ".h." in name}
    assert in_layers and all(".2." in name for name in in_layers)
    with never_detached():
        assert any(".1." in name for name in weights_kept(model_of(family, "preserve"))), "the control"


@pytest.mark.parametrize(
    ("family", "options"),
    mostly(product(KINDS, CHECKPOINTING), [("llama", None), ("gpt2", HOOKS), ("gemma3_text", REENTRANT)].__contains__),
    ids=str,
)
def test_nor_under_checkpointing(
    model_of: Any, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any] | None
) -> None:
    """Checkpointing lets the embedding's output require a gradient, base stream and all."""
    read: set[str] = set()
    stock = ExpandedModule.through

    def noted(module: Any, run: Any, x: Tensor, layout: Any) -> Tensor:
        def run_noted(base: Tensor) -> Tensor:
            if base.requires_grad:
                read.add(module.name)
            return run(base)

        return stock(module, run_noted, x, layout)

    allowed_of = {"preserve": ".none.", "adapt": ".2."}
    models = {request_name: model_of(family, request_name) for request_name in allowed_of}
    monkeypatch.setattr(ExpandedModule, "through", noted)
    for request_name, allowed in allowed_of.items():
        model = models[request_name]
        for name, module in model.named_modules():
            module.name = name
        enable_checkpointing(model, options)
        gradients(model)
        outside = {name for name in read if "layers." in name or ".h." in name or request_name == "preserve"}
        assert all(allowed in name for name in outside), outside
    assert read, "the control: what collaborates carries gradients"


@each_kind
def test_a_wrong_gradient_would_be_noticed(model_of: Any, wanted_of: Any, noise_of: Any, family: str) -> None:
    """Negative controls: detached too high up, in both precisions, and one block's gradient wrong by a thousandth."""
    which = (family, "adapt")
    model, wanted = model_of(*which), wanted_of(*which)
    name = next(name for name in wanted if name.endswith("w22"))
    nearly = {**wanted, name: wanted[name] * 1.001}
    with pytest.raises(AssertionError, match="w22: relative error 1"):
        check(nearly, wanted)
    with always_detached():
        missing = set(wanted) - set(gradients(model))
    assert missing == set() or all(name.endswith("w12") for name in missing)
    detached_gradients = {name: gradient.clone() for name, gradient in wanted.items()} | collected(model)
    with pytest.raises(AssertionError, match="relative error"):
        check(detached_gradients, wanted)
    with pytest.raises(AssertionError, match="relative error"):
        check_noise(detached_gradients, wanted, noise_of(*which))
