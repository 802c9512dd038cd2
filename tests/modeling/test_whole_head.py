"""A forward that others put in place of the model's own, and that multiplies by the head's weight, gives its logits.

The trainers of TRL do so; `make test-recipes` runs them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from tests import routed
from tests.conftest import Pair, load
from tests.each import mostly
from tests.routed import Trio, random_ids, train

trio_of = routed.trio_of

IDS = random_ids(2, 11)


def replace_forward(model: Any) -> Any:
    """Let the model take logits as TRL does: what the base model gives, by the weight of the head, and then the cap."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self: Any, input_ids: Tensor) -> Tensor:
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.get_output_embeddings()
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    model.forward = types.MethodType(forward, model)
    return model


def logits_and_gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    logits.square().mean().backward()
    return {"logits": logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


# untied, tied, one without an up stream, whose head is its base's, and one whose logits are capped
@pytest.mark.parametrize(
    ("family", "request_name", "tied"),
    mostly(
        [
            ("gpt2", "preserve", False),
            ("llama", "adapt", True),
            ("llama", "adapt_without_up_stream", False),
            ("gemma2", "adapt", True),
        ],
        lambda case: case[0] != "llama" or case[2],
    ),
)
def test_logits_and_gradients_are_those_of_the_model(
    pair_of: Callable[..., Pair], family: str, request_name: str, tied: bool
) -> None:
    pair = pair_of(family, request_name, "float32", tied)
    model, replaced = (train(pair.load()) for _ in range(2))
    wanted = logits_and_gradients(model, model(IDS).logits)
    tensors = logits_and_gradients(replaced, replace_forward(replaced)(IDS))
    assert tensors.keys() == wanted.keys()
    assert tensors.keys() - {"logits"} == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_the_head_in_half_precision_is_whole_in_its_dtype(base_of: Callable[..., Path], tmp_path: Path) -> None:
    request = Request("1-2", init_w22="random", dtype="float32")
    model = train(load(expand(base_of("llama", "bfloat16"), request, tmp_path / "expanded").path))
    assert model.lm_head.expansions["default"].up_weight.dtype is torch.float32
    wanted, logits = model(IDS).logits, replace_forward(model)(IDS)
    assert logits.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.05)


def test_a_gated_head_is_no_matrix(base_of: Callable[..., Path], tmp_path: Path) -> None:
    request = Request("1-2", variant="gated", collaborate="both")
    model = replace_forward(load(expand(base_of("llama"), request, tmp_path / "expanded").path))
    with pytest.raises(ValueError, match="through a gate: no weight of a head gives its logits"):
        model(IDS)
    with model.expansion_disabled():
        assert torch.equal(model(IDS), load(base_of("llama"))(IDS).logits), "the control"


@torch.no_grad()
def test_outside_of_that_forward_the_head_is_the_head(llama: Pair) -> None:
    model = train(llama.load())
    stock = llama.base(IDS).logits
    head, weight = model.lm_head, model.lm_head.weight
    replace_forward(model)(IDS)
    assert model.get_output_embeddings() is head
    assert head.weight is weight, "nothing took the place of the base's tensor"
    with model.expansion_disabled():
        assert torch.equal(model(IDS), stock)
    model.forward = lambda input_ids: model.get_output_embeddings().missing
    with pytest.raises(AttributeError, match="missing"):
        model(IDS)
    assert model.get_output_embeddings() is head, "after an error too"


@torch.no_grad()
def test_a_routed_model_says_what_to_do(trio_of: Callable[..., Trio]) -> None:
    _, expanded, model = trio_of("llama").trained()
    routed_logits = model(IDS).logits
    wanted = expanded(IDS).logits
    replace_forward(model)
    with pytest.raises(ValueError, match=r"This model routes: .* Train before you route, or .*set_expansion\(NAME\)"):
        model(IDS)
    model.enable_routing(False)
    torch.testing.assert_close(model(IDS), wanted, rtol=1e-4, atol=1e-5)
    del model.forward
    model.enable_routing()
    assert torch.equal(model(IDS).logits, routed_logits)


@torch.no_grad()
def test_a_cap_on_logits_is_said_where_others_look_for_it(trio_of: Callable[..., Trio]) -> None:
    """Also while a router mixes logits that are capped already, and in what is saved."""
    base, _, model = trio_of("gemma2").trained()
    assert base.config.final_logit_softcapping == model.config.final_logit_softcapping == 30.0
    model.get_decoder().register_forward_hook(lambda *_: seen.append(model.config.final_logit_softcapping))
    seen: list[float] = []
    model(IDS)
    model.path_logits(IDS)
    model.score_tokens(IDS)
    assert seen == [30.0] * 3
    assert model.config.to_dict()["final_logit_softcapping"] == 30.0


@torch.no_grad()
def test_a_forward_that_others_wrap_still_routes(trio_of: Callable[..., Trio]) -> None:
    """accelerate puts a forward around the model's own where it places it on devices or casts."""
    model = trio_of("llama").routed()
    wanted, forward = model(IDS).logits, model.forward
    model.forward = lambda *args, **inputs: forward(*args, **inputs)
    assert torch.equal(model(IDS).logits, wanted)
