"""Choose the probes: of the candidates, those that the base answers. Run once, before the first training run.

    python -m benchmarks.gemma.choose_probes .real/gemma-3-270m

It writes probes.jsonl beside this file and prints its sha256.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gemma.asking import answers, write_probes
from benchmarks.gemma.candidates import facts, functions, sums, translations
from scale_surgery.evidence.probe_file import Probe
from scale_surgery.evidence.probe_scores import judge

PROBES = Path(__file__).with_name("probes.jsonl")
# of each group at most so many
MOST = 300
# four samples are alike with even chances
SURE = 0.5**0.25
# most seconds for the code of one probe
SECONDS = 5.0


def choose(model: Any, tokenizer: Any, choice: random.Random) -> list[Probe]:
    """Return what the base answers: facts that it is sure of, the rest right."""
    chosen = [_sure(model, tokenizer, list(facts()))]
    for group in (sums(choice), translations(), functions()):
        probes = list(group)
        given = answers(model, tokenizer, [probe.prompt for probe in probes])
        chosen.append(
            [probe for probe, answer in zip(probes, given, strict=True) if judge(probe, answer.text, SECONDS).is_right]
        )
    return [probe for group in chosen for probe in _some(group, choice)]


def _sure(model: Any, tokenizer: Any, probes: Sequence[Probe]) -> list[Probe]:
    given = answers(model, tokenizer, [probe.prompt for probe in probes])
    return [
        replace(probe, answer=answer.text.strip())
        for probe, answer in zip(probes, given, strict=True)
        if answer.text.strip() and answer.probability >= SURE
    ]


def _some(group: Sequence[Probe], choice: random.Random) -> list[Probe]:
    return choice.sample(group, min(MOST, len(group)))


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path))
def main(base: Path) -> None:
    """Choose the probes that BASE answers."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    probes = choose(model, AutoTokenizer.from_pretrained(base), random.Random(0))
    write_probes(PROBES, probes)
    click.echo(f"{dict(Counter(probe.group for probe in probes))}")
    click.echo(hashlib.sha256(PROBES.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
