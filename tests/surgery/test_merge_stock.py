"""merge --to stock: a plain checkpoint of the base's architecture that computes what the expanded model computes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.expansions import expansion_of, tensor_name
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.cli.program import main
from scale_surgery.deriving.base import derive_config
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import PlanError
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Widths
from scale_surgery.planning.stock import StockWidths, stock_problems, stock_sizes
from scale_surgery.planning.stored import expected_shapes, find_prefix
from scale_surgery.running.drift import TOLERANCES, measure_drift
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.merge_stock import check_stock, stock_config, stock_cost, write_stock
from scale_surgery.surgery.record import read_manifest
from scale_surgery.surgery.route import route_export
from tests.conftest import digests, load, shake
from tests.each import FORMS, each_family, each_shape
from tests.families import FAMILIES, read_sizes
from tests.routed import prompts, random_ids
from tests.tiny import tiny_config
from tests.written import written_architecture, written_sizes

INNER = Request("0,2", variant="adapt", up_width=0, up_kv_heads=0, up_inner_width=12)
BOTH = Request("1", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=8)
HEADS = Request("1-2", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=0)


def merge(expanded: Path, target: Path) -> Path:
    """The stock form of an expanded model."""
    checkpoint, manifest = open_checkpoint(expanded), read_manifest(expanded)
    check_stock(checkpoint, manifest)
    target.mkdir(exist_ok=True)
    write_stock(checkpoint, manifest, target)
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
def drift_share(one: Any, other: Any) -> float:
    """Largest difference of two models' logits as a share of the largest logit; padding is not compared."""
    drift = largest = 0.0
    for inputs in prompts():
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        logits, others = (model(**inputs).logits[real].double() for model in (one, other))
        drift, largest = max(drift, float((logits - others).abs().max())), max(largest, float(logits.abs().max()))
    return drift / largest


def plain(family: str) -> Any:
    """The class that transformers has for a family's base models."""
    return transformers.AutoModelForCausalLM._model_mapping[type(tiny_config(family))]


@each_shape
@pytest.mark.parametrize(("dtype", "tied"), FORMS)
def test_the_stock_class_computes_what_the_expanded_model_does(stock_of, family, dtype, tied):
    base, expanded, path = stock_of(family, None, dtype, tied)
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
        generated = [one.generate(**inputs, max_new_tokens=12, do_sample=False).tolist() for one in (wide, model)]
        assert generated[0] == generated[1]


@each_shape
def test_every_file_but_weights_config_and_index_is_the_base_s_own(stock_of, family):
    base, expanded, path = stock_of(family, None, "bfloat16", True)
    before, after = digests(base), digests(path)
    assert set(before) == set(after)
    assert not list(path.glob("*.py")), "nothing here can be run"
    changed = {name for name in before if before[name] != after[name] and not name.endswith(".safetensors")}
    assert changed == {"config.json", "model.safetensors.index.json"}
    cost = stock_cost(read_manifest(expanded))
    config, edited = (json.loads((folder / "config.json").read_text()) for folder in (base, path))
    facts = FAMILIES[family]
    sizes = {facts.key("inner"): cost.after.inner}
    if not facts.fixed_heads:
        heads = {"query_heads": cost.after.query_heads, "key_value_heads": cost.after.key_value_heads}
        sizes |= {facts.key(name): value for name, value in heads.items()}
        sizes[facts.key("head_size")] = read_sizes(facts, config).head_size
    assert edited == config | sizes
    assert edited != config


def test_tensors_keep_their_shards_and_the_index_says_so(stock_of):
    base, _, path = stock_of("llama", BOTH, "bfloat16", True)
    one, other = open_checkpoint(base), open_checkpoint(path)
    assert len(one.shards) > 2
    assert {name: info.file for name, info in one.tensors.items()} == {n: i.file for n, i in other.tensors.items()}
    kept = [name for name, info in one.tensors.items() if info.shape == other.tensors[name].shape]
    assert {name.split(".")[-2] for name in kept} >= {"embed_tokens", "norm", "input_layernorm"}
    assert all(torch.equal(read_tensor(one, name), read_tensor(other, name)) for name in kept)
    assert all(one.tensors[name].dtype == info.dtype for name, info in other.tensors.items())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.bytes for info in other.tensors.values())
    assert index["metadata"]["total_parameters"] == sum(info.elements for info in other.tensors.values())
    assert "lm_head.weight" not in other.tensors, "tied in, tied out"


