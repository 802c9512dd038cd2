"""What a training step takes on a real base: an expansion beside LoRA with as many trained parameters. Linux only.

    python -m benchmarks.real.step MODEL FOLDER      FOLDER: where expansions of MODEL go, or lie from an earlier call

Both train as their users train: an expansion as `train` does it, LoRA (peft, on all linears but the head) by the
Trainer of transformers with the model's own loss. Arguments, dtype, optimizer and texts are the same.

seconds    median step; the two take turns in one process, a few steps each
ratio      median over the turns of what a step of the expansion takes against one of LoRA, by processor time
peak       most anonymous memory of a process that loads one model and trains a few steps
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.utils import logging

from benchmarks.device import publish, watched
from benchmarks.training_cost import adapted_rank, count_trained
from scale_surgery import Request, RunOptions, TrainingSettings, expand
from scale_surgery.folder.folder import open_folder
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import collate
from scale_surgery.training.allocator import keep_freed_memory
from scale_surgery.training.arguments import make_arguments
from scale_surgery.training.load_model import load_to_train
from scale_surgery.training.trainer import ExpansionTrainer

# most of what LoRA takes, in time and memory
TARGETS = {"adapt": (0.9, 0.6), "preserve": (0.7, 0.6)}
LENGTH, ROWS = 128, 4
# steps of a turn, of which the first is not counted: it makes the optimizer's state
STEPS, TURNS = 3, 3
LORA = "LoRA"
SETTINGS = TrainingSettings(
    sequence_length=LENGTH, batch_size=ROWS, steps=STEPS, schedule="constant", learning_rate=1e-4, warmup=0.0
)


@dataclass(frozen=True)
class StepCost:
    """What a step takes of an expansion, and of LoRA with as many trained parameters."""

    variant: str
    trained_parameters: int
    lora_parameters: int
    seconds: float
    lora_seconds: float
    ratio: float
    peak_bytes: int
    lora_peak_bytes: int

    @property
    def memory_ratio(self) -> float:
        """Peak against that of LoRA."""
        return self.peak_bytes / self.lora_peak_bytes

    @property
    def holds(self) -> bool:
        """Whether both targets are reached."""
        time_share, memory_share = TARGETS[self.variant]
        return self.ratio <= time_share and self.memory_ratio <= memory_share


class StepTimes(TrainerCallback):
    """Wall and processor seconds of each step."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []
        self.start = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        self.start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop them."""
        wall, processor = self.start
        self.taken.append((time.perf_counter() - wall, time.process_time() - processor))


def make_expansion(model: Path, folder: Path, variant: str) -> Path:
    """Expand the last four layers, unless an earlier call did."""
    path = folder / variant
    if not path.is_dir():
        expand(model, Request("last:4", variant=variant), path, base_weights="link")
    return path


def load_expanded(path: Path) -> Any:
    """Load an expansion as `train` does."""
    return load_to_train(open_folder(path), SETTINGS, RunOptions(device="cpu"))


def load_adapted(model: Path, parameters: int) -> Any:
    """Load a base with adapters of about so many parameters."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model)
    rank = adapted_rank(base, parameters)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(base, config)


