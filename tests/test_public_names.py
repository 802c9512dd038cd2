"""The package's table of contents."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import scale_surgery
from scale_surgery import api


def test_all_is_what_is_exported_and_sorted() -> None:
    public = {
        name
        for name, value in vars(api).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "version"
    }
    assert set(api.__all__) == public | {"__version__"}
    assert api.__all__ == sorted(api.__all__)


def test_the_package_has_them_and_its_rooms_and_nothing_else() -> None:
    lines = (
        "import sys, scale_surgery",
        "assert 'scale_surgery.api' not in sys.modules",
        "assert scale_surgery.surgery.__name__ == 'scale_surgery.surgery'",
        "from scale_surgery import modeling",
        "assert 'scale_surgery.api' not in sys.modules",
        "from scale_surgery import *",
        "assert expand is sys.modules['scale_surgery.api'].expand is scale_surgery.expand",
        "assert dir(scale_surgery) == sorted(scale_surgery.__all__)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
    with pytest.raises(AttributeError, match=r"^module 'scale_surgery' has no attribute 'widen'$"):
        scale_surgery.widen  # noqa: B018
