"""What of a model is copied, replaced, or called by itself runs what the model runs, or is refused."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from scale_surgery import NewTokens, Request, expand
from scale_surgery.biographies import SHIPPED_MODEL
from tests.conftest import load, shake
from tests.routed import random_ids

IDS = random_ids(2, 7)


@pytest.fixture(scope="module")
def both(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two expansions of one base, neither with new heads."""
    place = tmp_path_factory.mktemp("copies")
    request = Request("1-2", variant="adapt", collaborate="both", up_kv_heads=0, name="a")
    one = shake(expand(base_of("llama"), request, place / "one").path)
    other = Request("0-1", variant="adapt", collaborate="both", up_kv_heads=0, init_w22="random", name="b")
    return shake(expand(one, other, place / "two").path)


@torch.no_grad()
def logits_of(model: Any, name: str | None) -> Tensor:
    with model.use_expansion(name):
        logits: Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens", "model.layers", "model"])
def test_a_copied_module_runs_what_its_model_runs(both: Path, part: str) -> None:
    """PEFT trains copies of whole modules; a copy of the model chooses by itself."""
    expected = {name: logits_of(load(both), name) for name in ("a", "b", None)}
    model = load(both)
    model.set_expansion("a")
    model.set_submodule(part, copy.deepcopy(model.get_submodule(part)))
    whole = copy.deepcopy(model)
    for name, logits in expected.items():
        model.set_expansion(name)
        assert torch.equal(model(IDS).logits, logits), name
    assert torch.equal(whole(IDS).logits, expected["a"]) and not torch.equal(expected["a"], expected["b"])
    model.set_expansion(["a", "b"], router="posterior", switch_rate=0.1)
    routed = load(both)
    routed.set_expansion(["a", "b"], router="posterior", switch_rate=0.1)
    assert torch.equal(model(IDS).logits, routed(IDS).logits)


@torch.no_grad()
def test_a_head_that_is_called_by_itself_has_one_path(both: Path) -> None:
    model = load(both)

    def by_itself() -> Tensor:
        logits: Tensor = model.lm_head(model.model(IDS).last_hidden_state)
        return logits

    for name in ("a", "b", None):
        model.set_expansion(name)
        assert torch.equal(by_itself(), model(IDS).logits)
    model.set_expansion(["a", "b"], router="posterior", switch_rate=0.1)
    with pytest.raises(ValueError, match=r"^The head is called by itself, and several paths run"):
        by_itself()


@torch.no_grad()
def test_a_head_that_is_called_by_itself_gives_its_base_no_new_token(tmp_path: Path) -> None:
    request = Request("last:1", new_tokens=NewTokens((" Xylophone", " Zither")))
    model = load(shake(expand(SHIPPED_MODEL, request, tmp_path / "wide").path))
    for chosen in ("default", None):
        with model.use_expansion(chosen):
            logits = model.lm_head(model.model(IDS).last_hidden_state)
            assert torch.equal(logits, model(IDS).logits)
            assert (logits.softmax(-1)[..., -2:] > 0).all() == (chosen is not None)


def test_the_base_learns_by_a_replaced_forward_too(both: Path) -> None:
    def gradient(model: Any) -> Tensor:
        model.set_expansion("a")
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.requires_grad_(True)
        model(IDS).logits.square().mean().backward()
        assert weight.grad is not None
        return weight.grad

    def forward(self: Any, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.get_output_embeddings()
        return types.SimpleNamespace(logits=torch.nn.functional.linear(hidden, head.weight, head.bias))

    replaced = load(both)
    replaced.forward = types.MethodType(forward, replaced)
    expected = gradient(load(both))
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient(replaced), expected, rtol=1e-4, atol=1e-7)


def test_modules_that_are_called_by_themselves_do_not_lose_the_gradient_of_the_base(both: Path) -> None:
    model = load(both)
    model.set_expansion("a")
    model.model(IDS).last_hidden_state.sum().backward()
    model.model.embed_tokens.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^Weights of the base train, and modules of the model are called"):
        model.model(IDS)
    model(IDS).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


def test_prefixes_in_a_cache_learn_in_each_layer(both: Path) -> None:
    """Prefix tuning of PEFT trains keys and values below the lowest layer that writes, too."""
    model = load(both)
    model.set_expansion("a")
    heads, size = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    prefixes = [torch.randn(2, 2, heads, 3, size).mul_(0.1).requires_grad_(True) for _ in model.model.layers]
    cache = DynamicCache()
    for layer, prefix in enumerate(prefixes):
        cache.update(prefix[0], prefix[1], layer)
    mask = torch.ones(2, 3 + IDS.shape[1], dtype=torch.long)
    model(IDS, past_key_values=cache, attention_mask=mask).logits.square().mean().backward()
    assert all(prefix.grad is not None and prefix.grad.abs().max() > 0 for prefix in prefixes)


@torch.no_grad()
def test_a_name_that_is_given_again_is_another_expansion(both: Path) -> None:
    model = load(both)
    model.set_expansion("a")
    cache = model(IDS[:, :4], use_cache=True).past_key_values
    assert torch.isfinite(model(IDS[:, 4:5], past_key_values=copy.deepcopy(cache)).logits).all(), "the control"
    plan = model.plans["a"]
    model.delete_expansion("a")
    model.add_expansion("a", plan)
    with pytest.raises(ValueError, match=r"^The KV cache holds 4 tokens that were not read under this choice"):
        model(IDS[:, 4:5], past_key_values=cache)


def test_continuous_batching_runs_the_choice_of_the_model(both: Path) -> None:
    """It computes in a thread of its own, which sees no `with` block, and takes no names."""
    model, prompts = load(both), IDS.tolist()
    options = {"generation_config": model.generation_config, "progress_bar": False}
    with pytest.raises(ValueError, match=r"^expansion_names: continuous batching runs one choice"):
        model.generate_batch(prompts, expansion_names=["a", None], **options)
    with model.expansion_disabled(), pytest.raises(ValueError, match=r"^Continuous batching computes in a thread"):
        model.generate_batch(prompts, **options)
