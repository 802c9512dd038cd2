"""The model class that vLLM makes of a folder with blocks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import CompilationMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.transformers import vllm_attention_forward

from scale_surgery.errors import PlanError, Problem
from scale_surgery.serving.manager import ExpansionManager
from scale_surgery.serving.plugin import names_in
from scale_surgery.serving.rows import RowModel, RowModule

# vLLM's function for models of transformers, which asks the attribute `attn` of the module
VLLM_ATTENTION = "vllm"
ALL_ATTENTION_FUNCTIONS.register(VLLM_ATTENTION, vllm_attention_forward)
FORMATS = ("auto", "hf", "safetensors")
# names in vLLM of a cache that stores what attention computes
DTYPE_NAMES = {torch.bfloat16: ("bfloat16",), torch.float16: ("float16",), torch.float32: ("float32",)}


class ServedExpansions(nn.Module):
    """A base and its expansions; each token runs the one that its request names, or the base.

    The folder is loaded by transformers, as everywhere else, and keeps the modules of transformers. Attention is
    vLLM's, with a KV cache for the heads of the widest expansion.
    """

    supports_lora = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse(vllm_config)
        settings = vllm_config.model_config
        self.names = names_in(settings.hf_config)
        self.manager: ExpansionManager | None = None
        self.is_loaded = False
        init_logger(f"vllm.{__name__}").info(
            "Expansions of %s: %s. A request without a name gets the base; nothing mixes them.",
            settings.model,
            ", ".join(self.names),
        )
        # no code of the folder runs: transformers knows the classes of this package
        loaded = AutoModelForCausalLM.from_pretrained(
            settings.model, revision=settings.revision, dtype=settings.dtype, attn_implementation="eager"
        )
        self.rows = RowModel(loaded.eval().to(vllm_config.device_config.device))
        self.add_attention(vllm_config)
        for module in self.rows.modules():
            if isinstance(module, RowModule) and isinstance(module, nn.Linear):
                module.__class__ = kernel_class(type(module))
                # vLLM prepares the weight for its kernel when all are loaded
                module.quant_method = UnquantizedLinearMethod()

    def add_attention(self, vllm_config: VllmConfig) -> None:
        """Add vLLM's attention to each attention module, with the settings that stock code hands to its own."""
        names = {module: name for name, module in self.named_modules()}
        watched = self.rows.watch()
        self.rows.model.config.get_text_config()._attn_implementation = VLLM_ATTENTION
        for module, given in watched.items():
            module.attn = Attention(
                num_heads=module.most.heads,
                head_size=given["head_size"],
                scale=given["scaling"],
                num_kv_heads=module.most.kv_heads,
                cache_config=vllm_config.cache_config,
                logits_soft_cap=given.get("softcap"),
                per_layer_sliding_window=given.get("sliding_window"),
                prefix=f"{names[module]}.attn",
            )

    def make_manager(self) -> ExpansionManager:
        """Make the manager by which vLLM's runner says the expansion of each token."""
        self.manager = ExpansionManager(self.names)
        return self.manager

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed ids on the base's path."""
        embedded: Tensor = self.rows.model.get_input_embeddings().run_stock(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Compute the features of all tokens of a batch, which vLLM lays side by side."""
        if input_ids is None or inputs_embeds is not None or intermediate_tensors is not None:
            raise PlanError(Problem("served-inputs", type(self).__name__))
        numbers = () if self.manager is None else self.manager.take_numbers(len(input_ids))
        features: Tensor = self.rows(input_ids[None], numbers, position_ids=positions[None], use_cache=False)
        return features[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute logits from the features of some tokens."""
        return self.rows.logits(hidden_states[None])[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Return the names of all tensors, which transformers has loaded.

        Raises:
            PlanError: In a later call, which means to replace the weights.
        """
        if self.is_loaded:
            raise PlanError(Problem("served-weights", type(self).__name__))
        self.is_loaded = True
        return {name for name, _ in self.named_parameters()}


class KernelLinear:
    """Mixin before the class of a linear: vLLM's kernel computes the product with the base's weight."""

    def run_stock(self: Any, x: Tensor) -> Tensor:
        """Run the kernel; a copy of a grown MLP, which has a weight of its own, runs the stock forward."""
        if "weight" in vars(self):
            own: Tensor = super().run_stock(x)
            return own
        y: Tensor = self.quant_method.apply(self, x.contiguous(), self.bias)
        return y


@cache
def kernel_class(linear: type) -> type:
    """Make the class of a linear that vLLM's kernel computes."""
    return type(f"{linear.__name__}ByKernel", (KernelLinear, linear), {"__module__": __name__})


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse settings with which tokens would not get their expansions, or that nobody tried."""
    parallel, settings = vllm_config.parallel_config, vllm_config.model_config
    compiles = vllm_config.compilation_config.mode != CompilationMode.NONE
    refused = {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--quantization": vllm_config.quant_config is not None,
        "--speculative-config": vllm_config.speculative_config is not None,
        "--load-format": vllm_config.load_config.load_format not in FORMATS,
        "--kv-cache-dtype": vllm_config.cache_config.cache_dtype not in ("auto", *DTYPE_NAMES.get(settings.dtype, ())),
        "--hf-overrides": bool(settings.hf_overrides),
        "--enable-prompt-embeds": settings.enable_prompt_embeds,
        "--runner": settings.runner_type != "generate",
    }
    problems = [Problem("served-option", option) for option, is_given in refused.items() if is_given]
    # a graph has fixed shapes, and how many tokens run an expansion differs from step to step
    if compiles or not settings.enforce_eager:
        problems.append(Problem("served-compiled", "--enforce-eager"))
    if problems:
        raise PlanError(*problems)
