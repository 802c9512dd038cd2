"""The promises on the device, bit for bit: the matrix of forms, each kernel, training, routers; negative controls.

Both models run on the same device with the settings that a user has: no deterministic algorithms, no workspace of
cuBLAS, TF32 as torch has it. Equal operations on equal shapes take equal kernels, and those give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_2_available

from scale_surgery import Probes, Request, RunOptions, expand, route_export, strip, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.planning.new_tokens import NewTokens
from tests import routed
from tests.conftest import REQUESTS, Pair, digests, load
from tests.modeling import test_promises
from tests.modeling.test_generation import GREEDY, assert_same_generation
from tests.modeling.test_promises import (
    MANY,
    Form,
    Models,
    base_bytes,
    broken,
    check_base_stream,
    never_parted,
    prompts,
    train,
    unequal,
)
from tests.routed import Trio, padded, random_ids
from tests.tiny import FAMILIES, save_tiny

trio_of, models_of = routed.trio_of, test_promises.models_of
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = {
    "eager": ("eager", None),
    "flash_attention_2": ("flash_attention_2", None),
    "math": ("sdpa", SDPBackend.MATH),
    "efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
    "flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("sdpa", SDPBackend.CUDNN_ATTENTION),
}
# plain, head norms, sliding windows, heads fused one by one, by section, Conv1D; gemma2 has eager attention alone
KINDS = ("llama", "qwen3", "gemma3_text", "gpt_neox", "phi3", "gpt2")
# what a decomposition in float64 loses by another order of its sums
EXACT = 1e-6

each_family = pytest.mark.parametrize("family", FAMILIES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
@each_family
@pytest.mark.parametrize("attention", ("sdpa", "eager"))
@pytest.mark.parametrize("names", (("law",), ("deep",), ("without_up_stream",), MANY[:2], MANY), ids="+".join)
def test_nothing_is_broken(
    models_of: Callable[..., Models], device: str, family: str, names: tuple[str, ...], dtype: str, attention: str
) -> None:
    if attention == "eager" and names[0] != "deep":
        pytest.skip("how attention runs has nothing to do with the number of paths")
    assert broken(models_of(Form(family, names, dtype, attention), device)) == set()


def placed(pair: Pair, device: str, **options: Any) -> Pair:
    """Both models loaded once more, on a device."""
    models = {"base": pair.base_path, "expanded": pair.path}
    loaded = {name: load(path, device_map=device, **options) for name, path in models.items()}
    assert all(model.device.type == torch.device(device).type for model in loaded.values())
    return replace(pair, **loaded)


def heads_of_32(family: str, groups: int) -> dict[str, int]:
    """Sizes that every kernel takes."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4}
    if family not in ("gpt_neox", "gpt2"):
        sizes["num_key_value_heads"] = 4 // groups
    return sizes if family in ("gpt_neox", "gpt2", "phi3") else sizes | {"head_dim": 32}


@torch.no_grad()
def answered(model: Any, prompt: dict[str, Any], backend: SDPBackend | None) -> torch.Tensor | None:
    """Logits by one kernel; None where it does not take such a prompt."""
    try:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return model(**prompt).logits
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        return None


