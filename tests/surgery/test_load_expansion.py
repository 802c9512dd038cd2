"""load_expansion: on a model's own weights in memory, what from_pretrained gives of the folder, bit for bit."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.load_expansion import load_expansion
from scale_surgery.surgery.route import route_export
from tests.conftest import load, problems, refused, shake
from tests.each import each_shape
from tests.families import FAMILIES
from tests.modeling.test_training_modes import enable_checkpointing
from tests.routed import prompts, random_ids, trio_of  # noqa: F401
from tests.tiny import save_tiny

SHAPES = ((2, 9), (1, 1))


def trained(folder: Path, target: Path) -> Path:
    """A copy of an expanded folder whose expansion has moved, as after any training."""
    return shake(Path(shutil.copytree(folder, target)))


def state_of(model: Any) -> dict[str, tuple]:
    return {name: (each.dtype, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()}


def assert_same(actual: Any, expected: Any) -> None:
    """Compare two models: outputs on prompts, what trains, dtypes, buffers, generation."""
    for prompt in prompts(SHAPES):
        assert torch.equal(actual(**prompt).logits, expected(**prompt).logits)
    assert state_of(actual) == state_of(expected)
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers.pop(name)) for name, buffer in actual.named_buffers()) and not buffers
    configs = [model.config.to_dict() | {"_name_or_path": None} for model in (actual, expected)]
    assert configs[0] == configs[1]
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.fixture
def pair(pair_of, tmp_path) -> tuple[Any, Path, Path]:
    """A loaded base, an expanded folder of it that has learned, and the extract of that."""
    made = pair_of("llama", "adapt")
    folder = trained(made.path, tmp_path / "trained")
    return load(made.base_path), folder, extract(folder, tmp_path / "extract").path


@each_shape
def test_it_is_what_the_folder_gives(trio_of, tmp_path, family):  # noqa: F811
    """Tied and not, two dtypes, routed, trained; the base stays as it was, also where the expansion trains on."""
    tied = sorted(FAMILIES).index(family) % 2 == 0
    trio = trio_of(family, "adapt", dtype="bfloat16" if tied else "float32", tied=tied)
    folder = trained(trio.path, tmp_path / "routed")
    base, ids = load(trio.base_path), random_ids(2, 9)
    for parameter in list(base.parameters())[::2]:
        parameter.requires_grad_(False)
    before, outputs = state_of(base), base(ids).logits
    model = load_expansion(base, extract(folder, tmp_path / "extract").path)
    assert_same(model, load(folder))
    assert not model.training and model.is_routing_enabled
    assert not torch.equal(model(ids).logits, outputs), "the negative control: the expansion speaks"
    with model.expansion_disabled():
        assert torch.equal(model(ids).logits, outputs)
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    frozen = {parameter.data_ptr() for parameter in model.parameters() if not parameter.requires_grad}
    assert frozen == shared, "not a copy"
    output = model(ids, labels=ids)
    output.loss.backward()
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1).step()
    assert not torch.equal(model(ids).logits, output.logits)
    assert state_of(base) == before and torch.equal(base(ids).logits, outputs)


def test_it_goes_on_as_the_base_was_set(pair):
    base, folder, extracted = pair
    base.generation_config.max_new_tokens = 7
    model, expected = load_expansion(base.train(), extracted), load(folder)
    assert model.training and model.generation_config.max_new_tokens == 7
    assert model.generation_config is not base.generation_config
    generated = model.eval().generate(random_ids(2, 5), do_sample=False)
    assert torch.equal(generated, expected.generate(random_ids(2, 5), do_sample=False, max_new_tokens=7))


def test_a_model_from_a_folder_takes_up_one_more(pair, tmp_path):
    """Also one that routes: its router weighed other paths, and goes."""
    base, folder, extracted = pair
    host, alone = load(route_export(folder, tmp_path / "routed").path), load(folder)
    assert host.is_routing_enabled
    assert load_expansion(host, extracted, name="again") is host
    assert "router" not in host.config.scale_surgery
    assert host.expansions == ["default", "again"] and host.active_expansion == "again"
    for prompt in prompts(SHAPES):
        for name, model in (("default", alone), ("again", alone), (None, base)):
            with host.use_expansion(name):
                assert torch.equal(host(**prompt).logits, model(**prompt).logits)
    changed = load(folder)
    with torch.no_grad():
        changed.model.norm.weight[3] += 1e-3
    with refused("base-differs-load", "model", CheckpointError):
        load_expansion(changed, extracted, name="again")


@pytest.mark.parametrize("way", ["before", "after", "copied"])
def test_checkpointing_repeats_the_forward_of_the_expansion_that_ran(pair: Any, tmp_path: Path, way: str) -> None:
    """Switched on before the expansion was loaded, after it, or in a copy; backward runs behind the choice."""

    def gradients(way: str) -> dict[str, torch.Tensor]:
        base, folder, piece = pair
        base = deepcopy(base).train()
        if way == "before":
            enable_checkpointing(base, None)
        model = load_expansion(base, piece, name="one")
        other = extract(shake(Path(shutil.copytree(folder, tmp_path / way / "other"))), tmp_path / way / "piece").path
        load_expansion(model, other, name="two")
        model.set_expansion("two")
        if way in ("after", "copied"):
            enable_checkpointing(model, None)
        model = deepcopy(model) if way == "copied" else model
        ids = random_ids(2, 9)
        with model.train().use_expansion("one"):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}

    wanted, found = gradients("without"), gradients(way)
    assert found.keys() == wanted.keys() and any(".one." in name for name in wanted)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_the_compiled_forward_of_the_base_is_not_that_of_the_expanded_model(pair: Any) -> None:
    """After generation with a cache of a fixed size on a GPU, a model keeps one."""
    base, _, piece = pair
    base._compiled_call, base._last_compile_config = base.__call__, None
    model = load_expansion(base, piece)
    assert not {"_compiled_call", "_last_compile_config"} & vars(model).keys() and "_compiled_call" in vars(base)


@torch.no_grad()
def test_where_a_header_ends_decides_no_bit(pair, tmp_path):
    """Tensors are read from where they lie in a file; single rows may round by that, so they are moved."""
    _, folder, _ = pair
    shifted = Path(shutil.copytree(folder, tmp_path / "shifted"))
    for shard in shifted.glob("expansion-*.safetensors"):
        content = shard.read_bytes()
        length = int.from_bytes(content[:8], "little")
        shard.write_bytes(
            (length + 24).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 24 + content[8 + length :]
        )
    first, second = load(folder), load(shifted)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    logits, wanted = (model.generate(random_ids(1, 5), **options).logits for model in (second, first))
    assert all(map(torch.equal, logits, wanted))
    for model in (first, second):
        blocks = [parameter for name, parameter in model.named_parameters() if ".expansions." in name]
        assert blocks and all(block.data_ptr() % 64 == 0 for block in blocks)


@pytest.mark.parametrize("family", ("gpt2", "gpt_neox"))
def test_names_on_disk_need_not_be_those_in_memory(tmp_path, family):
    """A base that was saved without its head has names without a prefix; the head of Pythia has two names."""
    model = load(save_tiny(tmp_path / "whole", family, tie_word_embeddings=family == "gpt2"))
    (model.transformer if family == "gpt2" else model).save_pretrained(tmp_path / "base")
    expanded = expand(tmp_path / "base", Request("0"), tmp_path / "expanded").path
    extracted = extract(trained(expanded, tmp_path / "trained"), tmp_path / "extract").path
    assert_same(load_expansion(load(tmp_path / "base"), extracted), load(tmp_path / "trained"))


@pytest.mark.parametrize("own_dtype", (None, "float32"))
def test_a_folder_may_be_cast(base_of, tmp_path, own_dtype):
    """New tensors that were asked for in float32 stay so."""
    base = base_of("llama")
    expanded = expand(base, Request("0-1", dtype=own_dtype), tmp_path / "expanded").path
    extracted = extract(trained(expanded, tmp_path / "trained"), tmp_path / "extract").path
    model = load_expansion(base, extracted, dtype=torch.bfloat16).eval()
    assert_same(model, load(tmp_path / "trained", dtype=torch.bfloat16))
    assert model.model.layers[0].self_attn.q_proj.expansions.default.w21.dtype == (
        torch.float32 if own_dtype else torch.bfloat16
    )


def test_rotary_frequencies_reach_as_far_as_the_base_s(tmp_path):
    """Some models stretch them while they read a long text, and take them back for a short one."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    base = load(save_tiny(tmp_path / "base", "llama", max_position_embeddings=16, rope_parameters=rope))
    expanded = expand(tmp_path / "base", Request("0"), tmp_path / "expanded").path
    extracted = extract(expanded, tmp_path / "extract").path
    ids = random_ids(1, 40)
    before = base(ids[:, :8]).logits
    base(ids)
    model = load_expansion(base, extracted)
    assert torch.equal(model(ids[:, :8]).logits, before)
    assert torch.equal(model(ids).logits, base(ids).logits)


