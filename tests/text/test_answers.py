"""Answers of conversations: what is learned of them is their words and the token that ends them, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.options import own_warnings
from scale_surgery.errors import DataError, Problem, TextWarning
from scale_surgery.running.tokenizer import digest_tokenizer
from scale_surgery.text.answers import end_ids
from scale_surgery.text.conversations import READ
from scale_surgery.text.documents import Document, read_documents
from scale_surgery.text.tokenizing import tokenize
from tests.conftest import problems

# of most templates here the end is no token at which the shipped model stops: see the test of that warning
pytestmark = pytest.mark.filterwarnings("ignore:.* ends the answers, and this model stops at")
SPECIAL = re.compile(r"<\|[a-z_]+\|>")


def loop(body: str, asks: str, before: str = "") -> str:
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{{% if add_generation_prompt %}}{asks}{{% endif %}}"


ROLE = "<|start|>{{ m.role }}\n"
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
ENDED = loop(ROLE + "{{ m.content }}" + CALLS + "<|end|>\n", "<|start|>assistant\n", TOOLS)
# each shows one thing that published templates do
TEMPLATES = {
    "ended": ENDED,
    # the next role's token ends a turn
    "open": loop("<|{{ m.role }}|>\n{{ m.content }}" + CALLS, "<|assistant|>", TOOLS),
    # nothing ends a turn
    "endless": loop("{{ m.role }}: {{ m.content }}\n", "assistant:"),
    "parts": loop(ROLE + "{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>", "<|start|>assistant\n"),
    "no calls": loop(ROLE + "{{ m.content }}<|end|>", "<|start|>assistant\n"),
    # arguments as a text, which another form of them makes fail, or be printed as Python does
    "text": loop(
        ROLE
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
        "<|end|>",
        "<|start|>assistant\n",
    ),
    "printed": loop(
        ROLE
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
        "<|end|>",
        "<|start|>assistant\n",
    ),
    # calls as they are given, and names of tools
    "listed": loop(
        ROLE + "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls is defined }}<|end|>", "<|start|>assistant\n"
    ),
    "named tools": ENDED.replace("tool | tojson", "tool.function.name"),
    # a thought is written in the last turn alone, an empty one too, and what asks for an answer may begin it
    "thinking": loop(
        ROLE + "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
        "{% endif %}"
        "{{ m.content }}" + CALLS + "<|end|>",
        "<|start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% else %}<think>\n{% endif %}",
    ),
    "kept": loop(
        ROLE + "{% if m.thinking and (preserve_thinking or loop.last) %}<think>{{ m.thinking }}</think>{% endif %}"
        "{{ m.content | trim }}<|end|>",
        "<|start|>assistant\n",
    ),
    # the last turn ends in another token than a turn that others follow
    "channels": loop(
        "<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}"
        "<|return|>{% else %}<|end|>{% endif %}",
        "<|start|>assistant",
    ),
    # more ends the whole text
    "closed": loop("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n")
    + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "marked": loop(
        ROLE + "{% if m.role == 'assistant' and loop.last %}{% generation %}<think></think>{{ m.content }}<|end|>\n"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>\n{% endif %}",
        "<|start|>assistant\n",
    ),
    "half marked": loop(
        ROLE + "{% if m.role == 'assistant' %}{% generation %}{{ m.content[:3] }}{% endgeneration %}{{ m.content[3:] }}"
        "{% else %}{{ m.content }}{% endif %}<|end|>",
        "<|start|>assistant\n",
    ),
    # what stands before the words depends on them
    "looking": loop(
        ROLE + "{% if '<think>' not in m.content %}<think></think>{% endif %}{{ m.content }}<|end|>",
        "<|start|>assistant\n",
    ),
    "shouting": loop(ROLE + "{{ m.content | upper }}<|end|>", "<|start|>assistant\n"),
    "twice": loop(ROLE + "{{ m.content }} {{ m.content }}<|end|>", "<|start|>assistant\n"),
    "merged": loop("{% if m.role == 'system' %}{% else %}" + ROLE + "{{ m.content }}<|end|>{% endif %}", "<|start|>"),
}


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, name: str = "rain") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASKED, ANSWERED = say("user", "Hi?"), say("assistant", "Yo.")
TURNS = [ASKED, ANSWERED, say("user", "Who?"), say("assistant", "Me.")]
CALLED = [ASKED, say("assistant", "", tool_calls=[call({"city": "Paris", "days": 3})])]
THOUGHT = [ASKED, ANSWERED | {"reasoning_content": "Hm."}]


class Place:
    """The shipped tokenizer with a template and its special tokens, in a folder with a model's end tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, template: str, messages: Any, ends: tuple[str, ...] = (), **row: Any) -> list[str]:
        """What is learned of a conversation, a text for each answer."""
        text = TEMPLATES[template]
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
        special = [*SPECIAL.findall(text), *(f"<|{role}|>" for role in ("user", "assistant", "tool") if "<|{{" in text)]
        tokenizer.add_special_tokens({"additional_special_tokens": sorted({*special, *ends})})
        tokenizer.chat_template = text
        tokenizer.name_or_path = str(self.folder)
        ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
        (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ids else {}))
        file = self.folder / "a.jsonl"
        file.write_text(json.dumps({"messages": messages, **row}) + "\n")
        sequences = tokenize(read_documents([file]), tokenizer)
        self.tokenizer, self.whole = tokenizer, tokenizer.decode(sequences.ids)
        spans: list[list[int]] = [[]]
        for label in sequences.labels.tolist():
            if label >= 0:
                spans[-1].append(label)
            elif spans[-1]:
                spans.append([])
        return [tokenizer.decode(span) for span in spans if span]

    def refused(self, template: str, messages: Any, ends: tuple[str, ...] = (), **row: Any) -> Problem:
        """The problem of a conversation, with its place in the row."""
        (found,) = problems(self.read, template, messages, ends, error=DataError, **row)
        file, _, inside = found.where.partition(", line 1")
        assert file == f"{self.folder}/a.jsonl"
        return Problem(found.code, inside.removeprefix(": "), **found.values)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_words_and_the_token_that_ends_them_are_learned(place: Place) -> None:
    assert place.read("ended", TURNS) == ["Yo.<|end|>", "Me.<|end|>"]
    assert place.read("closed", TURNS) == ["Yo.<|end|>", "Me.<|end|>\n</s>"], (
        "the tokenizer's own end, where it follows"
    )
    assert place.read("closed", TURNS, ("<|end|>",)) == ["Yo.<|end|>", "Me.<|end|>"]
    # the same words elsewhere are not taken for the answer's
    same = [say("user", "Yo."), say("assistant", "Yo.")]
    assert place.read("ended", [*same, *same]) == ["Yo.<|end|>"] * 2
    assert place.read("ended", [*TURNS[:2], say("assistant", "So.")]) == ["Yo.<|end|>", "So.<|end|>"]
    assert place.read("ended", [say("assistant", "First."), *TURNS[:2]]) == ["Yo.<|end|>"]
    assert place.read("ended", [say("system", "Be kind."), *TURNS[:2]]) == ["Yo.<|end|>"]
    # a template may trim
    assert place.read("kept", [ASKED, say("assistant", " Yo.\n\n")]) == ["Yo.<|end|>"]
    assert place.read("ended", [ASKED, say("assistant", " Yo.\n\n")]) == [" Yo.\n\n<|end|>"]
    assert place.read("ended", [ASKED, say("assistant", "Ünïcode e\u0301 東京")]) == ["Ünïcode e\u0301 東京<|end|>"]


