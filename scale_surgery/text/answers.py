"""Answers of conversations: selects the tokens of a chat template's output that are learned.

Rule: only the words of an answer and the token that ends it are learned. Words are its text, its thought, and the name
and arguments of its calls, with the template's text between them. If the rendered text does not contain them, the row
is refused.

Each conversation is rendered twice: as it is, and with a mark in place of each text. Both renderings have to agree
except for the marks, so a mark gives the position of its text. Repeated words make no difference, nor does a template
that renders earlier turns differently from the last.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, GENERATION_FILE
from scale_surgery.errors import DataError, Problem, TextWarning
from scale_surgery.text.conversations import (
    ANSWERS,
    THOUGHTS,
    Message,
    is_answer,
    is_masked,
    parsed,
    plain_message,
    plain_tool,
    thought_key,
    tool_name,
    with_function,
    with_functions,
    with_thought,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# template variables that switch thoughts on or off, and those that keep the thoughts of earlier turns
THINKING = ("enable_thinking", "thinking")
ALL_THOUGHTS = {"preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False}

# the day that templates write as today's: the same text must have the same tokens on any day
DAY = datetime(2026, 1, 1)
NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

MARKED = re.compile(r"\{%[-+]?\s*generation\b")
# marks of a text and of a number; templates neither escape nor trim letters and digits
TEXT_MARK, NUMBER_MARK = "qz{}zq", "77103{}30177"
MARK = re.compile("qz([0-9]+)zq|77103([0-9]+?)30177")
# special tokens as templates write them: <|im_end|>, </s>, <end_of_turn>, [/INST], [|endofturn|]
CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
# a text in tags; templates look for such tags
IN_TAGS = re.compile(r"(\s*<([^<>\s]+)>)(.*\S.*)(</\2>\s*)", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A text of a message that the template has to render: its words, its thought, or a part of a call."""

    message: int
    what: str
    text: str

    @property
    def forms(self) -> Iterator[str]:
        """The forms in which a template may render the text: with or without outer blanks, plain or escaped as JSON."""
        text = self.text
        yield text  # the form of most texts
        cut = (text.rstrip("\n"), text.lstrip("\n"), text.rstrip(), text.lstrip(), text.strip("\n"), text.strip())
        yield from cut
        for is_ascii in (False, True):
            yield from (json.dumps(each, ensure_ascii=is_ascii)[1:-1] for each in (text, *cut))


