"""vLLM gives the greedy tokens of a fused Gemma, also past its sliding window; skipped without vLLM's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scale_surgery import Probes, Request, expand, merge
from tests.conftest import load, shake
from tests.real.test_model import TEXT
from tests.vllm.check import SETTINGS
from tests.vllm.export import NEW_TOKENS, compute

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
WINDOW = 512
# a new key/value head, so that layers differ in heads
REQUEST = Request("last:4", variant="adapt", up_kv_heads=1)
STARTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 5, 8,",
)


def answers(path: Path) -> tuple[list[list[int]], str]:
    """The tokens that vLLM gives after the prompts beside a model, and what it wrote to stderr."""
    command = (PYTHON, "tests/vllm/check.py", "--serve", path)
    run = subprocess.run(command, cwd=ROOT, env=os.environ | SETTINGS, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return json.loads(run.stdout.strip().splitlines()[-1]), run.stderr


@pytest.mark.skipif(not PYTHON.is_file(), reason=f"{PYTHON} is not there. Make it: make test-vllm")
def test_vllm_gives_the_tokens_of_a_fused_model(gemma: Path, room: Path) -> None:
    blocks = shake(expand(gemma, REQUEST, room / "wide", base_weights="link").path, by=0.01)
    fused = merge(blocks, room / "served", probes=Probes(max_new_tokens=0)).path
    tokenizer: Any = AutoTokenizer.from_pretrained(gemma)
    texts = [*(" ".join([start, *[TEXT] * 8]) for start in STARTS[:2]), *STARTS]
    ids = [tokenizer(text).input_ids for text in texts]
    compute(fused, ids, wanted=len(STARTS))
    expected = json.loads((room / "served.expected.json").read_text())
    lengths = [len(prompt) for prompt in expected["prompts"]]
    assert max(lengths) > WINDOW > min(lengths)
    tokens, said = answers(fused)
    assert tokens == expected["tokens"]
    assert "Unrecognized keys" not in said
    # the control: the base goes on with other tokens
    base, options = (
        load(gemma, dtype=torch.float32),
        {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None},
    )
    short = [prompt for prompt in expected["prompts"] if len(prompt) < WINDOW]
    made = [base.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in short]
    assert any(other not in tokens for other in made)
