"""New tokens for a second language, at equal text: the base's tokenizer against one with more tokens.

    python -m benchmarks.language.new_tokens WORK --method NAME --rate RATE [--tokens 2000] [--init pieces]

The tokenizer of the base `1m-old` is made of what the base reads, nearly all of it in the first language; that of the
others knows both. New tokens are those that save most on all text of the second language that the base has not read.
Every run learns the same documents, a part of it, cut into as few tokens as its tokenizer needs, in batches of as many
tokens; so a run with new tokens takes fewer steps. Tokenizers are compared by bits per byte of the same held-out text.
A run that ends becomes a line of the records file, and what has a line is not run again. At the end the table of all
lines of this base and so much text is printed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.biography.methods import expanded, whole
from benchmarks.harness import Records, stepping
from benchmarks.language.base import SIZES, first, make_base, pack, shuffled, unread
from benchmarks.language.measures import ROWS, score
from benchmarks.language.methods import POSTERIOR, ROUTERS, Method, expansion, methods_for
from benchmarks.language.packages import ENGLISH, LEARNED
from benchmarks.language.precision import mixed
from benchmarks.language.runs import Subject
from benchmarks.language.text import read_text, write_texts
from scale_surgery import PosteriorRouter, Request, expand, merge
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.running.learned_tokens import choose_new_tokens

RECORDS = Path(__file__).with_name("new_tokens.jsonl")
# characters of held-out text in each language
HELD_OUT = 100_000
# rows of a batch, fewer than the base had: there is less text
TOGETHER = 8
ROWS_ALONE = "rows alone"
# how rows of new tokens start: as resize_token_embeddings draws them, or as an expansion does
RESIZED = "resize"
INITS = ("pieces", "random", "zero", RESIZED)


@dataclass(frozen=True)
class Key:
    """What makes a run this one and no other.

    Attributes:
        subject: Base and language.
        characters: Of the second language that are learned.
        method: Name of the method.
        tokens: How many new ones.
        init: How their rows start; empty where there are none.
        rate: Peak of the learning rate.
        seed: Of the order of texts and of random tensors.
    """

    subject: Subject
    characters: int
    method: str
    tokens: int
    init: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Bits:
    """What a model needs for a byte of held-out text.

    Attributes:
        old: Of the first language.
        new: Of the second.
    """

    old: float
    new: float


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        key: Which one.
        parameters: That train.
        learned: Tokens of the text that is learned.
        held_out: Tokens of the held-out text of the second language.
        seconds: Of processor time, of the steps alone.
        routed: At the end with a posterior router; None where it cannot have one.
        start: Before the first step.
        end: After the last.
    """

    key: Key
    parameters: int
    learned: int
    held_out: int
    seconds: float
    routed: Bits | None
    start: Bits
    end: Bits


class Place:
    """A base, and the texts of a comparison, once for all its runs."""

    def __init__(self, work: Path, subject: Subject, characters: int) -> None:
        self.size = SIZES[subject.size]
        self.base = make_base(work, subject.size, subject.second)
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.unread = shuffled(unread(work, tokenizer, subject.second, self.size), 0)
        self.learned = list(first(self.unread, characters))
        self.chosen: dict[int, NewTokens] = {}
        self.held_out = [
            list(first(shuffled(read_text(work, language, "test"), 0), HELD_OUT))
            for language in (ENGLISH, subject.second)
        ]

    @cached_property
    def methods(self) -> dict[str, Method]:
        """What can learn, by name."""
        alone = expansion(ROWS_ALONE, partial(expanded, request=Request("none")), 1e-2, POSTERIOR)
        return {method.name: method for method in (alone, *methods_for(self.base, self.size))}

    def new_tokens(self, count: int) -> NewTokens:
        """The tokens that save most on what the base has not read."""
        if count not in self.chosen:
            self.chosen[count] = self._choose(count)
        return self.chosen[count]

    def _choose(self, count: int) -> NewTokens:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "unread.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in self.unread), encoding="utf-8")
            return choose_new_tokens(self.base, [file], count, self.size.vocabulary).new_tokens

    @contextmanager
    def larger(self, count: int, init: str) -> Iterator[Path]:
        """The base with rows for new tokens, as a stock model, and the tokenizer that has them."""
        with TemporaryDirectory() as folder:
            kept = "pieces" if init == RESIZED else init
            request = Request("none", new_tokens=self.new_tokens(count), new_tokens_init=kept)
            made = expand(self.base, request, Path(folder) / "expanded").path
            larger = merge(made, Path(folder) / "larger", "stock").path
            if init == RESIZED:
                torch.manual_seed(0)
                model = whole(self.base, 0)
                model.resize_token_embeddings(self.size.vocabulary + count)
                model.save_pretrained(larger)
            yield larger


def run(place: Place, key: Key) -> Run:
    """Train one model on the second language, and read held-out text before and after."""
    method = place.methods[key.method]
    tokenizer, model = _make(place, method, key)
    rows = pack(tokenizer, shuffled(place.learned, key.seed), place.size.context, sys.maxsize)
    examined = [
        (_overlapping(tokenizer, texts, place.size.context), sum(len(text.encode()) for text in texts))
        for texts in place.held_out
    ]
    start = _read(model, examined)
    seconds = _learn(model, rows.split(TOGETHER), key.rate)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    end, routed = _read(model, examined), None
    if ROUTERS.keys() & method.ends.keys():
        _, routed_model = _make(place, method, key, routing=PosteriorRouter())
        routed_model.load_state_dict(model.state_dict())
        routed = _read(routed_model, examined)
    held_out = sum(part.numel() - len(part) for part in examined[1][0]) + 1
    return Run(key, parameters, rows.numel(), held_out, round(seconds, 1), routed, start, end)


