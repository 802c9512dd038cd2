"""Which stock class a model is: the language model inside a larger one is none of it, though transformers lists it."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from scale_surgery import modeling
from scale_surgery.deriving.build import stock_classes
from scale_surgery.running.loading import auto_class_of

# model type -> the language model inside that AutoModelForCausalLM chooses, and the whole model
INSIDE = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "llama4": ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    "emu3": ("Emu3ForCausalLM", "Emu3ForConditionalGeneration"),
}
# the same where nothing else is listed, and where the class is that of the whole or of another type
OTHERS = {
    "qwen3_5_text": {"AutoModel": "Qwen3_5TextModel", "AutoModelForCausalLM": "Qwen3_5ForCausalLM"},
    "gemma3": {
        "AutoModel": "Gemma3Model",
        "AutoModelForCausalLM": "Gemma3ForConditionalGeneration",
        "AutoModelForImageTextToText": "Gemma3ForConditionalGeneration",
    },
    "llava": {"AutoModel": "LlavaModel", "AutoModelForImageTextToText": "LlavaForConditionalGeneration"},
    "internlm3": {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"},
}


def names(model_type: str) -> dict[str, str]:
    return {auto: stock_class.__name__ for auto, stock_class in stock_classes(CONFIG_MAPPING[model_type]()).items()}


@pytest.mark.parametrize("model_type", INSIDE)
def test_the_language_model_inside_is_left_out(model_type):
    inside, whole = INSIDE[model_type]
    assert MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]].__name__ == inside
    class_names = names(model_type)
    assert "AutoModelForCausalLM" not in class_names and list(class_names.values())[-1] == whole
    # whoever loads the model, base or expanded, takes the whole too
    for name in (model_type, f"scale_{model_type}"):
        assert auto_class_of({"model_type": name}).__name__ == "AutoModelForImageTextToText"
    modeling.register()
    assert MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[f"scale_{model_type}"], None) is None


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_classes_stay(model_type):
    class_names = names(model_type)
    assert class_names == OTHERS[model_type]
    is_whole = "AutoModelForCausalLM" in class_names
    expected = "AutoModelForCausalLM" if is_whole else "AutoModelForImageTextToText"
    assert auto_class_of({"model_type": model_type}).__name__ == expected
