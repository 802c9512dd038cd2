"""Files of each kind, alone and in folders: what is written there is read, or refused with its place."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from scale_surgery.errors import DataError, Problem
from scale_surgery.text import documents
from scale_surgery.text.documents import read_documents, read_questions
from scale_surgery.text.folders import texts_in
from scale_surgery.text.sources import parse_source
from scale_surgery.text.text_files import FORMS
from tests.conftest import refused
from tests.text.test_tokenizing import found_in, lines, read

CARD = "---\nlicense: mit\n{}---\nAbout this dataset.\n"


def places(*paths: Path | str) -> list[tuple[str, str]]:
    return [(document.source, document.text) for document in read_documents(paths)]


# nulls that Arrow makes


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A row with a call and the tool that it calls; keys differ from row to row."""
    properties = {key: {"type": "string", "enum": ["x"]} if key == "b" else {"type": "string"} for key in arguments}
    function = (
        {"name": name, "parameters": {"type": "object", "properties": properties}} if arguments else {"name": name}
    )
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    messages = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": name, "content": "done"},
        {"role": "assistant", "content": "Done."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


ROWS = [
    call("weather", city="Paris", where={"lat": 1.5, "lon": 2.5}),
    call("add", a="1", b=["2", "3"]),
    call("near", where={"lat": 0.5}),
    call("now"),
]


def chats(*paths: Path) -> list[Any]:
    return [document.chat for document in read_documents(paths)]


def write_arrow(path: Path) -> Path:
    """Write the rows to a file or folder of the kind that its name says."""
    table = pyarrow.Table.from_pylist(ROWS)
    match path.name:
        case "rows.parquet":
            parquet.write_table(table, path)
        case "rows.arrow":
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        case "saved":
            datasets.Dataset(table).save_to_disk(path)
        case "json":
            kept = datasets.Features({"messages": datasets.List(datasets.Json()), "tools": datasets.Json()})
            datasets.Dataset.from_list(ROWS, features=kept).save_to_disk(path)
        case _:
            path.mkdir()
            (path / "README.md").write_text(CARD.format('configs:\n- config_name: a\n  data_files: "*.parquet"\n'))
            parquet.write_table(table, path / "rows.parquet")
    return path


@pytest.mark.parametrize("name", ("rows.parquet", "rows.arrow", "saved", "json", "card"))
def test_rows_of_arrow_are_the_rows_that_were_given(tmp_path: Path, name: str) -> None:
    if name == "json" and not hasattr(datasets, "Json"):
        pytest.skip("datasets has no such type")
    written = lines(tmp_path / "rows.jsonl", *ROWS)
    assert chats(write_arrow(tmp_path / name)) == chats(written) == ROWS
    raw = pyarrow.Table.from_pylist(ROWS).to_pylist()
    assert raw != ROWS and raw[3]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None, "control"


def test_a_null_that_was_typed_stays(tmp_path: Path) -> None:
    row = call("add", a=None, b=[None, {"c": None}])
    assert chats(lines(tmp_path / "a.jsonl", row)) == [row]
    (tmp_path / "folder").mkdir()
    assert chats(lines(tmp_path / "folder" / "a.jsonl", row, ROWS[0]).parent) == [row, ROWS[0]]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.datetime(2024, 1, 2), "datetime"),
        (decimal.Decimal("1.50"), "Decimal"),
        (b"x", "bytes"),
    ],
)
def test_what_json_cannot_hold_is_named_where_it_is_read(tmp_path: Path, value: Any, kind: str) -> None:
    rows = [{**ROWS[0], "other": {"date": value}}, {**call("at", time=value), "other": {"date": value}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    place = f'{tmp_path}/a.parquet, row 2: "messages"'
    assert found_in(tmp_path / "a.parquet") == [Problem("value-unlike-json", place, kind=kind, value=str(value))]


# tables


def unlike_head(line: int, fields: int, columns: int) -> Problem:
    return Problem("row-unlike-head", f"line {line}", fields=fields, columns=columns, separator="comma")


def other_separator(head: str, found: str) -> Problem:
    return Problem("head-of-other-separator", "line 1", head=head, found=found, separator=",")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("text,label\nThe cat sat.,animals,\n", [unlike_head(2, 3, 2)]),
        ("text\nHello, you\n", [unlike_head(2, 2, 1)]),
        ("id,text,label\n1,One\nmore,x\n", [unlike_head(2, 2, 3), unlike_head(3, 2, 3)]),
        ('text,label\n"a\n\nb",x\n\nc,d,e\n', [unlike_head(6, 3, 2)]),
        ('text,label\na,b\n"c,d\ne,f\n', [Problem("row-no-table", "line 3", error="unexpected end of data")]),
        ('text,label\n"a"b,c\n', [Problem("row-no-table", "line 2", error="',' expected after '\"'")]),
        ("text;label\nHello, you;x\n", [other_separator("text;label", ";")]),
        ("text\tlabel\na\tx\n", [other_separator("text\tlabel", "\t")]),
        ("text\nHello; you\na,b\n", [unlike_head(3, 2, 1)]),
        ("text,\nHello, you\n", [Problem("column-without-name", "line 2", value=" you")]),
        ("text,label,text\na,b,c\n", [Problem("column-name-twice", "line 1", name="text", columns=2)]),
        ("The cat sat.\n", [Problem("table-without-rows")]),
    ],
)
@pytest.mark.parametrize("where", ("alone", "folder", "compressed"))
def test_a_row_that_does_not_fit_the_head_is_refused(
    tmp_path: Path, content: str, problems: list[Problem], where: str
) -> None:
    file = tmp_path / "texts" / ("a.csv.gz" if where == "compressed" else "a.csv")
    file.parent.mkdir()
    file.write_bytes(gzip.compress(content.encode()) if where == "compressed" else content.encode())
    placed = [Problem(each.code, ", ".join(filter(None, (f"{file}", each.where))), **each.values) for each in problems]
    assert found_in(file.parent if where == "folder" else file) == placed


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.csv", '\ufefftext,label\r\n"a ""q""\r\nb",x\r\n\r\nNA,y\r\n', [(2, 'a "q"\r\nb'), (5, "NA")]),
        ("a.csv", ",text\n0,one\n1,two\n", [(2, "one"), (3, "two")]),
        ("a.csv", 'text,\n"Hello, you",\n', [(2, "Hello, you")]),
        ("a.tab", "text\tid\na, b; c\t1\n", [(2, "a, b; c")]),
        ("a.tsv", 'id\ttext\r7\t"a\tb"\r', [(2, "a\tb")]),
        ("a.csv", f"text,label\n{'x' * 300_000},\n", [(2, "x" * 300_000)]),
    ],
)
def test_what_fits_is_read_as_it_is_written(tmp_path: Path, name: str, content: str, texts: list[Any]) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert places(tmp_path / name) == places(tmp_path) == [(f"{tmp_path / name}, line {n}", text) for n, text in texts]


