"""Answers to instructions: which end, repeat themselves, or change language, and what `evaluate` shows of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scale_surgery import (
    DataError,
    EvaluationSettings,
    Request,
    TrainingSettings,
    TrainingStart,
    evaluate,
    expand,
    train,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.checkpoint.names import SAMPLES_FILE
from scale_surgery.evidence.answer_scores import GivenAnswer, repeats_itself, score_given
from scale_surgery.evidence.languages import are_different, language_of
from scale_surgery.show.tables import render_evaluation
from scale_surgery.text.instructions import SHIPPED_FILE
from tests.command import run
from tests.conftest import refused, shown
from tests.instruct import ASKED, HELD_OUT, make_instruct, write_asked

NAMES = {
    "en": "English",
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "pt": "Portuguese",
    "it": "Italian",
    "ru": "Cyrillic",
    "zh": "Chinese",
    "ja": "Japanese",
    "ko": "Hangul",
}

# rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I do not know. " * 4, True),
        ("First a good start, then the end. the end. the end. the end. the end", True),
        ("1. Eat well every day.\n2. Eat well every day.\n3. Eat well every day.\n4. Eat well", True),
        ("的" * 40, True),
        ("Be kind to people.\n" * 3, True),
        ("1. Be kind to people.\n2. Be kind to people.\n3. Be kind to people.", True),
        ("!" * 120, True),
        (("Name: " + "_" * 40 + "\n") * 3, True),
        # correct answers whose lines are alike, forms to fill in, rules and numbers
        ("".join(f"7 x {number} = {7 * number}\n" for number in range(1, 9)), False),
        ("".join(f"Step {number}: {number * 10} km\n" for number in range(1, 6)), False),
        ("Signature: " + "_" * 40, False),
        ("1" + "0" * 33, False),
        ("Title\n" + "=" * 40, False),
        # twice is no loop; nor are short words, what comes earlier, or a row of numbers
        ("I do not know. " * 2, False),
        ("Ha ha ha ha.", False),
        ("So it was, and so it is. " * 4 + "Then it stopped, and nobody knew why.", False),
        (", ".join(map(str, range(2, 60, 2))), False),
        ("1. Eat well every day.\n2. Sleep well every day.\n3. Walk well every day.\n", False),
        ("", False),
    ],
)
def test_repeats(text: str, expected: bool) -> None:
    assert repeats_itself(text) is expected


def test_languages_of_the_packages_list() -> None:
    """No language is taken for another; short texts in Latin or Han letters stay open."""
    rows = [json.loads(line) for line in SHIPPED_FILE.read_text(encoding="utf-8").splitlines()]
    found = [(NAMES[row["language"]], language_of(row["prompt"]), len(row["prompt"])) for row in rows]
    assert all(language in (name, "Latin", "Han"[: 3 * (name == "Chinese")]) for name, language, _ in found)
    assert sum(name == language for name, language, _ in found) >= 140
    long = [name == language for name, language, length in found if length > 100]
    assert sum(long) >= 0.9 * len(long) > 20
    assert language_of("") == language_of("12 + 4") == "" and language_of("x = f(y)") == "Latin"


def test_a_short_answer_in_kanji_is_not_taken_for_chinese() -> None:
    assert language_of("富士山") == "Han" and language_of("富士山です。") == "Japanese"
    assert language_of("富士山位于日本本州岛中部是日本最高的山峰海拔三千余米") == "Chinese"


def test_code_is_in_no_language() -> None:
    code = "\n```python\nif x is not None and y in for_all:\n    return [that for that in this if not the]\n```\n"
    assert language_of(f"Вот код:{code}") == "Cyrillic" and language_of(code) == ""
    assert language_of("Die Funktion `return the_sum_of(this and that)` ist nicht das, was du suchst.") == "German"
    # a fence that the limit cut, and the control
    assert language_of(f"Вот код:{code[:-4]}") == "Cyrillic"
    assert language_of(f"Вот код:{code.replace('`', '')}") != "Cyrillic"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("English", "German", True),
        ("Han", "Japanese", None),
        ("Han", "Chinese", None),
        ("Chinese", "Japanese", True),
        ("Latin", "Cyrillic", True),
        ("German", "Han", True),
        ("Latin", "German", None),
        ("Latin", "Latin", None),
        ("", "German", None),
        ("English", "English", False),
    ],
)
def test_what_is_not_decided_is_no_other_language(one: str, other: str, expected: bool | None) -> None:
    assert are_different(one, other) is are_different(other, one) is expected


def given(*languages: str, ended: bool = True, first: int = 1) -> list[GivenAnswer]:
    return [GivenAnswer(first + place, "", ended, place == 0, name) for place, name in enumerate(languages)]


def test_counts_are_of_the_same_instructions() -> None:
    model, base = given("German", "Latin", "Han"), given("English", "English", first=2)
    score = score_given(model, base, is_chat=True)
    assert (score.asked, score.ended, score.repeating, score.compared, score.other_language) == (3, 3, 1, 1, 1)
    assert score.other_share == 1.0 and score_given(model, is_chat=True).other_share is None
    assert score_given(given("Han", ended=False), is_chat=True).ended_share == 0, "the control"


# models


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instruct model that was not trained, with a fresh expansion, and instructions."""
    place = tmp_path_factory.mktemp("instructions")
    make_instruct(place / "base")
    expand(place / "base", Request("last:1", variant="adapt", collaborate="both"), place / "fresh")
    write_asked(place / "asked.jsonl", HELD_OUT[:1])
    return place


