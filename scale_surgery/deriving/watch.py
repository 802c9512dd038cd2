"""Record a forward of a twin: what every module read and gave, and what went into attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# arguments of attention functions with an entry for each head
EXTRAS = ("s_aux", "sinks", "position_bias", "alibi", "head_mask")
# names under which stock modules hand on the residual stream
STREAM_NAMES = ("hidden_states", "x", "inputs", "input", "hidden_state")


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module.

    Attributes:
        name: Name of the module.
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        read: First tensor that it was called with, still part of the graph.
        gave: First tensor that it gave, the same.
        before: A copy of the values that it read.
        after: A copy of the values that it gave.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    read: Tensor | None
    gave: Tensor | None
    before: Tensor | None
    after: Tensor | None

    def rerun(self, read: Tensor) -> Tensor | None:
        """Call the module once more, in the same way but with another tensor in the place of the first."""
        args = tuple(read if value is self.read else value for value in self.args)
        kwargs = {key: read if value is self.read else value for key, value in self.kwargs.items()}
        with attention_noted():
            return first_tensor(self.module(*args, **kwargs))


@dataclass(frozen=True)
class Attention:
    """A call of an attention function: queries, keys and values as (batch, heads, tokens, features)."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The calls of one forward, in the order in which they ended."""

    calls: tuple[ModuleCall, ...]
    attentions: tuple[Attention, ...]

    def inside(self, path: str) -> list[ModuleCall]:
        """Calls of what lies inside a module, with names inside it."""
        start = f"{path}."
        return [replace(call, name=call.name.removeprefix(start)) for call in self.calls if call.name.startswith(start)]

    def of(self, path: str) -> ModuleCall | None:
        """First call of a module."""
        return next((call for call in self.calls if call.name == path), None)


def first_tensor(value: Any) -> Tensor | None:
    """The tensor that a module gave, or the first of several."""
    if isinstance(value, (tuple, list)):
        return first_tensor(value[0]) if value else None
    return value if isinstance(value, Tensor) else None


def _read_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    named = [kwargs[name] for name in STREAM_NAMES if name in kwargs]
    return next((value for value in (*args[:1], *named, *args, *kwargs.values()) if isinstance(value, Tensor)), None)


def watch(model: PreTrainedModel, ids: Tensor, layers: str) -> Trace:
    """Run a model once, and record inputs and outputs of every module; tensors keep their graph."""
    calls: list[ModuleCall] = []
    names = _names(model)
    with ExitStack() as stack:
        current = stack.enter_context(_current_layer(model, layers))
        for module, module_names in names.items():
            hook = _noting(calls, module_names, current)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        attentions = stack.enter_context(attention_noted())
        model(input_ids=ids, use_cache=False)
    return Trace(tuple(calls), tuple(attentions))


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Names of each module; a module that layers share has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


@contextmanager
def _current_layer(model: nn.Module, layers: str) -> Iterator[list[str]]:
    """The path of the layer that runs, as the last of a list."""
    current = [""]
    with ExitStack() as stack:
        for name, layer in model.get_submodule(layers).named_children():
            note = lambda *_, path=f"{layers}.{name}.": current.append(path)  # noqa: E731
            stack.callback(layer.register_forward_pre_hook(note).remove)
        yield current


def _noting(calls: list[ModuleCall], names: list[str], current: list[str]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = next((candidate for candidate in names if candidate.startswith(current[-1])), names[0])
        read, gave = _read_tensor(args, kwargs), first_tensor(result)
        calls.append(ModuleCall(name, module, args, kwargs, read, gave, _copy(read), _copy(gave)))

    return note


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@contextmanager
def attention_noted() -> Iterator[list[Attention]]:
    """Record queries, keys and values of stock modules; attention itself is unchanged."""
    noted: list[Attention] = []
    functions: Any = ALL_ATTENTION_FUNCTIONS

    def noting(name: str) -> Any:
        def note(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            **options: Any,
        ) -> Any:
            extras = tuple(extra for extra in EXTRAS if options.get(extra) is not None)
            noted.append(Attention(module, query, key, value, extras))
            return _attention_of(module, name)(module, query, key, value, attention_mask, **options)

        return note

    before = dict(functions._local_mapping)
    for name in ("sdpa", "eager"):
        functions[name] = noting(name)
    try:
        yield noted
    finally:
        # restore functions that others registered under these names
        functions._local_mapping.clear()
        functions._local_mapping.update(before)


def _attention_of(module: nn.Module, name: str) -> Any:
    """The function that computes attention; each file of transformers has its own eager one."""
    eager = vars(import_module(type(module).__module__)).get("eager_attention_forward")
    return sdpa_attention_forward if name == "sdpa" or eager is None else eager


def depends(target: Tensor, *sources: Tensor) -> list[Tensor | None]:
    """Say on which features of each source a tensor depends."""
    weights = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((target * weights).sum(), sources, retain_graph=True, allow_unused=True)
    masks = [None if gradient is None else gradient.flatten(0, -2).abs().amax(0) > 0 for gradient in gradients]
    return [mask if mask is not None and bool(mask.any()) else None for mask in masks]


def is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two tensors hold the same values, in any shape."""
    if a is None or b is None or a.numel() != b.numel():
        return False
    return torch.equal(a.reshape(-1), b.reshape(-1))


def is_combination(target: Tensor, parts: list[Tensor]) -> list[float] | None:
    """Find the numbers a, b, ... with target = a first + b second + ..."""
    matrix = torch.stack([tensor.reshape(-1).double() for tensor in parts], 1)
    wanted = target.reshape(-1, 1).double()
    solution = torch.linalg.lstsq(matrix, wanted).solution
    error = (matrix @ solution - wanted).abs().max()
    return solution.flatten().tolist() if bool(error <= 1e-4 * wanted.abs().max().clamp(min=1e-6)) else None
