"""Tensors that a base must have, against those of a tiny model of each family, and the plan against what is written."""

from __future__ import annotations

import re

import pytest

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.deriving.base import read_base
from scale_surgery.planning.stored import expected_shapes, find_prefix
from tests.conftest import REQUESTS
from tests.each import FEW, WAYS, mostly, woven
from tests.families import FAMILIES, read_sizes


@pytest.mark.parametrize("name", mostly(FAMILIES, WAYS.__contains__))
def test_facts_and_tensors_on_disk_cover_each_other(base_of, name):
    family, checkpoint = FAMILIES[name], open_checkpoint(base_of(name))
    base = read_base(checkpoint)
    prefix = find_prefix(base.architecture, checkpoint.tensors)
    assert prefix == f"{family.base_model}."
    expected = expected_shapes(base.architecture, base.sizes, prefix)
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


@pytest.mark.parametrize(("name", "request_name", "tied"), woven(FEW, tuple(REQUESTS), (False, True), among=FAMILIES))
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
    hidden, heads, kv_heads, head, inner, vocabulary = 40, 8, 4, 10, 52, 97
    # 1 of 4 heads is twice an eighth; 40 / 8 and 52 / 8 to a multiple of 8
    new_kv, up, inner_up = 1, 8, 8
    query, query_up = heads * head, new_kv * heads // kv_heads * head
    key, key_up = kv_heads * head, new_kv * head
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
