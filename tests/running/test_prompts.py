"""Prompts of a file, one per line, read as texts are."""

from __future__ import annotations

from pathlib import Path

from scale_surgery.running.prompts import read_prompts


def test_only_line_ends_end_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufefffirst\u2028still first\r\nsecond\x0c\n\n  \nthird\u0085".encode())
    assert read_prompts(file) == ("first\u2028still first", "second\x0c", "third\u0085")
