"""The promises, bit for bit, each with a negative control: output_at_init, base_stream_always, recoverable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.modeling import expanded_attention, expanded_modules
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.conftest import REQUESTS, Pair, digests, load
from tests.each import (
    DTYPES,
    FEW,
    WAYS,
    each_of_few_in_a_form,
    each_way,
    each_way_in_a_form,
    mostly,
    woven,
)
from tests.tiny import FAMILIES, save_tiny

# batch and length: kernels choose their path by strides and alignment, and a vector's tail is treated apart
SHAPES = ((3, 13), (1, 13), (2, 7), (1, 7), (3, 1), (1, 1))
CACHE_DRIFT = 1e-4  # float32: cached and uncached runs multiply matrices of other shapes


def prompts(device: torch.device | str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Random prompts of several shapes; the last two are padded on the left."""
    torch.manual_seed(1)
    plain = [{"input_ids": torch.randint(3, 97, shape).to(device)} for shape in SHAPES]
    return [*plain, pad(plain[0]["input_ids"], (5, 2, 0)), pad(plain[2]["input_ids"], (0, 3))]


def pad(ids: torch.Tensor, padding: tuple[int, ...]) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def unequal(base: Any, expanded: Any, **options: Any) -> list[tuple[int, ...]]:
    """Shapes of the prompts on which the logits differ in any bit."""
    return [
        tuple(prompt["input_ids"].shape)
        for prompt in prompts(base.device)
        if not torch.equal(base(**prompt, **options).logits, expanded(**prompt, **options).logits)
    ]


def train(model: Any, steps: int = 3) -> set[str]:
    """Take optimiser steps on random tokens, large ones with weight decay; gives the names that had a gradient."""
    model.train()
    reached: set[str] = set()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(3, 97, (2, 12), generator=generator).to(model.device)
        model(input_ids=ids, labels=ids).loss.backward()
        reached |= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    return reached


def base_bytes(base: Any, model: Any) -> list[str]:
    """Names of the base's parameters whose bytes differ in the expanded model."""
    found = dict(model.named_parameters())
    return [
        name
        for name, parameter in base.named_parameters()
        if not torch.equal(parameter.view(torch.uint8), found[name].view(torch.uint8))
    ]


@each_way_in_a_form
@pytest.mark.parametrize("request_name", REQUESTS)
def test_output_at_init(pair_of, family, request_name, dtype, tied):
    pair = pair_of(family, request_name, dtype, tied)
    assert pair.expanded.dtype == pair.base.dtype == getattr(torch, dtype)
    assert unequal(pair.base, pair.expanded) == unequal(pair.base, pair.expanded, use_cache=False) == []
    assert base_bytes(pair.base, pair.expanded) == []


@pytest.mark.parametrize(("family", "dtype"), woven(FEW, (*DTYPES, "float16"), among=FAMILIES))
def test_output_at_init_with_eager_attention(tmp_path, family, dtype):
    """As many key/value heads as query heads, so that eager attention multiplies what it is given, uncopied."""
    wide = {"hidden_size": 128, "num_attention_heads": 4}
    if family not in ("gpt_neox", "gpt2"):
        wide["num_key_value_heads"] = 4
    if family not in ("gpt_neox", "gpt2", "phi3"):
        wide["head_dim"] = 32
    base = save_tiny(tmp_path / "base", family, dtype=getattr(torch, dtype), **wide)
    expanded = expand(base, REQUESTS["adapt"], tmp_path / "expanded").path
    models = [load(path, attn_implementation="eager") for path in (base, expanded)]
    assert unequal(*models) == unequal(*models, use_cache=False) == []
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for prompt in (prompts()[0], prompts()[-2]):
        wanted, found = (model.generate(**prompt, **options) for model in models)
        assert all(map(torch.equal, wanted.logits, found.logits))


@pytest.mark.parametrize("dtype", mostly(DTYPES, "bfloat16".__eq__))
def test_output_at_init_with_several_threads(pair_of, dtype):
    """Once, on the largest prompts: threads of a busy machine wait for each other."""
    pair, threads = pair_of("qwen3", "adapt", dtype), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            for prompt in (prompts()[0], prompts()[-2]):
                assert torch.equal(pair.base(**prompt).logits, pair.expanded(**prompt).logits)
    finally:
        torch.set_num_threads(threads)


