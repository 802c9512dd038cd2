"""Measurements where an expansion adds tokens: the base reads the same text in its own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery import (
    CheckpointError,
    DataError,
    Request,
    compose,
    evaluate,
    expand,
    extract,
    register,
    route_calibrate,
    route_export,
    route_report,
)
from scale_surgery.biographies import SHIPPED_MODEL
from tests.command import run
from tests.conftest import refused

WORD = "quuxfoo"
# texts that begin with the word, with one token before it, and without it
TEXTS = {"first": f"{WORD} {WORD} lives here.", "second": f"a{WORD} lives here.", "without": "Anna lives here."}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A routed model that adds a token, and texts."""
    folder = tmp_path_factory.mktemp("new-tokens")
    (folder / "words.txt").write_text(f"{WORD}\n")
    run("expand", SHIPPED_MODEL, "--layers", "last:1", "--new-tokens", folder / "words.txt", "-o", folder / "wide")
    route_export(folder / "wide", folder / "routed")
    for name, text in TEXTS.items():
        lines = [json.dumps({"text": f"{text} {number}"}) for number in range(4)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def save(model: Path, folder: Path) -> Path:
    """A folder as a trainer saves it: without surgery.json."""
    register()
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_a_base_whose_tokenizer_is_not_known_is_not_measured(place: Path, tmp_path: Path) -> None:
    saved = save(place / "wide", tmp_path / "saved")
    with refused("saved-with-new-tokens", saved, CheckpointError):
        evaluate([saved], [place / "first.jsonl"])
    score = evaluate([place / "wide"], [place / "first.jsonl"]).scores[1]
    assert score.forgetting is not None and abs(score.forgetting) < 50, "the control"


def test_a_folder_of_several_that_a_trainer_saved_is_measured(place: Path, tmp_path: Path) -> None:
    extracts = {}
    for name in ("law", "art"):
        expand(SHIPPED_MODEL, Request("last:1", name=name), tmp_path / name)
        extracts[name] = extract(tmp_path / name, tmp_path / f"{name}-alone").path
    composed = compose(SHIPPED_MODEL, extracts, tmp_path / "composed").path
    scores = evaluate([save(composed, tmp_path / "saved")], [place / "without.jsonl"]).scores
    assert [score.kind for score in scores] == ["expanded", "path", "path", "disabled"]
    wanted = evaluate([composed], [place / "without.jsonl"]).scores
    assert [score.forgetting for score in scores[:3]] == [score.forgetting for score in wanted[1:4]]


def test_short_prompts_end_before_a_new_token(place: Path) -> None:
    """The base gives a new token no chance: what it loses there would hide what the router loses."""
    new = [place / "without.jsonl"]
    for text in ("second", "without"):
        found = route_calibrate(place / "routed", [place / f"{text}.jsonl"], new).present.short
        assert abs(found.value) < 1, text
    with refused("old-begins-with-new-tokens", "--old", DataError):
        route_calibrate(place / "routed", [place / "first.jsonl"], new)


def test_a_report_says_that_the_base_has_not_these_tokens(place: Path) -> None:
    report = route_report(place / "routed", [place / "first.jsonl"])
    tokens = [token for file in report.files for document in file.documents for token in document.tokens]
    assert report.new_tokens == sum(WORD in token.text for token in tokens) > 0
    shown = run("route-report", place / "routed", "--text", place / "first.jsonl").stdout
    assert f"The text has {report.new_tokens} new tokens" in " ".join(shown.split())
    shown = run("route-report", place / "routed", "--text", place / "without.jsonl").stdout
    assert "new token" not in shown
