"""What it saves, and what it loses, to leave paths out of a mixture while they weigh little (`--prune`).

    python -m benchmarks.leaving_out time -o numbers.json
    python -m benchmarks.leaving_out texts -o losses.json

`time` generates with a random Llama, every layer of every expansion widened, as many_paths does. *All* mixes the base
and K expansions; beside it a prior keeps one expansion in, or the base alone, and the others out. Choices take turns.

ms           of processor time a new token, median over the rounds, the prompt's included
x base, all  medians over the rounds of the time divided by that of the base, and of all, in the same round

`texts` lets expansions of the shipped model learn groups of people each, and reads texts that go from one group to
another and back, and end with somebody whom the base knows, token by token: a biography each, in unseen wordings.

nats         what the mixture loses a token; `more` than where none is left out
base         what a whole text loses at most above the base, nats
in           expansions that are in, on average; where none is left out all of them
back         tokens from the first of a biography to where its own path is in, median and most
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import torch
from rich.table import Table
from scale_surgery.modeling.expanded_left_out import left_out_of
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.biography.runs import held_out_texts
from benchmarks.device import Place, publish, timed
from benchmarks.make_checkpoint import SHAPES
from benchmarks.many_paths import Chosen, make_model
from benchmarks.routing_cost import Case, make_call, take_turns
from benchmarks.streams.learning import Settings, learn
from benchmarks.streams.methods import METHODS, name_of
from benchmarks.streams.tasks import about
from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, people

PRUNE, LAGS = 0.01, (8, 16, 32)
# what is far below the threshold
LITTLE = 1e-6
RATES = (0.0, 0.01)


@dataclass(frozen=True)
class Taken:
    """What one choice takes to generate, by the median round."""

    paths: int
    choice: str
    milliseconds: float
    by_base: float
    by_all: float


@dataclass(frozen=True)
class Lost:
    """What a mixture loses on texts that change, and who was in; see above."""

    switch_rate: float
    lag: int | None
    nats: float
    more: float
    above_base: float
    inside: float
    back: tuple[float, int]


@dataclass(frozen=True)
class Mixed(Chosen):
    """A composed model under a mixture, to be called as a model is."""

    options: Any = None

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate under the mixture."""
        with self.model.use_expansion(self.names, **(self.options or {})):
            return self.model.generate(*args, **options)


def choices_of(model: Any, paths: int, lags: tuple[int, ...]) -> dict[str, Any]:
    """What the model is asked to be, by the name in the table; who is in, is in by the prior, whatever the text."""
    names = [f"preserve_{number + 1}" for number in range(paths)]
    found = {"base": Mixed(model, None), "all": Mixed(model, names)}
    for inside, number in (("one", 1), ("the base", 0)):
        prior = [LITTLE] * (paths + 1)
        prior[number] = 1 - LITTLE * paths
        for lag in lags:
            options = {"prior": prior, "switch_rate": 0, "prune": PRUNE, "lag": lag}
            found[f"{inside} in, lag {lag}"] = Mixed(model, names, options)
    return found


