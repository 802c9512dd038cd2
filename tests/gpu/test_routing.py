"""Two paths and a router on the device: each path bit for bit its model, bounded forgetting, generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from scale_surgery import Probes, RunOptions, expand, route_export, strip, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.planning.request import Request
from tests import routed
from tests.conftest import digests
from tests.modeling import test_promises_of_paths
from tests.modeling.test_promises_of_paths import COUNTS, Models, broken
from tests.modeling.test_routed_generation import assert_same_generation
from tests.modeling.test_routing import check_bounded_forgetting, check_paths, read_what_w12_wrote, unequal_paths
from tests.routed import Trio, padded, random_ids
from tests.tiny import FAMILIES

trio_of, models_of = routed.trio_of, test_promises_of_paths.models_of
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

each_family = pytest.mark.parametrize("family", FAMILIES)
each_dtype = pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
each_routing = pytest.mark.parametrize("routing", ("posterior", "cosine", "strict"))


@each_dtype
@each_routing
@pytest.mark.parametrize("request_name", ("adapt", "deep", "preserve"))
@each_family
def test_each_path_is_its_model_bit_for_bit(
    trio_of: Callable[..., Trio], device: str, family: str, request_name: str, routing: str, dtype: str
) -> None:
    if request_name == "preserve" and routing != "posterior":
        pytest.skip("preserve has one set of hidden states: one router is enough")
    check_paths(trio_of(family, request_name, routing, dtype), device_map=device)


@pytest.mark.parametrize("family", ("llama", "phi3", "gpt2"))
def test_each_path_with_eager_attention(trio_of: Callable[..., Trio], device: str, family: str) -> None:
    check_paths(trio_of(family), device_map=device, attn_implementation="eager")


def test_a_base_path_that_reads_what_w12_wrote_is_noticed(
    trio_of: Callable[..., Trio], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = trio_of("llama", "adapt", "cosine").trained(device_map=device)
    assert unequal_paths(models) == []
    read_what_w12_wrote(monkeypatch)
    assert {name.split()[0] for name in unequal_paths(models)} == {"preserve"}


@pytest.mark.parametrize("request_name", ("adapt", "deep", "preserve"))
@each_family
def test_bounded_forgetting(trio_of: Callable[..., Trio], device: str, family: str, request_name: str) -> None:
    check_bounded_forgetting(trio_of(family, request_name), device_map=device)


@pytest.mark.parametrize("count", COUNTS)
@each_dtype
@each_family
def test_the_promises_of_several_expansions(
    models_of: Callable[..., Models], device: str, family: str, dtype: str, count: int
) -> None:
    assert broken(models_of(family, count, dtype, device)) == set()


@each_routing
@each_dtype
@each_family
@torch.no_grad()
def test_each_path_is_its_model_at_every_step(
    trio_of: Callable[..., Trio], device: str, family: str, dtype: str, routing: str
) -> None:
    """With a KV cache, bit for bit."""
    base, expanded, model = trio_of(family, "adapt", routing, dtype).trained(device_map=device)
    caches: list[Any] = [None, None, DynamicCache(config=model.config)]
    ids, start = random_ids(3, 20).to(device), 0
    for size in (13, 1, 1, 4, 1):
        now, start = ids[:, start : start + size], start + size
        old = base(now, past_key_values=caches[0], use_cache=True)
        new = expanded(now, past_key_values=caches[1], use_cache=True)
        caches[:2] = old.past_key_values, new.past_key_values
        preserve, adapt = model.path_logits(now, past_key_values=caches[2])
        assert torch.equal(preserve, old.logits) and torch.equal(adapt, new.logits), size
        assert not torch.equal(old.logits, new.logits), "the control"


@each_routing
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
        found = model.generate(**prompt, **GREEDY, cache_implementation=cache, disable_compile=True)
        assert_same_generation(found, wanted)


@pytest.mark.parametrize("routing", (PosteriorRouter(switch_rate=0.0), CosineRouter(strict=True)), ids=str)
def test_a_trained_checkpoint_that_routes(tmp_path: Any, device: str, routing: Router) -> None:
    request = Request("2-3", variant="adapt", collaborate="both", init_w22="random")
    expanded = expand(
        SHIPPED_MODEL, replace(request, svd="exact"), tmp_path / "expanded", run=RunOptions(device=device)
    )
    path = route_export(expanded.path, tmp_path / "routed", routing).path
    result = verify(path, run=RunOptions(device=device), probes=Probes(new_tokens=4))
    assert result.passed and result.numbers is not None and result.numbers.base_logits_bit_equal
    strip(path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(SHIPPED_MODEL)
