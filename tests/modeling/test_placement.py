"""No operation of a model sees tensors of two devices: seen without a GPU, on the device that has shapes and no values.

There an operation that is given a tensor of the CPU too fails, as it does on a GPU. What asks for a value is answered
with one; values decide nothing here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from scale_surgery.running.loading import loaded
from scale_surgery.running.options import RunOptions
from tests import routed
from tests.composed import LLAMA
from tests.conftest import Pair, load, shake
from tests.each import FEW, mostly
from tests.routed import Trio, padded, random_ids
from tests.tiny import FAMILIES

trio_of = routed.trio_of
VALUES = {"item": 1, "__bool__": True, "__int__": 1}


@pytest.fixture(autouse=True)
def values_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str, value: Any) -> None:
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self: value if self.is_meta else real(self))

    for name, value in VALUES.items():
        answer(name, value)
    # torch knows of no such thing for that device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def run_everywhere(model: Any) -> None:
    """A training step; a prompt into a cache, and a token after it; a batch with padding; both paths of a router."""
    model = model.to("meta")
    ids = torch.ones((2, 9), dtype=torch.long, device="meta")
    model(ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        cache = model(ids, attention_mask=torch.ones_like(ids)).cache
        model(ids[:, :1], cache=cache)
        if model.is_routing_enabled:
            model.score_tokens(ids)
            model.path_logits(ids)


# adapt, preserve, without an up stream, copies of inner features that train beside theirs, or alone
MADE = (("law",), ("medicine",), ("without_up_stream",), ("checkers",), ("chess",))


ROUTERS: dict[str, dict[str, Any] | None] = {
    "posterior": {"router": "posterior"},
    "none": None,
    "cosine": {"router": "cosine"},
    "strict": {"router": "cosine", "strict": True},
}


# each of the first four beside one of the others
@pytest.mark.parametrize(
    ("family", "names", "router"),
    mostly(product(FAMILIES, MADE, ROUTERS), list(zip(FEW, MADE, ROUTERS, strict=False)).__contains__),
)
def test_no_tensor_stays_behind(made_of: Callable[..., Any], family: str, names: tuple[str], router: str) -> None:
    model = made_of(family, names).composed()
    if (settings := ROUTERS[router]) is not None:
        model.set_expansion(list(names), **settings)
    run_everywhere(model)


def move(hook_args: Any, device: str) -> Any:
    """What a module is called with on another device; a cache stays where its layers are."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, hook_args)


def test_paths_side_by_side_on_two_devices(made_of: Callable[..., Any]) -> None:
    """The last layers, the last norm and the head lie elsewhere, as accelerate would have it."""
    model = made_of("llama", LLAMA).composed()
    for module in (*model.model.layers[1:], model.model.norm, model.lm_head):
        module.to("meta")
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (move(args, "meta"), move(kwargs, "meta")), with_kwargs=True, prepend=True
        )
    ids = torch.ones((2, 9), dtype=torch.long)
    for names in ("law", None, list(LLAMA)):
        model.set_expansion(names)
        with torch.no_grad():
            cache = model(ids, attention_mask=torch.ones_like(ids)).cache
            assert model(ids[:, :1], cache=cache).logits.is_meta
    model.score_tokens(ids)
    assert all(logits.is_meta for logits in model.path_logits(ids))
    assert model(ids, expansion_names=["law", None]).logits.is_meta


@pytest.mark.parametrize(
    ("family", "request_name"),
    mostly((("llama", "adapt"), ("gemma2", "preserve"), ("gpt2", "deep")), lambda case: case[0] == "llama"),
)
@torch.no_grad()
def test_a_model_is_streamed_from_its_files(
    trio_of: Callable[..., Trio], tmp_path: Path, family: str, request_name: str
) -> None:
    """Module by module where it is larger than the memory that it gets: the same bits, routed, alone, and disabled."""
    path = shake(Path(shutil.copytree(trio_of(family, request_name).path, tmp_path / "shaken")))
    whole, prompt = load(path), padded(random_ids(2, 7), (0, 3))
    with loaded(path, RunOptions(memory_bytes=60_000)) as (model, problems):
        assert not problems and any(parameter.is_meta for parameter in model.parameters())
        for choice in (["default"], "default", None):
            with model.use_expansion(choice), whole.use_expansion(choice):
                assert torch.equal(model(**prompt).logits, whole(**prompt).logits)
                options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
                assert torch.equal(model.generate(**prompt, **options), whole.generate(**prompt, **options))
                assert all(map(torch.equal, model.path_logits(**prompt), whole.path_logits(**prompt)))
        rows = {"expansion_names": ["default", None]}
        assert torch.equal(model(**prompt, **rows).logits, whole(**prompt, **rows).logits)
        assert not torch.equal(*whole.path_logits(**prompt)), "the control"


def test_a_tensor_left_on_the_cpu_is_noticed(pair_of: Callable[..., Pair]) -> None:
    model = pair_of("llama").load()
    head, lost = model.get_output_embeddings(), torch.zeros(97)
    head.register_forward_hook(lambda module, args, logits: logits + lost)
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        run_everywhere(model)
