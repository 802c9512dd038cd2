"""Tiny random models of every family, built from a config; sizes are odd on purpose, so that kernels have tails."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

TINY = {"vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
# of four key/value heads an eighth is none, and one is twice that share: it is added by default
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10}
LLAMA_LIKE = TINY | HEADS | {"intermediate_size": 52, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# family: (config class, what differs from LLAMA_LIKE)
CONFIGS = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "gemma2": ("Gemma2Config", {"sliding_window": 4, "query_pre_attn_scalar": 10}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 4, "query_pre_attn_scalar": 10}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {"n_positions": 64}),
}
FAMILIES = tuple(CONFIGS)


def tiny_config(family: str, **changes: object) -> transformers.PretrainedConfig:
    """Config of a tiny model."""
    name, options = CONFIGS[family]
    common = dict(LLAMA_LIKE)
    if family in ("gpt_neox", "gpt2"):
        # heads of 10 features follow from four of them
        common |= {"num_attention_heads": 4}
        common.pop("head_dim")
        common.pop("num_key_value_heads")
    if family == "gpt2":
        common.pop("max_position_embeddings")
        common["n_inner"] = common.pop("intermediate_size")
    return getattr(transformers, name)(**(common | TOKENS | options | changes))


def save_tiny(
    path: Path, family: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **changes: object
) -> Path:
    """Save a tiny model with random weights (norms and biases too), in one file or several."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or "ln_" in name or name.endswith("bias") else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(path, max_shard_size=shard_size)
    return path