def endless(tail: str) -> Problem:
    return Problem("answer-without-end", "message 2", tail=tail, ends=["</s>"])


def test_a_turn_that_the_next_role_ends(place: Place) -> None:
    ends = ("<|user|>", "<|tool|>")
    assert place.read("open", TURNS, ends) == ["Yo.<|user|>", "Me.<|user|>"]
    answered = [*CALLED, say("tool", "5 mm"), ANSWERED]
    called = '<call>rain {"city": "Paris", "days": 3}</call><|tool|>'
    assert place.read("open", answered, ends) == [called, "Yo.<|user|>"]
    assert place.read("open", CALLED, ends) == [called]
    # without the model's end tokens the last turn alone can end, in the tokenizer's own
    assert place.read("open", TURNS[:2]) == ["Yo.</s>"]
    assert place.refused("open", TURNS) == endless("<|user|>\n")
    assert place.read("endless", TURNS[:2]) == [" Yo.</s>"]
    assert place.refused("endless", TURNS) == endless("\nuser: ")
    assert place.read("endless", [ASKED, ANSWERED | {"weight": 0}, *TURNS[2:]]) == [" Me.</s>"]


def test_an_end_that_only_the_last_turn_has(place: Place) -> None:
    assert place.read("channels", TURNS) == ["Yo.<|end|>", "Me.<|return|>"]
    assert place.read("channels", TURNS, ("<|return|>",)) == ["Yo.<|return|>", "Me.<|return|>"], "the model stops there"


