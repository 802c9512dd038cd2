"""Layers of several kinds, blocks that run whole, linears at the edges of a block, padding, an up stream entering late.

Each on a stock model of that make, bit for bit in two dtypes, with a cache and without, and alive.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

from scale_surgery.modeling.expanded_attention import expand_attention
from scale_surgery.modeling.expanded_model import ExpandedPreTrainedModel
from scale_surgery.modeling.expanded_modules import ExpandedModule, expand_module
from scale_surgery.modeling.expanded_paths import BASE, Call, Paths, Running
from scale_surgery.modeling.expanded_paths import Path as ModelPath
from scale_surgery.modeling.expanded_routers import ROUTERS, PosteriorRouter
from scale_surgery.modeling.modeling_scale import model_of
from scale_surgery.planning.architecture import Architecture, Block, Sizes
from scale_surgery.planning.paths import base_specs
from scale_surgery.planning.specs import Collaboration, Widths, build_specs
from tests.by_hand import (
    HEAD_UP,
    IDS,
    UP,
    WRITING,
    block,
    config_key,
    expand_alone,
    is_new,
    linear,
    make_base,
    names_of,
    norm,
    plan_of,
    reading,
    same_generation,
    same_logits,
    shaken,
    write_expanded,
)
from tests.each import woven
from tests.tiny import LLAMA_LIKE, TOKENS
from tests.written import written_architecture

D, INNER, HEADS, KV_HEADS, SIZE = 40, 52, 4, 2, 10
SMALL = LLAMA_LIKE | TOKENS
NORMS = ("input_layernorm", "post_attention_layernorm")
BOTH = ["attn", "ffn"]


def edges(width: int, readers: dict[str, int], writer: tuple[str, int]) -> dict[str, Any]:
    """Linears at the edges of attention; all between them is stock."""
    specs = {name: linear([width, UP], [outputs, 0]) for name, outputs in readers.items()}
    return specs | {writer[0]: linear([writer[1], 0], [width, UP])}


LLAMA_EDGES = edges(
    D,
    {
        "self_attn.q_proj": HEADS * SIZE,
        "self_attn.k_proj": KV_HEADS * SIZE,
        "self_attn.v_proj": KV_HEADS * SIZE,
    },
    ("self_attn.o_proj", HEADS * SIZE),
)
DENSE = {
    "mlp.gate_proj": linear([D, UP], [INNER, 4], group="ffn"),
    "mlp.up_proj": linear([D, UP], [INNER, 4], group="ffn"),
    "mlp.down_proj": linear([INNER, 4], [D, UP], group="ffn"),
    "mlp.act_fn": {"kind": "activation", "base": INNER},
}
PASSING = dict.fromkeys(NORMS, reading(D)) | {"self_attn.o_proj": WRITING}


def kind(attention: dict[str, Any], mlp: str) -> dict[str, Any]:
    """A layer as Llama's: with a mixture as a block, or a dense MLP."""
    own = {"mlp": block(D)} if mlp == "block" else DENSE
    passing = {"mlp": {"kind": "block", "base": D, "up": UP}} if mlp == "block" else {"mlp.down_proj": WRITING}
    expanded = dict.fromkeys(NORMS, norm(D)) | attention | own
    return {"expanded": expanded, "passing": PASSING | passing, "attention": {}}


def kinds(attention: dict[str, Any], *layers: str) -> dict[str, Any]:
    """Dense layers and layers with a mixture, each of its kind."""
    names = sorted(set(layers))
    return {"kinds": [kind(attention, name) for name in names], "kind_of_layer": [names.index(name) for name in layers]}


class Case(NamedTuple):
    """A stock model and what is expanded of it."""

    config: Any
    specs: dict[str, Any]