@each_of_few_in_a_form
@pytest.mark.parametrize("beams", mostly((1, 3), (1).__eq__), ids=("greedy", "beams"))
def test_output_at_init_in_generation(pair_of, family, dtype, tied, beams):
    for name in REQUESTS:
        pair = pair_of(family, name, dtype, tied)
        for prompt in (prompts()[3], prompts()[-2]):
            options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "return_dict_in_generate": True}
            wanted = pair.base.generate(**prompt, output_logits=True, **options)
            found = pair.expanded.generate(**prompt, output_logits=True, **options)
            assert torch.equal(wanted.sequences, found.sequences), name
            assert all(map(torch.equal, wanted.logits, found.logits)), name


@each_way_in_a_form
def test_base_stream_always(pair_of, family, dtype, tied):
    pair = pair_of(family, "preserve", dtype, tied)
    model = pair.load()
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    reached = train(model)
    assert base_bytes(pair.base, model) == []
    assert not any(name.endswith("w12") for name, _ in model.named_parameters())
    changed = {name for name, old in before.items() if not torch.equal(old, model.get_parameter(name))}
    assert reached <= changed <= set(before)
    # the up stream enters layer 1 as zeros, so what only reads it there has no gradient
    assert {name for name in before if name.endswith((".w21", ".up_bias")) or ".2." in name} <= reached
    assert unequal(pair.base, model) == [tuple(prompt["input_ids"].shape) for prompt in prompts()], "it learned"
    for prompt in prompts():
        check_base_stream(pair, model, prompt)


@torch.no_grad()
def check_base_stream(pair: Pair, model: Any, prompt: dict[str, torch.Tensor]) -> None:
    hidden = pair.base.config.hidden_size
    wanted = pair.base(**prompt, output_hidden_states=True)
    found = model(**prompt, output_hidden_states=True)
    at_init = pair.expanded(**prompt, output_hidden_states=True)
    for layer, (old, new) in enumerate(zip(wanted.hidden_states, found.hidden_states, strict=True)):
        assert new.shape[-1] > hidden
        assert torch.equal(old, new[..., :hidden]), f"base stream after layer {layer}"
    assert not torch.equal(found.hidden_states[-1][..., hidden:], at_init.hidden_states[-1][..., hidden:])
    stock_head, head = pair.base.get_output_embeddings(), model.get_output_embeddings()
    base_logits = type(stock_head).forward(head, found.hidden_states[-1][..., :hidden].contiguous())
    assert torch.equal(base_logits, stock_head(wanted.hidden_states[-1]))


@each_way
def test_base_stream_of_adapt_changes_from_the_first_collaborative_layer(tmp_path, base_of, family):
    """The negative control of base_stream_always, and the meaning of the preserved depth."""
    request = Request("1-2", variant="adapt", collaborative_layers="2", collaborate="both")
    base, expanded = load(base_of(family)), load(expand(base_of(family), request, tmp_path / "adapt").path)
    w12 = [name for name, _ in expanded.named_parameters() if name.endswith("w12")]
    assert w12
    assert all(".2." in name for name in w12)
    train(expanded)
    assert base_bytes(base, expanded) == []
    with torch.no_grad():
        old, new = (model(**prompts()[0], output_hidden_states=True).hidden_states for model in (base, expanded))
    equal = [torch.equal(a, b[..., : a.shape[-1]]) for a, b in zip(old, new, strict=True)]
    assert equal == [True, True, True, False]


