"""Ask a model probes: `evaluate --probes` asks and judges; here answers come with their probability, or are sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_surgery.evidence.probe_file import Probe

TOGETHER, LONGEST = 32, 12


def write_probes(file: Path, probes: Sequence[Probe]) -> None:
    """Write probes, one to a line."""
    defaults = {field.name: field.default for field in fields(Probe)}
    lines = [{name: value for name, value in asdict(probe).items() if value != defaults[name]} for probe in probes]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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
                **batch,
                **sampling,
                max_new_tokens=LONGEST,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=tokenizer.pad_token_id,
            )
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
    return Answer(text.split("\n")[0], float(chances[:count].sum().exp()))
