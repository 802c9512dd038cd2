"""An expanded model in which each token of a forward runs the base or an expansion of its own.

Paths of `expanded_paths` run side by side for all tokens of a batch. Here each token runs one path: a module runs its
stock forward once for all tokens, and the blocks of an expansion for the tokens of this expansion:

    tokens            a  a  b  -  -            a, b: expansions; -: the base
    stock forward     [ W x            ]       one product for all
    blocks of a       [ ...]                   W12 x_up, W21 x + W22 x_up for two tokens
    blocks of b             [.]                the same for one

The hidden state is [base stream | up stream]. The up stream is as wide as the widest among the tokens' expansions, and
a token uses the first columns of it. If all tokens run the base, there is none. Attention alone has the same number of
heads in all forwards, because all tokens share one KV cache; heads that a token does not have are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_surgery.errors import PlanError, Problem
from scale_surgery.modeling.expanded_blocks import Blocks
from scale_surgery.modeling.expanded_modules import (
    ExpandedActivation,
    ExpandedAttention,
    ExpandedBlock,
    ExpandedEmbedding,
    ExpandedHead,
    ExpandedHeadNorm,
    ExpandedLast,
    ExpandedModule,
    HeadPart,
    Heads,
    expanded_modules,
    stock_class,
)
from scale_surgery.modeling.expanded_stock import StrictlyLoaded, find_base_model, padded, twin

# a column of a hidden state holds the number of an expansion, and bfloat16 holds whole numbers up to 256
MOST_EXPANSIONS = 255


class Rows:
    """The expansion of each token of the forward that runs.

    Attributes:
        known: Names of the expansions of the model, by number; 0 is the base.
        first_w12: First layer in which an expansion writes into its base stream, by name; None if there is none.
        names: Expansions of the tokens, in the order of their numbers.
        places: Positions of the tokens of each expansion; None if it has all tokens.
        numbers: Number of the expansion of each token.
    """

    def __init__(self, first_w12: dict[str, int | None]) -> None:
        self.known = ("", *first_w12)
        self.first_w12 = first_w12
        self.names: tuple[str, ...] = ()
        self.places: dict[str, Tensor | None] = {}
        self.numbers: Tensor | None = None

    def choose(self, numbers: Sequence[int], tokens: int, device: torch.device) -> None:
        """Choose the expansion of each token of the next forward.

        Args:
            numbers: Number of the expansion of each token, 0 for the base. Tokens after them are padding.
            tokens: Number of tokens, with padding.
            device: Device of the model.
        """
        whole = torch.zeros(tokens, dtype=torch.long)
        whole[: len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        present = [number for number in whole.unique().tolist() if number]
        self.names = tuple(self.known[number] for number in present)
        if len(present) == 1 and bool((whole == present[0]).all()):
            self.places = {self.names[0]: None}
        else:
            found = ((whole == number).nonzero().view(-1) for number in present)
            self.places = dict(zip(self.names, (place.to(device) for place in found), strict=True))
        self.numbers = whole.to(device) if present else None

    def writes(self, name: str, layer: int) -> bool:
        """Return whether an expansion has a base stream of its own in a layer."""
        first = self.first_w12[name]
        return first is not None and first <= layer


class RowModule(ExpandedModule):
    """Mixin before the stock class of a module: the stock forward for all tokens, blocks for the tokens of each."""

    rows: Rows

    def forward(self, x: Tensor) -> Tensor:
        active = self.active_blocks()
        if not active:
            return self.run_stock(x)
        base, up = self.split_up(x, max(blocks.up_in for _, blocks in active))
        return self.add_blocks(active, base, up, self.run_stock(base))

    def active_blocks(self) -> list[tuple[str, Blocks]]:
        """List the expansions of the tokens that add something to the module."""
        known = self.expansions._modules
        return [(name, known[name]) for name in self.rows.names if name in known]

    def split_up(self, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Split a hidden state into base stream and up stream."""
        base = x.shape[-1] - width
        return x[..., :base], x[..., base:]

    def add_blocks(self, active: list[tuple[str, Blocks]], base: Tensor, up: Tensor, y: Tensor) -> Tensor:
        """Add the products with blocks to the output of the stock module, token by token."""
        ups = []
        for name, blocks in active:
            place = self.rows.places[name]
            own = blocks._parameters.get("w12") is not None or blocks.replaces_base
            writes = own and self.rows.writes(name, self.place)
            read = up[..., : blocks.up_in]
            if place is None:
                y, y_up = blocks(base, read, None if writes and blocks.replaces_base else y, writes)
            else:
                tokens = base.index_select(1, place)
                stock = None if writes and blocks.replaces_base else y.index_select(1, place)
                changed, y_up = blocks(tokens, read.index_select(1, place), stock, writes)
                if writes:
                    y.index_copy_(1, place, changed)
            ups.append((place, y_up, blocks.up_sections))
        return self.join_ups(y, [(place, y_up, sections) for place, y_up, sections in ups if y_up is not None])

    def join_ups(self, y: Tensor, ups: list[tuple[Tensor | None, Tensor, list[int]]]) -> Tensor:
        """Join a base stream and the up streams of the tokens, section by section in a fused projection."""
        if not ups:
            return y
        if not self.sections:
            return torch.cat((y, self.scatter(y, [(place, y_up) for place, y_up, _ in ups])), dim=-1)
        joined = []
        parts = [(place, y_up.split(sections, dim=-1)) for place, y_up, sections in ups]
        for number, base in enumerate(y.split(self.sections, dim=-1)):
            joined += [base, self.scatter(y, [(place, sections[number]) for place, sections in parts])]
        return torch.cat(joined, dim=-1)

    def scatter(self, y: Tensor, ups: list[tuple[Tensor | None, Tensor]]) -> Tensor:
        """Put the up stream of each expansion at the places of its tokens, beside zeros."""
        if len(ups) == 1 and ups[0][0] is None:
            return ups[0][1]
        whole = y.new_zeros(*y.shape[:-1], max(y_up.shape[-1] for _, y_up in ups))
        for place, y_up in ups:
            whole[..., : y_up.shape[-1]].index_copy_(1, place, y_up)
        return whole


