"""Expand Hugging Face checkpoints, prove that nothing changed, and take the expansion off again.

    from scale_surgery import Request, expand, strip, verify

    expand("base", Request(layers="last:4"), "expanded")
    verify("expanded").passed
    strip("expanded", "base-again")

Importing this package imports neither torch nor transformers. Its names are imported when one is asked for: a command
needs few of their modules, and starts in two thirds of the time. After `scale_surgery.register()` expanded models
load by transformers' auto classes without remote code.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scale_surgery.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import a room of this package, or the public names with the first that is asked for."""
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        api = import_module(f"{__name__}.api")
        if name in (*api.__all__, "__all__"):
            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __getattr__("__all__")
