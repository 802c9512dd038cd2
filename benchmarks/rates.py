"""The default learning rate: does each kind of expansion learn at it, and does three times the rate diverge?

    python -m benchmarks.rates [MODEL] [--layers last:4] [--steps 60] [--times 1] [-o rates.jsonl]

A model learns biographies of 40 invented people, from a few sentences about each. Its loss is measured before and
after, on other sentences about the same people. Runs that the file holds are not repeated.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
import torch

from benchmarks.records import append_line, read_lines
from scale_surgery import EvalData, Request, TrainingError, TrainingSettings, TrainingStart, expand, plan, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.training.rates import default_rate

PEOPLE, FIRST, STYLES, UNSEEN = 40, 400, 2, 100_000
WAYS = {
    "preserve": {},
    "adapt": {"variant": "adapt", "collaborate": "both"},
    "gated": {"variant": "gated", "collaborate": "both"},
    "grow": {"method": "grow"},
    "depth": {"method": "depth"},
}
# gates train with rehearsal alone, which is measured elsewhere; here they stay open
GROUPS = tuple(name for name in TrainingSettings().groups if name != "gates")


def write_texts(folder: Path, held_out: int) -> None:
    """Write what is learned, and what is measured."""
    new = people(PEOPLE, start=FIRST)
    texts = {
        "learn": [biography(person, style) for person in new for style in range(STYLES)],
        "held_out": [biography(person, UNSEEN + index) for index, person in enumerate(new[:held_out])],
    }
    for name, rows in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def losses(wide: Path, folder: Path, settings: TrainingSettings) -> tuple[float | None, float | None]:
    """Train, and return the loss on the held-out text before and after; None if it is not finite."""
    texts = [folder / "learn.jsonl"], folder / "learned", settings
    measured, start = EvalData(new=[folder / "held_out.jsonl"]), TrainingStart(overwrite=True, base_weights="link")
    try:
        change = train(wide, *texts, eval_data=measured, start=start).change
    except TrainingError:
        return None, None
    assert change is not None
    return change.before, change.after


@click.command()
@click.argument("model", default=str(SHIPPED_MODEL))
@click.option("--layers", default="all", show_default=True, help="Layers to expand.")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only these. Default: all.")
@click.option("--times", multiple=True, type=float, default=(1 / 3, 1, 3, 9), help="Multiples of the default rate.")
@click.option("--steps", default=60, show_default=True, help="Optimizer steps.")
@click.option("--batch", default=8, show_default=True, help="Sequences of 128 tokens in a step.")
@click.option("--held-out", default=PEOPLE, show_default=True, help="Held-out texts.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default="rates.jsonl", show_default=True)
def main(
    model: str,
    layers: str,
    ways: tuple[str, ...],
    times: tuple[float, ...],
    steps: int,
    batch: int,
    held_out: int,
    output: Path,
) -> None:
    """Train each kind of expansion at multiples of its default rate, and print a table."""
    torch.set_num_threads(1)
    name = Path(model).resolve().name
    setting = {"model": name, "layers": layers, "steps": steps, "batch": batch, "held_out": held_out}
    kept = [run for run in read_lines(output) if {key: run[key] for key in setting} == setting]
    done = {(run["way"], run["rate"]): run["result"] for run in kept}
    click.echo("| model | expansion | rate | of the default | before | after |\n|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir=output.resolve().parent) as made:
        folder = Path(made)
        write_texts(folder, held_out)
        for way in ways or WAYS:
            request = Request(layers, **WAYS[way])
            usual = default_rate(plan(model, request))
            for multiple in times:
                rate = float(f"{multiple * usual:.2g}")
                if (way, rate) not in done:
                    wide = folder / way
                    if not wide.exists():
                        expand(model, request, wide, base_weights="link")
                    settings = TrainingSettings(
                        steps=steps, sequence_length=128, batch_size=batch, learning_rate=rate, groups=GROUPS,
                        eval_every=steps, save_every=steps,
                    )  # fmt: skip
                    before, after = losses(wide, folder, settings)
                    done[way, rate] = {"before": before, "after": after}
                    append_line(output, setting | {"way": way, "rate": rate, "result": done[way, rate]})
                before, after = done[way, rate].values()
                numbers = "| | diverged" if after is None else f"| {before:.3f} | {after:.3f}"
                click.echo(f"| {name} | {way} | {rate:g} | {multiple:.2g} {numbers} |")


if __name__ == "__main__":
    main()