@pytest.mark.parametrize(("rows", "is_read"), [("The cat sat.,animals,\n", True), ("Hello, you,x\n", False)])
def test_pandas_takes_no_column_for_names(tmp_path: Path, rows: str, is_read: bool) -> None:
    """In a dataset with a card, as on the Hub."""
    (tmp_path / "README.md").write_text(CARD.format('configs:\n- config_name: a\n  data_files: "*.csv"\n'))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    if is_read:
        assert read(tmp_path) == [("", "The cat sat.")]
    else:
        assert found_in(tmp_path) == [Problem("rows-longer-than-head", tmp_path)]


# JSON under other names

TWO = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize("name", ("a.ndjson", "a.jsonlines", "a.jl", "a.NDJSON", "a.ldjson", "a.jsonl.gz", "a.json.GZ"))
def test_json_lines_have_many_suffixes(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(TWO.encode()) if name.lower().endswith("gz") else TWO.encode())
    assert read(file) == [("", "one"), ("", "two")]


@pytest.mark.parametrize(
    "content",
    [
        TWO,
        '\n[{"text": "one"},\n {"text": "two"}]\n',
        '{\n  "text": "one"\n}\n{\n  "text": "two"\n}\n',
        '\ufeff\n{\n"text": "one"\n} {"text": "two"}',
    ],
)
def test_json_may_stand_in_several_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json") == [("", "one"), ("", "two")]
    (tmp_path / "a.json").write_text(json.dumps({"text": "one\ntwo"}, indent=2))
    assert places(tmp_path / "a.json") == [(f"{tmp_path}/a.json, entry 1", "one\ntwo")]
    (tmp_path / "a.json").write_text(content[:-5])
    assert found_in(tmp_path / "a.json")[-1].code == "row-no-json", "the control"


