"""rank-layers as a whole: the layer that learns comes first, nothing is written, and what cannot be done is said."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from scale_surgery import PilotSettings, Ranking, RankingRequest, Request, SurgeryError, plan, rank_layers
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.cli.program import main
from scale_surgery.errors import CheckpointError, DataError, PlanError
from scale_surgery.planning.request import complete
from scale_surgery.planning.selection import select_layers
from scale_surgery.show.figure_rank_layers import ranking_figure
from scale_surgery.show.tables_rank_layers import next_command
from scale_surgery.surgery.expand import expand
from scale_surgery.training.any_text import is_of_any_text
from scale_surgery.training.budget import find_ties, last_of_ties
from scale_surgery.training.pilot import run_pilot
from scale_surgery.training.pilot_settings import PilotBudget, budget_pilots
from scale_surgery.training.rank_layers import prepare_ranking, run_ranking
from scale_surgery.training.ranking import ENOUGH_STEPS, SCORES, LayerScore
from tests.conftest import digests, load
from tests.each import mostly
from tests.tiny import save_tiny

PILOT = PilotSettings(steps=3, batch_size=2, sequence_length=32, learning_rate=1e-3)
ADAPT = Request("all", variant="adapt")
LAYERS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny model that can read text."""
    return with_tokenizer(save_tiny(tmp_path_factory.mktemp("base") / "tiny", "llama", **SIZES))


SIZES = {"num_hidden_layers": LAYERS, "vocab_size": 1152}


