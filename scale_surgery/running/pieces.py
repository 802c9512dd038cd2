"""Logits of some tokens at a time, from one pass of a causal model over a whole batch.

With a vocabulary of 262,144 the logits of 2,048 tokens take 2.1 GB in float32, and a loss needs three such tensors. So
the decoder runs once over the batch, and the rest of the model's forward (head, scale, cap, mixture of a router) runs
for a few tokens at a time. TRL's "chunked_nll" and torchtune's LinearCrossEntropyLoss split the tokens in the same way,
but support only a head that is one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from scale_surgery.running.drift import TOLERANCES

if TYPE_CHECKING:
    from torch import Tensor, nn

# most logits in memory at a time: 256 MiB in float32, for any size of batch and vocabulary. A product of half as many
# tokens with a head of 262,144 tokens takes 1.4 times as long for each token on a CPU
LOGITS_AT_ONCE = 2**26
PROBED_TOKENS = 16


class Pieces(NamedTuple):
    """Hidden states with logits that are computed in pieces: of all tokens, or of the wanted tokens as one row."""

    hidden: Tensor  # (rows of all base streams, n, width)
    slices: list[slice]  # the positions of each piece
    logits: Callable[[Tensor, slice], Tensor]  # logits (rows, m, v) of the hidden states at a slice
    wanted: Tensor | None  # mask of the tokens in one row (b, t); None if all keep their place

    def pick(self, values: Tensor) -> Tensor:
        """Return values of all tokens (b, t) in the layout of the hidden states (rows, n)."""
        values = values.to(self.hidden.device)
        return values if self.wanted is None else values[self.wanted][None]


class Tail(NamedTuple):
    """The rest of a causal model after its decoder: the forward of `owner` without its module `name`, and the head."""

    owner: nn.Module
    name: str
    head: Any

    @property
    def decoder(self) -> nn.Module:
        """The module that computes the hidden states."""
        return self.owner.get_submodule(self.name)

    def logits(self, output: Any, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states (rows, n, width), which replace those in the decoder's output."""
        import torch

        from scale_surgery.modeling.expanded_stock import twin

        given = Given(self.decoder, with_hidden(output, hidden))
        owner: Any = twin(self.owner, _modules={**self.owner._modules, self.name: given})
        ids = hidden.new_zeros(hidden.shape[:2], dtype=torch.long)
        logits: Tensor = type(owner).forward(owner, input_ids=ids, use_cache=False)[0]
        return logits


class Given:
    """A stand-in for a decoder that returns a given output."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        self.decoder, self.output = decoder, output

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Return the given output."""
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Replace the hidden states, which come first, in the output of a decoder."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    return type(output)(**{**output, next(iter(output)): hidden})


def find_tail(model: Any, ids: Tensor) -> Tail | None:
    """Find the rest of a model after its decoder, and check on some tokens that its logits in pieces equal the model's.

    Args:
        model: A causal model, without wrappers.
        ids: Token ids that it can read (t,).

    Returns:
        The rest of the model, or None if the decoder is not a module next to the head, or if custom code does something
        else after it.
    """
    import torch

    tail = _tail_of(model)
    if tail is None:
        return None
    ids = ids[None, :PROBED_TOKENS].long().to(tail.head.weight.device)
    few, read = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, list[torch.Tensor]()

    def keep(pieces: Pieces) -> Tensor:
        read.extend(pieces.logits(pieces.hidden[:, positions], positions) for positions in pieces.slices)
        return pieces.hidden.new_zeros(())

    with torch.no_grad():
        whole = model(**few, use_cache=False).logits
        with in_pieces(model, tail, few, None, keep):
            model(**few, use_cache=False)
    if not read:
        return None
    drift, largest = (torch.cat(read, 1).float() - whole.float()).abs().max(), whole.float().abs().max()
    return tail if bool(drift <= TOLERANCES[str(read[0].dtype).removeprefix("torch.")] * largest) else None


def _tail_of(model: Any) -> Tail | None:
    """Return the rest after the largest module with the embedding and without the head, or None if there is none."""
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    paths = [name.split(".") for wanted in (embedding, head) for name, module in modules.items() if module is wanted]
    if len(paths) != 2:
        return None
    depth = next((depth for depth, pair in enumerate(zip(*paths, strict=False)) if len(set(pair)) == 2), None)
    # an embedding that is its own module has no layers in it
    if depth is None or depth == len(paths[0]) - 1:
        return None
    return Tail(modules[".".join(paths[0][:depth])], paths[0][depth], head)


