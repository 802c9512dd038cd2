"""Facts about architectures, checked both ways against a tiny model of each, and the plan against the loaded model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.planning.specs import attention_values
from scale_surgery.planning.stored import expected_shapes, find_prefix
from tests.conftest import REQUESTS
from tests.each import WAYS, mostly, woven
from tests.families import FAMILIES, Family, Sizes, read_sizes
from tests.tiny import tiny_config
from tests.written import written_architecture, written_sizes

each_family = pytest.mark.parametrize("name", mostly(FAMILIES, WAYS.__contains__))


@each_family
def test_facts_and_tensors_on_disk_cover_each_other(base_of, name):
    family, checkpoint = FAMILIES[name], open_checkpoint(base_of(name))
    architecture = written_architecture(checkpoint.config)
    prefix = find_prefix(architecture, checkpoint.tensors)
    assert prefix == f"{family.base_model}."
    expected = expected_shapes(architecture, written_sizes(checkpoint.config), prefix)
    weights = {tensor: info.shape for tensor, info in checkpoint.tensors.items() if not tensor.endswith(".bias")}
    head = weights.pop(f"{family.head}.weight")
    assert head == (97, 40)
    if family.position_embedding:
        assert weights.pop(f"{prefix}{family.position_embedding}.weight") == (64, 40)
    assert weights == expected
    biases = {tensor.removesuffix(".bias") for tensor in checkpoint.tensors} - set(checkpoint.tensors)
    assert {f"{module}.weight" for module in biases} <= set(expected)
    # a tied head has no tensor of its own
    tied = open_checkpoint(base_of(name, tied=True))
    assert read_sizes(family, tied.config).is_tied and f"{family.head}.weight" not in tied.tensors


@each_family
def test_facts_name_all_modules_of_the_model(pair_of, name):
    """And no linear, norm or activation that reads the streams is left out of the facts."""
    family, model = FAMILIES[name], pair_of(name).base
    base = model.get_submodule(family.base_model)
    assert base is model.base_model
    sizes = read_sizes(family, tiny_config(name).to_dict())
    layers = base.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    assert len(layers) == sizes.layers
    assert base.get_submodule(family.embedding) is model.get_input_embeddings()
    check_norm(family, sizes, base.get_submodule(family.final_norm))
    for layer in layers:
        for norm in family.pre_norms + family.post_norms:
            check_norm(family, sizes, layer.get_submodule(norm))
        assert not list(layer.get_submodule(family.activation).parameters())
        assert callable(layer.get_submodule(family.activation))
        known = {linear.name for linear in family.linears} | {norm.name for norm in family.inner_norms}
        known |= {*family.pre_norms, *family.post_norms, family.activation}
        leaves = {path: module for path, module in layer.named_modules() if not list(module.children())}
        assert {path for path, module in leaves.items() if not isinstance(module, nn.Dropout)} == known
        attention = layer.get_submodule(family.attention)
        assert all(
            linear.name.startswith(f"{family.attention}.") == (linear.group == "attn") for linear in family.linears
        )
        facts = attention_values(
            written_architecture(tiny_config(name).to_dict()).kinds[0].blocks[0], sizes.query_heads
        )
        assert {key: getattr(attention, key) for key in facts["attributes"]} == facts["attributes"]
        assert {key: getattr(attention.config, key) for key in facts["config"]} == facts["config"]
        assert attention.head_dim if hasattr(attention, "head_dim") else attention.head_size == sizes.head_size


def check_norm(family: Family, sizes: Sizes, norm: Any) -> None:
    epsilon = next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
    assert epsilon == sizes.epsilon
    assert isinstance(norm, nn.LayerNorm) == (family.norm_style == "layer")
    is_plus_one = "Gemma" in type(norm).__name__
    assert is_plus_one == (family.norm_style == "rms_plus_one")


@pytest.mark.parametrize(("name", "request_name", "tied"), woven(tuple(FAMILIES), tuple(REQUESTS), (False, True)))
def test_the_plan_lists_exactly_the_tensors_that_the_model_has(pair_of, name, request_name, tied):
    pair = pair_of(name, request_name, tied=tied)
    head = pair.base.get_output_embeddings()
    path = next(module_name for module_name, module in pair.base.named_modules() if module is head)
    planned = {
        re.sub(rf"^{FAMILIES[name].head}\.", f"{path}.", tensor.name): tensor.shape
        for tensor in pair.expansion.plan.tensors
    }
    shapes = {
        parameter_name: tuple(parameter.shape)
        for parameter_name, parameter in pair.expanded.named_parameters()
        if expansion_of(parameter_name)
    }
    assert planned == shapes
    stored = open_checkpoint(pair.path).tensors
    for tensor in pair.expansion.plan.tensors:
        info = stored[tensor.name]
        assert (info.shape, info.dtype, info.file) == (tensor.shape, tensor.dtype, tensor.shard)
    costs, written = pair.expansion.plan.costs, [stored[tensor.name] for tensor in pair.expansion.plan.tensors]
    assert costs.bytes_added == sum(info.bytes for info in written)
    assert costs.parameters_added == sum(info.elements for info in written)
    assert costs.parameters_before == sum(p.numel() for p in pair.base.parameters()) and costs.forward_factor > 1


def test_parameter_count_in_closed_form(pair_of):
    hidden, heads, kv_heads, head, inner, vocabulary = 40, 4, 2, 10, 52, 97
    new_kv, inner_up = 1, 8  # round(2 / 8) is 0, so 1; 52 / 8 to a multiple of 8
    query, query_up = heads * head, new_kv * heads // kv_heads * head
    key, key_up = kv_heads * head, new_kv * head
    up = query_up
    into = query_up + 2 * key_up + 2 * inner_up  # new outputs that read the residual stream
    w21 = into * hidden + up * query + up * inner
    w22 = into * up + up * query_up + up * inner_up
    w12 = (query + 2 * key + 2 * inner) * up + hidden * query_up + hidden * inner_up
    biases, norms = into + 2 * up, 2 * up
    outside = up + vocabulary * up  # final norm and head
    preserve, adapt = pair_of("llama").expansion.plan, pair_of("llama", "adapt").expansion.plan
    assert preserve.costs.parameters_added == 2 * (w21 + w22 + biases + norms) + outside
    # layer 0 is expanded, so the embedding is too
    assert adapt.costs.parameters_added == 2 * (w21 + w22 + w12 + biases + norms) + outside + vocabulary * up
    assert preserve.costs.parameters_per_layer == w21 + w22 + biases + norms
