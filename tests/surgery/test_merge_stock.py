"""merge --to stock: a plain checkpoint of the base's architecture that computes what the expanded model computes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.expansions import expansion_of, tensor_name
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.deriving.base import derive_config
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import PlanError, Problem
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Widths
from scale_surgery.planning.stock import StockWidths, stock_problems, stock_sizes
from scale_surgery.running.drift import TOLERANCES, measure_drift
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.merge_stock import check_stock, stock_config, write_stock
from scale_surgery.surgery.route import route_export
from tests.command import run
from tests.conftest import digests, edited, load, problems, shake, shown
from tests.each import FORMS, SHAPES, each_shape, mostly
from tests.families import FAMILIES, read_sizes
from tests.routed import prompts, random_ids
from tests.tiny import tiny_config

INNER = Request("0,2", variant="adapt", up_width=0, up_kv_heads=0, up_inner_width=12)
BOTH = Request("1", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=8)
HEADS = Request("1-2", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=0)


def merge(expanded: Path, target: Path) -> Path:
    """The stock form of an expanded model."""
    folder = open_folder(expanded)
    check_stock(folder)
    target.mkdir(exist_ok=True)
    write_stock(folder, target)
    return target


@pytest.fixture(scope="session")
def stock_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A tiny base model, its shaken expansion and the stock form of that; heads where the family can have more."""

    @functools.cache
    def make(
        family: str, request: Request | None = None, dtype: str = "float32", tied: bool = False
    ) -> tuple[Path, Path, Path]:
        base = base_of(family, dtype, tied)
        request = request or (INNER if FAMILIES[family].fixed_heads else BOTH)
        folder = tmp_path_factory.mktemp("stock")
        expanded = shake(expand(base, request, folder / "expanded").path)
        return base, expanded, merge(expanded, folder / "stock")

    return make


@torch.no_grad()
def drift_share(first: Any, second: Any) -> float:
    """Largest difference of two models' logits as a share of the largest logit; padding is not compared."""
    drift = largest = 0.0
    for inputs in prompts():
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        logits, others = (model(**inputs).logits[real].double() for model in (first, second))
        drift, largest = max(drift, float((logits - others).abs().max())), max(largest, float(logits.abs().max()))
    return drift / largest


def plain(family: str) -> Any:
    """The class that transformers has for a family's base models."""
    return transformers.AutoModelForCausalLM._model_mapping[type(tiny_config(family))]


