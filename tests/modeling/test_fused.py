"""The fused form computes what the blocks compute, in as few products as a stock model, of which only sizes differ."""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from scale_surgery import PlanError, Request, expand, merge
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.folder.folder import open_folder
from scale_surgery.modeling.modeling_fused import Entering, Narrow, Padding, Shared, Split
from scale_surgery.progress import no_track
from scale_surgery.surgery.fused import write_fused
from tests.conftest import REQUESTS, load, refused, shake
from tests.each import FEW, WAYS, mostly
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES

# a sum in another order; the tiny models' logits are of size 1
CLOSE = {"rtol": 0, "atol": 1e-4}
# layer 2 was not chosen, and passes the up stream on; below layer 1 there is none yet
MADE = REQUESTS | {
    "deep": Request("0-1", variant="adapt", collaborative_layers="1", init_w22="random"),
    "between": Request("1", variant="adapt", init_w22="random"),
    "last": Request("2"),
}
ROTARY_TYPES = {"full_attention", "sliding_attention"}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
Twins = tuple[Any, Any, Path]


@pytest.fixture(scope="module")
def twins_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Twins]:
    """A shaken expanded model, its fused form, and the folder of that."""

    @functools.cache
    def make(family: str, request: str, tied: bool) -> Twins:
        folder = tmp_path_factory.mktemp("fused")
        path = shake(expand(base_of(family, "float32", tied), MADE[request], folder / family).path)
        write_fused(open_folder(path), folder, no_track)
        return load(path), load(folder), folder

    return make


def prompts() -> list[dict[str, torch.Tensor]]:
    """A single token, a text, and a batch that is padded on the left."""
    ids = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return [{"input_ids": ids[:1, :1]}, {"input_ids": ids[1:]}, {"input_ids": ids * mask, "attention_mask": mask}]


KEPT = list(zip(FEW, ("preserve", "between", "deep", "adapt_without_up_stream"), strict=True))


@pytest.mark.parametrize(("family", "request_name"), mostly(product(FAMILIES, MADE), KEPT.__contains__))
@pytest.mark.parametrize("tied", mostly((False, True), lambda tied: tied))
def test_fused_computes_what_the_blocks_compute(
    twins_of: Callable[..., Twins], family: str, request_name: str, tied: bool
) -> None:
    model, fused, _ = twins_of(family, request_name, tied)
    with torch.no_grad():
        for prompt in prompts():
            torch.testing.assert_close(fused(**prompt).logits, model(**prompt).logits, **CLOSE)
    prompt = prompts()[-1]
    for options in ({}, {"use_cache": False}, {"num_beams": 3}):
        assert torch.equal(*(each.generate(**prompt, **GREEDY, **options) for each in (fused, model)))
    # the control: every matrix takes part, its up part too
    logits = fused(**prompts()[1]).logits
    with torch.no_grad():
        fused.get_output_embeddings().weight[:, -1] += 1
        assert not torch.allclose(fused(**prompts()[1]).logits, logits, **CLOSE)
        fused.get_output_embeddings().weight[:, -1] -= 1


