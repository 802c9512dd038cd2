"""The benchmark of GGUF files: its models, its numbers, and what it says of a converter that stops."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from benchmarks import stock_to_gguf
from scale_surgery import plan
from scale_surgery.errors import SurgeryError
from tests.each import WAYS
from tests.families import FAMILIES


def reading(logits: list[list[float]], new: list[int]) -> stock_to_gguf.Reading:
    return stock_to_gguf.Reading([5] * len(logits), np.array(logits), new)


@pytest.fixture
def converter(tmp_path: Path) -> stock_to_gguf.Converter:
    """A script that lies beside the modules that llama.cpp's has, and stops."""
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "__init__.py").write_text("")
    (tmp_path / "conversion" / "base.py").write_text("class TextModel:\n    _set_vocab_gpt2 = None\n")
    (tmp_path / "conversion" / "phi.py").write_text("class Phi3MiniModel:\n    pass\n")
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys\nraise ValueError(f'{sys.argv[1]} is not supported')\n")
    return stock_to_gguf.Converter(script, Path(sys.executable))


def test_there_is_a_model_of_every_family(tmp_path: Path) -> None:
    assert set(stock_to_gguf.FAMILIES) == set(FAMILIES)
    for name in WAYS:
        base = stock_to_gguf.make_base(name, tmp_path / name)
        config = transformers.AutoConfig.from_pretrained(base)
        assert config.model_type == name
        tokenizer = transformers.AutoTokenizer.from_pretrained(stock_to_gguf.SHIPPED_MODEL)
        assert config.vocab_size >= len(tokenizer)
        for added, request in stock_to_gguf.REQUESTS.items():
            costs = plan(base, request).costs
            assert (costs.stock is None) == (added == "heads" and bool(FAMILIES[name].fixed_heads))


def test_drift_is_a_share_and_agreement_counts_tokens() -> None:
    before = [reading([[1.0, -4.0], [0.0, 2.0]], [1, 2, 3, 4])]
    after = [replace(before[0], logits=before[0].logits + np.array([[0.0, 0.0], [0.0, 1.0]]), new=[1, 2, 3, 9])]
    assert stock_to_gguf.drift(before, after) == 0.25
    assert stock_to_gguf.drift(before, before) == 0
    assert stock_to_gguf.agreement(before, after) == 0.75


def test_a_converter_that_stops_is_quoted(converter: stock_to_gguf.Converter, tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match=r"^converter: ValueError: some/model is not supported\.$"):
        stock_to_gguf.convert(converter, Path("some/model"), tmp_path / "model.gguf")
    result = stock_to_gguf.measure(stock_to_gguf.SHIPPED, "inner", converter, tmp_path / "work")
    assert result.problem is not None and "is not supported" in result.problem
    assert result.drift is None
