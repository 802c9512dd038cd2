"""`verify` beside its floor: load base and expanded model once each, and run the probes once each.

    python -m benchmarks.real.verify BASE EXPANDED

Both are processes of their own, imports included, and their processor time is compared.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import click


def measure(base: Path, expanded: Path) -> list[tuple[str, float, float, float]]:
    """Measure the command and its floor: work, seconds of ours, seconds of the floor, and the ratio."""
    ours = processor_seconds("-m", "scale_surgery", "verify", str(expanded), "-q")
    floor = processor_seconds("-m", "benchmarks.real.verify", str(base), str(expanded), "--floor")
    return [(f"verify {expanded.name}", ours, floor, ours / floor)]


def processor_seconds(*arguments: str) -> float:
    """Run Python with these arguments, and return the processor time that it took."""
    before = _children()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
