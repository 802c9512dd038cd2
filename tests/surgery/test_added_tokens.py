"""Rows of tokens that somebody added and never trained are named; those of trained or special tokens are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from scale_surgery import Request, expand
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint, read_rows, read_tensor
from scale_surgery.errors import CheckpointError, Problem
from tests.command import run
from tests.conftest import refused

CHUNK_BYTES = "scale_surgery.checkpoint.folder.CHUNK_BYTES"


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


@pytest.mark.parametrize("chunk", [1, 3 * 128 * 4, 1 << 22])
def test_rows_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(CHUNK_BYTES, chunk)
    checkpoint, name = open_checkpoint(SHIPPED_MODEL), "model.embed_tokens.weight"
    whole = read_tensor(checkpoint, name)
    for start, stop in ((0, len(whole)), (5, 12), (7, 7)):
        chunks = dict(read_rows(checkpoint, name, start, stop))
        assert torch.equal(torch.cat([whole[:0], *chunks.values()]), whole[start:stop])
        assert all(torch.equal(rows[0], whole[first]) for first, rows in chunks.items())
        # a chunk has a row even if a row has more bytes
        assert all(rows.nbytes <= max(chunk, whole[0].nbytes) for rows in chunks.values())


@pytest.mark.parametrize("rows_in_a_chunk", [2, 700])
def test_small_chunks_name_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_in_a_chunk: int
) -> None:
    """Some of the new rows are trained: it matters which row is whose, across the borders of chunks."""
    base = resized(tmp_path / "base", *(f"Wort{number}" for number in range(5)))
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[[-5, -2]] += rows[:-5].std()
    model.save_pretrained(base)
    monkeypatch.setattr(CHUNK_BYTES, rows_in_a_chunk * 128 * 4)
    (warning,) = expand(base, Request("3"), tmp_path / "wide").warnings
    assert "3 added tokens that nobody trained, such as 'Wort1', 'Wort2', 'Wort4'. " in warning


def test_nothing_is_read_once_the_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error then would tell of a failure, beside a folder that is whole."""
    base, wide = resized(tmp_path / "base", "Wort"), tmp_path / "wide"

    def fail(*_: object) -> None:
        raise CheckpointError(Problem("tensor-unreadable", "model.safetensors", tensor="rows", error="of disk"))

    monkeypatch.setattr("scale_surgery.surgery.expand.read_rows", fail)
    with refused("tensor-unreadable", "model.safetensors", CheckpointError):
        expand(base, Request("3"), wide)
    assert not wide.exists()
