"""What a rehearsed pass of preserve costs: the base's logits from its base stream, and from a forward of their own.

    python -m benchmarks.rehearsal_pass

Forward and backward of the divergence on 2 sequences of 256 tokens, taking turns in one process, on one thread, with a
random Llama of 8 layers of width 512 and 16,000 tokens, every layer expanded. Processor seconds, medians.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import click
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scale_surgery import Request, expand, register
from scale_surgery.running.freeze import freeze_base
from scale_surgery.training.rehearsal import divergence_from_base

SIZES = {"vocab_size": 16_000, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Passes of each; one more before them is not counted.")
def main(rounds: int) -> None:
    """Print seconds of both, and their ratio."""
    torch.set_num_threads(1)
    register()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder / "base")
        wide = expand(folder / "base", Request("all"), folder / "wide").path
        model = freeze_base(AutoModelForCausalLM.from_pretrained(wide)).train()
    ids = torch.randint(0, SIZES["vocab_size"], (2, 256))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for once, durations in seconds.items():
            with patch("scale_surgery.training.rehearsal.carries_base_logits", lambda _, once=once: once):
                started = time.process_time()
                divergence_from_base(model, model, batch).backward()
                durations.append(time.process_time() - started)
            model.zero_grad()
    first, second = (durations[1:] for durations in seconds.values())
    ratio = median(left / right for left, right in zip(first, second, strict=True))
    click.echo(f"base stream {median(first):.2f} s, forward of its own {median(second):.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