def left_out(where: str, what: str) -> Problem:
    return Problem("template-leaves-out", where, what=what)


def test_what_a_template_leaves_out_is_refused(place: Place) -> None:
    assert place.read("parts", TURNS) == ["Yo.<|end|>", "Me.<|end|>"], "as parts"
    for template in ("no calls", "parts"):
        assert place.refused(template, CALLED) == left_out("message 2", "the name of the call of rain")
    assert place.refused("no calls", THOUGHT) == left_out("message 2", "the thought")
    assert place.refused("merged", [say("system", "Be kind."), *TURNS]) == left_out("message 1", "the words")
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {}}}]
    assert place.refused("no calls", TURNS, tools=tools) == left_out('"tools"', "rain")
    assert place.read("ended", TURNS, tools=tools) == place.read("ended", TURNS)
    # a name that the template itself has in its words, and one that is a role
    for name in ("start", "user"):
        named = [{"type": "function", "function": {"name": name, "parameters": {}}}]
        assert place.refused("no calls", TURNS, tools=named) == left_out('"tools"', name)
        assert place.read("ended", TURNS, tools=named) == place.read("ended", TURNS)
    assert place.refused("shouting", TURNS) == left_out("message 1", "the words")
    assert place.refused("twice", TURNS) == Problem("template-writes-twice", "message 2", what="the words")
    for number, words in {1: [say("user", "<think>?"), ANSWERED], 2: [ASKED, say("assistant", "By <think>.")]}.items():
        reads = Problem("template-reads-words", f"message {number}", what="the words")
        assert place.refused("looking", words) == reads
    # the control: a template that writes them
    assert place.read("looking", TURNS) == ["Yo.<|end|>", "Me.<|end|>"]
    assert place.read("ended", CALLED) == ['<call>rain {"city": "Paris", "days": 3}</call><|end|>']


@pytest.mark.parametrize("as_text", (False, True))
def test_arguments_are_an_object_or_a_json_text(place: Place, as_text: bool) -> None:
    given = {"city": 'Zü"rich', "near": ["Bern", 2.5, True, None], "to": {}}
    written = json.dumps(given, ensure_ascii=False)
    calls = [call(json.dumps(given) if as_text else given)]
    messages = [ASKED, say("assistant", "Yo.", tool_calls=calls)]
    assert place.read("ended", messages) == [f"Yo.<call>rain {written}</call><|end|>"]
    assert place.read("text", messages) == place.read("printed", messages) == [f"Yo.rain{written}<|end|>"]
    spelled = [ASKED, say("assistant", None, tool_calls=json.dumps(calls) if as_text else calls)]
    assert place.read("ended", spelled)[0].startswith(f"<call>rain {written}") or place.read("ended", spelled)


