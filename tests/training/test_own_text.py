"""Text that a base writes itself: as much as a run needs, said before it is drawn, and kept for the next run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scale_surgery import DataError, Request, TrainingSettings, TrainingStart, expand, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.checkpoint.names import SAMPLES_FILE
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.progress import Finding
from scale_surgery.running.own_generation import generate_with
from scale_surgery.show.log_lines import LogLines
from scale_surgery.talking.samples import write_samples_of
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.text.beginnings import begin_prompts, begin_texts
from scale_surgery.text.instructions import Instruction
from scale_surgery.training import base_samples
from scale_surgery.training.base_samples import sample_base, sample_texts
from scale_surgery.training.kept_samples import kept_or_drawn
from scale_surgery.training.result import Training
from scale_surgery.training.sampling import MOST_TEXTS, Sampling, sampling_of
from scale_surgery.training.settings import TrainingSchedule
from tests.conftest import Bars, edited, flip, load, refused
from tests.instruct import make_instruct
from tests.training.test_train import write_lines

SELF = TrainingSettings(steps=3, batch_size=1, sequence_length=32, rehearse=("self",))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to learn, the shipped model expanded, and another base of the same shape expanded alike."""
    folder = tmp_path_factory.mktemp("own")
    write_lines(folder / "new.jsonl", [{"text": biography(person, 3)} for person in people(8, start=400)])
    expand(SHIPPED_MODEL, Request("last:1"), folder / "wide")
    shutil.copytree(SHIPPED_MODEL, folder / "other")
    with edited(folder / "other" / "model.safetensors") as tensors:
        tensors["model.norm.weight"] *= 0.5
    expand(folder / "other", Request("last:1"), folder / "other-wide")
    return folder


@pytest.fixture
def learn(place: Path, tmp_path: Path) -> Callable[..., tuple[Training, str]]:
    """Train, with a cache of its own; what was done, and the file of samples."""
    runs = iter(range(10))

    def run(name: str = "wide", settings: TrainingSettings = SELF) -> tuple[Training, str]:
        start = TrainingStart(cache_dir=tmp_path / "cache")
        done = train(place / name, [place / "new.jsonl"], tmp_path / f"run{next(runs)}", settings, start=start)
        return done, (done.path / "training" / SAMPLES_FILE).read_text()

    return run


def asking(*texts: str) -> list[Instruction]:
    """Prompts, one a line."""
    return [Instruction(({"role": "user", "content": text},), text) for text in texts]


