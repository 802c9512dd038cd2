"""Rows of tokens that somebody added and never trained are named; those of trained or special tokens are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from scale_surgery import Request, expand
from scale_surgery.biographies import SHIPPED_MODEL
from tests.command import run


def resized(folder: Path, *tokens: str | AddedToken, trained: bool = False) -> Path:
    """The shipped model after somebody added tokens as transformers' documentation says."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
    before = len(tokenizer)
    tokenizer.add_tokens(list(tokens))
    model.resize_token_embeddings(len(tokenizer))
    if trained:
        with torch.no_grad():
            rows = model.get_input_embeddings().weight
            rows[before:] += 0.1 * torch.randn_like(rows[before:]) * rows[:before].std()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def test_untrained_tokens_are_named(tmp_path: Path) -> None:
    base = resized(tmp_path / "base", *(f"Wort{number}" for number in range(7)))
    text = " ".join(run("expand", base, "--layers", "3", "-o", tmp_path / "wide").output.split())
    assert "warning: the tokenizer has 7 added tokens that nobody trained, such as 'Wort0', 'Wort1', 'Wort2'. " in text


@pytest.mark.parametrize(
    ("tokens", "trained"), [((), False), (("Wort",), True), ((AddedToken("<|turn|>", special=True),), False)]
)
def test_no_trained_and_special_tokens_are_no_reason_to_warn(
    tmp_path: Path, tokens: tuple[str | AddedToken, ...], trained: bool
) -> None:
    base = resized(tmp_path / "base", *tokens, trained=trained) if tokens else SHIPPED_MODEL
    assert expand(base, Request("3"), tmp_path / "wide").warnings == ()
