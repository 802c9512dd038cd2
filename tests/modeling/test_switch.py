"""The expansion switched off: the base model's results, bit for bit, whatever was trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Pair, load
from tests.each import each_of_few_in_a_form

IDS = torch.arange(3, 29).reshape(2, 13)
# kernels take other paths for other shapes
SHAPES = ((1, 1), (1, 2), (1, 7), (2, 13), (3, 5), (1, 33))


def trained(pair: Any) -> Any:
    """The expanded model after what stands for any training: every tensor that may train has moved."""
    model = pair.load()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def generated(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("request_name", ["preserve", "adapt", "adapt_without_up_stream"])
@each_of_few_in_a_form
def test_disabled_is_the_base_bit_for_bit(pair_of: Any, family: str, request_name: str, dtype: str, tied: bool) -> None:
    pair = pair_of(family, request_name, dtype, tied)
    model = trained(pair)
    wanted = logits(pair.base)
    assert not torch.equal(logits(model), wanted), "the control: training has changed the output"
    with model.expansion_disabled():
        for rows, length in SHAPES:
            ids = torch.arange(3, 3 + rows * length).reshape(rows, length) % 97
            assert torch.equal(logits(model, ids), logits(pair.base, ids)), (rows, length)
        assert torch.equal(logits(model, logits_to_keep=1), logits(pair.base, logits_to_keep=1))
        assert torch.equal(generated(model), generated(pair.base))
    assert not torch.equal(logits(model), wanted), "the switch goes back"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_disabled_with_each_attention_kernel(pair_of: Any, attention: str) -> None:
    pair = pair_of("llama", "adapt")
    model = trained(pair)
    base = load(pair.base_path, attn_implementation=attention)
    model.set_attn_implementation(attention)
    with model.expansion_disabled():
        assert torch.equal(logits(model), logits(base))


def test_on_again_gives_the_same_logits(pair_of: Any) -> None:
    model = trained(pair_of("gemma3_text", "adapt"))
    before = logits(model)
    with model.expansion_disabled(), model.expansion_disabled():
        assert not model.is_expansion_enabled
    assert model.is_expansion_enabled and torch.equal(logits(model), before)


def test_an_error_inside_switches_it_on_again(pair_of: Any) -> None:
    model = pair_of("llama").load()
    with pytest.raises(ZeroDivisionError), model.expansion_disabled():
        _ = 1 / 0
    assert model.is_expansion_enabled


def test_disabled_for_good_when_it_is_loaded(pair_of: Any) -> None:
    pair = pair_of("qwen3", "adapt")
    model = load(pair.path, expansion_enabled=False)
    assert torch.equal(logits(model), logits(pair.base)) and not model.is_expansion_enabled
    with model.expansion_disabled():
        pass
    assert not model.is_expansion_enabled, "what was off before stays off"


def test_trainable_parameters_are_those_that_require_gradients(pair_of: Any, capsys: Any) -> None:
    model = pair_of("llama", "adapt").load()
    counts = model.trainable_parameters()
    wanted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(sum(row.values()) for row in counts.values()) == wanted
    assert set(counts) == {"default"}
    assert set(counts["default"]) == {"w12", "w21", "w22", "norms", "biases", "embedding", "head"}
    w21 = [parameter for name, parameter in model.named_parameters() if name.endswith(".w21")]
    assert counts["default"]["w21"] == sum(block.numel() for block in w21)
    model.print_trainable_parameters()
    printed = capsys.readouterr().out
    assert f"trains {wanted:,} of" in printed and "default" in printed


def test_what_is_frozen_by_hand_is_not_counted(pair_of: Any) -> None:
    model = pair_of("llama").load()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.endswith(".w22"))
    assert sum(row["w21"] for row in model.trainable_parameters().values()) > 0
    assert sum(row.get("w22", 0) for row in model.trainable_parameters().values()) == 0


def test_names_of_adapters_are_refused_with_what_is_there_instead(llama: Pair) -> None:
    """Stock code would take them and do nothing."""
    ids = torch.ones(1, 2, dtype=torch.long)
    for run in (llama.expanded, llama.expanded.generate):
        with pytest.raises(ValueError, match=r"^adapter_names: is PEFT's, .* Give expansion_names=, "):
            run(ids, adapter_names=["law"])
