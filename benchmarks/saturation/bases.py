"""Bases of one size that know few or many people, and what they write themselves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.saturation.facts import BEGIN, END, PAD, ROW, WORDS, facts, rows

ARCHITECTURE = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
# inner width of a base that has from the start as many parameters as another has with an expansion
LARGER = 224
TOGETHER = 64
RATE = 5e-3
WARM_UP = 0.07
SAMPLED_TOGETHER = 1024


@dataclass(frozen=True)
class Base:
    """A base: the people that it was shown, how often, its inner width, and the seed of weights and order."""

    people: int
    passes: int
    inner_width: int = 128
    seed: int = 0

    def folder(self, work: Path) -> Path:
        """Return the folder of the base, which is trained if there is none."""
        folder = work / f"base-{self.people}-{self.passes}-{self.inner_width}-{self.seed}"
        if not folder.exists():
            unfinished = folder.with_suffix(".partial")
            self._train().save_pretrained(unfinished)
            unfinished.rename(folder)
        return folder

    def _train(self) -> Any:
        torch.manual_seed(self.seed)
        model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE | {"intermediate_size": self.inner_width}))
        steps = self.passes * self.people // TOGETHER
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
        )
        shown = rows(facts(self.people), TOGETHER, random.Random(self.seed))
        for _, batch in zip(range(steps), shown, strict=False):
            model(input_ids=batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model

    def samples(self, work: Path, count: int) -> Tensor:
        """Return rows (count, 19) that the base writes from its begin token at temperature 1, written once."""
        file = self.folder(work) / f"samples-{count}.safetensors"
        if not file.exists():
            model = LlamaForCausalLM.from_pretrained(self.folder(work))
            torch.manual_seed(self.seed)
            with torch.inference_mode():
                written = [_write(model, len(some)) for some in torch.arange(count).split(SAMPLED_TOGETHER)]
            unfinished = file.with_suffix(".partial")
            save_file({"rows": torch.cat(written)}, unfinished)
            unfinished.rename(file)
        return load_file(file)["rows"]


def _write(model: Any, count: int) -> Tensor:
    written = torch.full((count, 1), BEGIN)
    while written.shape[1] < ROW:
        chances = model(input_ids=written, logits_to_keep=1).logits[:, -1].softmax(-1)
        written = torch.cat((written, torch.multinomial(chances, 1)), 1)
    return written
