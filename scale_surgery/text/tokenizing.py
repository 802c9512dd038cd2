"""Token sequences to train on and to measure with: documents become tokens, packed or cut into windows.

In questions and conversations only answers are learned and scored. Tokens are stored in flat arrays: a corpus takes
eight bytes a token in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scale_surgery.errors import DataError, Problem
from scale_surgery.text.answers import ChatReader
from scale_surgery.text.documents import LONG_TEXT, Document, in_pieces
from scale_surgery.text.sequences import IGNORED, NO_TEXT, NOTHING_SCORED, PROMPT, Sequences, from_arrays

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS_AT_ONCE = 1000
# candidate prefixes that make a text's first token a continuation; the empty one always fits
BEFORE = ("\n", ":", "a", "")


def tokenize(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    learn_prompts: bool = False,
    before: Sequence[int] = (),
) -> Sequences:
    """Turn documents into token sequences, with the tokenizer's own start token and an end token after each.

    Args:
        documents: Texts, questions with answers, and conversations.
        tokenizer: A tokenizer.
        learn_prompts: Whether prompts are scored too.
        before: Tokens before each document that are not scored; see `token_before`.
    """
    ids, labels, starts = array("i", before), array("i", [IGNORED] * len(before)), [0]
    # a conversation is exactly the chat template's output, without added tokens
    for document, some, scored in read_tokens(documents, tokenizer, learn_prompts=learn_prompts):
        ids.extend(some)
        labels.extend(scored)
        if not document.goes_on:
            starts.append(len(ids))
            ids.extend(before)
            labels.extend([IGNORED] * len(before))
    del ids[starts[-1] :], labels[starts[-1] :]
    if not ids:
        raise DataError(NO_TEXT)
    return from_arrays(ids, labels, starts)


def read_tokens(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, learn_prompts: bool = False
) -> Iterator[tuple[Document, list[int], list[int]]]:
    """Generate documents, token ids and labels (IGNORED or PROMPT if not scored); long documents come in pieces."""
    is_middle, chats, start = False, ChatReader(tokenizer), start_tokens(tokenizer) if learn_prompts else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for some in in_groups(chain.from_iterable(map(in_pieces, documents))):
        texts = _tokenize_some([document for document in some if document.chat is None], tokenizer)
        for document in some:
            if document.chat is not None:
                ids, scored = chats.read(document.chat, document.source)
            else:
                prompt, text = next(texts)
                # a text may bring its own start and end token, as what a template wrote does
                is_whole = document.goes_on or (end and text[-1:] == end)
                prompt, text = [] if is_middle else prompt, text if is_whole else text + end
                brings_start = not document.prompt and prompt and text[: len(prompt)] == prompt
                text = text[len(prompt) :] if brings_start else text
                # without a prompt there is at most a start token
                ids, scored = prompt + text, [PROMPT if document.prompt else IGNORED] * len(prompt) + text
            if not (ids or is_middle or document.goes_on):
                raise DataError(Problem("document-without-token", document.source))
            if learn_prompts and not document.is_plain:
                # in a packed window, the text before would learn to predict the start token
                begins = len(start) if ids[: len(start)] == start else 0
                learned = [id_ if label == PROMPT else label for id_, label in zip(ids, scored, strict=True)]
                scored = [IGNORED] * begins + learned[begins:]
            yield document, ids, scored
            is_middle = document.goes_on


def in_groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches for the tokenizer."""
    some: list[Document] = []
    size = 0
    for document in documents:
        if some and (len(some) == DOCUMENTS_AT_ONCE or size > LONG_TEXT):
            yield some
            some, size = [], 0
        some.append(document)
        size += len(document.prompt) + len(document.text)
    if some:
        yield some


