"""Expand Hugging Face checkpoints, prove that nothing changed, and take the expansion off again.

    from scale_surgery import Request, expand, strip, verify

    expand("base", Request(layers="last:4"), "expanded")
    verify("expanded").passed
    strip("expanded", "base-again")

Importing this package imports neither torch nor transformers. Its names are imported on first use, which cuts the start
time of a command by a third. After `scale_surgery.register()`, transformers' auto classes load expanded models without
remote code.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scale_surgery.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import a subpackage or module, or all public names on the first use of one."""
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        api = import_module(f"{__name__}.api")
        if name in (*api.__all__, "__all__"):
            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __getattr__("__all__")
