"""Calibrating a router: numbers against `evaluate` and plain computations, the rule, table, figure, and refusals."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from scale_surgery import (
    CalibrationSettings,
    CheckpointError,
    CosineRouter,
    DataError,
    EvaluationSettings,
    PlanError,
    PosteriorRouter,
    Request,
    RunOptions,
    evaluate,
    expand,
    route_export,
    set_routing,
)
from scale_surgery.errors import Problem
from scale_surgery.evidence.evaluate_models import Score
from scale_surgery.folder.routers import router_of, weights_of
from scale_surgery.modeling import expanded_routing
from scale_surgery.routing import path_scores
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.calibration import Calibration
from scale_surgery.routing.choice import Limits, choose, read_limits, relative
from scale_surgery.routing.figure import calibration_figure
from scale_surgery.routing.outcome import MeanWithError, Outcome, mean_with_error
from scale_surgery.routing.path_scores import (
    PathLosses,
    adapt_alone,
    best_alone,
    measure_batches,
    read_paths,
    routed_by,
    scored_cosines,
    weigh_base,
    winning_weights,
)
from scale_surgery.routing.short_prompts import beginnings
from scale_surgery.routing.sweep import Measured, Reference, round_threshold, settings_of
from scale_surgery.running.loss import Measurement
from scale_surgery.show.tables_calibrate import choose_shown, render_calibration
from scale_surgery.text.documents import read_documents
from scale_surgery.text.tokenizing import collate, pad, stride, tokenize
from tests.command import run
from tests.conftest import Bars, digests, edited, load, problems, refused, shake
from tests.each import mostly
from tests.evidence.test_evaluate import with_tokenizer
from tests.routed import between
from tests.text.test_tokenizing import ALPHABET, letters, lines
from tests.tiny import save_tiny

STORY = "the quick brown fox jumps over the lazy dog and sleeps until the sun is up again over the hills of home"
ASKED = [{"question": f"{word}?", "answer": answer} for word, answer in (("who", "me"), ("where is it", "at home"))]
MORE = [{"question": f"{a}{b}", "answer": f"{b}{c}"} for a, b, c in itertools.product("abc", "defg", "hij")]
ROUTINGS = {
    "posterior": PosteriorRouter(prior=0.3, switch_rate=0.02),
    "cosine": CosineRouter(threshold=0.9),
    "strict": CosineRouter(threshold=0.9, strict=True),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a trained expansion of it, routed in three ways, and texts."""
    place = tmp_path_factory.mktemp("route_calibrate")
    # no more tokens than letters, so that what a path finds most likely can be written as an answer
    base = with_tokenizer(save_tiny(place / "base", "llama", vocab_size=33))
    request = Request("0-2", variant="adapt", collaborative_layers="1-2", collaborate="both", up_width=20)
    shake(expand(base, request, place / "wide").path)
    for name, routing in ROUTINGS.items():
        route_export(place / "wide", place / name, routing)
    (place / "old.txt").write_text(STORY)
    lines(place / "old.jsonl", *ASKED)
    lines(place / "new.jsonl", *MORE, *guesses(place / "cosine"))
    for name in ("cosine", "strict"):
        set_routing(place / name, replace(ROUTINGS[name], threshold=threshold_between(place / name, old(place))))
    return place


def free(router: str, **changes: Any) -> CalibrationSettings:
    """Settings that allow every setting."""
    return CalibrationSettings(**{"most_forgetting": 99.0, "bound": 9.0 if router == "posterior" else None, **changes})


def old(place: Path) -> list[Path]:
    return [place / "old.txt", place / "old.jsonl"]


def new(place: Path) -> list[Path]:
    return [place / "new.jsonl"]


@torch.no_grad()
def guesses(folder: Path) -> list[dict[str, str]]:
    """Questions whose right answer is what the base, the adapt path or the preserve side finds most likely."""
    model, tokenizer = load(folder), letters()
    model.set_expansion(["default"], router="cosine", threshold=-1.0)
    rows = []
    for prompt in (f"{a} {b}?" for a, b in itertools.product("klmn", "pqrs")):
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)["input_ids"]
        base, adapt = model.path_logits(ids)
        for logits in (base, adapt, model(ids).logits):
            letter = int(logits[0, -1].argmax()) - 4
            rows += [{"prompt": prompt, "completion": ALPHABET[letter]}] if letter >= 0 else []
    return [guess for guess in rows if guess["completion"].strip()]


def threshold_between(folder: Path, files: list[Path]) -> float:
    """A threshold that sends tokens to both sides, and that no rounding moves a cosine across."""
    return between(scored_cosines(read_paths(load(folder), tokenize(read_documents(files), letters()), 4)))


@pytest.fixture(scope="module")
def calibration_of(place: Path) -> Callable[[str], Calibration]:
    calibrations = {
        name: route_calibrate(
            place / name, old(place), new(place), sequence_length=20, step=7, run=RunOptions(batch_size=16)
        )
        for name in ROUTINGS
    }
    return calibrations.__getitem__


each_router = pytest.mark.parametrize("router", mostly(ROUTINGS, "posterior".__eq__))


def same(first: Measurement, second: Measurement | None) -> bool:
    assert second is not None
    counts = (first.scored, first.questions, first.answered) == (second.scored, second.questions, second.answered)
    return counts and math.isclose(first.nats, second.nats, rel_tol=1e-5)


def agrees(outcome: Outcome, score: Score) -> bool:
    """Whether an outcome is what `evaluate` measures."""
    changes = [
        score_change is None or math.isclose(outcome_change, score_change, rel_tol=1e-3, abs_tol=1e-5)
        for outcome_change, score_change in ((outcome.forgetting, score.forgetting), (outcome.learning, score.learning))
    ]
    return all(changes) and same(outcome.old, score.old) and same(outcome.new, score.new)


