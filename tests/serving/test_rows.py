"""Tokens of one forward that run different expansions: each gets the logits of its own expansion alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.request import Request
from scale_surgery.serving.rows import RowModel
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from tests.conftest import load, shake
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES, save_tiny

# expansions that differ in layers, widths, heads and variant
WIDE = Request("all", variant="adapt", init_w22="random", name="wide")
NARROW = Request("1", variant="adapt", collaborate="both", up_width=16, init_w22="random", name="narrow")
OTHERS = {
    "preserve": Request("1-2", init_w22="random", name="other"),
    "gated": Request("0,2", variant="gated", collaborate="both", init_w22="random", name="other"),
    "without_up_stream": Request("1", variant="adapt", up_width=0, init_w22="random", name="other"),
    "without_heads": Request("1-2", variant="adapt", up_width=24, up_kv_heads=0, init_w22="random", name="other"),
    "grow": Request("1-2", method="grow", name="other"),
}
LENGTHS = (5, 9, 7, 4, 6)
ROWS = ("wide", None, "narrow", "wide", None)
# operands have other strides than in the model alone, and rows side by side are larger products: sums may run in
# another order. Logits are up to 10, and those of another expansion differ by more than 1
ROUNDING = 5e-5


def composed(folder: Path, family: str, *requests: Request, **sizes: Any) -> Path:
    """Write a folder of one base and several expansions with random blocks."""
    base = save_tiny(folder / "base", family, **sizes)
    extracts = []
    for seed, request in enumerate(requests, 1):
        wide = shake(expand(base, request, folder / f"{request.name}-wide").path, seed, 0.3)
        extracts.append(extract(wide, folder / f"{request.name}-extract").path)
    return compose(base, extracts, folder / "both").path


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (1, length), generator=generator) for length in LENGTHS]


def alone(model: Any, name: str | None, ids: Tensor) -> Tensor:
    """Compute the logits of an expansion alone."""
    with model.use_expansion(name):
        return model(input_ids=ids, use_cache=False).logits


def side_by_side(rows: RowModel, numbers: list[int]) -> list[Tensor]:
    """Compute the logits of prompts that lie side by side in one row, and see nothing of each other."""
    ids = torch.cat(prompts(), dim=1)
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    seen = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    each = [number for number, length in zip(numbers, LENGTHS, strict=True) for _ in range(length)]
    features = rows(ids, each, position_ids=places, attention_mask=mask[None, None], use_cache=False)
    return list(rows.logits(features).split(LENGTHS, dim=1))


def check_alone(both: Path) -> None:
    """Compare the logits of each expansion, and of the base, with those of the model that runs it alone."""
    model, rows = load(both), RowModel(load(both))
    ids = prompts()[1]
    expected = [alone(model, name, ids) for name in (None, *model.expansions)]
    for number in range(len(expected)):
        found = rows.logits(rows(ids, [number] * ids.shape[1]))
        for other, logits_of_other in enumerate(expected):
            difference = float((found - logits_of_other).abs().max())
            assert difference < ROUNDING if other == number else difference > 1, (number, other)
    assert len(expected) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_of_one_expansion_get_its_logits(tmp_path, family):
    check_alone(composed(tmp_path, family, WIDE, NARROW))


@pytest.mark.parametrize("other", OTHERS)
def test_each_kind_of_expansion_gets_its_logits(tmp_path, other):
    check_alone(composed(tmp_path, "llama", WIDE, OTHERS[other]))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_rows_side_by_side_get_the_logits_of_each_alone(tmp_path, family):
    both = composed(tmp_path, family, WIDE, NARROW, sliding_window=64)
    model, rows = load(both, attn_implementation="eager"), RowModel(load(both, attn_implementation="eager"))
    numbers = [0 if name is None else 1 + model.expansions.index(name) for name in ROWS]
    expected = [alone(model, name, ids) for name, ids in zip(ROWS, prompts(), strict=True)]
    for row, logits in zip(side_by_side(rows, numbers), expected, strict=True):
        torch.testing.assert_close(row, logits, rtol=0, atol=ROUNDING)
    # the same rows with expansions in another order
    for row, logits in zip(side_by_side(rows, [*numbers[1:], numbers[0]])[:3], expected[:3], strict=True):
        assert (row - logits).abs().max() > 1


@pytest.mark.slow
def test_expansions_of_different_layers_lie_side_by_side(tmp_path):
    """The narrow one is above the wide one: its modules read a hidden state that is wider than they need."""
    low = Request("0", variant="adapt", collaborate="both", up_width=32, init_w22="random", name="wide")
    high = Request("2", variant="adapt", collaborate="both", up_width=16, init_w22="random", name="narrow")
    both = composed(tmp_path, "llama", low, high)
    model, rows = load(both, attn_implementation="eager"), RowModel(load(both, attn_implementation="eager"))
    numbers = [0 if name is None else 1 + model.expansions.index(name) for name in ROWS]
    for row, name, ids in zip(side_by_side(rows, numbers), ROWS, prompts(), strict=True):
        torch.testing.assert_close(row, alone(model, name, ids), rtol=0, atol=ROUNDING)


def test_logits_of_some_tokens_are_those_of_their_own_expansions(tmp_path):
    rows = RowModel(load(composed(tmp_path, "llama", WIDE, NARROW)))
    ids = torch.cat(prompts(), dim=1)
    features = rows(ids, [number % 3 for number in range(ids.shape[1])])
    chosen = torch.tensor([7, 0, 20, 5])
    torch.testing.assert_close(
        rows.logits(features[:, chosen]), rows.logits(features)[:, chosen], rtol=0, atol=ROUNDING
    )


def test_tokens_behind_the_given_numbers_are_of_the_base(tmp_path):
    both = composed(tmp_path, "llama", WIDE, NARROW)
    rows, (ids, *_) = RowModel(load(both)), prompts()
    padded = rows.logits(rows(ids, [1, 1]))
    assert torch.equal(padded, rows.logits(rows(ids, [1, 1, *[0] * (ids.shape[1] - 2)])))


def test_an_expansion_with_new_tokens_is_refused(tmp_path):
    with_tokens = replace(NARROW, new_tokens=NewTokens(("Word",)))
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    base = save_tiny(tmp_path / "base", "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    with pytest.raises(PlanError) as caught:
        RowModel(load(expand(base, with_tokens, tmp_path / "wide").path))
    assert list(caught.value.problems) == [Problem("rows-new-tokens", "narrow")]


def test_a_mixture_of_experts_is_refused(tmp_path):
    sizes = {"num_local_experts": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.MixtralConfig(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    with pytest.raises(PlanError) as caught:
        RowModel(load(expand(tmp_path / "base", WIDE, tmp_path / "wide").path))
    assert list(caught.value.problems) == [Problem("rows-block", "wide")]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt2"])
def test_attention_alone_mixes_tokens(tmp_path, family):
    with torch.inference_mode(False):
        rows = RowModel(load(composed(tmp_path, family, WIDE, NARROW)))
        watched = rows.watch()
        assert list(watched) == rows.attentions() and len(watched) == 3
        assert all(given["head_size"] > 0 and given["scaling"] > 0 for given in watched.values())
        # what mixes tokens besides is found, in whatever layer it is
        layer = rows.base_model.get_submodule(rows.model.facts["layers"])[1]
        layer.register_forward_hook(lambda module, args, output: shifted(output))
        with pytest.raises(PlanError) as caught:
            rows.watch()
    assert [problem.code for problem in caught.value.problems] == ["rows-mixed"]


def shifted(output: Any) -> Any:
    """Add to each token a little of the one before it."""
    hidden = output[0] if isinstance(output, tuple) else output
    mixed = hidden + 1e-3 * hidden.roll(1, dims=1)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed


@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_a_state_space_is_refused(tmp_path, family):
    with torch.inference_mode(False):
        base = write_base(twin_config(family), torch.float32, tmp_path / "base")
        rows = RowModel(load(expand(base, Request("last:1", variant="adapt"), tmp_path / "wide").path))
        with pytest.raises(PlanError) as caught:
            rows.watch()
    assert {problem.code for problem in caught.value.problems} <= {"rows-mixed", "served-attention"}
