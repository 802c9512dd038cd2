"""Logits of some tokens at a time, from one pass of a causal model over a whole batch.

The logits of 2,048 tokens are 2.1 GB in float32 where the vocabulary has 262,144, and a loss holds three such tensors.
So the decoder runs once over the batch, and what the model's own forward does with its hidden states (head, scale, cap,
the mixture of a router) runs anew for a few tokens at a time. TRL's "chunked_nll" and torchtune's
LinearCrossEntropyLoss cut the tokens in the same way, but know a head as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from scale_surgery.running.drift import TOLERANCES

if TYPE_CHECKING:
    from torch import Tensor, nn

# logits that stand in memory at a time: 128 MiB in float32, whatever the size of the batch and of the vocabulary
LOGITS_AT_ONCE = 2**25
PROBED_TOKENS = 16


class Pieces(NamedTuple):
    """Hidden states whose logits are read piece by piece, in order: of the wanted tokens in one row, or of all."""

    hidden: Tensor  # (rows of all base streams, n, width)
    slices: list[slice]  # the positions of each piece
    logits: Callable[[Tensor, slice], Tensor]  # logits (rows, m, v) of the hidden states at a slice
    wanted: Tensor | None  # the tokens that stand in one row (b, t); None if all stand where they are

    def pick(self, values: Tensor) -> Tensor:
        """Values of all tokens (b, t) as the hidden states lie (rows, n)."""
        values = values.to(self.hidden.device)
        return values if self.wanted is None else values[self.wanted][None]


class Tail(NamedTuple):
    """What runs after the decoder of a causal model: the forward of `owner` without its module `name`, and the head."""

    owner: nn.Module
    name: str
    head: Any

    @property
    def decoder(self) -> nn.Module:
        """What gives the hidden states."""
        return self.owner.get_submodule(self.name)

    def logits(self, output: Any, hidden: Tensor) -> Tensor:
        """Logits of hidden states (rows, n, width), which take the place of those in the decoder's output."""
        import torch

        from scale_surgery.modeling.expanded_stock import twin

        given = Given(self.decoder, with_hidden(output, hidden))
        owner: Any = twin(self.owner, _modules={**self.owner._modules, self.name: given})
        ids = hidden.new_zeros(hidden.shape[:2], dtype=torch.long)
        logits: Tensor = type(owner).forward(owner, input_ids=ids, use_cache=False)[0]
        return logits


class Given:
    """A decoder that gives what is known already."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        self.decoder, self.output = decoder, output

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Its output."""
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Replace the hidden states in the output of a decoder, which come first."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    return type(output)(**{**output, next(iter(output)): hidden})


def find_tail(model: Any, ids: Tensor) -> Tail | None:
    """Find what a model runs after its decoder, and check on some tokens that its logits are the model's in pieces too.

    Args:
        model: A causal model, not what wraps it.
        ids: Token ids that it can read (t,).

    Returns:
        None if the decoder is no module beside the head, or code of others does something else behind it.
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
    """The largest module that holds the embedding and not the head, taken as the decoder; None if there is none."""
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    paths = [name.split(".") for wanted in (embedding, head) for name, module in modules.items() if module is wanted]
    if len(paths) != 2:
        return None
    depth = next((depth for depth, pair in enumerate(zip(*paths, strict=False)) if len(set(pair)) == 2), None)
    # no layers stand beside an embedding that is a module of its own
    if depth is None or depth == len(paths[0]) - 1:
        return None
    return Tail(modules[".".join(paths[0][:depth])], paths[0][depth], head)


@contextmanager
def finishing(model: Any, tail: Tail, finish: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Iterator[None]:
    """Let the forward of a model give `{"loss": ...}` inside a `with` block: what `finish` makes of its hidden states.

    The forward itself goes on with one token of each row, so that hooks of other libraries see a whole forward.

    Args:
        model: The model itself, not what wraps it.
        tail: What it runs after its decoder.
        finish: Gets what makes logits of hidden states, and the hidden states.
    """
    made: list[Tensor] = []
    scores: list[tuple[Any, Tensor]] = []

    def finish_pieces(decoder: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0]
        scores.extend(scores_of_head(model, tail.head, hidden))
        made.append(finish(lambda part: tail.logits(output, part), hidden))
        return with_hidden(output, hidden[:, :1].detach())

    def give(module: nn.Module, inputs: Any, output: Any) -> Any:
        # pieces have left theirs
        for blocks, kept in scores:
            vars(blocks)["scores"] = kept
        # nothing was made where a model calls what is inside of its decoder
        return {"loss": made.pop()} if made else output

    hooks = [tail.decoder.register_forward_hook(finish_pieces), model.register_forward_hook(give, prepend=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def scores_of_head(model: Any, head: Any, hidden: Tensor) -> list[tuple[Any, Tensor]]:
    """Let gates of the head that keep their scores read all hidden states."""
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
    """Let the next forward of a model give what `finish` makes of its logits, which it reads in pieces.

    Args:
        model: The model itself, not what wraps it.
        tail: What it runs after its decoder.
        inputs: What the forward gets.
        wanted: Tokens whose logits are read (b, t); None for all. A router reads all of them.
        finish: Gets the pieces, inside of the forward.
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
    """Logits that stand in memory (b, t, v), read in pieces."""
    wanted = wanted.to(logits.device)
    chosen = logits[wanted][None]
    return Pieces(chosen, cut(chosen.shape[1], chosen.shape[2]), lambda part, _: part, wanted)


def cut(count: int, width: int) -> list[slice]:
    """Cut positions into pieces of at most LOGITS_AT_ONCE numbers, `width` a position."""
    from scale_surgery.modeling.expanded_routing import in_chunks

    return list(in_chunks(count, width, LOGITS_AT_ONCE))


class Reader:
    """Lets a router read a batch piece by piece, as generation lets it read a long prompt."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        from scale_surgery.modeling.expanded_routing import RouterContext

        self.model, self.choice = model, model.choice
        # a router that reads no tokens has no state, but its restarts all the same
        given = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        context = RouterContext.of(given, 0, reads_tokens=self.choice.router.reads_tokens, is_training=True)
        self.ids, self.restarts = inputs["input_ids"], context.restarts
        self.context: RouterContext | None = None
        self.state: Any = None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let the head give routed logits of the piece that is read."""
        # a forward under a choice with a router would route the whole batch
        alone = self.choice._replace(names=(self.known,), router=None)
        with self.model.use_choice(alone), self.model.answering(self.answer, self.choice.paths):
            yield

    @property
    def known(self) -> str:
        """An expansion of the choice; the one with new tokens, if it is there."""
        names = self.choice.names
        return str(self.model.with_new_tokens if self.model.with_new_tokens in names else names[0])

    def answer(self, features: Any) -> Tensor:
        """Routed logits of a piece; hidden states outside of pieces, which nobody reads."""
        from scale_surgery.modeling.expanded_routing import route

        if self.context is None:
            base: Tensor = features.bases[0]
            return base
        self.context.move(features.unsplit.device)
        # it counts whether a router weighs the logits that new tokens lack
        with self.model.use_choice(self.choice):
            return route(self.choice.router, features, self.context)

    def reading(self, logits_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, slice], Tensor]:
        """What reads the next piece."""
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
