"""Texts: what files become, what of them is scored, and that windows lose and repeat nothing."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import DataError, Problem, TextWarning
from scale_surgery.progress import no_progress
from scale_surgery.text import documents
from scale_surgery.text.documents import EXPECTED, Document, in_pieces, read_documents
from scale_surgery.text.sequences import IGNORED, PROMPT, Sequences
from scale_surgery.text.sources import parse_source
from scale_surgery.text.tokenizing import (
    collate,
    pack,
    start_tokens,
    stride,
    token_before,
    tokenize,
    tokenize_prompts,
    without_unscored,
)
from scale_surgery.training.training_texts import _digest
from tests.conftest import problems, refused

PAD, START, END, UNKNOWN = range(4)
ALPHABET = "abcdefghijklmnopqrstuvwxyz ?\n"


def letters(*, starts: bool = True, ends: bool = True, closes: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a letter; `closes`: it ends every text itself."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *ALPHABET]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    template = ("<s> " if starts else "") + "$A" + (" </s>" if closes else "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", START), ("</s>", END)]
    )
    special = {"bos_token": "<s>" if starts else None, "eos_token": "</s>" if ends else None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", **special)


def ids_of(text: str) -> list[int]:
    return [ALPHABET.index(letter) + 4 for letter in text]


def read(*paths: Path | str) -> list[tuple[str, str]]:
    return [(document.prompt, document.text) for document in read_documents(paths)]


def lines(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def found_in(*paths: Path | str) -> list[Problem]:
    """The problems for which texts are refused."""
    return problems(read, *paths, error=DataError)


def sequences_of(lengths: list[int]) -> Sequences:
    """Sequences in which every token is another one, so that each can be found again; all but the first are scored."""
    ids = torch.arange(sum(lengths), dtype=torch.int32)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return Sequences(ids, ids.clone(), tuple(starts))


# files


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("\ufeff# drei, 東京", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read(tmp_path / "b.md", tmp_path / "a.txt", tmp_path / "empty.txt") == [
        ("", "# drei, 東京"),
        ("", "one\n\ntwo\n"),
    ]


def test_every_form_of_a_line(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        {"text": "plain", "id": 7},
        {"question": "Where?", "answer": "Oslo"},
        {"question": "Where?", "answer": "  Rome"},
        {"prompt": "def f():", "completion": "\n    pass"},
        {"question": "unanswered?", "prompt": "p", "completion": "c"},
        {"text": "  "},
        {"prompt": "nothing follows", "completion": ""},
    )
    assert read(file) == [
        ("", "plain"),
        ("Where?", " Oslo"),
        ("Where?", " Rome"),
        ("def f():", "\n    pass"),
        ("p", "c"),
    ]


@pytest.mark.parametrize("suffix", (".JSONL", ".Json"))
def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path: Path, suffix: str) -> None:
    file = lines(tmp_path / f"a{suffix}", {"question": "Where?", "answer": "Oslo"})
    assert read(file) == [("Where?", " Oslo")]
    assert _digest(parse_source(file), no_progress).startswith(f"{suffix.lower()} ")
    (tmp_path / "b.JSON").write_text('[{"text": "one"}, {"text": "two"}]')
    assert read(tmp_path / "b.JSON") == [("", "one"), ("", "two")], "an array"


def test_a_blank_field_hides_no_other(tmp_path: Path) -> None:
    """As a table has one in rows of another kind; the control has words in both."""
    file, talk = tmp_path / "rows.jsonl", [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows = [
        {"text": "", "messages": talk},
        {"text": " ", "question": "Q", "answer": "A"},
        {"text": "T", "messages": talk},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat, answer, text = read_documents([file])
    assert chat.chat == {"messages": talk} and (answer.prompt, answer.text) == ("Q", " A")
    assert text.chat is None and text.text == "T"


def test_blank_lines_and_other_line_ends_are_no_lines(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0bfour"
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"text": text}, ensure_ascii=False).encode() + b'\r\n\r\n\n{"text": "last"}'
    )
    assert read(tmp_path / "a.jsonl") == [("", text), ("", "last")]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    error = "'utf-8' codec can't decode byte 0xfc in position 1: invalid start byte"
    assert found_in(tmp_path / "latin.txt") == [Problem("text-unreadable", tmp_path / "latin.txt", error=error)]
    assert found_in(tmp_path / "none.txt") == [Problem("text-not-found", tmp_path / "none.txt")]


def test_a_saved_dataset(tmp_path: Path) -> None:
    rows = {"question": ["Where?", "When?"], "answer": ["Oslo", "1970"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "many")
    datasets.Dataset.from_dict({"body": ["x"]}).save_to_disk(tmp_path / "other")
    (tmp_path / "folder").mkdir()
    assert read(tmp_path / "one") == [("Where?", " Oslo"), ("When?", " 1970")]
    assert [document.source for document in read_documents([tmp_path / "one"])][1] == f"{tmp_path}/one, row 2"
    whole = f"{tmp_path / 'one'}"
    assert [problem.code for problem in found_in(f"{whole},split=test")] == ["split-unknown"]
    assert read(f"{whole},split=train") == read(whole)
    assert [problem.code for problem in found_in(f"{whole},config=a")] == ["text-without-setting"]
    assert [problem.code for problem in found_in(f"{whole},revision=a")] == ["text-without-setting"]
    assert found_in(tmp_path / "many") == [Problem("saved-splits", tmp_path / "many", splits=["train"], first="train")]
    assert found_in(tmp_path / "other") == [
        Problem("fields-unfit", f"{tmp_path}/other, row 1", fields=["body"], kind=EXPECTED)
    ]
    (tmp_path / "one" / "state.json").write_text("[]", encoding="utf-8")
    with refused("folder-no-dataset", tmp_path / "one"):
        read(tmp_path / "one")
    assert found_in(tmp_path / "folder") == [Problem("folder-without-texts", tmp_path / "folder")]


def test_alpaca_and_conversations(tmp_path: Path) -> None:
    system, asked, answer = (
        {"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("assistant", "a"))
    )
    tools = [{"type": "function"}]
    file = lines(
        tmp_path / "a.jsonl",
        {"instruction": "Add {1}.", "input": "", "output": "2"},
        {"instruction": "Add.", "input": "1", "output": "2"},
        {"instruction": "Say nothing.", "output": ""},
        {"messages": [system, asked, answer | {"name": None}, asked], "tools": tools, "prompt": "q"},
        {"messages": [answer, asked]},
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
    )
    with pytest.warns(TextWarning) as warned:
        plain, more, spoken, called = read_documents([file])
    assert [f"{warning.message}" for warning in warned] == [
        f"{file}, line 5: nobody answers (1 conversation in all), expected words of the assistant after another "
        "message, not masked. Such conversations are left out."
    ]
    assert plain.prompt.endswith("completes the request.\n\n### Instruction:\nAdd {1}.\n\n### Response:\n")
    assert more.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1\n\n### Response:\n")
    assert plain.text == more.text == "2" and plain.chat is more.chat is None
    assert spoken.chat == {"messages": [system, asked, answer, asked], "tools": tools}
    assert (spoken.prompt, spoken.text, spoken.source) == ("s\nq\nq", "a", f"{file}, line 4")
    assert called.text == '[{"name": "f"}]' and called.chat is not None
    body = lines(tmp_path / "b.jsonl", {"body": [asked, answer]})
    assert [document.text for document in read_documents([f"{body},column=body"])] == ["a"]


def unfit(field: str, value: str, kind: str = "a text") -> Problem:
    return Problem("value-unfit", field, value=value, kind=kind)


# rows that are refused, each with its problem; its place lies behind the line
ROWS = {
    '{"text": ': Problem("row-no-json", error="Expecting value in column 10"),
    '"a string"': unfit("", "a text", EXPECTED),
    "[1]": unfit("", "a list", EXPECTED),
    "{}": Problem("fields-unfit", fields="none", kind=EXPECTED),
    '{"question": "no answer?"}': Problem("fields-unfit", fields=["question"], kind=EXPECTED),
    '{"text": "\\ud800 x"}': Problem("half-a-character", '"text"'),
    '{"text": null, "more": 1}': unfit('"text"', "empty"),
    '{"text": 5, "more": 1}': unfit('"text"', "a number"),
    '{"text": ["a"]}': unfit('"text"', "a list"),
    '{"instruction": "i", "input": {}, "output": "o"}': unfit('"input"', "an object"),
    '{"messages": "hello"}': Problem(
        "field-no-json",
        '"messages"',
        error="Expecting value: line 1 column 1 (char 0)",
        kind="a list, perhaps as a JSON text",
    ),
    '{"messages": {}}': unfit('"messages"', "an object", "a list, perhaps as a JSON text"),
    '{"messages": []}': unfit('"messages"', "empty", 'a list of {"role", "content"}'),
    '{"messages": ["hello"]}': unfit('message 1 of "messages"', "a text", '{"role", "content"}'),
    '{"messages": [{"from": "human", "value": "hello"}]}': Problem(
        "fields-unfit", 'message 1 of "messages"', fields=["from", "value"], kind='{"role", "content"}'
    ),
    '{"messages": [{"role": "user", "content": ["x"]}]}': unfit(
        'message 1 of "messages": a part of "content"', "a text", '{"type": "text", "text"}'
    ),
    '{"messages": [{"role": "user", "content": [{"text": 1}]}]}': unfit(
        'message 1 of "messages": a part of "content": "text"', "a number"
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_with_a_row_is_named(tmp_path: Path, row: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "good"}}\n{row}\n')
    assert found_in(file) == [ROWS[row].within(f"{file}, line 2")]


def test_of_many_rows_that_are_refused_twelve_are_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(ROWS))
    named = [problem.within(f"{file}, line {number}") for number, problem in enumerate(ROWS.values(), 1)]
    assert found_in(file) == [*named[:12], Problem("rows-more", file, more=len(ROWS) - 12)]


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".TSV", "\t")])
def test_a_table_is_not_learned_as_text(tmp_path: Path, suffix: str, separator: str) -> None:
    file = tmp_path / f"a[1]{suffix}"
    file.write_text(f'question{separator}answer{separator}id\r\n"one{separator}?"{separator}two{separator}3\r\n')
    assert read(file) == [(f"one{separator}?", " two")]
    assert read(f"{file},column=id") == [("", "3")]
    file.write_text(f"instruction{separator}out\nAdd.{separator}2\n")
    assert found_in(file) == [Problem("fields-unfit", f"{file}, line 2", fields=["instruction", "out"], kind=EXPECTED)]
    file.write_bytes(b"text\nZ\xfcrich\n")
    with refused("text-unreadable", file):
        read(file)


@pytest.mark.parametrize("answer", ("4", "007", "1.50", "None", "NA", "null", "nan", "True", "1970-01-01"))
def test_what_stands_in_a_table_is_text(tmp_path: Path, answer: str) -> None:
    (tmp_path / "a.csv").write_text(f"question,answer\nWhat?,{answer}\n")
    (tmp_path / "a.tsv").write_text(f"text\tid\n{answer}\t1\n")
    assert read(tmp_path / "a.csv") == [("What?", f" {answer}")]
    assert read(tmp_path / "a.tsv") == [("", answer)]


def test_an_empty_field_of_a_table_is_none(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('instruction,input,output\nAdd.,,2\nAdd.,"",3\n')
    assert [text for _, text in read(file)] == ["2", "3"], "a column of which nothing is known"
    file.write_text("text,question,answer\n,Where?,Oslo\nplain,,\n,When?, \n")
    assert read(file) == [("Where?", " Oslo"), ("", "plain")]
    file.write_text("question,answer\nWhere?,Oslo\nWhen?,\n")
    assert found_in(file) == [unfit(f'{file}, line 3: "answer"', "empty")]
    file.write_text("")
    assert found_in(file) == [Problem("table-empty", file)]


# tokens


def test_of_an_answer_every_token_is_scored_and_of_a_question_none() -> None:
    documents = [Document("ab?", " cd", ""), Document("", "ef", "")]
    sequences = tokenize(documents, letters())
    question, answer, text = ids_of("ab?"), ids_of(" cd"), ids_of("ef")
    assert sequences.ids.tolist() == [START, *question, *answer, END, START, *text, END]
    assert sequences.labels.tolist() == [*[PROMPT] * 4, *answer, END, IGNORED, *text, END]
    assert sequences.starts == (0, 8, 12)
    assert (len(sequences), sequences.scored, sequences.longest) == (2, 7, 8)
    assert sequences[1]["input_ids"].tolist() == [START, *text, END]
    assert sequences[1]["labels"].dtype == torch.int64
    learned = tokenize(documents, letters(), learn_prompts=True)
    assert learned.labels[:8].tolist() == [IGNORED, *learned.ids[1:8].tolist()]
    assert learned.labels[8:].tolist() == [IGNORED, *learned.ids[9:].tolist()]


# a template that marks answers, one that does not, and one that leaves a thought out of all answers but the last
TURN = "{{ m.role[0] + ' ' }}%s{{ m.content + '</s>' }}%s{{ '\n' }}"
TURNS = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ 'a ' }}}}{{% endif %}}".format
MARKED = TURNS(
    "{% if m.role == 'assistant' %}"
    + TURN % ("{% generation %}", "{% endgeneration %}")
    + "{% else %}"
    + TURN % ("", "")
    + "{% endif %}"
)
UNMARKED = TURNS(TURN % ("", ""))
THINKING = TURNS(TURN % ("{% if loop.last and m.role == 'assistant' %}z {% endif %}", ""))
TALK = [
    {"role": role, "content": text}
    for role, text in (("assistant", "hi"), ("user", "ab?"), ("assistant", "cd"), ("user", "ef?"), ("assistant", "gh"))
]


def chat_of(messages: list[dict[str, str]]) -> Document:
    return Document("ab?", "cd", "talk.jsonl, line 1", {"messages": messages})


@pytest.mark.parametrize(
    ("template", "answers", "thought"),
    [
        (MARKED, ["hi</s>", "cd</s>", "gh</s>"], ""),
        (UNMARKED, ["cd</s>", "gh</s>"], ""),
        # what the template itself puts before the words is not learned
        (THINKING, ["cd</s>", "gh</s>"], "z "),
    ],
    ids=["marked", "unmarked", "thinking"],
)
def test_of_a_conversation_the_answers_are_scored(template: str, answers: list[str], thought: str) -> None:
    tokenizer = letters()
    tokenizer.chat_template = template
    # beside others, whose order it keeps
    sequences = tokenize([Document("", "x", ""), chat_of(TALK), Document("", "y", "")], tokenizer)
    talk = sequences[1]
    whole = f"a hi</s>\nu ab?</s>\na cd</s>\nu ef?</s>\na {thought}gh</s>\n"
    assert talk["input_ids"].tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    scored = talk["labels"] >= 0
    assert talk["labels"][scored].tolist() == talk["input_ids"][scored].tolist()
    assert set(talk["labels"][~scored].tolist()) == {PROMPT}
    expected = tokenizer("".join(answers), add_special_tokens=False)["input_ids"]
    assert talk["labels"][scored].tolist() == expected
    # what is scored goes with its tokens, wherever sequences are cut
    packed, all_labels = pack(sequences, 7, ()), torch.cat([sequences[place]["labels"] for place in range(3)])
    assert torch.cat([packed[place]["labels"] for place in range(len(packed))]).tolist() == all_labels.tolist()
    learned = tokenize([chat_of(TALK)], tokenizer, learn_prompts=True)
    assert learned.labels.tolist() == learned.ids.tolist() == talk["input_ids"].tolist()


def test_with_learned_prompts_masked_messages_stay_unlearned() -> None:
    tokenizer = letters()
    tokenizer.chat_template = UNMARKED
    turns = [("user", "ab?"), ("assistant", "bad"), ("user", "cd?"), ("assistant", "ef")]
    messages = [{"role": role, "content": text} for role, text in turns]

    def learned() -> list[int]:
        talk = tokenize([chat_of(messages)], tokenizer, learn_prompts=True)
        scored = talk.labels >= 0
        assert talk.labels[scored].tolist() == talk.ids[scored].tolist()
        return talk.labels[scored].tolist()

    def written(*texts: str) -> list[int]:
        return [id_ for text in texts for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]]

    assert learned() == written("u ab?</s>\na bad</s>\nu cd?</s>\na ef</s>\n"), "the control"
    messages[1]["weight"] = 0
    # up to the words of the next message
    assert learned() == written("u ab?</s>\na ", "cd?</s>\na ef</s>\n")
    messages[2]["weight"] = 0
    assert learned() == written("u ab?</s>\na ", "ef</s>\n")


def test_with_learned_prompts_an_answer_ends_at_the_token_at_which_the_model_stops() -> None:
    """Not at the one that an earlier turn ends with."""
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = TURNS(
        "{{ m.role[0] }} {{ m.content }}{{ '</s>' if loop.last and not add_generation_prompt else '<|turn|>' }}\n"
    )
    turns = [("user", "ab?"), ("assistant", "cd"), ("user", "ef?"), ("assistant", "gh")]
    chat = chat_of([{"role": role, "content": text} for role, text in turns])
    plain, whole = (tokenize([chat], tokenizer, learn_prompts=learns) for learns in (False, True))
    answers = plain.labels >= 0
    assert whole.labels[answers].tolist() == plain.labels[answers].tolist()
    assert (plain.labels[answers] != plain.ids[answers]).any(), "the control: an end is not the one that is read"
    assert whole.labels[~answers].tolist() == plain.ids[~answers].tolist()


# as Qwen3 has it: what closes a message holds letters, and what stands before the last answer too
CLOSED = TURNS(
    "<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n"
).replace("'a '", "'<|im_start|>assistant\n'")


@pytest.mark.filterwarnings("ignore:.* ends the answers, and this model stops at")
@pytest.mark.parametrize("answer", ("yes", "d", "end", "im", "i", "think", "<", ">\n>", "_"))
def test_short_answers_are_found_behind_their_prompt(answer: str) -> None:
    tokenizer = letters()
    tokenizer.chat_template = CLOSED
    turns = (("user", "ab?"), ("assistant", answer), ("user", "cd?"), ("assistant", "yes"))
    talk = tokenize([chat_of([{"role": role, "content": text} for role, text in turns])], tokenizer)
    expected = tokenizer(f"{answer}<|im_end|>yes<|im_end|>", add_special_tokens=False)
    assert talk.labels[talk.labels >= 0].tolist() == expected["input_ids"]


def test_conversations_that_no_template_can_write() -> None:
    tokenizer = letters()
    found = {
        None: Problem("tokenizer-without-template"),
        "{{ raise_exception('no such role') }}": Problem("template-refuses", error="no such role"),
    }
    for template, problem in found.items():
        tokenizer.chat_template = template
        assert problems(tokenize, [chat_of(TALK)], tokenizer) == [problem.within("talk.jsonl, line 1")]


def test_tokenizers_with_and_without_tokens_that_start_and_end() -> None:
    documents = [Document("ab?", " cd", ""), Document("", "ef", "")]
    # an end that the tokenizer adds itself stands once, and not after the prompt
    for closes in (False, True):
        sequences = tokenize(documents, letters(closes=closes))
        assert sequences.ids.tolist() == [START, *ids_of("ab? cd"), END, START, *ids_of("ef"), END]
    assert tokenize(documents[1:], letters(ends=False)).ids.tolist() == [START, *ids_of("ef")]
    sequences = tokenize([Document("", "ef", ""), Document("", "g", "")], letters(starts=False))
    assert sequences.labels.tolist() == sequences.ids.tolist() == [*ids_of("ef"), END, *ids_of("g"), END]
    assert sequences.scored == 3, "the first token of a text is not predicted"


def test_control_tokens_in_a_text_are_not_doubled() -> None:
    """As in text that a chat template wrote; the controls are texts without them."""
    tokenizer = letters()

    def pieces(prompt: str, text: str) -> tuple[list[int], list[int]]:
        sequences = tokenize([Document(prompt, text, "here")], tokenizer)
        return sequences.ids.tolist(), sequences.labels.tolist()

    assert pieces("", "<s>ab</s>")[0] == pieces("", "ab")[0] == [START, *ids_of("ab"), END]
    assert tokenize_prompts(["<s>ab", "ab", "ab</s>", ""], tokenizer) == [
        [START, *ids_of("ab")],
        [START, *ids_of("ab")],
        [START, *ids_of("ab"), END],
        [START],
    ]
    # the end of the prompt's turn is no part of the answer
    ids, labels = pieces("ab</s>", "c")
    assert ids == [START, *ids_of("ab"), END, *ids_of("c"), END] and labels[:4] == [PROMPT] * 4
    # an answer that says the prompt again is whole
    again = tokenize([Document("ab", "abc", "here")], letters(starts=False))
    assert again.ids.tolist() == [*ids_of("ab"), *ids_of("abc"), END] and again.labels.tolist()[2:] == [
        *ids_of("abc"),
        END,
    ]
    # a tokenizer that ends each text itself
    assert tokenize_prompts(["ab", "ab</s>"], letters(closes=True)) == [
        [START, *ids_of("ab")],
        [START, *ids_of("ab"), END],
    ]


def test_models_that_read_other_tokens_are_scored_on_the_same_text() -> None:
    """Without a start token, a new first token would take pieces of the base from what is scored."""
    base, wide = letters(starts=False), letters(starts=False)
    wide.add_tokens(["abc"])
    assert token_before(base, base) == [] == token_before(letters(), wide) and token_before(wide, base) == [END]
    texts = [Document("", "abcab", "here"), Document("", "ab", "there")]

    def scored(tokenizer: Any, before: list[int]) -> str:
        sequences = stride(tokenize(texts, tokenizer, before=before), 64, 32, [])
        rows = (sequences[place]["labels"][1:] for place in range(len(sequences)))
        return "".join(tokenizer.decode(row[row >= 0]).replace(" ", "") for row in rows)

    assert scored(wide, [END]) == scored(base, [END]) == "abcab</s>ab</s>"
    assert scored(wide, []) == "ab</s>b</s>" != scored(base, []) == "bcab</s>b</s>"


def test_the_shipped_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    sequences = tokenize([Document("Q: Where?\nA:", " Leeds", "")], tokenizer)
    answer = tokenizer(" Leeds", add_special_tokens=False)["input_ids"]
    assert sequences.ids.tolist() == [*tokenizer("Q: Where?\nA:")["input_ids"], *answer, tokenizer.eos_token_id]
    assert sequences.scored == len(answer) + 1


def marking() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a mark, which is a space, before every text, as that of Llama 2."""
    merges = [("i", "m"), ("t", "im"), ("▁", "tim")]
    pieces = ["<unk>", "<s>", "▁", *ALPHABET, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("prompt", "text", "pieces"),
    (
        ("who?\na?", " tim", ["▁tim"]),
        ("who? ", "tim", ["tim"]),
        ("a t", "im tim", ["im", "▁tim"]),
        ("a ti", "m?", ["m", "?"]),
        ("who?", "\n\ntim", ["\n", "\n", "tim"]),
    ),
)
def test_a_text_goes_on_from_its_prompt(prompt: str, text: str, pieces: list[str]) -> None:
    """Nothing lies between them, also where one token could span both; the prompt's tokens are those of it alone."""
    tokenizer = marking()
    assert tokenizer.decode(tokenizer("tim", add_special_tokens=False)["input_ids"] * 2) == "tim tim"
    (sequence,) = tokenize([Document(prompt, text, "")], tokenizer)
    assert tokenizer.decode(sequence["input_ids"], skip_special_tokens=True) == prompt + text
    (asked,) = tokenize_prompts([prompt], tokenizer)
    answer = tokenizer.convert_tokens_to_ids(pieces)
    assert sequence["input_ids"].tolist() == [*asked, *answer]
    assert sequence["labels"].tolist() == [*[PROMPT] * len(asked), *answer]


