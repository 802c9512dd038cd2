"""Measuring: against plain torch, over windows, in rows that are compared with the right base, and its refusals."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import (
    CheckpointError,
    DataError,
    Evaluation,
    EvaluationSettings,
    Request,
    RunOptions,
    evaluate,
    expand,
    route_export,
)
from scale_surgery.errors import Problem
from scale_surgery.evidence.evaluate_models import Score
from scale_surgery.running import loss as measure
from scale_surgery.running import pieces
from scale_surgery.running.loading import loaded
from scale_surgery.running.loss import Measurement
from scale_surgery.show.log_lines import LogLines
from scale_surgery.text.documents import Document
from scale_surgery.text.sequences import IGNORED, PROMPT, Sequences
from scale_surgery.text.tokenizing import stride, tokenize
from tests.command import run
from tests.conftest import Bars, edited, flip, load, problems, refusal, refused, shake
from tests.text.test_tokenizing import START, letters, lines
from tests.tiny import save_tiny

QUESTIONS = [Document("ab?", " cd", ""), Document("where is it?", " there", ""), Document("q?", " z", "")]
TEXTS = [Document("", "the quick brown fox jumps over the lazy dog and sleeps", ""), Document("", "hey", "")]


def with_tokenizer(folder: Path, **kinds: bool) -> Path:
    letters(**kinds).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, two trained expansions of it, one of another model, and texts."""
    place = tmp_path_factory.mktemp("evaluate")
    base = with_tokenizer(save_tiny(place / "base", "llama"))
    other_base = with_tokenizer(save_tiny(place / "other", "qwen3", shard_size="30KB"))
    shake(expand(base, Request("1-2"), place / "wide").path)
    shake(expand(base, Request("0,2", variant="adapt", collaborate="both"), place / "adapted").path)
    shake(expand(other_base, Request("1"), place / "other-wide").path)
    (place / "old.txt").write_text(TEXTS[0].text)
    lines(place / "new.jsonl", *({"question": document.prompt, "answer": document.text} for document in QUESTIONS))
    return place


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return load(place / "base")


@pytest.fixture(scope="module")
def result(place: Path) -> Evaluation:
    """Everything at once: two models of one base, and that base itself as a plain folder."""
    return evaluate(
        [place / "wide", place / "base", place / "adapted"],
        [place / "old.txt"],
        [place / "new.jsonl"],
        run=RunOptions(batch_size=2),
    )


def row(result: Evaluation, name: str) -> Score:
    (matching,) = [score for score in result.scores if score.name == name]
    return matching


@torch.no_grad()
def plain_nats(model: Any, ids: list[int], scored: list[int]) -> float:
    """Sum of -log p of the tokens at some places, one forward pass for each, in float64."""
    total = 0.0
    for place in scored:
        logits = model(torch.tensor([ids[:place]])).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[ids[place]])
    return total


def plain(model: Any, sequences: Sequences) -> Measurement:
    """The same as `measure`, token by token."""
    total = Measurement(0.0, 0, 0, 0)
    for index in range(len(sequences)):
        ids, labels = (sequences[index][name].tolist() for name in ("input_ids", "labels"))
        scored = [place for place in range(1, len(ids)) if labels[place] >= 0]
        asked = [place for place in scored if labels[place - 1] == PROMPT]
        with torch.no_grad():
            guesses = [int(model(torch.tensor([ids[:place]])).logits[0, -1].argmax()) for place in asked]
        answered = sum(guess == ids[place] for guess, place in zip(guesses, asked, strict=True))
        total += Measurement(plain_nats(model, ids, scored), len(scored), len(asked), answered)
    return total


def same(first: Measurement, second: Measurement) -> bool:
    counts = (first.scored, first.questions, first.answered) == (second.scored, second.questions, second.answered)
    return counts and math.isclose(first.nats, second.nats, rel_tol=1e-5)


# one model on token sequences


@pytest.mark.parametrize("starts", [True, False], ids=["start token", "no start token"])
def test_measure_is_the_plain_computation(model: Any, starts: bool) -> None:
    sequences = tokenize([*QUESTIONS, *TEXTS], letters(starts=starts))
    measurement = measure.measure(model, sequences, 3)
    assert same(measurement, plain(model, sequences))
    assert (measurement.scored, measurement.questions) == (sequences.scored, 3)
    assert measurement.nats_per_token == measurement.nats / measurement.scored
    assert measurement.perplexity == math.exp(measurement.nats_per_token)