@pytest.mark.filterwarnings("ignore")  # torch warns of each kernel why it does not take a prompt
@pytest.mark.parametrize("kernel", KERNELS)
@each_dtype
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("family", KINDS)
def test_output_at_init_by_every_kernel(
    tmp_path: Path, device: str, family: str, groups: int, dtype: str, kernel: str
) -> None:
    name, backend = KERNELS[kernel]
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash_attention_2: the package flash-attn is not installed, or there is no GPU for it")
    base = save_tiny(tmp_path / "base", family, dtype=getattr(torch, dtype), **heads_of_32(family, groups))
    expanded = expand(base, REQUESTS["adapt"], tmp_path / "expanded").path
    models = [load(path, attn_implementation=name, device_map=device) for path in (base, expanded)]
    pairs = [[answered(model, prompt, backend) for model in models] for prompt in prompts(device)]
    taken = [(old, new) for old, new in pairs if old is not None]
    if not taken:
        pytest.skip(f"torch has no {kernel} kernel for {dtype} on {device}")
    assert all(new is not None and torch.equal(old, new) for old, new in taken)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products of float32 matrices with 10 bits of mantissa, as users set it for speed."""
    before = torch.get_float32_matmul_precision()
    assert before == "highest", "what torch has unless it is asked"
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@each_family
def test_output_at_init_in_tf32(pair_of: Callable[..., Pair], device: str, tf32: None, family: str) -> None:
    pair = placed(pair_of(family, "adapt"), device)
    assert unequal(pair.base, pair.expanded) == unequal(pair.base, pair.expanded, use_cache=False) == []


@each_dtype
@each_family
def test_an_optimiser_moves_the_up_stream_alone(
    pair_of: Callable[..., Pair], device: str, family: str, dtype: str
) -> None:
    """Also where training spoils the new tensors, as float16 without a scaler does; where W12 trains it is noticed."""
    pair = placed(pair_of(family, "preserve", dtype), device)
    model = pair.load(device_map=device)
    assert train(model), "gradients reached it"
    check_base_stream(pair, model)
    with model.expansion_disabled():
        assert unequal(pair.base, model) == []
    adapted = placed(pair_of(family, "adapt", dtype), device)
    train(model := adapted.load(device_map=device))
    assert base_bytes(adapted.base, model) == []
    with pytest.raises(AssertionError, match="base stream after layer"):
        check_base_stream(adapted, model)


@pytest.mark.parametrize("spoiled", ("one bit of the base", "one base stream for all"))
def test_what_is_spoiled_is_noticed(models_of: Callable[..., Models], device: str, spoiled: str) -> None:
    models = models_of(Form("llama", MANY[:2]), device)
    models.trained.known_paths.clear()
    if spoiled == "one base stream for all":
        with never_parted():
            broken_promises = broken(models)
    else:
        weight = models.trained.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.data = weight.data.clone()
        weight.data.view(torch.int32)[0, 0] ^= 1 << 22
        broken_promises = broken(models)
        assert "recoverable" in broken_promises
    assert {"base_stream_always", "paths_as_alone: None"} <= broken_promises


@pytest.mark.parametrize("request_name", ("preserve", "adapt"))
@pytest.mark.parametrize("family", KINDS)
def test_expanded_on_the_device_and_on_the_cpu(tmp_path: Path, device: str, family: str, request_name: str) -> None:
    """Where decompositions run changes roundings of the new tensors, and no promise."""
    base = save_tiny(tmp_path / "base", family)
    request = replace(REQUESTS[request_name], svd="exact")
    made = {
        place: expand(base, request, tmp_path / place, run=RunOptions(device=place)).path for place in {"cpu", device}
    }
    tensors = [load_file(path / "expansion-default-00001-of-00001.safetensors") for path in (made["cpu"], made[device])]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, atol=EXACT, rtol=EXACT, msg=name)
    for path in made.values():
        for place in {"cpu", device}:
            models = [load(folder, device_map=place) for folder in (base, path)]
            assert unequal(*models) == []
        strip(path, tmp_path / f"{path.name}-stripped")
        assert digests(tmp_path / f"{path.name}-stripped") == digests(base)


def test_new_tokens_beside_an_up_stream_from_the_embedding(tmp_path: Path, device: str) -> None:
    request = Request("all", new_tokens=NewTokens(("Zaragoza",)))
    wide = expand(SHIPPED_MODEL, request, tmp_path / "wide", run=RunOptions(device=device)).path
    assert verify(wide, run=RunOptions(device=device)).passed


@pytest.fixture(params=("shipped", "stories"))
def real(request: pytest.FixtureRequest) -> Path:
    """The small trained models that there are."""
    return SHIPPED_MODEL if request.param == "shipped" else request.getfixturevalue("stories")


@pytest.mark.parametrize("variant", ("preserve", "adapt"))
@each_dtype
def test_a_trained_checkpoint(tmp_path: Path, device: str, real: Path, dtype: str, variant: str) -> None:
    expanded = expand(real, Request("last:2", variant=variant, init_w22="random"), tmp_path / "expanded").path
    models = [load(path, device_map=device, dtype=getattr(torch, dtype)) for path in (real, expanded)]
    assert unequal(*models) == unequal(*models, use_cache=False) == []
    prompt = {"input_ids": torch.tensor([[1]], device=device), "attention_mask": torch.ones(1, 1, device=device).long()}
    for use_cache in (True, False):
        wanted, generation = (
            model.generate(**prompt, max_new_tokens=40, do_sample=False, use_cache=use_cache) for model in models
        )
        assert torch.equal(wanted, generation)
    result = verify(expanded, real, run=RunOptions(device=device))
    assert result.passed and result.numbers is not None and result.numbers.is_bit_equal
    assert result.numbers.generation_equal and result.numbers.uncached_equal


@pytest.mark.parametrize("routing", (PosteriorRouter(switch_rate=0.0), CosineRouter(strict=True)), ids=str)
def test_a_trained_checkpoint_that_routes(tmp_path: Any, device: str, routing: Router) -> None:
    request = Request("2-3", variant="adapt", collaborate="both", init_w22="random", svd="exact")
    expanded = expand(SHIPPED_MODEL, request, tmp_path / "expanded", run=RunOptions(device=device))
    path = route_export(expanded.path, tmp_path / "routed", routing).path
    result = verify(path, run=RunOptions(device=device), probes=Probes(max_new_tokens=4))
    assert result.passed and result.numbers is not None and result.numbers.base_logits_bit_equal
    strip(path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(SHIPPED_MODEL)


@pytest.mark.parametrize("routing", ("posterior", "cosine", "strict"))
@each_family
def test_generation_with_and_without_a_cache(
    trio_of: Callable[..., Trio], device: str, family: str, routing: str
) -> None:
    model = trio_of(family, "adapt", routing).routed(device_map=device)
    prompt = padded(random_ids(2, 9).to(device), (0, 4))
    for options in (GREEDY, GREEDY | {"num_beams": 3}):
        cached = model.generate(**prompt, **options)
        assert_same_generation(cached, model.generate(**prompt, **options, use_cache=False))
    with model.routing_disabled():
        assert not torch.equal(model.generate(**prompt, **GREEDY).logits[-1], cached.logits[-1]), "the control"


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ("static", "offloaded"))
@pytest.mark.parametrize("family", ("llama", "gemma2", "gpt2"))
def test_generation_with_other_caches(trio_of: Callable[..., Trio], device: str, family: str, cache: str) -> None:
    """A static cache is compiled on a GPU unless that is switched off; an offloaded one needs a GPU."""
    if cache == "offloaded" and not device.startswith("cuda"):
        pytest.skip("an offloaded cache moves layers between a GPU and the CPU")
    prompt = padded(random_ids(2, 9).to(device), (0, 4))
    for model in trio_of(family).trained(device_map=device):
        wanted = model.generate(**prompt, **GREEDY)
        generation = model.generate(**prompt, **GREEDY, cache_implementation=cache, disable_compile=True)
        assert_same_generation(generation, wanted)