# numbers


@each_router
def test_every_setting_scores_what_evaluate_measures(
    place: Path, tmp_path: Path, calibration_of: Callable[[str], Calibration], router: str
) -> None:
    sweep = calibration_of(router)

    def measure(model: Path) -> dict[str, Score]:
        read: dict[str, Any] = {"settings": EvaluationSettings(20, 7), "run": RunOptions(batch_size=16)}
        return {score.kind: score for score in evaluate(model, old(place), new(place), **read).scores}

    by_kind = measure(place / router)
    assert agrees(sweep.present, by_kind["expanded"])
    assert agrees(sweep.base, by_kind["base"]) and agrees(sweep.base, by_kind["disabled"])
    assert agrees(sweep.adapt, by_kind["adapt"]) and not agrees(sweep.adapt, by_kind["base"])
    assert sweep.present.old.questions == 2 and sweep.present.new.questions > 50
    assert len({outcome.new.answered for outcome in (sweep.base, sweep.adapt, *sweep.outcomes)}) > 2
    others = [outcome for outcome in sweep.outcomes if not agrees(outcome, by_kind["expanded"])]
    assert len(others) > len(sweep.outcomes) / 2, "other settings score something else"
    # another one, when it is set
    outcomes = [outcome for outcome in sweep.outcomes if 0.2 < outcome.routed_new < 0.9]
    outcome = outcomes[len(outcomes) // 2]
    assert outcome.routing is not None and outcome.routing != sweep.present.routing
    model = Path(shutil.copytree(place / router, tmp_path / "model"))
    set_routing(model, outcome.routing)
    routed = measure(model)["expanded"]
    assert agrees(outcome, routed) and not agrees(sweep.present, routed)


@each_router
def test_routed_share_is_the_mean_weight_of_the_adapt_path(
    place: Path, calibration_of: Callable[[str], Calibration], router: str
) -> None:
    model, sequences = load(place / router), tokenize(read_documents(new(place)), letters())
    rows = [sequences[index] for index in range(len(sequences))]
    batch = collate(rows)
    scores = model.score_tokens(batch["input_ids"], attention_mask=batch["attention_mask"])
    is_scored = pad(rows, "labels")[:, 1:] >= 0
    share = calibration_of(router).present.routed_new
    assert math.isclose(share, float(scores.weights[..., 1][is_scored].mean()), rel_tol=1e-4)
    assert not math.isclose(
        share, float(scores.weights[..., 1][batch["attention_mask"][:, 1:] == 1].mean()), rel_tol=1e-3
    )


def test_the_ends_of_a_cosine_sweep_are_one_side_alone(calibration_of: Callable[[str], Calibration]) -> None:
    sweep = calibration_of("strict")
    lowest, highest = sweep.outcomes[0], sweep.outcomes[-1]
    assert (lowest.routed_old, lowest.routed_new, lowest.forgetting, lowest.learning) == (0, 0, 0, 0)
    assert same(lowest.old, sweep.base.old) and same(highest.new, sweep.adapt.new) and highest.routed_new == 1
    assert calibration_of("cosine").outcomes[0].forgetting != 0, "the mean of both paths is not the base"
    shares = [outcome.routed_old for outcome in sweep.outcomes]
    assert shares == sorted(shares) and len(set(shares)) > 15


def test_what_is_kept_is_a_share_of_what_the_adapt_path_learns() -> None:
    base, present, candidate = measured(100, 300), measured(100, 200), measured(110, 150)
    outcome = Reference(base, measured(500, 100), present).outcome(PosteriorRouter(), candidate)
    assert (outcome.forgetting, outcome.learning, outcome.kept) == (pytest.approx(0.1), 1.5, 0.75)
    assert outcome.gain.value == pytest.approx(0.5) and outcome.short.value == pytest.approx(0.1)
    for nats in (300, 350):
        assert Reference(base, measured(500, nats), present).outcome(PosteriorRouter(), candidate).kept is None


def measured(old: float, new: float) -> Measured:
    """Readings of 100 tokens in two windows, the short prompts like the old text."""
    windows, scored = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([25, 75])
    sides = (PathLosses(Measurement(nats, 100, 0, 0), 10.0, nats * windows, scored) for nats in (old, new, old))
    return Measured(*sides)


def test_texts_are_read_once(place: Path) -> None:
    bars = Bars()
    result = route_calibrate(place / "posterior", old(place), new(place), track=bars)
    sequences = [tokenize(read_documents(files), letters()) for files in (old(place), new(place))]
    windows = sum(len(stride(some, 64, 32, ()).ids) for some in sequences)
    assert windows > sum(len(some.ids) for some in sequences), "windows overlap"
    # the first tokens of old texts are read as prompts once more
    tokens, settings = windows + len(beginnings(sequences[0], 10**6).ids), len(result.outcomes)
    assert bars == {"read": [tokens, tokens], "settings": [settings, settings]}


@each_router
def test_how_much_is_read_or_weighed_together_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, router: str
) -> None:
    """Windows of several forward passes are weighed as one batch, and logits are made some positions at a time."""
    model, sequences = load(place / router), tokenize(read_documents(new(place)), letters())
    ways = (weigh_base, adapt_alone, best_alone, routed_by(model.choice.router))
    (whole,) = read_paths(model, sequences, 10)
    monkeypatch.setattr(path_scores, "BATCH_NUMBERS", 200)
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 2 * 7 * 33)
    parts = read_paths(model, sequences, 7)
    assert 3 < len(parts) < math.ceil(len(sequences) / 7), "the control: several passes are one batch, but not all"
    assert len(whole.answers.row) == sum(len(part.answers.row) for part in parts) > 50
    for way in ways:
        whole_losses, parts_losses = measure_batches([whole], way), measure_batches(parts, way)
        assert same(whole_losses.total, parts_losses.total) and math.isclose(
            whole_losses.routed, parts_losses.routed, rel_tol=1e-4
        )
        torch.testing.assert_close(whole_losses.nats, parts_losses.nats, rtol=1e-4, atol=1e-5)
    assert len({measure_batches([whole], way).total.answered for way in ways}) > 1