def measure(model: Any, paths: int, case: Case, rounds: int, place: Place) -> list[Taken]:
    """Let all choices take turns."""
    calls = {name: make_call(own, case) for name, own in choices_of(model, paths, LAGS[1:]).items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in take_turns(list(calls), turn):
            seconds[name].append(timed(calls[name], place)[1])

    def ratio(name: str, other: str) -> float:
        return median(map(truediv, seconds[name], seconds[other]))

    return [
        Taken(paths, name, 1000 * median(own) / case.new_tokens, ratio(name, "base"), ratio(name, "all"))
        for name, own in seconds.items()
    ]


def make_pupils(groups: int) -> tuple[Any, list[list[str]]]:
    """Let expansions learn a group of people each; what is told of each group, the base's last, in unseen wordings."""
    way, settings, tokenizer = METHODS[0].start(0), Settings(), AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    told = [people(settings.size, start=SHIPPED_PEOPLE + number * settings.size) for number in range(groups)]
    for number, group in enumerate(told):
        learn(way.pupil(number), METHODS[0].rate, about(group).texts(number), tokenizer, settings, None)
    return way.model, [held_out_texts(group) for group in (*told, people(settings.size))]


def changing_texts(told: list[list[str]], count: int) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """Texts that go from one group to another, back, and to the base; where each part begins, and whose it is."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    for number in range(count):
        one, other = (number % (len(told) - 1), (number + 1) % (len(told) - 1))
        whose = [one, other, one, len(told) - 1]
        parts = [
            tokenizer(told[group][number + place] + "</s><s>", add_special_tokens=not place)["input_ids"]
            for place, group in enumerate(whose)
        ]
        ends = [0, *itertools.accumulate(map(len, parts))]
        yield torch.tensor([[token for part in parts for token in part]]), ends, whose


@torch.no_grad()
def read(model: Any, ids: Tensor, **mixing: Any) -> tuple[float, float, list[set[str]]]:
    """Read a text token by token: nats lost, those above the base, and who was in where each token was predicted."""
    with model.use_expansion(list(model.expansions), **mixing):
        base = model.score_tokens(ids).paths[0, :, 0].sum()
        cache, lost, inside = None, 0.0, []
        for token, following in itertools.pairwise(ids.split(1, dim=1)):
            output = model(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            left = left_out_of(cache)
            inside.append(set(model.expansions if left is None else left.inside.names))
            lost -= float(output.logits[0, -1].log_softmax(-1)[following])
    return lost, lost + float(base), inside


def lose(model: Any, texts: list[tuple[Tensor, list[int], list[int]]], rate: float, lag: int | None) -> Lost:
    """Read all texts under one mixture."""
    mixing = {"switch_rate": rate} | ({} if lag is None else {"prune": PRUNE, "lag": lag})
    found = [read(model, ids, **mixing) for ids, _, _ in texts]
    tokens = sum(ids.shape[1] - 1 for ids, _, _ in texts)
    back = []
    for (_, ends, whose), (_, _, inside) in zip(texts, found, strict=True):
        for start, end, group in zip(ends, ends[1:], whose, strict=False):
            path = name_of(group)
            seen = [place for place in range(start, min(end, len(inside))) if path in inside[place]]
            back += [seen[0] - start if seen else end - start] if path in model.expansions else []
    sizes = mean(len(own) for _, _, inside in found for own in inside)
    nats, above = sum(lost for lost, _, _ in found) / tokens, max(own for _, own, _ in found)
    return Lost(rate, lag, nats, 0.0, above, sizes, (median(back), max(back)))


def time_table(found: list[Taken]) -> Table:
    """Lay out what choices take."""
    table = Table(title=f"K = {found[0].paths}")
    for column in ("", "ms", "x base", "x all"):
        table.add_column(column, justify="right" if column else "left")
    for own in found:
        table.add_row(own.choice, f"{own.milliseconds:.1f}", f"{own.by_base:.2f}", f"{own.by_all:.2f}")
    return table


def loss_table(found: list[Lost]) -> Table:
    """Lay out what is lost."""
    table = Table(title="texts that change")
    for column in ("switch rate", "lag", "nats", "more", "base", "in", "back"):
        table.add_column(column, justify="right")
    for own in found:
        lag = "none is out" if own.lag is None else str(own.lag)
        numbers = (f"{own.nats:.4f}", f"{own.more:+.4f}", f"{own.above_base:+.2f}", f"{own.inside:.2f}")
        table.add_row(f"{own.switch_rate:g}", lag, *numbers, f"{own.back[0]:g}, {own.back[1]}")
    return table


@click.group()
def main() -> None:
    """Measure, and print a table for each case."""
    torch.set_num_threads(1)


@main.command("time")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="eighth", show_default=True)
@click.option("--prompt", default=128, show_default=True, help="Tokens before those that are generated.")
@click.option("--new-tokens", default=128, show_default=True)
@click.option("--paths", default="4,8,16", show_default=True, help="Numbers of preserve expansions.")
@click.option("--rounds", default=3, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the numbers.")
def time_command(shape: str, prompt: int, new_tokens: int, paths: str, rounds: int, output: Path | None) -> None:
    """Generate with all paths, and with some of them left out."""
    counts, case = [int(own) for own in paths.split(",")], Case("generation", 1, prompt, new_tokens=new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), shape, max(counts))
        found = [measure(model, count, case, rounds, Place("cpu", "float32", 1)) for count in counts]
    report = {"shape": shape, "measured": [asdict(one) for own in found for one in own]}
    publish([time_table(own) for own in found], report, output, None)


@main.command("texts")
@click.option("--groups", default=4, show_default=True, help="Expansions, each of a group of people.")
@click.option("--texts", default=8, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the numbers.")
def texts_command(groups: int, texts: int, output: Path | None) -> None:
    """Read texts that change, with all paths and with some of them left out."""
    model, told = make_pupils(groups)
    changing, found = list(changing_texts(told, texts)), []
    for rate in RATES:
        whole = lose(model, changing, rate, None)
        pruned = [lose(model, changing, rate, lag) for lag in LAGS]
        found += [whole, *(Lost(**(vars(own) | {"more": own.nats - whole.nats})) for own in pruned)]
    publish([loss_table(found)], {"lost": [asdict(own) for own in found]}, output, None)


if __name__ == "__main__":
    main()
