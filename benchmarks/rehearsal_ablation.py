"""What rehearsal needs: samples, weight, share, temperature, loss and text, one changed at a time.

    python -m benchmarks.rehearsal_ablation -o rehearsal.jsonl [--way preserve]

Task and texts are those of `benchmarks.rehearsal`: the shipped model learns 20 new people and is asked about 100 that
it knows. Each finished run is a line of JSON, so an interrupted benchmark goes on; tables are made from these lines.
One seed. What is not named in a row is as in the row `self`.

loss cross entropy    of the samples, in place of the divergence from the base on them
text old              biographies and questions of 300 other people that the base knows
text unrelated        licences of this machine (/usr/share/common-licenses)
base twice            the base's logits by a forward of their own, where the base stream has them
alone                 each sample and each text a sequence of its own (packing=false)
samples alone         texts packed, and each sample a sequence of its own: what the two look like tells them apart
head 0.1              the head's up part learns at a tenth of the rate of the rest; "none, ...": without rehearsal
not clipped           gradients as they are

old, new    right answers, in percent     before    processor seconds until the first step, samples included
step        processor seconds of a step, and how many times those of a step without rehearsal
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.rehearsal import NONE, WAYS, learn_and_ask, write_texts
from scale_surgery import TrainingSettings, expand
from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions
from scale_surgery.running.freeze import expansion_parts

LICENCES = Path("/usr/share/common-licenses")
SELF = TrainingSettings(
    steps=120,
    sequence_length=128,
    rehearse=("self",),
    rehearsal_samples=800,
    rehearsal_length=128,
    rehearsal_share=0.5,
    rehearsal_weight=1.0,
)
# documents and characters of given text: about as many tokens as 800 samples have
DOCUMENTS, CHARACTERS = 800, 40_000
HEAD_RATES = (0.1, 0.3, 3.0)
CHANGES: dict[str, dict[str, Any]] = {
    "none": NONE,
    "self": {},
    "samples alone": {},
    "base twice": {},
    "text old": {"rehearse": ("old.jsonl",), "rehearsal_length": None},
    "text unrelated": {"rehearse": ("unrelated.jsonl",), "rehearsal_length": None},
    "loss cross entropy": {},
    **{f"samples {count}": {"rehearsal_samples": count} for count in (50, 200, 400, 3200)},
    **{f"weight {weight}": {"rehearsal_weight": weight} for weight in (0.1, 0.3, 3.0)},
    **{f"share {share}": {"rehearsal_share": share} for share in (0.1, 0.25)},
    **{f"temperature {heat}": {"rehearsal_temperature": heat} for heat in (0.7, 1.3)},
    "alone": {"packing": False},
    **{f"head {factor}": {} for factor in HEAD_RATES},
    **{f"none, head {factor}": NONE for factor in HEAD_RATES},
    **{f"rate {rate}": {"learning_rate": rate} for rate in (0.003, 0.03)},
    "none, rate 0.003": NONE | {"learning_rate": 0.003},
    "not clipped": {"max_gradient_norm": 0.0},
}
# about the base stream, the head, or what tells samples from texts: one way shows it
ONE_WAY = ("samples alone", "base twice", "alone", "not clipped", *(name for name in CHANGES if "rate" in name))
ONE_WAY += tuple(name for name in CHANGES if "head" in name)
TRAINER, TRAIN = "scale_surgery.training.trainer", "scale_surgery.training.base_samples"


def loss_of_samples(model: Any, inside: Any, batch: dict[str, Tensor], tail: Any = None) -> Tensor:
    """Cross entropy over the next token of the samples, with the signature of `divergence_from_base`."""
    logits = model(**batch, use_cache=False).logits[:, :-1]
    kept = batch["attention_mask"][:, 1:].bool()
    return cross_entropy(logits[kept], batch["input_ids"][:, 1:][kept])


def optimizer_maker(factor: float) -> Any:
    """A method of trainers that gives the head's up part so many times the rate of the rest."""

    def create_optimizer(trainer: Any, model: Any = None) -> Any:
        parts = [part for part in expansion_parts(trainer.model) if part.parameter.requires_grad]
        rates = {True: trainer.args.learning_rate * factor, False: trainer.args.learning_rate}
        groups = [
            {"params": [part.parameter for part in parts if (part.group == "head") is is_head], "lr": rate}
            for is_head, rate in rates.items()
        ]
        trainer.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        return trainer.optimizer

    return create_optimizer


