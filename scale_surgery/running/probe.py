"""Numbers: run the base and the expanded model on probe prompts and compare what comes out.

Both models see the same token ids in one left-padded batch, one model after the other. A model that is larger
than the memory given to it is streamed from its files, module by module (accelerate's disk offload).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scale_surgery.errors import CheckpointError
from scale_surgery.running.freeze import base_states

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Q: How many legs does a spider have?\nA:",
    "1, 2, 4, 8, 16,",
    "Der schnelle braune Fuchs",
    "東京は日本の",
    "Water boils at",
)
MAX_PROMPT_TOKENS = 48
MAX_PROMPTS = 64
# ids that stand in for text where a model has no tokenizer
NUM_RANDOM_PROMPTS = 4


@dataclass(frozen=True)
class Layer:
    """The base stream after one layer: largest absolute difference from the base model, and cosine with it."""

    layer: int
    drift: float
    cosine: float
    is_bit_equal: bool


@dataclass(frozen=True)
class Numbers:
    """What the probes showed.

    Attributes:
        prompts: Number of prompts, in one left-padded batch.
        tokens: Tokens in them.
        longest: Tokens of the longest.
        is_text: Whether they are text; seeded random ids otherwise, where the base has no tokenizer that loads.
        dtype: Dtype of the logits.
        attention: Attention kernel of both models.
        is_bit_equal: Whether the logits are equal, bit for bit.
        drift: Largest absolute difference of logits.
        largest_logit: Largest absolute logit of the base model.
        kl_divergence: Mean KL(base || expanded) over tokens, in nats.
        top1_agreement: Share of tokens whose most likely next token is the same.
        base_logits_bit_equal: Whether head times base stream equals the base model's, bit for bit; of a routed model,
            what its preserve path gives out.
        base_logits_drift: Largest absolute difference of those.
        excess: Loss of a prompt above that of the base, for the prompt where it is largest, in nats.
        rounding: What of the excess the rounding of logits in their dtype can explain, in nats.
        layers: The base stream layer by layer; layer -1 is the embedding.
        generation_equal: Whether greedy continuation with KV cache gives the base's tokens; None if not run.
        uncached_equal: The same without KV cache.
        new_tokens: Tokens generated for each prompt.
        load_problems: Tensors that were missing, unexpected or re-initialised on load.
        token_problems: Prompts whose token ids differ between the two tokenizers.
    """

    prompts: int
    tokens: int
    longest: int
    is_text: bool
    dtype: str
    attention: str
    is_bit_equal: bool
    drift: float
    largest_logit: float
    kl_divergence: float
    top1_agreement: float
    base_logits_bit_equal: bool
    base_logits_drift: float
    excess: float
    rounding: float
    layers: tuple[Layer, ...]
    generation_equal: bool | None
    uncached_equal: bool | None
    new_tokens: int
    load_problems: tuple[str, ...]
    token_problems: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """Probe prompts as token ids, left-padded, with the attention mask; both (prompts, tokens)."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ProbeRun:
    """What one model made of a batch; hidden states and logits on the CPU."""

    logits: Tensor
    base_logits: Tensor
    hidden: tuple[Tensor, ...]
    cached: Tensor | None
    uncached: Tensor | None
    attention: str
    load_problems: tuple[str, ...]


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """Prompts of a text file, one a line; the built-in ones where no file is given.

    Raises:
        CheckpointError: If the file cannot be read or holds no prompt.
    """
    if file is None:
        return PROMPTS
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as text ({error}).") from error
    prompts = tuple(line for line in lines if line.strip())
    if len(prompts) > MAX_PROMPTS:
        raise CheckpointError(
            f"{file}: holds {len(prompts)} prompts, expected at most {MAX_PROMPTS}. They run as one batch, and equal "
            "bits need few; they do not measure quality."
        )
    if not prompts:
        raise CheckpointError(f"{file}: holds no prompt, expected one a line.")
    return prompts


