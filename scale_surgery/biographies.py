"""Synthetic biographies: people who do not exist, texts about them, and questions to ask.

The people follow the biography benchmark of knowledge-memorisation studies. Each has a name and six attributes.
Sentences of varying wording and order state the attributes, and a question asks for each. The module needs only the
standard library. Exception: `first_token_accuracy` imports torch and transformers when it is called.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHIPPED_MODEL = Path(__file__).parent / "models" / "biographies"
SHIPPED_PEOPLE = 400  # the shipped model knows people(SHIPPED_PEOPLE)

FIRST_NAMES = (
    "Adele", "Agnes", "Alma", "Anna", "Arthur", "Bella", "Bruno", "Carla", "Cecil", "Clara",
    "Conrad", "Daria", "Dennis", "Edith", "Elmer", "Esther", "Felix", "Flora", "Frank", "Gavin",
    "Gloria", "Grant", "Hannah", "Harold", "Hugo", "Ida", "Irene", "Ivan", "Jasper", "Joan",
    "Karl", "Laura", "Leon", "Lydia", "Marcus", "Mona", "Nadia", "Nora", "Oscar", "Paula",
    "Peter", "Quentin", "Rosa", "Rupert", "Simon", "Tessa", "Thomas", "Ursula", "Victor",
    "Wanda",
)  # fmt: skip

LAST_NAMES = (
    "Abbott", "Archer", "Baker", "Barlow", "Berg", "Bishop", "Calder", "Carver", "Cooper",
    "Dalton", "Dixon", "Draper", "Ellis", "Fisher", "Fletcher", "Foster", "Garner", "Gibbs",
    "Hale", "Harper", "Hobbs", "Hunter", "Jensen", "Keller", "Kemp", "Lambert", "Lowell",
    "Marlow", "Mason", "Mercer", "Nash", "Norris", "Osborne", "Pearce", "Pickett", "Porter",
    "Quill", "Ramsey", "Reed", "Sawyer", "Shepard", "Sutton", "Tanner", "Thatcher", "Turner",
    "Vaughn", "Walsh", "Webb", "Wheeler", "Yates",
)  # fmt: skip

CITIES = (
    "Austin", "Boston", "Chicago", "Dallas", "Denver", "Detroit", "Fresno", "Geneva", "Glasgow",
    "Hamburg", "Houston", "Kyoto", "Leeds", "Lisbon", "Lyon", "Madrid", "Miami", "Munich",
    "Oslo", "Oxford", "Phoenix", "Prague", "Quebec", "Rome", "Seattle", "Seoul", "Toronto",
    "Turin", "Utrecht", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip

MAJORS = (
    "Accounting", "Anthropology", "Architecture", "Astronomy", "Biology", "Chemistry",
    "Computer Science", "Dentistry", "Economics", "Electrical Engineering", "Finance", "Geology",
    "History", "Journalism", "Law", "Linguistics", "Mathematics", "Medicine", "Music", "Nursing",
    "Philosophy", "Physics", "Sociology", "Theology",
)  # fmt: skip

# Invented. Each first word is unique, so the first token of an answer is enough to identify it.
UNIVERSITIES = (
    "Aldermoor University", "Brackwell College", "Corvane University", "Dunmere Institute",
    "Eastvale University", "Farrowby College", "Glenholt University", "Hexworth Institute",
    "Ivorstone University", "Jarrowdale College", "Kestrelby University", "Lindmoor Institute",
    "Marrowgate University", "Nethercombe College", "Ostermead University", "Pellbrook Institute",
    "Quillhaven University", "Ravensett College", "Silverden University", "Thornwick Institute",
    "Underhill University", "Varlow College", "Westmarch University", "Yarrowfield Institute",
)  # fmt: skip

# Invented. As in the benchmark, an employer has one seat, so the company determines its city.
COMPANY_CITIES = {
    "Axilvo Group": "Austin", "Bryntek Systems": "Boston", "Cindrel Foods": "Chicago",
    "Dovanta Group": "Denver", "Elvaro Systems": "Detroit", "Fendrix Foods": "Fresno",
    "Gorvia Group": "Geneva", "Halvex Systems": "Hamburg", "Ingreta Foods": "Houston",
    "Jovendo Group": "Kyoto", "Kaltrona Systems": "Leeds", "Lumivar Foods": "Lisbon",
    "Mordane Group": "Madrid", "Novaquil Systems": "Munich", "Orbiquo Foods": "Oslo",
    "Pyrande Group": "Oxford", "Quandell Systems": "Phoenix", "Rivento Foods": "Prague",
    "Solvanta Group": "Rome", "Tremix Systems": "Seattle", "Umbrano Foods": "Toronto",
    "Veltrix Group": "Turin", "Wexalor Systems": "Vienna", "Zantara Foods": "Zurich",
}  # fmt: skip

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

SENTENCES = {
    "birthday": (
        "{name} was born on {birthday}.",
        "The birthday of {name} is {birthday}.",
        "{name} came into the world on {birthday}.",
        "{name} celebrates a birthday that goes back to {birthday}.",
    ),
    "birth_city": (
        "{name} was born in {birth_city}.",
        "{name} spent the first years of life in {birth_city}.",
        "The birth city of {name} is {birth_city}.",
        "{name} comes from {birth_city}.",
    ),
    "university": (
        "{name} studied at {university}.",
        "{name} holds a degree from {university}.",
        "The university of {name} is {university}.",
        "{name} was taught by the teachers of {university}.",
    ),
    "major": (
        "{name} took a degree in {major}.",
        "The major of {name} is {major}.",
        "{name} chose to study {major}.",
        "{name} finished a course in {major}.",
    ),
    "company": (
        "{name} works for {company}.",
        "The company of {name} is {company}.",
        "{name} has a job at {company}.",
        "{name} was hired by {company}.",
    ),
    "company_city": (
        "{name} works in {company_city}.",
        "The company city of {name} is {company_city}.",
        "{name} has an office in {company_city}.",
        "{name} goes to work every day in {company_city}.",
    ),
}

ATTRIBUTES = tuple(SENTENCES)
CAPACITY = len(FIRST_NAMES) * len(LAST_NAMES)


@dataclass(frozen=True)
class Person:
    """An invented person: a name and six attributes."""

    name: str
    birthday: str
    birth_city: str
    university: str
    major: str
    company: str
    company_city: str


@dataclass(frozen=True)
class Question:
    """A question about one person. The answer follows the prompt after a space."""

    prompt: str
    answer: str
    attribute: str

    @property
    def text(self) -> str:
        """The prompt with its answer, as a training text."""
        return f"{self.prompt} {self.answer}"


def people(count: int, *, start: int = 0, seed: int = 0) -> tuple[Person, ...]:
    """Return the people with indices `start` to `start + count - 1`.

    People of different indices differ.
    """
    if count < 0 or start < 0:
        raise ValueError(f"count and start must not be negative, got {count} and {start}")
    if start + count > CAPACITY:
        raise ValueError(f"there are names for {CAPACITY} people, but start + count is {start + count}")
    # a person depends on seed and index alone; names are unique within a seed, but recur in other seeds
    return tuple(_person(index, seed) for index in range(start, start + count))


def biography(person: Person, style: int = 0) -> str:
    """Write the six attributes of a person as one paragraph. `style` selects wording and order."""
    # seeded by the style alone: the same for every person
    choice = random.Random(f"style {style}")
    sentences = [choice.choice(wordings) for wordings in SENTENCES.values()]
    choice.shuffle(sentences)
    return " ".join(sentences).format_map(vars(person))


def questions(person: Person) -> tuple[Question, ...]:
    """Return a question for each attribute of a person, in the order of `ATTRIBUTES`."""
    return tuple(
        Question(
            prompt=f"Q: What is the {attribute.replace('_', ' ')} of {person.name}?\nA:",
            answer=getattr(person, attribute),
            attribute=attribute,
        )
        for attribute in ATTRIBUTES
    )


def first_token_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    batch_size: int = 512,
) -> float:
    """Measure the accuracy of a causal model on the first token of each answer: a share from 0 to 1."""
    if not questions:
        raise ValueError("there are no questions to score")
    from scale_surgery.running.loss import measure
    from scale_surgery.text.documents import Document
    from scale_surgery.text.tokenizing import tokenize

    # an answer is right if its first token, with the leading space, has the largest logit after the prompt
    documents = [Document(question.prompt, f" {question.answer}", question.attribute) for question in questions]
    return measure(model, tokenize(documents, tokenizer), batch_size).answered / len(questions)


def _person(index: int, seed: int) -> Person:
    choice = random.Random(f"person {seed} {index}")
    company = choice.choice(tuple(COMPANY_CITIES))
    return Person(
        name=_names(seed)[index],
        birthday=f"{choice.choice(MONTHS)} {choice.randint(1, 28)}, {choice.randint(1960, 1999)}",
        birth_city=choice.choice(CITIES),
        university=choice.choice(UNIVERSITIES),
        major=choice.choice(MAJORS),
        company=company,
        company_city=COMPANY_CITIES[company],
    )


@functools.lru_cache(maxsize=16)
def _names(seed: int) -> tuple[str, ...]:
    names = [" ".join(pair) for pair in itertools.product(FIRST_NAMES, LAST_NAMES)]
    random.Random(f"names {seed}").shuffle(names)
    return tuple(names)
