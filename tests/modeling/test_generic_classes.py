"""Classes made of stock ones when they are named: by auto_map, by the package, in another process, saved again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from scale_surgery import Request, expand, modeling
from scale_surgery.checkpoint.names import CODE_FILES
from scale_surgery.modeling import configuration_scale, modeling_scale
from scale_surgery.planning import exported
from scale_surgery.running.stored_names import reading_of
from tests.by_hand import Names, make_base, save_base
from tests.composed import OTHERS
from tests.routed import random_ids
from tests.tiny import LLAMA_LIKE, TOKENS

IMAGE = 90
INTERN = Names("internlm3", "InternLM3Config", {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"})


def gemma_config() -> transformers.Gemma3Config:
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


def with_image() -> dict[str, torch.Tensor]:
    """Two rows of tokens with the four of an image in each, and the images."""
    ids = random_ids(2, 9).clamp(max=80)
    ids[:, 2:6] = IMAGE
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Base and expanded model of a type, once."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            if name == "gemma3":
                base = save_base(folder / "base", AutoModelForImageTextToText.from_config(gemma_config()))
            else:
                base = make_base(folder / "base", OTHERS[name]())
            request = Request("1-2", variant="adapt", collaborate="both")
            known[name] = base, expand(base, request, folder / name).path
        return known[name]

    return make


def test_a_class_is_made_once_of_the_stock_one():
    scale_class = modeling_scale.ScaleSmolLM3ForCausalLM
    assert (
        scale_class is modeling_scale.ScaleSmolLM3ForCausalLM
        and scale_class.__bases__[1] is transformers.SmolLM3ForCausalLM
    )
    assert scale_class.config_class is configuration_scale.ScaleSmolLM3Config
    assert scale_class.config_class.model_type == "scale_smollm3"
    assert pickle.loads(pickle.dumps(scale_class)) is scale_class
    assert (scale_class.__module__, scale_class.__qualname__) == (
        "scale_surgery.modeling.modeling_scale",
        "ScaleSmolLM3ForCausalLM",
    )
    for name in ("ScaleNoSuchForCausalLM", "ScaleAutoModel", "Scalepipeline", "LlamaModel", "ScaleLlamaConfig"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(modeling_scale, name)
        assert hasattr(configuration_scale, name) == (name == "ScaleLlamaConfig")


def test_names_that_config_json_gets():
    assert exported.auto_map(INTERN) == {
        "AutoConfig": "configuration_scale.ScaleInternLM3Config",
        "AutoModel": "modeling_scale.ScaleLlamaModel_of_InternLM3Config",
        "AutoModelForCausalLM": "modeling_scale.ScaleLlamaForCausalLM_of_InternLM3Config",
    }
    assert exported.architectures(INTERN) == ["ScaleLlamaForCausalLM_of_InternLM3Config"]
    classes = exported.model_classes(INTERN)
    assert classes["AutoModelForCausalLM"].config_class is classes["AutoConfig"]
    assert classes["AutoModelForCausalLM"] is not modeling_scale.ScaleLlamaForCausalLM
    names = Names("gemma3_text", "Gemma3TextConfig", {"AutoModelForCausalLM": "Gemma3ForCausalLM"})
    assert exported.auto_map(names)["AutoModelForCausalLM"] == "modeling_scale.ScaleGemma3ForCausalLM"


@pytest.mark.slow
def test_every_causal_language_model_of_transformers_has_a_class():
    mapping = AutoModelForCausalLM._model_mapping
    for model_type, stock in mapping._model_mapping.items():
        config = transformers.CONFIG_MAPPING[model_type]
        names = Names(model_type, config.__name__, {"AutoModelForCausalLM": stock})
        # the language model inside another model is no model of that type
        if mapping[config].config_class not in config.sub_configs.values():
            model_class = exported.model_classes(names)["AutoModelForCausalLM"]
            assert model_class.__bases__[1] is mapping[config] and model_class.config_class.__bases__[0] is config
            assert model_class.config_class.model_type == f"scale_{config.model_type}"


def test_a_vision_language_model_under_its_other_names(made):
    base, path = made("gemma3")
    name = "language_model.model.layers.1.mlp.up_proj.expansions.default.w21"
    names = [name for file in path.glob("*.safetensors") for name in load_file(file)]
    assert name in names and "language_model.model.layers.1.mlp.up_proj.weight" in names
    whole = AutoModelForImageTextToText.from_pretrained(path).eval()
    assert {place.name for place in reading_of(whole).places(names).values()} <= set(dict(whole.named_parameters()))
    same, alone = (auto_class.from_pretrained(path).eval() for auto_class in (AutoModelForCausalLM, AutoModel))
    stock = AutoModelForImageTextToText.from_pretrained(base).eval()
    with torch.no_grad():
        output = whole(**with_image(), output_hidden_states=True)
        assert torch.equal(output.logits, stock(**with_image()).logits)
        assert torch.equal(alone(**with_image())[0], output.hidden_states[-1])
        assert torch.equal(same(**with_image()).logits, output.logits)


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
    scale_class = modeling_scale.model_of(stock, stock.config_class)
    for known in (stock, scale_class):
        if "_can_set_experts_implementation_cached_value" in vars(known):
            monkeypatch.delattr(known, "_can_set_experts_implementation_cached_value")
    assert scale_class._can_set_experts_implementation() is (name == "Mixtral")
    assert stock._can_set_experts_implementation() is scale_class._can_set_experts_implementation()


def test_a_type_that_transformers_does_not_know_is_not_ours(tmp_path):
    assert "scale_llama" in transformers.CONFIG_MAPPING and "scale_no_such" not in transformers.CONFIG_MAPPING
    (tmp_path / "config.json").write_text('{"model_type": "scale_no_such"}')
    with pytest.raises(ValueError, match="scale_no_such"):
        AutoConfig.from_pretrained(tmp_path)
