"""From request to plan: defaults, every problem of a request in one error, and saved plans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.deriving.base import read_base
from scale_surgery.deriving.fallback import weaker
from scale_surgery.deriving.planned import load_plan, make_plan, plan
from scale_surgery.errors import CheckpointError, PlanError, Problem, UnsupportedFamilyError
from scale_surgery.evidence.evaluate import evaluate
from scale_surgery.evidence.inspect import inspect
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.base import Base, sizes_of_blocks
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.plan import Plan, plan_expansion
from scale_surgery.planning.request import RATIO, WIDTH, Request
from scale_surgery.planning.saved import save_plan
from scale_surgery.planning.specs import Widths
from scale_surgery.show.tables_plan import plan_rows
from tests.command import run
from tests.conftest import edited, problems, refused
from tests.sweep.take import twin_config, write_base
from tests.tiny import save_tiny


@pytest.fixture
def refuse(base_of):
    """List the problems of a request on the tiny llama: 3 layers, heads of size 10."""
    checkpoint = open_checkpoint(base_of("llama"))

    def found(*args: object, **options: object) -> list[Problem]:
        return problems(make_plan, checkpoint, Request(*args, **options), name="tiny", error=PlanError)

    return found


def test_default_widths_are_an_eighth_and_shares_that_are_not_are_explained(base_of):
    """The tiny llama has 4 key/value heads: an eighth of them is none, and one is twice that share."""
    made = plan(base_of("llama"), Request("last:1"))
    # 40 / 8 and 52 / 8 to a multiple of 8
    assert (made.layers, made.collaboration.layers) == ((2,), ())
    assert made.widths == Widths(up_width=8, up_kv_heads=1, up_inner_width=8)
    wide = plan(base_of("llama"), Request("last:1", ratio=2.0))
    assert wide.widths == Widths(up_width=80, up_kv_heads=8, up_inner_width=104)

    def share(**widths: float) -> str:
        return rows(plan(base_of("llama"), Request("1", **widths)))["share of base"]

    assert share() == (
        "residual stream 20.0%, key/value heads 25.0%, inner 15.4%. --ratio 0.125 asks for 12.5%; heads are added "
        "whole: 1 key/value head is 25.0% of 4 (--up-kv-heads sets how many)."
    )
    assert share(ratio=0.1) == (
        "residual stream 20.0%, key/value heads 0.0%, inner 15.4%. --ratio 0.1 asks for 10.0%; no new heads: 1 "
        "key/value head is 25.0% of 4, more than twice the share (--up-kv-heads 1 adds it)."
    )
    assert share(ratio=0.5) == "residual stream 40.0%, key/value heads 50.0%, inner 46.2%"
    assert "--ratio" not in share(up_width=20, up_kv_heads=1, up_inner_width=52), "nothing came from the ratio"


def test_gates_have_no_stock_form(tmp_path):
    for variant, has_form in (("gated", False), ("adapt", True)):
        made = plan(SHIPPED_MODEL, Request("all", variant=variant, up_width=0))
        assert (made.costs.stock is not None) is has_form
        (row,) = [value for name, value in plan_rows(made) if name == "stock form"]
        assert row.startswith("none. The expansion reads its up stream through gates") is not has_form


@pytest.mark.parametrize("variant", ["adapt", "gated"])
def test_without_layers_only_tokens_are_added(refuse, variant):
    code, tokens = "option-without-layers", NewTokens(("Xylophone",))
    assert refuse("none") == [Problem("nothing-to-add", "--layers none")]
    assert refuse("none", variant=variant, up_width=8, new_tokens=tokens) == [
        Problem(code, "--up-width"),
        Problem(code, f"--variant {variant}"),
    ]
    assert refuse("none", ratio=0.5, init_w21="random", new_tokens=tokens) == [
        Problem(code, "--ratio"),
        Problem(code, "init_w21"),
    ]
    # beside another problem it is a selection all the same
    (problem,) = refuse("none", copies=3, new_tokens=tokens)
    assert problem.where == "--copies"
    assert refuse("0", new_tokens_init="random") == [
        Problem("new-tokens-init-without-tokens", "--new-tokens-init", init="random")
    ]


def rows(made: Plan) -> dict[str, str]:
    return dict(plan_rows(made))


def test_blocks_beside_a_mixture_begin_as_asked(tmp_path):
    """No one matrix is there to be decomposed, so there svd is random; all else is as for a linear."""
    base = tmp_path / "base"
    write_base(twin_config("mixtral"), torch.float32, base)

    def begins(**asked):
        tensors = plan(base, Request("0", **asked)).tensors
        return {tensor.block: tensor.init for tensor in tensors if ".block_sparse_moe." in tensor.name}

    assert begins() == {"w21": "random", "w22": "zero", "up_weight": "random"}
    assert begins(init_w21="zero", init_w22="random") == {"w21": "zero", "w22": "random", "up_weight": "random"}


def test_tensors_that_no_class_reads_cost_nothing(tmp_path):
    """Masks of old files; the control is the same base without them."""
    plain, masked = (tmp_path / name for name in ("plain", "masked"))
    save_tiny(plain, "gpt2")
    shutil.copytree(plain, masked)
    with edited(masked / "model.safetensors") as tensors:
        tensors |= {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    counted = [plan(base, Request("1")).costs for base in (plain, masked)]
    assert counted[0].parameters_before == counted[1].parameters_before
    assert counted[0].forward_factor == counted[1].forward_factor > 1


def test_rows_of_new_tokens_are_read_by_the_head(tmp_path):
    """Of a tied model, too."""
    new = NewTokens(tuple(f"token{number}" for number in range(50)))
    factors = []
    for is_tied in (True, False):
        base = tmp_path / str(is_tied)
        save_tiny(base, "llama", tie_word_embeddings=is_tied, vocab_size=1200)
        AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
        factors.append(plan(base, Request("none", new_tokens=new)).costs.forward_factor)
    assert factors[0] == factors[1] > 1


def test_a_plan_says_what_the_expansion_can_become_and_what_stands_outside_its_layers(base_of):
    made = plan(base_of("llama"), Request("1"))
    wide, total = rows(made), sum(tensor.elements for tensor in made.tensors if tensor.layer is None)
    assert wide["outside layers"] == f"+{total:,}, of them lm_head.up_weight {97 * 8:,}"
    assert total + made.costs.parameters_per_layer == made.costs.parameters_added
    assert wide["fused form"] == "yes, by merge --to fused" and wide["router"] == "yes, by route-export"
    assert wide["stock form"].startswith("none. The residual stream is 8 features wider than the base's 40")
    cast = rows(plan(base_of("llama"), Request("1", dtype="bfloat16")))
    assert cast["fused form"] == "yes, by merge --to fused, if the base's tensors are bfloat16 too"
    grown = rows(plan(base_of("llama"), Request("1", method="grow")))
    assert "outside layers" not in grown and grown["stock form"].startswith("+")
    assert grown["fused form"].startswith("none. --method grow lets")
    deep = rows(plan(base_of("llama"), Request("1", method="depth")))
    assert deep["fused form"].startswith("none. --method depth writes a stock checkpoint, so there is nothing to")
    assert deep["router"].startswith("none. --method depth writes a stock checkpoint, whose classes run one path")


def test_adapt_collaborates_in_attention_of_all_expanded_layers_by_default(base_of):
    made = plan(base_of("llama"), Request("0,2", variant="adapt"))
    assert (made.collaboration.layers, made.collaboration.groups) == ((0, 2), ("attn",))
    w12 = {tensor.name for tensor in made.tensors if tensor.block == "w12"}
    assert w12 == {
        f"model.layers.{layer}.self_attn.{role}_proj.expansions.default.w12" for layer in (0, 2) for role in "qkvo"
    }
    assert all(tensor.init == "zero" for tensor in made.tensors if tensor.block == "w12")
    assert (made.costs.up_stream_from, made.costs.base_stream_from) == (0, 0)


def test_without_up_stream_w12_stands_where_something_was_added(base_of):
    def blocks(**widths: int) -> set[str]:
        made = plan(base_of("llama"), Request("1", variant="adapt", up_width=0, **widths))
        return {tensor.name.removeprefix("model.layers.1.") for tensor in made.tensors if tensor.block == "w12"}

    assert blocks(up_kv_heads=0) == {"mlp.down_proj.expansions.default.w12"}
    assert blocks(up_inner_width=0) == {"self_attn.o_proj.expansions.default.w12"}
    assert blocks() == {"mlp.down_proj.expansions.default.w12", "self_attn.o_proj.expansions.default.w12"}


def unfit(option: str, value: int) -> Problem:
    return Problem("value-unfit", option, value=value, kind=WIDTH)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    (
        (Request("9"), [Problem("layer-out-of-range", "--layers 9", layer=9, last=2)]),
        (
            Request("0", up_width=-10, up_kv_heads=-1, up_inner_width=-8),
            [unfit("--up-width", -10), unfit("--up-kv-heads", -1), unfit("--up-inner-width", -8)],
        ),
        # no float holds what this would cost
        (
            Request("0", variant="adapt", up_width=0, up_inner_width=10**400),
            [unfit("--up-inner-width", 10**400)],
        ),
        (Request("0", ratio=0.0), [Problem("ratio-out-of-range", "--ratio", ratio=0.0, range=RATIO)]),
        (
            Request("0", variant="adapt", up_width=0, up_kv_heads=0, up_inner_width=0),
            [Problem("widths-zero", "--up-width, --up-kv-heads and --up-inner-width")],
        ),
        (Request("0", up_width=0), [Problem("preserve-without-up-stream", "--up-width")]),
        (
            Request("0", collaborate="both", collaborative_layers="0"),
            [
                Problem("option-of-adapt", "--collaborative-layers", value="0"),
                Problem("option-of-adapt", "--collaborate", value="both"),
            ],
        ),
        (
            Request("0-1", variant="adapt", collaborative_layers="1-2"),
            [Problem("layers-not-expanded", "--collaborative-layers 1-2", layers="2", expanded="0-1")],
        ),
        (
            Request("0-1", variant="adapt", up_width=0, collaborative_layers="1"),
            [Problem("layers-without-way-out", "--collaborative-layers", layers="1", expanded="0-1")],
        ),
        (
            Request("0-1", variant="adapt", up_width=0, collaborate="attn"),
            [Problem("groups-without-way-out", "--collaborate", groups=["ffn"])],
        ),
    ),
)
def test_what_does_not_fit_is_said(refuse, request_, wanted):
    assert refuse(**vars(request_)) == wanted


def test_several_problems_are_one_error(refuse):
    found = refuse("9,1,1", variant="adapt", up_width=-7, ratio=float("nan"), collaborative_layers="x")
    assert [(problem.code, problem.where) for problem in found] == [
        ("layer-out-of-range", "--layers 9,1,1"),
        ("layers-repeated", "--layers 9,1,1"),
        ("ratio-out-of-range", "--ratio"),
        ("value-unfit", "--up-width"),
        ("layers-unreadable", "--collaborative-layers x"),
    ]


def edit_config(folder: Path, **changes: object) -> None:
    with edited(folder / "config.json") as config:
        config |= changes


def test_base_tensors_that_are_missing_or_wrong(llama_base):
    """Every one is named, and no weight is read: all may be NaN."""
    wanted = plan(llama_base, Request("0"))
    file = llama_base / "model.safetensors"
    with edited(file) as tensors:
        tensors |= {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    assert plan(llama_base, Request("0")) == wanted
    norm, up = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
    with edited(file) as tensors:
        tensors[norm] = tensors[norm].double()
    assert problems(plan, llama_base, Request("0"), error=CheckpointError) == [
        Problem("weight-dtype", norm, dtype="F64", choices=["F32", "F16", "BF16"])
    ]
    with edited(file) as tensors:
        tensors[up] = torch.zeros(52, 41)
        del tensors[norm]
    assert problems(plan, llama_base, Request("0"), error=CheckpointError) == [
        Problem("weight-missing", norm, shape=(40,)),
        Problem("tensor-unlike-config", up, shape=(52, 41), wanted=(52, 40)),
    ]


def quantise(folder: Path, how: str) -> list[str]:
    """Store every linear as a quantiser does; return how a refusal names that."""
    with edited(folder / "model.safetensors") as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors.pop(name)
            if how == "gptq":
                tensors[name.removesuffix("weight") + "qweight"] = weight.int()
            else:
                tensors[name] = weight.to(torch.int8 if how == "int8" else torch.float8_e4m3fn)
    if how != "int8":
        edit_config(folder, quantization_config={"quant_method": how})
    return {"int8": ["I8"], "fp8": ["fp8", "F8_E4M3"], "gptq": ["gptq"]}[how]


@pytest.mark.parametrize("how", ("int8", "fp8", "gptq"))
def test_a_quantised_base_is_refused_in_one_line(llama_base, how):
    """And inspect says the same, in place of a command that would fail."""
    problem = Problem("base-quantised", schemes=quantise(llama_base, how))
    assert problems(plan, llama_base, Request("1"), error=CheckpointError) == [problem.within(llama_base)]
    shown = run("inspect", llama_base).output
    assert problem.found in " ".join(shown.split()) and "scale-surgery plan" not in shown


COUNTED = {
    "num_hidden_layers": "config-count",
    "num_experts": "config-count",
    "num_attention_heads": "config-count",
    "depth": "config-count",
    "hidden_size": "config-size",
    "vocab_size": "config-size",
}


@pytest.mark.parametrize("key", COUNTED)
def test_what_is_not_there_is_not_counted_to(llama_base, tmp_path, key):
    """Whatever counts to a billion does not end."""
    (tmp_path / "some.txt").write_text("some words")
    edit_config(llama_base, **{key: 10**9})
    looks = [lambda: plan(llama_base, Request("all"))]
    if key == "num_hidden_layers":
        looks += [lambda: inspect(llama_base), lambda: evaluate(llama_base, tmp_path / "some.txt")]
    for look in looks:
        with refused(COUNTED[key], f"config.json: {key}", CheckpointError):
            look()
    edit_config(llama_base, **{key: 4})
    if key == "num_hidden_layers":
        with refused("layers-missing", "config.json: num_hidden_layers", CheckpointError):
            inspect(llama_base)


@pytest.mark.parametrize(
    "sizes",
    (
        {"shared_expert_intermediate_size": 20480, "vocab_size_per_layer_input": 262144},
        # as of models for texts of a million tokens, and written without a point
        {"rope_theta": 75_000_000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**11}},
    ),
)
def test_sizes_are_not_taken_for_counts(llama_base, sizes):
    edit_config(llama_base, **sizes)
    assert plan(llama_base, Request("0")).layers == (0,)


def test_layers_of_a_record_that_are_not_there_are_not_counted_to(pair_of, tmp_path):
    expanded = Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))
    with edited(expanded / "surgery.json") as record:
        base_config = json.loads(record["replaced"]["config.json"])
        record["replaced"]["config.json"] = json.dumps(base_config | {"num_hidden_layers": 10**9})
        record["expansions"]["default"]["facts"]["sizes"]["layers"] = 10**9
    with refused("layers-missing", "config.json: num_hidden_layers", CheckpointError):
        read_manifest(expanded)


def test_an_unknown_model_type_says_what_is_expected(llama_base):
    for model_type in ("no_such_type", None, 3, "Llama", "clip"):
        edit_config(llama_base, model_type=model_type)
        code = "model-type-not-causal" if model_type == "clip" else "model-type-unknown"
        assert problems(plan, llama_base, Request("0"), error=UnsupportedFamilyError) == [
            Problem(code, "config.json", model_type=model_type)
        ]


def test_an_expanded_model_is_expanded_again_under_another_name_only(pair_of, base_of, llama_base):
    expanded = pair_of("llama").path
    with refused("expansion-exists", expanded, CheckpointError):
        plan(expanded, Request("0"))
    request = Request("0", name="second")
    assert plan(expanded, request).tensors == plan(base_of("llama"), request).tensors
    (llama_base / "surgery.json").write_text("{}")
    with refused("record-incomplete", llama_base / "surgery.json", CheckpointError):
        plan(llama_base, Request("0"))


def test_new_tensors_take_the_dtype_of_their_neighbour(llama_base):
    shard = llama_base / "model.safetensors"
    tensors = {
        k: v.half() if "self_attn" in k else v.bfloat16() if "mlp" in k else v for k, v in load_file(shard).items()
    }
    save_file(tensors, shard)
    made = plan(llama_base, Request("0", variant="adapt", collaborate="both"))
    for tensor in made.tensors:
        wanted = "F16" if "self_attn" in tensor.name else "BF16" if "mlp" in tensor.name else "F32"
        assert tensor.dtype == wanted, tensor.name
    assert {t.dtype for t in plan(llama_base, Request("0", dtype="float16")).tensors} == {"F16"}


def test_shards_are_filled_to_their_size(base_of, monkeypatch):
    whole = plan(base_of("llama"), Request("all"))
    assert whole.shards == ("expansion-default-00001-of-00001.safetensors",)
    limit = 10_000
    monkeypatch.setattr("scale_surgery.planning.plan.SHARD_BYTES", limit)
    made = plan(base_of("llama"), Request("all"))
    count = len(made.shards)
    assert count > 3
    assert made.shards == tuple(f"expansion-default-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1))
    filled = {shard: sum(t.bytes for t in made.tensors if t.shard == shard) for shard in made.shards}
    assert all(0 < size <= limit for size in filled.values())
    assert [t.name for t in made.tensors] == [t.name for t in whole.tensors]


def test_a_saved_plan_is_for_the_model_wherever_it_lies(base_of, tmp_path):
    request = Request("0,2", variant="adapt", collaborate="ffn", up_kv_heads=2, init_w22="svd", svd="exact", seed=4)
    made, file, elsewhere = plan(base_of("llama"), request), tmp_path / "plan.json", tmp_path / "elsewhere"
    save_plan(made, file)
    assert load_plan(base_of("llama"), file) == made and made.request == request
    assert set(json.loads(file.read_text())) == {"base_name", "base_revision", "base_fingerprint", "facts", "request"}
    shutil.copytree(base_of("llama"), elsewhere)
    assert load_plan(elsewhere, file) == plan(elsewhere, request), "the plan names the model that is read"
    edit_config(elsewhere, rope_theta=20000.0)
    for base, name in ((elsewhere, "elsewhere"), (base_of("llama", "bfloat16"), "llama_bfloat16_untied")):
        wanted = f"was made for another base model, llama_float32_untied, found {name}. Give the model that"
        with pytest.raises(PlanError, match=wanted):
            load_plan(base, file)


def elsewhere_proved(path, request, versions):
    """A plan as it is made where the split of attention does not pass its proof."""
    base = read_base(open_checkpoint(path))
    facts = weaker(base.architecture, "LlamaAttention")
    assert facts is not None
    sizes = replace(base.sizes, **sizes_of_blocks(facts))
    proof = {**base.facts.proof, "versions": versions}
    base_facts = replace(base.facts, architecture=facts, sizes=sizes, proof=proof)
    return plan_expansion(Base(base.checkpoint, base_facts), request, name="tiny")


def test_a_plan_that_was_proved_otherwise_says_what_was(base_of, tmp_path):
    file, versions = tmp_path / "plan.json", {"torch": "2.9.1", "transformers": "5.1.0", "processor": "AVX2"}
    save_plan(elsewhere_proved(base_of("llama"), Request("1-2"), versions), file)
    (problem,) = problems(load_plan, base_of("llama"), file, error=PlanError)
    present_versions = plan(base_of("llama"), Request("1-2")).facts.proof["versions"]
    here = [f"{name} {version}" for name, version in present_versions.items()]
    reason = "the stronger treatment did not pass its proof on a twin"
    treatment = Problem("treatment-differs", "self_attn of layers 0-2", before="edges", now="split", reason=reason)
    before = ["torch 2.9.1", "transformers 5.1.0", "processor AVX2"]
    assert problem == Problem("plan-treatments-differ", file, treatment, before=before, now=here)
    assert list(present_versions) == ["scale-surgery", "torch", "transformers", "processor"]


KIND_OF_LAYER = "facts.architecture.kind_of_layer"


def count_layers(facts: dict[str, Any], layers: int) -> None:
    """Let facts name another number of layers, all of one kind."""
    facts["sizes"]["layers"], facts["architecture"]["kind_of_layer"] = layers, [0] * layers


# another style is another specification of the module; what classes are called decides nothing
OTHER_FACTS: dict[str, tuple[Callable[[Any], Any], str, list[str]]] = {
    "a style": (
        lambda content: content["facts"]["architecture"]["final_norm"].update(style="layer"),
        "plan-differs",
        ["specs"],
    ),
    "a name": (
        lambda content: content["facts"]["architecture"]["final_norm"].update(name="wte"),
        "plan-not-followed",
        ["model.wte.weight"],
    ),
    "a size": (
        lambda content: content["facts"]["sizes"].update(hidden=8),
        "plan-unreadable",
        ["facts.sizes.hidden"],
    ),
    # with layers that are there, and with layers that are not
    "fewer layers": (lambda content: count_layers(content["facts"], 2), "plan-not-followed", [KIND_OF_LAYER]),
    "more layers": (lambda content: count_layers(content["facts"], 4), "plan-not-followed", [KIND_OF_LAYER]),
    "a release": (
        lambda content: content["facts"]["proof"]["versions"].update({"scale-surgery": "0.0"}),
        "plan-differs",
        ["release of this program"],
    ),
    "no release": (lambda content: content["facts"].update(proof={}), "plan-differs", ["release of this program"]),
    "a key": (lambda content: content.update(layers=[0]), "plan-unreadable", ["layers"]),
    "no request": (lambda content: content.pop("request"), "plan-unreadable", ["request"]),
    # as rank-layers -o writes a request
    "a request alone": (
        lambda content: [content.pop(key) for key in list(content) if key != "request"],
        "plan-unreadable",
        ["base_name", "base_revision", "base_fingerprint", "facts"],
    ),
    "a request of another kind": (lambda content: content.update(request=4), "plan-unreadable", ["request"]),
    "words alone": (lambda content: content["facts"]["architecture"].update(config_class="AConfig"), "", []),
}


@pytest.mark.parametrize("name", OTHER_FACTS)
def test_what_a_saved_plan_says_has_to_give_the_same_plan(base_of, tmp_path, name):
    change, code, differing = OTHER_FACTS[name]
    file, made = tmp_path / "plan.json", plan(base_of("llama"), Request("1"))
    save_plan(made, file)
    with edited(file) as content:
        change(content)
    if not code:
        assert load_plan(base_of("llama"), file) == made
        return
    (problem,) = problems(load_plan, base_of("llama"), file, error=PlanError)
    assert (problem.code, problem.where) == (code, str(file))
    assert problem.values.get("parts", [detail.where for detail in problem.details]) == differing


def test_a_file_that_is_no_plan(base_of, tmp_path):
    file = tmp_path / "plan.json"
    with refused("plan-missing", file, PlanError):
        load_plan(base_of("llama"), file)
    file.write_text("x")
    with refused("plan-unreadable", file, PlanError):
        load_plan(base_of("llama"), file)


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """Four layers, one each of a state space, a mixture, attention and an MLP."""
    return write_base(twin_config("nemotron_h"), torch.float32, tmp_path_factory.mktemp("nemotron") / "base")


def test_a_layer_to_which_nothing_can_be_added_is_named(nemotron):
    whole = Problem("layers-whole", "--up-inner-width", layers="1")
    assert problems(plan, nemotron, Request("0-2", up_inner_width=0), error=PlanError) == [whole]
    assert plan(nemotron, Request("0,2", up_inner_width=0)).layers == (0, 2)
    ways = ["--collaborate ffn", "other --collaborative-layers", "--variant preserve"]
    assert problems(plan, nemotron, Request("1,3", variant="adapt"), error=PlanError) == [
        Problem("groups-closed", "--collaborate", groups=("attn",), layers="1,3", ways=ways)
    ]
    assert plan(nemotron, Request("1,3", variant="adapt", collaborate="ffn")).collaboration.layers == (1, 3)


@pytest.mark.parametrize("name", ("base", "a.b", "2nd", "class", "forward", ""))
def test_a_name_that_an_expansion_cannot_have(base_of, name):
    with refused("name-unfit", "name", PlanError):
        plan(base_of("llama"), Request("1", name=name))
    made = plan(base_of("llama"), Request("1", name="law"))
    assert {expansion_of(tensor.name) for tensor in made.tensors} == {"law"}
