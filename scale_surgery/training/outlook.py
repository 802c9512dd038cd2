"""What a training run can teach: what is known before its first step, and what the loss says after its last one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import counted
from scale_surgery.training.arguments import number_of_steps, warmup_steps
from scale_surgery.training.settings import TrainingSettings

if TYPE_CHECKING:
    from scale_surgery.running.sequences import Sequences

# AdamW moves a number by about the learning rate a step. Under the default schedule fifty steps can move it by half of
# 50 x 0.001, which is as large as weights usually are (initializer_range 0.02), and the new blocks begin at zero. A
# lower rate needs more steps; a higher one needs no fewer, for the first steps are as large whatever the text
ENOUGH_STEPS = 50
ENOUGH_TRAVEL = ENOUGH_STEPS * TrainingSettings.learning_rate
USUAL_WEIGHT = 0.02
# products of decimal numbers differ by this
ROUNDING = 1e-9
# fewer are learned by heart, not from
ENOUGH_TOKENS = 1000
# the same tokens are measured before and after, so what differs is no chance; less than this share is not worth a run
LEAST_FALL = 0.01
# name of the sample of the texts to learn, beside "old" and "new"
SAMPLE = "text"
# before and after a run one in ten of the sequences that it reads is measured: at least as many as one step reads, and
# so many at most
SAMPLED_SHARE = 10
MOST_SAMPLED = 64


@dataclass(frozen=True)
class Outlook:
    """What a run will do, known before its first step.

    Attributes:
        steps: Optimizer steps.
        warmup_steps: Those in which the learning rate rises.
        sequences: Sequences to learn.
        tokens: Tokens in them that are learned.
        passes: How often they are read.
        warnings: Why it can teach little, and what to do.
        rehearses: On what it stays what its base is; nothing where it is not asked to.
    """

    steps: int
    warmup_steps: int
    sequences: int
    tokens: int
    passes: float
    warnings: tuple[str, ...]
    rehearses: str = ""


@dataclass(frozen=True)
class LossChange:
    """The loss before the first step and after the last one: the same tokens, measured by the same code.

    Attributes:
        text: What was measured: "new" for the new text of --eval-data, "text" for some of the sequences to learn.
        sequences: How many sequences were measured.
        before: Nats per token before the first step; None where the log does not say.
        after: Nats per token after the last step.
    """

    text: str
    sequences: int
    before: float | None
    after: float


def look_ahead(settings: TrainingSettings, learned: Sequences, processes: int) -> Outlook:
    """Say what a run will do, and warn where it can teach little.

    Args:
        settings: What the user set.
        learned: What is learned.
        processes: Processes that share it.
    """
    steps = number_of_steps(settings, len(learned), processes)
    together = settings.batch_size * settings.gradient_accumulation * processes
    warnings = (
        *_few_steps(settings, steps, len(learned)),
        *_short_steps(settings.learning_rate, max(steps, ENOUGH_STEPS)),
        *_few_tokens(learned.scored),
    )
    passes = steps * together / len(learned) if settings.steps else settings.epochs
    rehearses = _rehearses(settings)
    return Outlook(steps, warmup_steps(settings, steps), len(learned), learned.scored, passes, warnings, rehearses)


def _rehearses(settings: TrainingSettings) -> str:
    if not settings.rehearse:
        return ""
    drawn = f"{counted(settings.rehearsal_samples, 'sample')} of the base"
    which = drawn if settings.rehearses_itself else "the given text"
    learned = "sequence" if settings.batch_size == 1 else f"{settings.batch_size:,} sequences"
    return f"{which}, {settings.rehearsed_rows:,} beside each {learned} to learn"


def _few_steps(settings: TrainingSettings, steps: int, sequences: int) -> Iterator[str]:
    if steps < ENOUGH_STEPS:
        epochs = math.ceil(settings.epochs * ENOUGH_STEPS / steps)
        longer = f"--steps {ENOUGH_STEPS}" if settings.steps else f"--epochs {epochs}, or --steps {ENOUGH_STEPS}"
        larger = {"--batch-size": settings.batch_size, "--gradient-accumulation": settings.gradient_accumulation}
        can_split = sequences > 1 and not settings.steps
        smaller = " and ".join(name for name, number in larger.items() if number > 1 and can_split)
        also = f"; a smaller {smaller} makes more steps of the same text" if smaller else ""
        yield (
            f"{counted(steps, 'optimizer step')} can teach little, at least {ENOUGH_STEPS} are usual. "
            f"Give {longer}{also}."
        )
    rising = warmup_steps(settings, steps)
    if rising * 2 > steps > 1:
        yield f"the learning rate still rises in {rising} of {counted(steps, 'step')}. Give a smaller --warmup."


def _short_steps(rate: float, steps: int) -> Iterator[str]:
    if (found := steps * rate) < ENOUGH_TRAVEL * (1 - ROUNDING):
        yield (
            f"{counted(steps, 'step')} at a learning rate of {rate:g} {'moves' if steps == 1 else 'move'} a weight by "
            f"about {found / 2:.2g}, and weights are usually about {USUAL_WEIGHT:g}, so they can teach little. Give "
            f"--learning-rate {_round_up(ENOUGH_TRAVEL / steps):g}, or --steps "
            f"{math.ceil(ENOUGH_TRAVEL / rate * (1 - ROUNDING))}."
        )


def _round_up(number: float) -> float:
    """Two figures, no less than a number above zero."""
    scale: float = 10.0 ** (1 - math.floor(math.log10(number)))
    return math.ceil(number * scale * (1 - ROUNDING)) / scale


def _few_tokens(tokens: int) -> Iterator[str]:
    if tokens < ENOUGH_TOKENS:
        yield (
            f"the texts have {counted(tokens, 'token')} to learn, which a model learns by heart and not from; at least "
            f"{ENOUGH_TOKENS:,} are usual. Give more text with --data."
        )


def sample_of(learned: Sequences, outlook: Outlook) -> Sequences:
    """Choose what is measured before and after a run where there is no new text: few, evenly spread, the same always.

    The same too however many processes share a step.

    Args:
        learned: What is learned.
        outlook: What the run will do with it.
    """
    read = round(outlook.passes * len(learned))
    share = max(read // SAMPLED_SHARE, math.ceil(read / outlook.steps), 1)
    return learned.some(min(share, MOST_SAMPLED))


def compare_losses(log: Sequence[Mapping[str, Any]], sides: Mapping[str, Sequences]) -> LossChange | None:
    """Say how the loss changed, as the log has it; None where nothing was measured that is to be learned.

    Args:
        log: Log of the run.
        sides: What was measured in it.
    """
    text = "new" if "new" in sides else SAMPLE
    key = f"{text}_nats_per_token"
    found = [entry for entry in log if key in entry]
    if not found:
        return None
    before = found[0][key] if found[0]["step"] == 0 else None
    return LossChange(text, len(sides[text]), before, found[-1][key])


def disappointments(change: LossChange | None) -> tuple[str, ...]:
    """Say that a run taught nothing, where the loss did not fall or hardly fell."""
    if change is None or change.before is None or change.after < change.before * (1 - LEAST_FALL):
        return ()
    verb, advice = "hardly fell", "Train for more steps, or raise --learning-rate."
    if change.after > change.before:
        verb, advice = "rose", "Lower --learning-rate."
    which = "the new text" if change.text == "new" else "the texts to learn"
    return (f"the loss on {which} {verb}, from {change.before:.4f} to {change.after:.4f}. {advice}",)
