"""A head that config.json says is tied and that is not, and a quantization_config beside floats: compared, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scale_surgery import Request, apply, expand, extract, inspect, merge, plan, strip, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.running.loading import loaded
from tests.command import run
from tests.conftest import digests, edited, problems, refusal, refused
from tests.each import mostly
from tests.tiny import save_tiny

EMBEDDING, HEAD, NEW_ROWS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.expansions.default.new_rows"
TOKENS = NewTokens(("Zaragoza", "Quetzal"))


def stored_twice(folder: Path, other: float) -> Path:
    """The shipped model, tied by its config, with a head beside the embedding."""
    folder.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with edited(folder / "model.safetensors") as tensors:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += other
    return folder


def new_rows(path: Path) -> dict[str, torch.Tensor]:
    (shard,) = path.glob("expansion-*.safetensors")
    return {name: tensor for name, tensor in load_file(shard).items() if name.endswith("new_rows")}


def test_a_head_with_other_values_counts_as_its_own(tmp_path):
    base = stored_twice(tmp_path / "base", 1.0)
    # more than one row, so that rows of the head are known from rows of the embedding
    with edited(base / "model.safetensors") as tensors:
        tensors[HEAD] += 1
    # the reference: what transformers loads
    model = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    inspected, planned = inspect(base), plan(base, Request("3", new_tokens=TOKENS))
    assert inspected.has_own_head and planned.facts.has_own_head
    assert not inspected.sizes.is_tied and not planned.sizes.is_tied
    assert inspected.parameters_unique == inspected.parameters_stored
    made = expand(base, Request("3", variant="adapt", new_tokens=TOKENS), tmp_path / "wide")
    wide_inspected = inspect(made.path)
    assert wide_inspected.has_own_head and not wide_inspected.sizes.is_tied
    (remark,) = inspected.remarks
    assert made.warnings == (remark,)
    assert remark.startswith("config.json says that the head is tied to the embedding, and lm_head.weight has other")
    rows = new_rows(made.path)
    # each is the mean of rows of its own matrix, which differ by one
    (embedded,) = (tensor for name, tensor in rows.items() if name != NEW_ROWS)
    torch.testing.assert_close(rows[NEW_ROWS], embedded + 1)
    assert verify(made.path).passed
    assert digests(strip(made.path, tmp_path / "stripped").path) == digests(base)
    applied = apply(extract(made.path, tmp_path / "extract").path, tmp_path / "applied", base=base).path
    assert verify(applied).passed
    for to in ("fused", "stock"):
        wide = expand(base, Request("3", variant="adapt", up_width=0, up_kv_heads=2), tmp_path / to).path
        merged = merge(wide, tmp_path / f"{to}-merged", to=to)  # type: ignore[arg-type]
        assert merged.drift is not None and merged.drift.holds
        if to == "fused":
            assert verify(merged.path, base).passed


def test_a_plan_from_headers_does_not_decide_whether_a_head_is_tied(tmp_path):
    """Of a repository that is not here yet, `plan` sees names and shapes, as of another base of the same shapes."""
    same, other = stored_twice(tmp_path / "same", 0.0), stored_twice(tmp_path / "other", 1.0)
    planned = plan(same, Request("3", variant="adapt", new_tokens=TOKENS))
    made = expand(other, planned, tmp_path / "wide")
    assert planned.sizes.is_tied and not made.plan.sizes.is_tied and made.plan.facts.has_own_head
    assert NEW_ROWS in new_rows(made.path) and made.warnings
    assert NEW_ROWS not in new_rows(expand(same, planned, tmp_path / "tied").path), "the control"


def test_the_same_head_stored_twice_stays_tied_without_a_word(tmp_path):
    base = stored_twice(tmp_path / "base", 0.0)
    inspected = inspect(base)
    assert inspected.sizes.is_tied and not inspected.has_own_head and inspected.remarks == ()
    assert inspected.parameters_unique == inspected.parameters_stored - 1152 * 128
    made = expand(base, Request("3", new_tokens=TOKENS), tmp_path / "wide")
    assert made.warnings == () and NEW_ROWS not in new_rows(made.path)
    assert verify(made.path).passed


def test_the_last_byte_decides_and_another_dtype_is_another_head(tmp_path):
    assert inspect(stored_twice(tmp_path / "last", 1e-3)).has_own_head
    half = stored_twice(tmp_path / "half", 0.0)
    with edited(half / "model.safetensors") as tensors:
        tensors[HEAD] = tensors[HEAD].bfloat16()
    assert inspect(half).has_own_head


def test_commands_say_it(tmp_path):
    base = stored_twice(tmp_path / "base", 1.0)
    words = "its own tensor, although config.json ties it to the embedding; the values differ"
    for command in (("inspect", base), ("plan", base, "--layers", "3"), ("expand", base, "--layers", "3", "--dry-run")):
        assert words in " ".join(run(*command).output.split())


@pytest.mark.parametrize("tied", [False, True])
def test_an_untied_head_is_as_config_json_says(tmp_path, tied):
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=False)
    with edited(base / "model.safetensors") as tensors:
        if tied:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        else:
            del tensors[HEAD]
    if tied:
        assert not inspect(base).sizes.is_tied and inspect(base).remarks == ()
        assert verify(expand(base, Request("2"), tmp_path / "wide").path).passed
    else:
        missing = Problem("weight-missing", "lm_head.weight", shape=(97, 40))
        assert problems(expand, base, Request("2"), tmp_path / "wide") == [missing]


SETTINGS = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "gguf": {"quant_method": "gguf"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "": {"load_in_8bit": True},
}


@pytest.mark.parametrize("method", mostly(SETTINGS, ("fp8", "").__contains__))
def test_a_quantization_config_that_is_left_over_is_named(tmp_path, method):
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "config.json") as config:
        config["quantization_config"] = SETTINGS[method]
    said = Problem("quantisation-left-over", "config.json: quantization_config")
    assert inspect(base).quantisation == str(said)
    assert problems(plan, base, Request("2"), error=CheckpointError) == [said.within(base)]
    assert problems(expand, base, Request("2"), tmp_path / "wide", error=CheckpointError) == [said.within(base)]
    assert not (tmp_path / "wide").exists()
    with refused(said.code, f"base: {said.where}", CheckpointError), loaded(base):
        pass
    # the control: what is to be done helps
    with edited(base / "config.json") as config:
        del config["quantization_config"]
    assert inspect(base).quantisation is None
    assert verify(expand(base, Request("2"), tmp_path / "wide").path).passed


def test_masks_of_old_files_do_not_make_a_base_quantised(tmp_path):
    base = save_tiny(tmp_path / "base", "gpt2")
    with edited(base / "model.safetensors") as tensors, edited(base / "config.json") as config:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        config["quantization_config"] = SETTINGS["bitsandbytes"]
    assert inspect(base).quantisation == str(Problem("quantisation-left-over", "config.json: quantization_config"))


def test_weights_that_are_quantised_are_said_to_be(tmp_path):
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "model.safetensors") as tensors, edited(base / "config.json") as config:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        config["quantization_config"] = SETTINGS["fp8"]
    assert inspect(base).quantisation == str(Problem("base-quantised", schemes=["fp8", "F8_E4M3"]))


@pytest.mark.parametrize("said", ["fp8", ["fp8"], False])
def test_one_that_is_no_object_is_named(tmp_path, said):
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "config.json") as config:
        config["quantization_config"] = said
    wanted = f"config.json: quantization_config is {said!r}, expected an object. Delete it if the weights are floats."
    assert refusal(inspect, base) == refusal(expand, base, Request("2"), tmp_path / "wide") == wanted


def test_null_says_nothing(tmp_path):
    base = save_tiny(tmp_path / "base", "llama")
    (base / "config.json").write_text(
        json.dumps({**json.loads((base / "config.json").read_text()), "quantization_config": None})
    )
    assert inspect(base).quantisation is None
