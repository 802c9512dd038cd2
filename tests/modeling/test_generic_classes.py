"""Classes made of stock ones when they are named: by auto_map, by the package, in another process, saved again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from scale_surgery import modeling
from scale_surgery.checkpoint.names import CODE_FILES
from scale_surgery.modeling import configuration_scale, modeling_scale
from scale_surgery.running.stored_names import reading_of
from tests.by_hand import (
    IDS,
    SHARD,
    UP,
    WRITING,
    Names,
    is_new,
    linear,
    make_base,
    names_of,
    norm,
    plan_of,
    reading,
    same_generation,
    same_logits,
    save_base,
    shaken,
    write_expanded,
)
from tests.tiny import LLAMA_LIKE, TOKENS

D, INNER, IMAGE = 40, 52, 90
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_PRE, GEMMA_POST = (
    ("input_layernorm", "pre_feedforward_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
)
MLP = {
    "mlp.gate_proj": linear([D, UP], [INNER, 4], group="ffn"),
    "mlp.up_proj": linear([D, UP], [INNER, 4], group="ffn"),
    "mlp.down_proj": linear([INNER, 4], [D, UP], group="ffn"),
    "mlp.act_fn": {"kind": "activation", "base": INNER},
}
ATTENTION = {f"self_attn.{name}_proj": linear([D, UP], [width, 0]) for name, width in (("q", 40), ("k", 20), ("v", 20))}
ATTENTION |= {"self_attn.o_proj": linear([40, 0], [D, UP])}


def llama_specs() -> dict[str, Any]:
    expanded = dict.fromkeys(LLAMA_NORMS, norm(D)) | ATTENTION | MLP
    passing = dict.fromkeys(LLAMA_NORMS, reading(D)) | {"self_attn.o_proj": WRITING, "mlp.down_proj": WRITING}
    return plan_of(D, [0, 2], ["attn", "ffn"], expanded=expanded, passing=passing)


def gemma_specs() -> dict[str, Any]:
    """Images are scattered into the embeddings, so the up stream enters before the first layer."""
    own = norm(D, "rms_plus_one")
    return plan_of(
        D,
        [1, 2],
        ["attn", "ffn"],
        base_model="model.language_model",
        enter="hook",
        model={"norm": own},
        expanded=dict.fromkeys(GEMMA_PRE + GEMMA_POST, own) | ATTENTION | MLP,
        passing=dict.fromkeys(GEMMA_PRE, reading(D)) | dict.fromkeys(GEMMA_POST, WRITING),
    )


INTERN = Names("internlm3", "InternLM3Config", {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"})
GEMMA_CLASSES = {
    "AutoModel": "Gemma3Model",
    "AutoModelForImageTextToText": "Gemma3ForConditionalGeneration",
    "AutoModelForCausalLM": "Gemma3ForConditionalGeneration",
}


LLAVA_CLASSES = {"AutoModel": "LlavaModel", "AutoModelForImageTextToText": "LlavaForConditionalGeneration"}
ENTERING = {
    "base_model": "model.language_model",
    "enter": "hook",
    "model": {"norm": norm(D)},
    "expanded_layers": [1, 2],
    "collaborative": {"layers": [1, 2], "groups": ["attn", "ffn"]},
}


def gemma_config() -> Any:
    text = LLAMA_LIKE | {"sliding_window": 4, "query_pre_attn_scalar": 10}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text | TOKENS,
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=88,
        eoi_token_index=89,
    )


def llava_config() -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**LLAMA_LIKE, **TOKENS),
        vision_config=vision | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )


def with_image() -> dict[str, torch.Tensor]:
    """Two rows of tokens with the four of an image in each, and the images."""
    ids = IDS.clone()
    ids[ids == IMAGE] = 3
    ids[:, 2:6] = IMAGE
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Base and expanded model of a kind, once."""
    known: dict[str, tuple[Path, Path]] = {}

    def write(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        if name == "gemma3":
            torch.manual_seed(0)
            base = save_base(folder / "base", AutoModelForImageTextToText.from_config(gemma_config()))
            names = names_of(gemma_config(), **GEMMA_CLASSES)
            return base, write_expanded(base, folder / name, gemma_specs(), names, AutoModelForImageTextToText)
        if name == "llava":
            torch.manual_seed(0)
            base = save_base(folder / "base", AutoModelForImageTextToText.from_config(llava_config()))
            names = names_of(llava_config(), **LLAVA_CLASSES)
            specs = llama_specs() | ENTERING
            return base, write_expanded(base, folder / name, specs, names, AutoModelForImageTextToText)
        config = {"internlm3": transformers.InternLM3Config, "smollm3": transformers.SmolLM3Config}[name](
            **LLAMA_LIKE, **TOKENS
        )
        base = make_base(folder / "base", config)
        return base, write_expanded(
            base, folder / name, llama_specs(), INTERN if name == "internlm3" else names_of(config)
        )

    def make(name: str) -> tuple[Path, Path]:
        if name not in known:
            known[name] = write(name)
        return known[name]

    return make


def test_a_class_is_made_once_of_the_stock_one():
    own = modeling_scale.ScaleSmolLM3ForCausalLM
    assert own is modeling_scale.ScaleSmolLM3ForCausalLM and own.__bases__[1] is transformers.SmolLM3ForCausalLM
    assert own.config_class is configuration_scale.ScaleSmolLM3Config
    assert own.config_class.model_type == "scale_smollm3"
    assert pickle.loads(pickle.dumps(own)) is own
    assert (own.__module__, own.__qualname__) == ("scale_surgery.modeling.modeling_scale", "ScaleSmolLM3ForCausalLM")


@pytest.mark.parametrize(
    "name", ("ScaleNoSuchForCausalLM", "ScaleAutoModel", "Scalepipeline", "LlamaModel", "ScaleLlamaConfig")
)
def test_other_names_have_no_class(name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(modeling_scale, name)
    assert hasattr(configuration_scale, name) == (name == "ScaleLlamaConfig")


def test_names_that_config_json_gets():
    names = modeling.auto_map(INTERN)
    assert names == {
        "AutoConfig": "configuration_scale.ScaleInternLM3Config",
        "AutoModel": "modeling_scale.ScaleLlamaModel_of_InternLM3Config",
        "AutoModelForCausalLM": "modeling_scale.ScaleLlamaForCausalLM_of_InternLM3Config",
    }
    assert modeling.architectures(INTERN) == ["ScaleLlamaForCausalLM_of_InternLM3Config"]
    classes = modeling.model_classes(INTERN)
    assert classes["AutoModelForCausalLM"].config_class is classes["AutoConfig"]
    assert classes["AutoModelForCausalLM"] is not modeling_scale.ScaleLlamaForCausalLM
    own = Names("gemma3_text", "Gemma3TextConfig", {"AutoModelForCausalLM": "Gemma3ForCausalLM"})
    assert modeling.auto_map(own)["AutoModelForCausalLM"] == "modeling_scale.ScaleGemma3ForCausalLM"


@pytest.mark.slow
def test_every_causal_language_model_of_transformers_has_a_class():
    mapping = AutoModelForCausalLM._model_mapping
    for model_type, stock in mapping._model_mapping.items():
        config = transformers.CONFIG_MAPPING[model_type]
        names = Names(model_type, config.__name__, {"AutoModelForCausalLM": stock})
        # the language model inside another model is no model of that type
        if mapping[config].config_class not in config.sub_configs.values():
            found = modeling.model_classes(names)["AutoModelForCausalLM"]
            assert found.__bases__[1] is mapping[config] and found.config_class.__bases__[0] is config


@pytest.mark.parametrize("name", ("internlm3", "smollm3"))
def test_the_output_is_the_base_s(made, name):
    base, expanded = (AutoModelForCausalLM.from_pretrained(path).eval() for path in made(name))
    assert expanded.config.model_type == f"scale_{name}"
    assert same_logits(base, expanded) and same_generation(base, expanded)
    assert not same_logits(base, shaken(expanded, "w12"))


@pytest.mark.parametrize("name", ("gemma3", "llava"))
def test_a_vision_language_model(made, name):
    image = {key: value for key, value in with_image().items() if name == "gemma3" or key != "token_type_ids"}
    base, expanded = (AutoModelForImageTextToText.from_pretrained(path).eval() for path in made(name))
    assert type(expanded).__name__ == f"Scale{type(base).__name__}"
    for inputs in ({}, image):
        assert same_logits(base, expanded, **inputs)
        assert same_generation(base, expanded, **inputs)
    assert {key for key, own in expanded.named_parameters() if own.requires_grad} == {
        key for key, _ in expanded.named_parameters() if is_new(key)
    }
    with torch.no_grad():
        other = image | {"pixel_values": torch.zeros(2, 3, 8, 8)}
        assert not torch.equal(base(**image).logits, base(**other).logits)
    assert not same_logits(base, shaken(expanded, "w12"), **image)
    with expanded.expansion_disabled():
        assert same_logits(base, expanded, **image)


def test_a_vision_language_model_under_its_other_names(made):
    path = made("gemma3")[1]
    name = "language_model.model.layers.1.mlp.up_proj.expansions.default.w21"
    assert name in load_file(path / "expansion-default-00001-of-00001.safetensors")
    assert "language_model.model.layers.1.mlp.up_proj.weight" in load_file(path / SHARD)
    names = [name for file in path.glob("*.safetensors") for name in load_file(file)]
    whole = AutoModelForImageTextToText.from_pretrained(path).eval()
    assert {place.name for place in reading_of(whole).places(names).values()} <= set(dict(whole.named_parameters()))
    same = AutoModelForCausalLM.from_pretrained(path).eval()
    alone = AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        hidden = whole(**with_image(), output_hidden_states=True).hidden_states[-1]
        assert torch.equal(alone(**with_image())[0], hidden)
        assert torch.equal(same(**with_image()).logits, whole(**with_image()).logits)


def test_the_package_saves_its_code_along(made, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(made("smollm3")[1])
    model.save_pretrained(tmp_path / "saved")
    for file in CODE_FILES:
        assert (tmp_path / "saved" / file).read_text() == modeling.code_text(file)
    wanted = json.loads((made("smollm3")[1] / "config.json").read_text())["auto_map"]
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"] == wanted


@pytest.mark.parametrize("name", ("Mixtral", "Llama"))
def test_experts_run_as_in_the_stock_model_whichever_is_made_first(name, monkeypatch):
    """transformers looks for a word in the source of a class, and remembers for it and all below what it found."""
    stock = getattr(transformers, f"{name}ForCausalLM")
    own = modeling_scale.model_of(stock, stock.config_class)
    for known in (stock, own):
        if "_can_set_experts_implementation_cached_value" in vars(known):
            monkeypatch.delattr(known, "_can_set_experts_implementation_cached_value")
    assert own._can_set_experts_implementation() is (name == "Mixtral")
    assert stock._can_set_experts_implementation() is own._can_set_experts_implementation()


def test_a_type_that_transformers_does_not_know_is_not_ours(tmp_path):
    assert "scale_llama" in transformers.CONFIG_MAPPING and "scale_no_such" not in transformers.CONFIG_MAPPING
    (tmp_path / "config.json").write_text('{"model_type": "scale_no_such"}')
    with pytest.raises(ValueError, match="scale_no_such"):
        AutoConfig.from_pretrained(tmp_path)
