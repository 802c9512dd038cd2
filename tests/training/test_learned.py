"""Texts to learn from, in memory and in a cache on disk: the same tokens, made once, and never half of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from scale_surgery import (
    DataError,
    EvalData,
    Request,
    Training,
    TrainingSettings,
    TrainingStart,
    expand,
    train,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions
from scale_surgery.errors import Problem
from scale_surgery.evidence.evaluate import evaluate
from scale_surgery.folder.folder import open_folder
from scale_surgery.learning.estimate import count_tokens
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.progress import no_track
from scale_surgery.running.options import RunOptions
from scale_surgery.text import documents
from scale_surgery.text.documents import read_documents
from scale_surgery.text.sequences import Sequences, StoredSequences
from scale_surgery.text.token_cache import open_stored
from scale_surgery.text.tokenizing import pack, start_tokens, tokenize, without_unscored
from scale_surgery.training import training_texts
from scale_surgery.training.settings import REHEARSAL
from scale_surgery.training.training_texts import read_texts
from tests.conftest import Bars, digests, edited, problems, refusal, refused
from tests.each import woven
from tests.training.test_train import SETTINGS, SHORT

ASKED = [question for person in people(6, start=400) for question in questions(person)]
# a question is longer than many windows, in which nothing is learned then
FORMS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": biography(person, style)} for person in people(8, start=400) for style in range(3)],
    "question": [{"question": question.prompt * 5, "answer": question.answer} for question in ASKED],
    "completion": [{"prompt": question.prompt, "completion": f" {question.answer}"} for question in ASKED],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts in every form, and the shipped model expanded."""
    folder = tmp_path_factory.mktemp("learned")
    for form, rows in FORMS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{form}.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{form}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (folder / "plain.txt").write_text("\n".join(row["text"] for row in FORMS["text"] * 3) + "\r\nend", encoding="utf-8")
    rows = datasets.Dataset.from_list([{"body": row["text"], "id": 1} for row in FORMS["text"]])
    rows.rename_column("body", "text").save_to_disk(folder / "saved")
    for split in ("train", "test"):
        (folder / "data").mkdir(exist_ok=True)
        rows.select(range(20 if split == "train" else 4)).to_parquet(folder / "data" / f"{split}.parquet")
    expand(SHIPPED_MODEL, Request("2-3", variant="adapt", collaborate="both"), folder / "wide")
    return folder


def read(
    place: Path, *texts: str, cache: Path | None = None, track: Any = no_track, settings: TrainingSettings = SETTINGS
) -> Any:
    """What `train` learns from."""
    files = {"learn": [f"{place}/{text}" for text in texts]}
    state = PartialState(cpu=True)
    sequences = read_texts(
        open_folder(place / "wide"),
        files,
        settings,
        RunOptions(),
        cache=cache,
        processes=state,
        track=track,
    )
    return sequences["learn"]


def as_before(place: Path, *texts: str, packing: bool, length: int) -> Sequences:
    """Everything in memory at once, and cut afterwards."""
    tokenizer = AutoTokenizer.from_pretrained(place / "wide")
    whole = tokenize(read_documents([f"{place}/{text}" for text in texts]), tokenizer)
    return without_unscored(pack(whole, length, start_tokens(tokenizer)) if packing else whole)


def same(first: Any, second: Any) -> bool:
    if len(first) != len(second):
        return False
    rows = [(first[row], second[row]) for row in range(len(first))]
    return (
        first.fingerprint() == second.fingerprint()
        and first.scored == second.scored
        and first.tokens == second.tokens == sum(len(first[row]["input_ids"]) for row in range(len(first)))
        and all(torch.equal(left[name], right[name]) for left, right in rows for name in ("input_ids", "labels"))
        and first.some(5).fingerprint() == second.some(5).fingerprint()
    )


def as_rows(sequences: Sequences) -> list[dict[str, Any]]:
    return [sequences[row] for row in range(len(sequences))]


def kept(cache: Path) -> list[Path]:
    """Folders of tokens in a cache, unfinished ones too, without the locks beside them."""
    return sorted(path for path in cache.glob("tokens/default/0.0.0/*") if path.is_dir())


# the same tokens


