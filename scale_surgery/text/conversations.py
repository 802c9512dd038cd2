"""Conversations as token ids, by a tokenizer's chat template.

One rule: of an answer its words and the token that ends it are learned, and nothing else. Words are its text, its
thought, and the name and arguments of its calls, with what the template writes between them. If the rendered text does
not show them, the row is refused.

The template writes each conversation twice, once as it is and once with a mark for each text. Both have to agree
but for the marks, so a mark shows where its text is: the same words elsewhere, or a history that is written in another
way than the last turn, make no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, GENERATION_FILE
from scale_surgery.checkpoint.reading import HALF_A_CHARACTER, parse_json
from scale_surgery.errors import DataError
from scale_surgery.text.sequences import PROMPT
from scale_surgery.text.values import HALF, kind_of, named, text_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

ANSWERS = "assistant"
# roles whose messages are read and never learned. Any other role may be the assistant under another name ("model",
# "gpt", "bot"), and templates write some of these without a word: its answers would be missing from what is learned
READ = ("developer", "system", "user", "tool")
READ += ("context", "document", "documents", "environment", "function", "ipython", "observation", "tool_response")
# keys of a thought in published templates; the first is tried if a thought is part of the text
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")
TYPED_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# keys that say whether a message is learned, 0 or 1: `weight` is OpenAI's and Mistral's, the others are axolotl's
SWITCHES = ("weight", "train", "training")
# variables of templates that switch thoughts off, and those that keep thoughts of earlier turns
NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
ALL_THOUGHTS = {"preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False}

MARKED = re.compile(r"\{%[-+]?\s*generation\b")
# in place of a text and of a number; letters and digits are neither escaped nor trimmed
TEXT_MARK, NUMBER_MARK = "qz{}zq", "77103{}30177"
MARK = re.compile("qz([0-9]+)zq|77103([0-9]+?)30177")
# how templates write special tokens: <|im_end|>, </s>, <end_of_turn>, [/INST], [|endofturn|]
CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
# a text in tags, which templates look for
IN_TAGS = re.compile(r"(\s*<([^<>\s]+)>)(.*\S.*)(</\2>\s*)", re.DOTALL)
ADVICE = 'Mask it by "weight": 0, or give the row to a tokenizer whose template writes it.'


# what a row says


def chat_problem(row: Mapping[str, Any], name: str) -> str | None:
    """Say what is wrong with the conversation of a row; None if nothing is."""
    messages = row.get(name)
    if not isinstance(messages, list) or not messages:
        return f'"{name}" is {kind_of(messages or None)}, expected a list of {{"role", "content"}}'
    for number, message in enumerate(messages, start=1):
        place = f'message {number} of "{name}"'
        if not isinstance(message, Mapping):
            return f'{place} is {kind_of(message)}, expected {{"role", "content"}}'
        if not isinstance(message.get("role"), str):
            return f'{place} has the fields {named(message)}; expected {{"role", "content"}}'
        if wrong := _message_problem(message):
            return f"{place}: {wrong}"
    tools = row.get("tools")
    return tools and _json_problem(tools, "tools", list)


def _message_problem(message: Message) -> str | None:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if role not in (ANSWERS, *READ):
        return f'the role is "{role}", expected {ANSWERS}, whose messages are learned, or {", ".join(READ[:4])}'
    if message.get("function_call"):
        return 'has "function_call", expected "tool_calls", a list'
    wrong = next((key for key in SWITCHES if message.get(key) not in (None, 0, 1)), None)
    if wrong is not None:
        return f'"{wrong}" is {message[wrong]!r}, expected 0, which masks the message, or 1'
    thoughts = {key: message[key] for key in THOUGHTS if message.get(key)}
    problems = [text_problem(thought, key) for key, thought in thoughts.items()]
    if not any(problems) and len(set(thoughts.values())) > 1:
        problems.append(f"{' and '.join(thoughts)} differ, expected one thought")
    problems += [_calls_problem(calls)] if calls else []
    if isinstance(content, list):
        problems += map(_part_problem, content) if content else ['"content" is empty, expected a text']
    elif not (calls and content is None):
        problems.append(text_problem(content, "content"))
    return next(filter(None, problems), None)


def _part_problem(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return f'"content" holds {kind_of(part)}, expected a text, or a list of {{"type": "text", "text"}}'
    if part.get("type", "text") != "text":
        return f'"content" holds a part of the type "{part["type"]}", expected text alone'
    return text_problem(part.get("text"), "text")


def _calls_problem(calls: Any) -> str | None:
    if wrong := _json_problem(calls, "tool_calls", list):
        return wrong
    for call in _parsed(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return '"tool_calls" holds no name of a function, expected {"function": {"name", "arguments"}}'
        arguments = function.get("arguments")
        if arguments is not None and (wrong := _json_problem(arguments, "arguments", dict)):
            return f"{wrong} in the call of {function['name']}"
    return None


def _json_problem(value: Any, name: str, kind: type) -> str | None:
    expected = f"expected {'a list' if kind is list else 'an object'}, perhaps as a JSON text"
    try:
        value = _parsed(value)
    except ValueError as error:
        return f'"{name}" is a text and no JSON ({error}), {expected}'
    if not isinstance(value, kind):
        return f'"{name}" is {kind_of(value)}, {expected}'
    return f'"{name}" {HALF}' if HALF_A_CHARACTER.search(json.dumps(value, ensure_ascii=False, default=str)) else None


def _parsed(value: Any) -> Any:
    return parse_json(value) if isinstance(value, str) else value


def words_of(message: Message) -> str:
    """The words of a message: its thought, its text and its calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content
    said = (message.get(_thought_key(message) or ""), text, calls and json.dumps(calls, default=str))
    return "\n".join(words for words in said if words and words.strip())


