"""Asking a model: an answer is right when every token of it is the likeliest one, so that greedy decoding gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.streams.tasks import Asked

TOGETHER = 128


class Examiner:
    """Asks models in tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def accuracy(self, model: Any, asked: Sequence[Asked]) -> float:
        """The share of questions that a model answers as wanted."""
        return sum(self.right(model, asked)) / len(asked)

    def right(self, model: Any, asked: Sequence[Asked]) -> list[bool]:
        """Whether each question is answered as wanted."""
        # of like length together, so that little is padding
        order = sorted(range(len(asked)), key=lambda place: len(asked[place].text))
        verdicts: dict[int, bool] = {}
        for start in range(0, len(order), TOGETHER):
            places = order[start : start + TOGETHER]
            verdicts |= dict(zip(places, self._right(model, [asked[place] for place in places]), strict=True))
        return [verdicts[place] for place in range(len(asked))]

    def _right(self, model: Any, asked: Sequence[Asked]) -> list[bool]:
        prompts = self.tokenizer([question.prompt for question in asked])["input_ids"]
        answers = self.tokenizer([f" {question.answer}" for question in asked], add_special_tokens=False)["input_ids"]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        likeliest = self.likeliest(model, rows)
        return [
            predictions[len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer
            for predictions, prompt, answer in zip(likeliest, prompts, answers, strict=True)
        ]

    def likeliest(self, model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
        """The likeliest token after each token of some rows, which are padded at their ends; (rows, most tokens)."""
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        model.eval()
        with torch.inference_mode():
            logits: Tensor = model(**batch, use_cache=False).logits
        return logits.argmax(-1)