@pytest.mark.filterwarnings("ignore:.* ends the answers, and this model stops at")
def test_conversations_are_learned_and_measured_by_the_chat_template(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "wide", tmp_path / "wide")
    file = tmp_path / "talk.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": question.prompt}, {"role": "assistant", "content": question.answer}]}
        for question in ASKED
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"line 1: is a conversation, and this model's tokenizer has no chat template"):
        count_tokens([str(file)], AutoTokenizer.from_pretrained(tmp_path / "wide"))
    sequences = {}
    for end in ("!", "?"):
        template = "{% for m in messages %}{{ m.content + '" + end + "\n' }}{% endfor %}"
        (tmp_path / "wide" / "chat_template.jinja").write_text(template)
        sequences[end] = as_before(tmp_path, "talk.jsonl", packing=True, length=32)
        for cache in (None, tmp_path / "cache"):
            assert same(read(tmp_path, "talk.jsonl", cache=cache), sequences[end])
    assert not same(sequences["!"], sequences["?"]), "another template is another text, in the cache too"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "wide")
    answers = sum(len(tokenizer(f"{question.answer}?", add_special_tokens=False)["input_ids"]) for question in ASKED)
    done = train(tmp_path / "wide", [file], tmp_path / "out", TrainingSettings(steps=2, **SHORT))
    (score,) = [score for score in evaluate([done.path], new=[file]).scores if score.kind == "expanded"]
    assert score.new is not None and (score.new.scored, score.new.questions) == (answers, len(ASKED))


TEXTS = [
    *((f"{form}{suffix}",) for form in FORMS for suffix in (".jsonl", ".json")),
    *(("plain.txt",), ("saved",), ("data,split=train,column=body",)),
    *(("plain.txt", "question.jsonl", "saved", "plain.txt"),),
]


