"""Greedy answers of a model to prompts, in batches of one length, shared by several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from scale_surgery.progress import Progress
from scale_surgery.running.loading import RUNNING, translated
from scale_surgery.running.loss import evaluating
from scale_surgery.running.own_generation import end_tokens, generate_with
from scale_surgery.running.processes import shared_out

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")


@dataclass(frozen=True)
class Prompts:
    """Prompts in the tokens of a model.

    Attributes:
        ids: Token ids of each prompt.
        lengths: Most new tokens of each answer.
        tokenizer: Tokenizer that decodes answers.
        ends: Tokens at which answers end, beside those of the model and of its tokenizer.
    """

    ids: Sequence[Sequence[int]]
    lengths: Sequence[int]
    tokenizer: Any
    ends: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        """Most tokens that are read and generated."""
        return sum(map(len, self.ids)) + sum(self.lengths)


@dataclass(frozen=True)
class Said:
    """An answer of a model: its text, and whether it ended within the limit."""

    text: str
    ended: bool


def answer_greedily(
    model: Any,
    prompts: Prompts,
    judge: Callable[[int, Said], T],
    batch_size: int,
    advance: Progress,
    processes: PartialState | None = None,
) -> list[T]:
    """Generate the answers of a model greedily, and return what `judge` makes of each, given its place.

    A batch has prompts of one length, so that no answer depends on padding. Several processes share the batches.

    Args:
        model: A loaded model, with its present choice of paths.
        prompts: Prompts in its tokens.
        judge: Called in the process that generated the answer.
        batch_size: Prompts in one batch.
        advance: Reports the tokens that were read or are generated at most.
        processes: The processes that share the batches; None for one.
    """
    batches = list(_batches(prompts, batch_size))

    def ask(batch: Sequence[int]) -> list[T]:
        given = _generate(model, prompts, batch)
        tokens = sum(len(prompts.ids[place]) + prompts.lengths[place] for place in batch)
        advance(tokens * (1 if processes is None else processes.num_processes))
        return [judge(place, said) for place, said in zip(batch, given, strict=True)]

    with evaluating(model), translated(*RUNNING):
        asked = shared_out(batches, ask, processes)
    places = [place for batch in batches for place in batch]
    judged = dict(zip(places, (answer for some in asked for answer in some), strict=True))
    return [judged[place] for place in sorted(judged)]


def _batches(prompts: Prompts, batch_size: int) -> Iterator[list[int]]:
    """Yield the places of prompts with equal numbers of tokens, the longest first."""

    def size(place: int) -> tuple[int, int]:
        return len(prompts.ids[place]), prompts.lengths[place]

    for _, alike in groupby(sorted(range(len(prompts.ids)), key=size, reverse=True), key=size):
        places = list(alike)
        yield from (places[start : start + batch_size] for start in range(0, len(places), batch_size))


def _generate(model: Any, prompts: Prompts, batch: Sequence[int]) -> list[Said]:
    import torch

    ids = torch.tensor([list(prompts.ids[place]) for place in batch], device=model.device)
    ends = {*end_tokens(model), prompts.tokenizer.eos_token_id, *prompts.ends} - {None}
    made = generate_with(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        max_new_tokens=prompts.lengths[batch[0]],
        do_sample=False,
        # rows that have ended are filled up with it
        pad_token_id=min(ends, default=0),
        eos_token_id=sorted(ends) or None,
    )
    rows = made[:, ids.shape[1] :].tolist()
    return [_read(prompts, place, row, ends) for place, row in zip(batch, rows, strict=True)]


def _read(prompts: Prompts, place: int, new: Sequence[int], ends: set[int]) -> Said:
    """Decode an answer after its prompt, since some tokenizers drop the blanks at the start of a text."""
    end = next((number for number, token in enumerate(new) if token in ends), None)
    before, whole = (
        prompts.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (prompts.ids[place], [*prompts.ids[place], *new[:end]])
    )
    return Said(str(whole.removeprefix(before)), end is not None)
