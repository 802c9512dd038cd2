"""Expansions on bases that are quantised or spread over devices: the base stream is that of what was loaded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from safetensors.torch import load_file

from scale_surgery import CheckpointError, PlanError, Request, expand, extract, load_expansion
from tests.conftest import load, refused, shake
from tests.each import mostly
from tests.families import FAMILIES
from tests.routed import random_ids, trio_of  # noqa: F401

IDS = random_ids(2, 9)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """bitsandbytes says of each product that it casts."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def int8() -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def nf4() -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def kinds(*rarely: Callable[[], Any]) -> Any:
    """Run a test on every kind; some of them are slow repetitions."""
    values = mostly((nf4, int8, torchao), lambda kind: kind not in rarely)
    return pytest.mark.parametrize("kind", values, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def base(base_of: Callable[..., Path]) -> Path:
    return base_of("llama", "float32", False)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Expanded folders that have learned."""
    made = tmp_path_factory.mktemp("made")
    requests = {variant: Request("0-1", variant=variant, init_w22="random") for variant in ("preserve", "adapt")}
    return {name: shake(expand(base, request, made / name).path) for name, request in requests.items()}


@pytest.fixture(scope="module")
def extracts(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("extracts")
    return {name: extract(folder, made / name).path for name, folder in folders.items()}


def base_logits(model: Any) -> torch.Tensor:
    with model.expansion_disabled():
        return model(IDS).logits.detach()


def take_steps(model: Any) -> None:
    """Train all that trains, for two steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
        optimizer.step()


@kinds(torchao)
def test_the_base_is_the_quantised_one_bit_for_bit_before_and_after_training(base, extracts, kind):
    alone = load(base, quantization_config=kind())(IDS).logits
    quantised = load(base, quantization_config=kind())
    models = {name: load_expansion(quantised, extracts[name]) for name in extracts}
    assert not torch.equal(alone, load(base)(IDS).logits), "the negative control: quantising changes numbers"
    for name, model in models.items():
        assert torch.equal(base_logits(model), alone)
        before = model(IDS).logits
        assert not torch.equal(before, alone), "the negative control: the expansion speaks"
        take_steps(model.train())
        assert not torch.equal(model.eval()(IDS).logits, before)
        assert torch.equal(base_logits(model), alone), name
    with torch.no_grad():
        # without gradients a quantiser may take other kernels
        assert torch.equal(base_logits(models["adapt"]), quantised(IDS).logits)
        width = quantised.config.hidden_size
        streams = models["preserve"].model(IDS).last_hidden_state
        assert torch.equal(streams[..., :width], quantised.model(IDS).last_hidden_state)
    assert torch.equal(quantised(IDS).logits, alone), "and the stock model stays usable"


@pytest.mark.slow
@pytest.mark.parametrize("make", (int8, nf4), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_a_quantised_base(trio_of, tmp_path, family, make):  # noqa: F811
    """Routed, with linears that are fused or stored the other way round."""
    trio = trio_of(family, "adapt")
    alone = load(trio.base_path, quantization_config=make())(IDS).logits
    learned = extract(shake(shutil.copytree(trio.path, tmp_path / "routed")), tmp_path / "extract").path
    model = load_expansion(trio.base_path, learned, quantization_config=make())
    assert torch.equal(base_logits(model.eval()), alone)
    with model.routing_disabled():
        assert model(IDS).logits.shape == alone.shape
        take_steps(model.train())
    assert torch.equal(base_logits(model.eval()), alone)


@kinds(int8, torchao)
def test_expansions_by_name_share_one_quantised_base(base, extracts, kind):
    quantised = load(base, quantization_config=kind())
    composed = quantised
    for name, path in extracts.items():
        composed = load_expansion(composed, path, name=name)
    for name, path in extracts.items():
        with composed.use_expansion(name):
            assert torch.equal(composed(IDS).logits, load_expansion(quantised, path)(IDS).logits)
    with composed.use_expansion(None):
        assert torch.equal(composed(IDS).logits, quantised(IDS).logits)
    weights = {id(module.weight) for module in quantised.modules() if type(module).__name__.startswith("Linear")}
    shared = {id(parameter) for parameter in composed.parameters()} & weights
    # the head is not quantised: its parameter is a view of the same memory
    assert len(weights - shared) == 1


def test_what_a_quantised_model_can_be_compared_by(base, extracts, tmp_path):
    """Names, shapes, and the bytes of what is not quantised; of a folder, all bytes before it is quantised."""
    model = load_expansion(base, extracts["adapt"], quantization_config=nf4())
    assert model.is_base_quantised and type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Params4bit"
    quantised = load(base, quantization_config=nf4())
    with torch.no_grad():
        quantised.model.norm.weight[3] += 1e-3
    with pytest.raises(
        CheckpointError, match=r"(?s)^model: 1 of 30 tensors differ from .*model\.norm\.weight: its byte"
    ):
        load_expansion(quantised, extracts["adapt"])
    assert load_expansion(quantised, extracts["adapt"], check=False).is_base_quantised
    variant = load(base)
    with torch.no_grad():
        variant.model.layers[2].mlp.up_proj.weight[3] += 1e-3
    variant.save_pretrained(tmp_path / "other")
    with refused("base-differs-load", tmp_path / "other", CheckpointError):
        load_expansion(tmp_path / "other", extracts["adapt"], quantization_config=nf4())
    wider = transformers.LlamaConfig(**variant.config.to_dict() | {"intermediate_size": 60})
    type(variant)(wider).save_pretrained(tmp_path / "wider")
    with refused("base-unfit", "model", CheckpointError):
        load_expansion(load(tmp_path / "wider", quantization_config=nf4()), extracts["adapt"], check=False)


def test_what_was_learned_on_a_quantised_base_is_saved_without_it(base, folders, extracts, tmp_path):
    model = load_expansion(base, extracts["adapt"], quantization_config=nf4())
    take_steps(model)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert saved.keys() == trained.keys() and all(torch.equal(saved[name], trained[name]) for name in saved)
    with pytest.raises(ValueError, match=r"is missing"):
        load(tmp_path / "saved")
    whole = load(folders["adapt"])
    assert not whole.load_state_dict(saved, strict=False).unexpected_keys
    whole.save_pretrained(tmp_path / "whole")
    name = "model.layers.0.mlp.up_proj.expansions.default.w21"
    assert torch.equal(load(tmp_path / "whole").get_parameter(name), trained[name])


def test_a_quantised_base_that_cannot_carry_an_expansion_is_refused(base, extracts, tmp_path):
    quantised = load(base, quantization_config=nf4())
    grown = extract(expand(base, Request("0", method="grow"), tmp_path / "grown").path, tmp_path / "extract").path
    with refused("grown-on-quantised", "extract", PlanError):
        load_expansion(quantised, grown)
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["none"])
    with refused("module-quantised", "model: lm_head", CheckpointError):
        load_expansion(load(base, quantization_config=four_bits), extracts["adapt"])
    # what bitsandbytes does to a model that runs on some CPUs
    quantised.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with refused("weights-packed", "model", CheckpointError):
        load_expansion(quantised, extracts["adapt"])


@pytest.fixture
def spread(base: Path) -> Any:
    """A base with hooks that carry what it computes from device to device, here all the same one."""
    model = load(base)
    layers = {f"model.layers.{index}": "cpu" for index in range(len(model.model.layers))}
    outside = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return dispatch_model(model, {**outside, **layers}, force_hooks=True)


def test_a_base_that_is_spread_over_devices_trains_and_keeps_its_hooks(spread, extracts):
    expanded, expected = load_expansion(spread, extracts["adapt"]), spread(IDS).logits
    take_steps(expanded)
    assert torch.equal(base_logits(expanded), expected)
    hooked = [
        {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")} for model in (expanded, spread)
    ]
    assert {name for name in hooked[0] if ".expansions" not in name} == hooked[1]


def watch_hook(model: Any) -> list[int]:
    """A list that grows with each call of the hook of a module."""
    hook = model.model.layers[1].mlp.up_proj._hf_hook
    seen, before = [], hook.pre_forward
    hook.pre_forward = lambda *args, **kwargs: seen.append(1) or before(*args, **kwargs)
    return seen


def test_expansions_by_name_on_a_base_that_is_spread_over_devices(spread, base, folders, extracts):
    expanded, whole, length = spread, load(base), {"max_new_tokens": 4, "do_sample": False}
    expected = {None: load(base), **{name: load(folder) for name, folder in folders.items()}}
    for name, extracted in extracts.items():
        expanded, whole = (load_expansion(model, extracted, name=name) for model in (expanded, whole))
    for name, alone in expected.items():
        seen = watch_hook(expanded)
        with expanded.use_expansion(name):
            assert torch.equal(expanded(IDS).logits, alone(IDS).logits)
            assert seen, "hooks of modules that were expanded run"
            assert torch.equal(expanded.generate(IDS, **length), alone.generate(IDS, **length))
    for model in (expanded, whole):
        model.set_expansion(list(extracts))
    assert torch.equal(expanded(IDS).logits, whole(IDS).logits), "side by side, too"
    paths = (alone(IDS, use_cache=False).logits for alone in expected.values())
    assert all(map(torch.equal, expanded.path_logits(IDS), paths))
    assert torch.equal(expanded.generate(IDS, **length), whole.generate(IDS, **length))
    assert expanded.hf_device_map == spread.hf_device_map
    assert torch.equal(spread(IDS).logits, expected[None](IDS).logits), "the base stays as it is"


def test_an_offloaded_base_is_refused(base, extracts, tmp_path):
    places = {"model": "cpu", "lm_head": "disk"}
    offloaded = load(base, device_map=places, offload_folder=tmp_path)
    with refused("model-offloaded", "model", CheckpointError):
        load_expansion(offloaded, extracts["adapt"])