def test_batches_and_pieces_of_logits_change_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = tokenize([*QUESTIONS, *TEXTS], letters())
    whole = measure.measure(model, sequences, 8)
    assert same(measure.measure(model, sequences, 1), whole)
    for tokens in (1, 2, 7):
        monkeypatch.setattr(pieces, "LOGITS_AT_ONCE", tokens * 97)
        assert same(measure.measure(model, sequences, 4), whole)


def test_float32_sums_in_half_precision(place: Path) -> None:
    half = load(place / "base", dtype=torch.bfloat16)
    sequences = tokenize([*QUESTIONS, *TEXTS], letters())
    measurement = measure.measure(half, sequences, 1)
    expected = 0.0
    for index in range(len(sequences)):
        ids, labels = sequences[index]["input_ids"], sequences[index]["labels"]
        with torch.no_grad():
            logits = half(ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
        nats = -logits.double().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        expected += float(nats[labels[1:] >= 0].sum())
    assert math.isclose(measurement.nats, expected, rel_tol=1e-6)


def test_windows_are_the_naive_strided_loss(model: Any) -> None:
    sequences = tokenize(TEXTS, letters())
    length, step = 12, 5
    expected = 0.0
    for index in range(len(sequences)):
        ids = sequences[index]["input_ids"].tolist()
        for place in range(1, len(ids)):
            left = next(left for left in range(0, len(ids), step) if place < left + length)
            # each window begins as a text does
            expected += plain_nats(model, [START, *ids[left + 1 :]], [place - left])
    measurement = measure.measure(model, stride(sequences, length, step, [START]), 4)
    assert measurement.scored == sequences.scored
    assert math.isclose(measurement.nats, expected, rel_tol=1e-5)


def test_answers_count_and_texts_do_not(model: Any) -> None:
    assert measure.measure(model, tokenize(TEXTS, letters()), 2).accuracy is None
    best = {}
    for document in QUESTIONS:
        prompt = tokenize([Document("", document.prompt, "")], letters(ends=False))[0]["input_ids"]
        with torch.no_grad():
            best[document.prompt] = int(model(prompt[None]).logits[0, -1].argmax())
    tokenizer = letters()
    sequences = tokenize(QUESTIONS, tokenizer)
    # the model's own guess in place of the second question's first answer token: one of three is known
    first = sequences.starts[1] + 1 + len(QUESTIONS[1].prompt)
    sequences.ids[first] = sequences.labels[first] = best[QUESTIONS[1].prompt]
    assert measure.measure(model, sequences, 2).accuracy == pytest.approx(1 / 3)


def test_what_scores_nothing(model: Any) -> None:
    sequences = tokenize(TEXTS, letters())
    ignored = Sequences(sequences.ids, torch.full_like(sequences.labels, IGNORED), sequences.starts)
    measurement = measure.measure(model, ignored, 2)
    assert measurement == Measurement(0.0, 0, 0, 0)
    assert (
        math.isnan(measurement.nats_per_token) and math.isnan(measurement.perplexity) and measurement.accuracy is None
    )
    assert Measurement(1000.0, 1, 0, 0).perplexity == math.inf


def test_modes_and_gradients_are_given_back(place: Path) -> None:
    model = load(place / "wide").train()
    model.lm_head.eval()
    advanced = []
    sequences = tokenize(TEXTS, letters())
    measurement = measure.measure(model, sequences, 1, lambda tokens, note="": advanced.append(tokens))
    assert model.training and not model.lm_head.training
    assert same(measurement, measure.measure(model.eval(), sequences, 1)), "it was measured without dropout"
    assert advanced == sorted(advanced, reverse=True) and sum(advanced) == len(sequences.ids)
    assert torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
    sequences.ids[0] = 1000
    with pytest.raises(IndexError):
        measure.measure(model.train(), sequences, 1)
    assert model.training


# several models


def test_rows(place: Path, result: Evaluation) -> None:
    assert [(score.name, score.kind, score.base) for score in result.scores] == [
        ("base (base)", "base", None),
        ("wide", "expanded", "base (base)"),
        ("wide, expansion disabled", "disabled", "base (base)"),
        ("adapted", "expanded", "base (base)"),
        ("adapted, expansion disabled", "disabled", "base (base)"),
    ]
    assert (result.sequence_length, result.step, result.notes) == (64, 32, ())
    base = row(result, "base (base)")
    assert base.forgetting is None and base.learning is None
    for name in ("wide", "adapted"):
        score = row(result, name)
        assert score.forgetting == score.old.nats_per_token - base.old.nats_per_token != 0
        assert score.learning == base.new.nats_per_token - score.new.nats_per_token != 0
        disabled = row(result, f"{name}, expansion disabled")
        assert (disabled.old, disabled.new) == (base.old, base.new), "to the last bit"
        assert (disabled.forgetting, disabled.learning) == (0.0, 0.0)
    measured = measure.measure(load(place / "wide"), tokenize(QUESTIONS, letters()), 2)
    assert row(result, "wide").new == replace(measured, bytes=11)


def test_each_is_compared_with_its_own_base_or_with_nothing(place: Path) -> None:
    evaluation = evaluate(place / "wide", new=[place / "new.jsonl"])
    assert [score.old for score in evaluation.scores] == [None] * 3
    assert row(evaluation, "wide").forgetting is None and row(evaluation, "wide").learning is not None
    evaluation = evaluate([place / "base", place / "base", place / "other"], [place / "old.txt"])
    assert [(score.name, score.kind, score.base) for score in evaluation.scores] == [
        ("base", "other", None),
        ("other", "other", None),
    ]
    evaluation = evaluate([place / "wide", place / "other-wide", place / "other"], [place / "old.txt"])
    assert {score.name: score.base for score in evaluation.scores if score.kind != "disabled"} == {
        "base (base)": None,
        "wide": "base (base)",
        "other (base)": None,
        "other-wide": "other (base)",
    }


def test_a_base_that_is_given_is_the_base_of_its_expansion(place: Path, tmp_path: Path, result: Evaluation) -> None:
    """Measured from its own folder it gives what the base inside the expanded one gives, and it is measured once."""
    texts = ([place / "old.txt"], [place / "new.jsonl"])
    alone = evaluate([place / "wide"], *texts, run=RunOptions(batch_size=2))
    assert row(alone, "base (base)") == row(result, "base (base)")
    given = Path(shutil.copytree(place / "base", tmp_path / "moved"))
    assert evaluate([place / "wide", given], *texts, run=RunOptions(batch_size=2)).scores == alone.scores
    # one bit of one weight, and it is another model
    flip(given / "model.safetensors", -2)
    names = [score.name for score in evaluate([place / "wide", given], *texts).scores]
    assert names == ["base (base)", "wide", "wide, expansion disabled", "moved"]


def test_bases_of_one_name_are_told_apart(place: Path, tmp_path: Path) -> None:
    """Equal names and shapes, other weights."""
    base = Path(shutil.copytree(place / "base", tmp_path / "base"))
    with edited(base / "model.safetensors") as tensors:
        for tensor in tensors.values():
            tensor *= 1.01
    wide = expand(base, Request("1-2"), tmp_path / "wide").path
    evaluation = evaluate([place / "wide", wide], [place / "old.txt"])
    assert [score.name for score in evaluation.scores] == [
        "base (base)",
        str(place / "wide"),
        f"{place / 'wide'}, expansion disabled",
        f"base (base of {wide})",
        str(wide),
        f"{wide}, expansion disabled",
    ]
    assert evaluation.scores[4].base == f"base (base of {wide})" and evaluation.scores[4].forgetting == 0.0


@pytest.mark.slow
def test_a_trainer_s_folder_is_compared_with_itself(place: Path, tmp_path: Path) -> None:
    model = load(place / "wide")
    model.save_pretrained(tmp_path / "saved")
    with_tokenizer(tmp_path / "saved")
    evaluation = evaluate([tmp_path / "saved"], [place / "old.txt"])
    assert [(score.name, score.kind, score.base) for score in evaluation.scores] == [
        ("saved", "expanded", "saved, expansion disabled"),
        ("saved, expansion disabled", "disabled", None),
    ]
    assert evaluation.notes == (
        "saved: has no surgery.json, so its base cannot be given back as files; it is compared with itself, "
        "expansion disabled. Make an expanded folder of it: "
        f"scale-surgery adopt {tmp_path}/saved --expanded EXPANDED -o OUT",
    )
    # report, which comes next otherwise, does not take it
    shown = run("evaluate", tmp_path / "saved", "--old", place / "old.txt").stdout
    assert " ".join(shown.split()).endswith(f"next scale-surgery adopt {tmp_path}/saved --expanded EXPANDED -o OUT")
    wanted = evaluate([place / "wide"], [place / "old.txt"])
    assert evaluation.scores[0].forgetting == row(wanted, "wide").forgetting


def test_what_comes_next_is_for_the_last_expanded_model(place: Path, tmp_path: Path) -> None:
    routed = route_export(place / "adapted", tmp_path / "routed").path
    other, wide = Path(shutil.copytree(place / "other", tmp_path / "wide")), place / "wide"
    fresh = expand(place / "base", Request("1"), tmp_path / "fresh").path
    report_, look = "report {} -o report.html", f"route-report {{}} --text {place}/old.txt"
    for models, line in (
        ([routed, place / "base"], look.format(routed)),
        ([routed, wide], report_.format(wide)),
        ([wide, routed, place / "other"], look.format(routed)),
        ([wide, fresh], f"train {fresh} --data FILE"),
        # two of one name, of which the last is not expanded
        ([wide, other], report_.format(wide)),
        ([place / "base", place / "other"], f"inspect {place}/other"),
    ):
        shown = run("evaluate", *models, "--old", place / "old.txt").stdout
        assert shown.splitlines()[-1].split(maxsplit=1) == ["next", f"scale-surgery {line}"]
    asked = lines(tmp_path / "asked.jsonl", {"prompt": "Who?"})
    answered = run("evaluate", wide, "--instructions", asked, "--max-new-tokens", 2).stdout
    assert answered.splitlines()[-1].endswith(f"scale-surgery {report_.format(wide)}")


def test_other_tokens_are_not_compared(place: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(place / "base", tmp_path / "unstarted"))
    with_tokenizer(base, starts=False)
    evaluation = evaluate([place / "wide", base], [place / "old.txt"])
    assert row(evaluation, "unstarted").base is None and row(evaluation, "unstarted").forgetting is None
    assert evaluation.notes == (
        "unstarted: reads other tokens than base (base); their losses cannot be compared, accuracies can.",
    )


def test_windows_fit_the_shortest_context(place: Path, tmp_path: Path) -> None:
    short = with_tokenizer(save_tiny(tmp_path / "short", "llama", max_position_embeddings=16))
    evaluation = evaluate([place / "base", short], [place / "old.txt"])
    assert (evaluation.sequence_length, evaluation.step) == (16, 8)
    assert evaluate(short, [place / "old.txt"], settings=EvaluationSettings(sequence_length=9)).step == 4
    asked = evaluate(place / "base", [place / "old.txt"], settings=EvaluationSettings(sequence_length=10, step=3))
    assert (asked.sequence_length, asked.step) == (10, 3)
    expected = measure.measure(load(place / "base"), stride(tokenize(TEXTS[:1], letters()), 10, 3, [START]), 8)
    assert replace(asked.scores[0].old, bytes=0) == expected


def test_dtype(place: Path) -> None:
    evaluation = evaluate(place / "wide", [place / "old.txt"], run=RunOptions(dtype="bfloat16"))
    expected = measure.measure(load(place / "wide", dtype=torch.bfloat16), tokenize(TEXTS[:1], letters()), 8)
    assert replace(row(evaluation, "wide").old, bytes=0) == expected
    assert evaluation.scores[0].old == evaluation.scores[2].old and evaluation.dtype == "bfloat16"


def test_progress(place: Path) -> None:
    bars, texts = Bars(), ([place / "old.txt"], [place / "new.jsonl"])
    evaluate([place / "wide", place / "adapted"], *texts, track=bars)
    alone = Bars()
    evaluate(place / "base", *texts, track=alone)
    (tokens, _) = alone["evaluate"]
    assert bars == {"evaluate": [5 * tokens, 5 * tokens]} and alone == {"evaluate": [tokens, tokens]}, (
        "five rows, and one"
    )


def test_a_log_has_the_rows_of_a_model_before_the_next_is_measured(place: Path) -> None:
    """If the next model fails, there is no table."""
    lines: list[str] = []
    texts = [place / "old.txt"], [place / "new.jsonl"]
    measured = evaluate([place / "wide", place / "adapted"], *texts, track=LogLines(lines.append).track)
    rows = {
        f"{score.name}: old {score.old.nats_per_token:.4f}, new {score.new.nats_per_token:.4f} nats per token"
        for score in measured.scores
        if score.old is not None and score.new is not None and not score.name.startswith("adapted")
    }
    assert len(rows) == 3
    # time, label, share, row, and then perhaps speed and time left
    assert {line.split("  ")[3] for line in lines} == rows


def test_json_has_no_nan(place: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(place / "base", tmp_path / "broken"))
    with edited(broken / "model.safetensors") as tensors:
        tensors["model.norm.weight"].fill_(math.nan)
    content = evaluate(broken, [place / "old.txt"]).to_json()
    assert content["scores"][0]["old"]["nats_per_token"] == "NaN"
    json.dumps(content, allow_nan=False)


# refusals, before any model is loaded


@pytest.mark.usefixtures("unloaded")
def test_texts_and_lengths_that_are_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "one.txt").write_text("a")
    lines(tmp_path / "bad.jsonl", {"body": "x"})
    small = with_tokenizer(save_tiny(tmp_path / "small", "llama", vocab_size=20))
    bare = Path(shutil.copytree(place / "base", tmp_path / "bare"))
    with_tokenizer(bare, starts=False, ends=False)
    wide, old = place / "wide", [place / "old.txt"]
    assert problems(evaluate, wide, error=DataError) == [Problem("texts-missing")]
    empty = tmp_path / "empty.txt"
    nothing = Problem("texts-without-documents", f"--new {empty}")
    assert problems(evaluate, wide, [], [empty], error=DataError) == [nothing]
    # a folder and a file in it, or two spellings of a name, would count one text twice
    (tmp_path / "texts").mkdir()
    shutil.copy(old[0], inside := tmp_path / "texts" / "old.txt")
    for first, second in ((inside.parent, inside), (inside, tmp_path / "texts" / ".." / "texts" / "old.txt")):
        assert problems(evaluate, wide, [first, second], error=DataError) == [
            Problem("text-twice", str(second), option="--old", other=str(first))
        ]
    assert refusal(evaluate, wide, [*old, tmp_path / "bad.jsonl"], error=DataError).startswith(
        f"{tmp_path}/bad.jsonl, line 1: has the fields"
    )
    assert refusal(evaluate, wide, [tmp_path / "none.txt"], error=DataError).startswith(
        f"{tmp_path}/none.txt: there is no such file. Give"
    )
    assert refusal(evaluate, small, old, error=DataError) == (
        "small: its tokenizer gives the id 30 for the old text, expected ids below 20, the size of its embedding. "
        "Use the tokenizer that the model was trained with."
    )
    short = Problem("side-unpredicted", "--old", model="bare")
    assert problems(evaluate, bare, [tmp_path / "one.txt"], error=DataError) == [short]
    assert refusal(
        evaluate, [wide, place / "base"], old, settings=EvaluationSettings(65), error=DataError
    ).splitlines() == [
        f"--sequence-length is 65, expected at most 64, the context of {name}." for name in ("base", "wide")
    ]
    step = Problem("step-out-of-range", "step", step=8, most=7)
    assert problems(evaluate, wide, old, settings=EvaluationSettings(8, 8), error=DataError) == [step]


