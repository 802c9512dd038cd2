"""What a forward and cached generation cost: an expanded model as blocks and fused, its base, and dense models.

    python -m benchmarks.inference --threads 1 -o numbers.json
    python -m benchmarks.inference --shape 1b --dtype bfloat16 --device cuda

All layers, then the upper half, of one random Llama are expanded, with default sizes; no block is zero. `adapt` has
W12 in attention and MLP of every expanded layer, `preserve` nowhere. Models take turns in one process: a round is one
call of each. A dense model is a stock Llama with as many parameters as one expansion: see `inference_models`. Fused
preserve stores W12, and multiplies by it, as zeros: it is as large as adapt, and compared with the same dense model.

ms            median over the rounds
/ dense       median over the rounds of the time divided by that of its dense model in the same round; at most TARGETS
    cpu       the same in processor seconds of this process, which others on the machine disturb less; not for a GPU
    fastest   its fastest call divided by the fastest of its dense model
counted       multiplications with additions of one token, as the shapes of the weights have them, attention apart
peak, MiB     on a GPU: most memory above all loaded models during a call
operators     that torch runs for one token without a cache, views included: what a call costs however small it is

1x128 is a forward of one sequence of 128 tokens without a cache; gen is `generate` from a prompt of 128, 32 new tokens.
Long calls take part in fewer rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.device import Place, as_mebibytes, as_milliseconds, place_options, publish, timed, warm_up
from benchmarks.inference_models import Variant, count_multiply_adds, load, make_models
from benchmarks.make_checkpoint import SHAPES
from benchmarks.routing_cost import take_turns
from benchmarks.routing_memory import empty_table
from benchmarks.routing_models import random_tokens
from benchmarks.training_cost import CLOCKS, times_as_long

# how many times as long as its dense model each form should take at most
TARGETS = {"fused": 1.05, "blocks": 1.25}
# what `times_as_long` gives, as tables call it
MEASURES = {"seconds": "/ dense", "processor_seconds": "/ dense, cpu", "fastest": "/ dense, fastest"}


@dataclass(frozen=True)
class Settings(Place):
    """What is measured, and on what."""

    shape: str
    rounds: int
    is_quick: bool = False


@dataclass(frozen=True)
class Case:
    """What is asked of every model, in every so many rounds: a forward, or a prompt with new tokens after it."""

    name: str
    batch: int
    length: int
    new_tokens: int = 0
    every: int = 1


@dataclass(frozen=True)
class Size:
    """What one model is made of, and what it does for one token."""

    variant: str
    hidden: int
    inner: int
    parameters: int
    multiply_adds: int
    operators: int


@dataclass(frozen=True)
class Cost:
    """What the calls of one model took in one case; one entry of the lists for each round."""

    case: str
    variant: str
    seconds: list[float]
    processor_seconds: list[float]
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Ratio:
    """One model in one case, as a multiple of its dense model: by MEASURES."""

    case: str
    variant: str
    form: str
    milliseconds: float
    by_dense: dict[str, float]
    peak_bytes: int | None = None

    def is_missed(self, clock: str) -> bool:
        """Whether it takes longer than the target allows, within the rounds."""
        return self.form in TARGETS and self.by_dense[clock] > TARGETS[self.form]


@dataclass(frozen=True)
class Measured:
    """All that was measured on expansions of the same layers."""

    layers: str
    variants: list[Variant]
    sizes: list[Size]
    costs: list[Cost]

    @property
    def ratios(self) -> list[Ratio]:
        """Each model in each case, compared."""
        return compare(self.variants, self.costs)


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that torch runs in a `with` block."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and run it."""
        self.count += 1
        return operator(*args, **(kwargs or {}))


def cases(settings: Settings) -> list[Case]:
    """Say what is asked: forwards, and generation; a call of a longer one is timed less often."""
    short, long, new = (4, 8, 2) if settings.is_quick else (128, 1024, 32)
    forwards = {(1, 1): 1, (8, 1): 1, (1, short): 2, (8, short): 4, (1, long): 4, (8, long): 16}
    forward_cases = [
        Case(f"{batch}x{length}", batch, length, every=every) for (batch, length), every in forwards.items()
    ]
    return [*forward_cases, Case("gen", 1, short, new, every=4)]


def make_call(model: Any, case: Case) -> Callable[[], None]:
    """Make what asks a model for the tokens of a case."""
    tokens = random_tokens(model, case.batch, case.length)
    greedy = {"do_sample": False, "max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens}

    @torch.no_grad()
    def call() -> None:
        if case.new_tokens:
            model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **greedy)
        else:
            model(tokens, use_cache=False)

    return call


def count_operators(call: Callable[[], None]) -> int:
    """Count the operators of one call."""
    with OperatorCounter() as counter:
        call()
    return counter.count


