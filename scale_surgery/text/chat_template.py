"""Conversations as token ids: a tokenizer's chat template writes them, and says which tokens are answers.

A template may mark answers by `{% generation %}`. Otherwise an answer is the text that the template adds to the
messages before it and to the words that ask for an answer, which have to be the beginning of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from scale_surgery.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED = re.compile(r"\{%[-+]?\s*generation\b")


def tokenize_chat(
    chat: Mapping[str, Any], source: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation by its chat template alone, and for each token whether it belongs to an answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{source}: is a conversation, and this model's tokenizer has no chat template. Put a "
            'chat_template.jinja beside the tokenizer\'s files, or give {"prompt", "completion"}.'
        )
    if not tokenizer.is_fast:
        raise DataError(
            f"{source}: is a conversation, and this model's tokenizer, which is written in Python, does not "
            'say where tokens stand. Give {"prompt", "completion"}.'
        )
    messages, tools = chat["messages"], chat.get("tools")

    def fill(some: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return tokenizer.apply_chat_template(cast(Any, some), tools=tools, **options)

    try:
        if MARKED.search(tokenizer.get_chat_template(tools=tools)):
            filled = fill(messages, return_dict=True, return_assistant_tokens_mask=True)
            return filled["input_ids"], list(map(bool, filled["assistant_masks"]))
        whole = fill(messages, tokenize=False)
        is_answer = bytearray(len(whole) + 1)
        for start, end in _answers(messages, source, whole, fill):
            is_answer[start:end] = b"\1" * (end - start)
    except DataError:
        raise
    except Exception as error:  # templates may raise anything
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise DataError(
            f"{source}: the chat template does not take the conversation ({reason}). Change its messages."
        ) from error
    encoded = tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"], [bool(is_answer[start]) for start, _ in encoded["offset_mapping"]]


def _answers(
    messages: Sequence[Mapping[str, Any]], source: str, whole: str, fill: Callable[..., Any]
) -> Iterator[tuple[int, int]]:
    """Where answers begin and end in the whole text; a first message answers nothing."""
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or not place:
            continue
        prompt = fill(messages[:place], tokenize=False, add_generation_prompt=True)
        closed = fill(messages[: place + 1], tokenize=False)
        if not whole.startswith(closed):
            # some templates, such as Qwen3's, drop the thoughts of all answers but the last
            closed = _without_thought(prompt, (message.get("content") or "").strip(), closed, whole)
        if not (whole.startswith(prompt) and closed.startswith(prompt) and whole.startswith(closed)):
            raise DataError(
                f"{source}: the chat template writes message {place + 1} in another way in the whole "
                "conversation than where it is asked for, so the answer cannot be found. Mark answers in the template "
                "by {% generation %}, or give conversations that end with that message."
            )
        yield len(prompt), len(closed)


def _without_thought(prompt: str, words: str, closed: str, whole: str) -> str:
    """The closed text without what stands before the answer's words, as the whole text begins; empty if it does not."""
    behind = closed.removeprefix(prompt)
    # short words may stand in the thought too, and in what closes a message
    places = (place for place in range(len(behind)) if words and behind.startswith(words, place))
    return next(filter(whole.startswith, (prompt + behind[place:] for place in places)), "")
