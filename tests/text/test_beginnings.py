"""How a model's own texts begin and end: instructions in its chat template, prompts, or the token of a text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import DataError, Problem
from scale_surgery.text.answers import ChatReader
from scale_surgery.text.beginnings import Beginnings, begin_answers, begin_prompts, find_beginnings
from scale_surgery.text.instructions import SHIPPED, SHIPPED_FILE, read_instructions
from tests.conftest import problems, refused
from tests.instruct import BEGIN, END, TEMPLATE

# forms of published templates: the end of a turn is a special token, the tokenizer's own, or none
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
DROPS_SYSTEM = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + TEMPLATE
OWN_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + TEMPLATE
PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NEEDS_MORE = "{{ raise_exception('give a date') }}"
ROWS = ({"prompt": "Who?"}, {"system": "Be brief.", "prompt": "Where?\nAnd when?"})


@pytest.fixture
def with_template(tmp_path: Path) -> Any:
    """A tokenizer with a template, and the tokens at which generation_config.json says its model stops."""

    def make(template: str, ends: tuple[str, ...] = (END,)) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
        tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END]})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        stops = {"eos_token_id": tokenizer.convert_tokens_to_ids(list(ends))} if ends else {}
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stops))
        return AutoTokenizer.from_pretrained(tmp_path / "model")

    return make


@pytest.fixture
def asked(tmp_path: Path) -> str:
    return write(tmp_path / "asked.jsonl", *ROWS)


def write(file: Path, *rows: object) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def texts(begins: Beginnings, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(ids) for ids in begins.ids]


def end_names(begins: Beginnings, tokenizer: Any) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(list(begins.ends)))


# the template decides


def test_an_instruction_is_what_the_template_makes_of_it(with_template: Any, asked: str) -> None:
    tokenizer = with_template(TEMPLATE)
    begins = find_beginnings(tokenizer, "model", 256, asked)
    for ids, instruction in zip(begins.ids, read_instructions(asked), strict=True):
        given = list(instruction.messages)
        filled = tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=True)
        assert list(ids) == filled["input_ids"]
        assert list(ids) != tokenizer.apply_chat_template(given, return_dict=True)["input_ids"], "the control"
    assert texts(begins, tokenizer)[1] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?\nAnd when?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert begins.is_chat and begins.notes == () and end_names(begins, tokenizer) == {"</s>", END}


def test_a_list_of_parts_is_not_asked_as_python_prints_it(with_template: Any, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "A?"}, {"type": "text", "text": "B?"}]
    file = write(tmp_path / "asked.jsonl", {"messages": [{"role": "user", "content": parts}]})
    found = problems(begin_answers, with_template(PLAIN), read_instructions(file), "m", None, error=DataError)
    assert [problem.code for problem in found] == ["template-prints-python"]
    assert begin_answers(with_template(PARTS), read_instructions(file), "m", None).ids, "the control"


def test_tools_are_offered_as_in_training(with_template: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "find_city", "parameters": {"type": "object"}}}
    row = {"messages": [{"role": "user", "content": "Where?"}], "tools": [tool]}
    asked = read_instructions(write(tmp_path / "asked.jsonl", row))
    tokenizer = with_template("{{ tools[0].function.name }}:" + PLAIN)
    (ids,) = begin_answers(tokenizer, asked, "m", None).ids
    assert tokenizer.decode(ids).replace(" ", "").startswith("find_city:")
    dropped = problems(begin_answers, with_template(PLAIN), asked, "m", None, error=DataError)
    assert [problem.code for problem in dropped] == ["template-leaves-out"]
    assert [problem.code for problem in problems(begin_prompts, tokenizer, asked, "m", None, error=DataError)] == [
        "system-without-template"
    ]


def test_a_system_message_of_the_template_stays_and_gives_way(with_template: Any, asked: str) -> None:
    tokenizer = with_template(OWN_SYSTEM)
    first, second = texts(find_beginnings(tokenizer, "model", None, asked), tokenizer)
    assert first.startswith("<|im_start|>system\nBe kind.") and "Be kind." not in second and "Be brief." in second


def test_a_template_that_takes_parts_gets_parts(with_template: Any, asked: str) -> None:
    given = {template: with_template(template) for template in (TEMPLATE, PARTS)}
    made = [texts(find_beginnings(tokenizer, "model", None, asked), tokenizer) for tokenizer in given.values()]
    assert made[0] == made[1]


@pytest.mark.parametrize(("template", "code"), [(NO_SYSTEM, "template-refuses"), (DROPS_SYSTEM, "template-leaves-out")])
def test_a_system_message_that_the_template_does_not_take(
    with_template: Any, asked: str, template: str, code: str
) -> None:
    """It is an error in rows that somebody gave; of the package's list, such rows are left out and that is said."""
    tokenizer = with_template(template)
    (found,) = problems(find_beginnings, tokenizer, "model", None, asked, error=DataError)
    assert found.code == code and found.where.startswith(f"{asked}, line 2")
    begins = find_beginnings(tokenizer, "model", None)
    assert len(begins.ids) == 180 and begins.notes[0].startswith("20 instructions left out (instruction 7: ")
    assert len(find_beginnings(with_template(TEMPLATE), "model", None).ids) == 200, "the control"


