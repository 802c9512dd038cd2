"""Calibrating a composed folder: numbers against the model itself, what is written, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import CalibrationSettings
from scale_surgery.folder.check import check_integrity
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import is_even, router_of, weights_of
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.calibration import Calibration
from scale_surgery.routing.figure import calibration_figure
from scale_surgery.show.tables_calibrate import render_calibration
from tests.command import run
from tests.composed import Made, mixed
from tests.conftest import load, shown
from tests.routing.test_calibrate import free
from tests.routing.test_report import START
from tests.text.test_tokenizing import lines

NAMES = ("medicine", "law", "music")
OLD = ("the quick brown fox jumps over the lazy dog", "and sleeps until the sun is up")


@pytest.fixture(scope="module")
def place(speaking: tuple[Made, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composed folder, old text, and new text that the expansions wrote themselves, most of it music."""
    place = tmp_path_factory.mktemp("calibrate_paths")
    shutil.copytree(speaking[1], place / "composed")
    lines(place / "old.jsonl", *({"text": text} for text in OLD))
    tokenizer = load_tokenizer(place / "composed")
    rows, model = [], load(place / "composed")
    for name, letter in (("music", "a"), ("law", "b"), ("music", "c"), ("music", "d")):
        ids = torch.tensor([[START, *tokenizer(letter, add_special_tokens=False)["input_ids"]]])
        with model.use_expansion(name):
            written = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
        rows.append({"text": tokenizer.decode(written[0, 1:], skip_special_tokens=True)})
    lines(place / "new.jsonl", *rows)
    return place


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def calibrate(place: Path, settings: CalibrationSettings, **options: Any) -> Calibration:
    return route_calibrate(place / "composed", place / "old.jsonl", place / "new.jsonl", settings, **options)


def is_uneven(router: Any) -> bool:
    """Whether expansions begin with different weights."""
    return not is_even(weights_of(router)[1:])


@pytest.fixture(scope="module")
def calibration(place: Path) -> Calibration:
    return calibrate(place, free("posterior"))


@torch.no_grad()
def nats(place: Path, side: str, **options: Any) -> float:
    """Loss of the model with these numbers, text by text."""
    model, tokenizer = load(place / "composed"), load_tokenizer(place / "composed")
    total = 0.0
    if options:
        model.set_expansion(list(NAMES), **options)
    for line in (place / f"{side}.jsonl").read_text(encoding="utf-8").splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]])
        total -= float(model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).double().sum())
    return total


def test_numbers_are_those_of_the_model_with_that_setting(place: Path, calibration: Calibration) -> None:
    """Another prior and another rate, from what was read once, against the model that mixes so."""
    assert calibration.present.routing == PosteriorRouter((0.25,) * 4, 0.05)
    assert math.isclose(calibration.present.old.nats, nats(place, "old"), rel_tol=1e-5)
    tried = {outcome.routing: outcome for outcome in calibration.outcomes}
    uneven = [setting for setting in tried if is_uneven(setting) and setting.switch_rate == 0.1]
    assert len(uneven) >= 8
    for setting in uneven[:2]:
        loss = nats(place, "new", prior=setting.prior, switch_rate=0.1)
        assert math.isclose(tried[setting].new.nats, loss, rel_tol=1e-5)
        assert not math.isclose(tried[setting].new.nats, calibration.present.new.nats, rel_tol=1e-4)


def test_priors_follow_the_texts_and_bound_every_path(calibration: Calibration) -> None:
    settings = [outcome.routing for outcome in calibration.outcomes]
    assert len(set(settings)) == len(settings) and all(isinstance(setting, PosteriorRouter) for setting in settings)
    asked = next(setting for setting in settings if is_uneven(setting))
    base, medicine, law, music = asked.prior
    # 0, 1 and 3 of four texts, and half a text each
    assert [round(weight * 5.5 / (1 - base), 6) for weight in (medicine, law, music)] == [0.5, 1.5, 3.5]
    assert asked.bound == -math.log(min(asked.prior)) > math.log(4)
    # without switches no text loses more than the bound against the best path for it; with one path alone it may
    for outcome in calibration.outcomes:
        setting = outcome.routing
        if isinstance(setting, PosteriorRouter) and setting.switch_rate == 0:
            assert -1e-3 <= outcome.new.nats - calibration.adapt.new.nats <= 4 * setting.bound + 1e-3
    assert calibration.base.new.nats - calibration.adapt.new.nats > 4 * math.log(4), "the control"


def test_no_text_may_lose_more_than_now_unless_that_is_asked_for(place: Path, calibration: Calibration) -> None:
    careful = calibrate(place, CalibrationSettings(most_forgetting=99.0))
    assert careful.present.bound == pytest.approx(math.log(4)) and careful.is_within
    routing = careful.best.routing
    assert isinstance(routing, PosteriorRouter) and is_even(weights_of(routing)) and routing.switch_rate <= 0.05
    looser = calibration.best.routing
    assert isinstance(looser, PosteriorRouter) and not is_even(weights_of(looser)), "the control"
    assert calibration.best.learning > careful.best.learning


def test_it_is_shown_and_drawn(calibration: Calibration) -> None:
    text = shown(render_calibration(calibration))
    assert text.startswith("composed: posterior router over 4 paths: base, medicine, law, music\n")
    assert "best path" in text and "others" in text and "adapt" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    labels = [entry.get_text() for entry in calibration_figure(calibration).legends[0].get_texts()]
    assert "best path alone" in labels and sum(label.startswith("switch rate") for label in labels) == 8
    content = json.loads(json.dumps(calibration.to_json()))
    assert len(content["proposed"]["routing"]["prior"]) == 4 and content["paths"] == ["base", *NAMES]


@pytest.mark.slow
def test_the_best_is_written_and_the_folder_stays_whole(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "composed", tmp_path / "composed"))
    asked = ["--most-forgetting", "99", "--bound", "9"]
    texts = ["--old", place / "old.jsonl", "--new", place / "new.jsonl"]
    plot = ["-o", tmp_path / "plot.svg"]
    content = json.loads(run("route-calibrate", folder, *texts, *asked, *plot, "--write", "--json").stdout)
    assert content["written"] is True and (tmp_path / "plot.svg").stat().st_size > 10_000
    written = open_folder(folder)
    assert written.config["scale_surgery"]["router"] == content["proposed"]["routing"]
    assert written.manifest.routing == router_of(written.config["scale_surgery"])
    assert not check_integrity(written).problems
    model = load(folder)
    assert model.choice.router.settings == content["proposed"]["routing"]
    # the control: the folder that it was copied from is another
    assert read_manifest(place / "composed").routing == mixed(switch_rate=0.05).for_expansions(3)
