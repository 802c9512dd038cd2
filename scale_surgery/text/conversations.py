"""Conversations: the fields that a row may have, and their checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.errors import Problem
from scale_surgery.text.values import fields_problem, half_problem, kind_of, text_problem

Message = Mapping[str, Any]

# a message's fields, as errors show them
MESSAGE = '{"role", "content"}'
ANSWERS = "assistant"
# roles whose messages are read and never learned. Any other role may be the assistant under another name ("model",
# "gpt", "bot"). Some templates accept such roles silently, and its answers would not be learned
READ = ("developer", "system", "user", "tool")
ALSO_READ = ("context", "document", "documents", "environment", "function", "ipython", "observation", "tool_response")
# keys of a thought in published templates; a thought inside the text gets the first
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")
TYPED_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# keys that say whether a message is learned, 0 or 1: `weight` of OpenAI and Mistral, `train` and `training` of axolotl,
# `loss` of ms-swift
SWITCHES = ("weight", "train", "training", "loss")
# empty tools, calls or arguments, as different programs write them
EMPTY: tuple[Any, ...] = (None, [], {}, "", "null", "[]", "{}")


def chat_problem(row: Mapping[str, Any], name: str) -> Problem | None:
    """Return the first problem of the conversation in a row; None if it has none."""
    if wrong := _json_problem(row.get(name), name, list):
        return wrong
    messages = parsed(row[name])
    if not messages:
        return Problem("value-unfit", f'"{name}"', value="empty", kind=f"a list of {MESSAGE}")
    for number, message in enumerate(messages, start=1):
        place = f'message {number} of "{name}"'
        if not isinstance(message, Mapping):
            return Problem("value-unfit", place, value=kind_of(message), kind=MESSAGE)
        if not isinstance(message.get("role"), str):
            return fields_problem(message, MESSAGE, place)
        if wrong := _message_problem(message):
            return wrong.within(place)
    tools = row.get("tools")
    return None if tools in EMPTY else _json_problem(tools, "tools", list)


def _message_problem(message: Message) -> Problem | None:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if role not in (ANSWERS, *READ, *ALSO_READ):
        return Problem("role-unknown", role=role, roles=READ)
    if message.get("function_call"):
        return Problem("function-call-old")
    wrong = next((key for key in SWITCHES if message.get(key) not in (None, 0, 1)), None)
    if wrong is not None:
        expected = "0, which masks the message, or 1"
        return Problem("value-unfit", f'"{wrong}"', value=repr(message[wrong]), kind=expected)
    thoughts = {key: message[key] for key in THOUGHTS if message.get(key)}
    problems = [text_problem(thought, key) for key, thought in thoughts.items()]
    if not any(problems) and len(set(thoughts.values())) > 1:
        problems.append(Problem("thoughts-differ", keys=list(thoughts)))
    problems += [] if calls in EMPTY else [_calls_problem(calls)]
    if isinstance(content, list):
        problems += map(_part_problem, content) if content else [text_problem(None, "content")]
    elif content is not None or calls in EMPTY:
        problems.append(text_problem(content, "content"))
    return next(filter(None, problems), None)


def _part_problem(part: Any) -> Problem | None:
    place = 'a part of "content"'
    if not isinstance(part, Mapping):
        return Problem("value-unfit", place, value=kind_of(part), kind='{"type": "text", "text"}')
    if part.get("type", "text") != "text":
        return Problem("part-no-text", place, type=part["type"])
    wrong = text_problem(part.get("text"), "text")
    return wrong and wrong.within(place)


def _calls_problem(calls: Any) -> Problem | None:
    if wrong := _json_problem(calls, "tool_calls", list):
        return wrong
    for call in parsed(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return Problem("call-without-name", '"tool_calls"')
        arguments = function.get("arguments")
        if arguments not in EMPTY and (wrong := _json_problem(arguments, "arguments", dict)):
            return wrong.within(f"the call of {function['name']}")
    return None


def _json_problem(value: Any, name: str, kind: type) -> Problem | None:
    expected = f"{'a list' if kind is list else 'an object'}, perhaps as a JSON text"
    try:
        value = parsed(value)
    except ValueError as error:
        return Problem("field-no-json", f'"{name}"', error=error, kind=expected)
    if not isinstance(value, kind):
        return Problem("value-unfit", f'"{name}"', value=kind_of(value), kind=expected)
    return half_problem(json.dumps(value, ensure_ascii=False, default=str), name)


def without_empty(message: Message) -> dict[str, Any]:
    """Return the message without empty fields, because templates test which fields exist."""
    return {
        key: value
        for key, value in message.items()
        if value is not None and not (key == "tool_calls" and value in EMPTY)
    }


def parsed(value: Any) -> Any:
    """Return the value, decoded if it is a JSON text."""
    return parse_json(value) if isinstance(value, str) else value


def words_of(message: Message) -> str:
    """Return the words of a message: its thought, its text and its calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content
    said = (message.get(thought_key(message) or ""), text, calls and json.dumps(calls, default=str))
    return "\n".join(words for words in said if words and words.strip())