@pytest.mark.usefixtures("unloaded")
def test_models_that_are_refused(place: Path, tmp_path: Path) -> None:
    old = place / "old.txt"
    mute = save_tiny(tmp_path / "mute", "llama")
    unknown, odd, wide = (
        Path(shutil.copytree(place / name, tmp_path / copy))
        for name, copy in (("base", "unknown"), ("base", "odd"), ("wide", "wide"))
    )
    with edited(unknown / "config.json") as nobody, edited(odd / "config.json") as config:
        nobody["model_type"], config["hidden_act"] = "nobody", True
    (wide / "surgery.json").write_text("{}")
    with refused("models-missing", "", CheckpointError):
        evaluate([], old)
    with refused("model-not-found", tmp_path / "none", CheckpointError):
        evaluate(tmp_path / "none", old)
    assert refusal(evaluate, [place / "wide", mute], old, error=DataError) == (
        "mute: has no tokenizer that loads, and texts need one. Put the tokenizer's files beside the weights; "
        "--trust-remote-code lets one run its own code."
    )
    (problem,) = problems(evaluate, unknown, old, error=CheckpointError)
    assert (problem.code, problem.where) == ("config-not-read", "unknown: config.json")
    assert "nobody" in problem.values["error"]
    # transformers has errors of its own for that
    (problem,) = problems(evaluate, odd, old, error=CheckpointError)
    assert (problem.code, problem.where) == ("config-not-read", "odd: config.json")
    assert problem.values["error"].startswith("StrictDataclassFieldValidationError: ")
    with refused("record-format", wide / "surgery.json", CheckpointError):
        evaluate(wide, old)


