"""What people do with a real base: train, measure, route, talk, report, add tokens, and the whole job in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scale_surgery import Probes, Request, RunOptions, TrainingSettings, expand, merge, train, verify
from scale_surgery.biographies import biography, people, questions
from scale_surgery.folder.folder import open_folder
from scale_surgery.training.load_model import load_to_train
from tests.command import run
from tests.conftest import digests, shake
from tests.real.conftest import flipped
from tests.real.test_model import COUNTED, TEXT
from tests.real.test_surgery import base_shard

SETTINGS = TrainingSettings(steps=6, batch_size=4, sequence_length=64)
LEARNED = people(24)


def tell(path: Path, column: str, texts: list[str]) -> Path:
    """Write a file of rows."""
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def new(room: Path) -> Path:
    """Invented people, whom no base knows."""
    return tell(room / "new.jsonl", "text", [biography(person, style) for person in LEARNED for style in (0, 1)])


@pytest.fixture(scope="module")
def some(room: Path) -> Path:
    """A few of them, since a measurement reads each token as often as a training."""
    return tell(room / "some.jsonl", "text", [biography(person, 0) for person in LEARNED[:8]])


@pytest.fixture(scope="module")
def old(room: Path) -> Path:
    """English text that the base reads well."""
    return tell(room / "old.jsonl", "text", TEXT.split(". "))


@pytest.fixture(scope="module")
def learned(gemma: Path, room: Path, new: Path) -> Path:
    """The last two layers, trained for a few steps with the settings that are default."""
    wide = expand(gemma, Request("last:2", variant="adapt"), room / "wide", base_weights="link").path
    before = digests(wide)
    done = train(wide, [new], room / "learned", SETTINGS)
    assert digests(wide) == before
    begun, ended = expansion(wide), expansion(done.path)
    moved = {name.rpartition(".")[2] for name in begun if not torch.equal(begun[name], ended[name])}
    # rounded to bfloat16, a step of a large number may not show; those that began at zero all do
    assert {"w12", "w22"} <= moved
    assert digests(gemma)["model.safetensors"] in digests(done.path).values()
    return done.path


@pytest.fixture(scope="module")
def routed(learned: Path, room: Path) -> Path:
    """The same with a router."""
    run("route-export", learned, "-o", room / "routed-learned", "-q")
    return room / "routed-learned"


def expansion(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that were added."""
    shards = folder.glob("expansion-*.safetensors")
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def result_of(*words: object, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON."""
    return dict(json.loads(run(*words, "--json", "-q", code=code).stdout))


def test_training_learns_and_keeps_the_base(learned: Path, room: Path, some: Path, old: Path) -> None:
    found = verify(learned, probes=Probes(max_new_tokens=0))
    assert found.passed and found.state == "trained"
    scores = result_of("evaluate", learned, "--old", old, "--new", some, "--sequence-length", 64)["scores"]
    losses = {score["kind"]: score["new"]["nats_per_token"] for score in scores}
    assert losses["expanded"] < losses["base"] - 0.05
    # the negative control: what was not trained learned nothing
    untrained = result_of("evaluate", room / "wide", "--new", some, "--sequence-length", 64)["scores"]
    assert {score["new"]["nats_per_token"] for score in untrained} == {losses["base"]}


def test_a_report_shows_what_training_changed(learned: Path, room: Path) -> None:
    page = room / "report.html"
    assert result_of("report", learned, "-o", page, "--files-only")["state"] == "trained"
    assert page.stat().st_size > 10_000
    # the negative control
    assert result_of("report", room / "wide", "--files-only")["state"] == "initial"


def test_a_router_weighs_each_token(routed: Path, old: Path, some: Path) -> None:
    found = result_of("route-report", routed, "--text", old, "--text", some, "--sequence-length", 64)
    assert found["paths"] == ["base", "default"]
    shares = [file["shares"]["default"] for file in found["files"]]
    # the new text is read by the expansion more than the old one
    assert 0 < shares[0] < shares[1] < 1


def test_answers(gemma: Path, routed: Path, learned: Path) -> None:
    (question, *_) = questions(LEARNED[0])
    greedy = ("--temperature", 0, "--max-new-tokens", 6)
    stock = result_of("generate", gemma, "--prompt", COUNTED, *greedy)
    assert stock["answers"][0]["text"] == " 8, 9,"
    answer = result_of("generate", routed, "--prompt", question.prompt, *greedy)["answers"][0]
    assert all(len(token["weights"]) == 2 for token in answer["tokens"])
    spoken = run("chat", routed, "--raw", *greedy, "-q", input=f"{COUNTED}\n").stdout
    assert "8, 9," in spoken
    both = result_of("generate", learned, "--compare", "--prompt", COUNTED, *greedy)
    assert "8, 9," in json.dumps(both)


def test_new_tokens(gemma: Path, room: Path) -> None:
    words = room / "words.txt"
    words.write_text("".join(f"zorblat{number}ique\n" for number in range(20)))
    folder = room / "spoken"
    run("expand", gemma, "--layers", "none", "--new-tokens", words, "-o", folder, "--base-weights", "link", "-q")
    assert verify(folder, probes=Probes(max_new_tokens=0), record=False).passed
    text = result_of("generate", folder, "--prompt", "zorblat7ique", "--max-new-tokens", 1)
    assert text["answers"][0]["read"] == 2, "beginning of text, and one new token"
    assert result_of("generate", gemma, "--prompt", "zorblat7ique", "--max-new-tokens", 1)["answers"][0]["read"] > 4
    with flipped(base_shard(folder), room):
        assert not verify(folder, probes=None, record=False).passed
    run("strip", folder, "-o", room / "silent", "--base-weights", "link", "-q")
    assert digests(room / "silent") == digests(gemma)
    for made in (folder, room / "silent"):
        shutil.rmtree(made)


def test_a_quantised_base_keeps_its_bytes(learned: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = TrainingSettings(base_quantization="nf4")
    ids = torch.arange(5, 37)[None]
    model = load_to_train(open_folder(learned), settings, RunOptions(device="cpu")).eval()
    with torch.no_grad():
        trained = model(ids).logits
        with model.expansion_disabled():
            alone = model(ids).logits
    assert torch.isfinite(trained).all() and not torch.equal(trained, alone)
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_grow_in_the_stock_form(gemma: Path, room: Path) -> None:
    grown = expand(gemma, Request("last:2", method="grow"), room / "grown", base_weights="link").path
    merge(shake(grown, by=0.01), room / "stock", to="stock", probes=Probes(max_new_tokens=0))
    config = json.loads((room / "stock" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and "auto_map" not in config
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        logits = {
            folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=folder == grown)(ids).logits.float()
            for folder in (gemma, grown, room / "stock")
        }
    drift = {folder: float((found - logits[grown]).abs().max()) for folder, found in logits.items()}
    assert drift[room / "stock"] < 0.05 * float(logits[grown].abs().max())
    # the negative control: the base is another model
    assert drift[gemma] > 3 * drift[room / "stock"]
    for made in (grown, room / "stock"):
        shutil.rmtree(made)


def test_the_whole_job(gemma: Path, room: Path, new: Path, old: Path) -> None:
    job, before = room / "job", digests(gemma)
    few = ("--steps", 8, "--batch-size", 4, "--sequence-length", 64)
    words = ("learn", gemma, "--data", new, "--old", old, "-o", job, *few)
    planned = run(*words, "--dry-run").stdout
    assert "last:5" in planned and not job.exists()
    done = result_of(*words)
    assert done["verified"] and done["layers"] == "last:5"
    rows = {row["name"]: row for row in done["rows"]}
    assert rows["learned"]["new"]["loss"] < rows["base"]["new"]["loss"]
    assert rows["routed"]["old"]["loss"] < rows["base"]["old"]["loss"] + 0.2
    assert digests(gemma) == before
    shutil.rmtree(job)
