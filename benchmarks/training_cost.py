"""What a training step costs: an expanded model beside full fine-tuning, LoRA and a forward alone. Linux only.

    python -m benchmarks.training_cost -o numbers.json
    python -m benchmarks.training_cost --shape 1b --dtype bfloat16 --device cuda

All variants start from one random Llama, and take turns in one process: a round is one step of each. A step is
forward with labels, backward, AdamW (fused, as transformers' Trainer takes it) and zero_grad, without a KV cache.

forward    the base model's forward and loss under no_grad: what every step of preserve contains
full       all parameters train
LoRA       peft, on all linears but the head, of the rank at which it trains as many parameters as preserve
adapt      every layer expanded, W12 in the attention of the upper half
preserve   every layer expanded, no W12

seconds    median over the rounds; processor seconds count all threads, also while they wait for each other
x preserve median over the rounds of seconds divided by those of preserve in the same round
fastest    fastest step divided by the fastest of preserve: what a machine does when nothing else runs on it
peak       most memory above the loaded model while it takes STEPS_ALONE steps in a process of its own: anonymous
           memory, asked every few ms; with CUDA, what torch has allocated
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks import make_checkpoint
from benchmarks.device import Place, peak_of, place_options, publish, settle, timed, warm_up
from benchmarks.make_checkpoint import SHAPES
from scale_surgery import Request, RunOptions, expand, register

VARIANTS = ("forward", "full", "LoRA", "adapt", "preserve")
# how many times as long as a step of preserve a step of each should take
TARGETS = {"full": 1.9, "LoRA": 1.5}
CLOCKS = ("seconds", "processor_seconds")
LEARNING_RATE = 1e-4
STEPS_ALONE = 3
# what a trial takes
QUICK = {"shape": "tiny", "batch": 2, "length": 16, "rounds": 1}


@dataclass(frozen=True)
class Settings(Place):
    """What is measured, and on what."""

    shape: str
    batch: int
    length: int
    rounds: int
    is_quick: bool = False


@dataclass(frozen=True)
class Cost:
    """What the steps of one variant took; one entry of the lists for each round."""

    variant: str
    trained_parameters: int
    seconds: list[float]
    processor_seconds: list[float]
    peak_bytes: int


def make_models(folder: Path, settings: Settings) -> None:
    """Write the base and both expansions into a folder; new tensors are random, since values do not change time."""
    shape = SHAPES[settings.shape]
    dtype = getattr(torch, settings.dtype)
    make_checkpoint.make_checkpoint(folder / "base", shape, dtype=dtype, device=settings.device)
    upper_half = f"{shape.layers // 2}-{shape.layers - 1}"
    preserve = Request("all", init_w21="random")
    run = RunOptions(device=settings.device)
    expand(folder / "base", preserve, folder / "preserve", run=run)
    adapt = replace(preserve, variant="adapt", collaborative_layers=upper_half, collaborate="attn")
    expand(folder / "base", adapt, folder / "adapt", run=run)


def count_trained(model: Any) -> int:
    """Number of parameters that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def adapted_rank(model: Any, parameters: int) -> int:
    """Rank at which low-rank adapters on all linears but the head have about so many parameters."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for_each_rank = sum(sum(module.weight.shape) for name, module in linears.items() if name != "lm_head")
    return max(1, round(parameters / for_each_rank))


def load_adapted(folder: Path) -> Any:
    """Load the base with adapters that train as many parameters as preserve does, in the dtype of the base."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    rank = adapted_rank(base, count_trained(AutoModelForCausalLM.from_pretrained(folder / "preserve")))
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(base, config, autocast_adapter_dtype=False)


def load(folder: Path, variant: str, device: str) -> Any:
    """Load the model of a variant, ready to train."""
    register()
    logging.disable_progress_bar()
    if variant == "LoRA":
        return load_adapted(folder).to(device).train()
    name = variant if (folder / variant).is_dir() else "base"
    return AutoModelForCausalLM.from_pretrained(folder / name).to(device).train()