class RowLast(RowModule, ExpandedLast):
    """The last norm."""


class RowActivation(RowModule, ExpandedActivation):
    """An activation; it works element by element, so up streams pass through the stock module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run_stock(x)


class RowHeadNorm(RowModule, ExpandedHeadNorm):
    """A norm inside each head; new heads pass through the stock module, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run_stock(x)


class RowEmbedding(RowModule, ExpandedEmbedding):
    """A module whose input is no hidden state, such as an embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        active, y = self.active_blocks(), self.run_stock(ids)
        ups = []
        for name, blocks in active:
            place = self.rows.places[name]
            read, base = (ids, y) if place is None else (ids.index_select(1, place), y.index_select(1, place))
            y_up = blocks(read, read, base, False)[1]
            if y_up is not None:
                ups.append((place, y_up, []))
        return self.join_ups(y, ups)


class RowHead(RowModule, ExpandedHead):
    """The head. Its input is [base stream | up stream | number of the expansion], or a base stream alone."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.in_features
        logits = self.run_stock(x[..., :width])
        if x.shape[-1] == width:
            return logits
        base, up, numbers = x[..., :width], x[..., width:-1], x[..., -1].flatten().long()
        for number, name in enumerate(self.rows.known):
            place = (numbers == number).nonzero().view(-1)
            blocks = self.expansions._modules.get(name)
            if blocks is None or not len(place):
                continue
            read = up.index_select(1, place)[..., : blocks.up_in]
            changed, _ = blocks(base.index_select(1, place), read, logits.index_select(1, place), False)
            logits.index_copy_(1, place, changed)
        return logits


# in place of the classes of `expanded_modules`
ROW_KINDS: dict[type, type] = {
    ExpandedModule: RowModule,
    ExpandedActivation: RowActivation,
    ExpandedHeadNorm: RowHeadNorm,
    ExpandedEmbedding: RowEmbedding,
    ExpandedHead: RowHead,
    ExpandedLast: RowLast,
}