@each_way_in_a_form
def test_recoverable(pair_of, tmp_path, family, dtype, tied):
    """Also of a trained model that save_pretrained wrote: the base tensors keep their bytes."""
    pair = pair_of(family, "adapt", dtype, tied)
    strip(pair.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(pair.base_path)
    model = pair.load()
    train(model, steps=1)
    model.save_pretrained(tmp_path / "saved")
    base, saved = open_checkpoint(pair.base_path), open_checkpoint(tmp_path / "saved")
    stored = {name: name for name in base.tensors}
    if family == "gpt_neox":
        stored = {name: name if name in saved.tensors else name.replace("embed_out", "lm_head") for name in stored}
    wanted, found = hash_tensors(base, list(stored)), hash_tensors(saved, list(stored.values()))
    assert wanted == {name: found[now] for name, now in stored.items()}
    assert len(saved.tensors) == len(base.tensors) + len(pair.expansion.plan.tensors)


@each_way
def test_cached_equals_uncached_with_a_trained_up_stream(pair_of, family):
    model = pair_of(family, "adapt").load()
    train(model)
    prompt = prompts()[-2]
    with torch.no_grad():
        cache, steps = None, []
        positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        for now in range(prompt["input_ids"].shape[1]):
            output = model(
                input_ids=prompt["input_ids"][:, now : now + 1],
                attention_mask=prompt["attention_mask"][:, : now + 1],
                position_ids=positions[:, now : now + 1],
                past_key_values=cache,
                use_cache=True,
            )
            cache, steps = output.past_key_values, [*steps, output.logits]
        whole = model(**prompt, position_ids=positions).logits
    # from the first token on that is no padding in any row
    assert (torch.cat(steps, dim=1) - whole)[:, 5:].abs().max().item() < CACHE_DRIFT


@pytest.mark.parametrize("variant", ("preserve", "adapt"))
def test_promises_hold_for_a_trained_model(stories, tmp_path, variant):
    expansion = expand(stories, Request("last:2", variant=variant, init_w22="random"), tmp_path / "stories")
    base, expanded = load(stories), load(expansion.path)
    assert unequal(base, expanded) == []
    prompt = {"input_ids": torch.tensor([[1]])}
    options = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(base.generate(**prompt, **options), expanded.generate(**prompt, **options))
    strip(expansion.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(stories)


def test_one_entry_of_w12_changes_the_output(pair_of):
    pair = pair_of("llama", "adapt")
    for name in dict(pair.expanded.named_parameters()):
        if name.endswith("w12"):
            model = copy.deepcopy(pair.expanded)
            with torch.no_grad():
                model.get_parameter(name)[0, 0] = 1.0
            assert unequal(pair.base, model), name


def test_one_bit_of_the_base_changes_the_output(pair_of):
    pair = pair_of("llama")
    model = copy.deepcopy(pair.expanded)
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert base_bytes(pair.base, model) == ["model.layers.1.mlp.down_proj.weight"]
    assert unequal(pair.base, model)


def test_a_joint_norm_breaks_the_output(pair_of, monkeypatch):
    def joint(self, base, up, y, writes):
        gain = torch.cat((self.stock.weight, self.up_weight))
        joined = torch.nn.functional.rms_norm(torch.cat((base, up), -1), gain.shape, gain, self.epsilon)
        return joined.split([base.shape[-1], up.shape[-1]], dim=-1)

    pair = pair_of("llama", "adapt")
    monkeypatch.setattr(expanded_modules.NormBlocks, "forward", joint)
    with torch.no_grad():
        drift = (pair.base(**prompts()[0]).logits - pair.expanded(**prompts()[0]).logits).abs().max()
    assert drift > 1e-2, "not a matter of rounding"


def test_an_activation_on_the_joined_tensor_breaks_the_bits(pair_of, monkeypatch):
    def joint(self, run, x, layout):
        return run(x)

    monkeypatch.setattr(expanded_modules.ExpandedActivation, "through", joint)
    check_some_family_breaks(pair_of)


def test_attention_on_joined_heads_breaks_the_bits(pair_of, monkeypatch):
    def joint(module, *states_and_mask, **kwargs):
        stock = module.stock
        name = stock.config._attn_implementation
        run = stock.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return run(stock, *states_and_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, expanded_attention.SPLIT_ATTENTION, joint)
    check_some_family_breaks(pair_of)


def check_some_family_breaks(pair_of) -> None:
    if not any(unequal(pair.base, pair.expanded) for pair in (pair_of(family, "adapt") for family in WAYS)):
        pytest.skip(
            "the kernels of this machine round the same in every lane: what is guarded against is not seen here"
        )
