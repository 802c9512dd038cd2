"""Expanded models: a stock class of transformers with an expanding mixin before it. Each class is made on demand.

`ScaleQwen3ForCausalLM` is made from `Qwen3ForCausalLM`. If a model type uses the class of another type, the name says
so: InternLM3 uses Llama's, and its class is `ScaleLlamaForCausalLM_of_InternLM3Config`. The files beside this one
travel with the checkpoint. They open no file, and need only torch and transformers:

    configuration_scale   the key of config.json that describes base, expansions and router
    expanded_model        the model: choice of paths, forward, loading, saving
    expanded_paths        paths, their streams, and the active expansions of a thread
    expanded_modules      stock modules through which paths pass, attention included
    expanded_blocks       tensors of an expansion, and products with them; expanded_shapes: their names and shapes
    expanded_routers      routers and their numbers; expanded_routing: their arithmetic and state
    expanded_stock        stock classes; expanded_releases: names that differ between releases of transformers

The way of a token
------------------
1. Choice. `ExpandedPreTrainedModel.run` reads the choice of this thread: the active expansions, and whether a router
   mixes them. The paths follow from it (`expanded_paths`): the base, an expansion, or several. Then the stock forward
   of the model runs once, for all paths.
2. Embedding. It gives x, the base stream. Each active expansion adds an up stream after it: the product of its own
   embedding columns, or zeros if it has none: [x | up of medicine | up of law]. From here on, hidden states are wider
   than the stock code expects. Stock code outside the modules (adding, scaling, gating, rotating heads) works element
   by element or head by head, so the up streams cannot change any value of x.
3. Modules. Each module of a layer has a second class (`expanded_modules`). It splits its input into streams, and calls
   the stock module with x alone. The blocks of each expansion compute its up stream: W21 x + W22 x_up. The results are
   joined. A module without blocks of an active expansion runs unchanged.
4. Exactness. x equals the hidden state of the base model, bit for bit, because no block writes into it. The stock
   module gets the same numbers in the same shape, with the same strides and, on a CPU, at the same alignment. For the
   base, W12 is not multiplied as a matrix of zeros; the product is not computed at all. No trained tensor contributes
   to x, so no gradient passes through x. Base tensors get no gradient from x, even if they require one.
   Before training, the logits equal the base's too. An expansion adds W12 x_up to its own copy of the base stream (step
   5), and head_up x_up to the logits. Both are zero initially, and y + 0 is y.
   Exceptions: with more than two MLPs (`share` of `GrownBlocks`), and with `torch.compile`, sums have another order, so
   logits are equal only up to rounding.
5. Fork. An expansion with W12 has its own base stream. Before its first layer with W12, a hook copies x for it
   (`Fork`): [x | up of medicine | x' of law, up of law]. From there on the stock module runs twice, on x and on x'.
   W12 x_up is added only to the result for x'. If law runs alone, only x' exists, and the stock module runs once.
6. Attention (`ExpandedAttention`). It has more heads: those of x, the new heads of each expansion, those of x'. Each
   group of heads attends separately. One KV cache holds all of them.
7. Norm and head. The last norm stacks the base streams along the batch, each with its up streams. The head
   (`ExpandedHead`) computes the logits of each path: those of its base stream, plus head_up x_up.
8. Router (`expanded_routers`). It weighs the paths and returns one set of logits. Its memory of the tokens read is an
   additional layer of the KV cache (`RouterState`). Without a router, there is one path for the whole batch, or each
   row of the batch gets the logits of its own path.
"""

from __future__ import annotations

from functools import cache, wraps
from inspect import signature
from typing import Any

from .configuration_scale import config_of

# transformers 4 copies only the files that this file imports directly
from .expanded_blocks import Blocks  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel, refusing
from .expanded_modules import ExpandedModule  # noqa: F401
from .expanded_paths import Paths  # noqa: F401
from .expanded_releases import ADAPTER_METHODS, name_cache
from .expanded_routers import Router  # noqa: F401
from .expanded_routing import route  # noqa: F401
from .expanded_shapes import shapes_of  # noqa: F401
from .expanded_stock import find_stock_model, make_model_class


def model_of(stock: type, stock_config: type, module: str = "") -> type:
    """Make the expanded class of a stock model class. It reads the same tensor names on disk.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
        module: Module of the class and of its configuration; empty for this module.

    Returns:
        The class. If the stock class has no head, its models return hidden states: [base stream, up stream].
    """
    return _make_model(stock, stock_config, config_of(stock_config, module), module or __name__)


@cache
def _make_model(stock: Any, stock_config: type, config: type, module: str) -> type:
    names = list(signature(stock.forward).parameters)[1:]

    # transformers and trainers inspect the signature, so it must be the stock model's
    @wraps(stock.forward)
    def forward(self, *args, **inputs):
        inputs = dict(**dict(zip(names[: len(args)], args, strict=True)), **inputs)
        name_cache(inputs, names)
        return self.run(**inputs)

    attributes = {"config_class": config, "forward": forward, "__module__": module}
    attributes["__doc__"] = ExpandedPreTrainedModel.__doc__
    attributes |= {name: refusing(name) for name in ADAPTER_METHODS if hasattr(stock, name)}
    return make_model_class("Scale", ExpandedPreTrainedModel, stock, stock_config, **attributes)


def __getattr__(name: str) -> Any:
    return model_of(*find_stock_model(name, __name__, "Scale"))
