"""Training on a quantised base: the expansion learns and is written as ever, the base's files stay as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scale_surgery import Request, expand, train, verify
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.running.options import RunOptions
from scale_surgery.training.load_model import load_to_train
from scale_surgery.training.settings import TrainingSettings
from tests.command import run
from tests.conftest import digests, load
from tests.routed import random_ids
from tests.tiny import save_tiny
from tests.training.test_train import ask, expansion, write_lines

IDS = random_ids(2, 9)
QUANTISATIONS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def test_a_run_on_four_bits_writes_the_expansion_beside_the_base_s_own_bytes(tmp_path):
    pytest.importorskip("bitsandbytes")
    from scale_surgery.biographies import SHIPPED_MODEL

    path = expand(SHIPPED_MODEL, Request("2-3", variant="adapt", collaborate="both"), tmp_path / "adapt").path
    data, before = write_lines(tmp_path / "new.jsonl", ask(400, 6)), digests(path)
    settings = TrainingSettings(steps=3, sequence_length=32, batch_size=2, learning_rate=3e-3, base_quantization="nf4")
    done = train(path, [data], tmp_path / "out", settings)
    begun, learned = expansion(path), expansion(done.path)
    moved = {name.rpartition(".")[2] for name, tensor in learned.items() if not torch.equal(tensor, begun[name])}
    assert {"w12", "w21"} <= moved
    assert digests(path) == before
    assert verify(done.path).passed
    assert read_manifest(done.path).training[0]["settings"]["base_quantization"] == "nf4"


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_what_trains_is_the_expansion_on_the_quantised_base(pair_of, kind):
    pytest.importorskip("bitsandbytes")
    made, settings = pair_of("llama", "adapt"), TrainingSettings(base_quantization=kind)
    model = load_to_train(open_folder(made.path), settings, RunOptions(device="cpu")).eval()
    base = load(made.base_path, quantization_config=transformers.BitsAndBytesConfig(**QUANTISATIONS[kind]))
    with model.expansion_disabled():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert not torch.equal(base(IDS).logits, made.base(IDS).logits), "the negative control"
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name: parameter for name, parameter in made.expanded.named_parameters() if parameter.requires_grad}
    assert trained.keys() == expected.keys() and all(torch.equal(trained[name], expected[name]) for name in trained)


def test_a_base_that_cannot_be_quantised_is_refused_before_anything_is_read(pair_of, tmp_path, monkeypatch):
    def refusal(path: Path, *options: str) -> dict[str, str]:
        given = ["train", path, "--data", "no-file", "-o", tmp_path / "out", "--base-quantization", "nf4", "--json"]
        (problem,) = json.loads(run(*given, *options, code=1).stdout)["problems"]
        assert not (tmp_path / "out").exists()
        return problem

    base = save_tiny(tmp_path / "base", "llama")
    grown = expand(base, Request("0", method="grow"), tmp_path / "grown").path
    assert refusal(grown)["code"] == "grown-on-quantised"
    deep = expand(base, Request("0", method="depth"), tmp_path / "deep").path
    assert refusal(deep)["code"] == "deepened-on-quantised"
    widened = pair_of("llama", "adapt").path
    assert refusal(widened, "--trust-remote-code")["code"] == "quantisation-with-own-code"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert refusal(widened)["code"] == "quantisation-with-fsdp"
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert refusal(widened)["code"] == "quantisation-without-package"
