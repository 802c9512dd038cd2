"""What is set aside: some of each text, equal texts together, the same in a second run, and nothing lost."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from scale_surgery import DataError, HeldOut, HoldOutSettings, PlanError, hold_out
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.learning.hold_out import ASIDE, LEARN, part_file
from scale_surgery.text.documents import Document, read_documents
from tests.command import run
from tests.conftest import digests, problems, refused

QUESTIONS = [{"question": f"Q: {number}?\nA:", "answer": f"A{number % 7}"} for number in range(60)]
TEXTS = [{"text": f"Text {number} " + "word " * (number % 5)} for number in range(60)]
# not the function of the same name
hold_out_module = importlib.import_module("scale_surgery.learning.hold_out")
BOOK = "\n\n".join(f"Paragraph {number}" + " word" * 20 for number in range(40))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "new.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*QUESTIONS, *TEXTS)))
    return file


def read(done: HeldOut) -> dict[str, list[tuple[str, str]]]:
    files = {part: part_file(done.path, part) for part in (LEARN, *ASIDE)}
    return {
        part: [identity(document) for document in read_documents([file])]
        for part, file in files.items()
        if file.exists()
    }


def identity(document: Document) -> tuple[str, str]:
    return document.prompt, document.text


def test_every_document_is_in_one_part_and_says_what_it_said(data, tmp_path):
    done = hold_out(data, tmp_path / "out")
    parts = read(done)
    whole = Counter(identity(document) for document in read_documents([data]))
    assert Counter(document for part in parts.values() for document in part) == whole
    assert {part: len(documents) for part, documents in parts.items()} == done.documents
    # a tenth of 120 in each
    assert done.documents == {"learn": 96, "calibrate": 12, "measure": 12}
    # what is learned stays in its order
    order = [identity(document) for document in read_documents([data])]
    assert parts["learn"] == [document for document in order if document in parts["learn"]]


@pytest.mark.parametrize("count", [60, 5])
def test_conversations_stay_what_they_are(tmp_path, count):
    """The template that they are read by is the model's, so nothing of them is turned into text here."""
    rows = [
        {"messages": [{"role": "user", "content": f"Q {number}"}, {"role": "assistant", "content": f"A {number}"}]}
        for number in range(count)
    ]
    # of few documents ends are set aside, of conversations none
    rows += [{"text": BOOK}] * (count < 20)
    file = tmp_path / "new.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = hold_out(file, tmp_path / "out")
    files = [part_file(done.path, part) for part in (LEARN, *ASIDE)]
    written = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    spoken = [row for row in written if "messages" in row]
    assert sorted(spoken, key=str) == sorted((row for row in rows if "messages" in row), key=str)


def test_equal_documents_go_the_same_way(tmp_path):
    file = tmp_path / "new.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*TEXTS, *TEXTS, *TEXTS)))
    parts = read(hold_out(file, tmp_path / "out"))
    assert all(parts.values())
    sets = [set(documents) for documents in parts.values()]
    assert sum(map(len, sets)) == len(set.union(*sets))


def test_a_second_run_draws_the_same_and_another_seed_does_not(data, tmp_path):
    first, second = (digests(hold_out(data, tmp_path / name).path) for name in ("one", "two"))
    assert first == second
    third = hold_out(data, tmp_path / "three", HoldOutSettings(seed=1))
    assert digests(third.path) != first


def test_of_one_long_text_the_ends_are_set_aside(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(BOOK)
    parts = read(hold_out(file, tmp_path / "out"))
    whole = "\n\n".join(text for part in (LEARN, *ASIDE) for _, text in parts[part])
    assert whole == BOOK.strip()
    assert all(0.05 < len(parts[part][0][1]) / len(BOOK) < 0.2 for part in ASIDE)
    # among many, a long one is not cut
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    parts = read(hold_out([file, tmp_path / "short.jsonl"], tmp_path / "among"))
    assert ("", BOOK) in parts["learn"] and len(parts["learn"]) > 40


def test_too_little_text_is_refused_and_nothing_is_written(tmp_path):
    file = tmp_path / "new.jsonl"
    too_little = Problem("documents-too-few", file, documents=1, parts=["calibrate", "measure"], least=20)
    answered = json.dumps({"prompt": "Tell me.", "completion": "word " * 100})
    for content, expected in (
        ('{"text": "one"}', too_little),
        (answered, too_little),  # answers are not cut
        ("", Problem("texts-without-documents", file)),
    ):
        file.write_text(content)
        assert problems(hold_out, file, tmp_path / "out", error=DataError) == [expected]
    for content in ('{"txt": 1}\n', None):
        file.unlink() if content is None else file.write_text(content)
        (found,) = problems(hold_out, file, tmp_path / "out", error=DataError)
        assert found.phrase.startswith(f"{file}")
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]


