"""What rank_layers proposes for the shipped model and the new people of compare.py, kept as records.

The pilot reads what the runs train on, questions and biographies in styles that training draws, with as many steps as
the runs, of 8 sequences each.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.biography.runs import Settings, append_record
from benchmarks.biography.train_model import documents
from scale_surgery import RankingSettings, rank_layers
from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, Person, people

PASSES = 4  # over each group of people, every biography in another style each time
QUESTIONS = 6
BUDGET = "20%"  # two layers of the four, whichever they are


@dataclass(frozen=True)
class Proposal:
    """What one pilot says, lowest layer first.

    Attributes:
        seed: Of the texts and of the pilot.
        settings: Of the runs that it is compared with.
        seconds: Processor time of all of it.
        changes: Change of each layer, relative to its norm.
        tied: Layers that are tied where the budget pays for two.
    """

    seed: int
    settings: Settings
    seconds: float
    changes: tuple[float, ...]
    tied: tuple[int, ...]

    @property
    def pair(self) -> tuple[int, ...]:
        """The two most changed layers, ascending, whether they are tied with others or not."""
        most_changed = sorted(range(len(self.changes)), key=lambda layer: -self.changes[layer])
        return tuple(sorted(most_changed[:2]))


def propose(seed: int, settings: Settings) -> Proposal:
    """Ask rank_layers about the shipped model, with a budget that pays for two of its layers."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        new = write_texts(Path(folder) / "new.jsonl", people(settings.new_people, start=SHIPPED_PEOPLE), seed)
        pilot = RankingSettings(budget=BUDGET, steps=settings.steps, batch_size=8, seed=seed)
        ranking = rank_layers(SHIPPED_MODEL, new, settings=pilot)
    changes = tuple(layer.change for layer in sorted(ranking.layers, key=lambda layer: layer.layer))
    return Proposal(seed, settings, time.process_time() - start, changes, ranking.tied)


def write_texts(file: Path, group: Sequence[Person], seed: int) -> Path:
    """Write texts about people as JSON lines: all their questions, and as many biographies as passes."""
    texts = itertools.islice(documents(group, random.Random(seed)), PASSES * len(group) * (QUESTIONS + 1))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def read_proposals(file: Path) -> list[Proposal]:
    """Read the records that a file holds; none where there is no file."""
    if not file.exists():
        return []
    return [_parse(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def keep_proposals(file: Path, settings: Settings, seeds: int) -> list[Proposal]:
    """Return what the pilots of several seeds say; those without a record run, and get one."""
    known = {proposal.seed: proposal for proposal in read_proposals(file) if proposal.settings == settings}
    for seed in range(seeds):
        if seed not in known:
            known[seed] = propose(seed, settings)
            append_record(file, known[seed])
    return [known[seed] for seed in range(seeds)]


def _parse(record: dict[str, Any]) -> Proposal:
    record["settings"] = Settings(**record["settings"])
    return Proposal(**record | {name: tuple(record[name]) for name in ("changes", "tied")})
