"""Fields of requests to the server, with the values that they accept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from json import loads
from reprlib import repr as shortened
from typing import Any

from transformers import GenerationConfig

from scale_surgery.fields import KIND_NAMES, Range

# fields that transformers' server reads, by endpoint; it accepts others and ignores them
EVERYWHERE = frozenset({"generation_config", "model", "seed", "stream", "temperature", "top_p"})
COMPLETIONS = EVERYWHERE | {"frequency_penalty", "max_tokens", "prompt", "stop"}
CHAT = EVERYWHERE | {"chat_template_kwargs", "frequency_penalty", "logit_bias", "max_completion_tokens", "max_tokens"}
CHAT |= {"messages", "stop", "tools"}
RESPONSES = EVERYWHERE | {"input", "instructions", "max_output_tokens", "tools"}
# fields that change nothing in an answer
LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"})
# values that match the server's fixed behaviour; clients send them by default
USUAL = {
    "background": False,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
    "stream_options": {"include_usage": True},
    # the server would put it behind the answer, and no model would read it
    "suffix": "",
    "tool_choice": "auto",
}


def _numbers(kind: type, allowed: Range) -> tuple[str, Callable[[Any], bool]]:
    kinds: Any = (int, float) if kind is float else kind

    def is_expected(value: Any) -> bool:
        # Python treats true as a whole number
        return isinstance(value, kinds) and not isinstance(value, bool) and value in allowed

    return f"{KIND_NAMES[kind]}, {allowed.bounds}", is_expected


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(part, kind) for part in value)


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return _is_list(stops, str) and all(stops)


def _is_bias(value: Any) -> bool:
    allowed = _numbers(float, Range(least=-100, most=100))[1]
    return (
        isinstance(value, dict) and value != {} and all(map(str.isdecimal, value)) and all(map(allowed, value.values()))
    )


def _is_json(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(loads(value), dict)
    except ValueError:
        return False


TEXT = ("text", lambda value: isinstance(value, str))
COUNT = _numbers(int, Range(least=1))
# expected value of each field, in words and as a check
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template_kwargs": ("an object", lambda value: isinstance(value, dict)),
    # the server multiplies by 1 + this number
    "frequency_penalty": _numbers(float, Range(above=-1)),
    "generation_config": ("text that is an object in JSON", _is_json),
    "input": ("text, or a list of objects", lambda value: isinstance(value, str) or _is_list(value, dict)),
    "instructions": TEXT,
    "logit_bias": ("an object of token ids, each with a number from -100 to 100", _is_bias),
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "max_tokens": COUNT,
    "messages": ("a list of objects, at least one", lambda value: _is_list(value, dict)),
    "prompt": ("one text", lambda value: isinstance(value, str)),
    # seeds that torch accepts
    "seed": _numbers(int, Range(least=-(2**63), most=2**64 - 1)),
    "stop": ("text, or a list of texts, none of them empty", _is_stop),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "temperature": _numbers(float, Range(least=0)),
    "tools": ("a list of objects", lambda value: _is_list(value, dict)),
    "top_p": _numbers(float, Range(least=0, most=1)),
}
# fields that clients send empty if nothing is asked; some templates announce tools if there is an empty list
EMPTY = frozenset({"logit_bias", "stop", "tools"})
# required fields
NEEDED = frozenset({"input", "messages", "prompt"})


class Refusal(Exception):  # noqa: N818
    """A refused request, with the fields of an error of OpenAI."""

    def __init__(self, message: str, parameter: str | None, code: str | None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status


def check_fields(read: Collection[str], body: dict[str, Any]) -> None:
    """Check that a request has no field that the server would ignore, and that the values of its fields are valid."""
    # null and what is empty mean that a field is not set, but the server takes some nulls as values
    for name in [name for name, value in body.items() if value is None or (name in EMPTY and value in ([], {}))]:
        del body[name]
    asked = {name for name, value in body.items() if not _is_usual(name, value)}
    if ignored := sorted(asked - LABELS - set(read)):
        raise Refusal(
            f"{', '.join(ignored)}: not offered by this server, expected some of {', '.join(sorted(read))}. Leave out "
            "what it does not offer; generation_config takes what transformers' GenerationConfig does.",
            ignored[0],
            "unsupported_parameter",
        )
    for name in sorted((asked | NEEDED) & set(read) & set(EXPECTED)):
        words, is_expected = EXPECTED[name]
        if name not in body:
            raise Refusal(f"{name} is missing, expected {words}.", name, "missing_required_parameter")
        if not is_expected(body[name]):
            raise Refusal(f"{name} is {shortened(body[name])}, expected {words}.", name, "invalid_value")
    known = vars(GenerationConfig())  # type: ignore[no-untyped-call]
    if unknown := [name for name in loads(body.get("generation_config", "{}")) if name not in known]:
        raise Refusal(
            f"generation_config has {shortened(unknown[0])}, which transformers' GenerationConfig has not.",
            "generation_config",
            "invalid_value",
        )


def _is_usual(name: str, value: Any) -> bool:
    """Return True if a field matches the server's fixed behaviour; 0 is not false: it requests one token's logprobs."""
    usual = USUAL.get(name)
    return bool(value == usual) and isinstance(value, bool) == isinstance(usual, bool)
