"""Own samples beside `generate` of the stock base, at the same batch.

python -m benchmarks.real.samples BASE EXPANDED
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

# each is measured so many times in turn, and the fastest counts
TIMES = 2


def measure(base: Path, expanded: Path, rows: int = 64, tokens: int = 16) -> list[tuple[str, float, float, float]]:
    """Measure processor time: work, seconds of own samples, seconds of the stock base, and the ratio."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scale_surgery import modeling
    from scale_surgery.progress import no_track
    from scale_surgery.text.beginnings import begin_texts
    from scale_surgery.training.base_samples import sample_base
    from scale_surgery.training.sampling import Sampling

    modeling.register()
    tokenizer = AutoTokenizer.from_pretrained(base)
    stock, wide = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (base, expanded))
    begins = begin_texts(tokenizer, base.name)
    sampling = Sampling(rows, len(begins.ids[0]) + tokens, 1.0, seed=0)
    ours, peer = fastest(
        lambda: sample_base(wide, begins, sampling, no_track),
        lambda: generate_stock(stock, begins.ids[0], sampling, tokenizer.eos_token_id),
    )
    return [(f"own samples, {rows} texts of {tokens} tokens", ours, peer, ours / peer)]


def generate_stock(model: Any, begin: Sequence[int], sampling: Any, end: int | None) -> None:
    """Sample as a user of transformers would, from the whole distribution."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(sampling.seed)
    ids = torch.tensor([list(begin)] * sampling.count)
    most = sampling.length - len(begin)
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=most, eos_token_id=end, pad_token_id=end or 0
    )
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)


def fastest(*works: Callable[[], Any]) -> list[float]:
    """The least processor time of each work; they take turns."""
    seconds = [[_seconds(work) for work in works] for _ in range(TIMES)]
    return [min(column) for column in zip(*seconds, strict=True)]


def _seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path))
@click.argument("expanded", type=click.Path(exists=True, path_type=Path))
@click.option("--rows", default=64, show_default=True, help="Texts in a batch.")
@click.option("--tokens", default=16, show_default=True, help="Tokens that are drawn of each.")
def main(base: Path, expanded: Path, rows: int, tokens: int) -> None:
    """Print the processor time of own samples and of the stock base."""
    for work, ours, peer, ratio in measure(base, expanded, rows, tokens):
        click.echo(f"{work}: {ours:.1f} s, stock {peer:.1f} s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