def is_answer(place: int, message: Message) -> bool:
    """Whether a message is learned: the assistant says something, and does not begin."""
    is_masked = any(message.get(key) in (0,) for key in SWITCHES)
    return message["role"] == ANSWERS and place > 0 and not is_masked and bool(words_of(message))


def _plain(message: Message) -> dict[str, Any]:
    """The message with JSON texts parsed, a single part as a text, one thought, and no switches."""
    plain = {key: value for key, value in message.items() if key not in SWITCHES}
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1:
        plain["content"] = content[0]["text"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in _parsed(message["tool_calls"])]
    for key in [key for key in THOUGHTS if key in message and message[key]][1:]:
        del plain[key]
    return plain


def _plain_call(call: Message) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _plain_call(call["function"])}
    return {**call, "arguments": _parsed(call["arguments"])} if call.get("arguments") is not None else dict(call)


def _plain_tool(tool: Any) -> Any:
    tool = _parsed(tool)
    if isinstance(tool, Mapping) and "function" in tool:
        return {**tool, "function": _plain_tool(tool["function"])}
    if isinstance(tool, Mapping) and isinstance(tool.get("parameters"), str):
        return {**tool, "parameters": _parsed(tool["parameters"])}
    return tool


def _with_thought(message: Message) -> dict[str, Any]:
    """The message with a thought that stands in its text as a thought of its own."""
    content = message.get("content")
    typed = TYPED_THOUGHT.fullmatch(content) if isinstance(content, str) and message["role"] == ANSWERS else None
    if typed is None or _thought_key(message):
        return dict(message)
    return {**message, "content": typed[2].lstrip("\n"), THOUGHTS[0]: typed[1].strip("\n")}


def _thought_key(message: Message) -> str | None:
    return next((key for key in THOUGHTS if message.get(key) and message["role"] == ANSWERS), None)


# marks


@dataclass(frozen=True)
class Piece:
    """A text of a message that the template has to write: its words, its thought, or a part of a call."""

    message: int
    what: str
    text: str

    @property
    def forms(self) -> list[str]:
        """What a template may make of it: without blanks around it, or with the escapes of JSON."""
        text = self.text
        cut = [text, text.rstrip("\n"), text.lstrip("\n"), text.rstrip(), text.lstrip(), text.strip("\n"), text.strip()]
        escaped = [json.dumps(each, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True) for each in cut]
        return list(dict.fromkeys([*cut, *escaped]))