def is_answer(place: int, message: Message) -> bool:
    """Return True if a message is learned: it is the assistant's, not empty, not masked, and not the first."""
    return message["role"] == ANSWERS and place > 0 and not is_masked(message) and bool(words_of(message))


def is_masked(message: Message) -> bool:
    """Return True if a message is read and never learned."""
    return any(message.get(key) in (0,) for key in SWITCHES)


def plain_message(message: Message) -> dict[str, Any]:
    """Return the message with JSON texts decoded, a single part as a text, one thought, and no switches."""
    plain = {key: value for key, value in message.items() if key not in SWITCHES}
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1:
        plain["content"] = content[0]["text"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in parsed(message["tool_calls"])]
        plain.setdefault("content", "")  # some templates test whether it exists
    for key in [key for key in THOUGHTS if message.get(key)][1:]:
        del plain[key]
    return plain


def _plain_call(call: Message) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _plain_call(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": {} if arguments in EMPTY else parsed(arguments)}


def plain_tool(tool: Any) -> Any:
    """Return the tool with its JSON texts decoded."""
    tool = parsed(tool)
    if isinstance(tool, Mapping) and "function" in tool:
        return {**tool, "function": plain_tool(tool["function"])}
    if isinstance(tool, Mapping) and isinstance(tool.get("parameters"), str):
        return {**tool, "parameters": parsed(tool["parameters"])}
    return tool


def tool_name(tool: Any) -> str | None:
    """Return the name of a tool, or None."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function.get("name") if isinstance(function, Mapping) else None


def with_functions(message: Message) -> dict[str, Any]:
    """Return the message with a "function" in each of its calls."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [with_function(call) for call in calls]} if calls else dict(message)


def with_function(flat: Any) -> Any:
    """Return a call or a tool with a "function" around its name, as OpenAI's API writes it."""
    if not isinstance(flat, Mapping) or "function" in flat or "name" not in flat:
        return flat
    outside = {key: value for key, value in flat.items() if key in ("id", "type")}
    inside = {key: value for key, value in flat.items() if key not in outside}
    return {"type": "function", **outside, "function": inside}


def with_thought(message: Message) -> dict[str, Any]:
    """Return the message with a thought inside its text moved to its own field."""
    content = message.get("content")
    typed = TYPED_THOUGHT.fullmatch(content) if isinstance(content, str) and message["role"] == ANSWERS else None
    if typed is None or thought_key(message):
        return dict(message)
    return {**message, "content": typed[2].lstrip("\n"), THOUGHTS[0]: typed[1].strip("\n")}


def with_system(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return messages with the system message that some programs write beside them, if they have none of their own."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0].get("role") == "system":
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def thought_key(message: Message) -> str | None:
    """Return the key of an answer's thought, or None."""
    return next((key for key in THOUGHTS if message.get(key) and message["role"] == ANSWERS), None)