def test_no_more_is_set_aside_than_was_said(data, tmp_path):
    done = hold_out(data, tmp_path / "out", HoldOutSettings(most_characters=60))
    assert all(done.characters[part] <= 90 for part in ASIDE)
    # half in each leaves nothing to learn
    done = hold_out(data, tmp_path / "half", HoldOutSettings(share=0.5))
    assert sum(done.documents[part] for part in ASIDE) >= 115
    (tmp_path / "book.txt").write_text(BOOK)
    done = hold_out(tmp_path / "book.txt", tmp_path / "other", HoldOutSettings(share=0.5))
    assert set(done.documents) == set(ASIDE)


@pytest.mark.parametrize("title", ("", "Title\n\n"))
@pytest.mark.parametrize("more", ("", "."))
def test_ends_are_as_long_as_was_said_wherever_gaps_are(tmp_path, title, more):
    """Of one text without blank lines, or with one after its title, of an even and of an odd length."""
    text = title + "line of words\n" * 400 + more
    (tmp_path / "old.txt").write_text(text)
    done = hold_out(tmp_path / "old.txt", tmp_path / "half", HoldOutSettings(share=0.5))
    assert set(done.characters) == set(ASIDE), "nothing is left to learn"
    assert all(0.4 < done.characters[part] / len(text) < 0.6 for part in ASIDE)
    done = hold_out(tmp_path / "old.txt", tmp_path / "tenth", HoldOutSettings())
    assert all(0.08 < done.characters[part] / len(text) < 0.16 for part in ASIDE) and done.characters[LEARN]


def test_a_long_text_calibrates_as_several(tmp_path):
    """One text has no standard error."""
    book = tmp_path / "book.txt"
    book.write_text("\n".join(f"Line {number} of a long book." for number in range(2_000)))
    done = hold_out(book, tmp_path / "out", HoldOutSettings(share=0.5))
    assert done.documents == {"calibrate": 20, "measure": 1}
    texts = [text for part in ASIDE for _, text in read(done)[part]]
    assert "\n".join(texts) == book.read_text(), "no word is lost or read twice"
    assert len(set(texts)) == 21 and min(map(len, texts)) > 500


def test_a_large_text_is_hashed_a_piece_at_a_time(monkeypatch):
    document = Document("Who?\n", 'Zü"rich \\ 東京 \U0001f600' * 9, "x")
    whole = hold_out_module._hash(document, 3)
    content = json.dumps([3, document.prompt, document.text]).encode()
    assert whole == hashlib.blake2b(content, digest_size=16).digest()
    monkeypatch.setattr(hold_out_module, "HASHED_AT_ONCE", 7)
    assert hold_out_module._hash(document, 3) == whole != hold_out_module._hash(document, 4)


def test_settings_and_folders_are_checked(data, tmp_path):
    (found,) = problems(hold_out, data, tmp_path / "out", HoldOutSettings(share=0.6), error=PlanError)
    assert found.phrase.startswith("--share is 0.6")
    hold_out(data, tmp_path / "out")
    with refused("output-exists", tmp_path / "out", CheckpointError):
        hold_out(data, tmp_path / "out")


@pytest.mark.parametrize("part", ASIDE)
def test_one_part_alone(data, tmp_path, part):
    done = hold_out(data, tmp_path / "out", HoldOutSettings(parts=(part,)))
    assert set(done.documents) == {LEARN, part} and set(read(done)) == {LEARN, part}
    book = tmp_path / "book.txt"
    book.write_text(BOOK)
    parts = read(hold_out(book, tmp_path / "other", HoldOutSettings(parts=(part,))))
    assert "\n\n".join(parts[name][0][1] for name in (LEARN, part)) == BOOK
    for wrong, value in (((), "nothing"), (("learn", part), ["learn"])):
        assert problems(hold_out, data, tmp_path / "wrong", HoldOutSettings(parts=wrong), error=PlanError) == [
            Problem("choices-unknown", "--parts", value=value, choices=ASIDE)
        ]


def test_the_command(data, tmp_path):
    before = digests(data.parent)
    result = run("hold-out", data, "-o", tmp_path / "out", "--share", "0.2")
    lines = [line.split() for line in result.stdout.splitlines()]
    counts = {line[0]: int(line[1]) for line in lines[2:]}
    assert sum(counts.values()) == 120 and all(20 < counts[part] < 28 for part in ASIDE)
    assert {name: digest for name, digest in digests(data.parent).items() if name in before} == before
