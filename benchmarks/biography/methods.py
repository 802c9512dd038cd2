"""The methods that benchmarks/biography/compare.py compares: ways to train a base model on new text, as data.

Every method but full fine-tuning trains about as many parameters as freezing the lower half of the shipped model
does, 295,552. What was chosen for that: the rank of the adapters, the inner width of the expansions, and how many
layers are copied. Copies of whole matrices come in steps: grow-train, which trains base matrices beside its copies, has
327,680 in two layers, and would have half of it in one. A method that is added here needs a colour in
biography_figures.py, and nothing else.

A routed method is an expansion with a router. Routed at inference only, it trains as the same expansion does without
one, at the rate of that, and the router is on when it is scored. Trained routed, the loss is that of the routed output.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from scale_surgery import Request, expand, freeze_base
from scale_surgery.modeling.expanded_routers import ROUTERS, Router
from scale_surgery.surgery.route import route_export

FROZEN_LAYERS = 2
RANK = 36
UP_WIDTH = 32


@dataclass(frozen=True)
class Method:
    """One way to learn.

    Attributes:
        name: What it is called in records, table and figures.
        make: Makes the model from a base folder and a seed; what requires a gradient is what trains.
        rate: Learning rate that the sweep begins around.
        unrouted: What a routed method is called without its router; None for a method that does not route.
        trains_routed: Whether the loss of a routed method is that of the routed output.
    """

    name: str
    make: Callable[..., Any]
    rate: float
    unrouted: str | None = None
    trains_routed: bool = False

    @property
    def routes_late(self) -> bool:
        """Whether the router is on at inference only."""
        return self.unrouted is not None and not self.trains_routed


def whole(base: Path, seed: int) -> Any:
    """Load the base model in float32, all of it trainable."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def frozen(base: Path, seed: int, *, layers: int) -> Any:
    """Load the base model with its embedding, and the head where it is tied, and its lowest layers frozen."""
    model = whole(base, seed)
    for module in (model.model.embed_tokens, *model.model.layers[:layers]):
        module.requires_grad_(False)
    return model


def adapted(
    base: Path,
    seed: int,
    *,
    start: Literal["pissa", True],
    rank: int,
    target_modules: str | list[str] = "all-linear",
    **options: Any,
) -> Any:
    """Load the base model with low-rank adapters, on every linear of attention and MLP where no others are named."""
    from peft import LoraConfig

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=target_modules, init_lora_weights=start, **options)
    return with_adapter(whole(base, seed), config)


def with_adapter(model: Any, config: Any) -> Any:
    """The model with what a config of PEFT describes."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(model, config)


def expanded(base: Path, seed: int, *, request: Request, routing: Router | None = None, **changes: Any) -> Any:
    """Expand the base model, give it a router where one is asked for, and load the result."""
    with tempfile.TemporaryDirectory() as folder:
        made = expand(base, replace(request, seed=seed, **changes), Path(folder) / "expanded").path
        if routing is not None:
            made = route_export(made, Path(folder) / "routed", routing).path
        return whole(made, seed)


def deepened(base: Path, seed: int, *, request: Request) -> Any:
    """Copy blocks of the base model into it, and load the result, a stock model, with all but the copies frozen."""
    model = expanded(base, seed, request=request)
    freeze_base(model)
    return model


def scale(name: str, inner_width: int, rate: float = 3e-3, **options: Any) -> Method:
    """Describe an expansion of all layers."""
    request = Request("all", up_width=UP_WIDTH, up_kv_heads=1, up_inner_width=inner_width, **options)
    return Method(name, partial(expanded, request=request), rate)


def adapt(collaborate: Literal["attn", "both"], lowest: int, inner_width: int) -> Method:
    """Describe SCALE-Adapt with W12 in the layers from `lowest` on, so that L_fp is `lowest`."""
    options = {"variant": "adapt", "collaborate": collaborate, "collaborative_layers": f"{lowest}-3"}
    return scale(f"adapt {collaborate} {lowest}", inner_width, **options)


def route(method: Method, router: Literal["cosine", "posterior"], *, trains_routed: bool) -> Method:
    """Describe an expansion with a router and its defaults."""
    name = f"{method.name.removeprefix('adapt ')} {router}" + (", trained" if trains_routed else "")
    make = partial(method.make, routing=ROUTERS[router]())
    return replace(method, name=name, make=make, unrouted=method.name, trains_routed=trains_routed)


def with_routers(method: Method, *routers: Literal["cosine", "posterior"]) -> tuple[Method, ...]:
    """Describe an expansion without a router, and with each router, trained both ways."""
    ways = [(router, trains_routed) for router in routers for trains_routed in (False, True)]
    return method, *(route(method, router, trains_routed=trained) for router, trained in ways)


PRESERVE_WIDTH = 88
PRESERVE = scale("preserve", PRESERVE_WIDTH, rate=1e-2)
BOTH_0, BOTH_2, BOTH_3 = adapt("both", 0, 8), adapt("both", 2, 40), adapt("both", 3, 64)

METHODS = (
    Method("full", whole, 1e-3),
    Method("freeze", partial(frozen, layers=FROZEN_LAYERS), 1e-3),
    Method("LoRA", partial(adapted, start=True, rank=RANK), 3e-3),
    Method("PiSSA", partial(adapted, start="pissa", rank=RANK), 1e-3),
    PRESERVE,
    adapt("attn", 0, 56),
    adapt("attn", 2, 72),
    adapt("attn", 3, 80),
    BOTH_0,
    BOTH_2,
    BOTH_3,
)

GROW_RATE = 1e-3
GROWING = (
    *(
        method
        for method in METHODS
        if method.name in ("full", "freeze", "LoRA", "preserve", "adapt attn 0", "adapt both 0")
    ),
    Method("grow-freeze", partial(expanded, request=Request("1-3", method="grow", variant="grow-freeze")), GROW_RATE),
    Method("grow-train", partial(expanded, request=Request("2-3", method="grow", variant="grow-train")), GROW_RATE),
    Method("depth", partial(deepened, request=Request("1,3", method="depth")), GROW_RATE),
)

# width, which leaves the base stream alone or writes into it everywhere, against depth
STREAM = tuple(method for method in GROWING if method.name in ("preserve", "adapt attn 0", "adapt both 0", "depth"))

# of four layers, 3 computes one twice, 0 all, and preserve none; preserve has no W12, so there is nothing to compare
# by cosine
ROUTED = (
    *with_routers(BOTH_3, "cosine", "posterior"),
    *with_routers(PRESERVE, "posterior"),
    BOTH_0,
    route(BOTH_0, "posterior", trains_routed=False),
)

# the paper's four pairs (W21, W22); the last is the default, whose runs are those of PRESERVE
INITS = {
    "0, random": scale("preserve 0, random", PRESERVE_WIDTH, init_w21="zero", init_w22="random"),
    "random, 0": scale("preserve random, 0", PRESERVE_WIDTH, init_w21="random", init_w22="zero"),
    "0, svd": scale("preserve 0, svd", PRESERVE_WIDTH, init_w21="zero", init_w22="svd"),
    "svd, 0": PRESERVE,
}
