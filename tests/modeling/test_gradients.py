"""Gradients: nothing is backpropagated through a base stream that cannot learn, and the blocks get what they should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal

import pytest
import torch

from scale_surgery import Request, expand
from scale_surgery.modeling.expanded_modules import ExpandedModule
from scale_surgery.planning.scale import idle_tensors
from tests.conftest import load
from tests.each import FEW, mostly, woven
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES


def gradients(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the new tensors on fixed tokens, and how many tensors autograd had to keep for them."""
    kept = []
    torch.manual_seed(3)
    ids = torch.randint(3, 97, (2, 9))
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(1) or tensor, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return found, len(kept)


@contextmanager
def never_detached() -> Iterator[None]:
    """Let gradients pass through every base stream inside a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
        yield


@contextmanager
def always_detached() -> Iterator[None]:
    """Let no gradient pass through a base stream that an expansion writes into either, inside a `with` block."""
    split = ExpandedModule.split

    def detached(module: Any, x: torch.Tensor, layout: Any) -> list[torch.Tensor]:
        streams = zip(split(module, x, layout), layout.up_in, strict=True)
        return [stream.detach() if up is None else stream for stream, up in streams]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpandedModule, "split", detached)
        yield


@pytest.mark.parametrize(("family", "request_name"), woven(FEW, ("preserve", "adapt"), among=FAMILIES))
def test_detaching_changes_no_gradient_and_keeps_less(pair_of: Any, family: str, request_name: str) -> None:
    model = pair_of(family, request_name, "float32", True).load()
    with torch.no_grad():  # as after some training: nothing hides behind a zero
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("norm.expansions.default.up_weight"):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    detached, few = gradients(model)
    with never_detached():
        attached, many = gradients(model)
    assert detached.keys() == attached.keys() and len(detached) > 20
    for name, gradient in detached.items():
        torch.testing.assert_close(gradient, attached[name], rtol=1e-4, atol=1e-6, msg=name)
    if request_name == "preserve":
        assert few < many
    else:  # layer 0 collaborates: the base stream can learn everywhere above it
        assert few == many


def test_detaching_above_a_collaborative_layer_would_lose_gradients(pair_of: Any) -> None:
    """The negative control: where W12 trains, the base stream must carry gradients."""
    model = pair_of("llama", "adapt", "float32", True).load()
    with torch.no_grad():
        model.get_parameter("lm_head.expansions.default.up_weight").normal_()
    right, _ = gradients(model)
    with always_detached():
        wrong, _ = gradients(model)
    name = "model.layers.0.self_attn.o_proj.expansions.default.w12"
    assert right[name].abs().max() > 0
    assert name not in wrong or not torch.allclose(right[name], wrong[name])


def unchanged(path: Any) -> set[str]:
    """Names of new tensors of a checkpoint that a few steps of training leave as they are."""
    model = load(path)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        for name, gradient in gradients(model)[0].items():
            trained[name].grad = gradient
        optimizer.step()
    return {name for name, parameter in trained.items() if torch.equal(parameter, before[name])}


@pytest.mark.parametrize(("family", "layers"), woven(FEW, ("1-2", "0-1"), among=FAMILIES))
def test_what_never_learns_is_what_the_plan_says(base_of: Any, tmp_path: Any, family: str, layers: str) -> None:
    request = Request(layers, variant="adapt", collaborate="both")
    expansion = expand(base_of(family, "float32", True), request, tmp_path / "wide")
    idle, same = {tensor.name for tensor in idle_tensors(expansion.plan)}, unchanged(expansion.path)
    # GPT-NeoX has a second norm that reads what enters the layer: nothing is said of it
    same = {name for name in same if family != "gpt_neox" or not any(own in name for own in ("post_attention", "mlp"))}
    assert idle == same and bool(idle) == (layers == "1-2")


@pytest.mark.parametrize(
    ("model_type", "init_w22"),
    mostly(
        product(("nemotron", "cohere"), ("zero", "random")), (("nemotron", "zero"), ("cohere", "random")).__contains__
    ),
)
def test_what_never_learns_behind_a_norm_that_centres(
    tmp_path: Any, model_type: str, init_w22: Literal["zero", "random"]
) -> None:
    """A bias of the norm learns where W22 reads it, and makes W12 and W22 learn; Cohere's norm has none."""
    base = write_base(twin_config(model_type), torch.float32, tmp_path / "base")
    request = Request("1", variant="adapt", collaborate="both", init_w22=init_w22)
    expansion = expand(base, request, tmp_path / "wide")
    idle = {tensor.name for tensor in idle_tensors(expansion.plan)}
    assert unchanged(expansion.path) == idle
    assert (len(idle) == 1) == (model_type == "nemotron" and init_w22 == "random")


@pytest.mark.slow
def test_what_never_learns_where_two_blocks_read_one_norm(tmp_path: Any) -> None:
    """State space and attention stand side by side behind one norm, and both read an up stream that is zero."""
    base = write_base(twin_config("falcon_h1"), torch.float32, tmp_path / "base")
    expansion = expand(base, Request("1-2", variant="adapt", collaborate="both"), tmp_path / "wide")
    model = load(expansion.path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    learning = {name for name, gradient in gradients(model)[0].items() if gradient.any()}
    idle = {tensor.name for tensor in idle_tensors(expansion.plan)}
    assert {tensor.name for tensor in expansion.plan.tensors} - learning == idle
    assert {name.split(".")[3] for name in idle} == {"mamba", "self_attn", "input_layernorm"}