def test_a_single_file_stays_one_and_a_shard_without_a_larger_tensor_is_taken_over(stock_of):
    _, _, path = stock_of("llama", BOTH)
    assert (path / "model.safetensors").is_file()
    assert not (path / "model.safetensors.index.json").exists()
    base, _, path = stock_of("llama", INNER, "float32", True)
    before, after = digests(base), digests(path)
    shards = [name for name in before if name.endswith(".safetensors")]
    assert 0 < sum(before[name] == after[name] for name in shards) < len(shards)


def new_name(path: str, block: str) -> str:
    return tensor_name(path, "default", block)


def expected_of(
    checkpoint: Any, path: str, rows: list[tuple[int, int, int]], columns: tuple[int, int, int]
) -> torch.Tensor:
    """A joined weight built by hand; rows of each section, and columns, are old, new and padded widths."""
    places = {"weight": f"{path}.weight", "w12": new_name(path, "w12"), "w21": new_name(path, "w21")}
    found = {name: read_tensor(checkpoint, own) for name, own in places.items() if own in checkpoint.tensors}
    whole = torch.zeros(sum(map(sum, rows)), sum(columns))
    start = old_at = new_at = 0
    for old, new, padded in rows:
        whole[start : start + old, : columns[0]] = found["weight"][old_at : old_at + old]
        if "w12" in found:
            whole[start : start + old, columns[0] : columns[0] + columns[1]] = found["w12"][old_at : old_at + old]
        if new:
            whole[start + old : start + old + new, : columns[0]] = found["w21"][new_at : new_at + new]
        start, old_at, new_at = start + old + new + padded, old_at + old, new_at + new
    return whole


def test_old_and_new_values_stand_where_they_belong(stock_of):
    """Heads of size 10 in groups of 2: 4 query heads, 2 more, and 2 of zeros, since 6 do not divide 40."""
    _, expanded, path = stock_of("llama", BOTH)
    one, other = open_checkpoint(expanded), open_checkpoint(path)
    query, key_value, inner, hidden = (40, 20, 20), (20, 10, 10), (52, 8, 0), (40, 0, 0)
    shapes = {
        "self_attn.q_proj": ([query], hidden),
        "self_attn.k_proj": ([key_value], hidden),
        "self_attn.v_proj": ([key_value], hidden),
        "self_attn.o_proj": ([hidden], query),
        "mlp.gate_proj": ([inner], hidden),
        "mlp.up_proj": ([inner], hidden),
        "mlp.down_proj": ([hidden], inner),
    }
    for layer in range(3):
        for name, (rows, columns) in shapes.items():
            path = f"model.layers.{layer}.{name}"
            if layer != 1:
                rows, columns = [unexpanded(*row) for row in rows], unexpanded(*columns)
            assert torch.equal(read_tensor(other, f"{path}.weight"), expected_of(one, path, rows, columns)), path
            ((_, new, padded),) = rows
            added = [read_tensor(one, new_name(path, "up_bias"))] if new else []
            bias = torch.cat((read_tensor(one, f"{path}.bias"), *added, torch.zeros(padded)))
            assert torch.equal(read_tensor(other, f"{path}.bias"), bias), path


def unexpanded(old: int, new: int, padded: int) -> tuple[int, int, int]:
    """Widths in a layer that was not expanded: what is new elsewhere is padding here."""
    return old, 0, new + padded


def test_fused_projections_are_joined_section_by_section(stock_of):
    _, expanded, path = stock_of("phi3", BOTH)
    one, other = open_checkpoint(expanded), open_checkpoint(path)
    rows = {"self_attn.qkv_proj": [(40, 20, 0), (20, 10, 0), (20, 10, 0)], "mlp.gate_up_proj": [(52, 8, 0)] * 2}
    for name, sections in rows.items():
        for layer in (0, 1):
            path = f"model.layers.{layer}.{name}"
            own = sections if layer == 1 else [unexpanded(*section) for section in sections]
            assert torch.equal(read_tensor(other, f"{path}.weight"), expected_of(one, path, own, (40, 0, 0))), path