@pytest.mark.parametrize("arguments", ({}, "{}", "", None, "none", "null", []))
def test_a_call_may_have_no_arguments(place: Place, arguments: Any) -> None:
    function = {"name": "rain"} if arguments == "none" else {"name": "rain", "arguments": arguments}
    assert place.read("ended", [ASKED, say("assistant", "", tool_calls=[{"function": function}])]) == [
        "<call>rain {}</call><|end|>"
    ]


def test_calls_and_tools_need_no_function_around_them(place: Place) -> None:
    row = [ASKED, say("assistant", "", tool_calls=[{"name": "rain", "arguments": '{"city": "Paris"}'}])]
    tool = {"type": "function", "name": "rain", "parameters": {}}
    assert place.read("named tools", row, tools=[tool]) == ['<call>rain {"city": "Paris"}</call><|end|>']
    # as it is typed, if the template takes it
    assert place.read("listed", row) == ['[{"name": "rain", "arguments": {"city": "Paris"}}]<|end|>']


def test_an_empty_list_of_calls_or_tools_is_none(place: Place) -> None:
    for empty in ([], "", "[]", "null", None):
        assert place.read("listed", [ASKED, ANSWERED | {"tool_calls": empty}], tools=empty) == ["Yo.<|end|>"]
        silent = place.refused("listed", [ASKED, say("assistant", "", tool_calls=empty)])
        assert silent == Problem("conversation-unanswered", conversations=1)
    assert place.read("listed", CALLED)[0].startswith('[{"type": "function", "function": {"name": "rain"'), (
        "the control"
    )


def test_messages_may_be_a_json_text(place: Place) -> None:
    assert place.read("ended", json.dumps(TURNS)) == place.read("ended", TURNS) == ["Yo.<|end|>", "Me.<|end|>"]
    wrong = place.refused("ended", json.dumps([ASKED, say("model", "Yo.")]))
    assert (wrong.code, wrong.where) == ("role-unknown", 'message 2 of "messages"')
    printed = place.refused("ended", str(TURNS))
    assert (printed.code, printed.where) == ("field-no-json", '"messages"'), "as Python prints it"
    file = place.folder / "a.jsonl"
    for value in (TURNS, json.dumps(TURNS)):
        file.write_text(json.dumps({"chat": value}))
        assert [document.text for document in read_documents([f"{file},column=chat"])] == ["Yo.\nMe."]
    for text in ("[1] a note", '{"role": "user"}'):
        file.write_text(json.dumps({"chat": text}))
        assert [document.text for document in read_documents([f"{file},column=chat"])] == [text], "the control"


def test_tools_may_be_a_json_text(place: Place) -> None:
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
    function = tool["function"] | {"parameters": json.dumps(tool["function"]["parameters"])}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)], [tool | {"function": function}]):
        (place.folder / "a.jsonl").unlink(missing_ok=True)
        assert place.read("ended", TURNS, tools=tools) == ["Yo.<|end|>", "Me.<|end|>"]


