"""What a spoiled surgery.json says of its plan is refused when it is read, by every command, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scale_surgery import CheckpointError, Request, Routing, expand, extract, report, route_export, strip, verify
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from tests.conftest import shake

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def adapt(base_of, tmp_path) -> Path:
    return expand(base_of("llama"), Request("1-2", variant="adapt", collaborate="both"), tmp_path / "adapt").path


@pytest.fixture
def grown(base_of, tmp_path) -> Path:
    return expand(base_of("llama"), Request("1-2", method="grow"), tmp_path / "grown").path


def edit(path: Path, change: Change) -> Path:
    content = json.loads((path / "surgery.json").read_text())
    change(content)
    (path / "surgery.json").write_text(json.dumps(content))
    return path


def tensor(content: dict[str, Any], ending: str = ".w12", beginning: str = "") -> dict[str, Any]:
    tensors = content["expansions"]["default"]["plan"]["tensors"]
    return next(own for own in tensors if own["name"].endswith(ending) and own["name"].startswith(beginning))


def refuse(path: Path, reason: str) -> None:
    readers = {
        "verify": lambda: verify(path, probes=None),
        "strip": lambda: strip(path, path.with_name("out")),
        "report": lambda: report(path, files_only=True),
        "extract": lambda: extract(path, path.with_name("out")),
    }
    for name, read in readers.items():
        with pytest.raises(CheckpointError) as raised:
            read()
        assert str(raised.value).startswith(f"{path / 'surgery.json'}: is incomplete ("), name
        assert reason in str(raised.value)
    assert not path.with_name("out").exists()


SPOILED: dict[str, tuple[Change, str]] = {
    "init of W12": (lambda content: tensor(content).update(init="svd"), "init 'svd', expected 'zero'"),
    "init of the head": (
        lambda content: tensor(content, ".up_weight", "lm_head").update(init="svd"),
        "expected 'zero'",
    ),
    "init": (lambda content: tensor(content).update(init=["zero"]), ".init is ['zero'], expected one of svd"),
    "dtype": (lambda content: tensor(content).update(dtype="foo"), "dtype 'foo'"),
    "layer": (lambda content: tensor(content).update(layer="x"), ".layer is 'x', expected a whole number"),
    "layer out of range": (lambda content: tensor(content).update(layer=99), "layer 99"),
    "block": (lambda content: tensor(content).update(block=7), ".block is 7, expected a text"),
    "shape": (lambda content: tensor(content).update(shape="44"), ".shape is '44', expected a list"),
    "shard": (lambda content: tensor(content).update(shard="x.safetensors"), "shard 'x.safetensors'"),
    "no specs": (
        lambda content: content["expansions"]["default"]["plan"].update(specs={}),
        "plan.specs.expanded_layers is missing",
    ),
    "other layers": (lambda content: content["expansions"]["default"]["plan"].update(layers=[0]), "layer 1"),
    "method": (
        lambda content: content["expansions"]["default"]["plan"]["request"].update(method="grow"),
        "which is none of grow",
    ),
    "a list as method": (
        lambda content: content["expansions"]["default"]["plan"]["request"].update(method=["scale"]),
        "method is ['scale']",
    ),
    "variant": (
        lambda content: content["expansions"]["default"]["plan"]["request"].update(variant="depth"),
        "which is none of scale",
    ),
    "family": (
        lambda content: content["expansions"]["default"]["plan"].update(family="foo"),
        "plan.family is 'foo', expected 'llama'",
    ),
    "sizes": (
        lambda content: content["expansions"]["default"]["plan"]["sizes"].update(hidden=17),
        "plan.sizes.hidden is 17, expected 40",
    ),
    "heads": (
        lambda content: content["expansions"]["default"]["plan"]["sizes"].update(key_value_heads=4),
        "key_value_heads is 4, expected 2",
    ),
    "width": (
        lambda content: content["expansions"]["default"]["plan"]["widths"].update(up_width="4"),
        "plan.widths.up_width is '4'",
    ),
    "base_name": (lambda content: content.update(base_name=["x"]), "base_name is ['x'], expected a text"),
    "left_out": (lambda content: content.update(left_out=[3]), "left_out[0] is 3, expected a text"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_it_is_refused_when_it_is_read(adapt: Path, name: str) -> None:
    change, reason = SPOILED[name]
    refuse(edit(adapt, change), reason)


def test_a_grown_model_cannot_pass_for_another(grown: Path) -> None:
    def as_scale(content: dict[str, Any]) -> None:
        content["expansions"]["default"]["plan"]["request"].update(method="scale", variant="adapt", copies=None)

    refuse(edit(grown, as_scale), "init 'copy', expected 'zero'")


def test_copies_are_copies(grown: Path) -> None:
    refuse(edit(grown, lambda content: tensor(content).update(init="zero")), "init 'zero', expected 'copy'")


def test_a_router_s_numbers_are_in_their_ranges(adapt: Path, tmp_path: Path) -> None:
    routed = route_export(adapt, tmp_path / "routed", Routing()).path
    refuse(
        edit(routed, lambda content: content["routing"].update(prior=0)),
        "routing.prior is 0, expected a probability",
    )


def test_trained_tensors_do_not_pass_for_untrained_ones(adapt: Path) -> None:
    """Hashes that were written anew make the tensors look untouched; zeros are looked for all the same."""
    shake(adapt)
    checkpoint = open_checkpoint(adapt)

    def hash_again(content: dict[str, Any]) -> None:
        record = content["expansions"]["default"]
        record["tensors"] = hash_tensors(checkpoint, list(record["tensors"]))
        for own in content["expansions"]["default"]["plan"]["tensors"]:
            own["block"] = "w21"

    found = verify(edit(adapt, hash_again), probes=None)
    (promise,) = [promise for promise in found.promises if promise.name == "output_at_init"]
    assert not found.passed
    assert promise.holds is False
    assert "15 tensors of W12 and the head's up part left zero" in promise.evidence


def test_a_w12_that_no_plan_knows_is_looked_at(base_of, tmp_path) -> None:
    wide = expand(base_of("llama"), Request("1-2"), tmp_path / "wide").path
    (shard,) = wide.glob("expansion-*.safetensors")
    name = "model.layers.1.self_attn.q_proj.expansions.default.w12"
    save_file(load_file(shard) | {name: torch.ones(40, 10)}, shard, metadata={"format": "pt"})
    index = json.loads((wide / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = shard.name
    (wide / "model.safetensors.index.json").write_text(json.dumps(index))
    (promise,) = [own for own in verify(wide, probes=None).promises if own.name == "output_at_init"]
    assert promise.holds is False
    assert any(problem.startswith(f"{name}: 400 of 400 entries are not zero") for problem in promise.problems)
