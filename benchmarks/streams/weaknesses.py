"""Where composition fails: expansions that contradict each other, a text that needs two at once, short prompts.

    python -m benchmarks.streams.weaknesses [-o FILE] [--seeds 1]

The ten expansions of benchmarks/streams (`preserve`, without rehearsal) are trained, and one more that learns other
facts about the people of the first group. All numbers are shares of right answers.

contradiction   the first group is asked about, with both its expansions: answers as the one, and as the other
two at once     a question about the first group and its answer, then one about the second, in one text
short prompts   the facts of a held-out biography, each from what stands before it, by how many tokens that is
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from transformers import AutoTokenizer

from benchmarks.biography.runs import held_out_texts
from benchmarks.streams.asking import Examiner
from benchmarks.streams.compare import prepare
from benchmarks.streams.learning import Settings, learn
from benchmarks.streams.methods import METHODS, Composed, name_of
from benchmarks.streams.tasks import Asked, Task, about, tasks
from scale_surgery.biographies import ATTRIBUTES, SHIPPED_MODEL, Person, people

RECORDS = Path(__file__).with_name("weaknesses.jsonl")
PRESERVE = METHODS[0]
# tokens that a prompt has at least
LENGTHS, MOST = (0, 8, 16, 32), 256
ALONE = "its expansion alone"
SWITCH_RATES = (0.0, 0.01, 0.1)
# of what a text ends with inside packed ones, and of a new line in one text
END, LINE = "</s><s>", "\n"
# weight of the base at the start of a text, where it is not that of all others
BASE_PRIOR = 0.9


@dataclass(frozen=True)
class Found:
    """One row of a table.

    Attributes:
        seed: Of the expansions.
        weakness: Which table.
        case: Which row.
        shares: Right answers, by column.
    """

    seed: int
    weakness: str
    case: str
    shares: dict[str, float]


class Stream:
    """The expansions of all tasks, and one that contradicts the first."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.seed, self.examiner = seed, Examiner(AutoTokenizer.from_pretrained(SHIPPED_MODEL))
        self.tasks = tasks(settings.tasks, seed, settings.size)
        self.groups = [number for number, task in enumerate(self.tasks) if task.kind == "people"]
        self.contrary = about([*map(with_facts_of, self.tasks[0].group, people(settings.size, start=2000))])
        self.way: Composed = PRESERVE.start(seed)
        for number, task in enumerate((*self.tasks, self.contrary)):
            self.teach(number, task, settings)

    def teach(self, number: int, task: Task, settings: Settings) -> None:
        """Let an expansion of its own learn a task."""
        seed = self.seed * settings.tasks + number
        pupil, texts = self.way.pupil(number), task.texts(seed)
        learn(pupil, PRESERVE.rate, texts, self.examiner.tokenizer, settings, None)

    def right(self, asked: Sequence[Asked], names: str | Sequence[str], **options: Any) -> list[bool]:
        """Whether each question is answered, by one expansion or by a mixture."""
        with self.way.model.use_expansion(names, **options):
            return self.examiner.right(self.way.model, asked)

    def mixed(self, asked: Sequence[Asked], numbers: Iterable[int], **options: Any) -> float:
        """The share that is answered by a mixture of the expansions with these numbers."""
        return _share(self.right(asked, [*map(name_of, numbers)], **options))


def with_facts_of(person: Person, source: Person) -> Person:
    """Somebody of the same name to whom all else that another has is told."""
    return replace(source, name=person.name)


def contradiction(stream: Stream) -> Iterator[Found]:
    """Ask about people whom two expansions know differently, after nothing and after a fact that one of them knows."""
    first, second, known = stream.tasks[0].asked, stream.contrary.asked, (0, len(stream.tasks))
    # what both answer alike says nothing
    differ = [place for place in range(len(first)) if first[place].answer != second[place].answer]
    for case, facts in (("nothing before", None), ("a fact of the first before", first), ("of the second", second)):
        shares = {}
        for column, wanted in (("as the first", first), ("as the second", second)):
            asked = [after(facts, place, wanted[place]) for place in differ]
            shares[column] = stream.mixed(asked, known)
        yield Found(stream.seed, "contradiction", case, shares)


def after(facts: Sequence[Asked] | None, place: int, asked: Asked) -> Asked:
    """A question after another fact about the same person, the next of them."""
    if facts is None:
        return asked
    of_person = place - place % len(ATTRIBUTES)
    before = facts[of_person + (place + 1) % len(ATTRIBUTES)]
    return Asked(f"{before.text}{END}{asked.prompt}", asked.answer)


def two_at_once(stream: Stream) -> Iterator[Found]:
    """Ask about somebody of one group after somebody of another, and as a control of the same one."""
    first, second = (stream.tasks[number].asked for number in stream.groups[:2])
    for separator, shown in ((END, "end of text"), (LINE, "new line")):
        for before, wording in ((first, "of the other group"), (second[::-1], "of the same group")):
            asked = [
                Asked(f"{context.text}{separator}{question.prompt}", question.answer)
                for context, question in zip(before, second, strict=True)
            ]
            shares = {ALONE: _share(stream.right(asked, name_of(stream.groups[1])))}
            shares |= {
                f"mixed, switch rate {rate:g}": stream.mixed(asked, range(len(stream.tasks)), switch_rate=rate)
                for rate in SWITCH_RATES
            }
            yield Found(stream.seed, "two at once", f"after a question {wording}, {shown}", shares)


def short_prompts(stream: Stream) -> Iterator[Found]:
    """Ask for each fact of held-out biographies after all that stands before it."""
    by_group = {number: [*facts_in_place(stream.tasks[number].group)] for number in stream.groups}
    asked = [fact for facts in by_group.values() for fact in facts]
    many = range(len(stream.tasks))
    prior = [BASE_PRIOR, *[(1 - BASE_PRIOR) / len(many)] * len(many)]
    right = {
        ALONE: [mark for number, facts in by_group.items() for mark in stream.right(facts, name_of(number))],
        "mixed": stream.right(asked, [*map(name_of, many)]),
        f"mixed, prior of the base {BASE_PRIOR:g}": stream.right(asked, [*map(name_of, many)], prior=prior),
    }
    lengths = [len(stream.examiner.tokenizer(fact.prompt)["input_ids"]) for fact in asked]
    for least, most in zip(LENGTHS, (*LENGTHS[1:], MOST), strict=True):
        places = [place for place, length in enumerate(lengths) if least <= length < most]
        shares = {column: _share([marks[place] for place in places]) for column, marks in right.items()}
        yield Found(stream.seed, "short prompts", f"{least} to {most - 1} tokens ({len(places)} facts)", shares)


def _share(right: Sequence[bool]) -> float:
    return round(sum(right) / len(right), 4) if right else 0.0


def facts_in_place(group: Sequence[Person]) -> Iterator[Asked]:
    """Each fact of a biography after what stands before it."""
    for person, text in zip(group, held_out_texts(tuple(group)), strict=True):
        for attribute in ATTRIBUTES:
            fact = getattr(person, attribute)
            # of a city that stands twice, the first place
            before = text.split(f" {fact}")[0]
            if person.name in before:
                yield Asked(before, fact)


WEAKNESSES = (contradiction, two_at_once, short_prompts)


@click.command()
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of rows.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
def main(records: Path, seeds: int) -> None:
    """Train, ask, and write a line for each row of the tables."""
    prepare()
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    known = {json.loads(line)["seed"] for line in lines}
    for seed in range(seeds):
        if seed not in known:
            stream = Stream(seed, Settings())
            rows = [row for weakness in WEAKNESSES for row in weakness(stream)]
            with records.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
