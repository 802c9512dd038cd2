"""Settings of a comparison, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from scale_surgery.evidence.rehearsed import ITSELF
from scale_surgery.fields import NO_OPTION, Count, Range, Seed, SequenceLength
from scale_surgery.training.settings import AboveZero, TrainingSettings

MethodName = Literal["full", "lora", "osf", "preserve", "adapt", "gated", "grow", "routed"]
# sequences in a step: at most so many, and fewer for this many steps
MOST_ROWS, LEAST_STEPS = 8, 48
# folders with the parts of a text, by its side
FOLDERS = {"new": "texts-new", "old": "texts-old"}
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)


@dataclass(frozen=True)
class CompareSettings:
    """Settings that all methods of a comparison share.

    Attributes:
        methods: Methods to compare. full: fine-tune all parameters. lora: adapters of PEFT on all linear layers of
            MLPs. osf: orthogonal subspace fine-tuning of PEFT. preserve, adapt, gated, grow: expansions. routed: adapt
            without rehearsal, with a router.
        tokens: Tokens that each method learns. A shorter text is read again.
        rates: Learning rates that are tried for each method, on a 24th of the tokens, in at least 8 steps: the
            default, a quarter of it and, with 3, four times the default if the quarter is not better.
        sequence_length: Tokens in a sequence. Default: the model's context length, at most 512.
        batch_size: Sequences in one optimizer step. Default: 8, or fewer so that there are 48 steps.
        prompts: Instructions that MODEL answers as own samples, through its chat template if there is one: a file, one
            a line, or JSONL with {"prompt"}, {"system", "prompt"} or {"messages"}. Default: 200 of this package, or,
            without a chat template, the token that begins a text.
        rank: Rank of the adapters (lora).
        rehearsal_weight: Weight of the divergence from the base on text that it sampled.
        seed: Seed of own samples, new tensors and training. The held-out text does not depend on it.
    """

    methods: tuple[MethodName, ...] = METHOD_NAMES
    tokens: Count = 100_000
    rates: Annotated[int, Range(least=1, most=3)] = 2
    sequence_length: SequenceLength | None = None
    batch_size: Count | None = None
    prompts: str | None = None
    rank: Count = field(default=32, metadata=NO_OPTION)
    rehearsal_weight: AboveZero = field(default=1.0, metadata=NO_OPTION)
    seed: Seed = 0

    def training(self, length: int) -> TrainingSettings:
        """Return the settings of training that the methods share, with rehearsal of own samples."""
        return TrainingSettings(
            sequence_length=length,
            batch_size=self.batch_size or max(1, min(MOST_ROWS, self.tokens // (length * LEAST_STEPS))),
            rehearse=(ITSELF,),
            rehearsal_weight=self.rehearsal_weight,
            seed=self.seed,
        )