@contextmanager
def finishing(model: Any, tail: Tail, finish: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Iterator[None]:
    """Make a model's forward return `{"loss": ...}` inside a `with` block: the value of `finish` on its hidden states.

    The forward itself continues with one token of each row, so that hooks of other libraries see a complete forward.

    Args:
        model: The model itself, without wrappers.
        tail: The rest of the model after its decoder.
        finish: Takes a function from hidden states to logits, and the hidden states.
    """
    made: list[Tensor] = []
    scores: list[tuple[Any, Tensor]] = []

    def finish_pieces(decoder: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0]
        scores.extend(scores_of_head(model, tail.head, hidden))
        made.append(finish(lambda part: tail.logits(output, part), hidden))
        return with_hidden(output, hidden[:, :1].detach())

    def give(module: nn.Module, inputs: Any, output: Any) -> Any:
        # the pieces have overwritten the scores
        for blocks, kept in scores:
            vars(blocks)["scores"] = kept
        # nothing was computed if a model calls submodules of its decoder directly
        return {"loss": made.pop()} if made else output

    hooks = [tail.decoder.register_forward_hook(finish_pieces), model.register_forward_hook(give, prepend=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def scores_of_head(model: Any, head: Any, hidden: Tensor) -> list[tuple[Any, Tensor]]:
    """Compute and return the scores of all hidden states for gates of the head that keep their scores."""
    from scale_surgery.modeling.expanded_routing import Features

    gated = [blocks for blocks in getattr(head, "expansions", {}).values() if getattr(blocks, "keeps_scores", False)]
    if not gated:
        return []
    Features.of(head, hidden, model.active.now().paths, model.stream_widths)
    return [(blocks, scores) for blocks in gated if (scores := vars(blocks).pop("scores", None)) is not None]


@contextmanager
def in_pieces(
    model: Any,
    tail: Tail,
    inputs: Mapping[str, Tensor],
    wanted: Tensor | None,
    finish: Callable[[Pieces], Tensor],
) -> Iterator[None]:
    """Make the next forward of a model return the value of `finish` on its logits, which are computed in pieces.

    Args:
        model: The model itself, without wrappers.
        tail: The rest of the model after its decoder.
        inputs: The inputs of the forward.
        wanted: Mask of the tokens with needed logits (b, t), or None for all. A router reads all tokens.
        finish: Takes the pieces. It is called inside the forward.
    """
    choice = getattr(model, "choice", None)
    reader = None if choice is None or choice.router is None else Reader(model, inputs)
    vocabulary = len(tail.head.weight)

    def finish_logits(logits_of: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if reader is not None or wanted is None:
            read = reader.reading(logits_of) if reader is not None else lambda part, _: logits_of(part)
            return finish(Pieces(hidden, cut(hidden.shape[1], vocabulary * len(hidden)), read, None))
        chosen = wanted.to(hidden.device)
        in_a_row = hidden[chosen][None]
        slices = cut(in_a_row.shape[1], vocabulary)
        return finish(Pieces(in_a_row, slices, lambda part, _: logits_of(part), chosen))

    with nullcontext() if reader is None else reader.answering(), finishing(model, tail, finish_logits):
        yield


def pieces_of_logits(logits: Tensor, wanted: Tensor) -> Pieces:
    """Split existing logits (b, t, v) into pieces."""
    wanted = wanted.to(logits.device)
    chosen = logits[wanted][None]
    return Pieces(chosen, cut(chosen.shape[1], chosen.shape[2]), lambda part, _: part, wanted)


def cut(count: int, width: int) -> list[slice]:
    """Split positions into slices of at most LOGITS_AT_ONCE numbers, with `width` numbers per position."""
    from scale_surgery.modeling.expanded_routing import in_chunks

    return list(in_chunks(count, width, LOGITS_AT_ONCE))


class Reader:
    """A reader that feeds a batch to a router piece by piece, as generation does with a long prompt."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        from scale_surgery.modeling.expanded_routing import RouterContext

        self.model, self.choice = model, model.choice
        # a router that does not read tokens has no state, but it restarts as well
        given = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        context = RouterContext.of(given, 0, reads_tokens=self.choice.router.reads_tokens, is_training=True)
        self.ids, self.restarts = inputs["input_ids"], context.restarts
        self.context: RouterContext | None = None
        self.state: Any = None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Make the head return routed logits of the current piece."""
        # with a router in the choice, the forward would route the whole batch
        alone = self.choice._replace(names=(self.known,), router=None)
        with self.model.use_choice(alone), self.model.answering(self.answer, self.choice.paths):
            yield

    @property
    def known(self) -> str:
        """An expansion of the choice; if possible, the one with new tokens."""
        names = self.choice.names
        return str(self.model.with_new_tokens if self.model.with_new_tokens in names else names[0])

    def answer(self, features: Any) -> Tensor:
        """Return the routed logits of a piece. Outside of pieces, return the hidden states, which are not used."""
        from scale_surgery.modeling.expanded_routing import route

        if self.context is None:
            base: Tensor = features.bases[0]
            return base
        self.context.move(features.unsplit.device)
        # the handling of logits that new tokens lack depends on the router in the choice
        with self.model.use_choice(self.choice):
            return route(self.choice.router, features, self.context)

    def reading(self, logits_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, slice], Tensor]:
        """Return the function that computes the logits of the next piece."""
        from transformers.cache_utils import DynamicLayer

        from scale_surgery.modeling.expanded_routing import RouterContext, RouterState

        def read(part: Tensor, positions: slice) -> Tensor:
            ids, restarts = self.ids[:, positions], self.restarts[:, positions]
            self.context = RouterContext(ids, restarts, self.state, slice(None))
            try:
                logits = logits_of(part)
                if self.context.result is not None:
                    state = RouterState(DynamicLayer())  # type: ignore[no-untyped-call]
                    state.set(*self.context.result, tokens=ids.shape[1])
                    self.state = state
                return logits
            finally:
                self.context = None

        return read
