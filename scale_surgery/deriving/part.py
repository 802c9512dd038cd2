"""A part of a layer that was run: its calls, the linears that read the residual stream, the one that writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scale_surgery.deriving.watch import Attention, ModuleCall, is_combination, is_same

Change = Callable[[Tensor], Tensor]


class SplitError(Exception):
    """Why the features of a part cannot be widened; its text is for the user."""


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer that reads the residual stream.

    Attributes:
        name: Name inside the layer; empty where its linears lie in the layer itself.
        module: The module, or the layer.
        call: Its call; None where it is the layer itself.
        inside: Calls inside it, with names inside the layer.
        entry: Its input.
        attentions: Calls of attention inside it.
    """

    name: str
    module: nn.Module
    call: ModuleCall | None
    inside: tuple[ModuleCall, ...]
    entry: Tensor
    attentions: tuple[Attention, ...]

    @property
    def hidden(self) -> int:
        """Features of the residual stream."""
        return self.entry.shape[-1]

    @property
    def linears(self) -> list[ModuleCall]:
        """Calls of linears."""
        return [call for call in self.inside if is_linear(call.module)]

    @property
    def readers(self) -> list[ModuleCall]:
        """Linears that read the residual stream."""
        wide = [call for call in self.linears if features(call.module)[0] == self.hidden]
        return [call for call in wide if is_same(call.before, self.entry)]

    @property
    def inner_linears(self) -> list[ModuleCall]:
        """Linears that neither read nor write it."""
        readers, writer = {reader.name for reader in self.readers}, self.writer
        return [call for call in self.linears if call.name not in readers and call is not writer]

    @property
    def writer(self) -> ModuleCall | None:
        """The linear that writes to the residual stream: the last one, if it gives as many features."""
        readers = {reader.name for reader in self.readers}
        rest = [call for call in self.linears if call.name not in readers]
        return rest[-1] if rest and features(rest[-1].module)[1] == self.hidden else None

    @property
    def leaves(self) -> list[ModuleCall]:
        """Calls of modules without children that compute something and are no linears."""
        return [
            call
            for call in self.inside
            if not list(call.module.children())
            and not is_linear(call.module)
            and not isinstance(call.module, (nn.Dropout, nn.Identity))
            and call.before is not None
            and call.before.is_floating_point()
            # a rotary embedding reads the stream for its device alone
            and "rotary" not in f"{type(call.module).__name__.lower()} {call.name}"
        ]

    @property
    def uncalled_parameters(self) -> list[str]:
        """Parameters that are of no linear and no module that was called, with names inside the part."""
        if not self.name:
            return []
        leaves = [call.module for call in self.inside if not list(call.module.children())]
        called = {id(parameter) for module in leaves for parameter in module.parameters()}
        return [name for name, parameter in self.module.named_parameters() if id(parameter) not in called]

    def mixes_tokens(self) -> bool:
        """Return True if its output for the last token depends on other tokens."""
        if self.call is None or self.entry.dim() != 3 or self.call.after is None or self.call.after.dim() != 3:
            return False
        entry = self.entry.clone()
        entry[:, :-1] += torch.randn(entry[:, :-1].shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            gave = self.call.rerun(entry)
        return gave is not None and not torch.allclose(gave[:, -1], self.call.after[:, -1], atol=1e-5, rtol=1e-4)

    def writer_is_output(self) -> bool:
        """Return True if the part returns its writer's output, or a multiple of it."""
        if self.call is None or self.writer is None:
            return self.writer is not None
        gave, written = self.call.after, self.writer.after
        return (
            gave is not None
            and written is not None
            and gave.numel() == written.numel()
            and is_combination(gave, [written]) is not None
        )

    def only_readers_read(self) -> bool:
        """Return True if only the readers see the stream: with their outputs fixed, another stream changes nothing."""
        if self.call is None or self.writer is None:
            return self.writer is not None
        fixed = {
            reader.module: lambda _, output=reader.after: output for reader in self.readers if reader.after is not None
        }
        entry = self.entry + torch.randn(self.entry.shape, generator=torch.Generator().manual_seed(4))
        changed, before = self.written(fixed, entry), self.writer.before
        if changed is None or before is None or changed.shape != before.shape:
            return False
        # a second computation may round otherwise
        return torch.allclose(changed, before, atol=1e-5, rtol=1e-4)

    def written(self, changes: Mapping[nn.Module, Change], entry: Tensor | None = None) -> Tensor | None:
        """Return the writer's input after the outputs of other linears were changed."""
        seen: list[Tensor] = []
        assert self.call is not None and self.writer is not None
        with ExitStack() as stack, torch.no_grad():
            for module, change in changes.items():
                stack.enter_context(_changed(module, change))
            hook = self.writer.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
            stack.callback(hook.remove)
            shape = self.entry.shape if self.call.read is None else self.call.read.shape
            self.call.rerun((self.entry if entry is None else entry).reshape(shape))
        return seen[0] if seen else None


@contextmanager
def _changed(module: nn.Module, change: Change) -> Iterator[None]:
    hook = module.register_forward_hook(lambda _module, _args, result: change(result))
    try:
        yield
    finally:
        hook.remove()


def is_transposed(module: nn.Module) -> bool:
    """Return True if a linear stores its weight as (inputs, outputs)."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    """Return True if a module is a plain linear map, with or without a bias."""
    if is_transposed(module) or type(module).forward is nn.Linear.forward:
        return True
    return isinstance(module, nn.Linear) and _gives_product(module)


def _gives_product(module: nn.Linear) -> bool:
    """A subclass of a linear may write the product in another way, or compute something else."""
    x = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        # the forward itself, without hooks that change its output
        try:
            given = type(module).forward(module, x)
        except RuntimeError:
            return False
        expected = nn.functional.linear(x, module.weight, module.bias)
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return False
    return torch.allclose(given, expected, atol=1e-5, rtol=1e-4)


def features(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear."""
    rows, columns = module.get_parameter("weight").shape
    return (int(rows), int(columns)) if is_transposed(module) else (int(columns), int(rows))