def test_the_line_at_which_an_array_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n  {\n    "text": "one"\n  },\n  {\n    "text": two\n  }\n]\n')
    assert found_in(tmp_path / "a.json") == [
        Problem("row-no-json", f"{tmp_path}/a.json, line 6", error="Expecting value in column 13")
    ]


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (TWO, ".jsonl"),
        ('\ufeff\r\n{"text": "one"}\r\n\r\n{"text": "two"}\r\n', ".jsonl"),
        ('{"text": "one"}', ".jsonl"),
        ('{"text": "one"},\n{"text": "tw', ".jsonl"),
        (f"# two rows\n{TWO}", ".jsonl"),
        (f'{{"text": "half\n{TWO}', ".jsonl"),
        ('{\n  "text": "one"\n}\n{\n  "text": "two"\n}\n', ".json"),
        ('{\n  "text": "one"\n}\n', ".json"),
        (json.dumps({"cells": [{"outputs": ["x" * 2**21]}], "nbformat": 4}, indent=1), ".json"),
        (json.dumps({"text": "x" * 2**21}) + f"\n{TWO}", ".jsonl"),
        ('[{"text": "one"}, {"text": "two"}]', ".json"),
        ('[\n  {\n    "text": "one"\n  }\n]\n', ".json"),
    ],
)
@pytest.mark.parametrize("name", ("a.txt", "a", "a.data.gz"))
def test_rows_of_json_are_no_plain_text(tmp_path: Path, content: str, suffix: str, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    assert found_in(file) == found_in(tmp_path) == [Problem("text-is-json", file, suffix=suffix)]
    with refused("text-is-json", file, DataError):
        read_questions([file])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\nThis is an object of JSON.\n',
        '{\n  "name": "code"\n}\nis an object of JSON.\n',
        "{{ bos_token }}\n{% for message in messages %}",
        "{ x = 1; }\n",
        "[{:a 1}]\n",
        'Two rows:\n{"text": "one"}\n{"text": "two"}\nand so on\nand on\n',
        "\n\n    indented\n",
    ],
)
def test_braces_may_stand_in_a_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == [("", text)]


# what is no text


@pytest.mark.parametrize(
    ("content", "form"),
    [
        ("text".encode("utf-16"), "UTF-16 text"),
        (b"%PDF-1.4 plain", "a PDF file"),
        (b"PK\x03\x04plain", "a zip archive (.docx, .xlsx, .epub and .odt are some too)"),
        (gzip.compress(b"text", mtime=0), "compressed by gzip"),
        (bz2.compress(b"text"), "compressed by bzip2"),
        (b"\x28\xb5\x2f\xfdtext", "compressed by zstd"),
        (b"\x89PNG\r\n\x1a\n", "an image"),
        (b"PAR1\x15", "a Parquet file"),
    ],
)
@pytest.mark.parametrize("name", ("a", "a.txt", "a.png"))
def test_what_is_no_text_is_refused_by_its_name(tmp_path: Path, content: bytes, form: str, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("BZh, PAR1 and GIF8 begin words too.")
    assert read(tmp_path / "b.txt") == [("", "BZh, PAR1 and GIF8 begin words too.")]
    advice = {what: advice for _, what, advice in FORMS}[form]
    for text in (tmp_path / name, tmp_path):
        assert found_in(text) == [Problem("text-of-other-form", tmp_path / name, form=form, advice=advice)]


def test_utf_16_without_its_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16-le"))
    for text in (tmp_path / "a.txt", tmp_path):
        assert found_in(text) == [Problem("text-with-nul", tmp_path / "a.txt")]


def test_compressed_text_is_read_and_damaged_is_refused(tmp_path: Path) -> None:
    text = "one\r\n\r\ntwo\n" * 10
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "a.md.gz") == [("", text.replace("\r\n", "\n"))]
    for damaged in (gzip.compress(text.encode())[:-9], text.encode()):
        (tmp_path / "a.md.gz").write_bytes(damaged)
        with refused("text-unreadable", tmp_path / "a.md.gz", DataError):
            read(tmp_path / "a.md.gz")
    for name in ("a.jsonl", "a.csv", "a.json"):
        (tmp_path / name).write_bytes(gzip.compress(TWO.encode()))
        with refused("text-of-other-form", tmp_path / name, DataError):
            read(tmp_path / name)


# folders

PAGE = "Title\n\nFirst line,\n    second line.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files of many kinds."""
    made = tmp_path / "corpus"
    (made / "sub" / "deep").mkdir(parents=True)
    (made / ".git").mkdir()
    (made / ".git" / "config").write_text("hidden")
    (made / ".DS_Store").write_bytes(b"\0\1")
    (made / "sub" / "page.txt").write_text(PAGE)
    (made / "code.py").write_text("if True:\n\n    pass\n")
    lines(made / "sub" / "deep" / "rows.jsonl", {"text": "one"}, {"question": "q", "answer": "a"})
    (made / "table.csv").write_text("text\nrow\n")
    datasets.Dataset.from_dict({"text": ["saved"]}).save_to_disk(made / "rows")
    return made