def make_batch(base_tokenizer: Any | None, prompts: Sequence[str], config: Any, new_tokens: int) -> Batch:
    """Turn prompts into one left-padded batch; seeded random ids where there is no tokenizer.

    Raises:
        CheckpointError: If the tokens to generate leave no room for a prompt in the model's context.
    """
    context = getattr(config, "max_position_embeddings", None) or 2 * MAX_PROMPT_TOKENS + new_tokens
    limit = min(MAX_PROMPT_TOKENS, context // 2, context - new_tokens)
    if limit < 1:
        raise CheckpointError(f"--new-tokens is {new_tokens}, expected fewer than the model's context of {context}.")
    if base_tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        lengths = [limit - 5 * i for i in range(NUM_RANDOM_PROMPTS)]
        rows = [torch.randint(config.vocab_size, (max(1, n),), generator=generator).tolist() for n in lengths]
    else:
        rows = [base_tokenizer(prompt)["input_ids"][:limit] or [0] for prompt in prompts]
    pad = getattr(base_tokenizer, "pad_token_id", None) or 0
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Batch(ids, mask)


def token_problems(base: Any | None, expanded: Any | None, prompts: Sequence[str]) -> tuple[str, ...]:
    """Prompts to which the two tokenizers give different ids."""
    if base is None:
        return ()
    if expanded is None:
        return ("the expanded model's tokenizer does not load, the base's does.",)
    pairs = [(prompt, base(prompt)["input_ids"], expanded(prompt)["input_ids"]) for prompt in prompts]
    return tuple(f"token ids of {text!r}: {has}, expected {wants}." for text, wants, has in pairs if has != wants)


@torch.no_grad()
def run_model(
    model: Any, problems: Sequence[str], batch: Batch, width: int, new_tokens: int, device: str = "cpu"
) -> ProbeRun:
    """Run one model on a batch: logits, base stream after each layer, base logits, greedy continuation.

    Args:
        model: The model.
        problems: What went wrong when it was loaded.
        batch: The probe prompts.
        width: Base width d; hidden states are cut to it.
        new_tokens: Tokens to generate, 0 for none.
        device: Where it runs.

    Returns:
        The results on the CPU.
    """
    inputs = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.to(device)}
    output = model(**inputs, output_hidden_states=True, use_cache=False)
    cached = uncached = None
    if new_tokens:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(**inputs, **options, use_cache=True).cpu()
        uncached = model.generate(**inputs, **options, use_cache=False).cpu()
    return ProbeRun(
        logits=output.logits.cpu(),
        base_logits=_base_logits(model, inputs, output.hidden_states[-1], width).cpu(),
        # of a routed model, the preserve path comes first, among features and after the last norm in the batch
        hidden=tuple(state[: len(batch.ids), ..., :width].cpu() for state in base_states(model, output.hidden_states)),
        cached=cached,
        uncached=uncached,
        attention=str(model.config._attn_implementation),
        load_problems=tuple(problems),
    )


def _base_logits(model: Any, inputs: dict[str, Tensor], last: Tensor, width: int) -> Tensor:
    """Logits of the base stream: what the preserve path gives out where the model routes."""
    if getattr(model, "is_routing_enabled", False):
        logits: Tensor = model.path_logits(**inputs)[0]
        return logits
    # with a zero up stream the head's up part adds zero
    base_only = functional.pad(last[..., :width], (0, last.shape[-1] - width))
    found: Tensor = model.get_output_embeddings()(base_only)
    # some families cap logits after the head, and both paths give out capped ones
    cap = getattr(model.config, "final_logit_softcapping", None)
    return found if cap is None else torch.tanh(found / cap) * cap


def _prompt_losses(run: ProbeRun, batch: Batch) -> Tensor:
    """Sum of -log p over the tokens of each prompt but its first, in nats, float64."""
    scores = run.logits[:, :-1].double().log_softmax(-1)
    losses = -scores.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    return losses.masked_fill(batch.mask[:, :-1] == 0, 0).sum(-1)


def compare(
    base: ProbeRun, expanded: ProbeRun, batch: Batch, new_tokens: int, tokens: tuple[str, ...], *, is_text: bool
) -> Numbers:
    """Compare two runs on the same batch; padding does not count."""
    real = batch.mask.bool()
    one, other = base.logits[real].double(), expanded.logits[real].double()
    log_one, log_other = one.log_softmax(-1), other.log_softmax(-1)
    known = set(base.load_problems)
    largest = float(one.abs().max()) * torch.finfo(base.logits.dtype).eps
    return Numbers(
        prompts=int(batch.ids.shape[0]),
        tokens=int(real.sum()),
        longest=batch.ids.shape[1],
        is_text=is_text,
        dtype=str(base.logits.dtype).removeprefix("torch."),
        attention=base.attention,
        is_bit_equal=_bit_equal(base.logits[real], expanded.logits[real]),
        drift=float((one - other).abs().max()),
        largest_logit=float(one.abs().max()),
        kl_divergence=float((log_one.exp() * (log_one - log_other)).sum(-1).mean()),
        top1_agreement=float((one.argmax(-1) == other.argmax(-1)).double().mean()),
        base_logits_bit_equal=_bit_equal(base.base_logits[real], expanded.base_logits[real]),
        base_logits_drift=float((base.base_logits[real].double() - expanded.base_logits[real].double()).abs().max()),
        excess=float((_prompt_losses(expanded, batch) - _prompt_losses(base, batch)).max()),
        # errors of rounding are as often up as down
        rounding=4 * largest * math.sqrt(batch.ids.shape[1]),
        layers=tuple(
            _compare_layer(layer - 1, before[real], after[real])
            for layer, (before, after) in enumerate(zip(base.hidden, expanded.hidden, strict=True))
        ),
        generation_equal=_same_tokens(base.cached, expanded.cached),
        uncached_equal=_same_tokens(base.uncached, expanded.uncached),
        new_tokens=new_tokens,
        load_problems=tuple(problem for problem in expanded.load_problems if problem not in known),
        token_problems=tokens,
    )


def _bit_equal(one: Tensor, other: Tensor) -> bool:
    # equal as numbers, so -0.0 equals 0.0 (adding a zero product may turn one into the other); NaN equals nothing
    return torch.equal(one, other)


def _compare_layer(layer: int, before: Tensor, after: Tensor) -> Layer:
    one, other = before.double(), after.double()
    cosine = float(functional.cosine_similarity(one, other, dim=-1).mean())
    return Layer(layer, float((one - other).abs().max()), cosine, _bit_equal(before, after))


def _same_tokens(one: Tensor | None, other: Tensor | None) -> bool | None:
    return None if one is None or other is None else torch.equal(one, other)
