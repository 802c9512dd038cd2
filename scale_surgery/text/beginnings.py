"""The beginnings of texts that a model writes by itself, and the tokens at which these texts end.

There is one list of beginnings, whatever it comes from:

    instructions through the chat template, up to the generation prompt   the model answers, up to the end of its turn
    prompts as plain text                                                 the model continues them
    the token that begins a text                                          the model writes a text

The template decides what stands around the messages, such as a system message of its own. The token that ends a turn is
derived from two renderings of a conversation, not from its name; see `ChatReader.closing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scale_surgery.errors import DataError, Problem, counted
from scale_surgery.text.answers import ChatReader, Form, UnfitError, end_ids, prints_python
from scale_surgery.text.conversations import ANSWERS, THOUGHTS, Message, thought_key, tool_name, with_function, words_of
from scale_surgery.text.instructions import SHIPPED, Instruction, read_instructions


@dataclass(frozen=True)
class Beginnings:
    """Beginnings of texts that a model writes, and the tokens at which these texts end.

    Attributes:
        ids: Token ids at the start of each text.
        ends: Tokens at which a text ends; none if it goes on to its limit.
        asked: The instruction of each beginning; None for the token that begins a text.
        is_chat: True if a chat template wrote them, so that the model answers.
        notes: What was left out, cut, or not found.
    """

    ids: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    asked: tuple[Instruction, ...] | None = None
    is_chat: bool = False
    notes: tuple[str, ...] = ()

    def describe(self, texts: int) -> str:
        """Describe how a number of texts begin; empty if it is with the token that starts a text."""
        if self.asked is None:
            return "; ".join(self.notes)
        kind, word = ("answers to", "instruction") if self.is_chat else ("continuing", "prompt")
        # beginnings take turns
        return "; ".join((f"{kind} {counted(min(texts, len(self.ids)), word)}", *self.notes))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(ids) for ids in self.ids]

    @property
    def highest(self) -> int:
        """Highest token id."""
        return max(map(max, self.ids))


def find_beginnings(
    tokenizer: Any, name: str, most: int | None, prompts: str | None = None, *, raw: bool = False
) -> Beginnings:
    """Return the beginnings of a model's own texts.

    Args:
        tokenizer: Its tokenizer, perhaps with a chat template.
        name: Its name in errors.
        most: Most tokens of a text with its beginning; None for no limit.
        prompts: A file of instructions, or "shipped". Default: the package's list for a model with a chat template, and
            otherwise the token that begins a text.
        raw: Use no chat template.
    """
    is_chat = getattr(tokenizer, "chat_template", None) is not None and not raw
    if prompts is None and not is_chat:
        return begin_texts(tokenizer, name)
    chosen = prompts or SHIPPED
    read = read_instructions(chosen)
    if is_chat:
        return begin_answers(tokenizer, read, name, most, may_skip=chosen == SHIPPED)
    return begin_prompts(tokenizer, read, name, most, may_skip=chosen == SHIPPED)


def begin_texts(tokenizer: Any, name: str) -> Beginnings:
    """Begin with the token that starts a text."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise DataError(Problem("first-token-missing", name))
    return Beginnings(((begin,),), _text_ends(tokenizer))


def begin_prompts(
    tokenizer: Any, asked: Sequence[Instruction], name: str, most: int | None, *, may_skip: bool = False
) -> Beginnings:
    """Begin with prompts as plain text."""
    from scale_surgery.text.tokenizing import tokenize_prompts  # imports torch

    fits = [each for each in asked if not each.needs_template]
    needing = [Problem("system-without-template", each.source, model=name) for each in asked if each.needs_template]
    if needing and not may_skip:
        raise DataError(*needing)
    notes = _left_out(needing)
    texts = [words_of(each.messages[0]) for each in fits]
    read = zip(fits, map(tuple, tokenize_prompts(texts, tokenizer)), strict=True)
    begun = [(each, ids) for each, ids in read if ids]
    # a text is a text wherever it is cut
    long = 0 if most is None else sum(len(ids) >= most for _, ids in begun)
    if long and most is not None:
        notes.append(f"{counted(long, 'prompt')} cut to {counted(most - 1, 'token')}")
    return Beginnings(
        tuple(ids if most is None else ids[: most - 1] for _, ids in begun),
        _text_ends(tokenizer),
        tuple(each for each, _ in begun),
        notes=tuple(notes),
    )


def begin_answers(
    tokenizer: Any, asked: Sequence[Instruction], name: str, most: int | None, *, may_skip: bool = False
) -> Beginnings:
    """Begin with instructions in the chat template, up to the generation prompt.

    Args:
        tokenizer: A tokenizer with a chat template.
        asked: The instructions.
        name: Name of the model in errors.
        most: Most tokens of a text with its beginning; None for no limit.
        may_skip: Leave out instructions that do not fit, with a note. Otherwise they are an error.
    """
    reader = ChatReader(tokenizer)
    form, rendered = _render_all(reader, asked)
    begun: list[tuple[Instruction, tuple[int, ...]]] = []
    problems: list[Problem] = []
    for each, text in zip(asked, rendered, strict=True):
        if isinstance(text, Problem):
            problems.append(text.within(each.source))
            continue
        ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        # an instruction that is cut would be another one, without the generation prompt
        if most is not None and len(ids) >= most:
            problems.append(Problem("instruction-too-long", each.source, tokens=len(ids), most=most - 1))
        else:
            begun.append((each, ids))
    if problems and not (begun and may_skip):
        raise DataError(*problems)
    ends, notes = _turn_ends(reader, form, name)
    return Beginnings(
        tuple(ids for _, ids in begun),
        ends,
        tuple(each for each, _ in begun),
        is_chat=True,
        notes=(*_left_out(problems), *notes),
    )


