"""Instructions to a model that answers, from a file or from the list that the package brings.

FILE.jsonl   an object a line: {"prompt"} or {"question"}, optionally with {"system"}, or {"messages"} as in a chat; and
             the other formats of `documents` with such fields
FILE.*       any other file has one instruction per line

Answers in the same rows are ignored. The package's list has 200 instructions in ten languages, written for it:
questions, tasks with a text, lists, code, calculations, rewriting, roles in a system message, requests of several
lines, greetings, and requests that a careful model declines. Languages and forms take turns, so that the first rows
have some of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.errors import DataError, Problem
from scale_surgery.progress import no_progress
from scale_surgery.text.conversations import (
    ANSWERS,
    EMPTY,
    Message,
    chat_problem,
    parsed,
    plain_message,
    plain_tool,
    with_system,
    without_empty,
)
from scale_surgery.text.documents import PROMPTS, holds_messages, holds_rows, prompts_in_text, row_problem, rows_of
from scale_surgery.text.folders import texts_in
from scale_surgery.text.sources import TextSource, parse_source
from scale_surgery.text.text_files import BLANK
from scale_surgery.text.values import text_problem

# value of options for the package's own list, and its file
SHIPPED = "shipped"
SHIPPED_FILE = Path(__file__).with_name("instructions.jsonl")
EXPECTED = '{"prompt"} or {"question"}, a text, or {"messages"}'


@dataclass(frozen=True)
class Instruction:
    """An instruction to a model that answers.

    Attributes:
        messages: A conversation up to the answer: often one message of the user, perhaps after a system message.
        source: Its place in errors.
        number: Its number among those that were read, from 1.
        tools: Tools that the model is offered.
    """

    messages: tuple[Message, ...]
    source: str
    number: int = 1
    tools: tuple[Any, ...] = ()

    @property
    def needs_template(self) -> bool:
        """True if it is more than a prompt."""
        return len(self.messages) > 1 or bool(self.tools)


def read_instructions(name: str | Path) -> list[Instruction]:
    """Read the instructions of a file, a dataset, or SHIPPED."""
    is_shipped = str(name) == SHIPPED
    source = parse_source(SHIPPED_FILE if is_shipped else name)
    read = (instruction for text in texts_in(source) for instruction in _read(text))
    found = [replace(instruction, number=number) for number, instruction in enumerate(read, start=1)]
    if not found:
        raise DataError(Problem("file-without-prompts", name))
    # nobody knows the path of the package's file
    return [replace(each, source=f"instruction {each.number}") for each in found] if is_shipped else found


def _read(text: TextSource) -> Iterator[Instruction]:
    if not holds_rows(text):
        for number, line in enumerate(prompts_in_text(text), start=1):
            yield Instruction(({"role": "user", "content": line},), f"{text.name}, prompt {number}")
        return
    names = PROMPTS if text.column is None else (text.column,)
    # a conversation, in the field of its own or in the one that was named
    chat = "messages" if text.column is None else text.column
    problems: list[Problem] = []
    for place, row in rows_of(text, no_progress):
        if row is BLANK:
            continue
        try:
            if isinstance(row, Mapping) and row.get(chat) is not None and holds_messages(chat, row[chat]):
                asked = tuple(_asked(row, chat, place))
                tools = () if row.get("tools") in EMPTY else parsed(row["tools"])
                yield Instruction(asked, place, tools=tuple(map(plain_tool, tools)))
            else:
                yield Instruction(tuple(_messages(row, names, place)), place)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)


def _messages(row: Any, names: Sequence[str], place: str) -> list[Message]:
    """Return the messages of a row with a prompt."""
    if not isinstance(row, Mapping):
        raise DataError(row_problem(place, row, names, EXPECTED))
    name = next((name for name in names if text_problem(row.get(name), name) is None), None)
    if name is None:
        raise DataError(row_problem(place, row, names, EXPECTED))
    if not row[name].strip():
        raise DataError(Problem("value-unfit", f'{place}: "{name}"', value="empty", kind="a text"))
    messages: list[Message] = [{"role": "user", "content": row[name]}]
    if row.get("system") is not None:
        if wrong := text_problem(row["system"], "system"):
            raise DataError(wrong.within(place))
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _asked(row: Mapping[str, Any], name: str, place: str) -> list[Message]:
    """Return the messages of a conversation without the answers at its end."""
    if wrong := chat_problem(row, name):
        raise DataError(wrong.within(place))
    messages: list[Message] = [plain_message(without_empty(message)) for message in with_system(row, parsed(row[name]))]
    while messages and messages[-1]["role"] == ANSWERS:
        messages.pop()
    if not messages:
        raise DataError(Problem("messages-without-question", place))
    return messages