def make_step(model: Any, variant: str, settings: Settings) -> Callable[[], None]:
    """Make what takes one training step on tokens that stay the same."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPES[settings.shape].vocabulary, (settings.batch, settings.length), generator=generator)
    tokens = tokens.to(settings.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        with torch.set_grad_enabled(variant != "forward"):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        if variant != "forward":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure_time(folder: Path, settings: Settings) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """Let all variants take turns: for each, the parameters that train, and both times of each round."""
    models = {variant: load(folder, variant, settings.device) for variant in VARIANTS}
    steps = {variant: make_step(model, variant, settings) for variant, model in models.items()}
    # the first step of each, which makes the optimizer's state, is not counted; on a GPU a few more
    for step in steps.values():
        warm_up(step, settings)
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for turn in range(settings.rounds + 1):
        # each begins a round in its turn, so that a ratio compares steps before and after one another alike
        for variant in (VARIANTS * 2)[turn % len(VARIANTS) :][: len(VARIANTS)]:
            taken[variant].append(timed(steps[variant], settings))
    trained = {variant: 0 if variant == "forward" else count_trained(model) for variant, model in models.items()}
    return {variant: (trained[variant], taken[variant][1:]) for variant in VARIANTS}


def measure_peak(folder: Path, variant: str, settings: Settings) -> int:
    """Most memory above the loaded model during a few steps, in a process that does nothing else."""
    torch.set_num_threads(settings.threads)
    model = load(folder, variant, settings.device)
    settle(model)
    step = make_step(model, variant, settings)
    with peak_of(settings) as peak:
        for _ in range(STEPS_ALONE):
            step()
    return peak.bytes


def measure_peaks(folder: Path, settings: Settings) -> dict[str, int]:
    """Measure the peak of each variant, one process after the other, forked from one that has imported all."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "peft", "transformers.models.llama.modeling_llama"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = {variant: pool.submit(measure_peak, folder, variant, settings) for variant in VARIANTS}
        return {variant: future.result() for variant, future in waiting.items()}


def measure(settings: Settings) -> list[Cost]:
    """Measure time and memory of all variants on models that are removed afterwards."""
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, settings)
        peaks = measure_peaks(folder, settings)
        times = measure_time(folder, settings)
    return [
        Cost(variant, trained, [wall for wall, _ in taken], [processor for _, processor in taken], peaks[variant])
        for variant, (trained, taken) in times.items()
    ]


def times_as_long(cost: Cost, reference: Cost) -> dict[str, float]:
    """How many times as long a step takes: by both clocks within each round, and by the fastest step of all."""
    pairs = {clock: (getattr(cost, clock), getattr(reference, clock)) for clock in CLOCKS}
    in_rounds = {clock: median(map(truediv, *pair)) for clock, pair in pairs.items()}
    return in_rounds | {"fastest": min(cost.seconds) / min(reference.seconds)}


def ratios(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """How many times as long as a step of preserve a step of each variant takes."""
    preserve = next(cost for cost in costs if cost.variant == "preserve")
    return {cost.variant: times_as_long(cost, preserve) for cost in costs}


def verdicts(costs: Sequence[Cost]) -> dict[str, bool]:
    """Which targets are reached: time as TARGETS says, by every measure, and less memory than either."""
    factors = ratios(costs)
    peaks = {cost.variant: cost.peak_bytes for cost in costs}
    faster = {f"{name}: {least} times as long": min(factors[name].values()) >= least for name, least in TARGETS.items()}
    return faster | {f"{name}: more memory": peaks[name] > peaks["preserve"] for name in TARGETS}


def render(costs: Sequence[Cost], factors: Mapping[str, Mapping[str, float]]) -> Table:
    """Lay the costs out as a table."""
    table = Table("variant", "trains", "seconds", "cpu seconds", "x preserve", "x by cpu", "fastest", "peak")
    for cost in costs:
        seconds = (f"{median(cost.seconds):.4f}", f"{median(cost.processor_seconds):.4f}")
        times = (f"{value:.2f}" for value in factors[cost.variant].values())
        peak = f"{cost.peak_bytes / 2**30:.2f} GiB"
        table.add_row(cost.variant, f"{cost.trained_parameters:,}", *seconds, *times, peak)
    return table


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="d768", show_default=True)
@click.option("--batch", default=4, show_default=True, help="Sequences of a step.")
@click.option("--length", default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--rounds", default=10, show_default=True, help="Steps of each variant that are counted.")
@place_options
def main(output: Path | None, markdown: Path | None, **options: Any) -> None:
    """Measure what a training step costs, in seconds and memory."""
    settings = Settings(**options | (QUICK if options["is_quick"] else {}))
    costs = measure(settings)
    factors, reached = ratios(costs), verdicts(costs)
    report = {"settings": asdict(settings), "ratios": factors, "targets": reached, "costs": [vars(c) for c in costs]}
    lines = (f"{target}: {'reached' if is_reached else 'NOT reached'}" for target, is_reached in reached.items())
    publish([render(costs, factors), *lines], report, output, markdown, width=120)


if __name__ == "__main__":
    main()