def test_a_transposed_linear_is_joined_as_it_is_stored(stock_of):
    _, expanded, path = stock_of("gpt2", INNER)
    one, other = open_checkpoint(expanded), open_checkpoint(path)
    down, up = "transformer.h.0.mlp.c_proj", "transformer.h.0.mlp.c_fc"
    expected = torch.cat((read_tensor(one, f"{down}.weight"), read_tensor(one, new_name(down, "w12")).T))
    assert torch.equal(read_tensor(other, f"{down}.weight"), expected)
    expected = torch.cat((read_tensor(one, f"{up}.weight"), read_tensor(one, new_name(up, "w21")).T), dim=1)
    assert torch.equal(read_tensor(other, f"{up}.weight"), expected)
    zeros = read_tensor(other, "transformer.h.1.mlp.c_fc.weight")[:, 52:]
    assert zeros.shape == (40, 12)
    assert not zeros.any()


@pytest.mark.parametrize(
    "name",
    (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
        "mlp.gate_proj.bias",
        "mlp.down_proj.weight",
    ),
)
def test_one_altered_new_element_is_noticed(stock_of, tmp_path, name):
    """The negative control: a last new value, next to the padding, moved by 10."""
    _, expanded, path = stock_of("llama", BOTH)
    broken = Path(shutil.copytree(path, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    last = {"q": (59, 0), "k": (29, 0), "v": (29,), "o": (0, 59), "g": (59,), "d": (0, 59)}[name.split(".")[1][0]]
    tensors[f"model.layers.1.{name}"][last] += 10
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert drift_share(load(expanded), load(broken)) > TOLERANCES["float32"]


def test_heads_alone_leave_the_inner_width(stock_of):
    _, expanded, path = stock_of("qwen2", HEADS)
    config = transformers.AutoConfig.from_pretrained(path)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 10)
    assert config.intermediate_size == 52
    assert drift_share(load(expanded), load(path)) <= TOLERANCES["float32"]


def test_an_interrupted_merge_keeps_what_is_finished(stock_of, tmp_path):
    _, expanded, path = stock_of("llama", BOTH, "bfloat16", True)
    partial = tmp_path / "partial"
    partial.mkdir()
    for name in (*sorted(file.name for file in path.glob("*.safetensors"))[:2], "config.json"):
        shutil.copyfile(path / name, partial / name)
    kept = {file.name: file.stat().st_ino for file in partial.glob("*.safetensors")}
    merge(expanded, partial)
    assert digests(partial) == digests(path)
    assert {name: (partial / name).stat().st_ino for name in kept} == kept


def test_the_command_measures_the_drift_of_what_it_wrote(tmp_path):
    """The shipped model, heads and inner features; and its drift where one element is another."""
    request = Request("2-3", variant="adapt", up_width=0, up_kv_heads=1, up_inner_width=32)
    expanded = shake(expand(SHIPPED_MODEL, request, tmp_path / "expanded").path)
    path = tmp_path / "stock"
    result = CliRunner().invoke(main, ["merge", str(expanded), "--to", "stock", "-o", str(path), "--json"])
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert (done["form"], done["parameters"]) == ("stock", stock_cost(read_manifest(expanded)).parameters)
    assert done["drift"]["drift"] <= TOLERANCES["float32"] * done["drift"]["largest_logit"]
    assert (done["drift"]["top1_agreement"], done["drift"]["generation_agreement"]) == (1, 1)
    assert set(digests(path)) - set(digests(SHIPPED_MODEL)) == {"merge.json"}
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][0, -1] += 10
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert not measure_drift(expanded, path).holds


@pytest.mark.slow
def test_what_converters_ask_of_a_checkpoint(stock_of):
    """The class in `architectures`, one number for every width, and no tensor that the base does not have."""
    for family in FAMILIES:
        base, _, path = stock_of(family, None, "bfloat16", True)
        config = json.loads((path / "config.json").read_text())
        assert config["architectures"] == [plain(family).__name__]
        assert not {"auto_map", "scale_surgery"} & set(config)
        facts, sizes = written_architecture(config), written_sizes(config)
        assert all(isinstance(value, int) for value in (sizes.inner, sizes.query_heads, sizes.key_value_heads))
        one, other = open_checkpoint(base), open_checkpoint(path)
        assert set(one.tensors) == set(other.tensors)
        shapes = expected_shapes(facts, sizes, find_prefix(facts, other.tensors))
        assert {name: other.tensors[name].shape for name in shapes} == shapes


# what has no stock form