def _tokenize_some(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    """Generate the ids of each prompt, and the ids of its text as a continuation."""
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    plain = [document.text for document in documents if not document.prompt]
    alone = iter(tokenizer(plain, **options)["input_ids"] if plain else ())
    whole = iter(tokenize_prompts([each.prompt + each.text for each in documents if each.prompt], tokenizer))
    for document, prompt in zip(
        documents, tokenize_prompts([each.prompt for each in documents], tokenizer), strict=True
    ):
        yield prompt, _behind(prompt, next(whole), document.text, tokenizer) if document.prompt else next(alone)


def _behind(prompt: list[int], whole: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a text after a prompt. The prompt keeps its ids, since an answering model reads those."""
    # some tokenizers would put a space before a text that is tokenized alone
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    # a token spans the end of the prompt and the start of the text
    starts = tokenize_prompts(BEFORE, tokenizer)
    wholes = tokenize_prompts([before + text for before in BEFORE], tokenizer)
    return next(ids[len(start) :] for start, ids in zip(starts, wholes, strict=True) if ids[: len(start)] == start)


def tokenize_prompts(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Turn prompts into token ids: with the tokenizer's start token, even if empty, and without an end token."""
    if not prompts:
        return []
    # what the tokenizer puts around every text: perhaps a start token, and for some an end token
    read: list[list[int]] = tokenizer([*prompts, ""], return_attention_mask=False, verbose=False)["input_ids"]
    *ids, around = read
    return [_without_frame(prompt, around, tokenizer) for prompt in ids]


def without_frame(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that `tokenize_prompts` gives for a prompt, from those that the tokenizer gives for it."""
    return _without_frame(ids, tokenizer([""], return_attention_mask=False, verbose=False)["input_ids"][0], tokenizer)


def _without_frame(ids: list[int], around: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    special = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id}
    ends = next((place for place, token in enumerate(reversed(around)) if token not in special), len(around))
    start = around[: len(around) - ends]
    # a text may begin with the start token itself
    is_doubled = bool(start) and ids[: 2 * len(start)] == start * 2
    return ids[len(start) * is_doubled : len(ids) - ends]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens with which a tokenizer starts every text; often one or none."""
    (start,) = tokenize_prompts([""], tokenizer)
    return start


def token_before(tokenizer: PreTrainedTokenizerBase, of_base: PreTrainedTokenizerBase) -> list[int]:
    """Return a token to put before each text if a model and its base read it in different tokens; often none.

    Nothing predicts the first token of a text. A new token may be a text's first and stand for several of the base, so
    the model would have to predict less of the text. A start token prevents that.
    """
    if tokenizer is of_base or start_tokens(tokenizer) or of_base.eos_token_id is None:
        return []
    return [of_base.eos_token_id]


def pack(sequences: Sequences, length: int, start: Sequence[int]) -> Sequences:
    """Cut the joined sequences into windows of equal length; the last may be shorter.

    The first tokens of each window become the start tokens of a text. A model that always read them in its
    pretraining, such as Gemma, predicts much worse without them. Nothing predicts the first token of a window, so one
    start token takes none from what is learned; each further one takes one.

    Args:
        sequences: Token sequences.
        length: Tokens of a window.
        start: Tokens with which the tokenizer starts every text.
    """
    total, ids, labels = len(sequences.ids), sequences.ids.clone(), sequences.labels.clone()
    for place, token in enumerate(start[:length]):
        ids[place::length] = token
        scored = labels[place::length] >= 0
        labels[place::length][scored] = IGNORED
    return Sequences(ids, labels, (*range(0, total, length), total))


def without_unscored(sequences: Sequences) -> Sequences:
    """Drop sequences without scored tokens, such as a window inside a long prompt."""
    scored = scored_ones(sequences)
    if not len(scored):
        raise DataError(NOTHING_SCORED)
    return scored


def scored_ones(sequences: Sequences) -> Sequences:
    """Return the sequences with scored tokens; there may be none."""
    starts = torch.tensor(sequences.starts)
    lengths = starts.diff()
    is_scored = sequences.labels >= 0
    is_scored[starts[:-1][lengths > 0]] = False
    before = torch.cat((torch.zeros(1, dtype=torch.long), is_scored.cumsum(0)))
    kept = before[starts[1:]] > before[starts[:-1]]
    tokens = kept.repeat_interleave(lengths)
    ends = lengths[kept].cumsum(0).tolist()
    return Sequences(sequences.ids[tokens], sequences.labels[tokens], (0, *ends))


def stride(sequences: Sequences, length: int, step: int, start: Sequence[int]) -> Sequences:
    """Cut long sequences into overlapping windows, and score each token once.

    The first tokens of a window from the middle of a text become the start tokens of a text, as in `pack`: they are
    context, which the window before has scored.

    Args:
        sequences: Token sequences.
        length: Most tokens of a window.
        step: Tokens from one window to the next.
        start: Tokens with which the tokenizer starts every text.
    """
    ids, labels, starts = [], [], [0]
    # with so many tokens in common with the window before
    overlap = length - step
    begin = torch.tensor(start[:overlap], dtype=torch.int32)
    for first, end in pairwise(sequences.starts):
        # a token after the first window is predicted from at least `length - step` tokens before it
        for left in _places(first, end, length, step):
            window = slice(left, min(left + length, end))
            ids.append(sequences.ids[window])
            labels.append(sequences.labels[window].clone())
            if left > first:
                ids[-1] = torch.cat((begin, ids[-1][len(begin) :]))
                known = labels[-1][:overlap]
                known[known >= 0] = IGNORED  # scored in the previous window; PROMPT stays, to locate the answer
            starts.append(starts[-1] + len(ids[-1]))
    return Sequences(torch.cat(ids), torch.cat(labels), tuple(starts))


def _places(start: int, end: int, length: int, step: int) -> range:
    """Return the start of each window of a sequence."""
    return range(start, max(start + 1, end - length + step), step)


def number_windows(sequences: Sequences, length: int, step: int) -> list[int]:
    """Return the index of the sequence of each window of `stride`, from 0."""
    places = (_places(start, end, length, step) for start, end in pairwise(sequences.starts))
    return [number for number, lefts in enumerate(places) for _ in lefts]


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join sequences into a right-padded batch."""
    ids, labels = pad(rows, "input_ids"), pad(rows, "labels")
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    # nothing predicts a first token, but the Trainer of transformers 5.5 counts it among those that a loss is a mean of
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels.masked_fill(labels < 0, IGNORED), "attention_mask": mask}


def pad(rows: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Join ids or labels of sequences into one right-padded tensor."""
    # any id can pad: it is masked and not scored
    value = IGNORED if name == "labels" else 0
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
