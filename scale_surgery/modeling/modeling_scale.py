"""Expanded models: each a stock class with an expanding mixin before it, made when its name is asked for.

`ScaleQwen3ForCausalLM` is made of `Qwen3ForCausalLM`. Where a model type uses the class of another, as InternLM3 uses
Llama's, the name says so: `ScaleLlamaForCausalLM_of_InternLM3Config`. The files beside this one travel with the
checkpoint. They open no file, and need only torch and transformers:

    configuration_scale   the key of config.json that describes base, expansions and router
    expanded_model        the model: choice of paths, forward, loading, saving
    expanded_paths        paths, their streams, and the active expansions of a thread
    expanded_modules      stock modules through which paths pass, attention included
    expanded_blocks       tensors of an expansion, and products with them; expanded_shapes: their names and shapes
    expanded_routers      routers and their numbers; expanded_routing: their arithmetic and state
    expanded_stock        stock classes; expanded_releases: names that differ between releases of transformers

What happens to a token
-----------------------
1. `ExpandedPreTrainedModel.run` looks at the choice of this thread: which expansions take part, and whether a router
   mixes them. From that come the paths (`expanded_paths`): the base, an expansion, several of them. Then the stock
   forward of the model runs, once, for all paths.
2. The embedding gives x, the base stream. Beside it stands an up stream for each expansion of the choice, from columns
   of that expansion or zeros: [x | up of medicine | up of law]. From here on every tensor of hidden states is wider
   than the stock code knows. What stock code does with them itself (adding, scaling, gating, rotating heads) it does
   element by element or head by head, so that no number of x depends on one beside it.
3. Each module of a layer was given a second class (`expanded_modules`). It takes its input apart into streams, gives x,
   and x alone, to the stock module, and lets the blocks of each expansion compute its up stream: W21 x + W22 x_up. It
   joins the results. A module that has nothing to do with the chosen paths runs as it is.
4. x stays what it is in the base model, bit for bit: no block writes into it. The stock module sees the same numbers in
   the same shape, with the same strides and, on a CPU, at the same alignment. That W12 is zero for the base is not a
   zero in a matrix but a product that nobody computes. Nothing that trains reaches x, so no gradient passes through
   it: tensors of the base get none there, even if somebody lets them train.
   So until something is learned the logits are the base's: what an expansion adds to a base stream and to the logits
   is W12 x_up and head_up x_up, which begin as zeros, and y + 0 is y. Grown MLPs of more than two copies (`share` of
   `GrownBlocks`) keep that up to rounding alone, since sums run in another order there. So does `torch.compile`, which
   chooses kernels itself.
5. An expansion with W12 writes into a base stream of its own. Before the first layer in which it does, a hook copies x
   for it (`Fork`): [x | up of medicine | x' of law, up of law]. From there on the stock module runs twice, once on
   x, once on x'; W12 x_up is added to what it gives for x' and to nothing else. Where law runs alone, x' is all there
   is, and the stock module runs once.
6. Attention (`ExpandedAttention`) sees more heads: those of x, those that each expansion adds, those of x'. Each part
   attends by itself. One KV cache holds all of them.
7. The last norm puts base streams, each with the up streams beside it, one after the other along the batch, and the
   head (`ExpandedHead`) makes logits of each path: those of its base stream, plus head_up x_up.
8. A router (`expanded_routers`) weighs the paths, and gives one set of logits out. What it remembers of the tokens read
   is one more layer of the KV cache (`RouterState`). Without a router there is one path, or each row of the batch
   takes the logits of its own.
"""

from __future__ import annotations

from functools import cache, wraps
from inspect import signature
from typing import Any

from .configuration_scale import config_of

# transformers 4 copies the files that this one imports itself, and no others
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
    """Make the expanded form of a stock model class; it reads the names on disk that the stock model reads.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
        module: Module of the class if not this one, and of its configuration.

    Returns:
        The class. A model without a head returns hidden states, [base stream, up stream].
    """
    return _make_model(stock, stock_config, config_of(stock_config, module), module or __name__)


@cache
def _make_model(stock: Any, stock_config: type, config: type, module: str) -> type:
    names = list(signature(stock.forward).parameters)[1:]

    # with the signature of the stock model, which transformers and trainers inspect
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
