"""What rank_layers proposes for the shipped model and the new people of compare.py, kept as records.

The pilot reads what the runs train on, questions and biographies in styles that training draws: one, with as many
steps as the runs, of 8 sequences each. Old text, from which L_fp is estimated, is the same about known people.
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
from scale_surgery import PilotSettings, RankingRequest, Request, rank_layers
from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, Person, people
from scale_surgery.training.ranking import SCORES, Ranking

PASSES = 4  # over each group of people, every biography in another style each time
QUESTIONS = 6


@dataclass(frozen=True)
class Proposal:
    """What one pilot says, lowest layer first.

    Attributes:
        seed: Of the texts and of the pilot.
        settings: Of the runs that it is compared with.
        seconds: Processor time of all of it.
        relative_norm: Relative norm of each layer's update.
        effective_rank: Effective rank of each layer's update.
        orders: Layers, best first, by the name of the score.
        worth: What W12 of each layer is worth, by what W12 stands in.
        preserved_depth: Proposed L_fp, by what W12 stands in.
    """

    seed: int
    settings: Settings
    seconds: float
    relative_norm: tuple[float, ...]
    effective_rank: tuple[float, ...]
    orders: dict[str, tuple[int, ...]]
    worth: dict[str, tuple[float, ...]]
    preserved_depth: dict[str, int]

    def pair(self, score: str) -> tuple[int, ...]:
        """The two best layers by a score, ascending."""
        return tuple(sorted(self.orders[score][:2]))


def propose(seed: int, settings: Settings) -> Proposal:
    """Ask rank_layers about the shipped model, for every score and for every place of W12."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        new = write_texts(Path(folder) / "new.jsonl", people(settings.new_people, start=SHIPPED_PEOPLE), seed)
        old = write_texts(Path(folder) / "old.jsonl", people(settings.old_texts), seed)
        ranking = ask(new, old, PilotSettings(pilots=1, steps=settings.steps, batch_size=8, seed=seed), "both")
        # the estimate needs no pilot, and only the first ranking is kept
        attention = ask(new, old, PilotSettings(pilots=1, steps=1, batch_size=8, seed=seed), "attn")
    estimates = {"attn": attention.depth, "both": ranking.depth}
    return Proposal(
        seed,
        settings,
        time.process_time() - start,
        tuple(layer.relative_norm for layer in ranking.layers),
        tuple(layer.effective_rank for layer in ranking.layers),
        {score: ranking.order(score) for score in SCORES},
        {scope: tuple(layer.worth for layer in depth.layers) for scope, depth in estimates.items()},
        {scope: depth.preserved_depth for scope, depth in estimates.items()},
    )


def ask(new: Path, old: Path, pilot: PilotSettings, scope: str) -> Ranking:
    """Rank all layers, with a budget that pays for all of them."""
    request = Request("all", method="scale", variant="adapt", collaborate=scope)
    return rank_layers(SHIPPED_MODEL, [new], pilot, RankingRequest(request, budget="100%"), old=[old])


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
    known = {found.seed: found for found in read_proposals(file) if found.settings == settings}
    for seed in range(seeds):
        if seed not in known:
            known[seed] = propose(seed, settings)
            append_record(file, known[seed])
    return [known[seed] for seed in range(seeds)]


def _parse(record: dict[str, Any]) -> Proposal:
    record["settings"] = Settings(**record["settings"])
    for name in ("relative_norm", "effective_rank"):
        record[name] = tuple(record[name])
    for name in ("orders", "worth"):
        record[name] = {key: tuple(values) for key, values in record[name].items()}
    return Proposal(**record)
