"""The forecast of memory: a process with its libraries, the tokenizer while it loads, and the values that are made."""

from __future__ import annotations

import pytest

from scale_surgery.deriving.planned import plan
from scale_surgery.planning.costs import EXTENDING_TOKENIZER, LOADED_TOKENIZER, LOADING_TOKENIZER, PROCESS_BYTES
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from tests.running.test_tokenizer import write_tokenizer
from tests.tiny import save_tiny


@pytest.fixture
def base(tmp_path):
    """A base without a tokenizer; a test may give it one."""
    return save_tiny(tmp_path / "base", "llama", vocab_size=300)


def test_a_tokenizer_counts_by_the_bytes_of_its_file(base, tmp_path):
    def forecast(request: Request) -> int:
        return plan(base, request).costs.peak_memory_bytes

    values = forecast(Request("last:1")) - PROCESS_BYTES
    assert 0 < values < 10_000_000
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    # white space makes a file longer, as a large vocabulary does
    file = base / "tokenizer.json"
    for more in (0, 100_000_000):
        file.write_text(file.read_text() + " " * more)
        size = file.stat().st_size
        # what is made comes after what loading needs alone
        wanted = max(LOADING_TOKENIZER * size, LOADED_TOKENIZER * size + values)
        assert forecast(Request("last:1")) == PROCESS_BYTES + wanted
        if not more:
            tokens = forecast(Request("none", new_tokens=NewTokens(("zorbified",))))
            assert (
                PROCESS_BYTES + EXTENDING_TOKENIZER * size < tokens < PROCESS_BYTES + EXTENDING_TOKENIZER * size + 1e6
            )


def test_a_plan_that_is_read_back_has_the_same_forecast(base, tmp_path):
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    expansion = expand(base, Request("last:1"), tmp_path / "expanded")
    assert expansion.plan == plan(base, Request("last:1"))
