"""Make `import scale_surgery` enough to load an expanded model without remote code.

transformers has no plug-in point for model types, and importing it takes seconds, which the command line must
not pay to print its help. So registration waits until transformers' auto classes are imported, and then happens
once. This is the only thing that importing the package does to other packages.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.modeling_auto"


class _RegisterAfter(importlib.abc.Loader):
    """Load a module with its own loader, then register our model types."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from scale_surgery import modeling

        self.loader.exec_module(module)
        modeling.register()


class _WaitForAutoClasses(importlib.abc.MetaPathFinder):
    """Notice the import of transformers' auto classes; every other import passes by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


def register_when_ready() -> None:
    """Register now if transformers' auto classes are imported already, otherwise as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        from scale_surgery import modeling

        modeling.register()
    else:
        sys.meta_path.insert(0, _WaitForAutoClasses())
