"""Inspection of base and expanded models."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_surgery import CheckpointError, Request, UnsupportedFamilyError, expand, inspect, verify
from scale_surgery.errors import Problem
from tests.conftest import edited, problems
from tests.tiny import save_tiny


def test_a_base_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", shard_size="30KB")
    inspection = inspect(base)
    assert (inspection.name, inspection.family, inspection.dtype, inspection.expanded) == ("base", "llama", "F32", None)
    sizes = inspection.sizes
    assert (sizes.hidden, sizes.layers, sizes.query_heads, sizes.key_value_heads) == (40, 3, 8, 4)
    assert (sizes.head_size, sizes.inner, sizes.vocabulary, sizes.is_tied) == (10, 52, 97, False)
    # embedding and head; q, o; k, v; gate, up, down; two norms a layer; their biases; final norm
    weights = 2 * 97 * 40 + 3 * (2 * 80 * 40 + 2 * 40 * 40 + 3 * 52 * 40 + 80) + 40
    biases = 3 * (80 + 40 + 40 + 40 + 52 + 52 + 40)
    assert inspection.parameters_stored == inspection.parameters_unique == weights + biases
    assert (
        inspection.bytes == 4 * inspection.parameters_stored == sum(inspection.shards.values())
        and len(inspection.shards) > 1
    )


def test_a_tied_head_that_is_stored_counts_once(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "config.json") as config:
        config["tie_word_embeddings"] = True
    with edited(base / "model.safetensors") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    inspection = inspect(base)
    assert inspection.parameters_stored - inspection.parameters_unique == 97 * 40


def test_an_expanded_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    done = expand(base, Request("1-2", variant="adapt", collaborative_layers="2"), tmp_path / "expanded")
    inspection = inspect(done.path)
    assert inspection.expanded is not None and inspection.family == "llama"
    assert (inspection.expanded.base_name, inspection.expanded.verified) == ("base", None)
    (added,) = inspection.expanded.expansions.values()
    assert (added.variant, added.layers) == ("adapt", (1, 2))
    assert (added.collaborative_layers, added.collaborative_groups) == ((2,), ("attn",))
    assert (added.up_width, added.up_kv_heads, added.up_inner_width) == (8, 1, 8)
    assert sum(added.parameters_by_block.values()) == done.plan.costs.parameters_added
    assert added.parameters_by_block["w12"] == 8 * (80 + 40 + 40) + 20 * 40
    assert added.steps == 0
    with edited(done.path / "surgery.json") as record:
        record["expansions"]["default"]["training"] = [{"steps": 3}, {"steps": 4}]
    expanded = inspect(done.path).expanded
    assert expanded is not None and expanded.expansions["default"].steps == 7
    verify(done.path, probes=None, required=("recoverable",))
    assert inspect(done.path).expanded.verified.startswith("passed 20")  # type: ignore[union-attr]


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: not found\. Give a model folder or a Hub id"):
        inspect(tmp_path / "nowhere")
    base = save_tiny(tmp_path / "base", "llama")
    (base / "config.json").write_text('{"model_type": "t5"}')
    assert problems(inspect, base, error=UnsupportedFamilyError) == [
        Problem("model-type-not-causal", "config.json", model_type="t5")
    ]