PATCHES: dict[str, dict[str, Any]] = {
    **{
        f"{rehearses}head {factor}": {
            "target": f"{TRAINER}.ExpansionTrainer.create_optimizer",
            "new": optimizer_maker(factor),
        }
        for factor in HEAD_RATES
        for rehearses in ("", "none, ")
    },
    "loss cross entropy": {"target": f"{TRAINER}.divergence_from_base", "new": loss_of_samples},
    "samples alone": {"target": f"{TRAIN}.as_learned", "new": lambda samples, *_: samples},
    "base twice": {"target": "scale_surgery.training.rehearsal.carries_base_logits", "new": lambda model: False},
}


def write_rehearsed(folder: Path) -> None:
    """Write text that the base knows, of people that nobody asks about, and text that it does not know."""
    known = people(300, start=100)
    old = [{"text": biography(person, 0)} for person in known]
    old += [
        {"question": question.prompt, "answer": question.answer} for person in known for question in questions(person)
    ]
    random.Random(0).shuffle(old)
    texts = "\n\n".join((LICENCES / name).read_text() for name in ("Apache-2.0", "GPL-3", "LGPL-2.1"))
    unrelated = [{"text": paragraph} for paragraph in texts[:CHARACTERS].split("\n\n") if paragraph.strip()]
    for name, rows in (("old", old[:DOCUMENTS]), ("unrelated", unrelated)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_all(folder: Path, ways: tuple[str, ...], done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Change one thing after the other, in each way; what is done already is not done again."""
    known = {(run["way"], run["change"]) for run in done}
    wide = {way: expand(SHIPPED_MODEL, WAYS[way][0], folder / way.replace(" ", "")).path for way in ways}
    for change, overrides in CHANGES.items():
        for way in ways[:1] if change in ONE_WAY else ways:
            if (way, change) in known:
                continue
            settings = replace(SELF, **({"learning_rate": WAYS[way][1]} | overrides))
            given = tuple(text if text == "self" else str(folder / text) for text in settings.rehearse)
            patched: AbstractContextManager[Any] = patch(**PATCHES[change]) if change in PATCHES else nullcontext()
            with patched:
                measurements = learn_and_ask(wide[way], folder, replace(settings, rehearse=given))
            yield {"way": way, "change": change, **measurements}


def show(done: list[dict[str, Any]]) -> None:
    """Print a table for each way."""
    for way in dict.fromkeys(run["way"] for run in done):
        way_runs = [run for run in done if run["way"] == way]
        plain = next((run["step"] for run in way_runs if run["change"] == "none"), None)
        click.echo(f"\n| {way} | old | new | forgetting | learning | before | step |\n|---|--:|--:|--:|--:|--:|--:|")
        for run in sorted(way_runs, key=lambda run: list(CHANGES).index(run["change"])):
            numbers = f"{run['old']:.1%} | {run['new']:.1%} | {run['forgetting']:+.3f} | {run['learning']:+.3f}"
            times = "" if plain is None else f" ({run['step'] / plain:.1f}x)"
            click.echo(f"| {run['change']} | {numbers} | {run['before']:.1f} | {run['step']:.3f}{times} |")


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only these. Default: three of them.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSON lines, one for each run.")
def main(ways: tuple[str, ...], output: Path) -> None:
    """Change one thing at a time, and print tables."""
    torch.set_num_threads(1)
    done = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        write_rehearsed(folder)
        for run in run_all(folder, ways or ("preserve", "adapt, both", "grow-freeze"), done):
            done.append(run)
            with output.open("a") as stream:
                stream.write(json.dumps(run) + "\n")
    show(done)


if __name__ == "__main__":
    main()
