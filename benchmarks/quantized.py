"""What training on a quantised base costs: an expansion beside LoRA of peft on the same base. Linux only.

    python -m benchmarks.quantized --rounds 6 -o numbers.json

All models start from one random Llama, stored, int8 (LLM.int8) or nf4 by bitsandbytes, and take turns in one process: a
round is one step of each. A step is forward with labels, backward, AdamW and zero_grad, without a KV cache.

LoRA       peft, on all linears but the head, of the rank at which it trains as many parameters as preserve
adapt      every layer expanded, W12 in the attention of the upper half
preserve   every layer expanded, no W12

base       bytes of the base's tensors as they lie in memory, scales included
seconds    median over the rounds; processor seconds count all threads, and not what other programs take
x LoRA     median over the rounds of processor seconds divided by those of LoRA on the same base in the same round
x stored   the same, divided by those of the same method on the base as it is stored
peak       most memory above the loaded model while it takes a few steps in a process of its own
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.device import peak_of, place_options, publish, settle, timed, warm_up
from benchmarks.make_checkpoint import SHAPES
from benchmarks.training_cost import (
    QUICK,
    STEPS_ALONE,
    Settings,
    adapted_rank,
    count_trained,
    make_models,
    make_step,
)
from scale_surgery import extract, load_expansion

METHODS = ("LoRA", "adapt", "preserve")
KINDS = ("stored", "int8", "nf4")
VARIANTS = tuple((kind, method) for kind in KINDS for method in METHODS)


@dataclass(frozen=True)
class Cost:
    """What the steps of one method on one kind of base took, round by round, and its memory."""

    kind: str
    method: str
    trained_parameters: int
    base_bytes: int
    seconds: list[float]
    processor_seconds: list[float]
    peak_bytes: int


def options_of(kind: str, settings: Settings) -> dict[str, Any]:
    """What `from_pretrained` is given for one kind of base."""
    configs = {
        "stored": {},
        "int8": {"load_in_8bit": True},
        "nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": getattr(torch, settings.dtype),
        },
    }
    quantised = {"quantization_config": BitsAndBytesConfig(**configs[kind])} if configs[kind] else {}
    return {"device_map": {"": settings.device}, **quantised}


def load(folder: Path, kind: str, method: str, settings: Settings) -> Any:
    """Load a base of one kind with what one method trains, ready to train."""
    # bitsandbytes says of each product that it casts
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    options = options_of(kind, settings)
    if method != "LoRA":
        return load_expansion(folder / "base", folder / f"{method}.extract", check=False, **options).train()
    from peft import LoraConfig, get_peft_model

    rank = adapted_rank(AutoModelForCausalLM.from_pretrained(folder / "base"), trained_by_preserve(folder))
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(folder / "base", **options)
        return get_peft_model(base, config, autocast_adapter_dtype=False).train()


def trained_by_preserve(folder: Path) -> int:
    """How many parameters the expansion trains."""
    return count_trained(load_expansion(folder / "base", folder / "preserve.extract", check=False))


def base_bytes(model: Any) -> int:
    """Bytes of all tensors of a model but those that train; scales of quantised weights stand in its state."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if name not in trained)


def measure_peak(folder: Path, kind: str, method: str, settings: Settings) -> int:
    """Most memory above the loaded model during a few steps, in a process that does nothing else."""
    torch.set_num_threads(settings.threads)
    model = load(folder, kind, method, settings)
    settle(model)
    step = make_step(model, method, settings)
    with peak_of(settings) as peak:
        for _ in range(STEPS_ALONE):
            step()
    return peak.bytes


def measure_peaks(folder: Path, settings: Settings) -> list[int]:
    """The peak of each variant, one process after the other, forked from one that has imported all."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "peft", "bitsandbytes", "transformers.models.llama.modeling_llama"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return [pool.submit(measure_peak, folder, *variant, settings).result() for variant in VARIANTS]


def measure(settings: Settings) -> list[Cost]:
    """Measure time and memory of all variants on models that are removed afterwards."""
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, settings)
        for method in METHODS[1:]:
            extract(folder / method, folder / f"{method}.extract")
        peaks = measure_peaks(folder, settings)
        models = [load(folder, *variant, settings) for variant in VARIANTS]
        times = measure_time(models, settings)
        facts = [(count_trained(model), base_bytes(model)) for model in models]
    return [
        Cost(*variant, *fact, [wall for wall, _ in taken], [processor for _, processor in taken], peak)
        for variant, fact, taken, peak in zip(VARIANTS, facts, times, peaks, strict=True)
    ]


def measure_time(models: Sequence[Any], settings: Settings) -> list[list[tuple[float, float]]]:
    """Let all models take turns: both times of each round; the first step of each is not counted."""
    steps = [make_step(model, method, settings) for model, (_, method) in zip(models, VARIANTS, strict=True)]
    for step in steps:
        warm_up(step, settings)
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    for turn in range(settings.rounds + 1):
        # each begins a round in its turn, so that a ratio compares steps before and after one another alike
        for index in (*range(len(steps)), *range(len(steps)))[turn % len(steps) :][: len(steps)]:
            taken[index].append(timed(steps[index], settings))
    return [times[1:] for times in taken]


def ratios(costs: Sequence[Cost]) -> list[dict[str, float]]:
    """How many times as long a step takes as one of LoRA on the same base, and as on the base as it is stored."""
    by_variant = {(cost.kind, cost.method): cost.processor_seconds for cost in costs}
    return [
        {
            "x LoRA": median(map(truediv, cost.processor_seconds, by_variant[cost.kind, "LoRA"])),
            "x stored": median(map(truediv, cost.processor_seconds, by_variant["stored", cost.method])),
        }
        for cost in costs
    ]


def render(costs: Sequence[Cost], cost_ratios: Sequence[Mapping[str, float]]) -> Table:
    """Lay the costs out as a table."""
    table = Table("base", "method", "trains", "base MiB", "seconds", "cpu seconds", "x LoRA", "x stored", "peak MiB")
    for cost, ratio in zip(costs, cost_ratios, strict=True):
        memory = [f"{size / 2**20:.0f}" for size in (cost.base_bytes, cost.peak_bytes)]
        clocks = (median(cost.seconds), median(cost.processor_seconds))
        times = [f"{value:.2f}" for value in (*clocks, *ratio.values())]
        table.add_row(cost.kind, cost.method, f"{cost.trained_parameters:,}", memory[0], *times, memory[1])
    return table


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="d768", show_default=True)
@click.option("--batch", default=4, show_default=True, help="Sequences of a step.")
@click.option("--length", default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--rounds", default=6, show_default=True, help="Steps of each variant that are counted.")
@place_options
def main(output: Path | None, markdown: Path | None, **options: Any) -> None:
    """Measure what training on a quantised base costs, in seconds and memory."""
    settings = Settings(**options | (QUICK if options["is_quick"] else {}))
    costs = measure(settings)
    cost_ratios = ratios(costs)
    report = {"settings": asdict(settings), "ratios": cost_ratios, "costs": [asdict(cost) for cost in costs]}
    publish([render(costs, cost_ratios)], report, output, markdown, width=120)


if __name__ == "__main__":
    main()