def test_a_folder_is_its_files_as_if_each_was_named_alone(folder: Path) -> None:
    names = ["code.py", "rows", "sub/deep/rows.jsonl", "sub/page.txt", "table.csv"]
    assert [text.name for text in texts_in(parse_source(folder))] == [str(folder / name) for name in names]
    alone = list(read_documents([folder / name for name in names]))
    assert list(read_documents([folder])) == alone
    assert [document.text for document in alone] == ["if True:\n\n    pass\n", "saved", "one", " a", PAGE, "row"]
    assert found_in(f"{folder},column=text") == [
        Problem("text-without-setting", folder / "code.py", kind="plain text", setting="column")
    ]
    assert found_in(f"{folder},config=en") == [
        Problem("text-without-setting", folder, kind="a folder of files", setting="config")
    ]


def test_a_long_file_of_a_folder_comes_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONG_TEXT", 20)
    monkeypatch.setattr(documents, "PIECE", 10)
    pieces = [each for each in read_documents([folder], whole=False) if each.source.endswith("page.txt")]
    assert len(pieces) > 1 and [piece.goes_on for piece in pieces] == [*[True] * (len(pieces) - 1), False]
    assert "".join(piece.text for piece in pieces) == PAGE


def test_what_cannot_be_read_in_a_folder_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "sub" / "scan.pdf").write_bytes(b"%PDF-1.4")
    with refused("text-of-other-form", folder / "sub" / "scan.pdf", DataError):
        read(folder)
    (folder / "sub" / "scan.pdf").unlink()
    (folder / "link").symlink_to(tmp_path)
    assert found_in(folder) == [Problem("link-to-folder", folder / "link")]
    (folder / "link").unlink()
    (folder / "link").symlink_to(tmp_path / "nothing.txt")
    assert found_in(folder) == [Problem("text-not-found", folder / "link")]
    (folder / "link").unlink()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert found_in(folder) == [Problem("text-is-model", folder / "model", model_type="llama")]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "test.jsonl"], ["train", "test"]),
        (["data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"], ["train", "validation"]),
        (["wiki.train.txt", "wiki.valid.txt"], ["train", "validation"]),
        (["dev/a.csv", "train/a.csv"], ["train", "validation"]),
        (["data/german-00000-of-00002.jsonl", "data/french-00000-of-00001.jsonl"], ["french", "german"]),
    ],
)
def test_of_several_splits_one_has_to_be_said(tmp_path: Path, names: list[str], splits: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'text\n"{name}"\n' if name.endswith("csv") else json.dumps({"text": name}))
        if name.endswith(".txt"):
            (tmp_path / name).write_text(name)
    (tmp_path / "README.md").write_text("About these files.")
    assert found_in(tmp_path) == [Problem("split-not-said", tmp_path, splits=splits, first=splits[0])]
    assert sorted(text for split in splits for _, text in read(f"{tmp_path},split={split}")) == sorted(names)
    assert found_in(f"{tmp_path},split=best") == [
        Problem("split-unknown", tmp_path, split="best", splits=splits, first=splits[0])
    ]


def test_names_of_other_files_say_no_split(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("train.py", "tests/test_train.py", "testing times.txt", "the train.txt", "contest.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}' if name.endswith(".jsonl") else "x")
    assert len(read(tmp_path)) == 5
    lines(tmp_path / "train-1.jsonl", {"text": "x"})
    assert len(read(tmp_path)) == 6, "what is for training, and what says nothing"


def test_rows_beside_a_test_are_not_taken_without_a_word(tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", {"text": "x"})
    lines(tmp_path / "test.jsonl", {"text": "y"})
    for text in (f"{tmp_path}", f"{tmp_path},split=test"):
        assert found_in(text) == [Problem("files-without-split", tmp_path, files=["rows.jsonl"], split="test")]


def test_a_card_is_no_text_and_says_what_is_read(tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", {"text": "x"})
    (tmp_path / "page.txt").write_text(PAGE)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text(CARD.format(""))
    assert [text for _, text in read(tmp_path)] == [PAGE, "x"]
    (tmp_path / "README.md").write_text(CARD.format('configs:\n- config_name: a\n  data_files: "*.txt"\n'))
    assert read(tmp_path) == [("", PAGE)], "a file is a document, also where datasets reads it"
    (tmp_path / "README.md").write_text("About.\n")
    assert [text for _, text in read(tmp_path)] == ["About.\n", PAGE, "x"], "no card, but a file as any other"