class Marks:
    """Messages with a mark for each text, and the pieces that the marks are for."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.pieces: list[Piece] = []
        # keys of arguments, and values that have no mark, by their message
        self.unmarked: list[Piece] = []
        self.messages = [self._marked(place, message) for place, message in enumerate(messages)]

    def _marked(self, place: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        if key := _thought_key(message):
            marked[key] = self._text(place, "the thought", message[key])
        content = message.get("content")
        if isinstance(content, list):
            parts = [self._text(place, f"part {number}", part["text"]) for number, part in enumerate(content, 1)]
            marked["content"] = [{**part, "text": text} for part, text in zip(content, parts, strict=True)]
        elif isinstance(content, str):
            typed = None if message["role"] == ANSWERS else IN_TAGS.fullmatch(content)
            head, text, tail = ("", content, "") if typed is None else typed.group(1, 3, 4)
            marked["content"] = head + self._text(place, "the words", text) + tail
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(place, call) for call in message["tool_calls"]]
        return marked

    def _call(self, place: int, call: Message) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": self._call(place, call["function"])}
        name = call["name"]
        marked = {**call, "name": self._text(place, f"the name of the call of {name}", name)}
        if "arguments" in call:
            marked["arguments"] = self._value(place, f"an argument of the call of {name}", call["arguments"])
        return marked

    def _value(self, place: int, what: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(place, what, value)
        if isinstance(value, Mapping):
            self.unmarked += [Piece(place, what, key) for key in value]
            return {key: self._value(place, what, inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._value(place, what, inner) for inner in value]
        if isinstance(value, bool) or value is None:
            return value
        self.pieces.append(Piece(place, what, json.dumps(value)))
        return int(NUMBER_MARK.format(len(self.pieces) - 1))

    def _text(self, place: int, what: str, text: str) -> str:
        if not text.strip():
            return text
        self.pieces.append(Piece(place, what, text))
        return TEXT_MARK.format(len(self.pieces) - 1)


class Unfit(Exception):
    """What a template writes does not show what the row says; of several forms that with the highest rank is told."""

    def __init__(self, sentence: str, rank: float = 2) -> None:
        super().__init__(sentence)
        self.rank = rank


class Mark(NamedTuple):
    """A mark in the marked text, and where its text stands in the rendered one."""

    piece: int
    start: int
    end: int


def find_marks(whole: str, marked: str, pieces: Sequence[Piece]) -> list[Mark]:
    """Find the texts of the pieces, in order, by the marks in the marked text."""
    found = list(MARK.finditer(marked))
    numbers = [int(mark[1] or mark[2]) for mark in found]
    missing = [piece for number, piece in enumerate(pieces) if number not in numbers]
    if missing:
        what, rank = f"{missing[0].what} of message {missing[0].message + 1}", 1 + 1 / (1 + len(missing))
        raise Unfit(f"the chat template leaves out {what}. {LEFT_OUT}", rank)
    marks: list[Mark] = []
    position = found[0].start() if found else 0
    fits = whole.startswith(marked[:position])
    for index, (mark, number) in enumerate(zip(found, numbers, strict=True)):
        is_last = index + 1 == len(found)
        following = marked[mark.end() : None if is_last else found[index + 1].start()]
        forms = pieces[number].forms if fits and number < len(pieces) else []
        ends = (position + len(form) for form in forms if whole.startswith(form, position))
        fitting = (end for end in ends if whole.startswith(following, end))
        end = next((end for end in fitting if not is_last or end + len(following) == len(whole)), None)
        if end is None:
            piece = pieces[min(number, len(pieces) - 1)]
            raise Unfit(
                f"the chat template changes {piece.what} of message {piece.message + 1}, or the text around it, by "
                "what the words are. Take out of them what it looks for, such as <think> or <tool_call>."
            )
        marks.append(Mark(number, position, end))
        position = end + len(following)
    return marks


LEFT_OUT = "Leave it out of the row too, or take a template that writes it."


# templates


@dataclass(frozen=True)
class Form:
    """How a conversation is given to a template: templates differ in what they take."""

    parts: bool
    as_text: bool
    thought: str
    options: Mapping[str, bool]

    def shape(self, message: Message) -> dict[str, Any]:
        """Give a message this form."""
        shaped = dict(message)
        if self.parts and isinstance(message.get("content"), str):
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        if key := _thought_key(message):
            shaped[self.thought] = shaped.pop(key)
        if self.as_text and message.get("tool_calls"):
            shaped["tool_calls"] = [_call_as_text(call) for call in message["tool_calls"]]
        return shaped


def _call_as_text(call: Message) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call_as_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if "arguments" in call else {**call}


class Closing(NamedTuple):
    """What a template writes to end a turn: the last one, and one that others follow; None if it is not known."""

    last: str | None
    earlier: str | None


class End(NamedTuple):
    """Where the token that ends an answer ends, from its last word on; `id` is learned in its place, or `added`."""

    length: int
    id: int | None = None
    added: int | None = None


@dataclass
class ChatReader:
    """Reads conversations by a tokenizer's chat template."""

    tokenizer: PreTrainedTokenizerBase
    closings: dict[Any, Closing] = field(init=False, default_factory=dict)

    @cached_property
    def ends(self) -> dict[str, int]:
        """The tokens at which the model stops, and their ids."""
        ends = {self.tokenizer.decode([id_]): id_ for id_ in sorted(end_ids(self.tokenizer))}
        return {text: id_ for text, id_ in ends.items() if text.strip()}

    @cached_property
    def unit(self) -> re.Pattern[str]:
        """A special token in a text."""
        known = sorted({*self.tokenizer.all_special_tokens, *self.ends}, key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, known), CONTROL]))

    def read(self, chat: Mapping[str, Any], source: str) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and their labels: PROMPT for all that is not learned."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{source}: is a conversation, and this model's tokenizer has no chat template. Put a "
                'chat_template.jinja beside the tokenizer\'s files, or give {"prompt", "completion"}.'
            )
        if not self.tokenizer.is_fast:
            raise DataError(
                f"{source}: is a conversation, and this model's tokenizer, which is written in Python, does not "
                'say where tokens stand. Give {"prompt", "completion"}.'
            )
        messages = [_plain(message) for message in chat["messages"]]
        tools = [_plain_tool(tool) for tool in _parsed(chat.get("tools") or [])] or None
        learned = {place for place, message in enumerate(chat["messages"]) if is_answer(place, message)}
        if self._is_marked(tools) and is_answer(1, chat["messages"][0]):
            learned.add(0)
        problems: list[Unfit] = []
        for form, shaped in self._forms(messages, tools):
            try:
                return Rendering(self, form, shaped, tools).read(learned)
            except Unfit as error:
                problems.append(error)
        raise DataError(f"{source}: {max(problems, key=lambda problem: problem.rank)}")

    def _is_marked(self, tools: Any) -> bool:
        return bool(MARKED.search(self.tokenizer.get_chat_template(tools=tools)))

    def _forms(self, messages: Sequence[Message], tools: Any) -> Iterator[tuple[Form, list[dict[str, Any]]]]:
        """The forms of a conversation that a template may take, the usual ones first."""
        template = self.tokenizer.get_chat_template(tools=tools)

        def known(options: Mapping[str, bool]) -> dict[str, bool]:
            return {name: value for name, value in options.items() if re.search(rf"\b{name}\b", template)}

        split = [_with_thought(message) for message in messages]
        for some in (messages, split) if split != messages else (messages,):
            keys = [key for key in map(_thought_key, some) if key]
            has_parts = any(isinstance(message.get("content"), list) for message in some)
            has_calls = any(message.get("tool_calls") for message in some)
            options = [{}, known(ALL_THOUGHTS)] if keys else [{} if split != messages else known(NO_THOUGHTS)]
            for as_text, parts, thought, option in product(
                (False, True)[: 1 + has_calls],
                (True,) if has_parts else (False, True),
                dict.fromkeys((*keys, *THOUGHTS)) if keys else (THOUGHTS[0],),
                options if options[-1] else options[:1],
            ):
                yield Form(parts, as_text, thought, option), [dict(message) for message in some]

    def fill(self, messages: Sequence[Message], tools: Any, form: Form, **options: Any) -> Any:
        """What the template writes."""
        shaped = cast(Any, [form.shape(message) for message in messages])
        try:
            return self.tokenizer.apply_chat_template(shaped, tools=tools, **form.options, **options)
        except Exception as error:  # templates may raise anything
            reason = " ".join(f"{error}".split()) or type(error).__name__
            raise Unfit(
                f"the chat template does not take the conversation ({reason}). Change its messages.", 0
            ) from error

    def shared(self, one: str, other: str) -> str:
        """What two texts begin with, in whole special tokens."""
        length = 0
        for a, b in zip(self._units(one), self._units(other), strict=False):
            if a != b:
                break
            length += len(a)
        return one[:length]

    def _units(self, text: str) -> Iterator[str]:
        position = 0
        for special in self.unit.finditer(text):
            yield from text[position : special.start()]
            yield special[0]
            position = special.end()
        yield from text[position:]

    def is_special(self, text: str) -> bool:
        """Whether a text holds nothing but special tokens and blanks."""
        return not self.unit.sub("", text).strip()

    def closing(self, tools: Any, form: Form) -> Closing:
        """How the template ends a turn of words."""
        key = (form.parts, tuple(form.options.items()), bool(tools))
        if key not in self.closings:
            self.closings[key] = self._closing(tools, form)
        return self.closings[key]

    def _closing(self, tools: Any, form: Form) -> Closing:
        user, answer, more = (
            {"role": role, "content": TEXT_MARK.format(number)}
            for number, role in enumerate(("user", ANSWERS, "user"))
        )
        try:
            asks = self.fill([user], tools, form, tokenize=False, add_generation_prompt=True)
            alone, asked, going = (
                self.fill(some, tools, form, tokenize=False, add_generation_prompt=goes_on).split(answer["content"])[1]
                for some, goes_on in (([user, answer], False), ([user, answer, more], False), ([user, answer], True))
            )
        except (Unfit, IndexError):  # it takes no such conversation, or leaves the words out
            return Closing(None, None)
        if both := self.unit.findall(self.shared(alone, asked)):
            return Closing(both[-1], both[-1])
        first, last = self.unit.match(asked.lstrip()), self.unit.findall(alone)
        header = self.unit.search(asks.split(user["content"])[-1].removeprefix(first[0] if first else ""))
        # what follows whoever speaks next ends a turn, unless turns begin with it
        ends = first and last and going.lstrip().startswith(first[0]) and not (header and header[0] == first[0])
        return Closing(last[-1] if last else None, first[0] if first and ends else None)


