"""An expanded checkpoint as a user loads it: in a fresh process, by auto classes, saved, reloaded, copied, trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from scale_surgery.modeling.expanded_blocks import LinearBlocks, PassingBlocks, join_streams, streams_of
from scale_surgery.modeling.expanded_modules import ExpandedModule
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from tests.by_hand import expand_alone
from tests.conftest import Pair, load
from tests.routed import train
from tests.tiny import save_tiny


def join_blocks(weight: torch.Tensor, w12: torch.Tensor, w21: torch.Tensor, w22: torch.Tensor) -> torch.Tensor:
    """The block matrix [[W, W12], [W21, W22]], written down."""
    return torch.cat((torch.cat((weight, w12), dim=1), torch.cat((w21, w22), dim=1)))


IDS = torch.arange(3, 16).repeat(2, 1)


@pytest.mark.parametrize("family", ("llama", "gpt_neox", "gpt2"))
@pytest.mark.parametrize("request_name", ("preserve", "adapt"))
def test_exactly_the_new_tensors_train_and_are_counted(pair_of, capsys, family, request_name):
    pair = pair_of(family, request_name)
    # transformers 5 renamed GPT-NeoX's head
    wanted = {tensor.name.replace("embed_out.", "lm_head.") for tensor in pair.expansion.plan.tensors}
    model = pair.load()
    for state in (model, model.train(), model.to(torch.float64)):
        assert {name for name, p in state.named_parameters() if p.requires_grad} == wanted
    (counts,) = model.trainable_parameters().values()
    assert sum(counts.values()) == sum(model.get_parameter(name).numel() for name in wanted)
    kinds = {"w12", "w21", "w22", "norms", "biases", "embedding", "head"}
    assert set(counts) == (kinds if request_name == "adapt" else kinds - {"w12", "embedding"})
    model.print_trainable_parameters()
    assert f"trains {sum(counts.values()):,} of" in capsys.readouterr().out
    for name in wanted:
        model.get_parameter(name).requires_grad_(not name.endswith(".w22"))
    (counts,) = model.trainable_parameters().values()
    assert "w21" in counts and not counts.get("w22"), "what is frozen by hand is not counted"


def test_loading_in_other_ways_gives_the_same_output(pair_of):
    pair = pair_of("llama", "adapt", "bfloat16", True)
    with torch.no_grad():
        wanted = pair.base(IDS).logits
        assert torch.equal(load(pair.path, device_map="cpu")(IDS).logits, wanted)
        assert torch.equal(load(pair.path, attn_implementation="sdpa")(IDS).logits, wanted)
        eager = {"attn_implementation": "eager"}
        assert torch.equal(load(pair.path, **eager)(IDS).logits, load(pair.base_path, **eager)(IDS).logits)
        changed = load(pair.path)
        changed.set_attn_implementation("eager")
        assert torch.equal(changed(IDS).logits, load(pair.base_path, **eager)(IDS).logits)
        single = {"dtype": torch.float32}
        assert torch.equal(load(pair.path, **single)(IDS).logits, load(pair.base_path, **single)(IDS).logits)


def test_attention_weights_are_those_of_the_base_and_then_the_new_heads(pair_of):
    pair = pair_of("llama")
    options = {"attn_implementation": "eager"}
    with torch.no_grad():
        base = load(pair.base_path, **options)(IDS, output_attentions=True).attentions
        expanded = load(pair.path, **options)(IDS, output_attentions=True).attentions
    heads = pair.expansion.plan.sizes.query_heads
    assert [weights.shape[1] - heads for weights in expanded] == [0, 2, 2]
    assert all(torch.equal(old, new[:, :heads]) for old, new in zip(base, expanded, strict=True))


def test_new_tensors_asked_for_in_float32_stay_so(base_of, tmp_path):
    base = base_of("llama", "bfloat16", True)
    request = Request("0,2", variant="adapt", collaborate="both", init_w22="random", dtype="float32")
    expansion = expand(base, request, tmp_path / "mixed")
    assert {tensor.dtype for tensor in expansion.plan.tensors} == {"F32"}
    for options in ({}, {"dtype": torch.bfloat16}):
        model = load(expansion.path, **options)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        new = {tensor.name for tensor in expansion.plan.tensors}
        assert {dtypes[name] for name in new} == {torch.float32}
        assert {dtypes[name] for name in set(dtypes) - new} == {torch.bfloat16}
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, load(base)(IDS).logits)
    ids = IDS.clone()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_what_a_model_does_not_take_is_refused(llama):
    model, narrow = llama.expanded, llama.base.get_input_embeddings()(IDS)
    with pytest.raises(NotImplementedError, match="Resize the base model's embeddings first, then expand it"):
        model.resize_token_embeddings(120)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        model(IDS, *[None] * 30)
    with pytest.raises(ValueError, match="inputs_embeds: are 40 wide, expected 48, the base stream and the up streams"):
        model(inputs_embeds=narrow)
    for run in (model, model.generate):
        with pytest.raises(ValueError, match=r"^adapter_names: is PEFT's, .* Give expansion_names=, "):
            run(IDS, adapter_names=["law"])
    with torch.no_grad():
        wide = model.get_input_embeddings()(IDS)
        assert torch.equal(model(inputs_embeds=wide).logits, model(IDS).logits)
        with model.expansion_disabled():
            assert torch.equal(model(inputs_embeds=narrow).logits, llama.base(IDS).logits)


def test_no_name_of_an_expanded_model_is_one_that_a_stock_model_assigns(llama):
    files = Path(transformers.models.__file__).parent.glob("*/modeling_*.py")
    stock = {name for file in files for name in re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", file.read_text("utf-8"))}
    assert {"blocks", "lm_head"} <= stock, "the control: MPT's layers, and heads, are found"
    mixins = [kind for kind in type(llama.expanded).__mro__ if kind.__module__.endswith("_model")]
    names = {name for kind in mixins for name in vars(kind)} | (vars(llama.expanded).keys() - vars(llama.base).keys())
    assert {"expansion_blocks", "active", "set_expansion"} <= names
    assert not {name for name in names & stock if not name.startswith("__")}


@torch.no_grad()
def test_layers_that_were_not_chosen_work_on_the_base_stream_alone(llama, pair_of):
    width, layers = llama.base.config.hidden_size, llama.expanded.model.layers
    kinds = [{type(module) for module in layer.modules()} & {LinearBlocks, PassingBlocks} for layer in layers]
    assert kinds == [{PassingBlocks}, {LinearBlocks}, {LinearBlocks}]
    states = llama.expanded(IDS, output_hidden_states=True).hidden_states
    assert not states[1][..., width:].any(), "the up stream is zero before the first expanded layer"
    assert states[2][..., width:].any()
    # and it passes through a layer that was not chosen, above one that was
    states = pair_of("llama", "adapt").expanded(IDS, output_hidden_states=True).hidden_states
    assert states[1][..., width:].any() and torch.equal(states[1][..., width:], states[2][..., width:])


def expanded_linear(
    inputs: list[int], outputs: list[list[int]], *, collaborative: bool = True
) -> tuple[nn.Linear, LinearBlocks]:
    """An expanded linear and its blocks, of random numbers."""
    torch.manual_seed(2)
    linear = nn.Linear(inputs[0], sum(base for base, _ in outputs))
    expand_alone(linear, "linear", in_features=inputs, out_features=outputs, collaborative=collaborative, dtype=None)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_()
    return linear, linear.expansions["default"]


def test_an_expanded_linear_acts_as_the_block_matrix():
    (linear, expansion), x = expanded_linear([7, 3], [[5, 2]]), torch.randn(4, 10)
    matrix = join_blocks(linear.weight, expansion.w12, expansion.w21, expansion.w22)
    wanted = x @ matrix.T + torch.cat((linear.bias, expansion.up_bias))
    torch.testing.assert_close(linear(x), wanted)
    swapped = join_blocks(linear.weight, 0 * expansion.w12, expansion.w21, expansion.w22)
    assert (linear(x) - x @ swapped.T - torch.cat((linear.bias, expansion.up_bias))).abs().max() > 0.1


def test_a_fused_projection_joins_section_by_section():
    (linear, expansion), x = expanded_linear([7, 3], [[4, 2], [2, 1], [2, 0]]), torch.randn(4, 10)
    base = x[:, :7] @ linear.weight.T + linear.bias + x[:, 7:] @ expansion.w12.T
    up = x[:, :7] @ expansion.w21.T + x[:, 7:] @ expansion.w22.T + expansion.up_bias
    wanted = torch.cat((base[:, :4], up[:, :2], base[:, 4:6], up[:, 2:3], base[:, 6:]), dim=1)
    torch.testing.assert_close(linear(x), wanted)


def test_a_preservation_layer_never_multiplies_what_flows_up():
    """0 * inf would be NaN: W12 is zero by not existing."""
    x = torch.randn(4, 10)
    poisoned = x.clone()
    poisoned[:, 7:] = torch.inf
    (preserving, without), (collaborating, expansion) = (
        expanded_linear([7, 3], [[5, 2]], collaborative=flag) for flag in (False, True)
    )
    assert without.w12 is None
    assert torch.equal(preserving(poisoned)[:, :5], preserving(x)[:, :5])
    with torch.no_grad():
        expansion.w12.zero_()
    assert collaborating(poisoned)[:, :5].isnan().all()


def test_a_base_model_saved_without_its_head_can_be_expanded(tmp_path):
    """Names on disk then have no prefix, as in the Hub's original gpt2."""
    save_tiny(tmp_path / "whole", "gpt2")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "alone")
    expansion = expand(tmp_path / "alone", Request("0,2"), tmp_path / "expanded")
    assert expansion.plan.prefix == ""
    base, expanded = load(tmp_path / "alone"), load(expansion.path)
    assert isinstance(expanded.transformer.h[0].attn.c_attn, ExpandedModule)
    with torch.no_grad():
        assert torch.equal(base(IDS).logits, expanded(IDS).logits)
    w21 = expanded.transformer.h[0].attn.c_attn.expansions["default"].w21
    stored = load_file(expansion.path / expansion.plan.shards[0])["h.0.attn.c_attn.expansions.default.w21"]
    assert torch.equal(w21, stored)