def test_more_documents_than_are_tokenized_at_once() -> None:
    sequences = tokenize((Document("", "ab"[: 1 + index % 2], "") for index in range(2500)), letters())
    assert len(sequences) == 2500 and sequences.starts[-1] == len(sequences.ids) == 2500 * 3 + 1250


def test_texts_without_a_token_are_refused() -> None:
    class Silent(PreTrainedTokenizerFast):
        def __call__(self, texts: Any, **options: Any) -> Any:
            return {"input_ids": [[] for _ in texts]}

    with refused("texts-without-documents", "data", DataError):
        tokenize([], letters())
    silent = Silent(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with refused("document-without-token", "a.txt", DataError):
        tokenize([Document("", "x", "a.txt")], silent)


def test_fingerprints_tell_tokens_labels_and_boundaries_apart() -> None:
    sequences = tokenize([Document("ab?", " cd", ""), Document("", "ef", "")], letters())
    same = tokenize([Document("ab?", " cd", ""), Document("", "ef", "")], letters())
    others = [
        tokenize([Document("ab?", " ce", ""), Document("", "ef", "")], letters()),
        tokenize([Document("ab", "? cd", ""), Document("", "ef", "")], letters()),
        pack(sequences, 6, ()),
    ]
    assert sequences.fingerprint() == same.fingerprint()
    assert len({sequences.fingerprint(), *(variant.fingerprint() for variant in others)}) == 4


# long texts


def test_a_long_text_is_tokenized_in_pieces_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONG_TEXT", 100)
    monkeypatch.setattr(documents, "PIECE", 20)
    text = " \n" * 60 + "abc defg\n" * 9 + " \n" * 40 + "ab\r\n" * 9 + "x" * 70 + "\nend"
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (whole,) = read_documents([file])
    pieces = list(read_documents([file], whole=False))
    assert pieces == list(in_pieces(whole)) and len(pieces) == 11
    assert "".join(piece.text for piece in pieces) == whole.text == text.replace("\r", "")
    assert [piece.goes_on for piece in pieces] == [True] * 10 + [False]
    assert pieces[0].text.startswith(" \n" * 60 + "abc"), "lines without text begin no document"
    cut = [piece.text for piece in pieces[:-1] if not piece.text.endswith("\n")]
    assert cut and all("x" in text for text in cut), "a line of more than a piece"
    assert all(len(piece.text) <= 40 for piece in pieces[1:])
    sequences = tokenize([Document("", "ab", ""), whole, Document("", "cd", "")], letters())
    assert sequences[1]["input_ids"].tolist() == [START, *ids_of(whole.text), END] and len(sequences) == 3
    assert (
        sequences.labels[4] == IGNORED and sequences[1]["labels"][1:].tolist() == sequences[1]["input_ids"][1:].tolist()
    )
    # what is not long, or no plain text, is one piece; lines without text are none
    chat = {"messages": [{"role": "user", "content": "a" * 200}]}
    for document in (
        Document("", "a" * 100, ""),
        Document("a" * 200, "b" * 200, ""),
        Document("", "a" * 200, "", chat),
    ):
        assert list(in_pieces(document)) == [document]
    (tmp_path / "blank.txt").write_text(" \n" * 200)
    assert list(read_documents([tmp_path / "blank.txt"], whole=False)) == []
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    piece_ids = [tokenizer(piece.text, add_special_tokens=False)["input_ids"] for piece in pieces]
    ids = tokenize([whole], tokenizer).ids.tolist()
    assert ids == [tokenizer.bos_token_id, *chain.from_iterable(piece_ids), tokenizer.eos_token_id]


# windows


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 20))
def test_packing_covers_every_token_once(lengths: list[int], length: int) -> None:
    sequences = sequences_of(lengths)
    packed = pack(sequences, length, ())
    sizes = [end - start for start, end in pairwise(packed.starts)]
    assert torch.cat([packed[row]["input_ids"] for row in range(len(packed))]).tolist() == sequences.ids.tolist()
    assert set(sizes[:-1]) <= {length} and 1 <= sizes[-1] <= length
    assert packed.scored == len(packed.ids) - len(packed)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(2, 20).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 1))),
)
@settings(max_examples=80)
def test_striding_scores_every_token_once(lengths: list[int], window: tuple[int, int]) -> None:
    length, step = window
    sequences = sequences_of(lengths)
    windows = stride(sequences, length, step, ())
    assert windows.longest <= length
    scored = []
    for row in (windows[index] for index in range(len(windows))):
        places = [place for place, label in enumerate(row["labels"].tolist()) if label >= 0 and place > 0]
        scored += row["labels"][places].tolist()
        assert torch.equal(row["labels"][places], row["input_ids"][places])
        if row["input_ids"][0] not in sequences.starts:
            assert min(places) >= length - step, "a later window has context for what it scores"
    firsts = set(sequences.starts[:-1])
    assert scored == [token for token in sequences.ids.tolist() if token not in firsts]
    assert windows.scored == sequences.scored