def test_a_base_that_was_cast_or_trained_is_refused_unless_it_is_not_checked(pair, pair_of, tmp_path):
    base, folder, extracted = pair
    cast = load(pair_of("llama").base_path, dtype=torch.bfloat16)
    with torch.no_grad():
        base.model.norm.weight[3] += 1e-3
        base.lm_head.weight.mul_(2)
    base.save_pretrained(tmp_path / "changed")
    dtypes = {"cast": 51, "count": 51, "tensor": "lm_head.weight", "dtype": "BF16", "stored": "F32"}
    assert problems(load_expansion, cast, extracted) == [Problem("base-cast", "model", **dtypes)]
    details = [Problem("base-tensor-bytes", name) for name in ("lm_head.weight", "model.norm.weight")]
    counts = {"count": 2, "total": 51, "base": pair_of("llama").base_path.name}
    for title, source in (("model", base), (tmp_path / "changed", tmp_path / "changed")):
        differ = Problem("base-differs-load", title, *details, **counts)
        assert problems(load_expansion, source, extracted, error=CheckpointError) == [differ]
    assert_same(load_expansion(cast, extracted, check=False), load(folder, dtype=torch.bfloat16))
    for given in (base, tmp_path / "changed"):
        with (model := load_expansion(given, extracted, check=False).eval()).expansion_disabled():
            assert torch.equal(model(random_ids(1, 5)).logits, base(random_ids(1, 5)).logits)


