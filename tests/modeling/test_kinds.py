"""Blocks that run whole, linears at the edges of a block, several kinds of layers; modules that are expanded alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

from scale_surgery import Request, expand, route_export
from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.modeling.expanded_model import ExpandedPreTrainedModel
from scale_surgery.modeling.expanded_modules import ExpandedModule, expand_attention, expand_module
from scale_surgery.modeling.expanded_paths import BASE, ActiveExpansions, Context, Paths
from scale_surgery.modeling.expanded_paths import Path as ModelPath
from scale_surgery.modeling.modeling_scale import model_of
from tests import routed
from tests.by_hand import expand_alone, make_base
from tests.composed import OTHERS
from tests.conftest import edited, load
from tests.each import woven
from tests.routed import Trio, random_ids, train

trio_of = routed.trio_of
IDS = random_ids(2, 9)
ADAPT = Request("all", variant="adapt", collaborate="both", init_w22="random")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A mixture of experts, and expansions of it: one that writes into the base stream, and one that does not."""
    folder = tmp_path_factory.mktemp("mixtral")
    base = make_base(folder / "base", OTHERS["mixtral"]())
    expand(base, ADAPT, folder / "adapt")
    expand(base, Request("1", init_w22="random"), folder / "preserve")
    return lambda name: folder / name


@pytest.mark.parametrize("auto_class", (AutoModel, AutoModelForCausalLM))
def test_what_a_class_keeps_in_float32_stays_so(tmp_path, auto_class):
    """Where new tensors are asked for in float32, too; an answer of the base may hang on it."""
    base = make_base(tmp_path / "base", OTHERS["deepseek_v3"](), torch.bfloat16)
    path = expand(base, replace(ADAPT, dtype="float32"), tmp_path / "expanded").path
    stock, expanded = (auto_class.from_pretrained(folder).state_dict() for folder in (base, path))
    assert {torch.float32, torch.bfloat16} == {tensor.dtype for tensor in stock.values()}
    assert {name: expanded[name].dtype for name in stock} == {name: tensor.dtype for name, tensor in stock.items()}
    assert {tensor.dtype for name, tensor in expanded.items() if expansion_of(name)} == {torch.float32}