class RowAttention(ExpandedAttention):
    """Attention of a layer: one call for all tokens, with the heads of the base and of the widest expansion."""

    rows: Rows
    most: Heads  # with the widest expansion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        new = max((self.new_heads[name] for name in self.rows.names if name in self.new_heads), default=Heads(0, 0))
        if new not in self.parts_of:
            self.parts_of[new] = self.with_heads(new)
        return type(self).__bases__[1].forward(self.parts_of[new], *args, **kwargs)

    def with_heads(self, new: Heads) -> nn.Module:
        """Copy this module for its stock forward, with new heads beside its own."""
        made = self.widened((HeadPart(*self.stock_heads, is_base=True), HeadPart(*new, is_base=False)))
        vars(made.config)["_attn_implementation"] = ROW_ATTENTION
        return made


def attend_with_all_heads(module, query, key, value, attention_mask, **kwargs):
    """Compute attention with the heads of the widest expansion, and return those that the module has now."""
    stock, heads = module.stock, query.shape[1]
    name = stock.config._attn_implementation
    run = stock.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    most = stock.most
    query = functional.pad(query, (0, 0, 0, 0, 0, most.heads - heads))
    key, value = (functional.pad(part, (0, 0, 0, 0, 0, most.kv_heads - part.shape[1])) for part in (key, value))
    attended, weights = run(stock, query, key, value, attention_mask, **kwargs)
    if most.heads == heads:
        return attended, weights
    batch, _, tokens, _ = query.shape
    return attended.reshape(batch, tokens, most.heads, -1)[:, :, :heads], weights


def watch_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple:
    """Store what stock code hands to its attention function; compute nothing."""
    if not isinstance(module, RowAttention) or given.get("s_aux") is not None or value.shape[-1] != query.shape[-1]:
        raise PlanError(Problem("served-attention", type(module).__name__))
    vars(module)["given"] = {"scaling": module.scaling, **given, "head_size": query.shape[-1]}
    return query.transpose(1, 2), None


WATCHING = "scale_surgery_watch_attention"
ALL_ATTENTION_FUNCTIONS.register(WATCHING, watch_attention)
ROW_ATTENTION = "scale_surgery_heads_of_rows"
ALL_ATTENTION_FUNCTIONS.register(ROW_ATTENTION, attend_with_all_heads)


@cache
def row_class(kind: type, stock: type) -> type:
    """Make the class of a module through which rows pass: the stock class with one of this file before it."""
    return type(f"{stock.__name__}ByRow", (kind, stock), {"__module__": __name__})


