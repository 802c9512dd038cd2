"""The mixin before a stock language model: where the model routes, one forward carries two paths to a router.

The stock forward runs as it is; only its head is asked for routed logits instead of those of one path.
This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .expanded_model import ExpandedPreTrainedModel, refuse_adapter_names, specs_of
from .expanded_modules import own_thread
from .expanded_routing import (
    Paths,
    RouterState,
    Tokens,
    TokenScores,
    find_restarts,
    make_router,
    score_tokens,
    state_of,
)

ONE_EXPANSION = (
    "It has one: model.expansion_disabled() runs the base. Only a composed model takes a name for each row, by "
    "expansion_names=."
)


class WholeHead(NamedTuple):
    """The head as one matrix [head, head_up] over what the base model gives, [base stream, up stream]."""

    weight: Tensor
    bias: Tensor | None


class ExpandedForCausalLM(ExpandedPreTrainedModel):
    """Mixin before a stock language model: routes where `config.scale_surgery` names a router."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        # threads in which a forward runs that others put in place of the model's own
        self.replaced_in: set[int] = set()
        routing = config.scale_surgery.get("routing")
        self.router = None if routing is None else make_router(routing)
        if routing is not None:
            self.get_output_embeddings().softcap = routing["softcap"]

    def __init_subclass__(cls, **options: Any) -> None:
        """Give each class a forward with the signature of its stock model, from which others learn what it takes."""
        super().__init_subclass__(**options)
        if ExpandedForCausalLM not in cls.__bases__:
            return
        stock = cls.__bases__[cls.__bases__.index(ExpandedForCausalLM) + 1].forward
        names = list(signature(stock).parameters)[1:]

        @wraps(stock)
        def forward(self, *args, **inputs):
            return self.route(**dict(zip(names, args, strict=False)), **inputs)

        cls.forward = forward

    def __call__(self, *args, **inputs):
        """Run the model; where others replaced its forward, note that it runs: see `get_output_embeddings`."""
        if "forward" not in vars(self):
            return super().__call__(*args, **inputs)
        self.replaced_in.add(own_thread())
        try:
            return super().__call__(*args, **inputs)
        finally:
            self.replaced_in.discard(own_thread())

    def get_output_embeddings(self) -> nn.Module | WholeHead | None:
        """The head; to a forward that others put in place of the model's own, one matrix over both streams.

        Stock forwards do not ask for it. The trainers of TRL multiply what the base model gives by its weight, to have
        no logits of a whole batch in memory.
        """
        head = super().get_output_embeddings()
        if own_thread() not in getattr(self, "replaced_in", ()) or not self.is_expansion_enabled:
            return head
        if self.is_routing_enabled:
            raise ValueError(
                "This model routes: no weight of a head gives its logits, which a trainer wants to compute itself. "
                "Train before you route, or train the adapt path alone: model.enable_routing(False)."
            )
        if getattr(head, "up_weight", None) is None:
            return head
        return WholeHead(torch.cat((head.weight, head.up_weight.to(head.weight.dtype)), dim=1), head.bias)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate as transformers does."""
        refuse_adapter_names(options, ONE_EXPANSION)
        return super().generate(*args, **options)

    def route(self, **inputs: Any) -> Any:
        """Run the stock forward, and let the router make its logits where the model routes."""
        refuse_adapter_names(inputs, ONE_EXPANSION)
        stock = super().forward
        if not self.is_routing_enabled:
            return stock(**inputs)
        # every position is handed to the head, because the router reads all of them
        tokens = self._tokens(inputs, inputs.pop("logits_to_keep", 0))
        with self._answering(lambda paths: self.router.logits(paths, tokens), tokens):
            output = stock(**inputs)
        self._remember(tokens, inputs.get("past_key_values"), output)
        return output

    def path_logits(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Logits of each path alone: the base model's, and those of the model that does not route; (b, t, v) each.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, where there are any.
        """
        found: list[Tensor] = []

        def answer(paths: Paths) -> Tensor:
            found.extend(paths.logits())
            return found[0]

        with self._answering(answer):
            super().forward(input_ids=input_ids, use_cache=False, **inputs)
        return found[0], found[1]

    @torch.no_grad()
    def score_tokens(self, input_ids: Tensor, **inputs: Any) -> TokenScores:
        """Log-probability of each token but the first on both sides, and how it was routed; (b, t - 1) each.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, where there are any.
        """
        tokens = self._tokens({"input_ids": input_ids, **inputs}, 0)
        with self._answering(lambda paths: torch.stack(score_tokens(self.router, paths, tokens)), tokens):
            return TokenScores(*super().forward(input_ids=input_ids, use_cache=False, **inputs).logits)

    @contextmanager
    def _answering(self, answer: Callable[[Paths], Tensor], tokens: Tokens | None = None) -> Iterator[None]:
        """Let the head give other than the logits of one path inside a `with` block."""
        if not self.is_routing_enabled:
            raise ValueError("This model does not route now: it has no router, or routing is disabled.")
        head, is_forked = super().get_output_embeddings(), self.config.scale_surgery["routing"]["fork"] is not None

        def answer_features(features: Tensor) -> Tensor:
            if tokens is not None:
                tokens.move(features.device)
            return answer(Paths.of(head, features, is_forked=is_forked))

        before = head.answers.get(own_thread())
        head.answers[own_thread()] = answer_features
        try:
            yield
        finally:
            head.answers.pop(own_thread())
            if before is not None:
                head.answers[own_thread()] = before

    def _tokens(self, inputs: dict[str, Any], logits_to_keep: int | Tensor) -> Tokens:
        ids, cache = inputs.get("input_ids"), inputs.get("past_key_values")
        if ids is None and self.router.needs_ids:
            raise ValueError("inputs_embeds: the posterior router scores tokens, expected input_ids.")
        past = 0 if cache is None else int(cache.get_seq_length())
        state = self._check_cache(cache, past) if past else None
        like = inputs["inputs_embeds"] if ids is None else ids
        restarts = find_restarts(inputs.get("attention_mask"), inputs.get("position_ids"), past, like)
        keep = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        is_cached = cache is not None or not (self.training or inputs.get("use_cache") is False)
        return Tokens(ids, restarts, state, keep, is_cached)

    def _check_cache(self, cache: Cache, past: int) -> RouterState | None:
        """Refuse a KV cache that holds other heads than this model has, or that the router has not followed."""
        routing, state = self.config.scale_surgery["routing"], state_of(cache)
        is_ours = not self.router.needs_ids or (state is not None and state.seen == past and len(state.keys[0, 0]) > 0)
        fork = routing["fork"]
        for spec in () if fork is None else specs_of(routing, self.config.scale_surgery, fork)["attention"].values():
            keys = getattr(cache.layers[fork], "keys", None)
            is_ours = is_ours and (keys is None or keys.shape[1] == spec["cached_heads"])
        if not is_ours:
            raise ValueError(
                f"past_key_values: holds {past} tokens that this routed model has not read, or from which more were "
                "taken back than it remembers, expected a cache that it filled itself. Begin with an empty one."
            )
        return state

    def _remember(self, tokens: Tokens, cache: Cache | None, output: Any) -> None:
        """Put the router's state into the KV cache, as one more layer."""
        if cache is None:
            found = output.values() if hasattr(output, "values") else output
            cache = next((value for value in found if isinstance(value, Cache)), None)
        if tokens.result is None or not getattr(cache, "layers", None):
            return
        if state_of(cache) is None:
            cache.layers.append(RouterState(cache.layers[0]))
        state = state_of(cache)
        # however an older cache was emptied, its next text begins anew
        state.seen = 0 if tokens.state is None else state.seen
        state.set(*tokens.result, tokens=tokens.ids.shape[1])
