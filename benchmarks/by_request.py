"""What expansions by request cost in vLLM, beside the stock base and a fused expansion.

    python -m benchmarks.by_request make FOLDER --shape 100m
    .venv-vllm/bin/python -m benchmarks.by_request time FOLDER -o numbers.json

The first line needs this package, the second the environment that `make test-vllm` makes. All models are loaded into
one process and take turns; a round is one call of each. Prompts are as long for all, and new in each call.

    stock     the base, in vLLM's own class for Llama
    fused     the base with one expansion, merged
    none      a folder with two expansions, and no request names one
    one       the same folder: all requests name the first expansion
    mixed     the same folder: requests name the first, the second, or none, in turn

The middle half of the rounds is between the two numbers in brackets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from tests.vllm.check import SETTINGS

MODELS = {"stock": "base", "fused": "fused", "none": "both", "one": "both", "mixed": "both"}
PAIRS = (("none", "stock"), ("one", "fused"), ("mixed", "none"), ("fused", "stock"))
NAMES = {"one": ("first",), "mixed": ("first", "second", None)}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 8, 64, 32, 9


def make(folder: Path, shape_name: str) -> None:
    """Write the models."""
    from dataclasses import replace

    import torch

    from benchmarks.inference_models import REQUESTS, shake
    from benchmarks.make_checkpoint import SHAPES, make_checkpoint
    from scale_surgery import compose, expand, extract, merge, register

    register()
    make_checkpoint(folder / "base", SHAPES[shape_name], dtype=torch.float32)
    extracts = []
    for name in ("first", "second"):
        wide = expand(folder / "base", replace(REQUESTS["adapt"], name=name), folder / f"{name} blocks").path
        shake(wide)
        extracts.append(extract(wide, folder / f"{name} extract").path)
        if name == "first":
            merge(wide, folder / "fused")
    compose(folder / "base", extracts, folder / "both")


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of each model in each round."""
    os.environ.update(SETTINGS, OMP_NUM_THREADS="1")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"dtype": "float32", "max_model_len": 2 * (PROMPT_TOKENS + NEW_TOKENS), "max_num_seqs": PROMPTS}
    options |= {"skip_tokenizer_init": True, "enforce_eager": True}
    further = {"base": {}, "fused": {"trust_remote_code": True}, "both": {"enable_lora": True, "max_loras": 2}}
    loaded = {name: LLM(model=str(folder / name), **options, **more) for name, more in further.items()}
    wanted = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    for number in range(rounds + 1):
        # no prompt comes twice: vLLM keeps what it has read
        first = 3 + number * PROMPTS
        prompts = [{"prompt_token_ids": [first + offset, *range(3, 2 + PROMPT_TOKENS)]} for offset in range(PROMPTS)]
        for row, (name, model) in enumerate(MODELS.items()):
            asked = [named and LoRARequest(named, 1, str(folder / "both")) for named in NAMES.get(name, (None,))]
            asked = (asked * PROMPTS)[:PROMPTS]
            # the model of `none` is that of `one` and `mixed`, which has kept what it has read
            for prompt in prompts:
                prompt["prompt_token_ids"][1] = 1000 + row
            start = time.perf_counter()
            loaded[model].generate(prompts, wanted, lora_request=asked if any(asked) else None, use_tqdm=False)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def show(seconds: dict[str, list[float]]) -> None:
    """Print medians and ratios."""
    tokens = PROMPTS * NEW_TOKENS
    print(f"{'requests':8} {'new tokens a second':>20}")
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
