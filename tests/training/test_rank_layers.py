"""rank-layers as a whole: the layer that learns comes first, nothing is written, and what cannot be done is said."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from scale_surgery import Ranking, RankingSettings, Request, plan, rank_layers
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.learning.recipe import AUTO, Recipe
from scale_surgery.learning.stages import Work, stages_of
from scale_surgery.planning.methods import complete
from scale_surgery.planning.selection import select_layers
from scale_surgery.show.figure_ranking import ranking_figure
from scale_surgery.show.tables_rank_layers import next_command
from scale_surgery.surgery.expand import expand
from scale_surgery.training.rank_layers import check_budget, propose_layers, read_budget
from tests.command import run
from tests.conftest import digests, load, problems
from tests.each import mostly
from tests.tiny import save_tiny

PILOT = RankingSettings(budget="15%", steps=3, sequence_length=32, learning_rate=1e-3)
LAYERS = 5
SIZES = {"num_hidden_layers": LAYERS, "vocab_size": 1152}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny model that can read text."""
    return with_tokenizer(save_tiny(tmp_path_factory.mktemp("base") / "tiny", "llama", **SIZES))


def with_tokenizer(folder: Path) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Text to learn."""
    file = tmp_path_factory.mktemp("texts") / "new.jsonl"
    file.write_text("\n".join(json.dumps({"text": biography(person)}) for person in people(6, start=400)))
    return file


@pytest.fixture(scope="module")
def ranked(base, text) -> Ranking:
    return rank_layers(base, text, settings=PILOT)


def order(ranking: Ranking) -> list[int]:
    return [layer.layer for layer in ranking.layers]


@cache
def learning_only(base: Path, layer: int, folder: Path) -> Path:
    """A copy in which the MLP of one layer learns: the others read zeros, whatever their matrices are."""
    model = load(base)
    with torch.no_grad():
        for number, module in enumerate(model.model.layers):
            if number != layer:
                module.post_attention_layernorm.weight.zero_()
                # a bias of the down projection stays, and takes no part: it does not train
                module.mlp.gate_proj.bias.zero_()
                module.mlp.up_proj.bias.zero_()
    model.save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.mark.parametrize("layer", mostly([0, 2, 4], (2).__eq__))
def test_the_layer_that_alone_can_learn_comes_first(base, text, tmp_path, ranked, layer):
    path = learning_only(base, layer, tmp_path / "one")
    ranking = rank_layers(path, text, settings=replace(PILOT, budget="40%"))
    assert order(ranking)[0] == layer and layer in ranking.proposed and layer not in ranking.tied
    assert {entry.layer for entry in ranking.layers if entry.change > 0} == {layer}
    assert all(entry.change > 0 for entry in ranked.layers), "the control: in the model as it is every layer learns"


def test_the_same_seed_gives_the_same_ranking_and_nothing_is_written(base, text, ranked):
    before = digests(base), digests(text.parent)
    assert rank_layers(base, text, settings=PILOT) == ranked
    assert (digests(base), digests(text.parent)) == before
    assert rank_layers(base, text, settings=replace(PILOT, seed=1)).layers != ranked.layers


def test_what_a_ranking_says(base, ranked):
    assert (ranked.family, ranked.name, ranked.request) == ("llama", "tiny", complete(Request("all")))
    assert ranked.parameters == plan(base, Request("all")).costs.parameters_before
    assert ranked.trained_parameters == LAYERS * 3 * 40 * 52
    assert ranked.passes == pytest.approx(3 * 2 * 32 / ranked.tokens, rel=0.1)
    assert [entry.change for entry in ranked.layers] == sorted((entry.change for entry in ranked.layers), reverse=True)
    cost = plan(base, Request(ranked.argument)).costs.parameters_added
    assert cost == ranked.parameters_added <= ranked.budget
    assert select_layers(ranked.argument, LAYERS) == ranked.proposed != tuple(range(LAYERS))


def test_steps_read_a_text_four_times_and_no_more_than_a_hundred_of_them(base, text):
    some = rank_layers(base, text, settings=replace(PILOT, steps=None, batch_size=64))
    assert (some.steps, some.passes) == (4, 4.0)
    many = rank_layers(base, text, settings=replace(PILOT, steps=None, batch_size=1, sequence_length=8))
    assert many.steps == 100 and many.passes < 4 and not many.warnings


def test_grown_layers_cost_what_they_cost(base, text):
    request = Request("1-3", method="grow")
    ranking = rank_layers(base, text, request, replace(PILOT, budget="7k"))
    assert sorted(order(ranking)) == [1, 2, 3]
    (cost_of_one, cost_of_two) = (
        plan(base, replace(request, layers=text)).costs.parameters_added for text in ("1", "1,2")
    )
    assert cost_of_one < 7000 < cost_of_two and len(ranking.proposed) == 1, "the budget is that of one layer"


@pytest.mark.parametrize(
    ("request_", "settings", "error", "options"),
    [
        ({}, {"sequence_length": 65}, DataError, ["--sequence-length"]),
        (
            {"collaborative_layers": "1", "variant": "adapt"},
            {"steps": 0, "batch_size": -1, "learning_rate": 3, "seed": 2**32},
            PlanError,
            ["--steps", "--batch-size", "--learning-rate", "--seed", "--collaborative-layers"],
        ),
        ({}, {"budget": "10"}, PlanError, ["--budget"]),
        ({"method": "wider"}, {}, PlanError, ["--method"]),
        ({"layers": "7"}, {}, PlanError, ["--layers"]),
    ],
)
def test_what_cannot_be_done(base, text, request_, settings, error, options):
    request, pilot = Request(**{"layers": "all"} | request_), replace(PILOT, **settings)
    found = problems(rank_layers, base, text, request, pilot, error=error)
    assert [problem.phrase.partition(" ")[0] for problem in found] == options


def test_a_budget_below_the_cheapest_layer_is_refused_with_its_cost(base, text):
    cost = plan(base, Request("1")).costs.parameters_added
    assert problems(rank_layers, base, text, Request("all"), replace(PILOT, steps=1, budget="10"), error=PlanError) == [
        Problem("budget-too-small", "--budget", text="10", parameters=10, layer=1, cost=cost)
    ]


def test_what_cannot_be_ranked(base, text, tmp_path):
    expand(base, Request("1"), tmp_path / "wide")
    small = with_tokenizer(save_tiny(tmp_path / "small", "llama"))
    for path, texts, place in (
        (base, [], "data: "),
        (tmp_path / "wide", text, f"{tmp_path / 'wide'}: is an expanded model"),
        (save_tiny(tmp_path / "mute", "llama"), text, "mute: "),
        (small, text, "small: "),
    ):
        (found,) = problems(rank_layers, path, texts)
        assert found.phrase.startswith(place)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        *(("30%", 300), ("12.5 %", 125), ("150%", 1500), ("200", 200)),
        *(("2k", 2000), ("1.5M", 1_500_000), ("2B", 2 * 10**9), ("1_000", 1000)),
    ],
)
def test_budgets(text, parameters):
    assert read_budget(text, 1000) == parameters


@pytest.mark.parametrize("text", ["", "many", "-5%", "0", "0%", "30 percent", "1e6", "%", "nan", "inf", "3T"])
def test_a_budget_that_cannot_be_read(text):
    assert problems(read_budget, text, 1000, error=PlanError) == [Problem("budget-unreadable", "--budget", budget=text)]


def price(layers: list[int]) -> int:
    """Ten for a layer, five for what stands outside the layers, and a hundred more for the embedding."""
    return 10 * len(layers) + 5 + 100 * (0 in layers)


def test_the_most_changed_layers_that_a_budget_pays_for():
    changes = {3: 4.0, 1: 3.0, 2: 2.0, 0: 1.0}
    assert propose_layers(25, changes, price) == ((1, 3), ())
    assert propose_layers(34, changes, price) == ((1, 3), ()), "what stands outside the layers counts too"
    assert propose_layers(35, changes, price) == ((1, 2, 3), ())
    assert propose_layers(1000, changes, price) == ((0, 1, 2, 3), ())
    assert propose_layers(25, changes | {0: 9.0}, price) == ((1, 3), ()), "a layer that does not fit is passed over"
    check_budget(15, [0, 1, 2], price, "15")
    with pytest.raises(PlanError):
        check_budget(14, [0, 1, 2], price, "14")


def test_of_tied_layers_the_last_are_proposed():
    changes = {1: 4.0, 2: 2.1, 3: 2.0, 4: 1.95, 5: 1.0}
    assert propose_layers(25, changes, price) == ((1, 4), (2, 3, 4)), "one of three, beside the one that stands out"
    assert propose_layers(35, changes, price) == ((1, 3, 4), (2, 3, 4))
    assert propose_layers(45, changes, price) == ((1, 2, 3, 4), ()), "all of them fit"
    assert propose_layers(15, changes, price) == ((1,), ()), "the control: nothing is within a tenth of the first"
    assert propose_layers(15, {1: 1.2, 2: 1.0}, price) == ((1,), ()), "more than a tenth apart"
    assert propose_layers(15, {1: 1.09, 2: 1.0}, price) == ((2,), (1, 2))
    assert propose_layers(15, {1: 1.0, 2: 1.0}, price) == ((2,), (1, 2))
    assert propose_layers(15, {1: 0.0, 2: 0.0}, price) == ((2,), (1, 2)), "nothing was learned"
    assert propose_layers(25, {0: 2.0, 1: 1.9, 2: 1.0}, price) == ((1, 2), ()), "neither is one that is passed over"


def test_what_speaks_against_the_order_is_said(ranked):
    apart = replace(ranked, tied=(), steps=50, first_loss=6.0, last_loss=1.0)
    assert apart.warnings == () and apart.tie == ""
    worse = replace(apart, first_loss=1.0, last_loss=6.0)
    assert worse.warnings == (
        "the pilot learned nothing: its loss was 1.000 in the first steps and 6.000 in the last, so the order says "
        "little. Lower --learning-rate, or raise --steps.",
    )
    assert replace(apart, steps=49).warnings == (
        "49 steps tell little of the text, at least 50 are usual: the first ones move every weight alike, whatever is "
        "learned. Give more text, or --steps 50.",
    )
    tied = replace(apart, tied=(1, 2, 3), proposed=(2, 3, 4))
    assert tied.tie == (
        "layers 1-3 changed alike, within a tenth, and the budget pays for 2 of them. The last are proposed."
    )
    content = replace(tied, last_loss=float("nan")).to_json()
    assert content["tie"] == tied.tie and content["tied"] == [1, 2, 3] and len(content["warnings"]) == 1
    assert content["last_loss"] == "NaN"


SHORT = ("--steps", "3", "--sequence-length", "32", "--learning-rate", "1e-3")


def test_the_command_proposes_a_command_that_runs(base, text, ranked, tmp_path):
    file, picture = tmp_path / "ranking.json", tmp_path / "ranking.png"
    output = run("rank-layers", base, "--data", text, "--budget", "15%", "-o", file, "-o", picture, *SHORT).output
    assert "warning: 3 steps tell little of the text" in output
    (line,) = [line for line in output.splitlines() if line.startswith("next ")]
    command = line.removeprefix("next ").strip()
    assert command == f"scale-surgery expand {base} --layers {ranked.argument}"
    run(*command.split()[1:], "-o", tmp_path / "wide")
    assert json.loads(file.read_text()) == ranked.to_json()
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = run("rank-layers", base, "--data", text, "--budget", "15%", "--json", *SHORT)
    assert json.loads(shown.output) == ranked.to_json()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("all"), ""),
        (
            Request("all", method="grow", variant="grow-train", copies=3),
            " --method grow --variant grow-train --copies 3",
        ),
        (
            Request("all", variant="adapt", collaborate="both", ratio=0.25),
            " --variant adapt --collaborate both --ratio 0.25",
        ),
    ],
)
def test_the_proposed_command_repeats_what_was_asked_for(ranked, request_, words):
    ranking = replace(ranked, model="user/name", revision="v1", request=complete(request_))
    assert next_command(ranking) == f"scale-surgery expand user/name --revision v1 --layers {ranked.argument}{words}"


def test_a_layer_that_is_passed_over_is_named(base, text, tmp_path):
    """Layer 0 brings new columns of the embedding with it, and may be the best and not fit."""
    path = learning_only(base, 0, tmp_path / "one")
    output = run("rank-layers", path, "--data", text, "--budget", "10%", *SHORT).output
    (row,) = [line.split() for line in output.splitlines() if line.split()[:2] == ["1", "0"]]
    assert row[-2:] == ["over", "budget"]
    assert "over budget" not in run("rank-layers", path, "--data", text, "--budget", "60%", *SHORT).output


def test_the_figure_shows_every_layer_and_which_are_proposed(ranked):
    (axes,) = ranking_figure(ranked).axes
    proposed, others = ({tuple(point) for point in drawn.get_offsets().tolist()} for drawn in axes.collections)
    changes = {(entry.layer, entry.change) for entry in ranked.layers}
    assert proposed == {point for point in changes if point[0] in ranked.proposed} and others == changes - proposed


def test_the_line_that_learn_shows_ranks_for_the_same_expansion(base, text, tmp_path):
    wide = Request("all", variant="adapt", up_width=20, up_kv_heads=1, up_inner_width=8, dtype="float16")
    asked = replace(wide, init_w21="random", svd="exact", init_embedding="zero", new_tokens_init="zero", seed=9)
    pilot = replace(PILOT, budget="50%", seed=5)
    recipe = Recipe(str(base), (str(text),), expansion=replace(asked, layers=AUTO), ranking=pilot)
    work = Work(recipe, tmp_path, routes=True, has_pilot=True)
    (stage,) = [stage for stage in stages_of(work) if stage.name == "layers"]
    words = shlex.split(stage.call({}).line.replace(str(tmp_path / "texts-new" / "learn.jsonl"), str(text)))
    result = json.loads(run(*words[1:], "--json").stdout)
    ranked = Request(**{name: value for name, value in result["request"].items() if name != "new_tokens"})
    # the seed of the new tensors, and how rows of new tokens start, are said where these are made
    assert ranked == complete(replace(asked, seed=0, new_tokens_init="pieces")) and result["settings"]["seed"] == 5


def test_set_leaves_the_seed_to_the_pilot(base, text):
    shown = run("rank-layers", base, "--data", text, "--set", "seed=3", code=2).output
    assert "--set seed: there is no such setting, expected one of: init_w21" in " ".join(shown.split())
