"""The fused form computes what the blocks compute, in as few products as a stock model."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from scale_surgery import Request, expand
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.modeling.expanded_fused import FusedLinear
from scale_surgery.progress import no_track
from scale_surgery.surgery.fused import write_fused
from scale_surgery.surgery.record import read_manifest
from tests.conftest import REQUESTS, load, shake
from tests.each import FEW, WAYS, mostly
from tests.tiny import FAMILIES

# a sum in another order; the tiny models' logits are of size 1
CLOSE = {"rtol": 0, "atol": 1e-4}
# paths part in layer 1, above a preservation layer; layer 2 was not chosen
DEEP = Request("0-1", variant="adapt", collaborative_layers="1", init_w22="random")
MADE = REQUESTS | {"deep": DEEP}
ROUTERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "posterior": {"router": "posterior", "prior": (0.5, 0.5), "switch_rate": 0.05},
    "cosine": {"router": "cosine", "threshold": 0.9},
    "strict": {"router": "cosine", "threshold": 0.9, "strict": True},
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def twins_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """A shaken expanded model and its fused form; a tied head stays as it is."""

    @functools.cache
    def make(family: str, request: str, tied: bool) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("fused")
        path = shake(expand(base_of(family, "float32", tied), MADE[request], folder / family).path)
        write_fused(open_checkpoint(path), read_manifest(path), folder, no_track)
        return load(path), load(folder)

    return make


def prompts() -> list[dict[str, torch.Tensor]]:
    """A single token, a text, and a batch that is padded on the left."""
    ids = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return [{"input_ids": ids[:1, :1]}, {"input_ids": ids[1:]}, {"input_ids": ids * mask, "attention_mask": mask}]


KEPT = list(zip(FEW, ("preserve", "adapt", "deep", "adapt_without_up_stream"), 2 * ("posterior", "alone"), strict=True))


@pytest.mark.parametrize(
    ("family", "request_name", "router"), mostly(product(FAMILIES, MADE, ROUTERS), KEPT.__contains__)
)
@pytest.mark.parametrize("tied", mostly((False, True), lambda tied: not tied))
def test_fused_computes_what_the_blocks_compute(
    twins_of: Callable[..., tuple[Any, Any]], family: str, request_name: str, router: str, tied: bool
) -> None:
    model, fused = twins_of(family, request_name, tied)
    for own in (model, fused):
        own.set_expansion(["default"] if router != "alone" else "default", **ROUTERS[router])
    with torch.no_grad():
        for prompt in prompts():
            torch.testing.assert_close(fused(**prompt).logits, model(**prompt).logits, **CLOSE)
            for one, other in zip(fused.path_logits(**prompt), model.path_logits(**prompt), strict=True):
                torch.testing.assert_close(one, other, **CLOSE)
    prompt = prompts()[-1]
    assert torch.equal(fused.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY))
    if router != "alone":
        for one, other in zip(fused.score_tokens(**prompt), model.score_tokens(**prompt), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


class Products(TorchFunctionMode):
    """Counts products with a weight, and what else a forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


def calls_of(model: Any) -> Counter[str]:
    """What one forward calls."""
    with torch.no_grad(), Products() as mode:
        model(torch.arange(3, 20)[None])
    return mode.counts


@pytest.mark.parametrize("family", mostly(WAYS, FEW.__contains__))
def test_a_linear_is_one_product_and_heads_attend_at_once(
    base_of: Callable[..., Path], twins_of: Callable[..., tuple[Any, Any]], family: str
) -> None:
    twins = twins_of(family, "adapt", False)
    for model in twins:
        model.set_expansion("default")
    blocks, fused = map(calls_of, twins)
    base = calls_of(load(base_of(family)))
    for name in ("linear", "addmm", "scaled_dot_product_attention", "silu", "gelu", "matmul"):
        assert fused[name] == base[name], name
    assert blocks["linear"] > base["linear"]


@pytest.mark.parametrize("family", mostly(WAYS, ("phi3", "gpt2").__contains__))
def test_nothing_of_the_blocks_reaches_the_base_beside_its_expansion(
    twins_of: Callable[..., tuple[Any, Any]], family: str
) -> None:
    """The base's path reads of each matrix the rows and columns of W alone."""
    fused = copy.deepcopy(twins_of(family, "adapt", True)[1])
    fused.set_expansion(["default"])
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        base, expanded = fused.path_logits(ids)
        for module in fused.modules():
            if isinstance(module, FusedLinear):
                first = module.rows().split(module.widths())
                for place, rows in enumerate(first):
                    rows[:, -module.expansions["default"].up_in :] = float("nan")
                    if place % 2:
                        rows[:] = float("nan")
        other, spoiled = fused.path_logits(ids)
    assert torch.equal(base, other) and spoiled.isnan().all() and not torch.equal(base, expanded)