class Marks:
    """Messages with a mark in place of each text, and the marked pieces."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.pieces: list[Piece] = []
        # keys of arguments, and values without a mark
        self.unmarked: list[Piece] = []
        self.messages = [self._marked(place, message) for place, message in enumerate(messages)]

    def _marked(self, place: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        if key := thought_key(message):
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
            self.unmarked.append(Piece(place, what, json.dumps(value)))
            return value
        self.pieces.append(Piece(place, what, json.dumps(value)))
        return int(NUMBER_MARK.format(len(self.pieces) - 1))

    def _text(self, place: int, what: str, text: str) -> str:
        if not text.strip():
            return text
        self.pieces.append(Piece(place, what, text))
        return TEXT_MARK.format(len(self.pieces) - 1)


class UnfitError(Exception):
    """A mismatch of template and row; if several forms fail, the problem with the highest rank is raised."""

    def __init__(self, problem: Problem, rank: float = 2) -> None:
        super().__init__(problem)
        self.problem, self.rank = problem, rank


def _nth(place: int) -> str:
    """Return the name of a message in errors, which count from 1."""
    return f"message {place + 1}"


class Mark(NamedTuple):
    """A mark in the marked text, with the position of its text in the rendered text."""

    piece: int
    start: int
    end: int

    def overlaps(self, start: int, end: int) -> bool:
        """Return True if a token contains a part of the text."""
        return self.start < end and start < self.end


def find_marks(whole: str, marked: str, pieces: Sequence[Piece]) -> list[Mark]:
    """Find the texts of the pieces, in order, by the marks in the marked text."""
    found = list(MARK.finditer(marked))
    numbers = [int(mark[1] or mark[2]) for mark in found]
    missing = [piece for number, piece in enumerate(pieces) if number not in numbers]
    if missing:
        problem = Problem("template-leaves-out", _nth(missing[0].message), what=missing[0].what)
        raise UnfitError(problem, 1 + 1 / (1 + len(missing)))
    marks: list[Mark] = []
    position = found[0].start() if found else 0
    fits = whole.startswith(marked[:position])
    for index, (mark, number) in enumerate(zip(found, numbers, strict=True)):
        is_last = index + 1 == len(found)
        following = marked[mark.end() : None if is_last else found[index + 1].start()]
        forms = pieces[number].forms if fits and number < len(pieces) else iter(())
        ends = (position + len(form) for form in forms if whole.startswith(form, position))
        fitting = (end for end in ends if whole.startswith(following, end))
        end = next((end for end in fitting if not is_last or end + len(following) == len(whole)), None)
        if end is None:
            # if this text is present, the next one changes the template's text between them
            is_there = fits and any(whole.startswith(form, position) for form in pieces[number].forms)
            piece = pieces[min(numbers[index + (is_there and not is_last)], len(pieces) - 1)]
            raise UnfitError(Problem("template-reads-words", _nth(piece.message), what=piece.what))
        marks.append(Mark(number, position, end))
        position = end + len(following)
    return marks


# templates


@dataclass(frozen=True)
class Form:
    """A form in which a conversation is passed to a template; templates differ in the forms that they accept."""

    parts: bool
    as_text: bool
    thought: str
    options: Mapping[str, bool]

    def shape(self, message: Message) -> dict[str, Any]:
        """Convert a message to this form."""
        shaped = dict(message)
        if self.parts and isinstance(message.get("content"), str):
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        if key := thought_key(message):
            shaped[self.thought] = shaped.pop(key)
        if self.as_text and message.get("tool_calls"):
            shaped["tool_calls"] = [_call_as_text(call) for call in message["tool_calls"]]
        return shaped


def _call_as_text(call: Message) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call_as_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if "arguments" in call else {**call}


def prints_python(shaped: Message, text: str) -> bool:
    """Return True if a template printed a list or an object of a message as Python does."""
    calls = (call.get("function", call) for call in shaped.get("tool_calls") or ())
    values = [shaped.get("content"), *(call.get("arguments") for call in calls)]
    return any(value and not isinstance(value, str) and str(value) in text for value in values)


class Closing(NamedTuple):
    """The text that ends a turn: of the last turn, and of an earlier one; None if unknown."""

    last: str | None
    earlier: str | None


class End(NamedTuple):
    """The end of an answer: characters from its last word to the end of the closing token.

    If `id` is set, it is learned in place of that token. If `added` is set, it is appended to the tokens.
    """

    length: int
    id: int | None = None
    added: int | None = None


@dataclass
class ChatReader:
    """A reader of conversations that uses the tokenizer's chat template."""

    tokenizer: PreTrainedTokenizerBase
    closings: dict[Any, Closing] = field(init=False, default_factory=dict)
    # tokens that end answers although the model does not stop at them
    unstopped: set[int] = field(init=False, default_factory=set)

    @cached_property
    def ends(self) -> dict[str, int]:
        """The tokens at which the model stops, with their ids."""
        ends = {str(self.tokenizer.decode([id_])): id_ for id_ in sorted(end_ids(self.tokenizer))}
        return {text: id_ for text, id_ in ends.items() if text.strip()}

    @cached_property
    def unit(self) -> re.Pattern[str]:
        """The pattern of a special token in a text."""
        known = sorted({*self.tokenizer.all_special_tokens, *self.ends}, key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, known), CONTROL]))

    def read(self, chat: Mapping[str, Any], source: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation and their labels, PROMPT for tokens that are not learned."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(Problem("tokenizer-without-template", source))
        if not self.tokenizer.is_fast:
            raise DataError(Problem("tokenizer-without-offsets", source))
        messages = [plain_message(message) for message in chat["messages"]]
        tools = [plain_tool(tool) for tool in parsed(chat.get("tools") or [])] or None
        learned = {place for place, message in enumerate(chat["messages"]) if is_answer(place, message)}
        masked = [place for place, message in enumerate(chat["messages"]) if is_masked(message)]
        if self._is_marked(tools) and is_answer(1, chat["messages"][0]):
            learned.add(0)
        given = [(messages, tools)]
        nested = [with_functions(message) for message in messages], tools and [with_function(tool) for tool in tools]
        if nested != given[0]:
            given.append(nested)
        problems: list[UnfitError] = []
        for some, offered in given:
            for form, shaped in self._forms(some, offered):
                try:
                    return Rendering(self, form, shaped, offered).read(learned, masked)
                except UnfitError as error:
                    problems.append(error)
        raise DataError(max(problems, key=lambda error: error.rank).problem.within(source))

    def _is_marked(self, tools: Any) -> bool:
        return bool(MARKED.search(self._template(tools)))

    def _template(self, tools: Any) -> str:
        return str(self.tokenizer.get_chat_template(tools=tools))

    def _forms(self, messages: Sequence[Message], tools: Any) -> Iterator[tuple[Form, list[dict[str, Any]]]]:
        """Generate the forms of a conversation that a template may accept, the usual forms first."""
        template = self._template(tools)

        def known(options: Mapping[str, bool]) -> dict[str, bool]:
            return {name: value for name, value in options.items() if re.search(rf"\b{name}\b", template)}

        split = [with_thought(message) for message in messages]
        for some in (messages, split) if split != messages else (messages,):
            keys = [key for key in map(thought_key, some) if key]
            has_parts = any(isinstance(message.get("content"), list) for message in some)
            has_calls = any(message.get("tool_calls") for message in some)
            thinks = known(dict.fromkeys(THINKING, bool(keys) or split != messages))
            kept = known(ALL_THOUGHTS) if keys else {}
            for as_text, parts, thought, option in product(
                (False, True)[: 1 + has_calls],
                (True,) if has_parts else (False, True),
                dict.fromkeys((*keys, *THOUGHTS)) if keys else (THOUGHTS[0],),
                [thinks, thinks | kept] if kept else [thinks],
            ):
                yield Form(parts, as_text, thought, option), [dict(message) for message in some]

    def fill(self, messages: Sequence[Message], tools: Any, form: Form, **options: Any) -> Any:
        """Return the template's output for these messages."""
        render: Any = self.tokenizer.apply_chat_template
        try:
            template = self._template(tools)
            if (dated := NOW.sub(lambda call: repr(DAY.strftime(call[2])), template)) != template:
                options["chat_template"] = dated
            return render([form.shape(message) for message in messages], tools=tools, **form.options, **options)
        except Exception as error:  # templates may raise anything
            reason = " ".join(f"{error}".split()) or type(error).__name__
            raise UnfitError(Problem("template-refuses", error=reason), 0) from error

    def shared(self, one: str, other: str) -> str:
        """Return the common start of two texts, in whole special tokens."""
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
        """Return True if a text consists of special tokens and blanks."""
        return not self.unit.sub("", text).strip()

    def check_end(self, id_: int) -> None:
        """Warn once if a token ends answers although the model does not stop at it."""
        if id_ in self.ends.values() or id_ in self.unstopped:
            return
        self.unstopped.add(id_)
        stops, is_special = " or ".join(self.ends) or "no token", id_ in self.tokenizer.added_tokens_decoder
        advice = f"Add the id {id_} to eos_token_id in generation_config.json."
        warnings.warn(
            f"{self.tokenizer.decode([id_])!r} ends the answers, and this model stops at {stops}: it will go on behind "
            f"its answers. {advice if is_special else 'Let the chat template end each answer with that.'}",
            TextWarning,
            stacklevel=2,
        )

    def closing(self, tools: Any, form: Form) -> Closing:
        """Return the texts with which the template ends a turn of words."""
        key = (form.parts, tuple(form.options.items()), bool(tools))
        if key not in self.closings:
            self.closings[key] = self._closing(tools, form)
        return self.closings[key]

    def _closing(self, tools: Any, form: Form) -> Closing:
        user, answer, more = (
            {"role": role, "content": TEXT_MARK.format(number)} for number, role in enumerate(("user", ANSWERS, "user"))
        )
        try:
            asks = self.fill([user], tools, form, tokenize=False, add_generation_prompt=True)
            alone, asked, going = (
                self.fill(some, tools, form, tokenize=False, add_generation_prompt=goes_on).split(answer["content"])[1]
                for some, goes_on in (([user, answer], False), ([user, answer, more], False), ([user, answer], True))
            )
        except (UnfitError, IndexError):  # the template rejects the conversation, or drops the words
            return Closing(None, None)
        both = self.shared(alone, asked).strip()
        if both:
            # the last of several special tokens; some templates end turns with ordinary text
            end = (self.unit.findall(both) or [both])[-1]
            return Closing(end, end)
        first, last = self.unit.match(asked.lstrip()), self.unit.findall(alone)
        header = self.unit.search(asks.split(user["content"])[-1].removeprefix(first[0] if first else ""))
        # a text that follows regardless of the next role ends the turn, unless turns begin with it
        ends = first and last and going.lstrip().startswith(first[0]) and not (header and header[0] == first[0])
        return Closing(last[-1] if last else None, first[0] if first and ends else None)


def end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids at which a model stops: the tokenizer's, and those in its folder's generation_config.json."""
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
    """The position of an answer in the rendered text, with its end."""

    message: int
    start: int
    end: int
    closing: End


class Rendering:
    """A conversation rendered by a template, in one form."""

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
        """Refuse values printed as Python objects: the template expects another form."""
        printed = []
        for place, message in enumerate(self.marks.messages):
            if prints_python(self.form.shape(message), self.marked):
                printed.append(place)
        if printed:
            given = (place for place in printed if isinstance(self.plain[place].get("content"), list))
            raise UnfitError(Problem("template-prints-python", _nth(next(given, printed[0]))), 0)

    def _check_tools(self) -> None:
        # marks replace the names of calls in the marked text, but a role or the template itself may use the same name
        is_written = self.tools and self._writes_tools()
        for tool in self.tools or ():
            if (name := tool_name(tool)) and not (is_written and name in self.marked):
                raise UnfitError(Problem("template-leaves-out", '"tools"', what=name))

    def _writes_tools(self) -> bool:
        """Return True if the template renders the tools."""
        try:
            return bool(self.marked != self.reader.fill(self.marks.messages, None, self.form, tokenize=False))
        except UnfitError:  # the template fails without tools
            return True

    def read(self, learned: set[int], masked: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the token ids and their labels."""
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
        spans = [
            (min(mark.start for mark in own), self._after(place, max(mark.end for mark in own)))
            for place in masked
            if (own := [mark for mark in self.found if self.pieces[mark.piece].message == place])
        ]
        return self._label(answers, spans, self.whole[:cut])

    def _of(self, place: int) -> list[Mark]:
        """Return the first mark of each piece of a message, sorted by position.

        Refuse a message if a piece appears twice, or if the text of another message appears between its texts.
        """
        own: dict[int, Mark] = {}
        for mark in self.found:
            piece = self.pieces[mark.piece]
            if piece.message == place and mark.piece in own and not piece.what.startswith("the name"):
                raise UnfitError(Problem("template-writes-twice", _nth(place), what=piece.what))
            if piece.message == place:
                own.setdefault(mark.piece, mark)
        marks = sorted(own.values(), key=lambda mark: mark.start)
        if not marks:
            return []
        start, end = marks[0].start, max(mark.end for mark in marks)
        for mark in self.found:
            other = self.pieces[mark.piece].message
            if other != place and start <= mark.start < end:
                raise UnfitError(Problem("template-nests-messages", _nth(place), other=other + 1))
        written = self.whole[start : self._after(place, end)]
        for piece in self.marks.unmarked:
            # as JSON or as Python writes it
            forms = [*piece.forms, {"true": "True", "false": "False", "null": "None"}.get(piece.text, piece.text)]
            if piece.message == place and not any(form in written for form in forms):
                where = f"{_nth(place)}, {piece.what}"
                raise UnfitError(Problem("template-leaves-out", where, what=f'"{piece.text}"'))
        return marks

    def _after(self, place: int, last: int) -> int:
        """Return the position of the next text of another message, or the end of the rendered text."""
        later = (mark for mark in self.found if mark.start >= last and self.pieces[mark.piece].message != place)
        return min((mark.start for mark in later), default=len(self.whole))

    def _start(self, place: int, own: Sequence[Mark]) -> int:
        """Return the start of an answer: its first word.

        Exception: an answer that begins with a thought or a call starts at the end of the generation prompt.
        """
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
            raise UnfitError(Problem("template-asks-otherwise", _nth(place)))
        if thought_key(self.plain[place]) is None:
            # an empty thought is not learned: the template also puts it before an answer without a thought
            text = TEXT_MARK.format(len(self.pieces))
            words = _tail(self._fill([*history, {"role": ANSWERS, "content": text}]).split(text)[0])
            if words.startswith(asked) and opening.startswith(words) and self.reader.is_special(words[len(asked) :]):
                asked = words
        return before + len(asked)

    def _end(self, place: int, last: int) -> End:
        """Return the end of the token that ends an answer, counted from its last word."""
        reader = self.reader
        after = self._after(place, last)
        tail = self.whole[last:after]
        is_called = bool(self.plain[place].get("tool_calls"))

        def length_to(text: str | None) -> int | None:
            """Return the length of the tail up to the end of a text.

            None if anything precedes the text except the end of a call or special tokens.
            """
            before, found, _ = tail.partition(text or "\0")
            return len(before + found) if found and (is_called or reader.is_special(before)) else None

        known = [length for length in map(length_to, reader.ends) if length is not None]
        if known:
            return End(min(known))
        closing = reader.closing(self.tools, self.form)
        if (length := length_to(closing.last)) is not None:
            return End(length)
        if closing.earlier and (length := length_to(closing.earlier)) is not None:
            # an earlier turn may end with another token than the one at which the model stops
            return End(length, reader.ends.get(closing.last or ""))
        is_last = after == len(self.whole)
        last_special = (reader.unit.findall(tail) or [""])[-1]
        is_closed = last_special.startswith("<|") and tail.rstrip().endswith(last_special)
        if is_last and is_called and closing.last and is_closed:
            return End(len(tail.rstrip()))  # calls may have their own end token
        if is_last and (is_called or not tail.strip()):
            return End(len(tail.rstrip()), added=self._next_id(place, tail))
        ends = list(reader.ends) or "none"
        raise UnfitError(Problem("answer-without-end", _nth(place), tail=tail, ends=ends))

    def _next_id(self, place: int, tail: str) -> int:
        """Return the first token of the next turn if the model stops at it, otherwise the tokenizer's end token."""
        text = TEXT_MARK.format(len(self.pieces))
        for role in ("tool", "user") if self.plain[place].get("tool_calls") else ("user",):
            try:
                asked = self._fill([*self.marks.messages[: place + 1], {"role": role, "content": text}])
            except UnfitError:
                continue
            following = _tail(asked.split(text)[0]).removeprefix(tail.rstrip()).lstrip()
            for end, id_ in self.reader.ends.items():
                if following.startswith(end):
                    return id_
        if self.reader.tokenizer.eos_token_id is None:
            raise UnfitError(Problem("tokenizer-without-end", _nth(place)))
        return int(self.reader.tokenizer.eos_token_id)

    def _label(
        self, answers: Sequence[Answer], masked: Sequence[tuple[int, int]], text: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of the text, with any added end token, and their labels.

        Masked messages are IGNORED, up to the next one; `learn_prompts` learns what is PROMPT.
        """
        from scale_surgery.text.sequences import IGNORED, PROMPT  # imports torch

        reader = self.reader
        encoded = reader.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        labels = [
            IGNORED if any(begin < end and start < stop for begin, stop in masked) else PROMPT for start, end in offsets
        ]
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
                        raise UnfitError(Problem("token-beyond-answer", _nth(answer.message), outside=outside))
                position += 1
            spans = [(index, *offsets[index]) for index in tokens]
            inside = [index for index, start, end in spans if any(mark.overlaps(start, end) for mark in own)]
            self._refuse_ends(answer, [ids[index] for index in inside])
            if chosen is not None:
                is_chosen = {chosen[index] for index in inside}
                if is_chosen == {False}:
                    continue
                if len(is_chosen) == 2:
                    raise UnfitError(Problem("template-marks-part", _nth(answer.message)))
            for index in tokens:
                labels[index] = ids[index]
            if answer.closing.id is not None:
                labels[tokens[-1]] = answer.closing.id
            if answer.closing.added is None:
                reader.check_end(labels[tokens[-1]])
            else:
                ids, labels = [*ids, answer.closing.added], [*labels, answer.closing.added]
        return ids, labels

    def _refuse_ends(self, answer: Answer, inside: Sequence[int]) -> None:
        """Refuse an answer that contains the end of a turn: the model would learn to stop there."""
        closing = self.reader.closing(self.tools, self.form)
        written = {end for end in closing if end and self.reader.is_special(end)}
        texts = [piece.text for piece in self.pieces if piece.message == answer.message]
        typed = [end for end in written if any(end in text for text in texts)]
        typed += [text for text, id_ in self.reader.ends.items() if id_ in inside]
        if typed:
            raise UnfitError(Problem("answer-holds-end", _nth(answer.message), token=typed[0]))

    def _chosen(self, ids: Sequence[int]) -> list[bool] | None:
        """Return True for each token that the template marks as generated; None if the template has no such marks."""
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
            raise UnfitError(Problem("template-marks-others"))
        return chosen


def _tail(marked: str) -> str:
    """Return the text after the last mark."""
    marks = list(MARK.finditer(marked))
    return marked[marks[-1].end() :] if marks else marked