def problems_of(path: Path, **changes: Any) -> list[str]:
    manifest = replace(read_manifest(path), **changes)
    with pytest.raises(PlanError) as error:
        check_stock(open_checkpoint(path), manifest)
    return str(error.value).splitlines()


def test_a_widened_residual_stream_is_refused(pair_of):
    assert problems_of(pair_of("llama").path) == [
        "--to stock: the residual stream is 20 features wider than the base's 40, expected an up width of 0: a stock "
        "class has one stream, whose norms, embedding and head know no second one. Merge --to fused, or expand with "
        "--variant adapt --up-width 0."
    ]


@pytest.mark.parametrize(
    ("family", "reason"),
    (
        ("gpt2", "its head size is the hidden size over the query heads, so more heads are smaller heads"),
        ("gpt_neox", "its head size is the hidden size over the query heads, so more heads are smaller heads"),
        ("olmo2", "its queries and keys are normalised over all heads at once, and new heads by themselves"),
    ),
)
def test_heads_that_no_stock_class_has_are_refused(pair_of, family, reason):
    assert problems_of(pair_of(family, "adapt_without_up_stream").path) == [
        f"--to stock: 1 key/value heads were added, expected none for a {family} model: {reason}. Merge --to fused, or "
        "expand with --up-kv-heads 0."
    ]