def test_an_answer_is_one_in_whatever_window_it_begins() -> None:
    """A prompt may end in the overlap of two windows; a later window that continues a text begins no answer."""
    sequences = tokenize([Document("abcdefgh?", " ijklm", ""), Document("", "nopqrstuvwxyz", "")], letters())
    for length in range(3, 16):
        for step in range(1, length):
            windows = stride(sequences, length, step, [START])
            begins = [
                after
                for row in (windows[index]["labels"].tolist() for index in range(len(windows)))
                for before, after in pairwise(row)
                if before == PROMPT and after >= 0
            ]
            assert begins == ids_of(" "), (length, step)


@given(
    st.integers(1, 40),
    st.integers(3, 12).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 2))),
)
def test_each_window_begins_as_a_text_does(tokens: int, window: tuple[int, int]) -> None:
    """And what is scored stays: start tokens take the place of context alone."""
    (length, step), start = window, [-7, -8]
    (ids,) = ([*start, *range(tokens)],)
    flat = torch.tensor(ids, dtype=torch.int32)
    labels = torch.where(flat >= 0, flat, IGNORED).int()
    text = Sequences(flat, labels, (0, len(ids)))
    for cut in (stride(text, length, step, start), pack(text, length, start)):
        rows = [cut[row]["input_ids"].tolist() for row in range(len(cut))]
        assert all(row[:2] == start[: len(row)] for row in rows)
    windows, plain = stride(text, length, step, start), stride(text, length, step, ())
    assert torch.equal(windows.labels, plain.labels) and list(windows.starts) == list(plain.starts)
    moved = windows.ids != plain.ids
    assert not (moved & (windows.labels >= 0)).any()
    assert moved.any() == (len(ids) > length), "the control"