def _make(place: Place, method: Method, key: Key, **options: Any) -> tuple[Any, Any]:
    """The tokenizer and the model of a run."""
    if not key.tokens:
        return AutoTokenizer.from_pretrained(place.base), method.make(place.base, key.seed, **options)
    with place.larger(key.tokens, key.init) as larger:
        tokenizer = AutoTokenizer.from_pretrained(larger)
        if _is_expansion(method):
            changes = {"new_tokens": place.new_tokens(key.tokens), "new_tokens_init": key.init}
            return tokenizer, method.make(place.base, key.seed, **changes, **options)
        if method.name == "LoRA":
            size = place.size.vocabulary
            options["trainable_token_indices"] = list(range(size, size + key.tokens))
        return tokenizer, method.make(larger, key.seed, **options)


def _is_expansion(method: Method) -> bool:
    return getattr(method.make, "func", None) is expanded


def _learn(model: Any, batches: Sequence[Tensor], rate: float) -> float:
    """Train in place; return the seconds that it took."""
    take_step = stepping(model.train(), rate, len(batches))
    started = time.process_time()
    for batch in batches:
        with mixed("cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        take_step()
    return time.process_time() - started


def _overlapping(tokenizer: Any, texts: Sequence[str], context: int) -> list[Tensor]:
    """Rows that begin with the last token of the one before, so that every token but the first is predicted once."""
    ids = torch.tensor([id_ for text in texts for id_ in tokenizer(text)["input_ids"]])
    *rows, last = [ids[start : start + context] for start in range(0, len(ids) - 1, context - 1)]
    return [*(torch.stack(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)), last[None]]


def _read(model: Any, examined: Sequence[tuple[list[Tensor], int]]) -> Bits:
    model.eval()
    nats = [(sum(float(score(model, part)[0].double().sum()) for part in rows), size) for rows, size in examined]
    return Bits(*(lost / math.log(2) / size for lost, size in nats))


COLUMNS = (
    *("method", "new tokens", "rows start", "trained", "rate", "tokens learned", "saved", "seconds"),
    *("new", "old", "with a router: new", "old", "seeds"),
)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """The table of runs, in Markdown; those that differ by their seed together."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|---|--:|---|{'--:|' * (len(COLUMNS) - 3)}"
    most = max(done.held_out for done in runs)
    methods = list(dict.fromkeys(done.key.method for done in runs))
    groups: dict[tuple[int, int, str, float], list[Run]] = {}
    for done in runs:
        key = done.key
        groups.setdefault((methods.index(key.method), key.tokens, key.init, key.rate), []).append(done)
    for (place, tokens, init, rate), group in sorted(groups.items()):
        trained, learned, saved = group[0].parameters / 1e6, group[0].learned, 1 - group[0].held_out / most
        cells = [methods[place], f"{tokens:,}", init, f"{trained:.2f}M", f"{rate:g}", f"{learned:,}", f"{saved:.1%}"]
        cells.append(f"{fmean(run.seconds for run in group):.0f}")
        cells += [f"{_mean(group, 'start', part)} → {_mean(group, 'end', part)}" for part in ("new", "old")]
        cells += [_mean(group, "routed", part) for part in ("new", "old")]
        yield f"| {' | '.join(cells)} | {len(group)} |"


def _mean(runs: Sequence[Run], when: str, part: str) -> str:
    known = [getattr(bits, part) for done in runs if (bits := getattr(done, when)) is not None]
    return f"{fmean(known):.3f}" if known else ""


@click.command()
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--size", type=click.Choice(list(SIZES)), default="1m-old", show_default=True, help="Size of the base.")
@click.option("--second", type=click.Choice(LEARNED), default="de", show_default=True, help="Language that is learned.")
@click.option("--characters", default=500_000, show_default=True, help="Characters that are learned.")
@click.option("--method", "names", multiple=True, required=True, metavar="NAME", help="Method; can be repeated.")
@click.option("--tokens", "counts", multiple=True, default=(0, 2000), show_default=True, help="New tokens.")
@click.option("--init", type=click.Choice(INITS), default="pieces", show_default=True, help="Start of their rows.")
@click.option("--rate", type=float, required=True, help="Learning rate.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each.")
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of runs.")
def main(
    work: Path,
    size: str,
    second: str,
    characters: int,
    names: Sequence[str],
    counts: Sequence[int],
    init: str,
    rate: float,
    seeds: int,
    records: Path,
) -> None:
    """Fetch text, train a base, run methods with and without new tokens, and go on where that stopped."""
    torch.set_num_threads(1)
    subject = Subject(size, second)
    write_texts(work, second)
    place = Place(work, subject, characters)
    if foreign := sorted(set(names) - set(place.methods)):
        raise click.UsageError(f"--method {', '.join(foreign)}: expected some of {', '.join(place.methods)}.")
    kept = Records(records, Run)
    for seed, name, count in product(range(seeds), names, counts):
        key = Key(subject, characters, name, count, init if count else "", rate, seed)
        kept.once(key, partial(run, place, key))
    asked = [done for done in kept.read() if (done.key.subject, done.key.characters) == (subject, characters)]
    click.echo("\n".join(table(asked)))


if __name__ == "__main__":
    main()