MIXTRAL = transformers.MixtralConfig(
    **SMALL | {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
)
QWEN = transformers.Qwen3MoeConfig(
    **SMALL,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=[1],
    decoder_sparse_step=1,
)
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK = transformers.DeepseekV3Config(
    **{key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}, **MLA
)
DEEPSEEK_EDGES = edges(
    D,
    {"self_attn.q_a_proj": 16, "self_attn.kv_a_proj_with_mqa": 16},
    ("self_attn.o_proj", 4 * 6),
)
OPT = transformers.OPTConfig(
    vocab_size=97,
    hidden_size=D,
    word_embed_proj_dim=D,
    ffn_dim=INNER,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    dropout=0.0,
    **TOKENS,
)
OPT_EDGES = edges(D, {f"self_attn.{name}_proj": D for name in "qkv"}, ("self_attn.out_proj", D)) | {
    "fc1": linear([D, UP], [INNER, 4], group="ffn"),
    "fc2": linear([INNER, 4], [D, UP], group="ffn"),
    "activation_fn": {"kind": "activation", "base": INNER},
}
OPT_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def opt_specs(layers: list[int], groups: list[str]) -> dict[str, Any]:
    """OPT: positions that read an attention mask, inside a decoder inside the base model."""
    own = norm(D, "layer")
    return plan_of(
        D,
        layers,
        groups,
        base_model="model.decoder",
        model={
            "embed_tokens": {"kind": "embedding", "up": UP},
            "embed_positions": {"kind": "padding", "up": UP},
            "final_layer_norm": own,
        },
        expanded=dict.fromkeys(OPT_NORMS, own) | OPT_EDGES,
        passing=dict.fromkeys(OPT_NORMS, reading(D)) | {"self_attn.out_proj": WRITING, "fc2": WRITING},
    )


def preserving_specs() -> dict[str, Any]:
    """A layer without W12: the inside of its attention reads the base stream, and so does the norm before it."""
    specs = plan_of(D, [1], [], enter="hook", model={"norm": norm(D)}, **kinds(LLAMA_EDGES, *["block"] * 3))
    expanded = specs["kinds"][0]["expanded"]
    for reader in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        del expanded[reader]
    expanded["input_layernorm"] = reading(D)
    return specs


CASES: dict[str, Callable[[], Case]] = {
    "mixtral": lambda: Case(MIXTRAL, plan_of(D, [0, 2], BOTH, **kinds(LLAMA_EDGES, *["block"] * 3))),
    "mixtral_entering": lambda: Case(
        MIXTRAL,
        plan_of(D, [1, 2], BOTH, enter="hook", model={"norm": norm(D)}, **kinds(LLAMA_EDGES, *["block"] * 3)),
    ),
    "mixtral_preserve": lambda: Case(MIXTRAL, preserving_specs()),
    "qwen3_moe": lambda: Case(QWEN, plan_of(D, [0, 1], BOTH, **kinds(LLAMA_EDGES, "block", "dense", "block"))),
    "deepseek_v3": lambda: Case(DEEPSEEK, plan_of(D, [0, 2], BOTH, **kinds(DEEPSEEK_EDGES, "dense", "block", "block"))),
    "opt": lambda: Case(OPT, opt_specs([0, 2], BOTH)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Write base and expanded model of a case, once."""
    known: dict[tuple[str, torch.dtype], tuple[Path, Path]] = {}

    def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        if (name, dtype) not in known:
            folder, case = tmp_path_factory.mktemp(name), CASES[name]()
            base = make_base(folder / "base", case.config, dtype)
            known[name, dtype] = base, write_expanded(base, folder / "expanded", case.specs, names_of(case.config))
        return known[name, dtype]

    return make


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.mark.parametrize(("name", "dtype"), woven(tuple(CASES), (torch.float32, torch.bfloat16)))
def test_the_output_is_the_base_s(made, name, dtype):
    base, expanded = map(load, made(name, dtype))
    assert type(expanded).__name__ == f"Scale{type(base).__name__}"
    assert same_logits(base, expanded)
    assert same_generation(base, expanded)
    with expanded.expansion_disabled():
        assert same_logits(base, expanded)
        assert same_generation(base, expanded)


@pytest.mark.parametrize("auto_class", (AutoModel, AutoModelForCausalLM))
def test_what_a_class_keeps_in_float32_stays_so(tmp_path, auto_class):
    """Where new tensors are asked for in float32, too; an answer of the base may hang on it."""
    base = make_base(tmp_path / "base", DEEPSEEK, torch.bfloat16)
    specs = CASES["deepseek_v3"]().specs | {"dtype": "float32"}
    path = write_expanded(base, tmp_path / "expanded", specs, names_of(DEEPSEEK))
    stock, expanded = (auto_class.from_pretrained(own).state_dict() for own in (base, path))
    assert {torch.float32, torch.bfloat16} == {own.dtype for own in stock.values()}
    assert {name: expanded[name].dtype for name in stock} == {name: own.dtype for name, own in stock.items()}
    assert {own.dtype for name, own in expanded.items() if is_new(name)} == {torch.float32}


@pytest.mark.parametrize("name", CASES)
def test_every_new_tensor_is_alive_and_nothing_else_trains(made, name):
    base, expanded = map(load, made(name))
    assert {key for key, own in expanded.named_parameters() if own.requires_grad} == set(
        filter(is_new, dict(expanded.named_parameters()))
    )
    has_w12 = any(key.endswith("w12") for key, _ in expanded.named_parameters())
    assert has_w12 == (name != "mixtral_preserve")
    if has_w12:
        assert not same_logits(base, shaken(expanded, "w12"))
    before = expanded(IDS).logits.detach()
    shaken(expanded, HEAD_UP)
    after = expanded(IDS).logits
    assert not torch.equal(before, after)
    after.float().pow(2).mean().backward()
    (plan,) = expanded.config.scale_surgery["expansions"]
    lowest = min(plan["expanded_layers"])
    # where the up stream enters as zeros, nothing has been written to it before the first expanded layer
    is_late = plan.get("enter") == "hook"
    idle = [
        key
        for key, own in expanded.named_parameters()
        if own.requires_grad and not own.grad.any() and not (is_late and f".{lowest}." in key)
    ]
    assert idle == []
    assert [key for key, own in expanded.named_parameters() if not own.requires_grad and own.grad is not None] == []


def test_without_collaboration_the_base_stream_stays_whatever_is_learned(made):
    base, expanded = map(load, made("mixtral_preserve"))
    shaken(expanded, "w21", "w22", "up_weight")
    found, wanted = (own(IDS, output_hidden_states=True).hidden_states for own in (expanded, base))
    assert all(torch.equal(own[..., :D], its) for own, its in zip(found[1:], wanted[1:], strict=True))
    assert not same_logits(base, expanded)


@pytest.mark.parametrize(("name", "layer", "is_reached"), [("mixtral_preserve", 1, False), ("mixtral", 2, True)])
def test_no_gradient_passes_through_experts_below_what_learns(made, name, layer, is_reached):
    model = shaken(load(made(name)[1]), "w12", "up_weight")
    seen = []
    module = model.get_submodule(f"model.layers.{layer}.mlp.experts")
    module.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    model(IDS).logits.sum().backward()
    assert seen == [is_reached]


def test_a_router_reads_two_heads_of_one_stream_where_edges_alone_are_expanded(made, tmp_path):
    path = write_expanded(
        made("mixtral")[0],
        tmp_path / "routed",
        preserving_specs(),
        names_of(MIXTRAL),
        router=PosteriorRouter().for_expansions(1).settings,
    )
    base, model = load(made("mixtral")[0]), shaken(load(path), "w21", "w22", "up_weight")
    with torch.no_grad():
        preserve, adapt = model.path_logits(IDS)
        assert torch.equal(preserve, base(IDS, use_cache=False).logits) and not torch.equal(preserve, adapt)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, **options, use_cache=False))


def test_the_router_of_a_mixture_sees_the_base_stream_only(made):
    base, expanded = map(load, made("mixtral"))
    scores = [own(IDS, output_router_logits=True).router_logits for own in (base, expanded)]
    assert all(torch.equal(one, other) for one, other in zip(*scores, strict=True))
    assert len(scores[0]) == 3


@pytest.mark.parametrize("name", ("mixtral", "qwen3_moe", "deepseek_v3", "opt"))
def test_a_model_without_its_head_gives_hidden_states(made, name):
    path = made(name)[1]
    alone, whole = AutoModel.from_pretrained(path).eval(), load(path)
    with torch.no_grad():
        assert torch.equal(alone(IDS)[0], whole(IDS, output_hidden_states=True).hidden_states[-1])
        assert alone(IDS)[0].shape[-1] == D + UP


@pytest.mark.parametrize("name", ("mixtral", "opt"))
def test_checkpointing_computes_the_same_gradients(made, name):
    gradients = []
    for is_checkpointed in (False, True):
        model = shaken(load(made(name)[1]), "w12", "up_weight").train()
        if is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(IDS, use_cache=False).logits.float().pow(2).mean().backward()
        gradients.append({key: own.grad for key, own in model.named_parameters() if own.requires_grad})
    assert all(torch.equal(own, gradients[1][key]) for key, own in gradients[0].items())


SIZES = Sizes(D, 3, HEADS, KV_HEADS, SIZE, INNER, 97, 1e-6, False)
LLAMA = written_architecture({**SMALL, "model_type": "llama"})


def mixtral_facts(kept: str = "mlp") -> Architecture:
    """Attention of Llama, split, and a mixture as a block, or another part that stays as it is."""
    whole = {"mlp": Block("mlp", "", "ffn", "block"), "self_attn": Block("self_attn", "", "attn", "block")}
    parts = tuple(whole[own.name] if own.name in (kept, "mlp") else own for own in LLAMA.kinds[0].blocks)
    return replace(LLAMA, kinds=(replace(LLAMA.kinds[0], blocks=parts),))


def write_mixtral(
    base: Path, path: Path, groups: tuple[str, ...], router: str, layers: tuple[int, ...] = (0, 1, 2), kept: str = "mlp"
) -> Path:
    """An expansion of these layers, which collaborates in all but the first, and a router."""
    facts, collaboration = mixtral_facts(kept), Collaboration(layers[1:] if groups else (), groups)
    plan = build_specs(facts, SIZES, Widths(UP, 1, 4), layers, collaboration) | {"dtype": None}
    said, settings = base_specs(facts, SIZES, {}), ROUTERS[router]().for_expansions(1).settings
    return write_expanded(base, path, plan, names_of(MIXTRAL), base_specs=said, router=settings)


@pytest.mark.parametrize("layers", ((0, 1, 2), (0, 2)), ids=("all", "some"))
@pytest.mark.parametrize(
    ("groups", "router"), (((), "posterior"), (("attn", "ffn"), "posterior"), (("attn", "ffn"), "cosine"))
)
def test_two_paths_pass_through_a_mixture(tmp_path, groups, router, layers):
    base = make_base(tmp_path / "base", MIXTRAL)
    path = write_mixtral(base, tmp_path / "expanded", groups, router, layers)
    stock, model = load(base), shaken(load(path), "w12", "up_weight", "w21")
    with torch.no_grad():
        preserve, adapt = model.path_logits(IDS)
        assert torch.equal(preserve, stock(IDS, use_cache=False).logits)
        assert not torch.equal(preserve, adapt)
        with model.routing_disabled():
            torch.testing.assert_close(adapt, model(IDS, use_cache=False).logits)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, **options, use_cache=False))


def test_two_paths_cannot_pass_through_a_block_that_keeps_a_cache(tmp_path):
    base = make_base(tmp_path / "base", MIXTRAL)
    path = write_mixtral(base, tmp_path / "expanded", ("attn", "ffn"), "posterior", kept="self_attn")
    stock, model = load(base), load(path)
    with pytest.raises(
        ValueError, match="MixtralAttentionWithUpStream: keeps a cache \\(past_key_values\\) and runs as"
    ):
        model(IDS)
    # without a router the same block runs
    with model.routing_disabled():
        assert same_logits(stock, model) and same_generation(stock, model)


def test_one_kind_may_stand_where_it_always_stood(made, tmp_path):
    """Flat specifications and a list of one kind are the same model."""
    case = CASES["mixtral"]()
    flat = {key: value for key, value in case.specs.items() if key not in ("kinds", "kind_of_layer")}
    path = write_expanded(made("mixtral")[0], tmp_path / "flat", flat | case.specs["kinds"][0], names_of(MIXTRAL))
    assert torch.equal(load(path)(IDS).logits, load(made("mixtral")[1])(IDS).logits)
    (plan,) = json.loads((path / "config.json").read_text())["scale_surgery"]["expansions"]
    assert sorted(plan["expanded"])


def test_a_module_that_this_release_does_not_have_is_named(made, tmp_path):
    specs = CASES["mixtral"]().specs
    own = specs["kinds"][0]
    own["expanded"] = {name.replace("mlp", "moe"): spec for name, spec in own["expanded"].items()}
    with pytest.raises(ValueError, match="names the module moe, expected one of MixtralDecoderLayer in transformers 5"):
        write_expanded(made("mixtral")[0], tmp_path / "renamed", specs, names_of(MIXTRAL))


def test_attention_that_is_computed_inside_its_module_is_refused():
    """As older releases of transformers compute that of some models."""
    with pytest.raises(ValueError, match=r"adds heads to Linear, which in transformers 5\..* does not hand queries"):
        expand_attention(nn.Linear(2, 2), {"heads": 2, "kv_heads": 2}, Running(Call(Paths((BASE,), {}, 1))), 0)


def test_a_module_is_expanded_once():
    activation = expand_alone(nn.GELU(), "activation", up_in=2)
    own, running = activation.expansions["default"], activation.running
    expand_module(activation, "activation", running, 0)
    assert isinstance(activation, ExpandedModule) and activation.expansions["default"] is own
    x = torch.randn(1, 6)
    torch.testing.assert_close(activation(x), torch.nn.functional.gelu(x))


class OneActivation(transformers.LlamaForCausalLM):
    """A stock model all of whose layers call one activation, as older ones do."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.mlp.act_fn = self.model.layers[0].mlp.act_fn


def routed_llama(stock: type, layers: tuple[int, ...], fork: tuple[int, ...], router: str) -> Any:
    """A routed expansion of a stock class, of random weights."""
    config = transformers.LlamaConfig(**SMALL)
    plan = build_specs(LLAMA, SIZES, Widths(20, 1, 4), layers, Collaboration(fork, ("attn", "ffn"))) | {"dtype": None}
    specs = config_key(plan, base_specs(LLAMA, SIZES, {}), **ROUTERS[router]().for_expansions(1).settings)
    own = model_of(stock, transformers.LlamaConfig)
    plain = config.to_dict() | {"scale_surgery": specs}
    del plain["model_type"]
    torch.manual_seed(0)
    return shaken(own._from_config(own.config_class.from_dict(plain)).eval(), "w12", "w21", "w22", "up_weight")


@pytest.mark.parametrize("router", ("posterior", "cosine"))
@pytest.mark.parametrize(("layers", "fork"), (((0, 1, 2), (2,)), ((0, 2), (2,)), ((1,), (1,))))
def test_two_paths_pass_through_layers_that_share_an_activation(layers, fork, router):
    """One path below the fork, two above it, and one activation for all: what is computed is what each alone gives."""
    plain, shared = (routed_llama(own, layers, fork, router) for own in (transformers.LlamaForCausalLM, OneActivation))
    shared.load_state_dict(plain.state_dict())
    assert same_logits(plain, shared) and same_generation(plain, shared)
    with plain.expansion_disabled(), shared.expansion_disabled():
        assert same_logits(plain, shared)
    with torch.no_grad():
        preserve, adapt = shared.path_logits(IDS)
        assert not torch.equal(preserve, adapt)
    gradients = []
    for model in (plain, shared):
        model(IDS, use_cache=False).logits.float().pow(2).mean().backward()
        gradients.append({name: own.grad for name, own in model.named_parameters() if own.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(own, gradients[1][name]) for name, own in gradients[0].items())


@pytest.mark.parametrize("style", ("layer_plus_one", "rms_plus_one"))
def test_a_norm_whose_gain_begins_at_zero(style):
    sizes = {"base": 8, "up": 3, "epsilon": 1e-5, "dtype": None}
    module = expand_alone(nn.LayerNorm(8), "norm", style=style, **sizes)
    plain = expand_alone(nn.LayerNorm(8), "norm", style=style.removesuffix("_plus_one"), **sizes)
    with torch.no_grad():
        module.expansions["default"].up_weight.fill_(0.5)
        plain.expansions["default"].up_weight.fill_(1.5)
        x = torch.randn(2, 11)
        assert torch.equal(module(x), plain(x))


def test_a_norm_without_a_gain():
    module = nn.LayerNorm(8, elementwise_affine=False)
    expand_alone(module, "norm", base=8, up=3, style="layer", epsilon=1e-5, dtype=None)
    assert {name: own.shape for name, own in module.named_parameters()} == {"expansions.default.up_weight": (3,)}
    with torch.no_grad():
        x = torch.randn(2, 11)
        module.expansions["default"].up_weight.fill_(1)
        expected = torch.nn.functional.layer_norm(x[:, :8].contiguous(), (8,))
        assert torch.equal(module(x)[:, :8], expected)
        torch.testing.assert_close(module(x)[:, 8:], torch.nn.functional.layer_norm(x[:, 8:], (3,)))


@pytest.mark.parametrize("scale", (2.0, torch.tensor(2.0)))
def test_an_embedding_scales_its_new_columns_as_the_old_ones(scale):
    class Scaled(nn.Embedding):
        embed_scale = scale

        def forward(self, ids):
            return super().forward(ids) * self.embed_scale

    module = expand_alone(Scaled(5, 4), "embedding", up=2, dtype=None)
    own = module.expansions["default"].up_weight
    with torch.no_grad():
        own.fill_(3)
        found = module(torch.arange(5))
        assert torch.equal(found, torch.cat((module.weight * 2, own * 2), dim=-1))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("is_enabled", (True, False))
def test_a_head_with_a_bias_sees_last_tokens_as_the_base_does(dtype, is_enabled):
    """Generation asks for the logits of last tokens; torch adds the bias to those of several texts apart."""
    torch.manual_seed(0)
    stock = nn.Linear(64, 97).to(dtype)
    head = nn.Linear(64, 97).to(dtype)
    head.load_state_dict(stock.state_dict())
    expand_alone(head, "head", base=64, up=8, dtype=None).requires_grad_(False)
    if not is_enabled:
        head.running.chosen = Call(Paths((BASE,), {}, 1))
    features = torch.randn(3, 13, 72).to(dtype)
    base = features[..., :64].contiguous()
    seen = features if is_enabled else base
    with torch.no_grad():
        last = stock(base[:, -1:])
        assert torch.equal(head(seen[:, -1:]), last) and torch.equal(head(seen), stock(base))
        # negative control: where the same features are not strided, half precision rounds otherwise
        assert torch.equal(last, stock(base[:, -1:].contiguous())) == (dtype == torch.float32)


@pytest.mark.parametrize("stock", (nn.Linear, FalconLinear))
def test_copies_are_computed_as_the_stock_class_computes(stock):
    """Falcon adds the bias in a step of its own, and rounds twice."""
    torch.manual_seed(0)
    down, up, x = (own.bfloat16() for own in (stock(52, 40), stock(40, 52), torch.randn(2, 13, 40)))
    with torch.no_grad():
        wide, written = up(x), down(up(x))
        expand_alone(up, "grown", in_features=[40, 0], out_features=[[52, 52]], collaborative=False, dtype=None)
        expand_alone(
            down, "grown", in_features=[52, 52], out_features=[[40, 0]], collaborative=True, dtype=None, share=0.5
        )
        for name, own in {"w21": up.weight, "up_bias": up.bias}.items():
            up.expansions["default"].get_parameter(name).copy_(own)
        down.expansions["default"].w12.copy_(down.weight / 2)
        assert torch.equal(up(x), torch.cat((wide, wide), -1)) and torch.equal(down(up(x)), written)


def widened(entering: int, *expansions: str) -> dict[int, Any]:
    """What becomes of features that stock code adds before layers, where `writer` writes from the first layer on."""
    paths = Paths((BASE, *map(ModelPath, expansions)), {"writer": 0, "reader": None}, 2)
    model = SimpleNamespace(running=Running(Call(paths)), stream_widths={"": 4, "writer": 2, "reader": 3})
    model.entering_widths = {
        name: width if not name else entering * width for name, width in model.stream_widths.items()
    }
    model.streams_after = partial(ExpandedPreTrainedModel.streams_after, model)
    kwargs = {"deepstack_features": {0: FEATURES, 1: FEATURES}, "use_cache": False}
    found = ExpandedPreTrainedModel._widen(model, nn.Module(), (), kwargs)
    assert found[0] == () and found[1]["use_cache"] is False
    return found[1]["deepstack_features"]


FEATURES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("entering", (0, 1))
def test_what_is_added_before_layers_is_as_wide_as_what_enters_them(entering):
    """As Granite's vision models add images: each base stream gets them, an up stream zeros, where it has entered."""
    pad = torch.nn.functional.pad
    one = widened(entering, "writer")
    assert torch.equal(one[0], pad(FEATURES, (0, 2 * entering)))
    assert torch.equal(one[1], torch.cat((FEATURES, pad(FEATURES, (0, 2))), -1))
    several = widened(entering, "writer", "reader")
    assert torch.equal(several[0], pad(FEATURES, (0, 5 * entering)))
    assert torch.equal(several[1], torch.cat((pad(FEATURES, (0, 3)), pad(FEATURES, (0, 2))), -1))


def test_nothing_is_widened_where_the_base_runs():
    model = SimpleNamespace(running=Running(Call(Paths((BASE,), {}, 2))))
    assert ExpandedPreTrainedModel._widen(model, nn.Module(), (), {"deepstack_features": {0: FEATURES}}) is None
