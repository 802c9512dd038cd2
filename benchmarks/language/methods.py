"""The methods that benchmarks/language compares, as data: ways to make a model that learns, of a given base.

But for full fine-tuning all train about as many parameters as `freeze` does, the upper half of the layers: the rank of
adapters and the inner width of expansions are what comes nearest to that. What is called whole or wide trains about as
many as full fine-tuning: whole has more of them inside the MLPs, wide in the up stream. What is called double trains
half as many again, and its up stream is as wide as the base's. `gated` is what the preset one-path of `learn` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.biography.methods import adapted, deepened, expanded, frozen, whole
from benchmarks.language.base import Size
from benchmarks.language.rehearsing import own_samples
from benchmarks.protections import (
    between,
    knowledge_preserved,
    on_mlps,
    pulled,
    shielded,
    subspaced,
    without_intruders,
)
from scale_surgery import CosineRouter, PosteriorRouter, Request, plan
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.modeling.expanded_routers import Router


@dataclass(frozen=True)
class Method:
    """One way to learn.

    Attributes:
        name: What it is called in records, tables and figures.
        make: Makes the model from a folder and a seed; what requires a gradient is what trains.
        rate: Learning rate in the middle of the sweep.
        ends: What else is made of it when it has learned, by name: from the folder of the base, and the model.
    """

    name: str
    make: Callable[..., Any]
    rate: float
    ends: Mapping[str, Callable[[Path, Any], Any]] = field(default_factory=dict)


# an expansion without W12 has no two paths to compare by their cosine
POSTERIOR = {"posterior": PosteriorRouter(), "posterior 0.001": PosteriorRouter(switch_rate=0.001)}
ROUTERS = POSTERIOR | {"cosine": CosineRouter()}
ADAPT_BOTH = Request("all", variant="adapt", collaborate="both")


# of the way from the base to the model
SHARES_OF_THE_WAY = (0.25, 0.5, 0.75)
PULLS = (0.01, 0.1, 1.0)


def methods_for(base: Path, size: Size) -> tuple[Method, ...]:
    """The methods for a base, of matched sizes."""
    config = AutoConfig.from_pretrained(base)
    layers, half = config.num_hidden_layers, config.num_hidden_layers // 2
    all_of_it = sum(info.elements for info in open_checkpoint(base).tensors.values())
    budget = half * _of_layer(config)
    rank = round(budget / (layers * _of_rank(config)))
    upper = ",".join(map(str, range(1, layers, 2)))
    # an MLP is three quarters of a layer, so that more of them are copied
    grown = round(budget / _of_mlp(config))
    wide = partial(_wide, base, most=all_of_it, step=_group(config))
    double = replace(ADAPT_BOTH, up_width=config.hidden_size)
    scale: dict[str, tuple[Request, int, float, Mapping[str, Router]]] = {
        "preserve": (Request("all"), budget, 5e-3, POSTERIOR),
        "adapt attn": (Request("all", variant="adapt"), budget, 5e-3, ROUTERS),
        "adapt both": (ADAPT_BOTH, budget, 3e-3, ROUTERS),
        "preserve whole": (Request("all"), all_of_it, 5e-3, POSTERIOR),
        "adapt both whole": (ADAPT_BOTH, all_of_it, 3e-3, ROUTERS),
        "preserve wide": (wide(Request("all")), all_of_it, 5e-3, POSTERIOR),
        "adapt both wide": (wide(ADAPT_BOTH), all_of_it, 3e-3, ROUTERS),
        "adapt both double": (double, 3 * all_of_it // 2, 3e-3, ROUTERS),
        "gated double": (replace(double, variant="gated"), 3 * all_of_it // 2, 5e-3, {}),
    }
    samples = partial(own_samples, base, size)
    rank_of_mlps = round(budget / (layers * _of_mlp_rank(config)))
    return (
        Method("full", whole, 1e-3, _on_the_way(whole)),
        *(Method(f"full L2 {weight:g}", partial(pulled, weight=weight), 1e-3) for weight in PULLS),
        Method("SSU", partial(shielded, samples=samples), 1e-3),
        Method("OSF", subspaced, 1e-3),
        Method("freeze", partial(frozen, layers=layers - half), 1e-3),
        Method("LoRA", partial(adapted, start=True, rank=rank), 3e-3, {"intruders reduced": without_intruders}),
        Method("LoRA MLP", partial(on_mlps, rank=rank_of_mlps), 3e-3, {"intruders reduced": without_intruders}),
        Method("CorDA", partial(knowledge_preserved, rank=rank, samples=samples), 1e-3),
        Method("PiSSA", partial(adapted, start="pissa", rank=rank), 1e-3),
        Method("depth", partial(deepened, request=Request(upper, method="depth")), 1e-3),
        Method("grow-freeze", partial(expanded, request=Request(f"last:{grown}", method="grow")), 1e-3),
        *(
            expansion(name, partial(expanded, request=matched(base, request, most)), rate, routers)
            for name, (request, most, rate, routers) in scale.items()
        ),
        Method("gated", partial(expanded, request=replace(ADAPT_BOTH, variant="gated")), 2e-3),
    )


def _on_the_way(make: Callable[..., Any]) -> dict[str, Callable[[Path, Any], Any]]:
    return {f"{share:g} of the way": partial(between, share, make) for share in SHARES_OF_THE_WAY}


def expansion(name: str, make: Callable[..., Any], rate: float, routers: Mapping[str, Router]) -> Method:
    """Describe an expansion that can be routed when it has learned."""
    return Method(name, make, rate, {router: partial(_route, make, routing) for router, routing in routers.items()})


def _route(make: Callable[..., Any], routing: Router, base: Path, model: Any) -> Any:
    """The same model with a router."""
    routed = make(base, 0, routing=routing).to(model.device)
    routed.load_state_dict(model.state_dict())
    return routed


def matched(base: Path, request: Request, budget: int) -> Request:
    """Choose the inner width whose expansion has about as many parameters; they are linear in it."""
    width = 16
    few, more = (_added(base, replace(request, up_inner_width=inner_width)) for inner_width in (width, 2 * width))
    return replace(request, up_inner_width=max(8, 8 * round((width + (budget - few) * width / (more - few)) / 8)))


def _wide(base: Path, request: Request, most: int, step: int) -> Request:
    """Choose the widest up stream, in steps, that leaves a budget something for the MLPs."""
    width = step
    while _added(base, replace(request, up_width=width + step, up_inner_width=8)) <= most:
        width += step
    return replace(request, up_width=width)


def _added(base: Path, request: Request) -> int:
    return plan(base, request).costs.parameters_added


def _group(config: Any) -> int:
    """Features of the query heads that share a key/value head."""
    return int(config.head_dim * config.num_attention_heads // config.num_key_value_heads)


def _of_layer(config: Any) -> int:
    attention = 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    return attention + _of_mlp(config) + 2 * config.hidden_size


def _of_mlp(config: Any) -> int:
    return 3 * config.hidden_size * config.intermediate_size


def _of_rank(config: Any) -> int:
    """Parameters that one rank more adds to the adapters of a layer."""
    queries, keys = (config.head_dim * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    return 2 * (config.hidden_size + queries) + 2 * (config.hidden_size + keys) + _of_mlp_rank(config)


def _of_mlp_rank(config: Any) -> int:
    return 3 * (config.hidden_size + config.intermediate_size)
