"""Ask a model probes: prompts whose answers are compared as text, as a number, or by running them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

TOGETHER, LONGEST, SECONDS = 32, 12, 5
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Probe:
    """A prompt, the answer that counts as right, and how the two are compared; a line of `evaluate --probes`."""

    group: str
    prompt: str
    answer: str
    kind: Literal["exact", "number", "python"]
    test: str = ""


def read_probes(file: Path) -> list[Probe]:
    """Read the probes of a file."""
    return [Probe(**{"answer": ""} | json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def write_probes(file: Path, probes: Sequence[Probe]) -> None:
    """Write probes, one to a line."""
    lines = [json.dumps({name: value for name, value in asdict(probe).items() if value}) for probe in probes]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True)
class Answer:
    """The line that follows a prompt, and the probability that the model gives it, its end included."""

    text: str
    probability: float


def answers(model: Any, tokenizer: Any, prompts: Sequence[str], *, samples: bool = False) -> list[Answer]:
    """Let a model answer, greedily or by sampling at temperature 1; an answer is one line of at most twelve tokens."""
    torch.manual_seed(0)
    tokenizer.padding_side = "left"
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0} if samples else {"do_sample": False}
    # prompts of like length together, so that little is padded
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    made: dict[int, Answer] = {}
    for start in range(0, len(order), TOGETHER):
        places = order[start : start + TOGETHER]
        batch = tokenizer([prompts[place] for place in places], padding=True, return_tensors="pt")
        with torch.inference_mode():
            written = model.generate(
                **batch, **sampling, max_new_tokens=LONGEST, return_dict_in_generate=True,
                output_logits=True, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        tokens = written.sequences[:, batch["input_ids"].shape[1] :]
        chances = torch.stack(written.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        for place, row, chance in zip(places, tokens, chances, strict=True):
            made[place] = _line(tokenizer, row, chance)
    return [made[place] for place in range(len(prompts))]


def _line(tokenizer: Any, tokens: Tensor, chances: Tensor) -> Answer:
    """Cut an answer after its line."""
    pieces = [tokenizer.decode(token, skip_special_tokens=True) for token in tokens]
    ends = (place for place, piece in enumerate(pieces) if "\n" in piece or not piece)
    count = next(ends, len(pieces) - 1) + 1
    text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
    return Answer(text.split("\n")[0].strip(), float(chances[:count].sum().exp()))


def is_right(probe: Probe, answer: str) -> bool:
    """Judge an answer."""
    if probe.kind == "exact":
        return answer.casefold().rstrip(".") == probe.answer.casefold().rstrip(".")
    if probe.kind == "number":
        return (found := NUMBER.search(answer)) is not None and found[0] == probe.answer
    return runs(f"{probe.prompt} {answer}\n\n{probe.test}\n")


def runs(code: str) -> bool:
    """Run code by itself, for a few seconds, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
