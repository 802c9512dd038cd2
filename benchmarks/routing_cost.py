"""What routing costs: routed models beside the same models without a router, and beside the base. Linux only.

    python -m benchmarks.routing_cost -o numbers.json
    python -m benchmarks.routing_cost --shape 1b --dtype bfloat16 --device cuda

All models come from one random Llama, every layer expanded, and take turns in one process: a round is one call of each.
`L_fp n` has W12 in the attention of layer n and of all above; it is routed by posterior, by cosine, and by strict
cosine. `preserve` has no W12, and is routed by posterior.

ms          median over the rounds
x base      median over the rounds of the time divided by that of the base model in the same round
x unrouted  the same, divided by the time of the same model without its router
formula     what the design says of the latter: 1 + (L - L_fp) / L, the layers that run twice; 1 for preserve
/ formula   x unrouted divided by the formula; the target is at most TARGET
counted     multiplications of all matrix products and of attention, divided by those without the router: the formula
            leaves out that each path has its own logits, and that the preserve path has no up stream
peak, MiB   on a GPU: most memory above all loaded models during a call

More of memory: see `routing_memory`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.device import as_mebibytes, as_milliseconds, place_options, publish, timed, warm_up
from benchmarks.make_checkpoint import SHAPES
from benchmarks.routing_memory import (
    MOST_EXTRA,
    Cache,
    Peak,
    empty_table,
    extra_logits,
    measure_cache,
    measure_peaks,
    most_extra,
    render_caches,
    render_peaks,
)
from benchmarks.routing_models import Settings, Variant, load, make_models, random_tokens
from benchmarks.training_cost import times_as_long

TARGET = 1.1


@dataclass(frozen=True)
class Case:
    """What is asked of every model: a forward, or a prompt with new tokens after it."""

    name: str
    batch: int
    length: int
    new_tokens: int = 0
    logits_to_keep: int = 0


@dataclass(frozen=True)
class Cost:
    """What the calls of one model took in one case; one entry of the lists for each round."""

    case: str
    variant: str
    multiplications: int
    seconds: list[float]
    processor_seconds: list[float]
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Ratio:
    """One model in one case, compared."""

    case: str
    variant: str
    milliseconds: float
    by_base: float
    by_unrouted: dict[str, float]
    formula: float
    counted: float
    is_routed: bool
    peak_bytes: int | None = None

    @property
    def by_formula(self) -> float:
        """Measured divided by predicted, by wall clock within the rounds."""
        return self.by_unrouted["seconds"] / self.formula


def cases(settings: Settings) -> list[Case]:
    """Say what is asked: long and short forwards, a long prompt, generation."""
    prompt, new = (8, 4) if settings.is_quick else (128, 32)
    return [
        Case(f"forward, 1 x {settings.length}", 1, settings.length),
        Case("forward, 8 x 16", 8, 16),
        Case("forward, 1 x 16", 1, 16),
        Case(f"prompt of {settings.length} into the KV cache", 1, settings.length, logits_to_keep=1),
        Case(f"generation, prompt {prompt}, {new} new tokens", 1, prompt, new_tokens=new),
    ]


def make_call(model: Any, case: Case) -> Callable[[], None]:
    """Make what asks a model for the tokens of a case."""
    tokens = random_tokens(model, case.batch, case.length)
    greedy = {"do_sample": False, "max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens}

    @torch.no_grad()
    def call() -> None:
        if case.new_tokens:
            model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **greedy)
        else:
            model(tokens, logits_to_keep=case.logits_to_keep, use_cache=bool(case.logits_to_keep))

    return call


def product_flop(_: Sequence[int], left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    """Operations of a matrix product that is added to what is there."""
    rows, inner = left
    return 2 * rows * inner * right[-1]


def row_flop(block: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of the product of a matrix and a single row."""
    return 2 * block[0] * block[1]


def added_row_flop(_: Sequence[int], block: Sequence[int], *__: Any, **___: Any) -> int:
    """Operations of such a product that is added to what is there."""
    return row_flop(block)