def test_a_template_that_writes_the_day_gives_the_same_tokens_on_any_day(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils

    monkeypatch.setitem(TEMPLATES, "dated", "{{ strftime_now('%d %B %Y') }}" + TEMPLATES["ended"])
    seen: list[str] = []

    class Clock(chat_template_utils.datetime):
        @classmethod
        def now(cls, *_):
            seen.append("asked")
            return cls(1999, 12, 31)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    assert place.read("dated", TURNS) == ["Yo.<|end|>", "Me.<|end|>"]
    assert "01 January 2026" in place.whole and not seen
    tokenizer = place.tokenizer
    assert "31 December 1999" in tokenizer.apply_chat_template(TURNS, tokenize=False) and seen, "the control"


def test_thoughts(place: Place) -> None:
    # what asks for the answer begins the thought
    assert place.read("thinking", THOUGHT) == ["Hm.\n</think>\n\nYo.<|end|>"]
    assert place.read("thinking", [ASKED, say("assistant", "<think>\nHm.\n</think>\n\nYo.")]) == [
        "<think>\nHm.\n</think>\n\nYo.<|end|>"
    ], "typed, and written as it is typed"
    assert place.read("thinking", TURNS) == ["Yo.<|end|>", "Me.<|end|>"], "no empty thought"
    called = '<call>rain {"city": "Paris", "days": 3}</call><|end|>'
    assert place.read("thinking", CALLED) == [called]
    assert place.read("thinking", [*CALLED, say("tool", "5 mm"), ANSWERED]) == [called, "Yo.<|end|>"]
    assert place.refused("thinking", [*THOUGHT, *TURNS[2:]]) == left_out("message 2", "the thought")
    # under the name that the template has, and kept in earlier turns by its own switch
    assert place.read("kept", [*THOUGHT, *TURNS[2:]]) == ["<think>Hm.</think>Yo.<|end|>", "Me.<|end|>"]


def test_marks_of_a_template_choose_answers(place: Place) -> None:
    assert place.read("marked", TURNS) == ["Me.<|end|>"], "the words and their end alone, though more is marked"
    half = place.refused("half marked", [ASKED, say("assistant", "Yo there.")])
    assert half == Problem("template-marks-part", "message 2")


@pytest.mark.parametrize("key", ("weight", "train", "training", "loss"))
def test_a_message_may_be_masked(place: Place, key: str) -> None:
    first, second = ANSWERED | {key: 0}, say("assistant", "Me.", **{key: 1})
    assert place.read("ended", [ASKED, first, ASKED, second]) == ["Me.<|end|>"]
    assert place.read("ended", [ASKED, first | {key: False}, ASKED, second | {key: True}]) == ["Me.<|end|>"]
    for value in (0.5, "0", 2, [1]):
        wrong = place.refused("ended", [ASKED, ANSWERED | {key: value}])
        assert (wrong.code, wrong.where) == ("value-unfit", f'message 2 of "messages": "{key}"')
        assert wrong.values["value"] == repr(value)


def test_words_that_end_a_turn_are_refused(place: Place) -> None:
    for words in ("Yo.<|end|>No.", "</s>"):
        end = re.findall("<.*>", words)[0]
        assert place.refused("ended", [ASKED, say("assistant", words)]) == Problem(
            "answer-holds-end", "message 2", token=end
        )
    assert place.read("ended", [say("user", "What is <|end|>?"), ANSWERED]) == ["Yo.<|end|>"], "not learned"


def test_text_parts(place: Place) -> None:
    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    single = [say("user", [part("Hi?")]), say("assistant", [part("Yo.")])]
    assert place.read("ended", single) == place.read("parts", single) == ["Yo.<|end|>"]
    several = [ASKED, say("assistant", [part("Yo."), part(" So.")])]
    assert place.read("parts", several) == ["Yo. So.<|end|>"]
    assert place.refused("ended", several) == Problem("template-prints-python", "message 2")
    image = [say("user", [{"type": "image_url", "image_url": {}}]), ANSWERED]
    assert place.refused("parts", image) == Problem(
        "part-no-text", 'message 1 of "messages": a part of "content"', type="image_url"
    )


def test_what_no_conversation_may_hold_is_named(place: Place) -> None:
    def said(**more: Any) -> dict[str, Any]:
        return say("assistant", "", **more)

    json_object, arguments = "an object, perhaps as a JSON text", 'the call of rain: "arguments"'
    no_json = {"error": "Expecting value: line 1 column 1 (char 0)", "kind": json_object}
    found = [
        (say("model", "Yo."), Problem("role-unknown", role="model", roles=READ)),
        (say("Assistant", "Yo."), Problem("role-unknown", role="Assistant", roles=READ)),
        (said(function_call={"name": "rain"}), Problem("function-call-old")),
        (said(tool_calls=[call("Paris")]), Problem("field-no-json", arguments, **no_json)),
        (said(tool_calls=[call("[1]")]), Problem("value-unfit", arguments, value="a list", kind=json_object)),
        (said(tool_calls=[{"function": {}}]), Problem("call-without-name", '"tool_calls"')),
        (said(thinking="a", reasoning="b"), Problem("thoughts-differ", keys=["thinking", "reasoning"])),
        (said(thinking=["a"]), Problem("value-unfit", '"thinking"', value="a list", kind="a text")),
    ]
    for message, problem in found:
        assert place.refused("ended", [ASKED, message]) == problem.within('message 2 of "messages"')
    assert place.refused("ended", TURNS, tools="[").code == "field-no-json"
    assert place.read("ended", [say("ipython", "5"), *TURNS]) == place.read("ended", TURNS), (
        "a role that answers nothing"
    )


def test_conversations_that_nobody_answers_are_counted(place: Place) -> None:
    file = place.folder / "b.jsonl"
    silent = [[ASKED], [ASKED, say("assistant", " ")], [ASKED, ANSWERED | {"weight": 0}], [ANSWERED]]
    rows = [TURNS, *silent]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    with pytest.warns(TextWarning, match=r"b\.jsonl, line 2: nobody answers \(4 conversations in all\)"):
        assert len(list(read_documents([file]))) == 1
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in silent))
    assert problems(lambda: list(read_documents([file])), error=DataError) == [
        Problem("conversation-unanswered", f"{file}, line 1", conversations=4)
    ]