def random_text(vocabulary: int) -> Sequences:
    """Texts of random tokens, as many as a turn reads."""
    count = STEPS * ROWS
    ids = torch.randint(vocabulary, (count * LENGTH,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Sequences(ids, ids, tuple(range(0, (count + 1) * LENGTH, LENGTH)))


def make_trainer(model: Any, folder: str, times: StepTimes) -> Trainer:
    """The trainer of a model, expanded or with adapters."""
    text = random_text(model.get_input_embeddings().weight.shape[0])
    is_half = next(model.parameters()).dtype == torch.bfloat16
    args = make_arguments(SETTINGS, Path(folder), STEPS, RunOptions(device="cpu"), bf16=is_half, is_measured=False)
    args.save_strategy, args.logging_strategy = "no", "no"
    options: dict[str, Any] = {"model": model, "args": args, "train_dataset": text, "data_collator": collate}
    if hasattr(model, "peft_config"):
        return Trainer(**options, callbacks=[times])
    return ExpansionTrainer(**options, sides={}, base_sides={}, eval_batch=ROWS, callbacks=[times])


def measure_times(expanded: Path, model: Path) -> tuple[int, int, list[list[tuple[float, float]]]]:
    """Let both take turns: trained parameters of each, and the seconds of their steps."""
    ours = load_expanded(expanded)
    parameters = count_trained(ours)
    peer = load_adapted(model, parameters)
    times = [StepTimes(), StepTimes()]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [make_trainer(one, folder, clock) for one, clock in zip((ours, peer), times, strict=True)]
        for turn in range(TURNS):
            for trainer in trainers if turn % 2 else reversed(trainers):
                trainer.train()
    counted = [[taken for step, taken in enumerate(clock.taken) if step % STEPS] for clock in times]
    return parameters, count_trained(peer), counted


def measure_peak(path: Path, parameters: int | None, threads: int) -> int:
    """Most anonymous memory of this process, which loads one model and trains it; adapters where parameters say so."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    # as `train` does
    keep_freed_memory()
    with watched() as answers, tempfile.TemporaryDirectory() as folder:
        model = load_expanded(path) if parameters is None else load_adapted(path, parameters)
        make_trainer(model, folder, StepTimes()).train()
    return max(answers)


def measure_peaks(expanded: Path, model: Path, parameters: int) -> tuple[int, int]:
    """Measure the peak of both, one process after the other."""
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = ((expanded, None, threads), (model, parameters, threads))
        ours, peer = (pool.submit(measure_peak, *each).result() for each in asked)
    return ours, peer


def rows(model: Path, folder: Path) -> Iterator[StepCost]:
    """Measure a step of each variant beside one of LoRA."""
    for variant in TARGETS:
        expanded = make_expansion(model, folder, variant)
        parameters, lora_parameters, (ours, peer) = measure_times(expanded, model)
        shares = (one[1] / other[1] for one, other in zip(ours, peer, strict=True))
        peaks = measure_peaks(expanded, model, parameters)
        seconds = [median(wall for wall, _ in taken) for taken in (ours, peer)]
        yield StepCost(variant, parameters, lora_parameters, *seconds, median(shares), *peaks)


def render(costs: list[StepCost]) -> Table:
    """Lay the costs out as a table."""
    table = Table("variant", "trains", "LoRA trains", "seconds", "LoRA", "ratio", "peak", "LoRA", "ratio", "reached")
    for cost in costs:
        trained = (f"{cost.trained_parameters:,}", f"{cost.lora_parameters:,}")
        times = (f"{cost.seconds:.2f}", f"{cost.lora_seconds:.2f}", f"{cost.ratio:.2f}")
        peaks = (f"{cost.peak_bytes / 1e9:.2f} GB", f"{cost.lora_peak_bytes / 1e9:.2f} GB", f"{cost.memory_ratio:.2f}")
        table.add_row(cost.variant, *trained, *times, *peaks, "yes" if cost.holds else "NO")
    return table


FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model", type=FOLDER)
@click.argument("folder", type=FOLDER)
@click.option("-o", "--output", type=FILE, help="Write the numbers as JSON.")
@click.option("--markdown", type=FILE, help="Write the table as Markdown.")
def main(model: Path, folder: Path, output: Path | None, markdown: Path | None) -> None:
    """Measure what a training step takes on MODEL, in seconds and memory."""
    logging.disable_progress_bar()
    keep_freed_memory()
    costs = list(rows(model, folder))
    publish([render(costs)], {"costs": [asdict(cost) for cost in costs]}, output, markdown, width=120)


if __name__ == "__main__":
    main()
