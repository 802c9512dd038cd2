"""What a model of benchmarks/language is scored on: perplexity, accuracy, and ranking, in both languages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.language.base import pack, shuffled
from benchmarks.language.packages import ENGLISH
from benchmarks.language.parallel import read_pairs
from benchmarks.language.precision import mixed
from benchmarks.language.text import Part, read_text

CANDIDATES = 4
# tokens of held-out text in each language
TOKENS: dict[Part, int] = {"dev": 16_384, "test": 65_536}
ITEMS = 120
ROWS = 16


@dataclass(frozen=True)
class Reading:
    """How well a model predicts a text.

    Attributes:
        nats: Per token.
        accuracy: Share of the tokens that it held to be the likeliest.
    """

    nats: float
    accuracy: float


@dataclass(frozen=True)
class Ranking:
    """Share of the items whose right answer a model held to be the likeliest of four; guessing gives 0.25.

    Attributes:
        old_continuation: The second half of a paragraph of the first language.
        new_continuation: The same of the second.
        translation: The paragraph of the second language, after that of the first.
        back_translation: The other way round.
    """

    old_continuation: float
    new_continuation: float
    translation: float
    back_translation: float


class Examination:
    """The texts on which every run of a comparison is scored."""

    def __init__(self, work: Path, tokenizer: PreTrainedTokenizerBase, second: str, context: int) -> None:
        self.tokenizer = tokenizer
        self.rows = {
            (language, part): pack(tokenizer, shuffled(read_text(work, language, part), 0), context, tokens)
            for language in (ENGLISH, second)
            for part, tokens in TOKENS.items()
        }
        self.second = second
        self.context = context
        pairs = read_pairs(work, second)
        self.pairs = random.Random(0).sample(pairs, min(ITEMS, len(pairs)))

    def read(self, model: Any, part: Part) -> tuple[Reading, Reading]:
        """Read held-out text of the first and the second language."""
        old, new = (read_rows(model, self.rows[language, part]) for language in (ENGLISH, self.second))
        return old, new

    def rank(self, model: Any) -> Ranking:
        """Let a model choose among candidates."""
        olds, news = [pair.old for pair in self.pairs], [pair.new for pair in self.pairs]
        halves = [[_halve(text) for text in texts] for texts in (olds, news)]
        across = [
            [(f"{begin}\n", end) for begin, end in zip(*both, strict=True)] for both in ((olds, news), (news, olds))
        ]
        return Ranking(*(self._rank(model, task) for task in (*halves, *across)))

    def parallel(self, model: Any) -> tuple[float, float]:
        """Accuracy of the next token in the paragraphs that mean the same, in both languages."""
        old, new = (
            self._accuracy(model, texts) for texts in ([p.old for p in self.pairs], [p.new for p in self.pairs])
        )
        return old, new

    def _accuracy(self, model: Any, texts: Sequence[str]) -> float:
        right = torch.cat([hits for _, hits in self._score_all(model, [("", text) for text in texts])])
        return float(right.double().mean())

    def _rank(self, model: Any, items: Sequence[tuple[str, str]]) -> float:
        """Each item is asked beside the endings of the next three."""
        # compared is how much the beginning helps, the nats of an ending after it less those of the ending alone: what
        # is likely anyhow is no answer (Holtzman et al. 2021, Surface Form Competition)
        alone = [float(nats.sum()) for nats, _ in self._score_all(model, [("", ending) for _, ending in items])]
        places = [[(place + offset) % len(items) for offset in range(CANDIDATES)] for place in range(len(items))]
        asked = [(items[candidates[0]][0], items[place][1]) for candidates in places for place in candidates]
        after = iter(self._score_all(model, asked))
        gains = [[float(next(after)[0].sum()) - alone[place] for place in candidates] for candidates in places]
        return fmean(item_gains.index(min(item_gains)) == 0 for item_gains in gains)

    def _score_all(self, model: Any, texts: Sequence[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
        # texts of a length together, because a row is padded to the longest beside it
        order = sorted(range(len(texts)), key=lambda place: sum(map(len, texts[place])))
        batches = [order[start : start + ROWS] for start in range(0, len(order), ROWS)]
        scores = [
            token_scores for batch in batches for token_scores in self._score(model, [texts[place] for place in batch])
        ]
        return [token_scores for _, token_scores in sorted(zip(order, scores, strict=True), key=lambda pair: pair[0])]

    def _score(self, model: Any, texts: Sequence[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
        """Nats of each token of the endings, and whether it was held to be the likeliest."""
        begun = [len(self.tokenizer(begin)["input_ids"]) - 1 for begin, _ in texts]
        rows = self.tokenizer(
            [begin + ending for begin, ending in texts],
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.context,
            return_tensors="pt",
        ).to(model.device)
        nats, right = score(model, rows["input_ids"], rows["attention_mask"])
        lengths = rows["attention_mask"].sum(-1).tolist()
        return [
            (nats[row, begin - 1 : end - 1], right[row, begin - 1 : end - 1])
            for row, (begin, end) in enumerate(zip((max(1, count) for count in begun), lengths, strict=True))
        ]


def read_rows(model: Any, rows: Tensor) -> Reading:
    """Read full rows of tokens, (rows, tokens)."""
    scores = [score(model, part.to(model.device)) for part in rows.split(ROWS)]
    nats, right = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return Reading(float(nats.double().mean()), float(right.double().mean()))


def score(model: Any, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Nats of every token but the first, and whether it was held to be the likeliest, both (rows, tokens - 1)."""
    with torch.inference_mode(), mixed(ids.device.type):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    wanted = ids[:, 1:]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    return nats.cpu(), (logits.argmax(-1) == wanted).cpu()


def _halve(text: str) -> tuple[str, str]:
    # between words; where a script has no spaces, between characters
    words = text.split()
    half = len(words) // 2
    if not half:
        return text[: len(text) // 2], text[len(text) // 2 :]
    return " ".join(words[:half]), " " + " ".join(words[half:])