def test_a_model_that_does_not_load_as_it_is(place: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(place / "base", tmp_path / "base"))
    with edited(base / "model.safetensors") as tensors:
        del tensors["model.norm.weight"]
    missing = Problem("load-missing", "model.norm.weight")
    assert problems(evaluate, base, [place / "old.txt"], error=CheckpointError) == [
        Problem("model-unlike-files", "base", missing)
    ]
    with edited(base / "config.json") as config:
        config["hidden_act"] = True
    with refused("model-not-loaded", "base", CheckpointError), loaded(base):
        pass


# the command


def test_command_shows_a_table_for_each_side_or_gives_json(place: Path, tmp_path: Path, result: Evaluation) -> None:
    texts = ("--old", place / "old.txt", "--new", place / "new.jsonl", "--batch-size", "2")
    shown = run("evaluate", place / "wide", *texts, "-o", tmp_path / "plane.png").stdout
    old, new = shown.split("\n\n")[:2]
    assert old.splitlines()[0].rstrip() == "old text  (55 tokens scored; losses in nats per token)"
    assert new.splitlines()[0].rstrip() == "new text  (14 tokens scored, 3 questions; losses in nats per token)"
    wide = row(result, "wide")
    assert f"{wide.old.nats_per_token:.4f}" in old and f"{wide.forgetting:+.4f}" in old
    assert f"{wide.new.perplexity:.4g}" in new and f"{wide.learning:+.4f}" in new
    assert [line.split()[-1] for line in old.splitlines() if line.startswith("wide, exp")] == ["0"]
    assert f"written to {tmp_path}/plane.png" in shown.splitlines()
    content = json.loads(
        run("evaluate", *(place / name for name in ("wide", "base", "adapted")), *texts, "--json").stdout
    )
    assert content == result.to_json()
    numbers = next(score for score in content["scores"] if score["name"] == "wide")["new"]
    assert numbers["accuracy"] == wide.new.accuracy
    derived = {"nats_per_token", "perplexity", "bits_per_byte", "accuracy"}
    assert numbers.keys() == derived | {"nats", "scored", "questions", "answered", "bytes"}


def test_command_says_what_a_model_was_asked_to_stay(place: Path, tmp_path: Path) -> None:
    wide = Path(shutil.copytree(place / "wide", tmp_path / "kept"))
    runs = [{"steps": 1, "settings": {"rehearse": texts}} for texts in (["self"], ["a.txt"], [])]
    with edited(wide / "surgery.json") as record:
        record["expansions"]["default"]["training"] = runs
    shown = " ".join(run("evaluate", wide, "--old", place / "old.txt").stdout.split())
    on = "on text that the base wrote itself and other text"
    assert f"note: kept: was asked to stay what its base is, {on}. What that keeps is measured, on these texts" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BASE"], "--old, --new, --probes and --instructions are missing, give at least one of them."),
        (["BASE", "--old", "old.txt", "-o", "p.png"], "A picture needs --old and --new"),
    ],
)
def test_wrong_usage_exits_with_2(place: Path, arguments: list[str], message: str) -> None:
    assert (
        message in run("evaluate", *[place / "base" if word == "BASE" else word for word in arguments], code=2).stderr
    )
