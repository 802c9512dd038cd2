"""How long it takes to derive and prove what an expansion has to know, for ten model shapes that people use.

    python -m benchmarks.derivation [-o numbers.json]

The configs are written from memory of the published ones; no weights are needed. Processor seconds of one thread, with
the import of the model's own module from transformers; what all of them need is imported before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from scale_surgery.deriving.base import derive_config

LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8}
        | LLAMA3,
    ),
    "Llama-3.1-70B": (
        "llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8}
        | LLAMA3,
    ),
    "SmolLM3-3B": (
        "smollm3",
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
        | {"num_key_value_heads": 4, "vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "Olmo-3-7B": (
        "olmo3",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 32, "vocab_size": 100278, "sliding_window": 4096},
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
        | {"num_experts_per_tok": 8, "vocab_size": 151936, "norm_topk_prob": True},
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3},
    ),
    "gemma-3-4b": (
        "gemma3",
        {
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "sliding_window": 1024,
            }
        },
    ),
    "Falcon-H1-1.5B": (
        "falcon_h1",
        {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64},
    ),
}
MANY_TENSORS = 100_000


def measure(name: str) -> dict[str, Any]:
    """Derive facts for a shape, and time it."""
    model_type, values = SHAPES[name]
    config = AutoConfig.for_model(model_type, **values).to_dict()
    started = time.process_time()
    facts = derive_config(config, name, MANY_TENSORS)
    seconds = time.process_time() - started
    kinds = [", ".join(f"{block.name} {block.treatment}" for block in kind.blocks) for kind in facts.architecture.kinds]
    return {"name": name, "seconds": round(seconds, 2), "kinds": kinds}


def main() -> None:
    """Measure all shapes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    derive_config(AutoConfig.for_model("gpt2").to_dict(), "gpt2", MANY_TENSORS)
    rows = []
    print("| config | processor seconds | layers |\n|---|--:|---|")
    for name in SHAPES:
        rows.append(measure(name))
        print(f"| {name} | {rows[-1]['seconds']} | {'; '.join(rows[-1]['kinds'])} |", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