@pytest.mark.parametrize(("name", "is_reached"), [("preserve", False), ("adapt", True)])
def test_gradients_pass_through_experts_only_above_what_learns(mixtral, name, is_reached):
    """And they are the same where activations are computed again."""
    gradients = []
    for is_checkpointed in (False, True):
        model, seen = train(load(mixtral(name))).train(), []
        if is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        experts = model.get_submodule("model.layers.1.mlp.experts")
        experts.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.requires_grad))
        model(IDS, use_cache=False).logits.float().pow(2).mean().backward()
        assert set(seen) == {is_reached} or is_checkpointed
        gradients.append({key: tensor.grad for key, tensor in model.named_parameters() if tensor.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and set(map(expansion_of, gradients[0])) == {"default"}
    assert all(torch.equal(gradient, gradients[1][key]) for key, gradient in gradients[0].items())


def test_the_router_of_a_mixture_sees_the_base_stream_only(mixtral):
    base, expanded = (load(mixtral(name)) for name in ("base", "adapt"))
    scores = [model(IDS, output_router_logits=True).router_logits for model in (base, expanded)]
    assert len(scores[0]) == 2 and all(map(torch.equal, *scores))
    train(expanded)
    assert not torch.equal(expanded(IDS, output_router_logits=True).router_logits[1], scores[0][1]), "the control"


@pytest.mark.parametrize("name", ("mixtral", "opt"))
def test_a_model_without_its_head_gives_hidden_states(tmp_path, name):
    base = make_base(tmp_path / "base", OTHERS[name]())
    path = expand(base, ADAPT, tmp_path / "expanded").path
    alone, whole = AutoModel.from_pretrained(path).eval(), load(path)
    with torch.no_grad():
        assert torch.equal(alone(IDS)[0], whole(IDS, output_hidden_states=True).hidden_states[-1])
        assert alone(IDS)[0].shape[-1] == whole.config.hidden_size + whole.stream_widths["default"]


def altered(path: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy whose config.json says something else of its expansion."""
    shutil.copytree(path, folder)
    with edited(folder / "config.json") as config:
        change(config["scale_surgery"])
    return folder


def test_one_kind_may_stand_where_it_always_stood(mixtral, tmp_path):
    """Flat specifications and a list of one kind are the same model."""

    def listed(manifest: dict[str, Any]) -> None:
        (plan,) = manifest["expansions"]
        assert "kinds" not in plan, "which is how they are written"
        plan["kinds"] = [{key: plan.pop(key) for key in ("expanded", "passing", "attention")}]
        plan["kind_of_layer"] = [0, 0]

    path = altered(mixtral("adapt"), tmp_path / "listed", listed)
    assert torch.equal(load(path)(IDS).logits, load(mixtral("adapt"))(IDS).logits)


def test_a_module_that_this_release_does_not_have_is_named(mixtral, tmp_path):
    def rename(manifest: dict[str, Any]) -> None:
        (plan,) = manifest["expansions"]
        plan["expanded"] = {name.replace("mlp", "moe"): spec for name, spec in plan["expanded"].items()}

    path = altered(mixtral("adapt"), tmp_path / "renamed", rename)
    with pytest.raises(ValueError, match="names the module moe, expected one of MixtralDecoderLayer in transformers 5"):
        load(path)


def test_two_paths_cannot_pass_through_a_block_that_keeps_a_cache(mixtral, tmp_path):
    """No plan says so; without a router the same block runs."""

    def keep(manifest: dict[str, Any]) -> None:
        (plan,), (kind,) = manifest["expansions"], manifest["base"]["kinds"]
        plan["attention"] = kind["attention"] = {}
        for modules in (plan["expanded"], plan["passing"], kind["modules"]):
            for name in [name for name in modules if name.startswith("self_attn.")]:
                del modules[name]
            modules["self_attn"] = {**modules["mlp"], "group": "attn"}

    routed = route_export(mixtral("adapt"), tmp_path / "routed").path
    path = altered(routed, tmp_path / "kept", keep)
    model = load(path, strict_loading=False)
    with pytest.raises(ValueError, match="MixtralAttentionWithUpStream: keeps a cache \\(cache\\) and runs as"):
        model(IDS)
    with model.routing_disabled():
        assert model(IDS).logits.isfinite().all()


def test_attention_that_is_computed_inside_its_module_is_refused():
    """As older releases of transformers compute that of some models."""
    with pytest.raises(ValueError, match=r"adds heads to Linear, which in transformers 5\..* does not hand queries"):
        expand_attention(
            nn.Linear(2, 2), {"heads": 2, "kv_heads": 2}, ActiveExpansions(Context(Paths((BASE,), {}, 1))), 0
        )


def test_a_module_is_expanded_once():
    activation = expand_alone(nn.GELU(), "activation", up_in=2)
    expansion, active = activation.expansions["default"], activation.active
    expand_module(activation, "activation", active, 0)
    assert isinstance(activation, ExpandedModule) and activation.expansions["default"] is expansion
    x = torch.randn(1, 6)
    torch.testing.assert_close(activation(x), torch.nn.functional.gelu(x))


class OneActivation(transformers.LlamaForCausalLM):
    """A stock model all of whose layers call one activation, as older ones do."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.mlp.act_fn = self.model.layers[0].mlp.act_fn


@pytest.mark.parametrize(
    ("request_name", "router"), woven(("adapt", "deep", "without_up_stream"), ("posterior", "cosine"))
)
def test_two_paths_pass_through_layers_that_share_an_activation(
    trio_of: Callable[..., Trio], request_name: str, router: str
) -> None:
    """One path below the fork, two above it, and one activation for all: what is computed is what each alone gives."""
    trio = trio_of("llama", request_name, router)
    plain, shared = load(trio.path), model_of(OneActivation, transformers.LlamaConfig).from_pretrained(trio.path).eval()
    gradients = []
    for model in map(train, (plain, shared)):
        model(IDS, use_cache=False).logits.float().pow(2).mean().backward()
        gradients.append({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    with torch.no_grad():
        for choice in (["default"], "default", None):
            with plain.use_expansion(choice), shared.use_expansion(choice):
                assert torch.equal(plain(IDS).logits, shared(IDS).logits)
        assert not torch.equal(*shared.path_logits(IDS))


def test_a_norm_without_a_gain():
    module = nn.LayerNorm(8, elementwise_affine=False)
    expand_alone(module, "norm", base=8, up=3, style="layer", epsilon=1e-5, dtype=None)
    assert {name: tensor.shape for name, tensor in module.named_parameters()} == {"expansions.default.up_weight": (3,)}
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
    up_weight = module.expansions["default"].up_weight
    with torch.no_grad():
        up_weight.fill_(3)
        output = module(torch.arange(5))
        assert torch.equal(output, torch.cat((module.weight * 2, up_weight * 2), dim=-1))


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
        head.active.chosen = Context(Paths((BASE,), {}, 1))
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
    down, up, x = (operand.bfloat16() for operand in (stock(52, 40), stock(40, 52), torch.randn(2, 13, 40)))
    with torch.no_grad():
        wide, written = up(x), down(up(x))
        expand_alone(up, "grown", in_features=[40, 0], out_features=[[52, 52]], collaborative=False, dtype=None)
        expand_alone(
            down, "grown", in_features=[52, 52], out_features=[[40, 0]], collaborative=True, dtype=None, share=0.5
        )
        for name, tensor in {"w21": up.weight, "up_bias": up.bias}.items():
            up.expansions["default"].get_parameter(name).copy_(tensor)
        down.expansions["default"].w12.copy_(down.weight / 2)
        assert torch.equal(up(x), torch.cat((wide, wide), -1)) and torch.equal(down(up(x)), written)


def widened(entering: int, *expansions: str) -> dict[int, Any]:
    """What becomes of features that stock code adds before layers, where `writer` writes from the first layer on."""
    paths = Paths((BASE, *map(ModelPath, expansions)), {"writer": 0, "reader": None}, 2)
    model = SimpleNamespace(active=ActiveExpansions(Context(paths)), stream_widths={"": 4, "writer": 2, "reader": 3})
    model.entering_widths = {
        name: width if not name else entering * width for name, width in model.stream_widths.items()
    }
    model.streams_after = partial(ExpandedPreTrainedModel.streams_after, model)
    kwargs = {"deepstack_features": {0: FEATURES, 1: FEATURES}, "use_cache": False}
    arguments = ExpandedPreTrainedModel._widen(model, nn.Module(), (), kwargs)
    assert arguments[0] == () and arguments[1]["use_cache"] is False
    return arguments[1]["deepstack_features"]


FEATURES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("entering", (0, 1))
def test_what_is_added_before_layers_is_as_wide_as_what_enters_them(entering):
    """As Granite's vision models add images: each base stream gets them, an up stream zeros, where it has entered."""
    pad = torch.nn.functional.pad
    single = widened(entering, "writer")
    assert torch.equal(single[0], pad(FEATURES, (0, 2 * entering)))
    assert torch.equal(single[1], torch.cat((FEATURES, pad(FEATURES, (0, 2))), -1))
    several = widened(entering, "writer", "reader")
    assert torch.equal(several[0], pad(FEATURES, (0, 5 * entering)))
    assert torch.equal(several[1], torch.cat((pad(FEATURES, (0, 3)), pad(FEATURES, (0, 2))), -1))


def test_nothing_is_widened_where_the_base_runs():
    model = SimpleNamespace(active=ActiveExpansions(Context(Paths((BASE,), {}, 2))))
    assert ExpandedPreTrainedModel._widen(model, nn.Module(), (), {"deepstack_features": {0: FEATURES}}) is None


@torch.no_grad()
def test_attention_of_gpt2_that_upcasts_is_that_of_its_base(tmp_path):
    """GPT-2 asks for its kernel by name before it picks one."""
    base = make_base(tmp_path / "base", OTHERS["gpt2_upcasting"](), torch.bfloat16)
    wide = expand(base, Request("all", variant="adapt", collaborate="both", up_kv_heads=1), tmp_path / "wide").path
    stock, expanded = (load(path, attn_implementation="eager") for path in (base, wide))
    assert torch.equal(expanded(IDS).logits, stock(IDS).logits)
    for layer in stock.transformer.h:
        layer.attn.reorder_and_upcast_attn = False
    assert not torch.equal(expanded(IDS).logits, stock(IDS).logits), "the control"