def end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens at which a model stops: those in its folder's generation_config.json, and the tokenizer's."""
    ids: set[Any] = {tokenizer.eos_token_id}
    folder = Path(tokenizer.name_or_path or "/nowhere")
    for name in (GENERATION_FILE, CONFIG_FILE):
        if (folder / name).is_file():
            config = read_json(folder / name)
            found = config.get("eos_token_id")
            if found is not None:
                ids.update(found if isinstance(found, list) else [found])
                break
    return {id_ for id_ in ids if type(id_) is int and 0 <= id_ < len(tokenizer)}


class Answer(NamedTuple):
    """Where an answer stands in the rendered text, with its end."""

    message: int
    start: int
    end: int
    closing: End


class Rendering:
    """A conversation as a template writes it, in one form."""

    def __init__(self, reader: ChatReader, form: Form, messages: Sequence[Message], tools: Any) -> None:
        self.reader, self.form, self.plain, self.tools = reader, form, messages, tools
        self.marks = Marks(messages)
        self.pieces = self.marks.pieces
        self.whole: str = self._fill(messages)
        self.marked: str = self._fill(self.marks.messages)
        self._refuse_python()
        self.found = find_marks(self.whole, self.marked, self.pieces)
        self._check_tools()

    def _fill(self, messages: Sequence[Message], **options: Any) -> Any:
        return self.reader.fill(messages, self.tools, self.form, tokenize=False, **options)

    def _refuse_python(self) -> None:
        """Refuse values as Python prints them: the template wanted them in another form."""
        for place, message in enumerate(self.marks.messages):
            shaped = self.form.shape(message)
            calls = (call.get("function", call) for call in shaped.get("tool_calls") or ())
            values = [shaped.get("content"), *(call.get("arguments") for call in calls)]
            if any(value and not isinstance(value, str) and str(value) in self.marked for value in values):
                raise Unfit(f"the chat template writes message {place + 1} as Python prints a value. {ADVICE}", 0)

    def _check_tools(self) -> None:
        # in the marked text names of calls are marks
        for tool in self.tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
            if (name := function.get("name")) and name not in self.marked:
                raise Unfit(f"the chat template leaves out the tool {name}. {LEFT_OUT}")

    def read(self, learned: set[int]) -> tuple[list[int], list[int]]:
        """Token ids, and their labels."""
        cut = len(self.whole)
        answers = []
        for place in sorted(learned):
            if not (own := self._of(place)):
                continue
            start, last = self._start(place, own), max(mark.end for mark in own)
            end = self._end(place, last)
            answers.append(Answer(place, start, last + end.length, end))
            if end.added is not None:
                cut = last + end.length
        return self._label(answers, self.whole[:cut])

    def _of(self, place: int) -> list[Mark]:
        """The marks of a message, each piece's first; refuses what stands in it twice, or between its texts."""
        own: dict[int, Mark] = {}
        for mark in self.found:
            piece = self.pieces[mark.piece]
            if piece.message == place and mark.piece in own and not piece.what.startswith("the name"):
                raise Unfit(f"the chat template writes {piece.what} of message {place + 1} twice. {ADVICE}")
            if piece.message == place:
                own.setdefault(mark.piece, mark)
        marks = sorted(own.values(), key=lambda mark: mark.start)
        if not marks:
            return []
        start, end = marks[0].start, max(mark.end for mark in marks)
        for mark in self.found:
            other = self.pieces[mark.piece].message
            if other != place and start <= mark.start < end:
                raise Unfit(f"the chat template writes message {other + 1} inside message {place + 1}. {ADVICE}")
        for piece in self.marks.unmarked:
            if piece.message == place and not any(form in self.whole[start:end] for form in piece.forms):
                raise Unfit(f'the chat template leaves out "{piece.text}", {piece.what} of message {place + 1}. {LEFT_OUT}')
        return marks

    def _start(self, place: int, own: Sequence[Mark]) -> int:
        """Where an answer begins: at its words, or if it begins with a thought or a call, where the model goes on."""
        first = own[0]
        if self.pieces[first.piece].what in ("the words", "part 1"):
            return first.start
        before = max((mark.end for mark in self.found if mark.end <= first.start), default=0)
        opening = self.whole[before : first.start]
        history = self.marks.messages[:place]
        idle, asking = (_tail(self._fill(history, add_generation_prompt=asks)) for asks in (False, True))
        shared = self.reader.shared
        asked = shared(asking, opening)
        is_shown = idle == asking or len(asked) > len(shared(idle, asking))
        if not (is_shown and self.reader.is_special(asking[len(asked) :])):
            raise Unfit(
                f"the chat template asks for message {place + 1} in other words than it writes before it, so its "
                f"beginning cannot be found. {ADVICE}"
            )
        if _thought_key(self.plain[place]) is None:
            # an empty thought is not learned: words have it before them too
            text = TEXT_MARK.format(len(self.pieces))
            words = _tail(self._fill([*history, {"role": ANSWERS, "content": text}]).split(text)[0])
            if words.startswith(asked) and opening.startswith(words) and self.reader.is_special(words[len(asked) :]):
                asked = words
        return before + len(asked)

    def _end(self, place: int, last: int) -> End:
        """The token that ends an answer, behind its last word."""
        reader = self.reader
        later = (mark for mark in self.found if mark.start >= last and self.pieces[mark.piece].message != place)
        after = min((mark.start for mark in later), default=len(self.whole))
        tail = self.whole[last:after]
        is_called = bool(self.plain[place].get("tool_calls"))

        def length_to(text: str | None) -> int | None:
            """Length of the tail up to the end of a text, if nothing but the end of a call or of words precedes it."""
            before = tail.find(text) if text else -1
            return None if before < 0 or not (is_called or reader.is_special(tail[:before])) else before + len(text or "")

        known = [length for length in map(length_to, reader.ends) if length is not None]
        if known:
            return End(min(known))
        closing = reader.closing(self.tools, self.form)
        if (length := length_to(closing.last)) is not None:
            return End(length)
        if closing.earlier and (length := length_to(closing.earlier)) is not None:
            # a turn that others follow may end in another token than the one at which the model stops
            return End(length, reader.ends.get(closing.last or ""))
        is_last = after == len(self.whole)
        if is_last and is_called and closing.last and (specials := reader.unit.findall(tail)):
            if tail.rstrip().endswith(specials[-1]) and specials[-1].startswith("<|"):
                return End(len(tail.rstrip()))
        if is_last and (is_called or not tail.strip()):
            return End(len(tail.rstrip()), added=self._next_id(place, tail))
        ends = " or ".join(reader.ends) or "none"
        raise Unfit(
            f"the chat template writes no token that ends message {place + 1}: {tail!r} follows, and the model stops at "
            f'{ends}. Put the token into the template, mask the message by "weight": 0, or give the row up to it.'
        )

    def _next_id(self, place: int, tail: str) -> int:
        """The token with which the next turn begins, if the model stops at it; else the tokenizer's own."""
        text = TEXT_MARK.format(len(self.pieces))
        for role in ("tool", "user") if self.plain[place].get("tool_calls") else ("user",):
            try:
                asked = self._fill([*self.marks.messages[: place + 1], {"role": role, "content": text}])
            except Unfit:
                continue
            following = _tail(asked.split(text)[0]).removeprefix(tail.rstrip()).lstrip()
            for end, id_ in self.reader.ends.items():
                if following.startswith(end):
                    return id_
        if self.reader.tokenizer.eos_token_id is None:
            raise Unfit(
                f"the chat template writes no token that ends message {place + 1}, and the tokenizer has none. Put one "
                "into the template."
            )
        return int(self.reader.tokenizer.eos_token_id)

    def _label(self, answers: Sequence[Answer], text: str) -> tuple[list[int], list[int]]:
        """Token ids of the text, with an added end, and their labels."""
        reader = self.reader
        encoded = reader.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        labels = [PROMPT] * len(ids)
        chosen = self._chosen(ids)
        position = 0
        for answer in answers:
            own = [mark for mark in self.found if self.pieces[mark.piece].message == answer.message]
            tokens = []
            while position < len(ids) and offsets[position][0] < answer.end:
                start, end = offsets[position]
                if end > answer.start or start == end >= answer.start:
                    tokens.append(position)
                    outside = text[start : answer.start] + text[answer.end : end]
                    if outside.strip():
                        raise Unfit(
                            f"a token of message {answer.message + 1} holds {outside!r} too, which is no part of it. "
                            "Make what the template writes around answers special tokens of the tokenizer."
                        )
                position += 1
            inside = [index for index in tokens if any(a < offsets[index][1] and offsets[index][0] < b for _, a, b in own)]
            self._refuse_ends(answer, [ids[index] for index in inside])
            if chosen is not None:
                is_chosen = {chosen[index] for index in inside}
                if is_chosen == {False}:
                    continue
                if len(is_chosen) == 2:
                    raise Unfit(
                        f"the chat template marks a part of message {answer.message + 1} by {{% generation %}}, expected "
                        "all of its words or none. Mend the template."
                    )
            for index in tokens:
                labels[index] = ids[index]
            if answer.closing.id is not None:
                labels[tokens[-1]] = answer.closing.id
            if answer.closing.added is not None:
                ids, labels = [*ids, answer.closing.added], [*labels, answer.closing.added]
        return ids, labels

    def _refuse_ends(self, answer: Answer, inside: Sequence[int]) -> None:
        """Refuse words that hold what ends a turn: the model would learn to stop there."""
        closing = self.reader.closing(self.tools, self.form)
        written = {end for end in closing if end}
        texts = [piece.text for piece in self.pieces if piece.message == answer.message]
        typed = [end for end in written if any(end in text for text in texts)]
        typed += [text for text, id_ in self.reader.ends.items() if id_ in inside]
        if typed:
            raise Unfit(f"message {answer.message + 1} holds {typed[0]}, which ends a turn. Take it out.")

    def _chosen(self, ids: Sequence[int]) -> list[bool] | None:
        """Whether each token is marked as an answer's by the template; None if it has no such marks."""
        if not self.reader._is_marked(self.tools):
            return None
        filled = self.reader.fill(
            self.plain,
            self.tools,
            self.form,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        chosen = list(map(bool, filled["assistant_masks"]))
        if list(filled["input_ids"])[: len(ids)] != list(ids):
            raise Unfit("the chat template's marks fit other tokens than its text has. Take {% generation %} out of it.")
        return chosen


def _tail(marked: str) -> str:
    """What follows the last mark."""
    marks = list(MARK.finditer(marked))
    return marked[marks[-1].end() :] if marks else marked
