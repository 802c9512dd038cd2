"""Tiny models with a router, each beside its base and its expansion, and what stands for any training of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from tests.conftest import load

# the ways in which two paths can pass through a model of three layers
REQUESTS = {
    # both paths part in the head alone
    "preserve": Request("1-2", init_w22="random"),
    # they part in layer 0, and layer 1 was not chosen
    "adapt": Request("0,2", variant="adapt", collaborate="both", init_w22="random"),
    # they part in layer 1, above a preservation layer; layer 2 was not chosen
    "deep": Request("0-1", variant="adapt", collaborative_layers="1", init_w22="random"),
    "without_up_stream": Request("1", variant="adapt", up_width=0, init_w22="random"),
    # a layer whose attention, or whose feed-forward network, was not widened
    "without_heads": Request("1-2", variant="adapt", up_width=60, up_kv_heads=0, collaborate="ffn", init_w22="random"),
    "without_inner": Request("0-1", variant="adapt", up_inner_width=0, init_w22="random"),
}
ROUTINGS = {
    "posterior": PosteriorRouter(switch_rate=0.05),
    "cosine": CosineRouter(threshold=0.9),
    "strict": CosineRouter(threshold=0.9, strict=True),
}


@dataclass(frozen=True)
class Trio:
    """A base model, its expansion and the same with a router, on disk."""

    base_path: Path
    expanded_path: Path
    path: Path

    def load(self, **options: Any) -> tuple[Any, Any, Any]:
        """Base, unrouted and routed model as they were made."""
        return load(self.base_path, **options), load(self.expanded_path, **options), load(self.path, **options)

    def trained(self, **options: Any) -> tuple[Any, Any, Any]:
        """The same after what stands for any training."""
        return load(self.base_path, **options), train(load(self.expanded_path, **options)), self.routed(**options)

    def routed(self, **options: Any) -> Any:
        """The routed model alone, trained; its threshold sends tokens to both sides."""
        model = train(load(self.path, **options))
        router = model.choice.router
        if isinstance(router, CosineRouter):
            prompt = {"input_ids": random_ids(4, 40, seed=2).to(model.device)}
            threshold = between(cosines_of(model, prompt)[:, :-1])
            put_router(model, CosineRouter(threshold, router.strict))
        return model


def put_router(model: Any, router: Router) -> None:
    """Let another router weigh what the model has chosen."""
    model.set_expansion(list(model.choice.names), **router.settings)


def head_features(model: Any, prompt: dict[str, Any]) -> torch.Tensor:
    """What the head reads: (paths, b, t, d + u), one for each base stream."""
    kept: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(**prompt)
    handle.remove()
    return kept[0].unflatten(0, (-1, len(prompt["input_ids"])))


@torch.no_grad()
def cosines_of(model: Any, prompt: dict[str, Any]) -> torch.Tensor:
    """Cosine of the logits of the first and the last base stream at each position, float64."""
    head = model.get_output_embeddings()
    features = head_features(model, prompt)[..., : head.weight.shape[1]].double()
    first, last = (features[place] @ head.weight.double().T for place in (0, -1))
    return (first * last).sum(-1) / (first.norm(dim=-1) * last.norm(dim=-1))


def between(cosines: torch.Tensor) -> float:
    """A threshold in the widest gap of the middle half: no cosine of these is rounded across it."""
    middle = cosines.flatten().sort().values[cosines.numel() // 4 : 3 * cosines.numel() // 4 + 2]
    gap = middle.diff().argmax()
    return float(middle[gap : gap + 2].mean())


def train(model: Any, seed: int = 1) -> Any:
    """Move every tensor that may train; equally in models with equal tensors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter))
    return model


def padded(ids: torch.Tensor, padding: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A prompt with so many tokens of padding before each row."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def random_ids(*shape: int, seed: int = 3) -> torch.Tensor:
    """Random tokens without padding, beginning or end."""
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def prompts(
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (1, 33), (3, 13), (2, 7)), device: torch.device | str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Random prompts of several shapes, the last two padded on the left."""
    yield from ({"input_ids": random_ids(*shape).to(device)} for shape in shapes)
    yield padded(random_ids(3, 13).to(device), (5, 2, 0))
    yield padded(random_ids(2, 7).to(device), (0, 3))


@pytest.fixture(scope="session")
def trio_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trio]:
    """Expand a tiny base model by one of REQUESTS and give it one of ROUTINGS."""

    @functools.cache
    def expanded_of(base: Path, request: str) -> Path:
        return expand(base, REQUESTS[request], tmp_path_factory.mktemp("expanded") / f"{base.name}_{request}").path

    @functools.cache
    def make(
        family: str, request: str = "adapt", routing: str = "posterior", dtype: str = "float32", tied: bool = False
    ) -> Trio:
        base = base_of(family, dtype, tied)
        expanded = expanded_of(base, request)
        target = tmp_path_factory.mktemp("routed") / f"{expanded.name}_{routing}"
        return Trio(base, expanded, route_export(expanded, target, ROUTINGS[routing]).path)

    return make