def test_what_cannot_carry_the_expansion_is_refused(pair, pair_of):
    base, folder, extracted = pair
    how = {"dtype": torch.bfloat16, "device_map": "cpu", "revision": "v1"}
    assert problems(load_expansion, base, extracted, **how, error=PlanError) == [
        Problem("loading-option", "dtype"),
        Problem("loading-option", "device_map"),
        Problem("loading-option", "revision"),
    ]
    with torch.device("meta"):
        empty = type(base)(base.config)
    smaller = type(base)(transformers.LlamaConfig(**base.config.to_dict() | {"intermediate_size": 60}))
    others = [pair_of("gpt2").base, load(pair_of("gpt2").path)]
    for given, options, message in (
        (load(folder), {}, r"^name: default is an expansion of this model already, expected a new name"),
        *(
            (model, {"name": "more"}, rf"model: is a {type(model).__name__}, expected LlamaForCausalLM or LlamaModel")
            for model in others
        ),
        (empty, {}, r"^model: some of its weights are offloaded, .* over more devices\.$"),
        (smaller, {"check": False}, r"down_proj\.weight: shape \(40, 60\), expected \(40, 52\)\."),
    ):
        with pytest.raises((CheckpointError, PlanError), match=message):
            load_expansion(given, extracted, **options)
    with refused("extract-without-record", folder, CheckpointError):
        load_expansion(base, folder)
    (shard,) = extracted.glob("expansion-*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with refused("extract-file-changed", shard.name, CheckpointError):
        load_expansion(base, extracted, check=False)
    shard.write_bytes(whole)
    base.config.quantization_config = {"quant_method": "any"}
    with pytest.raises(CheckpointError, match=r"^model: is quantised by any, expected bitsandbytes or torchao, or the"):
        load_expansion(base, extracted)