def with_tokenizer(folder: Path) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[Path, Path]:
    """New text and old text."""
    folder = tmp_path_factory.mktemp("texts")
    for name, start in (("new", 400), ("old", 0)):
        lines = [json.dumps({"text": biography(person)}) for person in people(12, start=start)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / "new.jsonl", folder / "old.jsonl"


@pytest.fixture(scope="module")
def ranked(base, texts) -> Ranking:
    return rank_layers(base, texts[0], PILOT, RankingRequest(budget="50%"), old=texts[1])


@cache
def learning_only(base: Path, layer: int, folder: Path) -> Path:
    """A copy in which the MLP of one layer learns: the others read zeros, whatever their matrices are."""
    model = load(base)
    with torch.no_grad():
        for number, own in enumerate(model.model.layers):
            if number != layer:
                own.post_attention_layernorm.weight.zero_()
                # a bias of the down projection stays, and takes no part: it does not train
                own.mlp.gate_proj.bias.zero_()
                own.mlp.up_proj.bias.zero_()
    model.save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.mark.parametrize("layer", mostly([0, 2, 4], (2).__eq__))
def test_the_layer_that_alone_can_learn_comes_first(base, texts, tmp_path, layer):
    path = learning_only(base, layer, tmp_path / "one")
    found = rank_layers(path, texts[0], PILOT, RankingRequest(budget="40%"))
    assert found.order("relative-norm")[0] == found.order("effective-rank")[0] == layer
    for one in found.layers:
        assert (one.relative_norm > 0) == (one.layer == layer)
        assert (one.effective_rank > 0) == (one.layer == layer)
    assert layer in found.proposals[0].layers


@pytest.mark.slow
def test_in_the_model_as_it_is_every_layer_learns(ranked):
    """The negative control of the test above."""
    assert all(one.relative_norm > 0 and one.effective_rank > 1 for one in ranked.layers)


def test_a_layer_that_learns_more_comes_before_one_that_learns_less(base, texts, tmp_path):
    """Without a learning rate of its own no layer could; so the weights of one are made larger, its change is not."""
    model = load(base)
    with torch.no_grad():
        for number, own in enumerate(model.model.layers):
            for part in (own.mlp.gate_proj, own.mlp.up_proj, own.mlp.down_proj):
                part.weight.mul_(2.0 if number == 3 else 1.0)
    model.save_pretrained(tmp_path / "large")
    found = rank_layers(with_tokenizer(tmp_path / "large"), texts[0], PILOT)
    assert found.order("relative-norm")[-1] == 3
    assert found.order("effective-rank") != found.order("relative-norm")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_ranking(base, texts, ranked):
    again = rank_layers(base, texts[0], PILOT, RankingRequest(budget="50%"), old=texts[1])
    assert (again.layers, again.proposals, again.depth) == (ranked.layers, ranked.proposals, ranked.depth)
    other = rank_layers(base, texts[0], replace(PILOT, seed=1))
    assert other.layers != ranked.layers


def test_nothing_is_written(base, texts):
    before, texts_before = digests(base), digests(texts[0].parent)
    rank_layers(base, texts[0], PILOT, old=texts[1])
    assert (digests(base), digests(texts[0].parent)) == (before, texts_before)


def test_what_a_ranking_says(base, ranked):
    pilot = ranked.pilot
    assert (ranked.family, ranked.name, ranked.score) == ("llama", "tiny", "relative-norm")
    assert ranked.parameters == plan(base, ADAPT).costs.parameters_before
    assert pilot.trained_parameters == LAYERS * 3 * 40 * 52
    assert pilot.peak_memory_bytes > 50_000_000
    windows = -(-pilot.tokens // 32)
    assert pilot.passes == pytest.approx(3 * 2 / (windows / 2), rel=0.1)
    assert set(ranked.layers[0].matrices) == {"gate", "up_proj", "down"}
    assert {matrix.singular_values for matrix in ranked.layers[0].matrices.values()} == {40}


def test_proposals_are_the_best_layers_that_fit(base, ranked):
    for proposal in ranked.proposals:
        order = ranked.order(proposal.score)
        assert select_layers(proposal.argument, LAYERS) == proposal.layers
        cost = plan(base, replace(ADAPT, layers=proposal.argument)).costs.parameters_added
        assert cost == proposal.parameters_added <= ranked.budget
        for layer in set(order) - set(proposal.layers):
            more = ",".join(map(str, sorted([*proposal.layers, layer])))
            assert plan(base, replace(ADAPT, layers=more)).costs.parameters_added > ranked.budget
    assert ranked.proposals[0].layers != tuple(range(LAYERS))


@pytest.mark.slow
def test_a_large_budget_takes_all_layers(base, texts):
    found = rank_layers(base, texts[0], PILOT, RankingRequest(budget="1000%", score="effective-rank"))
    assert {proposal.argument for proposal in found.proposals} == {"0-4"}
    assert [proposal.score for proposal in found.proposals] == ["effective-rank", "relative-norm"]
    assert found.depth is None
    assert found.request.variant == "preserve"


@pytest.mark.slow
def test_grown_layers_cost_what_they_cost(base, texts):
    request = Request("1-3", method="grow")
    found = rank_layers(base, texts[0], PILOT, RankingRequest(request, budget="7k"))
    assert [one.layer for one in found.layers] == [1, 2, 3]
    (one, two) = (plan(base, replace(request, layers=text)).costs.parameters_added for text in ("1", "1,2"))
    assert one < 7000 < two, "the budget is that of one layer"
    assert [len(proposal.layers) for proposal in found.proposals] == [1, 1]


def test_collaborative_layers_lie_among_the_proposed_ones(ranked):
    assert set(ranked.depth.proposed) <= set(ranked.proposals[0].layers)
    assert select_layers(ranked.depth.argument, LAYERS) == ranked.depth.proposed
    assert ranked.depth.preserved_depth == min(ranked.depth.proposed)
    assert [one.layer for one in ranked.depth.layers] == list(range(LAYERS))


@pytest.mark.slow
def test_full_training_scores_attention_too(base, texts):
    found = rank_layers(base, texts[0], replace(PILOT, trains="full"))
    assert set(found.layers[0].matrices) == {"q", "k", "v", "o", "gate", "up_proj", "down"}
    assert found.pilot.trained_parameters == found.parameters


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"pilot": replace(PILOT, steps=5000)},
            DataError,
            "--data: {tokens} tokens found, at least 12,800 needed: 2 pilots take 5000 steps of 2 x 32 tokens each, "
            "and what is read more than 50 times is learned by heart. Give more text, or lower --steps (to {fitting}), "
            "--pilots, --batch-size or --sequence-length.",
        ),
        (
            {"pilot": replace(PILOT, sequence_length=65)},
            DataError,
            "--sequence-length is 65, expected at most 64, the context of tiny.",
        ),
        (
            {"pilot": replace(PILOT, steps=0, batch_size=-1, learning_rate=0, seed=2**32, trains="all")},
            PlanError,
            "--train is 'all', expected one of: mlp, full.\n"
            "--steps is 0, expected at least 1.\n"
            "--batch-size is -1, expected at least 1.\n"
            "--learning-rate is 0, expected more than 0 and at most 1.\n"
            "--seed is 4294967296, expected from 0 to 4294967295.",
        ),
        (
            {"pilot": replace(PILOT, learning_rate=3)},
            PlanError,
            "--learning-rate is 3, expected more than 0 and at most 1.",
        ),
        (
            {"wanted": RankingRequest(budget="lots")},
            PlanError,
            "--budget is 'lots', expected a number of parameters above zero: 30%, or 200M (also k and B).",
        ),
        (
            {"wanted": RankingRequest(budget="10")},
            PlanError,
            "--budget 10 is 10 parameters, expected at least {price}, what layer 1 alone costs with what is added "
            "outside the layers. Raise it; with --method scale, a smaller --ratio makes layers cheaper.",
        ),
        (
            {"wanted": RankingRequest(Request("all", method="wider"))},
            PlanError,
            "--method is 'wider', expected one of: scale, grow, depth.",
        ),
        (
            {"wanted": RankingRequest(score="size")},
            PlanError,
            "--score is 'size', expected one of: relative-norm, effective-rank.",
        ),
        (
            {"wanted": RankingRequest(replace(ADAPT, collaborative_layers="1"))},
            PlanError,
            "--collaborative-layers 1: is proposed by rank-layers. Leave it out.",
        ),
        (
            {"wanted": RankingRequest(Request("7"))},
            PlanError,
            "--layers 7: layer 7 is out of range, the model has layers 0 to 4.",
        ),
    ],
)
def test_what_cannot_be_done(base, texts, ranked, options, error, text):
    price = plan(base, Request("1")).costs.parameters_added
    with pytest.raises(error) as caught:
        rank_layers(base, texts[0], **{"pilot": PILOT, **options})
    tokens = ranked.pilot.tokens
    gaps = {"{tokens}": f"{tokens:,}", "{price}": f"{price:,}", "{fitting}": str(tokens * 50 // 128)}
    for gap, filled in gaps.items():
        text = text.replace(gap, filled)
    assert str(caught.value) == text


@pytest.mark.parametrize("request_", [Request("all", method="grow"), Request("all", variant="preserve")])
def test_old_text_where_w12_has_no_choice(base, texts, request_):
    variant = request_.variant or "grow-freeze"
    with pytest.raises(PlanError) as caught:
        rank_layers(base, texts[0], PILOT, RankingRequest(request_), old=texts[1])
    assert str(caught.value) == (
        f"--old with --variant {variant}: old text tells in which layers W12 is worth it, and that is a choice of "
        "--variant adapt alone (--method scale). Take that, or leave --old out."
    )


def test_no_data(base):
    with pytest.raises(DataError) as caught:
        rank_layers(base, [], PILOT)
    assert str(caught.value) == "There is no text for the pilot. Give files with --data."


def test_an_expanded_model(base, texts, tmp_path):
    expand(base, Request("1"), tmp_path / "wide")
    with pytest.raises(CheckpointError) as caught:
        rank_layers(tmp_path / "wide", texts[0], PILOT)
    assert str(caught.value) == (
        "wide: is an expanded model, expected a base model. Take its base out: scale-surgery strip wide -o BASE."
    )


def test_a_model_without_a_tokenizer(texts, tmp_path):
    with pytest.raises(DataError) as caught:
        rank_layers(save_tiny(tmp_path / "mute", "llama"), texts[0], PILOT)
    assert str(caught.value) == (
        "mute: has no tokenizer that loads, and texts need one. Put the tokenizer's files beside the weights; "
        "--trust-remote-code lets one run its own code."
    )


def test_a_tokenizer_of_another_model(texts, tmp_path):
    with pytest.raises(DataError) as caught:
        rank_layers(with_tokenizer(save_tiny(tmp_path / "small", "llama")), texts[0], PILOT)
    assert "expected ids below 97, the size of its embedding. Use the tokenizer" in str(caught.value)


def run(*arguments: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(main, ["rank-layers", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


SHORT = ("--steps", "3", "--batch-size", "2", "--sequence-length", "32", "--learning-rate", "1e-3")


def test_the_command_proposes_a_command_that_runs(base, texts, ranked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, picture = tmp_path / "ranking.json", tmp_path / "ranking.png"
    options = ("--data", texts[0], "--old", texts[1], "--budget", "50%", "-o", file, "-o", picture)
    output = run(base, *options, *SHORT)
    assert max(len(line) for line in output.splitlines()[:-4] if not line.startswith("next ")) <= 80
    assert f"--layers {ranked.proposals[0].argument}" in output
    (command,) = [line for line in " ".join(output.split()).split("next ") if line.startswith("scale-surgery expand")]
    command = command.partition(" written to")[0]
    assert command == (
        f"scale-surgery expand {base} --layers {ranked.proposals[0].argument} --variant adapt"
        + f" --collaborative-layers {ranked.depth.argument}" * (ranked.depth.proposed != ranked.proposals[0].layers)
    )
    done = CliRunner().invoke(main, [*command.split()[1:], "-o", str(tmp_path / "wide")])
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    assert written["proposals"][0]["layers"] == list(ranked.proposals[0].layers)
    assert written["order"]["relative-norm"] == list(ranked.order("relative-norm"))
    assert written["depth"]["preserved_depth"] == ranked.depth.preserved_depth
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_pilot_that_learned_nothing_is_warned_of(ranked):
    proposals = tuple(replace(proposal, tied=(), is_of_any_text=False) for proposal in ranked.proposals)
    enough = replace(ranked.pilot, budget=replace(ranked.pilot.budget, steps=50))
    apart = replace(ranked, proposals=proposals, pilot=enough)
    assert apart.warnings == () and apart.tie == ""
    worse = replace(apart, pilot=replace(enough, first_loss=1.0, last_loss=6.0))
    assert worse.warnings == (
        "the pilot learned nothing: its loss was 1.000 in the first steps and 6.000 in the last, so the order says "
        "little. Lower --learning-rate, or raise --steps.",
    )
    assert worse.to_json()["warnings"] == list(worse.warnings)
    cut = replace(apart, pilot=replace(ranked.pilot, budget=replace(ranked.pilot.budget, is_cut=True)))
    few = replace(apart, pilot=replace(enough, budget=replace(enough.budget, steps=49)))
    assert few.warnings == (
        "49 steps a pilot tell little of the text, at least 50 are usual: the first ones move every weight alike, "
        "whatever is learned. Give more text, more --tokens, or --steps 50.",
    )
    assert cut.warnings == (
        "--minutes 10 left 3 steps to each pilot: the order may say little. Raise it, or lower --sequence-length.",
    )


def scored(layer: int, *changes: float) -> LayerScore:
    """A layer whose changes were measured; the mean of all layers is 1."""
    score = sum(changes) / len(changes)
    return LayerScore(layer, score, score, 1.0, {}, dict.fromkeys(SCORES, changes))


def test_a_choice_that_a_measurement_turns_round_is_a_tie():
    first, second, third = scored(0, 1.5, 1.4), scored(1, 1.0, 1.1), scored(2, 0.9, 1.2)
    assert first.stands_above(second, "relative-norm") and not second.stands_above(first, "relative-norm")
    assert find_ties([first, second, third], [0], "relative-norm") == ()
    # 1 and 2 change places between the measurements
    assert find_ties([first, second, third], [0, 1], "relative-norm") == (1, 2)
    assert last_of_ties([0, 1, 2], [0, 1], (1, 2)) == (0, 2, 1)
    # less than a tenth apart, whatever the measurements say
    assert find_ties([scored(0, 1.04, 1.04), scored(1, 1.0, 1.0)], [0], "relative-norm") == (0, 1)
    assert find_ties([scored(0, 1.2, 1.2), scored(1, 1.0, 1.0)], [0], "relative-norm") == ()
    assert scored(0, 1.5, 1.0).noise("relative-norm") == pytest.approx(0.25)


def test_of_tied_layers_the_last_are_proposed_and_the_tie_is_said(base, texts):
    """All layers learn alike in three steps; the layer that alone can learn, above, is the negative control."""
    found = rank_layers(base, texts[0], replace(PILOT, learning_rate=1e-4), RankingRequest(budget="40%"))
    proposal = found.proposals[0]
    assert proposal.tied == tuple(range(LAYERS)) and proposal.layers == tuple(range(LAYERS))[-len(proposal.layers) :]
    assert found.tie == (
        f"tie: any {len(proposal.layers)} of the layers 0-4 are as good; the usual choice is the last layers"
    )
    few, tie = found.warnings
    assert few.startswith("3 steps a pilot tell little of the text")
    assert tie == f"{found.tie}. More --tokens, or a higher --learning-rate, may tell them apart."
    content = found.to_json()
    assert content["tie"] == found.tie and content["proposals"][0]["tied"] == list(range(LAYERS))
    assert content["layers"][0]["noise"]["relative-norm"] == found.layers[0].noise("relative-norm") > 0


@pytest.fixture(scope="module")
def unlike(base, tmp_path_factory) -> Path:
    """The same model with MLPs of other sizes."""
    model, folder = load(base), tmp_path_factory.mktemp("unlike") / "norms"
    with torch.no_grad():
        for own, size in zip(model.model.layers, (1.0, 3.0, 1.5, 2.5, 2.0), strict=True):
            for part in (own.mlp.gate_proj, own.mlp.up_proj, own.mlp.down_proj):
                part.weight.mul_(size)
    model.save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.mark.slow
def test_an_order_that_any_text_gives_says_nothing_of_this_one(unlike, texts, tmp_path):
    (tmp_path / "noise.txt").write_text(" ".join(random.Random(3).choices(["zq", "xx", "a", "qqq"], k=400)))
    for text in (texts[0], tmp_path / "noise.txt"):
        found = rank_layers(unlike, text, PILOT, RankingRequest(budget="40%"))
        proposal = found.proposals[0]
        assert found.order("relative-norm") == (0, 2, 4, 3, 1), "that of 1/|W|"
        assert find_ties(found.layers, (0, 2), "relative-norm") == (), "and pilots agree about it"
        assert proposal.is_of_any_text and proposal.tied == tuple(range(LAYERS))
        assert proposal.layers == tuple(range(LAYERS))[-len(proposal.layers) :]
        assert found.tie == (
            "tie: the order is that of 1/|W|, which any text gives, and says nothing of this text; the usual choice is "
            "the last layers"
        )
        assert any(warning.startswith(found.tie) for warning in found.warnings)
    content = found.to_json()
    assert content["proposals"][0]["is_of_any_text"] and not content["proposals"][1]["is_of_any_text"]
    output = " ".join(run(unlike, "--data", texts[0], "--budget", "40%", *SHORT).split())
    assert output.split("proposal budget")[1].count(found.tie) == 1
    whole = rank_layers(unlike, texts[0], PILOT, RankingRequest(budget="1000%"))
    assert whole.proposals[0].tied == () and whole.tie == found.tie, "said where there is nothing to choose, too"


def test_a_layer_that_learns_less_than_its_norm_says_is_told_of(unlike, texts, tmp_path):
    """The negative control: norms differ as much, and a layer that reads little learns little."""
    model = load(unlike)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight[4:] = 0.0
    model.save_pretrained(tmp_path / "deaf")
    found = rank_layers(with_tokenizer(tmp_path / "deaf"), texts[0], PILOT, RankingRequest(budget="40%"))
    proposal = found.proposals[0]
    assert found.layers[0].equal_steps == max(layer.equal_steps for layer in found.layers)
    assert not proposal.is_of_any_text and "any text" not in found.tie


def test_ranks_alone_or_sizes_alone_do_not_make_an_order_that_of_any_text():
    def layers(*pairs: tuple[float, float]) -> list[LayerScore]:
        return [LayerScore(number, one * own, 1.0, one, {}, {}) for number, (one, own) in enumerate(pairs)]

    norms = [1.0 + number / 12 for number in range(24)]
    assert is_of_any_text(layers(*((norm, 1.0) for norm in norms)))
    assert is_of_any_text(layers(*((norm, 1.03 - 0.06 * (row % 2)) for row, norm in enumerate(norms))))
    # one layer of 24 moved three times as far, and its rank changes by eleven alone
    assert not is_of_any_text(layers(*((norm, 3.0 if row == 12 else 1.0) for row, norm in enumerate(norms))))
    # one norm is far from all others, among which the text decides
    assert not is_of_any_text(layers((100.0, 1.0), (1.0, 1.3), (1.1, 1.1), (1.2, 0.9), (1.3, 0.8)))
    assert not is_of_any_text(layers((2.0, 0.0), (1.0, 1.0))) and not is_of_any_text(layers((1.0, 1.0)))


@pytest.mark.slow
def test_a_layer_that_learns_alone_is_no_tie(base, texts, tmp_path):
    path = learning_only(base, 1, tmp_path / "one")
    found = rank_layers(path, texts[0], PILOT, RankingRequest(budget="20%"))
    assert found.proposals[0].layers == (1,) and found.proposals[0].tied == () and found.tie == ""


def test_pilots_read_what_the_budget_says_and_no_more():
    usual = PilotSettings()
    small = budget_pilots(usual, sequences=40, length=512)
    assert (small.pilots, small.steps, small.passes) == (2, 40, 4.0) and small.tokens == 2 * 40 * 2 * 512
    large = budget_pilots(usual, sequences=100_000, length=1024)
    assert large.tokens == usual.tokens and large.steps == 50 == ENOUGH_STEPS and large.passes < 0.01
    assert budget_pilots(replace(usual, tokens=8192), 40, 512).tokens == 8192
    asked = budget_pilots(replace(usual, steps=200, batch_size=8), 40, 512)
    assert (asked.steps, asked.passes) == (200, 80.0), "steps that are asked for are taken"
    assert budget_pilots(usual, sequences=1, length=512).pilots == 1
    assert budget_pilots(usual, sequences=3, length=512).steps == 3


def test_what_takes_too_long_gets_fewer_steps():
    budget = PilotBudget(pilots=2, steps=100, tokens=4000, passes=2.0)
    whole = budget.within(10, step_seconds=0.5)
    assert whole == replace(budget, seconds=100.0) and not whole.is_cut
    cut = budget.within(1, step_seconds=3.0)
    assert (cut.steps, cut.tokens, cut.passes, cut.seconds, cut.is_cut) == (10, 400, 0.2, 60.0, True)
    assert budget.within(0.01, step_seconds=60).steps == 1


@pytest.mark.slow
def test_each_pilot_reads_its_own_share(base, texts, monkeypatch):
    seen = []

    def noted(model, checkpoint, text, settings, steps, *rest):
        seen.append((text, settings.seed, steps))
        return run_pilot(model, checkpoint, text, settings, steps, *rest)

    monkeypatch.setattr("scale_surgery.training.pilot.run_pilot", noted)
    told = []
    job = prepare_ranking(base, texts[0], replace(PILOT, pilots=3, seed=5))
    found = run_ranking(job, tell=lambda budget: told.append((budget, len(seen))))
    assert told == [(found.pilot.budget, 0)], "what is ahead is said before the first step"
    assert [(seed, steps) for _, seed, steps in seen] == [(5, 3), (6, 3), (7, 3)]
    rows = [text[row]["input_ids"].tolist() for text, _, _ in seen for row in range(len(text))]
    whole = job.texts["new"]
    assert sorted(rows) == sorted(whole[row]["input_ids"].tolist() for row in range(len(whole)))
    assert [len(layer.shares["relative-norm"]) for layer in found.layers] == [6] * LAYERS


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("all"), ""),
        (Request("all", method="grow"), " --method grow"),
        (
            Request("all", method="grow", variant="grow-train", copies=3),
            " --method grow --variant grow-train --copies 3",
        ),
        (replace(ADAPT, collaborate="both", ratio=0.25), " --variant adapt --collaborate both --ratio 0.25"),
        (Request("all", method="depth"), " --method depth"),
    ],
)
def test_the_proposed_command_repeats_what_was_asked_for(ranked, request_, words):
    again = replace(ranked, model="user/name", revision="v1", request=complete(request_), depth=None)
    layers = f"--revision v1 --layers {ranked.proposals[0].argument}"
    assert next_command(again) == f"scale-surgery expand user/name {layers}{words}"


@pytest.mark.slow
def test_details_name_every_matrix_within_80_columns(base, texts):
    output = run(base, "--data", texts[0], "--train", "full", "--details", *SHORT)
    assert max(len(line) for line in output.splitlines() if not line.startswith("next ")) <= 80
    for role in ("q", "k", "v", "o", "gate", "up_proj", "down"):
        assert output.split().count(role) >= 2, role
    assert "not asked for; --old FILES" in output


@pytest.mark.slow
def test_a_layer_that_is_passed_over_is_named(base, texts, tmp_path):
    """Layer 0 brings new columns of the embedding with it, and may be the best and not fit."""
    path = learning_only(base, 0, tmp_path / "one")
    output = run(path, "--data", texts[0], "--budget", "20%", *SHORT)
    (row,) = [line.split() for line in output.splitlines() if line.split()[:2] == ["1", "0"]]
    assert row[-2:] == ["over", "budget"]
    assert "over budget" not in run(path, "--data", texts[0], "--budget", "60%", *SHORT)


@pytest.mark.slow
def test_json(base, texts):
    found = json.loads(run(base, "--data", texts[0], "--json", "--method", "grow", *SHORT))
    assert found["request"]["method"] == "grow"
    assert found["depth"] is None
    assert len(found["layers"]) == LAYERS


def test_the_command_says_old_text_is_for_scale(base, texts):
    arguments = ["rank-layers", str(base), "--data", str(texts[0]), "--old", str(texts[1]), "--method", "grow", *SHORT]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "--old with --variant grow-freeze" in result.output


def test_the_figure_shows_every_score(ranked):
    figure = ranking_figure(ranked)
    assert [axes.get_ylabel().partition(",")[0] for axes in figure.axes] == [
        "|W' - W| / |W|",
        "effective rank",
        "worth of W12",
    ]
    layers = figure.axes[0].collections[-1].get_offsets()
    assert layers.tolist() == [[one.layer, one.relative_norm] for one in ranked.layers]
    bars = [bar.get_height() for bar in figure.axes[2].patches]
    assert bars == [one.worth for one in ranked.depth.layers]
    assert len(ranking_figure(replace(ranked, depth=None)).axes) == 2


def test_errors_are_known_to_the_command_line(base, texts):
    with pytest.raises(SurgeryError):
        rank_layers(base, texts[0], replace(PILOT, learning_rate=-1))