def test_evaluate_counts_answers_beside_those_of_the_base(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    outcome = run("evaluate", place / "fresh", "--instructions", place / "asked.jsonl", "-o", file)
    table, _ = outcome.output.split("\n\n", 1)
    assert "other language" in table and all(len(line) <= 80 for line in table.splitlines())
    base, fresh, disabled = json.loads(file.read_text())["scores"]
    assert disabled["answers"] is None and disabled["probes"] is None
    assert fresh["answers"]["answers"] == base["answers"]["answers"], "a fresh expansion changes nothing"
    known = sum(answer["language"] not in ("", "Latin") for answer in base["answers"]["answers"])
    assert (base["answers"]["asked"], fresh["answers"]["compared"], fresh["answers"]["other_share"]) == (6, known, 0)
    assert 0 < known < 6
    assert base["answers"]["compared"] is base["answers"]["other_share"] is None
    assert base["answers"]["ended_share"] == 1 and base["answers"]["is_chat"]
    # the control: one token is no whole answer
    settings = EvaluationSettings(instructions=str(place / "asked.jsonl"), max_new_tokens=1)
    assert evaluate([place / "base"], settings=settings).scores[0].answers.ended == 0


def test_a_model_without_a_template_goes_on_with_the_text_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("The birth city of Hugo Pickett is\n")
    settings = EvaluationSettings(instructions=str(tmp_path / "asked.txt"), max_new_tokens=4)
    result = evaluate([SHIPPED_MODEL], settings=settings)
    assert not result.scores[0].answers.is_chat and "no chat template" in result.notes[0]
    assert "to 1 instruction" in shown(render_evaluation(result))
    with refused("texts-missing", "", DataError):
        evaluate([SHIPPED_MODEL])


# training


@pytest.mark.slow
def test_a_run_rehearses_answers_up_to_the_end_of_the_turn(place: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text(biography(people(1, start=400)[0]))
    common = {"steps": 1, "batch_size": 1, "sequence_length": 128, "rehearse": ("self",), "rehearsal_samples": 6}
    start = TrainingStart(cache_dir=tmp_path / "cache")
    chat, raw = (
        train(place / "fresh", [tmp_path / "new.txt"], tmp_path / name, TrainingSettings(**common, **more), start=start)
        for name, more in (
            ("chat", {"rehearsal_prompts": str(place / "asked.jsonl")}),
            ("raw", {"rehearsal_raw": True}),
        )
    )
    samples = {
        name: [json.loads(line) for line in (tmp_path / name / "training" / SAMPLES_FILE).read_text().splitlines()]
        for name in ("chat", "raw")
    }
    assert "answers to 6 instructions" in chat.schedule.rehearses and "instruction" not in raw.schedule.rehearses
    assert sum("<|im_start|>system" in row["text"] for row in samples["chat"]) == 3, "system messages stay"
    assert all(row["text"].count("<|im_start|>assistant\n") == 1 for row in samples["chat"])
    assert all(len(row["ids"]) == 128 or row["text"].endswith(("<|im_end|>", "</s>")) for row in samples["chat"])
    assert not any("<|im_start|>user" in row["text"] for row in samples["raw"]), "the control"


@pytest.mark.slow
def test_a_model_still_answers_if_it_rehearses_its_answers(tmp_path: Path) -> None:
    """Without rehearsal it stops ending its answers. The loss of both runs is that of plain text without an end."""
    make_instruct(tmp_path / "base", steps=100)
    expand(tmp_path / "base", Request("all", variant="adapt", collaborate="both"), tmp_path / "wide")
    (tmp_path / "new.txt").write_text(" ".join(biography(person, 3) for person in people(80, start=400)))
    prompts = str(write_asked(tmp_path / "known.jsonl", ASKED))
    settings = EvaluationSettings(instructions=str(write_asked(tmp_path / "asked.jsonl")), max_new_tokens=16)
    learn = {"steps": 40, "batch_size": 4, "sequence_length": 64, "learning_rate": 3e-3}
    itself = {"rehearse": ("self",), "rehearsal_share": 0.5}
    ended = {}
    for name, more in (("plain", {}), ("answers", {**itself, "rehearsal_prompts": prompts})):
        train(tmp_path / "wide", [tmp_path / "new.txt"], tmp_path / name, TrainingSettings(**learn, **more))
        base, score, _ = evaluate([tmp_path / name], settings=settings).scores
        assert base.answers.ended_share == 1
        ended[name] = score.answers.ended_share
    assert ended["plain"] < 0.5 and ended["answers"] > 0.9