def attention_flop(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of attention, every query with every key, as torch counts them for its other kernels."""
    batch, heads, rows, size = query
    return 2 * batch * heads * rows * key[-2] * (size + value[-1])


# torch's counter does not know these
ALSO_COUNTED = {
    torch.ops.aten.addmm_: product_flop,
    torch.ops.aten.mv: row_flop,
    torch.ops.aten.addmv_: added_row_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
}


def count_multiplications(call: Callable[[], None]) -> int:
    """Count multiplications with additions in all matrix products of a call."""
    with FlopCounterMode(display=False, custom_mapping=ALSO_COUNTED) as counter:
        call()
    return counter.get_total_flops() // 2


def take_turns(names: Sequence[str], turn: int) -> list[str]:
    """Order of a round: each begins a round in its turn, every other round goes backwards, and neighbours stay so."""
    start = turn // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order if turn % 2 else order[::-1]


def measure_case(models: dict[str, Any], case: Case, settings: Settings) -> list[Cost]:
    """Let all models take turns in one case; a first call of each is counted instead of timed, on a GPU a few more."""
    calls = {name: make_call(model, case) for name, model in models.items()}
    counted = {name: count_multiplications(call) for name, call in calls.items()}
    peaks = {name: warm_up(call, settings) for name, call in calls.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(settings.rounds):
        for name in take_turns(list(models), turn):
            taken[name].append(timed(calls[name], settings))
    clocks = {name: map(list, zip(*times, strict=True)) for name, times in taken.items()}
    return [Cost(case.name, name, counted[name], *clocks[name], peaks[name]) for name in models]


def compare(variants: Sequence[Variant], costs: Sequence[Cost]) -> list[Ratio]:
    """Compare each model in each case with the base and with itself without a router."""
    known = {(cost.case, cost.variant): cost for cost in costs}
    return [
        compare_one(variant, cost, known[cost.case, variant.unrouted], known[cost.case, "base"])
        for cost in costs
        for variant in variants
        if variant.name == cost.variant
    ]


def compare_one(variant: Variant, cost: Cost, unrouted: Cost, base: Cost) -> Ratio:
    """Compare the calls of one model in one case."""
    return Ratio(
        case=cost.case,
        variant=cost.variant,
        milliseconds=1000 * median(cost.seconds),
        by_base=median(map(truediv, cost.seconds, base.seconds)),
        by_unrouted=times_as_long(cost, unrouted),
        formula=variant.formula,
        counted=cost.multiplications / unrouted.multiplications,
        is_routed=variant.router is not None,
        peak_bytes=cost.peak_bytes,
    )


def missed(ratios: Sequence[Ratio]) -> list[Ratio]:
    """Routed models that cost more than the target allows."""
    return [ratio for ratio in ratios if ratio.is_routed and ratio.by_formula > TARGET]


def render(case: str, ratios: Sequence[Ratio]) -> Table:
    """Lay out one case as a table."""
    shown = [ratio for ratio in ratios if ratio.case == case]
    has_peaks = any(ratio.peak_bytes is not None for ratio in shown)
    columns = ("ms", "x base", "x unrouted", "formula", "/ formula", "counted")
    table = empty_table(case, (*columns, "peak, MiB") if has_peaks else columns)
    for ratio in shown:
        measured = (as_milliseconds(ratio.milliseconds), f"{ratio.by_base:.2f}")
        compared = (ratio.by_unrouted["seconds"], ratio.formula, ratio.by_formula, ratio.counted)
        cells = (f"{value:.2f}" if ratio.is_routed else "" for value in compared)
        table.add_row(ratio.variant, *measured, *cells, *([as_mebibytes(ratio.peak_bytes)] if has_peaks else []))
    return table


def render_verdict(ratios: Sequence[Ratio]) -> str:
    """Say how many reach the target, and which do not."""
    too_dear, routed = missed(ratios), [ratio for ratio in ratios if ratio.is_routed]
    lines = [f"at most {TARGET} x the formula: {len(routed) - len(too_dear)} of {len(routed)}"]
    lines += [f"  NOT reached: {ratio.case}, {ratio.variant}: {ratio.by_formula:.3f}" for ratio in too_dear]
    return "\n".join(lines)


@dataclass(frozen=True)
class Measured:
    """All that was measured: time and cache on one set of models, peaks on another."""

    variants: list[Variant]
    costs: list[Cost]
    caches: list[Cache]
    thin: list[Variant]
    peaks: list[Peak]

    @property
    def ratios(self) -> list[Ratio]:
        """Each model in each case, compared."""
        return compare(self.variants, self.costs)

    @property
    def most_extra(self) -> float:
        """Most logits tensors that a router adds to a call without gradients."""
        return most_extra(extra_logits(self.thin, self.peaks))


def measure(settings: Settings) -> Measured:
    """Measure on models that are removed afterwards; memory first, while this process is small."""
    torch.set_num_threads(settings.threads)
    thin, peaks = measure_peaks(settings)
    shape = SHAPES[settings.shape]
    depths = sorted({0, shape.layers // 2, shape.layers - 1})
    with tempfile.TemporaryDirectory() as name:
        variants = make_models(Path(name), shape, settings, depths)
        models = {variant.name: load(Path(name), variant, settings.device) for variant in variants}
        costs = [cost for case in cases(settings) for cost in measure_case(models, case, settings)]
        caches = [measure_cache(models[variant.name], variant) for variant in variants]
    return Measured(variants, costs, caches, thin, peaks)


def lay_out(settings: Settings, measured: Measured) -> Iterator[Table | str]:
    """All tables, and which targets are reached."""
    for case in cases(settings):
        yield render(case.name, measured.ratios)
    yield render_verdict(measured.ratios)
    yield render_caches(measured.variants, measured.caches)
    yield render_peaks(measured.thin, measured.peaks)
    verdict = "reached" if measured.most_extra <= MOST_EXTRA else "NOT reached"
    yield f"at most {MOST_EXTRA} extra logits tensors without gradients: {measured.most_extra:.2f}, {verdict}"


def as_report(settings: Settings, measured: Measured) -> dict[str, Any]:
    """Put what was measured into plain values, with what is measured divided by what is predicted."""
    ratios = [asdict(ratio) | {"by_formula": ratio.by_formula} for ratio in measured.ratios]
    too_dear = [{"case": ratio.case, "variant": ratio.variant} for ratio in missed(measured.ratios)]
    comparison = {"ratios": ratios, "missed": too_dear, "most_extra_logits": measured.most_extra}
    return {"settings": asdict(settings)} | comparison | asdict(measured)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="eighth", show_default=True)
@click.option("--length", default=1024, show_default=True, help="Tokens of a long sequence.")
@click.option("--rounds", default=5, show_default=True, help="Calls of each model in each case that are counted.")
@place_options
def main(output: Path | None, markdown: Path | None, **options: Any) -> None:
    """Measure what routing costs, in seconds and memory."""
    quick = {"shape": "tiny", "length": 32, "rounds": 1} if options["is_quick"] else {}
    settings = Settings(**options | quick)
    measured = measure(settings)
    publish(lay_out(settings, measured), as_report(settings, measured), output, markdown)


if __name__ == "__main__":
    main()
