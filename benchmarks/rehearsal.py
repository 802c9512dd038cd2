"""Forgetting without a router: expansions of the shipped model that learn new people, with and without rehearsal.

    python -m benchmarks.rehearsal [--way gated] [--samples 800] [--weight 1] [--rate 5e-3] [-o numbers.jsonl]

Each model learns 20 new people (questions and biographies) and is asked about them and about 100 people that its base
knows; nothing about these is shown during training. With rehearsal the base writes text before the first step, and the
loss has the divergence from the base on it. One seed, one learning rate for each way, none of them tuned.

old, new    right answers, in percent          step    processor seconds of one
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from scale_surgery import Request, TrainingSettings, TrainingStart, evaluate, expand, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions

NEW, OLD, STYLES, FIRST_NEW = 20, 100, 4, 400
WAYS = {
    "adapt, both": (Request("all", variant="adapt", collaborate="both"), 3e-3),
    "adapt, attn": (Request("all", variant="adapt"), 5.5e-3),
    "gated": (Request("all", variant="gated", collaborate="both"), 3e-3),
    "preserve": (Request("all"), 1e-2),
    "grow-freeze": (Request("all", method="grow"), 1e-3),
    "depth": (Request("all", method="depth"), 1e-3),
}
# nothing is rehearsed, and so nothing is said of how
NONE = {name: value for name, value in vars(TrainingSettings()).items() if name.startswith("rehears")}


def write_texts(folder: Path) -> None:
    """Write what is learned, and what is asked."""
    new = people(NEW, start=FIRST_NEW)
    asked = {
        name: [
            {"question": question.prompt, "answer": question.answer}
            for person in some
            for question in questions(person)
        ]
        for name, some in (("asked_new", new), ("asked_old", people(OLD)))
    }
    biographies = [{"text": biography(person, style)} for person in new for style in range(STYLES)]
    for name, rows in (asked | {"learn": asked["asked_new"] + biographies}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def learn_and_ask(wide: Path, folder: Path, settings: TrainingSettings) -> dict[str, Any]:
    """Train, and ask about old and new people."""
    clock = [time.process_time()]
    start = TrainingStart(overwrite=True, announce=lambda schedule: clock.append(time.process_time()))
    path = train(wide, [folder / "learn.jsonl"], folder / "learned", settings, start=start).path
    clock.append(time.process_time())
    scores = evaluate([path], [folder / "asked_old.jsonl"], [folder / "asked_new.jsonl"]).scores
    (score,) = [score for score in scores if score.kind in ("expanded", "other")]
    assert score.old is not None and score.new is not None and settings.steps is not None
    # right answers, nats per token, and processor seconds of writing samples and of a step
    return {
        "old": score.old.accuracy,
        "new": score.new.accuracy,
        "forgetting": score.forgetting,
        "learning": score.learning,
        "before": round(clock[1] - clock[0], 2),
        "step": round((clock[2] - clock[1]) / settings.steps, 4),
    }


def runs(folder: Path, ways: Sequence[str], settings: TrainingSettings, rate: float | None) -> Iterator[dict[str, Any]]:
    """Train in some ways, without rehearsal and with it, and ask; None stands for each way's own rate."""
    for way in ways:
        request, usual = WAYS[way]
        wide = expand(SHIPPED_MODEL, request, folder / way.replace(" ", "")).path
        for rehearses in (False, True):
            if request.variant == "gated" and not rehearses:
                continue  # gates learn from rehearsal
            run_settings = replace(settings, learning_rate=rate or usual, **({} if rehearses else NONE))
            kind = {"way": way, "rehearsal": rehearses, "rate": run_settings.learning_rate}
            yield kind | learn_and_ask(wide, folder, run_settings)


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only these. Default: all.")
@click.option("--rate", type=float, help="Learning rate, in place of each way's own.")
@click.option("--samples", default=800, show_default=True, help="Samples that the base writes.")
@click.option("--length", default=128, show_default=True, help="Most tokens of a sample.")
@click.option("--share", default=0.25, show_default=True, help="Share of the sequences of a step that are rehearsed.")
@click.option("--weight", default=1.0, show_default=True, help="Weight of the divergence in the loss.")
@click.option("--temperature", default=1.0, show_default=True, help="Temperature of sampling.")
@click.option("--steps", default=120, show_default=True, help="Optimizer steps.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random in training.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="JSON lines to append to, one for each run.")
def main(
    ways: tuple[str, ...],
    rate: float | None,
    samples: int,
    length: int,
    share: float,
    weight: float,
    temperature: float,
    steps: int,
    seed: int,
    output: Path | None,
) -> None:
    """Train in each way, without rehearsal and with it, and print a table."""
    torch.set_num_threads(1)
    settings = TrainingSettings(
        steps=steps,
        sequence_length=128,
        seed=seed,
        rehearse=("self",),
        rehearsal_samples=samples,
        rehearsal_length=length,
        rehearsal_share=share,
        rehearsal_weight=weight,
        rehearsal_temperature=temperature,
    )
    click.echo("| way | rehearsal | old | new | forgetting | learning | step |\n|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        for run in runs(Path(folder), ways or list(WAYS), settings, rate):
            rehearsal = "from the base's own samples" if run["rehearsal"] else "none"
            numbers = f"{run['old']:.1%} | {run['new']:.1%} | {run['forgetting']:+.3f} | {run['learning']:+.3f}"
            click.echo(f"| {run['way']} | {rehearsal} | {numbers} | {run['step']:.3f} |")
            if output is not None:
                given = {"samples": samples, "share": share, "weight": weight, "steps": steps, "seed": seed}
                with output.open("a") as stream:
                    stream.write(json.dumps(run | given) + "\n")


if __name__ == "__main__":
    main()