@pytest.mark.parametrize(("texts", "packing"), woven(TEXTS, [True, False]))
def test_in_memory_and_on_disk_are_what_they_were(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...], packing: bool
) -> None:
    monkeypatch.setattr(documents, "LONG_TEXT", 1000)  # the plain text is read in pieces
    monkeypatch.setattr(documents, "PIECE", 300)
    monkeypatch.setattr(training_texts, "TOKENS_AT_ONCE", 500)
    length = 32 if packing else 8192
    monkeypatch.setattr(training_texts, "context_of", lambda config: None)  # longer than this model reads
    settings = TrainingSettings(packing=packing, sequence_length=length)
    before = as_before(place, *texts, packing=packing, length=length)
    assert same(read(place, *texts, settings=settings), before)
    stored = read(place, *texts, settings=settings, cache=tmp_path)
    assert isinstance(stored, StoredSequences) and same(stored, before)
    assert not same(stored, pack(before, length // 2, ())), "the control"


def test_documents_that_do_not_fit_are_named(place: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(packing=False, sequence_length=16)
    sizes = [len(row["input_ids"]) for row in as_rows(as_before(place, "text.jsonl", packing=False, length=16))]
    expected = [
        Problem("document-too-long", f"{place}/text.jsonl, line {number}", tokens=size, length=16)
        for number, size in enumerate(sizes, start=1)
    ]
    for cache in (None, tmp_path):
        assert problems(read, place, "text.jsonl", settings=settings, cache=cache, error=DataError) == expected
    assert kept(tmp_path) == []


# made once


def test_they_are_made_once(place: Path, tmp_path: Path) -> None:
    first, second = Bars(), Bars()
    sequences = read(place, "text.jsonl", "plain.txt", cache=tmp_path, track=first)
    (folder,) = kept(tmp_path)
    written = {file: file.stat() for file in folder.iterdir()}
    sizes = sum((place / name).stat().st_size for name in ("text.jsonl", "plain.txt"))
    assert first == {"texts": [sizes, sizes], "tokens": [sizes, sizes]}
    repeated = read(place, "text.jsonl", "plain.txt", cache=tmp_path, track=second)
    assert second.keys() == {"texts"} and {file: file.stat() for file in folder.iterdir()} == written
    assert same(sequences, repeated)
    info = json.loads((folder / "dataset_info.json").read_text())
    description = json.loads(info["description"])
    assert description["made_of"]["texts"] == [f"{place}/text.jsonl", f"{place}/plain.txt"]
    assert info["splits"]["train"]["num_examples"] == len(sequences)
    dataset = datasets.Dataset.from_file(str(folder / "tokens-train.arrow"))
    assert dataset[0] == {name: tensor.tolist() for name, tensor in sequences[0].items()}, "anybody can read it"


def test_what_decides_tokens_decides_what_is_found(place: Path, tmp_path: Path) -> None:
    def made(*texts: str, **options: Any) -> bool:
        bars = Bars()
        read(place, *texts, cache=tmp_path, track=bars, settings=TrainingSettings(**{"sequence_length": 32, **options}))
        return "tokens" in bars

    shutil.copy(place / "text.jsonl", place / "copy.jsonl")
    assert made("text.jsonl") and not made("text.jsonl")
    assert not made("copy.jsonl"), "the same bytes under another name"
    assert not made("text.jsonl", learning_rate=1.0, batch_size=3), "what only training needs"
    assert made("text.jsonl", sequence_length=64) and made("text.jsonl", packing=False, sequence_length=256)
    assert made("text.jsonl", learn_prompts=True) and made("text.jsonl", "copy.jsonl")
    with (place / "copy.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert made("copy.jsonl"), "other bytes"
    (place / "table.txt").write_text("text\n" + "A line of a table.\n" * 30)
    shutil.copy(place / "table.txt", place / "table.csv")
    assert made("table.txt") and made("table.csv"), "the same bytes, read as a table"
    assert made("data,split=train,column=body") and made("data,split=test,column=body")
    assert not made("data,split=train,column=body")


def test_another_tokenizer_makes_its_own(place: Path, tmp_path: Path) -> None:
    read(place, "text.jsonl", cache=tmp_path)
    folder = shutil.copytree(place / "wide", tmp_path / "other" / "wide")
    shutil.copy(place / "text.jsonl", folder.parent)
    with edited(folder / "tokenizer.json") as tokenizer:
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:50]
    bars = Bars()
    few = read(folder.parent, "text.jsonl", cache=tmp_path / "other" / "cache", track=bars)
    assert "tokens" in bars and not same(few, read(place, "text.jsonl", cache=tmp_path))
    both = Bars()
    read(folder.parent, "text.jsonl", cache=tmp_path, track=both)
    assert "tokens" in both, "the same text and the same folder, and not what is there"


def test_large_texts_are_kept_without_being_asked(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(read(place, "text.jsonl"), StoredSequences)
    monkeypatch.setattr(training_texts, "LARGE", 1000)
    assert isinstance(read(place, "text.jsonl"), StoredSequences)
    assert kept(Path(os.environ["HF_HOME"]) / "datasets")


# ids that the embedding does not have


def test_a_text_with_an_id_above_the_embedding_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base"))
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    with edited(base / "tokenizer.json") as tokenizer:
        odd = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": rows, "content": "<odd>", "special": True, **odd})
    wide = expand(base, Request("last:1"), tmp_path / "wide").path
    for name, text in (("odd", "A dog <odd> was there.\n"), ("plain", "A dog was there.\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    odd_text, plain = tmp_path / "odd.txt", tmp_path / "plain.txt"
    asked = TrainingSettings(**SHORT, rehearse=(str(odd_text),))
    begun = TrainingSettings(**SHORT, rehearse=("self",), rehearsal_samples=2, rehearsal_prompts=str(odd_text))
    in_cache = TrainingStart(cache_dir=tmp_path / "cache")
    usual = TrainingSettings(**SHORT)
    for called, data, settings, options in (
        ("training text", odd_text, usual, {}),
        ("training text", odd_text, usual, {"start": in_cache}),
        ("training text", odd_text, usual, {"start": in_cache}),  # now it is there
        ("rehearsal text", plain, asked, {}),
        ("rehearsal prompts", plain, begun, {}),
        ("old text", plain, usual, {"eval_data": EvalData(old=[odd_text])}),
        ("new text", plain, usual, {"eval_data": EvalData(new=[odd_text])}),
    ):
        assert refusal(train, wide, [data], tmp_path / "out", settings, error=DataError, **options) == (
            f"wide: its tokenizer gives the id {rows} for the {called}, expected ids below {rows}, the size of its "
            "embedding. Use the tokenizer that the model was trained with."
        )
        assert not (tmp_path / "out").exists()
    assert kept(tmp_path / "cache")


@pytest.mark.parametrize("cached", (False, True))
def test_added_tokens_are_in_the_embedding(tmp_path: Path, cached: bool) -> None:
    request = Request("last:1", variant="adapt", new_tokens=NewTokens(("Xylophone",)))
    wide = expand(SHIPPED_MODEL, request, tmp_path / "wide").path
    (tmp_path / "text.txt").write_text("A Xylophone, a dog.\n")
    start = TrainingStart(cache_dir=tmp_path / "cache" if cached else None)
    text = [tmp_path / "text.txt"]
    settings = TrainingSettings(**SHORT, rehearse=(str(text[0]),))
    train(wide, text, tmp_path / "out", settings, eval_data=EvalData(old=text, new=text), start=start)


def test_the_base_rehearses_what_its_own_tokenizer_reads(tmp_path: Path) -> None:
    """The base has no answer to new tokens, whose rows change as they learn."""
    request = Request("last:1", variant="adapt", new_tokens=NewTokens(("Xylophone",)))
    wide = open_folder(expand(SHIPPED_MODEL, request, tmp_path / "wide").path)
    (tmp_path / "text.txt").write_text("A Xylophone, a dog.\n" * 9)
    files = {name: [tmp_path / "text.txt"] for name in ("learn", REHEARSAL)}
    state = PartialState(cpu=True)
    texts = read_texts(wide, files, SETTINGS, RunOptions(), cache=None, processes=state, track=no_track)
    rows = wide.manifest.plan.sizes.vocabulary
    assert texts["learn"].highest == rows > texts[REHEARSAL].highest


# training


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run whose texts were in memory."""
    return train(place / "wide", [place / "text.jsonl"], tmp_path_factory.mktemp("whole") / "out", SETTINGS)


def logs(run: Training) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.log.read_text().splitlines()]


def test_training_from_disk_is_the_same_bit_for_bit(place: Path, whole: Training, tmp_path: Path) -> None:
    start = TrainingStart(cache_dir=tmp_path / "cache")
    done = train(place / "wide", [str(place / "text.jsonl")], tmp_path / "out", SETTINGS, start=start)
    shard = "expansion-default-00001-of-00001.safetensors"
    assert digests(done.path)[shard] == digests(whole.path)[shard] != digests(place / "wide")[shard]
    assert logs(done) == logs(whole) and done.schedule == whole.schedule


# interrupted, damaged, in company


@pytest.mark.parametrize("moment", ["texts", "tokens"])
def test_an_interruption_leaves_nothing(place: Path, tmp_path: Path, moment: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        read(place, "text.jsonl", cache=tmp_path, track=Bars(stop=moment))
    assert kept(tmp_path) == []


def test_what_a_kill_left_is_made_anew_and_what_was_cut_off_is_named(place: Path, tmp_path: Path) -> None:
    expected = read(place, "text.jsonl", cache=tmp_path).fingerprint()
    (folder,) = kept(tmp_path)
    folder.rename(f"{folder}.incomplete")  # killed before it got its name; all is there, and not to be trusted
    os.truncate(f"{folder}.incomplete/tokens-train.arrow", 40)
    bars = Bars()
    sequences = read(place, "text.jsonl", cache=tmp_path, track=bars)
    assert "tokens" in bars and sequences.fingerprint() == expected and kept(tmp_path) == [folder]
    assert same(sequences, read(place, "text.jsonl")), "and not only what is said of it"
    os.truncate(folder / "tokens-train.arrow", 4000)
    with refused("tokens-damaged", folder, DataError):
        read(place, "text.jsonl", cache=tmp_path)


def test_a_text_that_changes_while_it_is_read_is_not_kept(place: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(place / "text.jsonl", place / "changing.jsonl"))

    @contextmanager
    def writing(label: str, total: int) -> Iterator[Callable[..., None]]:
        with text.open("a") as file:
            file.write('{"text": "more"}\n' if label == "tokens" else "")
        yield lambda advance, note="": None

    with refused("file-changed", text, DataError):
        read(place, text.name, cache=tmp_path / "cache", track=writing)
    assert kept(tmp_path / "cache") == []


def test_tokens_that_another_process_does_not_see(tmp_path: Path) -> None:
    with refused("tokens-not-shared", tmp_path, DataError):
        open_stored("key", str(tmp_path))


def test_a_cache_that_cannot_be_written(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    unwritten = Problem("tokens-unwritten", cache, error="Not a directory")
    assert refusal(read, place, "text.jsonl", cache=cache, error=DataError) == str(unwritten)