def test_streams_are_remembered_until_the_joined_tensor_changes() -> None:
    base, up = torch.randn(2, 3, 5), torch.randn(2, 3, 2)
    joined = join_streams(base, up)
    assert all(first is second for first, second in zip(streams_of(joined, [5, 2]) or (), (base, up), strict=True))
    # other widths, and a tensor that is another now, are copied out of what is there
    assert streams_of(joined, [4, 3]) is None and streams_of(joined + 0, [5, 2]) is None
    joined.mul_(2)
    assert streams_of(joined, [5, 2]) is None
    with torch.inference_mode():
        assert streams_of(join_streams(base, up), [5, 2]) is None


@pytest.mark.parametrize("family", ("llama", "phi3", "gpt2"))
def test_with_and_without_autograd_the_same_is_computed(pair_of: Callable[..., Pair], family: str) -> None:
    model, ids = train(pair_of(family, "adapt").load()), torch.arange(3, 20)[None]
    with torch.no_grad():
        first, second = model(ids).logits, model(ids).logits
    with torch.inference_mode():
        inferred = model(ids).logits
    # products are added in place without autograd, and nothing that is still read may change by that
    assert torch.equal(first, second) and torch.equal(first, inferred)
    torch.testing.assert_close(model(ids).logits, first, rtol=0, atol=1e-5)
