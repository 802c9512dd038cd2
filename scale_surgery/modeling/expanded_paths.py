"""Paths through a model, and the streams of the hidden state that run side by side for them.

    base          the model that was expanded
    medicine      the base with its expansion `medicine`: the base stream, and an up stream beside it

A forward runs a tuple of paths. `(base,)` is the stock model, and `(medicine,)` an expanded one. A router runs
`(base, medicine)`, or more expansions: `(base, medicine, law)`. The hidden state of a token is then, for example,

    [x | up of medicine | up of law | x' of grown, up of grown]

A path shares the base stream x until its expansion writes there. An expansion without W12 never writes. Any other one
writes from its first layer with W12 on, and from there it has a base stream of its own, x'. So one stock forward runs
all paths, and the base is computed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Path(NamedTuple):
    """A path through the model."""

    expansion: str = ""  # name of the expansion; empty for the base
    # whether W12 runs, which writes into a base stream of its own; without W12 the path shares the stream of the base
    has_w12: bool = True


BASE = Path(has_w12=False)


class Group(NamedTuple):
    """A base stream, and the up streams beside it."""

    writer: str  # the expansion whose W12 writes into the base stream; empty if there is none
    ups: tuple[str, ...]  # expansions whose up streams read it
    # whether nothing that trains reaches the base stream: no W12, no rows of new tokens, no weight of the base or input
    is_fixed: bool = True

    @property
    def has_w12(self) -> bool:
        """True if W12 writes into the base stream, which then belongs to one expansion."""
        return self.writer != ""


class Paths:
    """Paths that run side by side, in the order in which a router weighs them.

    `find_paths` of a model returns the same object for the same paths, since modules store layouts under it.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        first_w12_layers: dict[str, int | None],
        layers: int,
        with_new_tokens: str = "",
        *,
        base_learns: bool = False,
    ) -> None:
        self.paths, self.layers, self.base_learns = paths, layers, base_learns
        # the expansion with new tokens, if it is among the paths
        self.with_new_tokens = with_new_tokens if any(path.expansion == with_new_tokens for path in paths) else ""
        self._groups = [self._at(layer, first_w12_layers) for layer in range(-1, layers)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Paths:
        return self

    @property
    def is_base(self) -> bool:
        """True if the stock modules run alone."""
        return self.paths == (BASE,)

    def groups(self, layer: int) -> tuple[Group, ...]:
        """Return the streams that a layer reads: -1 is before the first layer; after the last, those of the last."""
        return self._groups[min(layer, self.layers - 1) + 1]

    def _at(self, layer: int, first_w12_layers: dict[str, int | None]) -> tuple[Group, ...]:
        # up to its first W12, a path that will write is treated as one that never does
        shared: dict[str, None] = {}
        apart = []
        for path in self.paths:
            first_w12_layer = first_w12_layers.get(path.expansion) if path.has_w12 else None
            if first_w12_layer is not None and first_w12_layer <= layer:
                apart.append(Group(path.expansion, (path.expansion,), is_fixed=False))
            elif path.expansion:
                shared[path.expansion] = None
        base = Group("", tuple(shared), is_fixed=not (self.with_new_tokens or self.base_learns))
        return (*([base] if shared or BASE in self.paths else []), *apart)

    def place_of(self, path: Path, layer: int) -> tuple[int, int | None]:
        """Return the number of the group of a path, and of its up stream in that group (None for the base)."""
        groups = self.groups(layer)
        apart = [number for number, group in enumerate(groups) if path.has_w12 and group.writer == path.expansion != ""]
        number = apart[0] if apart else 0
        return number, groups[number].ups.index(path.expansion) if path.expansion else None


class Fork(NamedTuple):
    """A change of streams before a layer: up streams enter as zeros, base streams are copied."""

    before: list[int]  # widths of the streams that arrive
    # for each stream that the layer reads: the number of the arriving stream to copy (None for zeros), and its width
    after: list[tuple[int | None, int]]

    def __call__(self, hidden: Tensor) -> Tensor:
        streams = hidden.split(self.before, dim=-1)
        return torch.cat(
            [
                hidden.new_zeros(*hidden.shape[:-1], width) if source is None else streams[source]
                for source, width in self.after
            ],
            dim=-1,
        )


def streams_of_groups(groups: tuple[Group, ...]) -> list[tuple[str, str]]:
    """List streams in their order: the writer of the group, and the expansion of an up stream (empty for a base)."""
    return [(group.writer, up) for group in groups for up in ("", *group.ups)]


def fork_before(paths: Paths, layer: int, arriving: dict[str, int], widths: dict[str, int]) -> Fork | None:
    """Make the fork before a layer; None if the streams do not change there.

    Args:
        paths: The paths that run.
        layer: Number of the layer.
        arriving: Widths of the arriving streams: of base streams under the empty name, of up streams by expansion.
        widths: Widths of the streams that the layer reads, likewise.
    """
    streams = {stream: arriving[stream[1]] for stream in streams_of_groups(paths.groups(layer - 1))}
    before, numbers = list(streams.values()), {stream: number for number, stream in enumerate(streams)}
    after: list[tuple[int | None, int]] = []
    for writer, up in streams_of_groups(paths.groups(layer)):
        number = numbers.get((writer, up), numbers.get(("", up)))
        after.append((number if number is not None and before[number] == widths[up] else None, widths[up]))
    return None if [source for source, _ in after] == list(range(len(before))) else Fork(before, after)


class Context(NamedTuple):
    """The state of one thread."""

    paths: Paths
    choice: Any = None  # the `PathChoice` that the paths were made of
    # makes the head's output of the features of all paths; None for the logits of a single path
    answer: Callable[[Tensor], Tensor] | None = None


class ThisThread(local):
    """The context of one thread, which overrides that of the model; a compiled graph sees its own thread's, too."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.is_replaced = False  # whether a forward runs that a library has put in place of the model's

    def __deepcopy__(self, memo: dict[int, Any]) -> ThisThread:
        return ThisThread()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ThisThread, ()


class ActiveExpansions:
    """The expansions that a model runs: those of `chosen` in all threads, unless `thread` has a context of its own."""

    def __init__(self, chosen: Context, model: Any = None) -> None:
        self.chosen, self.thread = chosen, ThisThread()
        # every module of the model has them
        self.model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActiveExpansions:
        """Copy them with the model. A copy of one of its modules, such as PEFT trains, runs what the model runs."""
        model = None if self.model is None else self.model()
        if model is not None and id(model) not in memo:
            return self
        memo[id(self)] = ActiveExpansions(deepcopy(self.chosen, memo), memo.get(id(model)))
        return memo[id(self)]

    def __reduce__(self) -> tuple[Any, ...]:
        return ActiveExpansions, (self.chosen,)

    def now(self) -> Context:
        """Return the context of this thread."""
        context = self.thread.context
        return self.chosen if context is None else context

    @contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """Run another context in this thread inside a `with` block.

        Raises:
            RuntimeError: If blocks end in another order than they began, as those of two generators may.
        """
        before, self.thread.context = self.thread.context, context
        try:
            yield
        finally:
            now, self.thread.context = self.thread.context, before
            if now is not context:
                # what ran meanwhile had the choice of another block
                self.thread.context = None
                raise RuntimeError(
                    "Blocks that choose expansions ended in another order than they began, and share this thread: "
                    "tasks or generators ran with each other's choice. Give each a thread, or choose by "
                    "expansion_names in each call."
                )

    def check_frozen(self) -> None:
        """Refuse weights of the base that train outside the model's own forward, which lets their gradients pass.

        Raises:
            RuntimeError: If modules of the model are called by themselves, and the base trains.
        """
        # in each step of a training there is a context
        if self.thread.context is not None or self.model is None:
            return
        model = self.model()
        if model is not None and model.base_trains():
            raise RuntimeError(
                "Weights of the base train, and modules of the model are called by themselves: their gradients would "
                "stop where nothing new trains. Call the model, as model(input_ids)."
            )

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Bind a function to the context of now; a backward pass may call it again in another thread."""
        context = self.now()

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.within(context):
                return function(*args, **kwargs)

        return run

    def checkpointed(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function by a checkpointing one, so that its second run has the context of the first."""
        return checkpoint(self.bind(function), *args, **kwargs)


def memo(known: dict[Any, Any], key: Any, make: Callable[[Any], Any]) -> Any:
    """Return the value that `make` gives for a key, stored in `known`; a compiled graph stores nothing."""
    if key in known:
        return known[key]
    made = make(key)
    if not torch.compiler.is_compiling():
        known[key] = made
    return made