def test_one_start_token_takes_no_token_from_what_is_learned() -> None:
    sequences = tokenize([Document("", "abcdefghijklmnop", "")], letters())
    plain, packed = (pack(sequences, 5, start) for start in ((), [START]))
    assert packed.scored == plain.scored and torch.equal(packed.labels[1:5], plain.labels[1:5])
    assert [packed[row]["input_ids"][0] for row in range(len(packed))] == [START] * len(packed)
    assert [plain[row]["input_ids"][0] for row in range(len(plain))] != [START] * len(plain), "the control"
    assert start_tokens(letters()) == [START]


# batches


def test_a_batch_is_padded_on_the_right() -> None:
    sequences = tokenize([Document("ab?", " cd", ""), Document("", "ef", "")], letters())
    batch = collate([sequences[0], sequences[1]])
    assert batch["input_ids"][1].tolist() == [START, *ids_of("ef"), END, 0, 0, 0, 0]
    assert batch["attention_mask"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]
    ignored = [IGNORED] * 4
    assert batch["labels"].tolist() == [[*ignored, *ids_of(" cd"), END], [IGNORED, *ids_of("ef"), END, *ignored]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    # nothing predicts a first token; some releases of transformers count it among those that a loss is a mean of
    whole = collate([{"input_ids": torch.arange(5), "labels": torch.arange(5)}])["labels"]
    assert (whole != IGNORED).sum() == (whole[:, 1:] != IGNORED).sum() == 4


def test_sequences_without_anything_to_learn_are_left_out() -> None:
    ids = torch.arange(10, dtype=torch.int32)
    labels = torch.where(torch.arange(10) < 6, torch.tensor(IGNORED), ids).int()
    kept = without_unscored(Sequences(ids, labels, (0, 3, 6, 8, 10)))
    assert kept.starts == (0, 2, 4) and kept.ids.tolist() == [6, 7, 8, 9] and kept.scored == 2
    with refused("data-without-scored-tokens", "", DataError):
        without_unscored(Sequences(ids[:6], labels[:6], (0, 3, 6)))