class Told:
    """Notes of the work with some label, and what was done when each came."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str]] = []
        self.total = 0

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[..., None]]:
        self.total = total
        yield lambda amount, note="": self.events.append((amount, note))


# how much


@pytest.mark.parametrize(
    ("changes", "batches", "texts", "tokens", "rows"),
    [
        # the job of the issue rehearses three sequences of 128 tokens: half of that
        ({"batch_size": 1}, 3, MOST_TEXTS, 192, 2),
        # three sequences beside each batch of eight
        ({}, 120, MOST_TEXTS, 120 * 3 * 128 // 2, 64),
        ({"rehearsal_share": 0.5}, 120, MOST_TEXTS, 120 * 8 * 128 // 2, 64),
        # so much that the texts are what ends it
        ({}, 10**6, MOST_TEXTS, MOST_TEXTS * 128, 64),
        # each sample is a sequence
        ({"packing": False}, 5, 8, 960, 8),
        # who says how many gets them
        ({"rehearsal_samples": 1000}, 3, 1000, 128_000, 64),
        ({"rehearsal_samples": 4}, 10**6, 4, 512, 4),
    ],
)
def test_a_base_writes_what_a_run_needs(changes: dict, batches: int, texts: int, tokens: int, rows: int) -> None:
    settings = TrainingSettings(rehearse=("self",), sequence_length=128, **changes)
    sampling = sampling_of(settings, batches, 128, 128)
    assert (sampling.count, sampling.tokens, sampling.rows_at_once([1])) == (texts, tokens, rows)


def test_rows_at_once_fit_memory_and_beginnings() -> None:
    assert Sampling(800, 1024, 1.0, 0).rows == 16 and Sampling(800, 8192, 1.0, 0).rows == 2
    assert Sampling(800, 10**6, 1.0, 0).rows == 1
    assert Sampling(MOST_TEXTS, 128, 1.0, 0, enough=192).rows == 2


def test_beginnings_of_one_length_share_a_batch_and_all_take_turns() -> None:
    batches = list(Sampling(6, 32, 1.0, 0).batches([3, 5, 3, 4]))
    assert batches == [[0, 2, 0], [1, 1], [3]]
    assert list(Sampling(5, 8192, 1.0, 0).batches([1])) == [[0, 0], [0, 0], [0]]
    # texts that are needed for certain come first: two of 32 tokens for 64
    assert list(Sampling(5, 32, 1.0, 0, enough=64).batches([3, 5, 3])) == [[0], [1], [2, 0], [1]]
    assert Sampling(6, 32, 1.0, 0).rows_at_once([3, 5, 3, 4]) == 2


def test_no_text_is_drawn_after_enough(place: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(SHIPPED_MODEL), load(place / "wide")
    begins, told = begin_texts(tokenizer, "model"), Told()
    some = sample_base(model, begins, Sampling(50, 24, 1.0, 3, enough=100), told)
    assert 100 <= some.tokens < 100 + 24 and some.starts[-2] < 100
    every = sample_base(model, begins, Sampling(50, 24, 1.0, 3), Told())
    assert len(every) == 50 > len(some), "the control"
    # told before the first token, and then token by token, to the end
    first = told.events[0]
    assert isinstance(first[1], Finding)
    assert first == (0, "the base writes about 100 tokens in at most 50 texts, 5 at once")
    assert len(told.events) > 10 and sum(amount for amount, _ in told.events) == told.total == 100


def test_the_last_token_is_counted_when_the_last_batch_ends(place: Path) -> None:
    """The second batch could fill what is missing many times over, long before its longest row ends."""
    begins, told = begin_texts(AutoTokenizer.from_pretrained(SHIPPED_MODEL), "model"), Told()
    some = sample_base(load(place / "wide"), begins, Sampling(50, 64, 1.0, 3, enough=400), told)
    assert len(some) > 7, "the first batch ended early"
    counted = list(accumulate(amount for amount, _ in told.events))
    assert counted[-1] == 400 > counted[-2]


def test_a_last_batch_is_as_large_as_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def count(model, inputs, **options):
        rows.append(len(inputs["input_ids"]))
        return generate_with(model, inputs, **options)

    monkeypatch.setattr(base_samples, "generate_with", count)
    begins = begin_texts(AutoTokenizer.from_pretrained(SHIPPED_MODEL), "model")
    sampling = Sampling(800, 24, 1.0, 3, enough=1_400)
    made = sample_base(load(place / "wide"), begins, sampling, Told())
    assert made.tokens >= 1_400 > made.starts[-2], "no text is missing or too many"
    assert rows[0] == sampling.least == 59 and 0 < max(rows[1:]) < 59, "the control: the first batch was not enough"
    # half of what a mean text adds is kept in reserve
    assert [Sampling(9, 24, 1.0, 3, enough=100).missing(4, tokens) for tokens in (50, 99, 100, 120)] == [6, 1, 0, 0]
    assert Sampling(9, 24, 1.0, 3).missing(4, 50) == 9, "without a limit all are sampled"


def test_a_base_is_asked_in_its_own_tokens(place: Path, tmp_path: Path) -> None:
    """The rows of new tokens change as they learn, and the base has no answer to them."""
    request = Request("last:1", variant="adapt", new_tokens=NewTokens(("Xylophone",)))
    wide = expand(SHIPPED_MODEL, request, tmp_path / "wide").path
    (tmp_path / "asked.txt").write_text("A Xylophone\n")
    settings = replace(SELF, rehearsal_prompts=str(tmp_path / "asked.txt"), rehearsal_samples=2)
    done = train(wide, [place / "new.jsonl"], tmp_path / "out", settings)
    rows = [json.loads(line) for line in (done.path / "training" / SAMPLES_FILE).read_text().splitlines()]
    assert rows and all(max(row["ids"]) < read_manifest(wide).plan.sizes.vocabulary for row in rows)
    assert all("Xylophone" in row["text"] for row in rows)
    assert max(AutoTokenizer.from_pretrained(wide)("A Xylophone")["input_ids"]) >= 512, "the control"


def test_beginnings_take_turns_until_enough() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    begins = begin_prompts(tokenizer, asking("Q: What is", "The"), "model", 12)
    made = sample_texts(load(SHIPPED_MODEL), begins, Sampling(50, 12, 1.0, 0, enough=40), Told())
    texts = [tokenizer.decode(made[row]["input_ids"], skip_special_tokens=True) for row in range(len(made))]
    assert any(text.startswith("Q: What is") for text in texts) and any(text.startswith("The") for text in texts)


def test_a_log_says_what_is_drawn_and_how_long_it_takes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(SHIPPED_MODEL), load(place / "wide")
    lines: list[str] = []
    now = iter(range(0, 10**6, 2))
    monkeypatch.setattr("scale_surgery.training.base_samples.time.monotonic", lambda: next(now))
    log = LogLines(lines.append, clock=lambda: next(now))
    sample_base(model, begin_texts(tokenizer, "model"), Sampling(30, 24, 1.0, 3), log.track)
    assert lines[0].endswith("samples  0 %  the base writes 30 texts, 30 at once")
    assert any(line.endswith(" left") for line in lines[1:]) and len(lines) > 2


# kept


def test_the_next_run_of_the_same_base_finds_them(learn: Callable[..., tuple[Training, str]]) -> None:
    first, samples = learn()
    assert "drawn by an earlier run" not in first.schedule.rehearses
    rows = [json.loads(line) for line in samples.splitlines()]
    tokens = sum(len(row["ids"]) for row in rows)
    assert 0 < tokens < 48 + 32, "half of three sequences of 32 tokens"
    assert first.schedule.rehearses.startswith(f"{len(rows)} sample")
    second, again = learn()
    assert "(drawn by an earlier run), 1 beside each sequence" in second.schedule.rehearses and again == samples
    # another base, another seed, another length: nothing of it is found
    for name, settings in (("other-wide", SELF), ("wide", replace(SELF, seed=1)), ("wide", replace(SELF, steps=4))):
        other, drawn = learn(name, settings)
        assert "earlier run" not in other.schedule.rehearses, (name, settings)
        assert drawn != samples, (name, settings)


def test_an_interrupted_run_keeps_nothing(place: Path, tmp_path: Path) -> None:
    given = (place / "wide", [place / "new.jsonl"])
    start = TrainingStart(cache_dir=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        train(*given, tmp_path / "one", SELF, start=start, track=Bars(stop="samples"))
    done = train(*given, tmp_path / "two", SELF, start=start)
    assert "earlier run" not in done.schedule.rehearses


def test_damaged_samples_are_refused_and_a_cache_that_cannot_be_written_is_said(place: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model, begins = load(SHIPPED_MODEL), begin_texts(tokenizer, "model")

    def draw():
        return sample_texts(model, begins, Sampling(4, 24, 1.0, 0), Told())

    cache, kind = tmp_path / "cache", {"samples": 4}
    assert kept_or_drawn(draw, kind, cache, Told()).found == ""
    assert kept_or_drawn(draw, kind, cache, Told()).texts.fingerprint() == draw().fingerprint()
    (arrow,) = cache.rglob("*.arrow")
    flip(arrow, arrow.read_bytes().index(draw().ids[:8].numpy().tobytes()) + 4)
    with refused("tokens-changed", arrow.parent, DataError):
        kept_or_drawn(draw, kind, cache, Told())
    (tmp_path / "file").write_text("")
    told = Told()
    own = kept_or_drawn(draw, kind, tmp_path / "file", told)
    assert own.found.startswith("not kept for the next run: ") and len(own.texts) == 4
    assert [note for _, note in told.events] == [own.description]


def test_generate_finds_what_it_drew_of_the_same_base(place: Path, tmp_path: Path) -> None:
    settings = GenerationSettings(max_new_tokens=15, seed=5)
    first = write_samples_of(SHIPPED_MODEL, tmp_path / "first.jsonl", 3, settings)
    again = write_samples_of(place / "wide", tmp_path / "again.jsonl", 3, settings)
    assert (first.found, again.found) == ("", "drawn by an earlier run"), "its base is the same"
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    for other in ("other", "other-wide"):
        drawn = write_samples_of(place / other, tmp_path / f"{other}.jsonl", 3, settings)
        assert drawn.found == ("" if other == "other" else "drawn by an earlier run")
        assert (tmp_path / f"{other}.jsonl").read_bytes() != (tmp_path / "first.jsonl").read_bytes()
    # the same tensors, read in another way
    config = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "config"))
    with edited(config / "config.json") as content:
        content["rms_norm_eps"] = content["rms_norm_eps"] * 10
    assert write_samples_of(config, tmp_path / "config.jsonl", 3, settings).found == ""
    # a record that says nothing of the change
    wide = Path(shutil.copytree(place / "wide", tmp_path / "wide"))
    with edited(wide / "config.json") as content:
        content["rms_norm_eps"] = content["rms_norm_eps"] * 10
    assert write_samples_of(wide, tmp_path / "wide.jsonl", 3, settings).found == ""


def test_a_record_names_texts_without_their_folders(place: Path, tmp_path: Path) -> None:
    """It is published with the model, and folders are called as people and customers are."""
    private = tmp_path / "alice-at-acme"
    private.mkdir()
    shutil.copy(place / "new.jsonl", private / "old.jsonl")
    settings = replace(SELF, rehearse=(str(private / "old.jsonl"),))
    done = train(place / "wide", [shutil.copy(place / "new.jsonl", private / "new.jsonl")], tmp_path / "out", settings)
    record = (done.path / "surgery.json").read_text()
    assert "alice-at-acme" not in record and '"old.jsonl"' in record


def test_plain_text_on_a_model_with_a_template_is_warned_of(place: Path, tmp_path: Path) -> None:
    """Before the first step and in the result; not if answers are rehearsed, or the text has turns."""
    expand(make_instruct(tmp_path / "base"), Request("last:1"), tmp_path / "wide")
    chats = tmp_path / "chats.jsonl"
    words = [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "Adele."}]
    write_lines(chats, [{"messages": words}] * 4)
    plain, short = place / "new.jsonl", replace(SELF, steps=1)
    # rows that do not pass the template have no turns either
    asked = tmp_path / "asked.jsonl"
    write_lines(asked, [{"question": "Who is it?", "answer": "Adele."}] * 4)
    runs = [
        (asked, replace(short, rehearse=()), True),
        (chats, replace(short, rehearse=(), learn_prompts=True), False),
        (plain, replace(short, rehearse=()), True),
        (plain, replace(short, rehearse=(str(plain),)), True),
        (plain, replace(short, rehearsal_raw=True), True),
        (plain, short, False),
        (plain, replace(short, rehearse=(str(chats),)), False),
        (chats, replace(short, rehearse=()), False),
    ]
    for number, (text, settings, is_warned) in enumerate(runs):
        announced: list[TrainingSchedule] = []
        start = TrainingStart(cache_dir=tmp_path / "cache", announce=announced.append)
        done = train(tmp_path / "wide", [text], tmp_path / f"run{number}", settings, start=start)
        for warnings in (announced[0].warnings, done.warnings):
            assert any("--rehearse self" in warning for warning in warnings) is is_warned
    without = train(place / "wide", [plain], tmp_path / "without", replace(short, rehearse=()))
    assert not any("--rehearse" in warning for warning in without.warnings), "a model without a template"
