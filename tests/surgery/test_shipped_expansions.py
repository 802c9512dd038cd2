"""A composed folder of a model with a tokenizer: what evaluate, inspect, report and the model card say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scale_surgery import (
    Request,
    compose,
    evaluate,
    expand,
    extract,
    inspect,
    report,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.surgery.route import set_routing
from tests.command import run
from tests.composed import mixed
from tests.conftest import shake

REQUESTS = {"medicine": Request("last:1"), "law": Request("last:1", variant="adapt", collaborate="both")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, both models alone, their extracts, and a composed folder."""
    folder = tmp_path_factory.mktemp("shipped")
    for side, group in (("known", people(2)), ("asked", people(2, start=400))):
        rows = [
            {"question": question.prompt, "answer": question.answer}
            for person in group
            for question in questions(person)
        ]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, (name, request) in enumerate(REQUESTS.items()):
        shake(expand(SHIPPED_MODEL, request, folder / name).path, seed)
        extract(folder / name, folder / f"{name}.extract")
    extracts = {name: folder / f"{name}.extract" for name in REQUESTS}
    compose(SHIPPED_MODEL, extracts, folder / "composed", routing=mixed(switch_rate=0))
    return folder


def test_evaluate_has_a_row_for_each_path(place: Path) -> None:
    """The mixture, each expansion alone as the model that it is, and the base; one base for all."""
    evaluation = evaluate([place / "composed", place / "law"], place / "known.jsonl", place / "asked.jsonl")
    rows = {score.name: score for score in evaluation.scores}
    assert [(name, score.kind) for name, score in rows.items()] == [
        ("biographies (base)", "base"),
        ("composed", "expanded"),
        ("composed, medicine alone", "path"),
        ("composed, law alone", "path"),
        ("composed, expansion disabled", "disabled"),
        ("law", "expanded"),
        ("law, expansion disabled", "disabled"),
    ]
    law, alone = rows["law"], rows["composed, law alone"]
    assert (law.old, law.new, law.forgetting) == (alone.old, alone.new, alone.forgetting)
    assert rows["composed, expansion disabled"].forgetting == 0
    assert law.old != rows["composed, medicine alone"].old != rows["composed"].old, "the control"
    # the mixture is as good as its best path, but for what finding that costs
    lost = [score.forgetting for score in rows.values() if score.kind in ("expanded", "path")]
    assert alone.forgetting is not None and rows["composed"].forgetting is not None
    assert rows["composed"].forgetting < alone.forgetting and None not in lost
    assert not evaluation.notes


@pytest.mark.slow
def test_inspect_says_what_lies_in_it_and_report_shows_one(place: Path, tmp_path: Path) -> None:
    folder = place / "composed"
    inspection, base = inspect(folder), inspect(SHIPPED_MODEL)
    assert (inspection.family, inspection.sizes, inspection.dtype) == (base.family, base.sizes, base.dtype)
    held = inspection.expanded
    assert held is not None and held.base_name == "biographies"
    assert held.routing == mixed(switch_rate=0).for_expansions(len(held.expansions))
    added = [(name, expansion.variant, expansion.layers) for name, expansion in held.expansions.items()]
    assert added == [("medicine", "preserve", (3,)), ("law", "adapt", (3,))]
    assert all(set(expansion.parameters_by_block) >= {"w21", "w22"} for expansion in held.expansions.values())
    assert "w12" in held.expansions["law"].parameters_by_block
    assert "w12" not in held.expansions["medicine"].parameters_by_block
    parameters = sum(expansion.parameters for expansion in held.expansions.values())
    assert inspection.parameters_stored == base.parameters_stored + parameters
    shown = run("inspect", folder)
    assert "law        adapt     3" in shown.output and "last verified  never" in shown.output
    assert "paths          3: the base, medicine, law" in shown.output
    assert shown.output.splitlines()[-1].strip() == f"next           scale-surgery verify {folder}"
    assert verify(folder).passed
    verified = inspect(folder).expanded
    assert verified is not None and verified.is_current and verified.verified is not None
    page = tmp_path / "page.html"
    shown = run("report", folder, "--name", "law", "-o", page)
    assert "adapt" in shown.output and "Every tensor" in page.read_text()
    assert report(folder, name="law", files_only=True).parameters == held.expansions["law"].parameters
    set_routing(folder, mixed(switch_rate=0.01))
    changed = inspect(folder).expanded
    assert changed is not None and changed.changed_since == "the router's numbers changed since"
    refused = run("report", folder, code=1)
    assert "medicine" in refused.output and "--name" in refused.output