def test_a_command_prints_what_is_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    file = place.folder / "a.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (TURNS, [ASKED])))
    with own_warnings(said.append):
        for _ in range(2):
            list(read_documents([file]))
    assert [message.partition("line 2: ")[2][:14] for message in said] == ["nobody answers"], "once, read twice"


def test_end_tokens_are_those_of_the_folder(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    own = tokenizer.eos_token_id
    tokenizer.name_or_path = str(tmp_path)
    assert end_ids(tokenizer) == {own}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_ids(tokenizer) == {own, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6, len(tokenizer), None]}))
    assert end_ids(tokenizer) == {own, 5, 6}
    before = digest_tokenizer(tokenizer, tmp_path)
    tokenizer.chat_template = TEMPLATES["ended"]
    digests = [digest_tokenizer(tokenizer, tmp_path)]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert len({before, *digests, digest_tokenizer(tokenizer, tmp_path)}) == 3, "other ends, other tokens in the cache"


@pytest.mark.filterwarnings("error")
def test_an_end_at_which_the_model_does_not_stop_is_named_once(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.chat_template, tokenizer.name_or_path = TEMPLATES["ended"], str(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    documents = [Document("Hi?", "Yo.", f"a.jsonl, line {line}", {"messages": TURNS[:2]}) for line in (1, 2)]
    with pytest.warns(TextWarning) as warned:
        learned = tokenize(documents, tokenizer).labels
    assert [str(warning.message) for warning in warned] == [
        f"'<|end|>' ends the answers, and this model stops at </s>: it will go on behind its answers. Add the id {end} "
        "to eos_token_id in generation_config.json."
    ]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, end]}))
    assert torch.equal(tokenize(documents, tokenizer).labels, learned), "the control, without a warning"


def test_a_token_that_holds_more_than_the_answer_is_refused() -> None:
    """A tokenizer of whole words, to which what a template writes directly before or after an answer belongs."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    document = Document("Hi?", "Yo.", "a.jsonl, line 1", {"messages": TURNS[:2]})
    for body, outside in ((">{{ m.content }}</s> ", ">"), ("{{ m.content }}</s> ", "")):
        tokenizer.chat_template = loop(body, ">" if outside else "")
        if not outside:
            assert tokenize([document], tokenizer).labels[-2:].tolist() == [0, 1]
            continue
        assert problems(tokenize, [document], tokenizer, error=DataError) == [
            Problem("token-beyond-answer", "a.jsonl, line 1: message 2", outside=">")
        ]
