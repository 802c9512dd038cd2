"""Methods are one place: a way to grow that this test makes up goes the whole way, and none is asked for by name."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import torch

import scale_surgery
from scale_surgery import PlanError, Request, expand, extract, inspect, plan, report, strip, verify
from scale_surgery.errors import Problem
from scale_surgery.hub.card import make_card
from scale_surgery.hub.method_cards import CARDS, ScaleCard
from scale_surgery.hub.repository import read_contents
from scale_surgery.planning.method import Resolved
from scale_surgery.planning.methods import METHODS
from scale_surgery.planning.request import VARIANTS
from scale_surgery.planning.scale import Scale
from scale_surgery.planning.selection import select_layers
from scale_surgery.planning.specs import Collaboration, Widths
from scale_surgery.show.method_rows import METHOD_ROWS
from scale_surgery.show.tables_plan import plan_rows
from tests.command import run
from tests.conftest import digests, edited, load, problems

PACKAGE = Path(scale_surgery.__file__).parent
IDS = torch.tensor([[1, 5, 6, 7, 8]])


class Toy(Scale):
    """Eight inner features in each chosen layer, and nothing else."""

    name = "toy"
    variants = ("toy-train",)
    options = ()
    verb = "toyed with"

    def resolve(self, base, request):
        layers = select_layers(request.layers, base.sizes.layers)
        return Resolved(layers, Widths(up_inner_width=8), Collaboration(layers, ("ffn",)))


class ToyCard(ScaleCard):
    """Its part of a model card."""

    source = "It is made up."


def test_a_method_of_its_own_goes_the_whole_way(base_of, tmp_path, monkeypatch):
    """A fourth row of each table."""
    monkeypatch.setitem(METHODS, "toy", Toy())
    monkeypatch.setitem(VARIANTS, "toy", Toy.variants)
    monkeypatch.setitem(CARDS, "toy", ToyCard())
    monkeypatch.setitem(METHOD_ROWS, "toy", lambda plan: [("toys", "eight features in each")])
    base = base_of("llama")
    request = Request("0,2", method="toy")
    made = plan(base, request)
    assert made.request == replace(request, variant="toy-train")
    assert {tensor.layer for tensor in made.tensors} == {0, 2}
    assert made.widths == Widths(0, 0, 8)
    assert ("toys", "eight features in each") in plan_rows(made)
    done = expand(base, made, tmp_path / "toy")
    assert done.plan == made
    verification = verify(done.path, base)
    assert verification.passed
    assert "output_at_init" in verification.required
    assert torch.equal(load(done.path)(IDS).logits, load(base)(IDS).logits)
    assert [expansion.method for expansion in inspect(done.path).expanded.expansions.values()] == ["toy"]
    assert report(done.path, files_only=True).method == "toy"
    assert "It is made up." in make_card(read_contents(done.path), "me/toy", None, None, None).text
    assert extract(done.path, tmp_path / "extract").tensors == len(made.tensors)
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    # the command line knows it, and its promise can be broken
    run("verify", done.path)
    with edited(done.path / done.plan.shards[0]) as tensors:
        tensors |= {name: tensor + ("w12" in name) for name, tensor in tensors.items()}
    verification = verify(done.path, required=("output_at_init",))
    (promise,) = [promise for promise in verification.promises if promise.name == "output_at_init"]
    assert not verification.passed and "tensors of W12 and the head's up part left zero" in promise.evidence


def test_an_unknown_method_and_options_of_other_methods_are_refused(base_of, monkeypatch):
    unknown = Problem("value-unfit", "--method", value="'toy'", kind="one of: scale, grow, depth")
    assert problems(plan, base_of("llama"), Request("1", method="toy"), error=PlanError) == [unknown]
    monkeypatch.setitem(METHODS, "toy", Toy())
    monkeypatch.setitem(VARIANTS, "toy", Toy.variants)
    foreign = Problem("option-of-other-method", "--copies", value=3, owner="grow")
    assert problems(plan, base_of("llama"), Request("1", method="toy", copies=3), error=PlanError) == [foreign]


def test_every_method_has_its_variants_its_card_and_its_rows():
    assert list(METHODS) == list(VARIANTS) == list(CARDS) == list(METHOD_ROWS)
    assert all(method.variants == VARIANTS[name] for name, method in METHODS.items())


def asked_by_name(folder: Path) -> list[str]:
    """Comparisons with the name of a method outside its own module."""
    comparisons = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {side.value for side in sides if isinstance(side, ast.Constant)} & {*METHODS, "grow-freeze"}
            if names and file.name not in {f"{name}.py" for name in METHODS}:
                comparisons.append(f"{file.relative_to(folder)}: {ast.unparse(node)}")
    return comparisons


def test_nothing_asks_for_a_method_by_name(tmp_path):
    assert asked_by_name(PACKAGE) == []
    (tmp_path / "one.py").write_text('is_grown = plan.method == "grow"\n')
    assert asked_by_name(tmp_path) == ["one.py: plan.method == 'grow'"]
