"""What fused and routed models cost in vLLM, beside a stock model of as many parameters.

    python -m benchmarks.served make FOLDER --shape 100m
    .venv-vllm/bin/python -m benchmarks.served time FOLDER -o numbers.json

The first line needs this package, the second vLLM (`make test-vllm` makes its environment) and nothing of this package:
it loads all models into one process and lets them take turns; a round is one call of each.

    dense       a stock Llama with as many parameters as the fused one
    fused       a random Llama, all layers expanded (`adapt`), merged
    half        the upper half of the layers expanded, merged
    routed      the same with a cosine router: two paths from the middle on

What is compared: fused / dense, and routed / half. The second would be 1.5 if a second path cost as much as the first:
1 + (L - L_fp) / L. The middle half of the rounds is between the two numbers in brackets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from tests.vllm.check import SETTINGS

MODELS = ("dense", "fused", "half", "routed")
PAIRS = (("fused", "dense"), ("routed", "half"))
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 8, 64, 32, 6


def make(folder: Path, shape_name: str) -> None:
    """Write the models."""
    from dataclasses import replace

    from benchmarks.inference_models import REQUESTS, dense_shape, shake
    from benchmarks.make_checkpoint import SHAPES, make_checkpoint
    from scale_surgery import CosineRouter, expand, merge, register, route_export

    register()
    import torch

    shape = SHAPES[shape_name]
    make_checkpoint(folder / "base", shape, dtype=torch.float32)
    half = f"{shape.layers // 2}-{shape.layers - 1}"
    for name, layers in (("fused", "all"), ("half", half)):
        wide = expand(folder / "base", replace(REQUESTS["adapt"], layers=layers), folder / f"{name} blocks").path
        shake(wide)
        done = merge(wide, folder / name)
        if name == "fused":
            make_checkpoint(folder / "dense", dense_shape(shape, done.parameters_before), dtype=torch.float32)
        else:
            # half of the tokens on either side, whatever random weights make of them
            merge(route_export(wide, folder / "routed blocks", CosineRouter(threshold=0.5)).path, folder / "routed")


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each model in each round."""
    os.environ.update(SETTINGS, OMP_NUM_THREADS="1")
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 2 * (PROMPT_TOKENS + NEW_TOKENS), "max_num_seqs": PROMPTS}
    models = {
        name: LLM(
            model=str(folder / name), trust_remote_code=True, skip_tokenizer_init=True, enforce_eager=True, **options
        )
        for name in MODELS
    }
    wanted = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    for number in range(rounds + 1):
        # no prompt comes twice: vLLM keeps what it has read
        first = 3 + number * PROMPTS
        prompts = [{"prompt_token_ids": [first + offset, *range(3, 2 + PROMPT_TOKENS)]} for offset in range(PROMPTS)]
        for name, model in models.items():
            start = time.perf_counter()
            model.generate(prompts, wanted, use_tqdm=False)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def show(seconds: dict[str, list[float]]) -> None:
    """Print medians and ratios."""
    tokens = PROMPTS * NEW_TOKENS
    print(f"{'model':8} {'new tokens a second':>20}")
    for name, durations in seconds.items():
        print(f"{name:8} {tokens / median(durations):20.1f}")
    for name, reference in PAIRS:
        ratios = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        print(f"{name} / {reference}: {middle:.2f} ({low:.2f} to {high:.2f}) times as long, {len(ratios)} rounds")


def main() -> None:
    """Make the models, or measure them."""
    verb, folder, *options = sys.argv[1:]
    given = dict(zip(options[::2], options[1::2], strict=True))
    if verb == "make":
        make(Path(folder), given.get("--shape", "100m"))
    else:
        seconds = measure(Path(folder), int(given.get("--rounds", ROUNDS)))
        show(seconds)
        if "-o" in given:
            Path(given["-o"]).write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