class RowModel(nn.Module):
    """An expanded model of transformers, changed in place so that each token runs an expansion of its own.

    Args:
        model: The expanded model, with a head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        refuse_what_rows_lack(model)
        self.model = model
        w12_layers = {name: plan["collaborative"]["layers"] for name, plan in model.plans.items()}
        self.rows = Rows({name: min(layers, default=None) for name, layers in w12_layers.items()})
        # stock modules alone: hooks of the expanded model change no streams
        model.enable_expansion(False)
        for module in list(expanded_modules(model)):
            module.__class__ = row_class(ROW_KINDS[type(module).__bases__[0]], stock_class(module))
            module.rows = self.rows
        for module in self.attentions():
            module.__class__ = row_class(RowAttention, type(module).__bases__[1])
            module.rows = self.rows
            new = max(module.new_heads.values(), default=Heads(0, 0))
            module.most = Heads(module.stock_heads.heads + new.heads, module.stock_heads.kv_heads + new.kv_heads)
        vars(self)["base_model"] = find_base_model(model, model.facts["base_model"])
        self.stock: Any = next(parent for parent in type(model).__mro__ if not issubclass(parent, StrictlyLoaded))
        # not modules of this one, so that no tensor has two names
        vars(self)["given"] = Given()
        modules = {**model._modules, model.facts["base_model"]: self.given}
        vars(self)["head_alone"] = twin(model, _modules=modules)
        first = self.base_model.get_submodule(model.facts["layers"])[0]
        first.register_forward_pre_hook(self._enter, with_kwargs=True)

    def attentions(self) -> list[Any]:
        """List the attention modules, layer by layer."""
        return [module for module in self.model.modules() if isinstance(module, ExpandedAttention)]

    def watch(self) -> dict[Any, dict[str, Any]]:
        """Return what stock code hands to the attention function of each attention module.

        Raises:
            PlanError: If tokens affect each other elsewhere, such as in a state space: requests would read each other.
        """
        config, embedding = self.model.config.get_text_config(), self.model.get_input_embeddings()
        read: list[Tensor] = []

        def keep(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            read.append(output.detach().requires_grad_())
            return read[-1].clone()

        before, hook = config._attn_implementation, embedding.register_forward_hook(keep)
        config._attn_implementation = WATCHING
        try:
            with torch.enable_grad():
                ids = torch.zeros(1, 2, dtype=torch.long, device=embedding.weight.device)
                places = torch.arange(2, device=ids.device)[None]
                features = self(ids, [0, 0], position_ids=places, use_cache=False)[0, 1].float()
                # a plain sum of what a norm gives may be constant
                some = (features * torch.linspace(1, 2, len(features), device=features.device)).sum()
                gradients = torch.autograd.grad(some, read, allow_unused=True)
        finally:
            hook.remove()
            config._attn_implementation = before
        # with attention that mixes nothing, a token of another is nothing to it, to the last bit
        if any(bool(gradient[0, 0].any()) for gradient in gradients if gradient is not None):
            raise PlanError(Problem("rows-mixed", type(self.model).__name__))
        return {module: vars(module).pop("given") for module in self.attentions()}

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Let up streams enter as zeros before the first layer, unless the embedding has them."""
        widths = self.model.stream_widths
        hidden = args[0] if args else kwargs["hidden_states"]
        missing = widths[""] + max((widths[name] for name in self.rows.names), default=0) - hidden.shape[-1]
        if not missing:
            return None
        wide = padded(hidden, missing)
        return ((wide, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": wide})

    def forward(self, input_ids: Tensor, numbers: Sequence[int], **inputs: Any) -> Tensor:
        """Compute the features of each token, for `logits`.

        Args:
            input_ids: Token ids (1, t).
            numbers: Number of the expansion of each token, 0 for the base.
            inputs: Further inputs of the base model.

        Returns:
            Features (1, t, n), with a last column for the number of the expansion if there are tokens of one.
        """
        self.rows.choose(numbers, input_ids.shape[1], input_ids.device)
        features = self.base_model(input_ids=input_ids, **inputs)[0]
        if self.rows.numbers is None:
            return features
        return torch.cat((features, self.rows.numbers.to(features.dtype)[None, :, None]), dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits from features of any tokens (1, t, n), as the stock model does, with its caps and scales.

        The stock forward runs with a base model that returns the features.
        """
        vars(self.given)["features"] = features
        inputs = {"inputs_embeds": features, "use_cache": False}
        logits: Tensor = self.stock.forward(self.head_alone, **inputs).logits
        return logits


class Given(nn.Module):
    """A base model that returns given features."""

    features: Tensor

    def forward(self, *args: Any, **inputs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the features, whatever the inputs are."""
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.features)


def refuse_what_rows_lack(model: Any) -> None:
    """Refuse a model with a part that cannot run another expansion for each token."""
    facts, problems = model.facts, []
    if model.get_output_embeddings() is None or facts["base_model"] not in model._modules:
        problems.append(Problem("rows-without-head", type(model).__name__))
    if len(model.plans) > MOST_EXPANSIONS:
        problems.append(Problem("rows-too-many", "", count=len(model.plans), most=MOST_EXPANSIONS))
    problems += [
        Problem("rows-new-tokens", name) for name, plan in model.plans.items() if plan["head"].get("new_tokens")
    ]
    blocks = {
        name for module in expanded_modules(model) if isinstance(module, ExpandedBlock) for name in module.expansions
    }
    problems += [Problem("rows-block", name) for name in sorted(blocks)]
    if problems:
        raise PlanError(*problems)
