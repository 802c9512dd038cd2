"""What never learns is what the plan says; and base streams that are detached everywhere, or nowhere, for controls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal

import pytest
import torch

from scale_surgery import Request, expand
from scale_surgery.modeling.expanded_modules import ExpandedModule
from scale_surgery.planning.idle import idle_tensors
from tests.conftest import load, shake
from tests.each import FEW, mostly, woven
from tests.routed import random_ids
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of the new tensors on fixed tokens."""
    ids = random_ids(2, 9)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


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


@pytest.mark.parametrize("family", mostly(FAMILIES, "llama".__eq__))
def test_inputs_and_weights_of_the_base_have_the_gradient_of_the_whole_model(
    base_of: Any, tmp_path: Any, family: str
) -> None:
    """Where nothing of the base learns, its stream is detached; otherwise a gradient would be zero without a word."""
    model = load(shake(expand(base_of(family), Request("1"), tmp_path / "wide").path)).double()
    ids = random_ids(1, 6)
    given = model.get_input_embeddings()(ids).detach()
    direction = torch.randn(given.shape, generator=torch.Generator().manual_seed(0), dtype=given.dtype)

    def loss(step: float) -> torch.Tensor:
        return model(inputs_embeds=given + step * direction).logits.logsumexp(-1).sum()

    # norms compute in float32
    slope = float((loss(1e-5) - loss(-1e-5)).detach() / 2e-5)
    embedded = given.clone().requires_grad_(True)
    model(inputs_embeds=embedded).logits.logsumexp(-1).sum().backward()
    assert float((embedded.grad * direction).sum()) == pytest.approx(slope, rel=1e-2)
    model.zero_grad()
    model.requires_grad_(True)
    model(ids, labels=ids).loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not [name for name in without if ".expansions." not in name]
    model.freeze_base()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all((parameter.grad is None) for name, parameter in model.named_parameters() if ".expansions." not in name)


def unchanged(path: Any) -> set[str]:
    """Names of new tensors of a checkpoint that a few steps of training leave as they are."""
    model = load(path)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        for name, gradient in gradients(model).items():
            trained[name].grad = gradient
        optimizer.step()
    return {name for name, parameter in trained.items() if torch.equal(parameter, before[name])}


@pytest.mark.parametrize(("family", "layers"), woven(FEW, ("1-2", "0-1"), among=FAMILIES))
def test_what_never_learns_is_what_the_plan_says(base_of: Any, tmp_path: Any, family: str, layers: str) -> None:
    request = Request(layers, variant="adapt", collaborate="both")
    expansion = expand(base_of(family, "float32", True), request, tmp_path / "wide")
    idle, same = {tensor.name for tensor in idle_tensors(expansion.plan)}, unchanged(expansion.path)
    # GPT-NeoX has a second norm that reads what enters the layer: nothing is said of it
    same = {
        name for name in same if family != "gpt_neox" or not any(part in name for part in ("post_attention", "mlp"))
    }
    assert idle == same and bool(idle) == (layers == "1-2")


@pytest.mark.parametrize(
    ("model_type", "init_w22", "heads"),
    mostly(
        product(("nemotron", "cohere"), ("zero", "random"), (0, 1)),
        (("nemotron", "zero", 0), ("nemotron", "random", 0), ("cohere", "random", 1)).__contains__,
    ),
)
def test_what_never_learns_behind_a_norm_that_centres(
    tmp_path: Any, model_type: str, init_w22: Literal["zero", "random"], heads: int
) -> None:
    """A bias of the norm learns where W22 reads it, and makes W12 and W22 learn; Cohere's norm has none."""
    base = write_base(twin_config(model_type), torch.float32, tmp_path / "base")
    # by default this twin of Nemotron gets no new heads, so that no W22 reads the first norm
    request = Request("1", variant="adapt", collaborate="both", init_w22=init_w22, up_kv_heads=heads)
    expansion = expand(base, request, tmp_path / "wide")
    idle = {tensor.name for tensor in idle_tensors(expansion.plan)}
    assert unchanged(expansion.path) == idle
    assert (len(idle) == 1) == (model_type == "nemotron" and init_w22 == "random" and heads == 1)


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
    learning = {name for name, gradient in gradients(model).items() if gradient.any()}
    idle = {tensor.name for tensor in idle_tensors(expansion.plan)}
    assert {tensor.name for tensor in expansion.plan.tensors} - learning == idle
    assert {name.split(".")[3] for name in idle} == {"mamba", "self_attn", "input_layernorm"}
