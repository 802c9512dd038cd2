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

from scale_surgery.text import documents
from scale_surgery.text.documents import read_documents, read_questions
from scale_surgery.text.folders import texts_in
from scale_surgery.text.sources import parse_source
from tests.text.test_tokenizing import lines, read, refused

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
        (datetime.datetime(2024, 1, 2), "datetime (2024-01-02 00:00:00)"),
        (decimal.Decimal("1.50"), "Decimal (1.50)"),
        (b"x", "bytes (b'x')"),
    ],
)
def test_what_json_cannot_hold_is_named_where_it_is_read(tmp_path: Path, value: Any, kind: str) -> None:
    rows = [{**ROWS[0], "other": {"date": value}}, {**call("at", time=value), "other": {"date": value}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert refused(tmp_path / "a.parquet") == (
        f'{tmp_path}/a.parquet, row 2: "messages" holds a {kind}, which JSON does not have; write it as a text.'
    )


# tables

FIELDS_MORE = 'a field with a comma or a line break in it needs quotes: "..."'


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("text,label\nThe cat sat.,animals,\n", [f"line 2: has 3 fields, the head has 2; {FIELDS_MORE}"]),
        ("text\nHello, you\n", [f"line 2: has 2 fields, the head has 1; {FIELDS_MORE}"]),
        ("id,text,label\n1,One\nmore,x\n", [f"line {n}: has 2 fields, the head has 3; {FIELDS_MORE}" for n in (2, 3)]),
        ('text,label\n"a\n\nb",x\n\nc,d,e\n', [f"line 6: has 3 fields, the head has 2; {FIELDS_MORE}"]),
        (
            'text,label\na,b\n"c,d\ne,f\n',
            ['line 3: is no row of a table (unexpected end of data): a " is missing, or stands alone'],
        ),
        (
            'text,label\n"a"b,c\n',
            ["line 2: is no row of a table (',' expected after '\"'): a \" is missing, or stands alone"],
        ),
        ("text;label\nHello, you;x\n", ["line 1: is 'text;label', which ';' separates and not ','; expected a head"]),
        ("text\tlabel\na\tx\n", ["line 1: is 'text\\tlabel', which '\\t' separates and not ','; expected a head"]),
        ("text\nHello; you\na,b\n", [f"line 3: has 2 fields, the head has 1; {FIELDS_MORE}"]),
        ("text,\nHello, you\n", ["line 2: has ' you' in a column that has no name in the head"]),
        (
            "text,label,text\na,b,c\n",
            ['line 1: "text" is the name of 2 columns; expected a head with the name of each'],
        ),
        ("The cat sat.\n", ["holds a head alone, expected a head and rows below it"]),
    ],
)
@pytest.mark.parametrize("where", ("alone", "folder", "compressed"))
def test_a_row_that_does_not_fit_the_head_is_refused(
    tmp_path: Path, content: str, problems: list[str], where: str
) -> None:
    file = tmp_path / "texts" / ("a.csv.gz" if where == "compressed" else "a.csv")
    file.parent.mkdir()
    file.write_bytes(gzip.compress(content.encode()) if where == "compressed" else content.encode())
    found = refused(file.parent if where == "folder" else file).splitlines()
    assert len(found) == len(problems)
    for line, problem in zip(found, problems, strict=True):
        assert line.removeprefix(f"{file}").lstrip(":, ").startswith(problem)


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
        assert "rows of its table have more fields than the head" in refused(tmp_path)


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
    assert "is not JSON (" in refused(tmp_path / "a.json"), "the control"


