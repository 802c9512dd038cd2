"""The package's table of contents."""

from __future__ import annotations

from types import ModuleType

import scale_surgery


def test_all_is_what_is_exported_and_sorted() -> None:
    public = {
        name
        for name, value in vars(scale_surgery).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(scale_surgery.__all__) == public | {"__version__"}
    assert scale_surgery.__all__ == sorted(scale_surgery.__all__)


def test_verbs_are_functions_not_the_modules_of_the_same_name() -> None:
    for verb in ("expand", "inspect", "plan", "strip", "verify"):
        assert callable(getattr(scale_surgery, verb)), verb
