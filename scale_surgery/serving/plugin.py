"""The entry point that vLLM calls in each of its processes: it lets vLLM know models with blocks.

vLLM chooses adapters by request, and expansions are chosen in the same way: a request has a `LoRARequest` with the name
of an expansion. So the scheduler counts them, blocks of the prefix cache are found by the name too, and the server of
OpenAI's API lists them as models. Two methods of vLLM are wrapped for this:

    LoRAModelRunnerMixin.load_lora_model    the runner's manager of adapters: ours for our models
    InputProcessor._validate_lora           the check of a request: a name must be an expansion of the served folder

Both are called for each model, and for a model that is not ours they are vLLM's own.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from scale_surgery.errors import PlanError, Problem
from scale_surgery.modeling import register as register_with_transformers

MODEL = "scale_surgery.serving.model:ServedExpansions"


def register() -> None:
    """Register expanded models with vLLM; the first call in a process counts."""
    from vllm import ModelRegistry
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    register_with_transformers()
    for name in class_names():
        ModelRegistry.register_model(name, MODEL)
    load, check = LoRAModelRunnerMixin.load_lora_model, InputProcessor._validate_lora
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_lora_model(self: Any, model: Any, vllm_config: Any, device: Any) -> Any:
        if not hasattr(model, "make_manager"):
            return load(self, model, vllm_config, device)
        self.lora_manager = model.make_manager()
        return model

    @wraps(check)
    def validate_lora(self: Any, lora_request: Any) -> None:
        check(self, lora_request)
        names = names_in(self.model_config.hf_config)
        if lora_request is not None and names:
            # vLLM identifies adapters by a number, which callers choose; two names with one number would be one
            lora_request.lora_int_id = number_of(lora_request.lora_name, names)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model
    InputProcessor._validate_lora = validate_lora


def class_names() -> list[str]:
    """List the names that classes of expanded models can have: see `modeling_scale`."""
    from transformers.models.auto import configuration_auto, modeling_auto

    configs: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    models: dict[str, str | tuple[str, ...]] = vars(modeling_auto)["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]
    names = []
    for model_type, known in models.items():
        for name in (known,) if isinstance(known, str) else known:
            names += [f"Scale{name}", f"Scale{name}_of_{configs.get(model_type)}"]
    return names


def names_in(config: Any) -> list[str]:
    """Return the names of the expansions in a config; none if the model is not ours, or fused."""
    plans = (getattr(config, "scale_surgery", None) or {}).get("expansions", ())
    return [plan["name"] for plan in plans if not plan.get("fused")]


def number_of(name: str, names: list[str]) -> int:
    """Return the number of an expansion, from 1; refuse a name that is not one of them.

    Raises:
        VLLMValidationError: If there is no such expansion. A server replies with error 400, and continues.
    """
    from vllm.exceptions import VLLMValidationError

    if name not in names:
        error = PlanError(Problem("served-name-unknown", name, names=names))
        raise VLLMValidationError(f"{error}", parameter="lora_request", value=name)
    return names.index(name) + 1