def test_winning_weights_are_those_that_a_search_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    preserve, adapt = (2 * torch.randn(300, 5, generator=generator) for _ in range(2))
    preserve[:40] = adapt[:40]
    targets = torch.randint(5, (300,), generator=generator)
    least, most = winning_weights(preserve, adapt, targets)
    kinds = set()
    for weight in torch.linspace(0, 1, 101, dtype=torch.float64):
        mixture = (1 - weight) * preserve.double().softmax(-1) + weight * adapt.double().softmax(-1)
        ahead = mixture.gather(1, targets[:, None])[:, 0] - mixture.scatter(1, targets[:, None], 0).amax(-1)
        is_sure = ahead.abs() > 1e-9
        is_within = (least <= weight) & (weight <= most)
        assert torch.equal(is_within[is_sure], (ahead > 0)[is_sure])
    for low, high in zip(least.tolist(), most.tolist(), strict=True):
        kinds.add((low > high, low == 0, high == 1))
    assert {(False, True, True), (False, True, False), (False, False, True)} <= kinds
    assert any(is_never for is_never, _, _ in kinds)
    # of equals, the first is the most likely one, as argmax says
    equal = torch.tensor([[1.0, 1.0, 0.0]] * 2)
    least, most = winning_weights(equal, equal, torch.tensor([0, 1]))
    assert (least <= most).tolist() == [True, False] == (equal.argmax(-1) == torch.tensor([0, 1])).tolist()


# what is tried, and which is best


def test_settings_that_are_tried(place: Path) -> None:
    present: Any = ROUTINGS["posterior"].for_expansions(1)
    read = read_paths(load(place / "posterior"), tokenize(read_documents(new(place)), letters()), 8)
    tried = settings_of(present, (), read)
    assert tried[:2] == (present, PosteriorRouter().for_expansions(1))
    assert {routing.switch_rate for routing in tried} == {0, 0.0001, 0.001, 0.003, 0.01, 0.02, 0.03, 0.1}
    assert {weights_of(routing)[0] for routing in tried} == {0.01, 0.05, 0.2, 0.3, 0.5, 0.8, 0.95, 0.99}
    assert len(tried) == len(set(tried)) == 50
    read = read_paths(load(place / "strict"), tokenize(read_documents(new(place)), letters()), 8)
    known = CosineRouter(threshold=0.5, strict=True)
    tried = settings_of(known, read, read)
    assert tried[0] == known and all(routing.strict for routing in tried)
    thresholds = [routing.threshold for routing in tried]
    assert len(thresholds) == len(set(thresholds)) and set(thresholds) >= {-1, 0, 0.5, 0.9, 0.99, 1}
    cosines = scored_cosines(read)
    for share in (0.1, 0.5, 0.9):
        at = float(cosines[int(share * (len(cosines) - 1))])
        assert min(abs(threshold - at) for threshold in thresholds) <= 0.05 * (1 - at)
    # two figures of the distance from 1
    rounded = {0.99731: 0.9973, 0.999962: 0.999962, 0.123: 0.12, -0.3: -0.3, 1.0000002: 1.0, -1.0: -1.0}
    assert [round_threshold(cosine) for cosine in rounded] == list(rounded.values())


def outcome(threshold: float, forgetting: float, learning: float, **changes: Any) -> Outcome:
    """What a setting scores, 100 tokens a side and a base with 1 and 3 nats per token."""
    old_side, new_side = Measurement(100 + 100 * forgetting, 100, 0, 0), Measurement(300 - 100 * learning, 100, 0, 0)
    routing = CosineRouter(threshold=threshold)
    gain, short = MeanWithError(learning, 0.001), MeanWithError(forgetting, 0.0)
    made = Outcome(routing, old_side, new_side, forgetting, learning, learning / 2, threshold, threshold, gain, short)
    return replace(made, **changes)


LIMITS = Limits(0.02, None, None)


def test_the_best_learns_most_among_those_that_forget_little() -> None:
    some = [outcome(0.1, 0.0, 0.5), outcome(0.2, 0.02, 1.0), outcome(0.3, 0.021, 2.0), outcome(0.4, 0.01, 0.9)]
    for most, place in ((0.02, 1), (0.019, 3), (0.5, 2), (0.0, 0)):
        choice = choose(some, replace(LIMITS, forgetting=most))
        assert choice.best is some[place] and choice.is_within
    # where none forgets so little it forgets least, and of equal ones it is the first
    many = [outcome(0.1, 0.3, 0.5), outcome(0.2, 0.2, 0.1), outcome(0.3, 0.2, 0.2), outcome(0.4, 0.4, 2.0)]
    choice = choose(many, LIMITS)
    assert choice.best is choice.proposed is many[2] and not choice.is_within
    equal = [outcome(threshold, 0.01, 0.5) for threshold in (0.7, 0.5, 0.1)]
    assert all(choose(equal, replace(LIMITS, forgetting=most)).best is equal[0] for most in (0.02, 0.0))
    less = outcome(0.9, 0.005, 0.5)
    assert choose([*equal, less], LIMITS).best is less


