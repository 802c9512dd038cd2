"""Where texts come from: paths before ids, settings after commas, and datasets of every kind that holds text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from scale_surgery.errors import DataError
from scale_surgery.text.documents import read_documents, read_questions
from scale_surgery.text.saved_datasets import digest_of
from scale_surgery.text.sources import TextSource, parse_source
from tests.conftest import refusal
from tests.text.test_tokenizing import lines

ROWS = [
    {"body": "one", "text": "un", "n": 1},
    {"body": "two", "text": "deux", "n": 2},
    {"body": " ", "text": "x", "n": 3},
]


def read(*texts: str | Path) -> list[tuple[str, str]]:
    return [(document.text, document.source) for document in read_documents(texts)]


def refused(*texts: str | Path) -> list[str]:
    return refusal(read, *texts, error=DataError).splitlines()


# how a text is named


def test_settings_follow_after_commas() -> None:
    assert parse_source("org/name") == TextSource("org/name")
    assert parse_source("org/name,config=en,split=train[:10],column=body,revision=v1") == TextSource(
        "org/name", column="body", split="train[:10]", config="en", revision="v1"
    )
    assert parse_source(Path("a,b.txt")) == TextSource("a,b.txt"), "a comma in a name"
    text = refusal(parse_source, "org/name,splt=train,column=a,column=b", error=DataError)
    assert text.splitlines() == [
        "org/name,splt=train,column=a,column=b: splt is no setting of a text, expected column, split, config or "
        "revision.",
        "org/name,splt=train,column=a,column=b: column is given twice.",
    ]


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/name").is_on_hub
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("a file")
    (tmp_path / "org" / "name,split=train").write_text("a file with a strange name")
    assert not parse_source("org/name").is_on_hub
    assert read("org/name", "org/name,split=train") == [
        ("a file", "org/name"),
        ("a file with a strange name", "org/name,split=train"),
    ]


@pytest.mark.parametrize(
    "name", ["new.txt", "texts/new.jsonl", "./new", "/tmp/none/new", "a/b/c", "org/", "org/name.CSV"]
)
def test_what_looks_like_a_file_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not parse_source(name).is_on_hub
    assert refused(name)[0].startswith(f"{Path(name)}: there is no such file. Give")


# columns


def test_a_column_of_lines_and_arrays(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    for text, where in ((file, "line"), (tmp_path / "a.json", "entry")):
        assert read(f"{text},column=body") == [("one", f"{text}, {where} 1"), ("two", f"{text}, {where} 2")]
        assert [text for text, _ in read(text)] == ["un", "deux", "x"], "without it, the usual field"
        assert refused(f"{text},column=n")[0] == f'{text}, {where} 1: "n" is a number, expected a text.'
    assert read_questions([Path(f"{file},column=body")]) == ["one", "two", " "]


def test_plain_text_has_no_columns_and_a_file_no_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    file = lines(tmp_path / "a.jsonl", *ROWS)
    assert refused(f"{tmp_path}/a.txt,column=body") == [
        f"{tmp_path}/a.txt: is plain text, which has no column. Leave ,column= out."
    ]
    assert refused(f"{file},split=train") == [f"{file}: is a file, which has no split. Leave ,split= out."]


@pytest.mark.parametrize("content", ["[", "[1,", "[1]]", '[1] {"text": "b', '["a]', "[tru]", "[" * 5000])
def test_what_is_no_array_is_read_line_by_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    assert all(line.startswith(f"{file}, line 1: ") for line in refused(file))


# datasets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data files with two splits, as the Hub has them."""
    data = tmp_path / "data"
    data.mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(data / "train-00000.parquet")
    lines(data / "test.jsonl", *ROWS[:1])
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    return data


def test_a_folder_of_parquet(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    assert [text for text, _ in read(folder)] == ["un", "deux", "x"]
    assert read(folder / "train-00000.parquet")[1] == ("deux", f"{folder}/train-00000.parquet, row 2"), "the file alone"
    file = folder / "train-00000.parquet"
    assert read(f"{folder},column=body,split=train") == [("one", f"{file}, row 1"), ("two", f"{file}, row 2")]
    assert refused(f"{folder},column=n")[0] == f'{file}, row 1: "n" is a number, expected a text.'
    assert refused(f"{folder},split=dev") == [
        f"{folder}: has no split dev, it holds train. Say which is meant: {folder},split=train."
    ]


def test_a_folder_of_lines_with_splits(folder: Path) -> None:
    (folder / "train-00000.parquet").unlink()
    lines(folder / "train.jsonl", *ROWS)
    assert refused(folder) == [f"{folder}: holds the splits train, test. Say which is meant: {folder},split=train."]
    assert [text for text, _ in read(f"{folder},split=test", f"{folder},split=train")] == ["un", "un", "deux", "x"]
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(folder.parent / "many")
    assert [text for text, _ in read(f"{folder.parent}/many,split=test,column=body")] == ["one"]


def test_other_kinds_of_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: a\n  data_files: "*.xml"\n---\n')
    (tmp_path / "page.xml").write_text("<a>text</a>")
    assert refused(tmp_path) == [
        f"{tmp_path}: holds data of the kind xml, expected rows of text in one of: json, parquet, csv, text, arrow."
    ]


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    """The library names every field of both, which may be thousands: a model folder's tokenizer, say."""
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"vocabulary": {f"token {number}": 1 for number in range(500)}})
    )
    card = '---\nconfigs:\n- config_name: a\n  data_files: ["*.jsonl", "*.json"]\n---\n'
    (tmp_path / "README.md").write_text(card)
    (line,) = refused(tmp_path)
    assert len(line) < 600 and "Try again" not in line
    assert line.endswith(
        "Give a folder whose files are all rows of text with the same columns, or the files one by one."
    )


def test_an_id_that_is_not_there() -> None:
    (line,) = refused("org/name")
    assert line.startswith(
        "org/name: there is no such file or folder, and no such dataset could be opened on the Hub ("
    )
    assert line.endswith("Check the name; where a dataset has several configurations, give org/name,config=NAME.")


def test_an_id_is_asked_of_the_hub_and_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no Hub here: the library is sent to a folder for the id, and does everything else itself."""
    (folder / "test.jsonl").unlink()
    asked, real = [], datasets.load_dataset_builder

    def send(name: str, config: str | None = None, **options: Any) -> Any:
        asked.append((name, config, options))
        return real(str(folder))

    monkeypatch.setattr(datasets, "load_dataset_builder", send)
    assert read("org/name,config=en,revision=v1,column=body") == [
        ("one", "org/name, row 1"),
        ("two", "org/name, row 2"),
    ]
    assert asked == [("org/name", "en", {"revision": "v1"})]
    digests = {digest_of(parse_source(f"org/name,{setting}")) for setting in ("split=train", "column=body")}
    assert len(digests) == 2 and digest_of(parse_source("org/name,column=body")) in digests
    datasets.Dataset.from_list(ROWS[:2]).to_parquet(folder / "train-00000.parquet")
    assert digest_of(parse_source("org/name,column=body")) not in digests, "another state of the same dataset"
