"""Stock models from a config alone: the real one without memory, and a tiny one with random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from scale_surgery.modeling import is_part
from scale_surgery.running.loading import quiet_transformers

SEED = 0
# rows and tokens of the input; no size of a twin is one of these
TOKENS = (2, 13)


@dataclass(frozen=True)
class LayersPlace:
    """The innermost module with embedding and layers (empty for the model), the list of layers in it, their number."""

    base: str
    layers: str
    count: int

    @property
    def path(self) -> str:
        """Path of the list of layers, inside the whole model."""
        return f"{self.base}.{self.layers}" if self.base else self.layers


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config whose model stores plain numbers."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def stock_classes(config: PreTrainedConfig) -> dict[str, type[PreTrainedModel]]:
    """Find the stock classes that the auto classes choose for a config, the widest last."""
    mappings = {
        "AutoModel": modeling_auto.MODEL_MAPPING,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    if config.get_text_config(decoder=True) is not config:
        mappings["AutoModelForImageTextToText"] = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    mapped: dict[str, Any] = {name: mapping.get(type(config), default=None) for name, mapping in mappings.items()}
    known = {name: stock for name, stock in mapped.items() if stock is not None}
    classes = {name: stock[0] if isinstance(stock, tuple) else stock for name, stock in known.items()}
    return {name: stock for name, stock in classes.items() if not is_part(stock, type(config))}


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the stock model with a head; on the meta device inside `torch.device("meta")`."""
    *_, widest = stock_classes(config).values()
    made: Any = widest
    with quiet_transformers():
        model: PreTrainedModel = made._from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    return model


@contextmanager
def usual_torch() -> Iterator[None]:
    """Default settings of torch, so that facts do not depend on a caller's `no_grad` or default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    plain = torch.autocast("cpu", enabled=False)
    # a named device passes every call of torch through Python, which takes a sixth of the time
    here = nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), plain, here:
            yield
    finally:
        torch.set_default_dtype(dtype)


def build_twin(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a tiny model in which no parameter is a constant, so that nothing hides behind a zero or a one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
    return model


def token_ids(config: PreTrainedConfig) -> torch.Tensor:
    """Tokens to run a twin on, none of them special."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocabulary // 2, vocabulary, TOKENS, generator=generator)


def find_place(model: PreTrainedModel) -> LayersPlace | None:
    """Find the innermost module that holds the token embedding and a list of layers."""
    embedding, place = model.get_input_embeddings(), None
    for path, module in model.named_modules():
        inside = dict(module.named_modules())
        lists = [(name, child) for name, child in inside.items() if _is_layer_list(child)]
        if lists and any(child is embedding for child in inside.values()):
            name, layers = min(
                lists, key=lambda pair: (pair[0].count("."), -sum(map(torch.numel, pair[1].parameters())))
            )
            place = LayersPlace(path, name, len(layers))
    return place


def _is_layer_list(module: nn.Module) -> bool:
    """A list of modules that have children of their own, all with parameters."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(any(child.children()) for child in module)


def read(config: Any, key: str) -> Any:
    """A value of a config; None where it has none, or one for each layer."""
    try:
        return getattr(config, key, None)
    # configs with a value for each layer may raise here, each in its own way
    except Exception:
        return None


def text_config(model_or_config: Any) -> Any:
    """The config of the language model itself."""
    config = getattr(model_or_config, "config", model_or_config)
    return config.get_text_config(decoder=True)
