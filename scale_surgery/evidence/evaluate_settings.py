"""Settings of `evaluate`: windows of texts, strengths, probes, instructions, and the limit of forgetting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from scale_surgery.fields import NO_OPTION, Count, Range, SequenceLength

# most tokens of an answer
OF_PROBE, OF_INSTRUCTION = 32, 256


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of `evaluate`.

    Attributes:
        sequence_length: Most tokens of a window. Default: the shortest context, at most 1024.
        step: Tokens from one window of a longer text to the next. Default: half of that.
        strengths: Strengths at which each expansion is measured too, from 0 to 1; see `set_strength`.
        probes_file: JSONL file of probes: prompts with a rule that judges the answers of base and model, to count what
            is kept. An object a line, {"prompt", "kind", "answer"}, of kind exact, number or python, optionally with
            {"group", "test", "max_new_tokens"}.
        instructions: Instructions to answer greedily, to count the answers that end by themselves, that repeat
            themselves (one passage three times in a row at the end), or that are in another language than the base's:
            shipped for 200 of this package, or a file, one a line, or JSONL with {"prompt"}, {"system", "prompt"} or
            {"messages"}. They go through the chat template, if there is one.
        max_new_tokens: Most tokens of the answer to a probe (default: 32) or to an instruction (default: 256).
        run_python: Run the answers to probes of kind python as programs of this user, without a sandbox.
        python_seconds: Most seconds for the code of one probe.
        max_forgetting: Most forgetting of each model. With --probes it is the share of the base's right answers that
            the model lost, from 0 to 1, otherwise forgetting on old text in nats per token. Above it, or if it cannot
            be measured, the exit code is 1; the output is still written.
    """

    sequence_length: SequenceLength | None = None
    step: Count | None = field(default=None, metadata=NO_OPTION)
    strengths: tuple[float, ...] = field(default=(), metadata={"option": "strength"})
    probes_file: Path | None = field(default=None, metadata={"option": "probes"})
    instructions: str | None = None
    max_new_tokens: Count | None = None
    run_python: bool = False
    python_seconds: Annotated[float, Range(above=0)] = 10.0
    max_forgetting: Annotated[float, Range(least=0)] | None = None