def test_heads_are_refused_where_rope_factors_fix_their_number(base_of):
    config = open_checkpoint(base_of("phi3")).config
    sizes = written_sizes(config)
    longrope = {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0] * 5}}
    longrope["rope_parameters"] |= {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    older = {"rope_parameters": None, "rope_scaling": longrope["rope_parameters"]}
    for changes in (longrope, older):
        facts = derive_config(config | changes, "phi3", 100).architecture
        (problem,) = stock_problems(facts, sizes, Widths(0, 1, 0))
        assert "its config does not allow it: " in problem and "short_factor field must have length" in problem
        assert not list(stock_problems(facts, sizes, Widths(0, 0, 8)))
    assert not list(stock_problems(derive_config(config, "phi3", 100).architecture, sizes, Widths(0, 1, 0)))
    # and that is what the stock config does
    tiny_config("phi3", head_dim=10, original_max_position_embeddings=32, **longrope)
    with pytest.raises(Exception, match="short_factor field must have length 3, got 5"):
        tiny_config(
            "phi3",
            head_dim=10,
            num_attention_heads=6,
            num_key_value_heads=3,
            original_max_position_embeddings=32,
            **longrope,
        )


def test_a_model_that_was_not_expanded_is_refused(base_of, tmp_path):
    path = base_of("llama")
    result = CliRunner().invoke(main, ["merge", str(path), "--to", "stock", "-o", str(tmp_path / "stock")])
    assert result.exit_code == 1
    assert "is a base model, expected one made by scale-surgery expand." in result.stderr
    assert not (tmp_path / "stock").exists()


def test_an_inner_width_that_the_config_leaves_open_is_stated():
    """GPT-2's is 4 times the hidden size where `n_inner` is null."""
    config = tiny_config("gpt2", n_inner=None).to_dict()
    facts = FAMILIES["gpt2"]
    sizes = read_sizes(facts, config)
    assert stock_config(config, facts, sizes, Widths(0, 0, 12)) == config | {"n_inner": 172}


def test_a_routed_or_fused_model_is_told_what_to_do_first(stock_of, tmp_path):
    _, expanded, _ = stock_of("llama", BOTH)
    routed = route_export(expanded, tmp_path / "routed").path
    assert problems_of(routed) == [
        "--to stock: the model is routed (posterior), expected one path: a stock class has no router. Take it away "
        "first: scale-surgery route-export --router none."
    ]
    assert problems_of(expanded, fused={"shards": {}}) == [
        "--to stock: the model is fused, expected its blocks beside the base tensors. Take it apart first: "
        "scale-surgery merge --to blocks."
    ]


def test_another_dtype_is_refused_and_every_reason_is_given_at_once(base_of, tmp_path):
    request = Request("1", variant="adapt", up_width=20, collaborate="both", dtype="float32")
    expanded = expand(base_of("llama", "bfloat16"), request, tmp_path / "expanded").path
    routed = route_export(expanded, tmp_path / "routed").path
    first, second, *others = problems_of(routed)
    assert first.startswith("--to stock: the model is routed")
    assert second.startswith("--to stock: the residual stream is")
    name = new_name("model.layers.1.mlp.down_proj", "w12")
    assert (
        f"{name}: is F32, the base tensor beside it BF16; joining copies and never casts. Expand without --dtype for a "
        "model that can be merged."
    ) in others
    new = {tensor for tensor in open_checkpoint(routed).tensors if expansion_of(tensor)}
    assert {line.split(":")[0] for line in others} >= {
        name for name in new if name.rpartition(".")[2] in ("w12", "w21", "w22")
    }


# facts, both ways


@each_family
def test_facts_about_heads_are_those_of_the_stock_class(family):
    facts = FAMILIES[family]
    sizes = read_sizes(facts, tiny_config(family).to_dict())
    heads = {"num_attention_heads": 8, "head_dim": sizes.head_size}
    heads |= {} if sizes.queries_per_key_value == 1 else {"num_key_value_heads": 4}
    model = plain(family)(tiny_config(family, **heads))
    layer = model.base_model.get_submodule(facts.layers)[0]
    attention = layer.get_submodule(facts.attention)
    has_head_size = getattr(attention, "head_dim", None) or attention.head_size
    norms = [layer.get_submodule(norm.name).weight.numel() for norm in facts.inner_norms]
    is_free = has_head_size == sizes.head_size and set(norms) <= {sizes.head_size}
    assert is_free == (facts.fixed_heads is None)


@each_family
def test_facts_about_divisors_are_those_of_the_stock_config(family):
    facts = FAMILIES[family]
    if facts.fixed_heads:
        assert not facts.heads_divide_hidden
        return
    head_size = read_sizes(facts, tiny_config(family).to_dict()).head_size
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": head_size}
    if facts.heads_divide_hidden:
        with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
            tiny_config(family, **heads)
    else:
        assert tiny_config(family, **heads).num_attention_heads == 6


# the cost


def test_the_plan_says_what_padding_costs(base_of, stock_of):
    base, expanded, path = stock_of("llama", BOTH)
    cost = plan(base, BOTH).costs.stock
    assert cost == stock_cost(read_manifest(expanded))
    assert cost.parameters == sum(info.elements for info in open_checkpoint(path).tensors.values())
    assert cost.parameters_expanded == sum(info.elements for info in open_checkpoint(expanded).tensors.values())
    zeros = sum(int((read_tensor(open_checkpoint(path), name) == 0).sum()) for name in open_checkpoint(path).tensors)
    assert cost.padding == cost.parameters - cost.parameters_expanded == zeros
    assert (cost.before, cost.after) == (StockWidths(4, 2, 52), StockWidths(8, 4, 60))
    everywhere = plan(base, replace(INNER, layers="all")).costs.stock
    assert everywhere.padding == 0
    console = Console(width=80, record=True)
    console.print(render_plan(plan(base, BOTH), tensors=False))
    said = " ".join(console.export_text().split())
    assert (
        "stock form +17,568 (41.9%), of them 14,152 zeros; heads from 4 query and 2 key/value to 8 query and 4 "
        "key/value; inner from 52 to 60"
    ) in said


def test_a_plan_without_a_stock_form_says_why(base_of):
    costs = plan(base_of("llama"), Request("1")).costs
    assert costs.stock is None
    assert costs.stock_problems[0].startswith("--to stock: the residual stream is 20 features wider")
    made = plan(base_of("gpt2"), Request("1", variant="adapt", up_width=0))
    console = Console(width=200, record=True)
    console.print(render_plan(made, tensors=False))
    assert "stock form        none. 1 key/value heads were added, expected none" in console.export_text()


@pytest.mark.parametrize(("hidden", "up", "heads"), ((40, 0, 4), (40, 1, 8), (48, 1, 6), (40, 3, 10), (42, 1, 6)))
def test_query_heads_divide_the_hidden_size_where_the_config_wants_it(hidden, up, heads):
    sizes = replace(read_sizes(FAMILIES["llama"], tiny_config("llama").to_dict()), hidden=hidden)
    assert stock_sizes(FAMILIES["llama"], sizes, Widths(0, up, 0)).query_heads == heads
    assert stock_sizes(FAMILIES["mistral"], sizes, Widths(0, up, 0)).query_heads == 4 + 2 * up
    odd = replace(sizes, hidden=41)
    assert stock_sizes(FAMILIES["llama"], odd, Widths(0, up, 0)).query_heads == 4 + 2 * up
