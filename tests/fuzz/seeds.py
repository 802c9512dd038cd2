"""What is mutated: a small folder of each kind that the program reads, and the files that go with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scale_surgery import (
    EvalData,
    PosteriorRouter,
    Probes,
    Request,
    TrainingSettings,
    expand,
    extract,
    merge,
    plan,
    register,
    route_export,
    train,
)
from scale_surgery.planning.saved import save_plan
from scale_surgery.training.run_folder import TrainingRun
from tests.conftest import load
from tests.text.test_tokenizing import letters
from tests.tiny import save_tiny

BASES = ("base", "sharded")
# what carries its base in shards of its own
WHOLE = ("expanded", "grown", "deep", "routed")
EXPANDED = (*WHOLE, "fused")
BASE_OF = {"expanded": "base", "grown": "base", "routed": "base", "fused": "base", "deep": "sharded"}
SETTINGS = TrainingSettings(steps=4, save_every=2, sequence_length=16, batch_size=1, log_every=1)


def make_seeds(place: Path) -> None:
    """Make one of each; takes seconds."""
    base, sharded = (_with_side_files(_make_base(place, name)) for name in BASES)
    expand(base, Request("1", variant="adapt", collaborate="both"), place / "expanded")
    expand(base, Request("0", method="grow"), place / "grown")
    expand(sharded, Request("0", method="depth"), place / "deep")
    route_export(place / "expanded", place / "routed", PosteriorRouter())
    register()
    load(place / "expanded").save_pretrained(place / "saved")
    merge(place / "expanded", place / "fused", probes=Probes(max_new_tokens=0))
    merge(place / "grown", place / "stock", to="stock", probes=Probes(max_new_tokens=0))
    extract(place / "expanded", place / "extract")
    save_plan(plan(base, Request("0-1")), place / "plan.json")
    _write_texts(place)
    _begin_training(place)


def _make_base(place: Path, name: str) -> Path:
    is_sharded = name == "sharded"
    return save_tiny(
        place / name,
        "llama",
        shard_size="30KB" if is_sharded else "1GB",
        num_hidden_layers=2,
        tie_word_embeddings=is_sharded,
    )


def _with_side_files(base: Path) -> Path:
    letters().save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A tiny model\n", encoding="utf-8")
    (base / "LICENSE").write_text("Do what you like.\n", encoding="utf-8")
    return base


def _write_texts(place: Path) -> None:
    rows = [
        {"question": "who is it?", "answer": "the fox"},
        {"text": "the quick brown fox"},
        {"prompt": "a", "completion": "b"},
    ]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "array.json").write_text(json.dumps(rows), encoding="utf-8")
    (place / "plain.txt").write_text("the lazy dog sleeps\nthe fox jumps\n", encoding="utf-8")


def _begin_training(place: Path) -> None:
    """A run that was stopped after its last checkpoint, for --resume."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(TrainingRun, "finish", lambda *_: sys.exit())
        old = EvalData(old=[place / "texts.jsonl"])
        train(place / "expanded", [place / "plain.txt"], place / "run", SETTINGS, eval_data=old)
    assert list((place / "run").rglob("*.safetensors")), "the run left nothing to resume"