class Products(TorchFunctionMode):
    """Counts products with a weight, and what else a forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


def calls_of(model: Any) -> Counter[str]:
    """What one forward calls."""
    with torch.no_grad(), Products() as mode:
        model(torch.arange(3, 20)[None])
    return mode.counts


@pytest.mark.parametrize("family", mostly(WAYS, ("llama", "gpt_neox", "gpt2").__contains__))
def test_a_linear_is_one_product_and_heads_attend_at_once(
    base_of: Callable[..., Path], twins_of: Callable[..., Twins], family: str
) -> None:
    blocks, fused = map(calls_of, twins_of(family, "adapt", False)[:2])
    base = calls_of(load(base_of(family)))
    for name in ("linear", "addmm", "scaled_dot_product_attention", "silu", "gelu", "matmul"):
        assert fused[name] == base[name], name
    assert blocks["linear"] > base["linear"]


@pytest.mark.parametrize("family", mostly(WAYS, ("phi3", "gpt2").__contains__))
def test_what_a_server_replaces_is_stock(
    base_of: Callable[..., Path], twins_of: Callable[..., Twins], family: str
) -> None:
    """Linears, embeddings, head and attention have the classes that they have in the base model."""
    fused = twins_of(family, "between", True)[1]
    added = {Entering: 0, Split: 0, Narrow: 0, Shared: 0, Padding: 0}
    for (name, module), (_, stock) in zip(fused.named_modules(), load(base_of(family)).named_modules(), strict=True):
        if type(module) is not type(stock) and name:
            added[type(module).__bases__[0]] += 1
    # GPT-2 expects after the last norm what entered the layers, so the up stream begins in the embedding
    assert added[Split] and bool(added[Entering]) == (family != "gpt2")
    assert added[Shared] == 1 and not added[Padding]


def test_the_config_says_what_a_server_asks_of_each_layer(twins_of: Callable[..., Twins]) -> None:
    folder = twins_of("llama", "between", True)[2]
    config, plan = json.loads((folder / "config.json").read_text()), MADE["between"]
    base = config["scale_surgery"]["stock"]
    assert config["hidden_size"] > base["hidden_size"] and plan.layers == "1"
    assert config["num_attention_heads"] > base["num_attention_heads"] and config["tie_word_embeddings"] is True
    heads = {name: base[name] for name in ("num_attention_heads", "num_key_value_heads")}
    assert config["per_layer_config"] == {"0": heads, "2": heads}
    loaded = load(folder)
    for index, layer in enumerate(loaded.model.layers):
        wanted = heads["num_attention_heads"] if index != 1 else config["num_attention_heads"]
        assert layer.self_attn.q_proj.out_features == wanted * config["head_dim"]


@pytest.mark.parametrize(
    ("family", "request_name", "tied"),
    [
        ("qwen3", "last", True),
        # of the lowest layer the embedding has an up part of its own
        ("qwen3", "deep", True),
        # zeros enter the layers below
        ("gpt2", "between", True),
        ("gpt2", "deep", False),
        ("qwen3", "last", False),
    ],
)
def test_a_tied_head_stays_the_embedding(
    twins_of: Callable[..., Twins], family: str, request_name: str, tied: bool
) -> None:
    # GPT-2 expects after the last norm what entered the layers, which has no room for the up part of the head
    _, fused, folder = twins_of(family, request_name, True if family == "gpt2" else tied)
    head, embedding = fused.get_output_embeddings(), fused.get_input_embeddings()
    tensors = open_checkpoint(folder).tensors
    stored = [name for name, info in tensors.items() if info.shape[0] == embedding.num_embeddings]
    assert (head.weight is embedding.weight) is tied and len(stored) == (1 if tied else 2)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    # the control: another up part of the head is another head and the same embedding
    ids, up_width = prompts()[1]["input_ids"], fused.config.scale_surgery["expansions"][0]["widths"]["up_width"]
    up_part = head.weight.narrow(1, fused.stock_config.hidden_size, up_width)
    with torch.no_grad():
        logits, features = fused(ids).logits, embedding(ids)
        up_part += 1
        assert torch.equal(embedding(ids), features) and not torch.allclose(fused(ids).logits, logits, **CLOSE)
        up_part -= 1


def test_without_a_head_both_streams_come_out(twins_of: Callable[..., Twins]) -> None:
    _, fused, folder = twins_of("qwen3", "last", True)
    body, prompt = AutoModel.from_pretrained(folder), prompts()[2]
    with torch.no_grad():
        hidden = body(**prompt).last_hidden_state
        assert hidden.shape[-1] == fused.config.hidden_size
        assert torch.equal(fused.lm_head(hidden), fused(**prompt).logits)
        for kind in ("eager", "sdpa"):
            body.set_attn_implementation(kind)
            assert body.layers[0].self_attn.config._attn_implementation == kind
            torch.testing.assert_close(body(**prompt).last_hidden_state[1], hidden[1], **CLOSE)


def test_a_missing_tensor_is_not_initialised(twins_of: Callable[..., Twins]) -> None:
    fused = twins_of("llama", "last", True)[1]
    with pytest.raises(ValueError, match=r"the files do not hold its tensors: model.norm.up_weight is missing"):
        fused.check_loaded({"missing_keys": {"model.norm.up_weight"}, "unexpected_keys": (), "mismatched_keys": ()})


# types whose configuration class says less than others, computes the types of its layers, or has layers that its parent
# does not know; and two whose norms have no gain, beside one of the up stream that has
OTHERS = ("biogpt", "bamba", "nemotron_h", "olmo", "nanochat")


@pytest.mark.parametrize("model_type", mostly(OTHERS, "olmo".__eq__))
def test_models_that_are_unlike_the_others(tmp_path: Path, model_type: str) -> None:
    base = write_base(twin_config(model_type), torch.float32, tmp_path / "base")
    expanded = shake(expand(base, Request("last:2", variant="adapt", collaborate="both"), tmp_path / "expanded").path)
    model, fused = load(expanded), load(merge(expanded, tmp_path / "fused").path)
    assert getattr(fused.config, "layer_types", None) == getattr(model.config, "layer_types", None)
    assert not hasattr(fused.config, "no_such_value")
    # transformers 4 makes one of defaults
    assert type(fused.config)().vocab_size == type(fused.stock_config)().vocab_size
    for prompt in prompts():
        with torch.no_grad():
            torch.testing.assert_close(fused(**prompt).logits, model(**prompt).logits, **CLOSE)
        assert torch.equal(fused.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY))


@pytest.mark.parametrize("model_type", mostly(("bloom", "mpt", "mamba2"), "bloom".__eq__))
def test_an_attention_that_is_not_split_keeps_its_heads(tmp_path: Path, model_type: str) -> None:
    config = twin_config(model_type)
    expanded = expand(write_base(config, torch.float32, tmp_path / "base"), Request("all"), tmp_path / "wide").path
    done = merge(expanded, tmp_path / "fused")
    assert not done.warnings
    before, after = (json.loads((path / "config.json").read_text()) for path in (expanded, done.path))
    assert {key for key in after if before.get(key) != after[key] and after[key] == 0} == set()


def test_blocks_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """A mixture that is widened as a whole is refused, though layers above have something else by its name."""
    base = write_base(twin_config("nemotron_h"), torch.float32, tmp_path / "base")
    expanded = expand(base, Request("all", variant="adapt"), tmp_path / "expanded").path
    with refused("block-not-fused", "--to fused", PlanError):
        merge(expanded, tmp_path / "fused")


# what stock code of the whole decoder computes with the hidden size is of that of the base
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}


def test_without_a_head_sizes_are_those_of_the_base(tmp_path: Path) -> None:
    """Falcon's decoder divides the bias of positions by a number made of the hidden size."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("falcon", **SIZES, alibi=True, new_decoder_architecture=False, parallel_attn=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    expanded = shake(expand(tmp_path / "base", Request("all", variant="adapt"), tmp_path / "expanded").path)
    fused = merge(expanded, tmp_path / "fused").path
    body, prompt = AutoModel.from_pretrained(fused).eval(), prompts()[1]
    with torch.no_grad():
        hidden = body(**prompt).last_hidden_state
        expected = AutoModel.from_pretrained(expanded)(**prompt).last_hidden_state
        # columns that only the embedding reads come last, and get zeros
        torch.testing.assert_close(hidden[..., : expected.shape[-1]], expected, **CLOSE)
        assert hidden.shape[-1] > expected.shape[-1] and not hidden[..., expected.shape[-1] :].any()
        assert torch.equal(load(fused).lm_head(hidden), load(fused)(**prompt).logits)
        # what the stock forward remembers, it remembers of the model
        for _ in range(2):
            assert len(body(**prompt, output_hidden_states=True).hidden_states) == 4
        # the control
        body.stock_sizes.clear()
        assert not torch.allclose(body(**prompt).last_hidden_state, hidden, **CLOSE)
    # a server asks for the width of what comes out, and a setting of the user counts
    assert body.config.hidden_size == hidden.shape[-1] > SIZES["hidden_size"]
    body.config.use_cache = False
    assert body(**prompt).cache is None


def test_no_layer_lies_on_two_devices(twins_of: Callable[..., Twins]) -> None:
    """Devices are shared out by the names of classes, and where the up stream begins a layer has another."""
    model = twins_of("llama", "between", True)[1]
    assert {type(layer).__name__ for layer in model.model.layers} <= set(model._no_split_modules)
    assert any(isinstance(layer, Entering) for layer in model.model.layers)


def test_a_configuration_of_several_types_of_layers_says_nothing(twins_of: Callable[..., Twins]) -> None:
    """Rotary settings of each type of layer are no mistakes, which transformers 5.5 refuses and later ones log."""
    _, fused, folder = twins_of("gemma3_text", "preserve", True)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        config = AutoConfig.from_pretrained(folder)
        assert set(config.rope_parameters) == set(config.stock_config().rope_parameters) == ROTARY_TYPES
        assert config.rope_parameters == fused.config.rope_parameters and messages == []
        type(config).__mro__[1](layer_types=None, rope_parameters=config.rope_parameters)
        assert "Unrecognized keys" in messages[0], "the control: without types of layers these are no settings"
    finally:
        logger.removeHandler(handler)
