"""Tensors of a base that its class does not load: they keep their bytes, take no part, and hide no damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from scale_surgery import (
    Request,
    RunOptions,
    adopt,
    apply,
    expand,
    extract,
    inspect,
    load_expansion,
    merge,
    plan,
    strip,
    verify,
)
from scale_surgery.deriving.base import paths_not_loaded
from scale_surgery.errors import CheckpointError
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.stored_names import Reading, TensorPlace
from tests.conftest import digests, edited, refused, shake
from tests.each import mostly
from tests.tiny import save_tiny

ADAPT = Request("2", variant="adapt", collaborate="both", up_width=0, up_kv_heads=1)
Tensors = dict[str, torch.Tensor]


def value_head(tensors: Tensors) -> Tensors:
    return {"v_head.summary.weight": torch.ones(1, 40), "v_head.summary.bias": torch.ones(1)}


def cache_scales(tensors: Tensors) -> Tensors:
    return {f"model.layers.{layer}.self_attn.{name}_scale": torch.ones(()) for layer in range(3) for name in "kv"}


def prediction_layer(tensors: Tensors) -> Tensors:
    """Numbered beyond the last, as DeepSeek V3 and GLM 4.5 store it."""
    last = {name.replace(".2.", ".3."): tensor.clone() for name, tensor in tensors.items() if ".layers.2." in name}
    return {**last, "model.layers.3.eh_proj.weight": torch.ones(40, 80)}


def tower(tensors: Tensors) -> Tensors:
    return {
        "vision_tower.patch.weight": torch.ones(3),
        "score.weight": torch.ones(2, 40),
        "lm_head.scale": torch.ones(1),
    }


KINDS: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "value head": (value_head, ("v_head",)),
    "scales": (cache_scales, tuple(sorted(cache_scales({})))),
    "prediction layer": (prediction_layer, ("model.layers.3",)),
    "tower": (tower, ("lm_head.scale", "score", "vision_tower")),
}


@pytest.fixture
def base(tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        folder = save_tiny(tmp_path / "base", "llama")
        with edited(folder / "model.safetensors") as tensors:
            tensors.update(KINDS[kind][0](tensors))
        return folder

    return make


@pytest.mark.parametrize("kind", mostly(KINDS, "value head".__eq__))
def test_they_are_said_and_let_through_by_every_command(base, tmp_path, kind):
    folder, paths = base(kind), KINDS[kind][1]
    inspected, planned = inspect(folder), plan(folder, ADAPT)
    assert inspected.not_loaded == planned.facts.not_loaded == paths
    assert inspected.sizes.layers == 3 and planned.layers == (2,)
    made = expand(folder, ADAPT, tmp_path / "wide")
    assert inspected.remarks == made.warnings and "that LlamaForCausalLM does not load: " in made.warnings[0]
    assert paths[0] in made.warnings[0]
    assert verify(made.path).passed
    for auto in (AutoModelForCausalLM, AutoModel):
        auto.from_pretrained(made.path)
    # trained, and what comes after
    trained = shake(made.path)
    assert verify(trained).passed
    fused = merge(trained, tmp_path / "fused", to="fused").path
    assert verify(fused, folder).passed
    before, again = digests(trained), digests(merge(fused, tmp_path / "blocks", to="blocks").path)
    assert {name: again[name] for name in before if name != "surgery.json"} == {
        name: digest for name, digest in before.items() if name != "surgery.json"
    }
    stock = merge(trained, tmp_path / "stock", to="stock").path
    kept = set(KINDS[kind][0](load_file(folder / "model.safetensors")))
    assert kept <= set(load_file(stock / "model.safetensors"))
    for path in (folder, stock, trained):
        with loaded_whole(path, path.name):
            pass
    assert digests(strip(trained, tmp_path / "stripped").path) == digests(folder)
    extracted = extract(trained, tmp_path / "extract").path
    assert verify(apply(extracted, tmp_path / "applied", base=folder).path).passed
    load_expansion(folder, extracted)
    assert verify(expand(trained, Request("0", name="second"), tmp_path / "two").path).passed


@pytest.mark.parametrize("kind", mostly(KINDS, ("scales", "tower").__contains__))
def test_a_trainer_saves_none_of_them(base, tmp_path, kind):
    made = shake(expand(base(kind), ADAPT, tmp_path / "wide").path)
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(tmp_path / "saved")
    adopted = adopt(tmp_path / "saved", made, tmp_path / "adopted").path
    assert verify(adopted).passed
    AutoModelForCausalLM.from_pretrained(adopted)


@pytest.mark.parametrize("kind", ["scales", "prediction layer"])
def test_beside_copied_layers(base, tmp_path, kind):
    made = expand(base(kind), Request("0,2", method="depth"), tmp_path / "deep")
    assert verify(made.path).passed
    assert not any("scale" in tensor.name for tensor in made.plan.tensors)
    model, info = AutoModelForCausalLM.from_pretrained(made.path, output_loading_info=True)
    assert len(model.model.layers) == 5 and not info["missing_keys"]
    # five layers, and behind them the one that is not loaded
    assert all(name.startswith("model.layers.5.") or "scale" in name for name in info["unexpected_keys"])


def renamed(tensors: Tensors, name: str, other: str) -> None:
    tensors[other] = tensors.pop(name)


@pytest.mark.parametrize(
    ("other", "unexpected"),
    [
        ("v_head.summary.w12", False),
        ("v_head.expansions.default.w12", True),
        ("model.layers.2.mlp.w12", True),
    ],
)
def test_a_renamed_tensor_of_an_expansion_never_passes(base, tmp_path, other, unexpected):
    made = expand(base("value head"), ADAPT, tmp_path / "wide").path
    (shard,) = made.glob("expansion-*.safetensors")
    name = next(name for name in load_file(shard) if name.endswith("o_proj.expansions.default.w12"))
    with edited(shard) as tensors, edited(made / "model.safetensors.index.json") as index:
        renamed(tensors, name, other)
        renamed(index["weight_map"], name, other)
    with pytest.raises(ValueError, match=rf"{name} is missing") as caught:
        AutoModelForCausalLM.from_pretrained(made)
    assert (f"{other} is unexpected" in str(caught.value)) == unexpected
    assert not verify(made).passed


def test_what_is_not_the_base_s_is_refused_and_not_verified(base, tmp_path):
    made = expand(base("value head"), ADAPT, tmp_path / "wide").path
    with edited(made / "config.json") as config:
        assert config["scale_surgery"]["base"].pop("not_loaded") == ["v_head"]
    with pytest.raises(ValueError, match=r"v_head\.summary\.bias is unexpected, v_head\.summary\.weight is unexpected"):
        AutoModelForCausalLM.from_pretrained(made)
    result = verify(made, run=RunOptions(trust_remote_code=True), record=False)
    assert not result.passed and result.numbers is not None
    assert result.numbers.load_problems == (
        "v_head.summary.bias: unexpected on load.",
        "v_head.summary.weight: unexpected on load.",
    )
    with pytest.raises(CheckpointError, match=r"v_head\.summary\.bias: unexpected on load"), loaded_whole(made, "wide"):
        pass


def test_a_base_without_them_says_nothing(tmp_path):
    folder = save_tiny(tmp_path / "base", "llama")
    made = expand(folder, ADAPT, tmp_path / "wide")
    assert inspect(folder).not_loaded == made.warnings == ()
    with edited(made.path / "config.json") as config:
        assert "not_loaded" not in config["scale_surgery"]["base"]


def test_what_a_class_passes_over_itself_is_no_reason_to_say_anything(tmp_path):
    folder = save_tiny(tmp_path / "base", "gpt2")
    with edited(folder / "model.safetensors") as tensors:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    assert inspect(folder).not_loaded == ()
    assert verify(expand(folder, Request("1"), tmp_path / "wide").path).passed


def paths(names: dict[str, str], tensors: set[str], *, is_quantised: bool = False) -> tuple[str, ...]:
    places = {name: TensorPlace(inside, None, inside) for name, inside in names.items()}
    return paths_not_loaded(Reading((), "model", tensors), places, (r"(^|\.)(?:old)$",), is_quantised=is_quantised)


def test_paths_are_the_shortest_that_no_loaded_tensor_shares():
    same = {name: name for name in ("a.b.w", "a.b.x", "a.c.d.y", "a.c.d.z", "lone", "a.old")}
    assert paths(same, {"a.b.w"}) == ("a.b.x", "a.c", "lone")
    # of another name in memory
    assert paths({"disk.w": "model.w", "disk.more.x": "model.more.x"}, {"model.w"}) == ("disk.more", "model.more")
    # what a quantiser stores of a tensor is loaded
    parts = {name: name for name in ("e.gate_up_proj_blocks", "e.gate.weight_scale_inv", "e.k_scale", "e.gate.weight")}
    known = {"e.gate_up_proj", "e.gate.weight"}
    assert paths(parts, known, is_quantised=True) == ("e.k_scale",)
    assert paths(parts, known) == ("e.gate.weight_scale_inv", "e.gate_up_proj_blocks", "e.k_scale")


def test_a_bias_that_is_not_loaded_is_no_reason_for_one_beside_it(tmp_path):
    folder = save_tiny(tmp_path / "base", "llama", attention_bias=False, mlp_bias=False)
    with edited(folder / "model.safetensors") as tensors:
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.ones(40)
        # of one layer alone, which is no damage
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(52)
    made = expand(folder, ADAPT, tmp_path / "wide")
    assert "model.layers.1.mlp.up_proj.bias" in inspect(folder).not_loaded
    assert not any(tensor.block == "up_bias" for tensor in made.plan.tensors)
    assert verify(made.path).passed
    AutoModelForCausalLM.from_pretrained(made.path)
    # the control: where config.json has biases, they are there, and one that lacks is named
    other = save_tiny(tmp_path / "biased", "llama")
    assert any(tensor.block == "up_bias" for tensor in plan(other, ADAPT).tensors)
    with edited(other / "model.safetensors") as tensors:
        del tensors["model.layers.1.mlp.up_proj.bias"]
    with refused("bias-missing", "model.layers.1.mlp.up_proj.bias"):
        plan(other, ADAPT)