def test_the_line_at_which_an_array_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n  {\n    "text": "one"\n  },\n  {\n    "text": two\n  }\n]\n')
    assert refused(tmp_path / "a.json") == f"{tmp_path}/a.json, line 6: is not JSON (Expecting value in column 13)."


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
    problem = f"{file}: holds JSON objects and has the name of plain text, which would be learned with its braces. "
    for refusal in (refused(file), refused(tmp_path)):
        assert refusal.startswith(f"{problem}Let its name end with {suffix};")
    with pytest.raises(documents.DataError, match="holds JSON objects"):
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
    ("content", "is_what"),
    [
        ("text".encode("utf-16"), "is UTF-16 text, expected UTF-8 text. Convert it: iconv -f UTF-16 -t UTF-8."),
        ("text".encode("utf-16-le"), "holds NUL characters, expected UTF-8 text. Is it UTF-16, or no text at all?"),
        (b"%PDF-1.4 plain", "is a PDF file, expected UTF-8 text. Save its text."),
        (b"PK\x03\x04plain", "is a zip archive (.docx, "),
        (
            gzip.compress(b"text", mtime=0),
            "is compressed by gzip, expected UTF-8 text. Unpack it, or let its name end with .gz.",
        ),
        (bz2.compress(b"text"), "is compressed by bzip2, expected UTF-8 text. Unpack it."),
        (b"\x28\xb5\x2f\xfdtext", "is compressed by zstd, "),
        (b"\x89PNG\r\n\x1a\n", "is an image, expected UTF-8 text. Leave it out."),
        (b"PAR1\x15", "is a Parquet file, expected UTF-8 text. Let its name end with .parquet."),
    ],
)
@pytest.mark.parametrize("name", ("a", "a.txt", "a.png"))
def test_what_is_no_text_is_refused_by_its_name(tmp_path: Path, content: bytes, is_what: str, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("BZh, PAR1 and GIF8 begin words too.")
    assert read(tmp_path / "b.txt") == [("", "BZh, PAR1 and GIF8 begin words too.")]
    for text in (tmp_path / name, tmp_path):
        assert refused(text).startswith(f"{tmp_path / name}: {is_what}")


def test_compressed_text_is_read_and_damaged_is_refused(tmp_path: Path) -> None:
    text = "one\r\n\r\ntwo\n" * 10
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "a.md.gz") == [("", text.replace("\r\n", "\n"))]
    for damaged in (gzip.compress(text.encode())[:-9], text.encode()):
        (tmp_path / "a.md.gz").write_bytes(damaged)
        assert refused(tmp_path / "a.md.gz").startswith(f"{tmp_path}/a.md.gz: cannot be read as text (")
    for name in ("a.jsonl", "a.csv", "a.json"):
        (tmp_path / name).write_bytes(gzip.compress(TWO.encode()))
        assert refused(tmp_path / name).startswith(f"{tmp_path / name}: is compressed by gzip, expected UTF-8 text.")


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
    assert (
        refused(f"{folder},column=text") == f"{folder}/code.py: is plain text, which has no column. Leave ,column= out."
    )
    assert refused(f"{folder},config=en").startswith(f"{folder}: is a folder of files, which has no config.")


def test_a_long_file_of_a_folder_comes_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONG_TEXT", 20)
    monkeypatch.setattr(documents, "PIECE", 10)
    pieces = [each for each in read_documents([folder], whole=False) if each.source.endswith("page.txt")]
    assert len(pieces) > 1 and [piece.goes_on for piece in pieces] == [*[True] * (len(pieces) - 1), False]
    assert "".join(piece.text for piece in pieces) == PAGE


def test_what_cannot_be_read_in_a_folder_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "sub" / "scan.pdf").write_bytes(b"%PDF-1.4")
    assert refused(folder) == f"{folder}/sub/scan.pdf: is a PDF file, expected UTF-8 text. Save its text."
    (folder / "sub" / "scan.pdf").unlink()
    (folder / "link").symlink_to(tmp_path)
    assert refused(folder) == f"{folder}/link: is a link to a folder, which is not followed. Name that folder itself."
    (folder / "link").unlink()
    (folder / "link").symlink_to(tmp_path / "nothing.txt")
    assert refused(folder).startswith(f"{folder}/link: there is no such file.")
    (folder / "link").unlink()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert refused(folder).startswith(f"{folder}/model: is a model (config.json says model_type 'llama')")


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
    assert refused(tmp_path) == (
        f"{tmp_path}: holds the splits {', '.join(splits)}. Say which is meant: {tmp_path},split={splits[0]}."
    )
    assert sorted(text for split in splits for _, text in read(f"{tmp_path},split={split}")) == sorted(names)
    assert refused(f"{tmp_path},split=best").startswith(f"{tmp_path}: has no split best, it holds {', '.join(splits)}.")


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
        assert refused(text) == (
            f"{tmp_path}: the names of other files say the split test, and none is said by rows.jsonl. Give the files "
            "that are meant one by one."
        )


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
