"""Where texts come from: paths before ids, settings after commas, and datasets of every kind that holds text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from scale_surgery.errors import DataError, Problem
from scale_surgery.text.documents import read_documents, read_questions
from scale_surgery.text.saved_datasets import FORMATS, LONGEST, digest_of
from scale_surgery.text.sources import TextSource, parse_source
from tests.conftest import problems, refused
from tests.text.test_tokenizing import found_in, lines

ROWS = [
    {"body": "one", "text": "un", "n": 1},
    {"body": "two", "text": "deux", "n": 2},
    {"body": " ", "text": "x", "n": 3},
]


def read(*texts: str | Path) -> list[tuple[str, str]]:
    return [(document.text, document.source) for document in read_documents(texts)]


# how a text is named


def test_settings_follow_after_commas() -> None:
    assert parse_source("org/name") == TextSource("org/name")
    assert parse_source("org/name,config=en,split=train[:10],column=body,revision=v1") == TextSource(
        "org/name", column="body", split="train[:10]", config="en", revision="v1"
    )
    assert parse_source(Path("a,b.txt")) == TextSource("a,b.txt"), "a comma in a name"
    wrong = "org/name,splt=train,column=a,column=b"
    assert problems(parse_source, wrong, error=DataError) == [
        Problem("text-setting-unknown", wrong, setting="splt"),
        Problem("text-setting-twice", wrong, setting="column"),
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
    with refused("text-not-found", Path(name), DataError):
        read(name)


# columns


def number(row: str) -> Problem:
    return Problem("value-unfit", f'{row}: "n"', value="a number", kind="a text")


def test_a_column_of_lines_and_arrays(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    for text, where in ((file, "line"), (tmp_path / "a.json", "entry")):
        assert read(f"{text},column=body") == [("one", f"{text}, {where} 1"), ("two", f"{text}, {where} 2")]
        assert [text for text, _ in read(text)] == ["un", "deux", "x"], "without it, the usual field"
        assert found_in(f"{text},column=n")[0] == number(f"{text}, {where} 1")
    assert read_questions([Path(f"{file},column=body")]) == ["one", "two", " "]


def test_plain_text_has_no_columns_and_a_file_no_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    file = lines(tmp_path / "a.jsonl", *ROWS)
    assert found_in(f"{tmp_path}/a.txt,column=body") == [
        Problem("text-without-setting", tmp_path / "a.txt", kind="plain text", setting="column")
    ]
    assert found_in(f"{file},split=train") == [Problem("text-without-setting", file, kind="a file", setting="split")]


@pytest.mark.parametrize("content", ["[", "[1,", "[1]]", '[1] {"text": "b', '["a]', "[tru]", "[" * 5000])
def test_what_is_no_array_is_read_line_by_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    assert all(problem.where == f"{file}, line 1" for problem in found_in(file))


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
    assert found_in(f"{folder},column=n")[0] == number(f"{file}, row 1")
    assert found_in(f"{folder},split=dev") == [
        Problem("split-unknown", folder, split="dev", splits=["train"], first="train")
    ]


def test_a_folder_of_lines_with_splits(folder: Path) -> None:
    (folder / "train-00000.parquet").unlink()
    lines(folder / "train.jsonl", *ROWS)
    assert found_in(folder) == [Problem("split-not-said", folder, splits=["train", "test"], first="train")]
    assert [text for text, _ in read(f"{folder},split=test", f"{folder},split=train")] == ["un", "un", "deux", "x"]
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(folder.parent / "many")
    assert [text for text, _ in read(f"{folder.parent}/many,split=test,column=body")] == ["one"]


def test_other_kinds_of_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: a\n  data_files: "*.xml"\n---\n')
    (tmp_path / "page.xml").write_text("<a>text</a>")
    assert found_in(tmp_path) == [Problem("dataset-of-other-kind", tmp_path, kind="xml", formats=FORMATS)]


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    """The library names every field of both, which may be thousands: a model folder's tokenizer, say."""
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"vocabulary": {f"token {number}": 1 for number in range(500)}})
    )
    card = '---\nconfigs:\n- config_name: a\n  data_files: ["*.jsonl", "*.json"]\n---\n'
    (tmp_path / "README.md").write_text(card)
    (problem,) = found_in(tmp_path)
    assert (problem.code, problem.where) == ("folder-rows-unreadable", str(tmp_path))
    assert len(problem.values["error"]) <= LONGEST


def test_an_id_that_is_not_there() -> None:
    with refused("dataset-not-found", "org/name", DataError):
        read("org/name")


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