def test_a_template_that_takes_nothing_is_refused(with_template: Any) -> None:
    found = problems(find_beginnings, with_template(NEEDS_MORE), "model", None, error=DataError)
    assert len(found) == 200 and {problem.code for problem in found} == {"template-refuses"}


# ends


def test_the_end_of_a_turn_is_derived_from_the_template(with_template: Any, asked: str) -> None:
    """The model's config does not name it: samples end there, and it is said that the model goes on."""
    tokenizer = with_template(TEMPLATE, ends=("</s>",))
    begins = find_beginnings(tokenizer, "model", None, asked)
    assert end_names(begins, tokenizer) == {"</s>", END}
    assert begins.notes == (f"the chat template ends a turn with {END}, at which model does not stop by itself",)


def test_a_template_without_an_end_falls_back_to_those_of_the_model(with_template: Any, asked: str) -> None:
    tokenizer = with_template(PLAIN, ends=())
    begins = find_beginnings(tokenizer, "model", None, asked)
    assert end_names(begins, tokenizer) == {"</s>"}
    assert begins.notes == ("the chat template ends a turn without a token of its own; answers end at </s>",)
    tokenizer.eos_token = None
    with refused("turn-without-end", "model", DataError):
        find_beginnings(tokenizer, "model", None, asked)


# lengths, and what has no template


def test_what_leaves_no_token_for_an_answer(with_template: Any, asked: str) -> None:
    tokenizer = with_template(TEMPLATE)
    lengths = find_beginnings(tokenizer, "model", None, asked).lengths
    assert find_beginnings(tokenizer, "model", max(lengths) + 1, asked).lengths == lengths
    expected = Problem("instruction-too-long", f"{asked}, line 2", tokens=max(lengths), most=max(lengths) - 1)
    assert problems(find_beginnings, tokenizer, "model", max(lengths), asked, error=DataError) == [expected]
    begins = find_beginnings(tokenizer, "model", 60)
    assert 0 < len(begins.ids) < 200 and f"{200 - len(begins.ids)} instructions left out" in begins.notes[0]


