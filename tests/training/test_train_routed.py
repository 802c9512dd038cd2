"""Training a routed model: on its adapt path alone, or on what its router gives out."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import (
    CosineRouter,
    PosteriorRouter,
    Probes,
    Request,
    TrainingError,
    TrainingSettings,
    evaluate,
    expand,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.folder.record import read_manifest
from tests.command import run
from tests.conftest import digests, load, refused
from tests.each import mostly
from tests.training.test_train import expansion, write_lines
from tests.training.test_train import same as same_tensors

ROUTERS = {
    "posterior": PosteriorRouter(),
    "cosine": CosineRouter(threshold=0.9),
    "strict": CosineRouter(threshold=0.99, strict=True),
}
SETTINGS = TrainingSettings(steps=5, sequence_length=48, batch_size=2, learning_rate=3e-3, log_every=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and the shipped model expanded, and routed in each way."""
    folder = tmp_path_factory.mktemp("train_routed")
    for name, start in (("new", 400), ("old", 0)):
        write_lines(folder / f"{name}.jsonl", [{"text": biography(person, 3)} for person in people(6, start=start)])
    expand(SHIPPED_MODEL, Request("1-3", variant="adapt", collaborative_layers="2-3"), folder / "adapt")
    for name, routing in ROUTERS.items():
        route_export(folder / "adapt", folder / name, routing)
    return folder


def trained(place: Path, model: str, output: Path, **changes: Any) -> Path:
    return train(place / model, [place / "new.jsonl"], output, replace(SETTINGS, **changes)).path


@pytest.fixture(scope="module")
def trained_of(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model of `place` after a run, to be read: made once, in its test if it is the first to ask."""

    @functools.cache
    def make(model: str, routed: bool = False) -> Path:
        return trained(place, model, tmp_path_factory.mktemp("trained") / model, routed=routed)

    return make


def same(first: Path, second: Path) -> bool:
    return same_tensors(expansion(first), expansion(second))


@pytest.mark.slow
def test_without_the_route_it_trains_as_the_unrouted_model(place: Path, trained_of: Callable[..., Path]) -> None:
    unrouted = trained_of("adapt")
    assert not same(unrouted, place / "adapt"), "the control: it has learned"
    for name in ROUTERS:
        assert same(trained_of(name), unrouted), name
        # what was measured is what the router gives, and the record says so
        assert read_manifest(trained_of(name)).training[-1]["routed"] is True
    assert read_manifest(unrouted).training[-1]["routed"] is False


@pytest.mark.parametrize("name", mostly(ROUTERS, "posterior".__eq__))
def test_with_the_route_the_base_stays(place: Path, trained_of: Callable[..., Path], tmp_path: Path, name: str) -> None:
    once, routed = place / name, tmp_path / "routed"
    if name == "strict":
        once = trained_of(name)
        train(once, [place / "new.jsonl"], routed, replace(SETTINGS, routed=True))
    else:
        shutil.copytree(trained_of(name, routed=True), routed)
    assert not same(routed, once)
    if name != "strict":
        assert not same(routed, trained_of(name)), "the route changes what is learned"
    result = verify(routed, SHIPPED_MODEL, probes=Probes(max_new_tokens=2))
    assert result.passed and result.state == "trained"
    assert "base_stream_always" in result.required
    strip(routed, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(SHIPPED_MODEL)
    model = load(routed)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        preserve, adapt = model.path_logits(ids)
        assert torch.equal(preserve, load(SHIPPED_MODEL)(ids).logits)
    assert not torch.equal(preserve, adapt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_the_first_loss_is_that_of_the_routed_output(
    place: Path, trained_of: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """A trained model is trained on: its routed loss and that of its adapt path differ."""
    once = trained_of(name)
    settings = replace(
        SETTINGS, steps=1, batch_size=64, packing=False, sequence_length=64, learning_rate=1e-9, schedule="constant"
    )
    losses = {}
    for routed in (True, False):
        output = train(once, [place / "old.jsonl"], tmp_path / str(routed), replace(settings, routed=routed)).path
        log = [json.loads(line) for line in (output / "training" / "log.jsonl").read_text().splitlines()]
        losses[routed] = next(entry["loss"] for entry in log if "loss" in entry)
    model = load(once)
    evaluation = evaluate(once, [place / "old.jsonl"])
    routed, alone = (score.old for score in evaluation.scores if score.kind in ("expanded", "adapt"))
    assert routed is not None and alone is not None
    assert losses[True] == pytest.approx(routed.nats_per_token, rel=1e-3)
    assert losses[False] == pytest.approx(alone.nats_per_token, rel=1e-3)
    assert abs(losses[True] - losses[False]) > 2e-3
    assert model.is_routing_enabled, "loaded again, it routes"


@pytest.mark.parametrize(("name", "code"), [("adapt", "router-missing"), ("strict", "router-gives-base")])
def test_what_would_learn_nothing_is_refused(place: Path, tmp_path: Path, name: str, code: str) -> None:
    with refused(code, place / name, TrainingError):
        trained(place, name, tmp_path / "out", routed=True)
    assert not (tmp_path / "out").exists()


def test_the_option(place: Path, tmp_path: Path) -> None:
    options = ["--routed", "--steps", "2", "--sequence-length", "48", "--batch-size", "2", "--json"]
    run("train", place / "posterior", "--data", place / "new.jsonl", "-o", tmp_path / "out", *options)
    settings = json.loads((tmp_path / "out" / "training" / "settings.json").read_text())
    assert settings["routed"] is True