@pytest.mark.parametrize(
    ("family", "dtype", "tied", "request_"),
    [
        *mostly([(family, *form, None) for family in FAMILIES for form in FORMS], lambda case: case[0] in SHAPES),
        ("qwen2", "float32", False, HEADS),
    ],
)
def test_the_stock_class_computes_what_the_expanded_model_does(stock_of, family, dtype, tied, request_):
    base, expanded, path = stock_of(family, request_, dtype, tied)
    model, info = plain(family).from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    assert type(model).__module__.startswith("transformers.models.")
    assert model.config.model_type == family
    assert model.config.tie_word_embeddings == tied
    wide = load(expanded)
    assert drift_share(wide, model.eval()) <= TOLERANCES[dtype]
    assert drift_share(wide, load(base)) > TOLERANCES[dtype], "the expansion must show"
    if dtype == "float32":
        inputs = {"input_ids": random_ids(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
        generated = [
            network.generate(**inputs, max_new_tokens=12, do_sample=False).tolist() for network in (wide, model)
        ]
        assert generated[0] == generated[1]


@each_shape
def test_all_but_larger_weights_sizes_and_the_index_is_the_base_s_own(stock_of, family):
    base, expanded, path = stock_of(family, None, "bfloat16", True)
    before, after = digests(base), digests(path)
    assert set(before) == set(after)
    assert not list(path.glob("*.py")), "nothing here can be run"
    changed = {name for name in before if before[name] != after[name] and not name.endswith(".safetensors")}
    assert changed == {"config.json", "model.safetensors.index.json"}
    cost, facts = read_manifest(expanded).plan.costs.stock, FAMILIES[family]
    config, edited = (json.loads((folder / "config.json").read_text()) for folder in (base, path))
    sizes = {facts.key("inner"): cost.after.inner}
    if not facts.fixed_heads:
        heads = {"query_heads": cost.after.query_heads, "key_value_heads": cost.after.key_value_heads}
        sizes |= {facts.key(name): value for name, value in heads.items()}
        sizes[facts.key("head_size")] = read_sizes(facts, config).head_size
    assert edited == config | sizes != config
    # tensors keep their shards and dtypes, and what is as large as it was its bytes
    source, export = open_checkpoint(base), open_checkpoint(path)
    assert len(source.shards) > 2 and source.tensors.keys() == export.tensors.keys()
    for name, info in source.tensors.items():
        counterpart = export.tensors[name]
        assert (counterpart.file, counterpart.dtype) == (info.file, info.dtype)
        assert counterpart.shape != info.shape or torch.equal(read_tensor(source, name), read_tensor(export, name))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.bytes for info in export.tensors.values())
    assert index["metadata"]["total_parameters"] == sum(info.elements for info in export.tensors.values())


def test_a_single_file_stays_one_and_a_shard_without_a_larger_tensor_is_taken_over(stock_of):
    _, _, path = stock_of("llama", BOTH)
    assert [file.name for file in path.glob("model*")] == ["model.safetensors"]
    base, _, path = stock_of("llama", INNER, "float32", True)
    before, after = digests(base), digests(path)
    shards = [name for name in before if name.endswith(".safetensors")]
    assert 0 < sum(before[name] == after[name] for name in shards) < len(shards)


def test_joined_weights_hold_every_bit_of_what_they_are_made_of(stock_of):
    """Old values in the corner, new ones beside and below, zeros elsewhere; that all stand right is the output."""
    _, expanded, path = stock_of("llama", BOTH)
    source, export = open_checkpoint(expanded), open_checkpoint(path)
    for linear in FAMILIES["llama"].linears:
        for layer in range(3):
            name = f"model.layers.{layer}.{linear.name}"
            old, joined = (read_tensor(checkpoint, f"{name}.weight") for checkpoint in (source, export))
            rows, columns = old.shape
            assert torch.equal(joined[:rows, :columns], old)
            blocks = {
                block: read_tensor(source, tensor_name(name, "default", block))
                for block in ("w12", "w21")
                if tensor_name(name, "default", block) in source.tensors
            }
            assert bool(blocks) == (layer == 1)
            for block, tensor in blocks.items():
                height, width = tensor.shape
                part = joined[:rows, columns:][:, :width] if block == "w12" else joined[rows:, :columns][:height]
                assert torch.equal(part, tensor)
            left = (
                joined.count_nonzero() - old.count_nonzero() - sum(tensor.count_nonzero() for tensor in blocks.values())
            )
            assert left == 0, "all else is zero"


def test_one_altered_new_element_is_noticed(stock_of):
    """The negative control: a last new value, next to the padding, moved by 10."""
    _, expanded, path = stock_of("llama", BOTH)
    wide, model = load(expanded), load(path)
    assert drift_share(wide, model) <= TOLERANCES["float32"]
    last = {
        "self_attn.q_proj.weight": (59, 0),
        "self_attn.k_proj.weight": (29, 0),
        "self_attn.v_proj.bias": (29,),
        "self_attn.o_proj.weight": (0, 59),
        "mlp.gate_proj.bias": (59,),
        "mlp.down_proj.weight": (0, 59),
    }
    for name, place in last.items():
        parameter = model.get_parameter(f"model.layers.1.{name}").data
        kept = parameter[place].clone()
        parameter[place] += 10
        assert drift_share(wide, model) > TOLERANCES["float32"], name
        parameter[place] = kept


def test_the_command_measures_the_drift_of_what_it_wrote(tmp_path):
    """The shipped model, heads and inner features; and its drift where one element is another."""
    request = Request("2-3", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=32)
    expanded = shake(expand(SHIPPED_MODEL, request, tmp_path / "expanded").path)
    path = tmp_path / "stock"
    done = json.loads(run("merge", expanded, "--to", "stock", "-o", path, "--json").stdout)
    assert (done["form"], done["parameters"]) == ("stock", read_manifest(expanded).plan.costs.stock.parameters)
    assert done["drift"]["drift"] <= TOLERANCES["float32"] * done["drift"]["largest_logit"]
    assert (done["drift"]["top1_agreement"], done["drift"]["generation_agreement"]) == (1, 1)
    assert set(digests(path)) - set(digests(SHIPPED_MODEL)) == {"merge.json"} and done["left_out"] == []
    (expanded / "chat_template.jinja").write_text("{{ messages }}")
    again = json.loads(run("merge", expanded, "--to", "stock", "-o", tmp_path / "again", "--json").stdout)
    assert again["left_out"] == ["chat_template.jinja"], "the base had none"
    with edited(path / "model.safetensors") as tensors:
        tensors["model.layers.3.mlp.down_proj.weight"][0, -1] += 10
    assert not measure_drift(expanded, path).holds


# what has no stock form


ROUTED = Problem("stock-router", "--to stock", router="posterior")


def problems_of(path: Path) -> list[Problem]:
    return problems(check_stock, open_folder(path), error=PlanError)


FIXED = "its head size is the hidden size over the query heads, so more heads are smaller heads"
NORMED = "its queries and keys are normalised over all heads at once, and new heads by themselves"


@pytest.mark.parametrize(("family", "reason"), (("gpt2", FIXED), ("gpt_neox", FIXED), ("olmo2", NORMED)))
def test_heads_that_no_stock_class_has_are_refused(pair_of, family, reason):
    assert problems_of(pair_of(family, "adapt_without_up_stream").path) == [
        Problem("stock-heads-fixed", "--to stock", heads=1, family=family, reason=reason)
    ]


def test_what_has_more_than_one_path_or_stream_is_refused(pair_of, stock_of, tmp_path):
    _, expanded, _ = stock_of("llama", BOTH)
    assert problems_of(pair_of("llama").path) == [Problem("stock-stream-wider", "--to stock", added=8, hidden=40)]
    assert problems_of(route_export(expanded, tmp_path / "routed").path) == [ROUTED]


def test_heads_are_refused_where_rope_factors_fix_their_number(base_of):
    config = open_checkpoint(base_of("phi3")).config | {"num_attention_heads": 4, "num_key_value_heads": 2}
    # the rope factors are as many as follow from hidden size and heads
    del config["head_dim"]
    sizes = read_sizes(FAMILIES["phi3"], config)
    longrope = {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0] * 5}}
    longrope["rope_parameters"] |= {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    older = {"rope_parameters": None, "rope_scaling": longrope["rope_parameters"]}
    for changes in (longrope, older):
        facts = derive_config(config | changes, "phi3", 100).architecture
        (problem,) = stock_problems(facts, sizes, Widths(0, 1, 0))
        assert problem.code == "stock-heads-fixed"
        assert "its config does not allow it: " in (reason := problem.values["reason"])
        assert "short_factor field must have length" in reason
        assert not list(stock_problems(facts, sizes, Widths(0, 0, 8)))
    assert not list(stock_problems(derive_config(config, "phi3", 100).architecture, sizes, Widths(0, 1, 0)))


def test_an_inner_width_that_the_config_leaves_open_is_stated():
    """GPT-2's is 4 times the hidden size where `n_inner` is null."""
    config = tiny_config("gpt2", n_inner=None).to_dict()
    facts = FAMILIES["gpt2"]
    sizes = read_sizes(facts, config)
    assert stock_config(config, facts, sizes, Widths(0, 0, 12)) == config | {"n_inner": 172}


def test_another_dtype_is_refused_and_every_reason_is_given_at_once(base_of, tmp_path):
    request = Request("1", variant="adapt", up_width=20, collaborate="both", dtype="float32")
    expanded = expand(base_of("llama", "bfloat16"), request, tmp_path / "expanded").path
    routed = route_export(expanded, tmp_path / "routed").path
    found = problems_of(routed)
    assert found[:2] == [ROUTED, Problem("stock-stream-wider", "--to stock", added=20, hidden=40)]
    new = {tensor for tensor in open_checkpoint(routed).tensors if expansion_of(tensor)}
    blocks = [name for name in new if name.rpartition(".")[2] in ("w12", "w21", "w22")]
    assert tensor_name("model.layers.1.mlp.down_proj", "default", "w12") in blocks
    assert all(Problem("block-other-dtype", name, dtype="F32", base="BF16") in found for name in blocks)


# the cost


def test_the_plan_says_what_padding_costs(base_of, stock_of):
    base, expanded, path = stock_of("llama", BOTH)
    cost = plan(base, BOTH).costs.stock
    assert cost == read_manifest(expanded).plan.costs.stock
    assert cost.parameters == sum(info.elements for info in open_checkpoint(path).tensors.values())
    of_expanded = sum(info.elements for info in open_checkpoint(expanded).tensors.values())
    zeros = sum(int((read_tensor(open_checkpoint(path), name) == 0).sum()) for name in open_checkpoint(path).tensors)
    assert cost.padding == cost.parameters - of_expanded == zeros
    assert (cost.before, cost.after) == (StockWidths(8, 4, 52), StockWidths(10, 5, 60))
    everywhere = plan(base, replace(INNER, layers="all")).costs.stock
    assert everywhere.padding == 0
    text = " ".join(shown(render_plan(plan(base, BOTH), tensors=False)).split())
    assert (
        "stock form +10,248 (18.1%), of them 6,832 zeros; heads from 8 query and 4 key/value to 10 query and 5 "
        "key/value; inner from 52 to 60"
    ) in text


@pytest.mark.parametrize(("hidden", "up", "heads"), ((40, 0, 4), (40, 1, 8), (48, 1, 6), (40, 3, 10), (42, 1, 6)))
def test_query_heads_divide_the_hidden_size_where_the_config_wants_it(hidden, up, heads):
    sizes = replace(read_sizes(FAMILIES["llama"], tiny_config("llama").to_dict()), hidden=hidden)
    sizes = replace(sizes, query_heads=4, key_value_heads=2)
    assert stock_sizes(FAMILIES["llama"], sizes, Widths(0, up, 0)).query_heads == heads
    assert stock_sizes(FAMILIES["mistral"], sizes, Widths(0, up, 0)).query_heads == 4 + 2 * up
    odd = replace(sizes, hidden=41)
    assert stock_sizes(FAMILIES["llama"], odd, Widths(0, up, 0)).query_heads == 4 + 2 * up