def form_of(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] = (), options: Mapping[str, Any] | None = None
) -> Form:
    """Return the form of a conversation in which a chat template writes all of it.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The conversation, up to the answer.
        tools: Tools that the model is offered.
        options: Variables of the template.

    Raises:
        DataError: The template refuses the conversation, or leaves out words or a tool.
    """
    thought = next(filter(None, map(thought_key, messages)), THOUGHTS[0])
    asked = Instruction(tuple(messages), "", tools=tuple(tools))
    form, (text,) = _render_all(ChatReader(tokenizer), [asked], thought, options)
    if isinstance(text, Problem):
        raise DataError(text)
    return form


def _render_all(
    reader: ChatReader,
    asked: Sequence[Instruction],
    thought: str = THOUGHTS[0],
    options: Mapping[str, Any] | None = None,
) -> tuple[Form, list[str | Problem]]:
    """Render instructions in the form that the template takes most of them in."""
    # messages with a text, or with a list of parts, which some templates need. By default thoughts are switched neither
    # on nor off: a model thinks if it does so when nobody asks
    text, parts = (Form(parts, as_text=False, thought=thought, options=options or {}) for parts in (False, True))

    def refused(rendered: tuple[Form, list[str | Problem]]) -> int:
        return sum(isinstance(text, Problem) for text in rendered[1])

    first = text, [_render(reader, text, each) for each in asked]
    if not refused(first):
        return first
    second = parts, [_render(reader, parts, each) for each in asked]
    return min(first, second, key=refused)


def _render(reader: ChatReader, form: Form, asked: Instruction) -> str | Problem:
    """Render an instruction; return the problem of one that the template refuses, or does not write whole."""
    try:
        text = _fill(reader, form, asked)
    except UnfitError as error:
        return error.problem
    for tool in asked.tools:
        if (offered := tool_name(tool)) and offered not in text:
            return Problem("template-leaves-out", '"tools"', what=offered)
    for number, message in enumerate(asked.messages, start=1):
        if prints_python(form.shape(message), text):
            return Problem("template-prints-python", f"message {number}")
        content = message.get("content") or ""
        words = [part["text"] for part in content] if isinstance(content, list) else [content]
        # templates may drop the thoughts of earlier answers
        if message["role"] != ANSWERS and not all(some.strip() in text or _in_json(some) in text for some in words):
            return Problem("template-leaves-out", f"message {number}", what="the words")
    return text


def _in_json(text: str) -> str:
    """Return a text as templates write the result of a tool, without the quotes."""
    return json.dumps(text.strip(), ensure_ascii=False)[1:-1]


def _fill(reader: ChatReader, form: Form, asked: Instruction) -> str:
    """Render an instruction, with its tools as they are or, if the template refuses these, as functions."""
    options = {"tokenize": False, "add_generation_prompt": True}
    tools = list(asked.tools) or None
    try:
        return str(reader.fill(asked.messages, tools, form, **options))
    except UnfitError:
        functions = tools and [with_function(tool) for tool in tools]
        if functions == tools:
            raise
        return str(reader.fill(asked.messages, functions, form, **options))


def _left_out(problems: Sequence[Problem]) -> list[str]:
    """Describe instructions that are left out, with the first reason of each kind."""
    first = {problem.code: problem for problem in reversed(problems)}
    counts = ((problem, sum(each.code == code for each in problems)) for code, problem in first.items())
    return [f"{counted(count, 'instruction')} left out ({problem.phrase})" for problem, count in counts]


def _text_ends(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _turn_ends(reader: ChatReader, form: Form, name: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the tokens at which an answer ends, and a note if model and template do not agree on them.

    They are those at which the model stops, and the one with which the template ends a turn of the assistant.
    """
    tokenizer: Any = reader.tokenizer
    stops = end_ids(tokenizer)
    closing = reader.closing(None, form).last
    ids = tokenizer(closing, add_special_tokens=False, verbose=False)["input_ids"] if closing else []
    # ordinary text may stand in the middle of an answer too
    if len(ids) == 1 and (ids[0] in stops or ids[0] in tokenizer.added_tokens_decoder):
        note = f"the chat template ends a turn with {closing}, at which {name} does not stop by itself"
        return tuple(sorted(stops | set(ids))), [] if ids[0] in stops else [note]
    if not stops:
        raise DataError(Problem("turn-without-end", name))
    known = ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(stops))))
    return tuple(sorted(stops)), [f"the chat template ends a turn without a token of its own; answers end at {known}"]
