"""Prompts of a file, one per line, read as texts are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scale_surgery.running.prompts import Batch, EncodedPrompts, read_prompts, token_problems


def test_only_line_ends_end_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufefffirst\u2028still first\r\nsecond\x0c\n\n  \nthird\u0085".encode())
    assert read_prompts(file) == ("first\u2028still first", "second\x0c", "third\u0085")


@pytest.mark.parametrize(
    ("ids", "problems"),
    [
        ([], 1),
        ([4, 6], 1),
        # the controls: the base's ids, and a new token
        ([4, 5], 0),
        ([9], 0),
    ],
)
def test_other_ids_are_a_problem_and_so_are_none(ids: list[int], problems: int) -> None:
    batch = Batch(torch.zeros(1, 1), torch.ones(1, 1))
    base = EncodedPrompts(("some words",), lambda _: {"input_ids": [4, 5]}, batch)
    assert len(token_problems(base, lambda _: {"input_ids": ids}, known=9)) == problems
