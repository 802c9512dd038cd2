"""What it costs: the page has what the command prints, and that is what the records say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from benchmarks.costs import PANELS, Cost, draw, read_costs, table

ROOT = Path(__file__).parents[2]


def is_recorded(cost: Cost) -> bool:
    """Whether the record has the row's times in one line, and its memory, which may stand in a sentence."""
    text = (ROOT / "benchmarks" / f"{cost.record}.md").read_text(encoding="utf-8")

    def has(words: str, name: str) -> bool:
        number = cost.measured.get(name, "").removesuffix(" s")
        return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", words) is not None

    return has(text, "memory") and any(has(line, "time") and has(line, "generation") for line in text.splitlines())


def test_the_page_has_the_table() -> None:
    lines = list(table(read_costs()))
    assert "\n".join(["", *lines, ""]) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(lines) == 2 + 10


def test_every_number_stands_in_its_record() -> None:
    first, *_ = costs = read_costs()
    assert [cost for cost in costs if not is_recorded(cost)] == []
    for name in first.measured:
        assert not is_recorded(replace(first, measured={**first.measured, name: "1.17"}))


def test_the_figure_has_a_panel_for_each_thing_to_compare_with(tmp_path: Path) -> None:
    draw(read_costs(), tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 1000
    assert set(PANELS) < {cost.beside for cost in read_costs()}