def test_without_a_template_or_with_raw_texts_begin_as_texts(with_template: Any, tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    for tokenizer, raw in ((plain, False), (with_template(TEMPLATE), True)):
        begins = find_beginnings(tokenizer, "model", 64, raw=raw)
        assert begins == Beginnings(((tokenizer.bos_token_id,),), (tokenizer.eos_token_id,))
        file = write(tmp_path / "some.jsonl", ROWS[0], {"prompt": "long " * 90})
        begun = find_beginnings(tokenizer, "model", 64, file, raw=raw)
        assert begun.ids[0] == tuple(tokenizer("Who?")["input_ids"]) and not begun.is_chat
        assert begun.lengths[1] == 63 and begun.notes == ("1 prompt cut to 63 tokens",)
        with refused("system-without-template", f"{write(tmp_path / 'more.jsonl', *ROWS)}, line 2", DataError):
            find_beginnings(tokenizer, "model", 64, str(tmp_path / "more.jsonl"), raw=raw)


# files


def test_rows_of_every_form_are_instructions(tmp_path: Path) -> None:
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    # some programs write the system message beside the others
    beside = [{"system": "system", "messages": chat[1:]}, {"messages": chat}]
    first, second = read_instructions(write(tmp_path / "beside.jsonl", *beside))
    assert first.messages == second.messages == tuple(chat[:4])
    file = write(tmp_path / "all.jsonl", {"question": "Why?", "answer": "So."}, ROWS[1], {"messages": chat})
    read = read_instructions(file)
    assert [[message["role"] for message in each.messages] for each in read] == [
        ["user"],
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    # a named field counts, and may have messages
    both = write(tmp_path / "both.jsonl", {"prompt": "Hi", "messages": chat, "said": chat[1:2]})
    for name, wanted in ((both, chat[:4]), (f"{both},column=prompt", [{"role": "user", "content": "Hi"}])):
        assert read_instructions(name)[0].messages == tuple(wanted)
    assert read_instructions(f"{both},column=said")[0].messages == tuple(chat[1:2])
    # what some programs write for no messages and no tools
    (empty,) = read_instructions(write(tmp_path / "null.jsonl", {"prompt": "Hi", "messages": None}))
    (none,) = read_instructions(write(tmp_path / "none.jsonl", {"messages": chat, "tools": "null"}))
    assert empty.messages == ({"role": "user", "content": "Hi"},) and none.tools == ()
    (tmp_path / "lines.txt").write_text("One?\n\nTwo?\n")
    lines = read_instructions(tmp_path / "lines.txt")
    assert [each.messages[0]["content"] for each in lines] == ["One?", "Two?"] and lines[1].number == 2


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"text": "no prompt"}, "fields-unfit"),
        ({"prompt": " "}, "value-unfit"),
        ({"prompt": 3}, "value-unfit"),
        ({"prompt": "Who?", "system": 3}, "value-unfit"),
        ({"messages": [{"role": "assistant", "content": "I."}]}, "messages-without-question"),
        ({"messages": []}, "value-unfit"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": "[{"}, "field-no-json"),
    ],
)
def test_rows_that_ask_nothing_are_refused_by_name(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    file = write(tmp_path / "bad.jsonl", ROWS[0], row)
    (found,) = problems(read_instructions, file, error=DataError)
    assert found.code == code and found.where.startswith(f"{file}, line 2")


def test_the_packages_list_has_every_form_in_ten_languages() -> None:
    rows = [json.loads(line) for line in SHIPPED_FILE.read_text(encoding="utf-8").splitlines()]
    counts = Counter((row["language"], row["kind"]) for row in rows)
    assert len(counts) == 100 and set(counts.values()) == {2} and len({row["prompt"] for row in rows}) == 200
    # a short run reads its first rows alone
    assert len({row["language"] for row in rows[:10]}) == len({row["kind"] for row in rows[:10]}) == 10
    assert all(("system" in row) == (row["kind"] == "role") for row in rows)
    assert all("\n" in row["prompt"] for row in rows if row["kind"] == "lines")
    assert [each.source for each in read_instructions(SHIPPED)][:2] == ["instruction 1", "instruction 2"]


def test_a_reader_of_conversations_learns_what_samples_begin_with(with_template: Any, asked: str) -> None:
    """The tokens of a beginning, an answer and its end are those of the same conversation in a text to learn."""
    tokenizer = with_template(TEMPLATE)
    begins = find_beginnings(tokenizer, "model", None, asked)
    for ids, instruction in zip(begins.ids, begins.asked or (), strict=True):
        chat = [*map(dict, instruction.messages), {"role": "assistant", "content": "Here."}]
        read, _ = ChatReader(tokenizer).read({"messages": chat}, "row")
        answer = tokenizer(f"Here.{END}", add_special_tokens=False)["input_ids"]
        assert read[: len(ids) + len(answer)] == [*ids, *answer]
