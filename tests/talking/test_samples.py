"""Old text that a base writes itself: drawn as rehearsal draws, other texts, readable, whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import PlanError, Problem
from scale_surgery.progress import no_track
from scale_surgery.talking.samples import ASIDE, _Written, write_samples_of
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.text.beginnings import Beginnings, begin_texts, find_beginnings
from scale_surgery.text.conversations import with_thought
from scale_surgery.text.documents import read_documents
from scale_surgery.text.instructions import Instruction
from scale_surgery.training.base_samples import sample_texts
from scale_surgery.training.sampling import Sampling
from tests.command import run
from tests.composed import make_speaking
from tests.conftest import Bars, load, problems, refused
from tests.each import mostly
from tests.instruct import make_instruct

SETTINGS = GenerationSettings(max_new_tokens=15, seed=3)


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def as_rehearsed(model: Any, folder: Path, count: int, seed: int = 3 ^ ASIDE) -> list[str]:
    """What rehearsal would draw with a seed, as text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begins = begin_texts(tokenizer, "model")
    samples = sample_texts(model, begins, Sampling(count, 16, 1.0, seed), no_track)
    rows = [samples[place]["input_ids"].tolist() for place in range(count)]
    return [tokenizer.decode([id_ for id_ in row if id_ not in tokenizer.all_special_ids]) for row in rows]


@pytest.mark.parametrize("kind", mostly(["base", "wide", "posterior", "deep"], "posterior".__eq__))
def test_the_base_writes_as_rehearsal_draws_and_nothing_that_it_draws(place: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "old.jsonl"
    done = write_samples_of(place / kind, file, 5, SETTINGS)
    expected = as_rehearsed(load(place / "base"), place / "base", 5)
    assert texts_of(file) == [text for text in expected if text.strip()] and done.texts == len(texts_of(file)) > 0
    assert [document.text for document in read_documents([file])] == texts_of(file)
    rehearsed = as_rehearsed(load(place / "base"), place / "base", 5, SETTINGS.seed)
    assert not {*texts_of(file)} & {*rehearsed}, "forgetting is measured on other texts"
    assert 0 < done.tokens <= 5 * 15


def test_of_many_expansions_the_base_writes(tmp_path: Path) -> None:
    made, composed = make_speaking(tmp_path)
    write_samples_of(composed, tmp_path / "old.jsonl", 4, SETTINGS)
    assert texts_of(tmp_path / "old.jsonl") == as_rehearsed(load(made.base), made.base, 4)
    with refused("option-without-effect", "--expansion", PlanError):
        write_samples_of(composed, tmp_path / "old.jsonl", 4, GenerationSettings(expansion="law"))


def test_a_model_with_a_template_answers_instructions(tmp_path: Path) -> None:
    """Each row is a conversation with what was drawn, up to the end of the turn; it is read as one."""
    base = make_instruct(tmp_path / "base")
    tokenizer, model = AutoTokenizer.from_pretrained(base), load(base)
    done = write_samples_of(base, tmp_path / "old.jsonl", 6, replace(SETTINGS, max_new_tokens=40))
    begins = find_beginnings(tokenizer, "base", model.config.max_position_embeddings)
    length = min(max(begins.lengths) + 40, model.config.max_position_embeddings)
    sampling = Sampling(6, length, 1.0, 3 ^ ASIDE, new_tokens=40)
    samples = sample_texts(model, begins, sampling, no_track)
    expected = []
    for number, place in enumerate(chain.from_iterable(sampling.batches(begins.lengths))):
        begun, row = list(begins.ids[place]), samples[number]["input_ids"].tolist()
        answer = row[len(begun) :]
        assert row[: len(begun)] == begun and 0 < len(answer) <= 40
        assert answer[-1] in begins.ends or len(answer) == 40 or len(row) == length
        assert not {*begins.ends} & {*answer[:-1]}, "nothing follows the end"
        text = tokenizer.decode(
            answer[:-1] if answer[-1] in begins.ends else answer, clean_up_tokenization_spaces=False
        )
        asked = begins.asked[place].messages
        expected += [[*asked, {"role": "assistant", "content": text}]] if text.strip() else []
    rows = [json.loads(line)["messages"] for line in (tmp_path / "old.jsonl").read_text().splitlines()]
    assert rows == expected and done.texts == len(rows) > 0 and "answers to" in done.begun
    assert [document.text for document in read_documents([tmp_path / "old.jsonl"])] == [
        row[-1]["content"] for row in rows
    ]
    # the control
    plain = write_samples_of(base, tmp_path / "plain.jsonl", 2, replace(SETTINGS, raw=True))
    assert plain.begun == "" and texts_of(tmp_path / "plain.jsonl")


def test_a_thought_that_the_prompt_opens_belongs_to_the_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    begin = tuple(tokenizer("Why?\n<think>\n")["input_ids"])
    asked = (Instruction(({"role": "user", "content": "Why?"},), "x"),)
    begins = Beginnings((begin,), (tokenizer.eos_token_id,), asked)

    def written(text: str) -> Any:
        return _Written(begins, 0, tokenizer(f"Why?\n<think>\n{text}")["input_ids"], tokenizer)

    whole = written("Hm.\n</think>\n\nSo.")
    assert whole.is_whole and whole.line["messages"][-1]["content"] == "<think>\nHm.\n</think>\n\nSo."
    assert with_thought(whole.line["messages"][-1])["content"] == "So."
    assert not written("Hm, and so on").is_whole, "it was cut before the answer"


def test_what_cannot_be_sampled_is_refused(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with refused("base-fused", "--samples", PlanError):
        write_samples_of(place / "fused", file, 2)
    greedy = GenerationSettings(temperature=0, top_k=3)
    assert problems(write_samples_of, place / "base", file, 0, greedy, error=PlanError) == [
        Problem("option-without-effect", "--top-k"),
        Problem("samples-alike", "--temperature"),
        Problem("samples-too-few", "--samples", count=0),
    ]
    assert not file.exists()


def test_an_interrupted_run_leaves_what_was_there(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text("before")

    with pytest.raises(KeyboardInterrupt):
        write_samples_of(place / "base", file, 2, SETTINGS, track=Bars(stop="samples"))
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_the_command(place: Path, tmp_path: Path) -> None:
    file, words = tmp_path / "old.jsonl", ("generate", place / "base", "--samples", "3")
    outcome = run(*words, "-o", file, "--max-new-tokens", 15, "--seed", 3)
    assert len(texts_of(file)) == 3 and "texts" in outcome.output
    for wrong in ([], ["-o", tmp_path / "old.json"], ["-o", file, "--prompt", "x"], ["-o", file, "--compare"]):
        run(*words, *wrong, code=2)
    assert "generate MODEL --samples 500" in " ".join(run("learn", "--help").output.split())
