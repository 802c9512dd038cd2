"""Initialise PiSSA adapters of peft on the last layers of a model and save them: what expansion_cost.py compares with.

python benchmarks/pissa.py MODEL OUTPUT --layers 4 --rank 384
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@click.command()
@click.argument("model", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("output", type=click.Path(path_type=Path, file_okay=False))
@click.option("--layers", type=int, required=True, help="How many, counted from the last.")
@click.option("--rank", type=int, required=True)
@click.option("--init", default="pissa_niter_4", show_default=True, help="init_lora_weights of peft.")
def main(model: Path, output: Path, layers: int, rank: int, init: str) -> None:
    """Load a model as it is stored, put adapters on all linears of its last layers, save them."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    count = base.config.num_hidden_layers
    chosen = list(range(count - layers, count))
    adapter = LoraConfig(
        r=rank, lora_alpha=rank, init_lora_weights=init, target_modules=LINEARS, layers_to_transform=chosen
    )
    adapted = get_peft_model(base, adapter)
    adapted.save_pretrained(output)
    print(json.dumps({"parameters": sum(p.numel() for p in adapted.parameters() if p.requires_grad)}))


if __name__ == "__main__":
    main()
