"""Progress bars end where they said they would: one that stops before looks like a run that was cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scale_surgery import GivenBase, Request, apply, expand, extract, merge, route_export, strip, verify
from tests.conftest import Bars
from tests.each import mostly

REQUESTS = {
    "up stream": Request("0,2", variant="adapt"),
    "no up stream": Request("0,2", variant="adapt", up_width=0),
    "grow": Request("1", method="grow"),
    "depth": Request("0,2", method="depth"),
}


@pytest.mark.parametrize("name", mostly(REQUESTS, next(iter(REQUESTS)).__eq__))
def test_every_bar_ends_where_it_said(base_of: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    base, bars = base_of("llama"), Bars()
    wide = expand(base, REQUESTS[name], tmp_path / "wide", track=bars).path
    verify(wide, base=base, record=False, track=bars)
    strip(wide, tmp_path / "base", track=bars)
    extract(wide, tmp_path / "extract", track=bars)
    apply(tmp_path / "extract", tmp_path / "applied", GivenBase(base), track=bars)
    if name != "depth":
        routed = route_export(wide, tmp_path / "routed", track=bars).path
        verify(routed, record=False, track=bars)
    if "up stream" in name:
        fused = merge(wide, tmp_path / "fused", "fused", track=bars).path
        verify(fused, record=False, track=bars)
        merge(fused, tmp_path / "blocks", "blocks", track=bars)
    if name in ("no up stream", "grow"):
        merge(wide, tmp_path / "stock", "stock", track=bars)
    assert len(bars.seen) > 10 and bars.unfinished == []
