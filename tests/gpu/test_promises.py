"""The promises on the device, bit for bit: output_at_init, base_stream_always, recoverable, with negative controls.

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

from scale_surgery import Request, RunOptions, expand, strip, verify
from scale_surgery.biographies import SHIPPED_MODEL
from tests.conftest import REQUESTS, Pair, digests, load
from tests.modeling.test_promises import base_bytes, check_base_stream, prompts, train, unequal
from tests.tiny import FAMILIES, save_tiny

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


def placed(pair: Pair, device: str, **options: Any) -> Pair:
    """Both models loaded once more, on a device."""
    models = {"base": pair.base_path, "expanded": pair.path}
    loaded = {name: load(path, device_map=device, **options) for name, path in models.items()}
    assert all(model.device.type == torch.device(device).type for model in loaded.values())
    return replace(pair, **loaded)


@each_dtype
@each_family
@pytest.mark.parametrize("request_name", REQUESTS)
def test_output_at_init(pair_of: Callable[..., Pair], device: str, family: str, request_name: str, dtype: str) -> None:
    pair = placed(pair_of(family, request_name, dtype), device)
    assert pair.expanded.dtype == pair.base.dtype == getattr(torch, dtype)
    assert unequal(pair.base, pair.expanded) == unequal(pair.base, pair.expanded, use_cache=False) == []
    assert base_bytes(pair.base, pair.expanded) == []


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


@each_dtype
@each_family
def test_output_at_init_in_generation(pair_of: Callable[..., Pair], device: str, family: str, dtype: str) -> None:
    """Greedy, with beams and sampled; with a KV cache and without; a batch padded on the left."""
    pair = placed(pair_of(family, "adapt", dtype), device)
    usual = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    for prompt in (prompts(device)[3], prompts(device)[-2]):
        for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}):
            for use_cache in (True, False):
                found = []
                for model in (pair.base, pair.expanded):
                    torch.manual_seed(0)
                    found.append(model.generate(**prompt, **usual, **how, use_cache=use_cache))
                assert torch.equal(found[0].sequences, found[1].sequences), (how, use_cache)
                assert all(map(torch.equal, found[0].logits, found[1].logits)), (how, use_cache)


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
def test_base_stream_always(pair_of: Callable[..., Pair], device: str, family: str, dtype: str) -> None:
    """Also where training spoils the new tensors, as float16 without a scaler does."""
    pair = placed(pair_of(family, "preserve", dtype), device)
    model = pair.load(device_map=device)
    assert train(model), "gradients reached it"
    assert base_bytes(pair.base, model) == []
    assert unequal(pair.base, model) == [tuple(prompt["input_ids"].shape) for prompt in prompts()], "it learned"
    for prompt in prompts(device):
        check_base_stream(pair, model, prompt)
    with model.expansion_disabled():
        assert unequal(pair.base, model) == []


@each_family
def test_a_trained_w12_is_noticed(pair_of: Callable[..., Pair], device: str, family: str) -> None:
    """The negative control of base_stream_always: adapt changes what it says that it changes, and no base byte."""
    pair = placed(pair_of(family, "adapt"), device)
    model = pair.load(device_map=device)
    train(model)
    assert base_bytes(pair.base, model) == []
    with pytest.raises(AssertionError, match="base stream after layer"):
        check_base_stream(replace(pair, expanded=model), model, prompts(device)[0])
    with model.expansion_disabled():
        assert unequal(pair.base, model) == []


def test_one_bit_of_the_base_is_noticed(pair_of: Callable[..., Pair], device: str) -> None:
    pair = placed(pair_of("llama"), device)
    weight = pair.expanded.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert base_bytes(pair.base, pair.expanded) == ["model.layers.1.mlp.down_proj.weight"]
    assert unequal(pair.base, pair.expanded)


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
        wanted, found = (
            model.generate(**prompt, max_new_tokens=40, do_sample=False, use_cache=use_cache) for model in models
        )
        assert torch.equal(wanted, found)
    result = verify(expanded, real, run=RunOptions(device=device))
    assert result.passed and result.numbers is not None and result.numbers.is_bit_equal
    assert result.numbers.generation_equal and result.numbers.uncached_equal
