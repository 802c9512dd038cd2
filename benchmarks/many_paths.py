"""What many expansions of one base cost together: K + 1 paths beside the base alone, in one composed model.

    python -m benchmarks.many_paths -o numbers.json
    python -m benchmarks.many_paths --shape h1024 --rounds 5

The base is a random Llama; every expansion widens every layer at the default widths. `K preserve` mixes the base and K
such expansions, `alone` is one of them switched on by name, `1 adapt` mixes the base and one with W12 in all layers,
whose path shares nothing with the base; `upper half` has W12 in the upper half of the layers, and shares the lower. All
choices take turns on one model: a round is one call of each.

ms        of processor time, median over the rounds: it is not that of other programs
x base    median over the rounds of the time divided by that of the base in the same round
target    1 + 0.3 K for a forward, 2.5 for generation with 8
weights   all parameters, each counted once, over those of the base
counted   multiplications of all matrix products and of attention, divided by the base's
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table

from benchmarks import make_checkpoint
from benchmarks.device import Place, publish, timed
from benchmarks.make_checkpoint import SHAPES
from benchmarks.routing_cost import Case, count_multiplications, make_call, take_turns
from scale_surgery import Request, expand, extract, load_expansion

SPREAD = make_checkpoint.SPREAD
# what it takes to read on all paths what was generated with some
FEW_TOKENS = Case("forward, 1 x 16", 1, 16)
ADAPTS = {"1 adapt": "adapt", "1 adapt, upper half": "upper"}


@dataclass(frozen=True)
class Measured:
    """One choice in one case: seconds of each round, multiplications, and the largest that the time should be."""

    case: str
    choice: str
    by_base: float
    milliseconds: float
    counted: float
    target: float | None


@dataclass(frozen=True)
class Chosen:
    """A composed model under one choice, to be called as a model is."""

    model: Any
    names: Any

    @property
    def config(self) -> Any:
        """Of the base."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.model.device

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run a forward under the choice."""
        with self.model.use_expansion(self.names):
            return self.model(*args, **options)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate under the choice."""
        with self.model.use_expansion(self.names):
            return self.model.generate(*args, **options)


def make_model(folder: Path, shape: str, most: int) -> Any:
    """Compose a base with so many preserve expansions, and two that adapt; what starts at zero is random."""
    make_checkpoint.make_checkpoint(folder / "base", SHAPES[shape], dtype=torch.float32, device="cpu")
    requests = {"preserve": Request("all", init_w21="random")}
    adapt = Request("all", variant="adapt", collaborate="both", init_w21="random")
    layers = SHAPES[shape].layers
    requests |= {"adapt": adapt, "upper": replace(adapt, collaborative_layers=f"{layers // 2}-{layers - 1}")}
    extracts = {
        name: extract(expand(folder / "base", request, folder / name, base_weights="link").path, folder / f"{name}.x")
        for name, request in requests.items()
    }
    model: Any = folder / "base"
    for number in range(most):
        model = load_expansion(model, extracts["preserve"].path, name=f"preserve_{number + 1}")
    for name in ADAPTS.values():
        model = load_expansion(model, extracts[name].path, name=name)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith((".w12", ".up_weight")):
            parameter.data = torch.randn(parameter.shape, generator=generator) * SPREAD
        elif ".expansions." in name:
            # loaded from one extract, all would be the same pages of its file, which a processor's cache may hold
            parameter.data = parameter.data.clone()
    return model.eval()


def choices_of(numbers: list[int]) -> dict[str, Any]:
    """What the model is asked to be, by the name in the table."""
    many = {f"{number} preserve": [f"preserve_{index + 1}" for index in range(number)] for number in numbers}
    return {"base": None, "alone": "preserve_1", **many, **{shown: [name] for shown, name in ADAPTS.items()}}


def target_of(case: Case, names: Any) -> float | None:
    """The largest multiple of the base's time that was promised."""
    if case == FEW_TOKENS or not isinstance(names, list) or set(ADAPTS.values()).intersection(names):
        return None
    if case.new_tokens:
        return 2.5 if len(names) == 8 else None
    return 1 + 0.3 * len(names)


def measure_case(model: Any, case: Case, choices: dict[str, Any], place: Place, rounds: int) -> list[Measured]:
    """Let all choices take turns; a first call of each is counted instead of timed."""
    calls: dict[str, Callable[[], None]] = {
        name: make_call(Chosen(model, names), case) for name, names in choices.items()
    }
    counted = {name: count_multiplications(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in take_turns(list(calls), turn):
            seconds[name].append(timed(calls[name], place)[1])
    return [
        Measured(
            case.name,
            name,
            median(map(truediv, taken, seconds["base"])),
            1000 * median(taken),
            counted[name] / counted["base"],
            target_of(case, choices[name]),
        )
        for name, taken in seconds.items()
    ]


def weights_of(model: Any, choices: dict[str, Any]) -> dict[str, float]:
    """Parameters of the base and of the expansions of each choice, over those of the base; storages counted once."""

    def bytes_of(names: list[str]) -> int:
        held = {
            each.data_ptr(): each.nbytes
            for name, each in model.named_parameters()
            if ".expansions." not in name or any(f".expansions.{expansion}." in name for expansion in names)
        }
        return sum(held.values())

    lists = {name: [names] if isinstance(names, str) else names or [] for name, names in choices.items()}
    return {name: bytes_of(names) / bytes_of([]) for name, names in lists.items()}


def render(case: str, measurements: list[Measured], weights: dict[str, float]) -> Table:
    """Lay out one case as a table."""
    table = Table(title=case)
    for column in ("", "ms", "x base", "target", "counted", "weights"):
        table.add_column(column, justify="right" if column else "left")
    for measurement in measurements:
        target = "" if measurement.target is None else f"{measurement.target:.2f}"
        cells = (f"{measurement.milliseconds:.0f}", f"{measurement.by_base:.2f}", target, f"{measurement.counted:.2f}")
        table.add_row(measurement.choice, *cells, f"{weights[measurement.choice]:.2f}")
    return table


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="eighth", show_default=True)
@click.option("--length", default=1024, show_default=True, help="Tokens of a forward.")
@click.option("--prompt", default=128, show_default=True, help="Tokens before those that are generated.")
@click.option("--new-tokens", default=32, show_default=True)
@click.option("--paths", default="1,2,4,8,16", show_default=True, help="Numbers of preserve expansions.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the numbers.")
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the tables.")
def main(
    shape: str,
    length: int,
    prompt: int,
    new_tokens: int,
    paths: str,
    rounds: int,
    threads: int,
    output: Path | None,
    markdown: Path | None,
) -> None:
    """Measure, and print a table for each case."""
    torch.set_num_threads(threads)
    numbers = [int(number) for number in paths.split(",")]
    cases = [
        Case(f"forward, 1 x {length}", 1, length),
        Case(f"prompt of {length} into the KV cache", 1, length, logits_to_keep=1),
        FEW_TOKENS,
        Case(f"generation, prompt {prompt}, {new_tokens} new tokens", 1, prompt, new_tokens=new_tokens),
    ]
    choices, place = choices_of(numbers), Place("cpu", "float32", threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), shape, max(numbers))
        groups = [measure_case(model, case, choices, place, rounds) for case in cases]
        weights = weights_of(model, choices)
    tables = [render(case.name, group, weights) for case, group in zip(cases, groups, strict=True)]
    report = {
        "shape": shape,
        "weights": weights,
        "measured": [asdict(measurement) for group in groups for measurement in group],
    }
    publish(tables, report, output, markdown)


if __name__ == "__main__":
    main()