# what a change must not cost, and what it must gain


@pytest.fixture(scope="module")
def calibrated(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A routed model as it is made, texts that its base wrote, and texts that its adapt path wrote."""
    folder = tmp_path_factory.mktemp("told")
    model = Path(shutil.copytree(place / "posterior", folder / "model"))
    set_routing(model, PosteriorRouter())
    for side in (0, 1):
        lines(folder / f"{side}.jsonl", *({"text": text} for text in written_by(model, side, 40)))
    return model, folder / "0.jsonl", folder / "1.jsonl"


@torch.no_grad()
def written_by(folder: Path, side: int, count: int) -> list[str]:
    """Texts of letters that one path of a model writes, drawn from what it finds likely."""
    model, generator = load(folder), torch.Generator().manual_seed(side)
    ids = letters()(["a"] * count, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    for _ in range(12):
        likely = (2 * model.path_logits(ids)[side][:, -1, 4:]).softmax(-1)
        ids = torch.cat((ids, 4 + torch.multinomial(likely, 1, generator=generator)), 1)
    return ["".join(ALPHABET[letter - 4] for letter in row if letter >= 4).strip() for row in ids.tolist()]


def test_the_bound_is_not_loosened_unless_it_is_asked_for(calibrated: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(calibrated[0], tmp_path / "model"))
    kept = route_calibrate(model, *calibrated[1:], CalibrationSettings(9.0, write=True))
    assert kept.present.bound == pytest.approx(math.log(2)) and kept.adapt.bound is None
    assert kept.present.bound_per_token == pytest.approx(-math.log(0.99))
    assert kept.proposed.bound <= kept.present.bound and kept.proposed.bound_per_token <= kept.present.bound_per_token
    # the negative control: a setting that learns more has a looser bound, and is taken with --bound
    for file in ("config.json", "surgery.json"):
        shutil.copyfile(calibrated[0] / file, model / file)
    words = ("--old", calibrated[1], "--new", calibrated[2], "--most-forgetting", 9, "--write", "--json")
    done = json.loads(run("route-calibrate", model, *words, "--bound", 4.61).stdout)
    assert done["written"] and done["proposed"]["bound"] == pytest.approx(-math.log(0.01))
    assert done["proposed"]["learning"] > kept.proposed.learning
    assert max(entry["bound_per_token"] for entry in done["outcomes"]) > kept.present.bound_per_token
    # short prompts that were the base's are the adapt path's, which the limit of forgetting does not allow
    assert done["proposed"]["short"]["value"] > kept.proposed.short.value > 0.02
    careful = route_calibrate(calibrated[0], *calibrated[1:], CalibrationSettings(bound=4.61))
    assert not careful.is_within or careful.proposed.short.value < 0.02


def test_a_bound_lifts_the_limit_per_token() -> None:
    present = PosteriorRouter(0.5, 0.01).for_expansions(1)
    assert read_limits(CalibrationSettings(), present) == Limits(0.02, present.bound, present.bound_per_token)
    limits = read_limits(CalibrationSettings(0.5, 2.0), present)
    assert limits == Limits(0.5, 2.0, math.inf)
    some = [bounded(0.5, 0.01), bounded(0.2, 0.1), bounded(0.01, 0.0)]
    assert [limits.allows(one) for one in some] == [True, True, False]
    now = read_limits(CalibrationSettings(), present)
    assert [now.allows(one) for one in (*some, bounded(0.5, 0.1), bounded(0.8, 0.0))] == [True, *[False] * 3, True]


@each_router
@torch.no_grad()
def test_short_prompts_are_what_the_model_says_of_them(
    place: Path, calibration_of: Callable[[str], Calibration], router: str
) -> None:
    model, tokenizer = load(place / router), letters()
    documents = tokenize(read_documents(old(place)), tokenizer)
    lost, scored = [], []
    for row in range(len(documents)):
        ids = documents[row]["input_ids"][None]
        lengths = range(1, min(8, ids.shape[1] - 1) + 1)
        nats = 0.0
        for length in lengths:
            base, routed = model.path_logits(ids[:, :length])[0], model(ids[:, :length]).logits
            nats += float((base.log_softmax(-1) - routed.log_softmax(-1))[0, -1, ids[0, length]])
        lost.append(nats)
        scored.append(len(lengths))
    expected = mean_with_error(torch.tensor(lost, dtype=torch.float64), torch.tensor(scored))
    short = calibration_of(router).present.short
    assert max(scored) == 8 and abs(expected.value) > 1e-3
    assert (short.value, short.error) == (pytest.approx(expected.value, abs=1e-5), pytest.approx(expected.error, 1e-3))
    assert calibration_of(router).base.short == MeanWithError(0.0, 0.0)
    assert calibration_of(router).adapt.short.value != 0


def test_the_noise_is_that_of_other_samples_of_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 50, (400,), generator=generator)
    nats = tokens * (0.3 + torch.randn(400, generator=generator, dtype=torch.float64))
    mean = mean_with_error(nats, tokens)
    drawn = [torch.randint(400, (400,), generator=generator) for _ in range(2000)]
    resampled_means = torch.stack([nats[rows].sum() / tokens[rows].sum() for rows in drawn])
    assert mean.value == pytest.approx(float(nats.sum() / tokens.sum()))
    assert mean.error == pytest.approx(float(resampled_means.std()), rel=0.1)
    assert mean_with_error(nats[:1], tokens[:1]).error == math.inf
    none = torch.zeros(1, dtype=torch.int64)
    assert mean_with_error(torch.cat((nats, none)), torch.cat((tokens, none))) == mean, "a window that is not scored"


@pytest.mark.parametrize(
    ("gain", "error", "is_taken"),
    [
        (0.05, 0.001, True),
        (0.001, 0.0004, True),
        (0.05, 0.03, False),  # less than twice its error
        (0.05, math.inf, False),  # one text
        (0.0, 0.0, False),
    ],
)
def test_a_change_needs_a_gain_that_is_no_chance(gain: float, error: float, is_taken: bool) -> None:
    present = outcome(0.5, 0.01, 1.0, gain=MeanWithError(0.0, 0.0))
    better = outcome(0.4, 0.01, 1.0 + gain, gain=MeanWithError(gain, error))
    choice = choose([present, better], LIMITS)
    assert (choice.proposed is better) == is_taken and choice.best in (present, better)
    # what forgets too much is changed whatever it gains
    for spoiled in (replace(present, forgetting=0.03), replace(present, short=MeanWithError(0.03, 0.0))):
        assert choose([spoiled, better], LIMITS).proposed is better


@pytest.mark.parametrize(
    ("lost", "is_kept"),
    [
        ([1.0, 3.0], False),
        ([0.0, 2.0], False),
        ([-1.0, 0.5], False),  # less on average, and nobody knows
        ([0.004, 0.006], True),
        ([0.004, 0.04], False),
        ([0.02, 0.02], True),
        ([0.021, 0.021], False),
        ([-0.3, -0.2], True),
        ([0.004], False),  # one text
    ],
)
def test_what_few_texts_do_not_show_is_not_taken_for_no_loss(lost: list[float], is_kept: bool) -> None:
    short = mean_with_error(8 * torch.tensor(lost, dtype=torch.float64), torch.full((len(lost),), 8))
    assert replace(LIMITS, forgetting=0.02 + 1e-9).keeps(outcome(0.5, 0.0, 1.0, short=short)) == is_kept


@pytest.mark.parametrize(
    ("now", "then", "is_kept"),
    [
        ([1.0, 1.0], [1.01, 1.01], True),
        ([1.0, 1.0], [1.03, 1.03], False),
        ([-1.0, -1.0], [0.03, 0.03], False),  # less than the base is no reason to lose more
        ([0.9, 1.1], [0.9, 1.1], True),
        ([1.0], [1.0], False),  # one text
        ([1.0], [9.0], False),
    ],
)
def test_first_tokens_of_a_composed_model_are_compared_with_now(
    now: list[float], then: list[float], is_kept: bool
) -> None:
    present, other = (
        outcome(
            0.5,
            0.0,
            1.0,
            short=mean_with_error(8 * torch.tensor(lost, dtype=torch.float64), torch.full((len(lost),), 8)),
        )
        for lost in (now, then)
    )
    assert relative(LIMITS, present).keeps(other) == is_kept
    # a single expansion is compared with its base
    assert not LIMITS.keeps(present) or max(now) < 0


def bounded(prior: float, rate: float) -> Outcome:
    return replace(outcome(0.5, 0.0, 1.0), routing=PosteriorRouter(prior, rate).for_expansions(1))


def test_the_bound_that_was_asked_for_is_named() -> None:
    """Where no setting keeps it."""
    some = [bounded(0.5, 0.01), bounded(0.9, 0.1)]
    lowest = {"limit": 0.01, "least": some[1].bound, "numbers": some[1].numbers}
    expected = [Problem("bound-unmet", "--bound", **lowest)]
    assert problems(choose, some, Limits(0.02, 0.01, math.inf), error=PlanError) == expected


@pytest.mark.slow
def test_windows_of_one_text_are_one_text(place: Path, tmp_path: Path) -> None:
    """What follows in a text is no new sample of texts: two texts of many windows tell as much noise as two texts."""
    (tmp_path / "one.txt").write_text(STORY)
    (tmp_path / "two.txt").write_text(STORY[:30:-1])
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    windows: dict[str, Any] = {"sequence_length": 20, "step": 7}
    single = route_calibrate(place / "posterior", old(place), files[0], **windows)
    assert {outcome.gain.error for outcome in single.outcomes} == {math.inf}
    assert single.proposed == single.present or single.present.short.value > 0.02
    both, parts = (
        [route_calibrate(place / "posterior", old(place), file, **windows) for file in some]
        for some in ([files], files)
    )
    for row, outcome in enumerate(both[0].outcomes):
        # texts are of other lengths, so their last windows are read apart from the others
        scored = torch.tensor([part.present.new.scored for part in parts])
        nats = [part.present.new.nats - part.outcomes[row].new.nats for part in parts]
        expected = mean_with_error(torch.tensor(nats, dtype=torch.float64), scored)
        assert outcome.gain.value == pytest.approx(expected.value, abs=1e-5)
        assert outcome.gain.error == pytest.approx(expected.error, abs=1e-5)
    assert max(outcome.gain.error for outcome in both[0].outcomes) > 1e-3


# writing


@each_router
def test_write_sets_the_best_and_nothing_else(place: Path, tmp_path: Path, router: str) -> None:
    model = Path(shutil.copytree(place / router, tmp_path / "model"))
    before = digests(model)
    options: dict[str, Any] = {"sequence_length": 20, "step": 7, "run": RunOptions(batch_size=16)}
    # the present posterior forgets more than this, so that any gain is enough
    settings = free(router, **({"most_forgetting": 0.05} if router == "posterior" else {}))
    seen = route_calibrate(model, old(place), new(place), settings, **options)
    assert not seen.written and digests(model) == before
    assert seen.proposed.routing != seen.present.routing and seen.is_within
    done = route_calibrate(model, old(place), new(place), replace(settings, write=True), **options)
    assert done == replace(seen, written=True)
    after = digests(model)
    assert {file for file in after if after[file] != before.get(file)} == {"config.json", "surgery.json"}
    config = json.loads((model / "config.json").read_text())
    assert router_of(config["scale_surgery"]) == done.proposed.routing
    # what is right already is not written again, so that a verification stays
    repeated = route_calibrate(model, old(place), new(place), replace(settings, write=True), **options)
    assert not repeated.written and digests(model) == after
    assert repeated.present == repeated.proposed and repeated.present.routing == done.proposed.routing
    assert repeated.present.learning == done.proposed.learning


@pytest.mark.parametrize("file", mostly(["config.json", "surgery.json"], "surgery.json".__eq__))
def test_nothing_is_written_where_something_fails(
    place: Path, tmp_path: Path, refuse_to_write: Any, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    model = Path(shutil.copytree(place / "posterior", tmp_path / "model"))
    refuse_to_write(model / file)
    before = digests(model)
    plot = tmp_path / "plots" / "sweep.png"
    texts = (model, old(place), new(place))
    with refused("path-unwritable", model, CheckpointError):
        route_calibrate(*texts, free("posterior", most_forgetting=0.05, write=True, plot=plot))
    assert digests(model) == before and not list(plot.parent.iterdir())
    monkeypatch.undo()
    done = route_calibrate(*texts, free("posterior", most_forgetting=0.05, write=True, plot=plot))
    assert done.written and [file.name for file in plot.parent.iterdir()] == ["sweep.png"]


# refusals


@pytest.mark.usefixtures("unloaded")
def test_models_that_are_refused(place: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(place / "posterior", tmp_path / "bare"))
    (bare / "surgery.json").unlink()
    for model, code in (
        (place / "base", "model-unrouted"),
        (place / "wide", "model-unrouted"),
        (tmp_path / "none", "folder-missing"),
        (bare, "form-saved-not-expanded"),
    ):
        with refused(code, model, CheckpointError):
            route_calibrate(model, old(place), new(place), CalibrationSettings(write=True))


@pytest.mark.usefixtures("unloaded")
def test_texts_and_settings_that_are_refused(place: Path, tmp_path: Path) -> None:
    model, texts = place / "posterior", (old(place), new(place))
    missing = [Problem("old-text-missing", "--old"), Problem("new-text-missing", "--new")]
    assert problems(route_calibrate, model, [], [], error=DataError) == missing
    (tmp_path / "empty.txt").write_text(" \n")
    empty = tmp_path / "empty.txt"
    nothing = [Problem("texts-without-documents", f"{option} {empty}") for option in ("--old", "--new")]
    assert problems(route_calibrate, model, empty, [empty], error=DataError) == nothing
    for number in (-0.1, math.nan):
        with refused("value-unfit", "--most-forgetting", PlanError):
            route_calibrate(model, *texts, CalibrationSettings(number))
    assert problems(route_calibrate, place / "cosine", *texts, CalibrationSettings(bound=1.0), error=PlanError) == [
        Problem("router-without-bound", "--bound", limit=1.0, router="cosine")
    ]
    inside = model / "config.json"
    with refused("output-file-is-input", inside, CheckpointError):
        route_calibrate(model, *texts, CalibrationSettings(plot=inside))


@pytest.mark.slow
def test_a_folder_that_a_trainer_saved_is_measured(place: Path, tmp_path: Path) -> None:
    load(place / "cosine").save_pretrained(tmp_path / "saved")
    with_tokenizer(tmp_path / "saved")
    sweep = route_calibrate(tmp_path / "saved", old(place), new(place))
    expected = route_calibrate(place / "cosine", old(place), new(place))
    assert sweep.outcomes == expected.outcomes and sweep.name == "saved"


@pytest.mark.usefixtures("unloaded")
def test_a_read_only_folder_is_refused_before_any_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = place / "posterior"
    allowed = os.access
    # root may write everywhere, so the operating system's answer stands in for a read-only folder
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in (model, tmp_path) and allowed(path, mode))
    settings = CalibrationSettings(write=True, plot=tmp_path / "sweep.png")
    assert problems(route_calibrate, model, old(place), new(place), settings, error=CheckpointError) == [
        Problem("output-file-closed", tmp_path / "sweep.png", parent=tmp_path),
        Problem("model-read-only", model),
    ]
    with pytest.raises(AssertionError, match="a model was loaded"):
        route_calibrate(model, old(place), new(place))


def test_a_loss_that_is_no_number_is_refused(place: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(place / "cosine", tmp_path / "broken"))
    (shard,) = model.glob("expansion-*.safetensors")
    with edited(shard) as tensors:
        next(tensors[name] for name in tensors if name.endswith(".w12") and "o_proj" in name).fill_(math.nan)
    before = digests(model)
    plot = tmp_path / "sweep.png"
    settings = free("cosine", write=True, plot=plot)
    (found,) = problems(route_calibrate, model, old(place), new(place), settings, error=CheckpointError)
    assert (found.code, found.where) == ("path-loss-not-finite", "broken")
    assert (found.values["path"], found.values["side"]) == ("adapt path", "old") and math.isnan(found.values["loss"])
    assert digests(model) == before and not plot.exists()


def test_a_router_in_config_json_that_makes_no_sense(place: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(place / "cosine", tmp_path / "odd"))
    config = json.loads((model / "config.json").read_text())
    place_of = "scale_surgery.router"
    words = "threshold: is 7, expected a cosine, from -1 to 1"
    unknown = Problem("router-unknown", f"{place_of}.router", name="dice", choices=["posterior", "cosine"])
    for change, wanted in (
        ({"threshold": 7}, Problem("other-program", place_of, error=words)),
        ({"router": "dice"}, unknown),
    ):
        router = config["scale_surgery"]["router"] | change
        spoiled = config | {"scale_surgery": config["scale_surgery"] | {"router": router}}
        (model / "config.json").write_text(json.dumps(spoiled))
        found = problems(route_calibrate, model, old(place), new(place), error=CheckpointError)
        assert found == [Problem("record-incomplete", "config.json", wanted)]


# the table


def shown_of(result: Calibration, *, details: bool = False) -> list[str]:
    console = Console(width=80, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_calibration(result, details=details), crop=False)
    return [line.rstrip() for line in capture.get().splitlines()]


@each_router
def test_the_table_fits_80_columns_and_has_the_rows_that_matter(
    calibration_of: Callable[[str], Calibration], router: str
) -> None:
    result = calibration_of(router)
    table = shown_of(result)
    assert max(len(line) for line in table if not line.startswith("next ")) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in table)
    heads = [line.split()[0] for line in table if line and line.split()[0] in ("base", "adapt", "now")]
    assert heads == ["base", "adapt", "now"] and sum(line.startswith("best ") for line in table) in (1, 2)
    shown = choose_shown(result)
    assert result.present in shown and result.proposed in shown
    default = CosineRouter(strict=router == "strict") if router != "posterior" else PosteriorRouter().for_expansions(1)
    assert default in [outcome.routing for outcome in shown]
    every = shown_of(result, details=True)
    assert f"{len(result.outcomes)} of {len(result.outcomes)} settings" in every
    assert len(every) - len(table) == len(result.outcomes) - len(shown) > 0


def calibration(*outcomes: Outcome, **changes: Any) -> Calibration:
    """A result whose first outcome is the present setting and whose last is the best."""
    base = outcome(0.0, 0.0, 0.0, routing=None)
    adapt = outcome(1.0, 0.5, 2.0, routing=None)
    ordered = tuple(sorted(outcomes, key=lambda entry: entry.routing.threshold if entry.routing else 0))
    texts = (("old.txt",), ("new.txt",), 64, 32, None, None, False)
    best = outcomes[-1]
    chosen = (outcomes[0], best, best, True)
    made = Calibration(Path("routed"), "routed", (), base, adapt, *chosen, ordered, 0.02, *texts)
    return replace(made, **changes)


def test_the_command_that_writes_reads_the_texts_as_they_were_read(place: Path) -> None:
    """With other windows or another dtype another setting may be the best."""
    run = RunOptions(device="cpu", dtype="bfloat16", trust_remote_code=True, batch_size=3)
    settings = CalibrationSettings(9.0, 4.61)
    result = route_calibrate(place / "posterior", old(place), new(place), settings, sequence_length=20, run=run)
    present = replace(result.present, routing=PosteriorRouter((0.125, 0.875)).for_expansions(1))
    (line,) = (line for line in shown_of(replace(result, present=present)) if line.startswith("next "))
    limits = "--most-forgetting 9.0 --bound 4.61"
    options = "--sequence-length 20 --device cpu --dtype bfloat16 --trust-remote-code --batch-size 3 --write"
    assert line.endswith(f" {limits} {options}")


def test_settings_that_are_beaten_or_hardly_differ_are_left_out() -> None:
    present, best = outcome(0.4, 0.5, 0.1), outcome(0.1, 0.0, 1.0)
    near, beaten, far, default = (
        outcome(0.2, 0.01, 1.01), outcome(0.3, 0.3, 0.9), outcome(0.9, 1.0, 2.0), outcome(0.5, 0.6, 0.2)
    )  # fmt: skip
    shown = choose_shown(calibration(present, near, beaten, far, default, best))
    assert shown == [best, present, default, far]


def test_what_the_table_says_of_the_best() -> None:
    present, best = outcome(0.5, 0.1, 1.5), outcome(0.25, 0.0123, 1.2345)
    text = "\n".join(shown_of(calibration(present, best)))
    assert "best  threshold 0.25: forgets +0.0123, learns +1.2345, 61.7% of the learning" in text
    assert "rule  learns most, and forgets at most 0.02, also on first 8 tokens" in text
    assert "next  scale-surgery route-calibrate routed --old" in text and "nothing" not in text
    assert text.endswith(" --write")
    written = "\n".join(shown_of(calibration(present, best, written=True, plot=Path("sweep.png"))))
    assert "before: threshold 0.5" in written and "scale-surgery verify routed" in written and "sweep.png" in written
    least = "\n".join(shown_of(calibration(present, best, is_within=False)))
    assert "nothing: every allowed setting may forget more; this one forgets least" in " ".join(least.split())
    assert "next     scale-surgery verify routed" in least
    alone = replace(best, short=MeanWithError(0.0, math.inf))
    least = "\n".join(shown_of(calibration(present, alone, is_within=False)))
    assert "one old text gives no standard error" in " ".join(least.split())
    assert "nothing: the model has this setting" in "\n".join(shown_of(calibration(best, present, best)))
    present, best = (replace(outcome(threshold, 0.0, -0.5), kept=None) for threshold in (0.5, 0.25))
    text = "\n".join(shown_of(calibration(present, best)))
    assert "learns -0.5000\n" in text, "where the adapt path learns nothing"


# the figure


def marks_of(axes: Any) -> dict[str, tuple[float, float]]:
    points = {points.get_label(): tuple(points.get_offsets()[0]) for points in axes.collections}
    return {label.split(":")[0]: place for label, place in points.items() if len(points) > 1}


@each_router
def test_the_figure_has_a_point_for_each_setting(calibration_of: Callable[[str], Calibration], router: str) -> None:
    result = calibration_of(router)
    figure = calibration_figure(result)
    axes = figure.axes[0]
    marks = marks_of(axes)
    for name, label in (
        ("base", "base model"),
        ("adapt", "adapt path alone"),
        ("present", "present"),
        ("proposed", "best"),
    ):
        outcome = getattr(result, name)
        assert marks[label] == (outcome.forgetting, outcome.learning)
    assert marks["base model"] == (0, 0)
    points = sorted(tuple(point) for points in axes.collections for point in points.get_offsets())
    places = [(outcome.forgetting, outcome.learning) for outcome in result.outcomes]
    places += [
        (outcome.forgetting, outcome.learning)
        for outcome in (result.base, result.adapt, result.present, result.proposed)
    ]
    assert points == sorted(places)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left < x < right and bottom < y < top for x, y in points)
    if router == "posterior":
        labels = [label for points in axes.collections if (label := points.get_label()).startswith("switch rate")]
        assert labels == [
            f"switch rate {rate}" for rate in ("0", "0.0001", "0.001", "0.003", "0.01", "0.02", "0.03", "0.1")
        ]
        assert not axes.texts and figure.legends[0].get_title().get_text() == "larger points: lower prior"


def test_settings_that_lie_close_together_have_a_panel_of_their_own() -> None:
    apart = [outcome(0.1, 0.0, 0.2), outcome(0.5, 0.4, 1.9)]
    assert len(panels_of(calibration_figure(calibration(*apart)))) == 1
    close = [outcome(0.1, 0.01, 1.8), outcome(0.5, 0.03, 1.9)]
    whole, closer = panels_of(calibration_figure(calibration(*close)))
    (frame,) = whole.patches
    assert frame.get_xy() == (closer.get_xlim()[0], closer.get_ylim()[0])
    assert set(marks_of(closer)) >= {"present", "best"} and "base model" not in marks_of(closer)
    assert closer.get_xlim()[1] < 0.05 < 0.5 < whole.get_xlim()[1]


def panels_of(figure: Any) -> list[Any]:
    """Axes that have points, without the scale of thresholds."""
    return [axes for axes in figure.axes if axes.get_xlabel()]


def test_thresholds_are_written_where_they_can_be_read() -> None:
    crowd = [outcome(0.5 + place / 60, 0.01 * place**1.5, 0.5 + 0.05 * place) for place in range(24)]
    crowd += [outcome(0.96 + place / 1000, 1.2 + place / 1e4, 1.7) for place in range(20)]
    figure = calibration_figure(calibration(*crowd))
    FigureCanvasAgg(figure).draw()
    *panels, scale = figure.axes
    labels = {label.get_text(): label.get_window_extent() for label in scale.get_yticklabels()}
    assert {"0.5", "0.979"} <= set(labels) and 15 < len(labels) < 44
    assert not any(first.overlaps(second) for first, second in itertools.combinations(labels.values(), 2))
    assert not any(box.overlaps(axes.bbox) for box in labels.values() for axes in panels)
    # a point has the colour beside which its threshold is written
    thresholds = [point.numbers.removeprefix("threshold ") for point in crowd]
    (bar,) = (mesh for mesh in scale.collections if mesh.get_array() is not None)
    for axes in panels:
        (line,) = (points for points in axes.collections if len(points.get_offsets()) == len(crowd))
        for label, place in zip(labels, scale.get_yticks(), strict=True):
            assert tuple(line.get_facecolors()[thresholds.index(label)]) == tuple(bar.to_rgba(place))
    colours = {tuple(colour) for colour in line.get_facecolors()}
    assert len(colours) == len(crowd)


# the command


def sides(place: Path) -> list[object]:
    return [word for side in ("old", "new") for file in globals()[side](place) for word in (f"--{side}", file)]


def test_command(place: Path) -> None:
    windows = ("--batch-size", 16, "--sequence-length", 20)
    run_as = {"sequence_length": 20, "run": RunOptions(batch_size=16)}
    sweep = route_calibrate(place / "strict", old(place), new(place), **run_as)
    shown = run("route-calibrate", place / "strict", *sides(place), *windows).stdout
    assert [line.rstrip() for line in shown.splitlines()] == shown_of(sweep)
    content = json.loads(run("route-calibrate", place / "strict", *sides(place), *windows, "--json").stdout)
    assert content == sweep.to_json()
    assert content["proposed"]["routing"] == {
        "router": "cosine", "threshold": sweep.proposed.routing.threshold, "strict": True  # type: ignore[union-attr]
    }  # fmt: skip
    assert content["base"]["routing"] is None and len(content["outcomes"]) == len(sweep.outcomes)
    assert content["present"]["old"].keys() == {
        "nats", "scored", "questions", "answered", "bytes", "nats_per_token", "accuracy"
    }  # fmt: skip
    details = run("route-calibrate", place / "strict", *sides(place), *windows, "--details").stdout
    assert [line.rstrip() for line in details.splitlines()] == shown_of(sweep, details=True)


def test_what_forgets_too_much_is_not_written(place: Path, tmp_path: Path) -> None:
    """A user who says how much may be forgotten does not get a model that forgets more, and a pipeline goes on."""
    model = Path(shutil.copytree(place / "cosine", tmp_path / "model"))
    before = digests(model)
    words = ("route-calibrate", model, *sides(place), "--most-forgetting", 0, "--write")
    found = json.loads(run(*words, "--json").stdout)
    assert not found["is_within"] and not found["written"] and found["proposed"]["forgetting"] > 0
    assert digests(model) == before
    assert "nothing: every allowed setting may forget more" in " ".join(run(*words).stdout.split())