def measure_size(name: str, model: Any) -> Size:
    """Count what one model is made of."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    operators = count_operators(make_call(model, Case("1x1", 1, 1)))
    return Size(name, config.hidden_size, config.intermediate_size, parameters, count_multiply_adds(model), operators)


def measure_case(models: Mapping[str, Any], case: Case, settings: Settings) -> list[Cost]:
    """Let all models take turns in one case; on a GPU a few calls of each are not counted."""
    calls = {name: make_call(model, case) for name, model in models.items()}
    peaks = {name: warm_up(call, settings) for name, call in calls.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(ceil(settings.rounds / case.every)):
        for name in take_turns(list(models), turn):
            taken[name].append(timed(calls[name], settings))
    clocks = {name: map(list, zip(*times, strict=True)) for name, times in taken.items()}
    return [Cost(case.name, name, *clocks[name], peaks[name]) for name in models]


def compare(variants: Sequence[Variant], costs: Sequence[Cost]) -> list[Ratio]:
    """Compare each model in each case with its dense model."""
    known = {(cost.case, cost.variant): cost for cost in costs}
    forms = {variant.name: variant for variant in variants}
    return [compare_one(forms[cost.variant], cost, known[cost.case, forms[cost.variant].dense]) for cost in costs]


def compare_one(variant: Variant, cost: Cost, dense: Cost) -> Ratio:
    """Compare the calls of one model in one case, round by round."""
    compared = times_as_long(cost, dense)
    return Ratio(cost.case, variant.name, variant.form, 1000 * median(cost.seconds), compared, cost.peak_bytes)


def measure_layers(settings: Settings, layers: str) -> Measured:
    """Measure expansions of these layers, on models that are removed afterwards."""
    with tempfile.TemporaryDirectory() as name:
        variants = make_models(Path(name), SHAPES[settings.shape], settings, layers)
        models = {variant.name: load(Path(name), variant, settings.device) for variant in variants}
    # long enough that what each shape needs for the first time is there
    for model in models.values():
        make_call(model, cases(settings)[-1])()
    sizes = [measure_size(name, model) for name, model in models.items()]
    costs = [cost for case in cases(settings) for cost in measure_case(models, case, settings)]
    return Measured(layers, variants, sizes, costs)


def measure(settings: Settings) -> Iterator[Measured]:
    """Measure expansions of all layers, then of the upper half."""
    torch.set_num_threads(settings.threads)
    for layers in ("all", f"last:{SHAPES[settings.shape].layers // 2}"):
        yield measure_layers(settings, layers)


def render_sizes(measured: Measured) -> Table:
    """Lay out what the models are made of."""
    columns = ("hidden", "inner", "parameters", "counted", "/ dense", "operators")
    table = empty_table(f"layers {measured.layers}", columns)
    known = {size.variant: size for size in measured.sizes}
    for variant in measured.variants:
        size, dense = known[variant.name], known[variant.dense]
        millions = (f"{count / 1e6:,.2f} M" for count in (size.parameters, size.multiply_adds))
        by_dense = f"{size.multiply_adds / dense.multiply_adds:.3f}"
        table.add_row(variant.name, str(size.hidden), str(size.inner), *millions, by_dense, f"{size.operators:,}")
    return table


def render_ratios(measured: Measured, title: str, show: Callable[[Ratio], str]) -> Table:
    """Lay out one number of each model in each case."""
    names = list(dict.fromkeys(cost.case for cost in measured.costs))
    table = empty_table(f"layers {measured.layers}: {title}", names)
    cells = {(ratio.variant, ratio.case): show(ratio) for ratio in measured.ratios}
    for variant in measured.variants:
        table.add_row(variant.name, *(cells[variant.name, name] for name in names))
    return table


def render_verdict(measured: Measured, form: str, clock: str) -> str:
    """Say how many of a form reach their target by a clock, and which do not."""
    ratios = [ratio for ratio in measured.ratios if ratio.form == form]
    missed = [ratio for ratio in ratios if ratio.is_missed(clock)]
    lines = [f"{form} {MEASURES[clock]} at most {TARGETS[form]}: {len(ratios) - len(missed)} of {len(ratios)}"]
    for name in dict.fromkeys(ratio.variant for ratio in missed):
        too_long = (f"{ratio.case} {ratio.by_dense[clock]:.3f}" for ratio in missed if ratio.variant == name)
        lines.append(f"  NOT reached: {name}: {', '.join(too_long)}")
    return "\n".join(lines)


def clocks_of(settings: Settings) -> tuple[str, ...]:
    """The clocks that say something: while a GPU works, the processor waits."""
    return CLOCKS[:1] if settings.is_cuda else CLOCKS


def lay_out(settings: Settings, measured: Measured) -> Iterator[Table | str]:
    """All tables, and which targets are reached."""
    yield render_sizes(measured)
    yield render_ratios(measured, "ms", lambda ratio: as_milliseconds(ratio.milliseconds))
    clocks = clocks_of(settings)
    for measure, title in MEASURES.items():
        if measure in (*clocks, "fastest"):
            yield render_ratios(measured, title, lambda ratio, name=measure: f"{ratio.by_dense[name]:.3f}")
    if settings.is_cuda:
        yield render_ratios(measured, "peak, MiB", lambda ratio: as_mebibytes(ratio.peak_bytes))
    for form in TARGETS:
        for clock in clocks:
            yield render_verdict(measured, form, clock)


def as_report(settings: Settings, measurements: Sequence[Measured]) -> dict[str, Any]:
    """Put what was measured into plain values."""
    expansions = [
        asdict(measured)
        | {"ratios": [asdict(ratio) for ratio in measured.ratios]}
        | {
            "missed": {
                clock: [asdict(ratio) for ratio in measured.ratios if ratio.is_missed(clock)] for clock in CLOCKS
            }
        }
        for measured in measurements
    ]
    return {"settings": asdict(settings), "targets": TARGETS, "expansions": expansions}


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="h1024", show_default=True)
@click.option("--rounds", default=16, show_default=True, help="Calls of each model that are counted; fewer long ones.")
@place_options
def main(output: Path | None, markdown: Path | None, **options: Any) -> None:
    """Measure what a forward and cached generation cost."""
    quick = {"shape": "tiny", "rounds": 1} if options["is_quick"] else {}
    settings = Settings(**options | quick)
    measurements = list(measure(settings))
    parts = [part for measured in measurements for part in lay_out(settings, measured)]
    publish(parts, as_report(settings, measurements), output, markdown)


if __name__ == "__main__":
    main()
