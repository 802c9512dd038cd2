"""`verify` beside its floor: load base and expanded model once each, and run the probes once each.

    python -m benchmarks.real.verify BASE EXPANDED

Both are processes of their own, imports included, and their processor time is compared.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.real.expand import Row, run


def measure(base: Path, expanded: Path) -> list[Row]:
    """Measure the command and its floor: work, seconds of ours, seconds of the floor, and the ratio."""
    ours = run("-m", "scale_surgery", "verify", str(expanded), "-q").processor_seconds
    floor = run("-m", "benchmarks.real.verify", str(base), str(expanded), "--floor").processor_seconds
    return [(f"verify {expanded.name}", ours, floor, ours / floor)]


def run_floor(base: Path, expanded: Path) -> None:
    """Load a tokenizer and both models, and let each read the probes and continue them with a KV cache."""
    import torch
    from transformers import AutoModelForCausalLM

    from scale_surgery import modeling
    from scale_surgery.running.options import Probes, RunOptions
    from scale_surgery.running.own_generation import continue_greedily
    from scale_surgery.running.prompts import encode_prompts

    modeling.register()
    probes = Probes()
    inputs = encode_prompts(base, probes, RunOptions("cpu")).batch.inputs("cpu")
    for path in (base, expanded):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        with torch.no_grad():
            model(**inputs, use_cache=False)
            continue_greedily(model, inputs, probes.max_new_tokens)
        del model


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path))
@click.argument("expanded", type=click.Path(exists=True, path_type=Path))
@click.option("--floor", is_flag=True, help="Run the floor alone.")
def main(base: Path, expanded: Path, floor: bool) -> None:
    """Print the processor time of verify and of its floor."""
    if floor:
        run_floor(base, expanded)
        return
    for work, ours, least, ratio in measure(base, expanded):
        click.echo(f"{work}: {ours:.1f} s, floor {least:.1f} s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
