"""Numbers: run the base and the expanded model on probe prompts and compare what comes out.

Both models see the same token ids in one left-padded batch, one model after the other. A model that is larger
than the memory given to it is streamed from its files, module by module (accelerate's disk offload).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_surgery.running.drift import LogitDrift, compare_logits, cosines, largest_difference
from scale_surgery.running.freeze import base_states
from scale_surgery.running.loading import RUNNING, translated
from scale_surgery.running.prompts import Batch, EncodedPrompts


@dataclass(frozen=True)
class Layer:
    """The base stream after one layer: largest absolute difference from the base model, and cosine with it."""

    layer: int
    drift: float
    cosine: float
    is_bit_equal: bool


@dataclass(frozen=True)
class Numbers(LogitDrift):
    """What the probes showed of an expanded model, beside its base.

    Attributes:
        longest: Tokens of the longest.
        is_text: Whether they are text; seeded random ids otherwise, where the base has no tokenizer that loads.
        attention: Attention kernel of both models.
        base_logits_bit_equal: Whether head times base stream equals the base model's, bit for bit; of a routed model,
            what its preserve path gives out.
        base_logits_drift: Largest absolute difference of those.
        excess: Loss of a prompt above that of the base, for the prompt where it is largest, in nats.
        worst: Which prompt that is.
        rounding: What of the excess the rounding of logits in their dtype can explain, in nats.
        layers: The base stream layer by layer; layer -1 is the embedding.
        generation_equal: Whether greedy continuation with KV cache gives the base's tokens; None if not run.
        uncached_equal: The same without KV cache.
        new_tokens: Tokens generated for each prompt.
        load_problems: Tensors that were missing, unexpected or re-initialised on load.
        token_problems: Prompts whose token ids differ between the two tokenizers.
    """

    longest: int
    is_text: bool
    attention: str
    base_logits_bit_equal: bool
    base_logits_drift: float
    excess: float
    worst: str
    rounding: float
    layers: tuple[Layer, ...]
    generation_equal: bool | None
    uncached_equal: bool | None
    new_tokens: int
    load_problems: tuple[str, ...]
    token_problems: tuple[str, ...]

    @property
    def texts(self) -> int:
        """Number of texts whose loss was compared."""
        return self.prompts

    @property
    def path_problems(self) -> tuple[str, ...]:
        """In what the base's path is not the base."""
        line = f"base logits: drift {self.base_logits_drift:.3g} in {self.dtype}."
        return (line,) * (not self.base_logits_bit_equal)


@dataclass(frozen=True)
class ProbeRun:
    """What one model made of a batch; hidden states and logits on the CPU."""

    logits: Tensor
    base_logits: Tensor
    hidden: tuple[Tensor, ...]
    cached: Tensor | None
    uncached: Tensor | None
    attention: str
    device: str
    load_problems: tuple[str, ...]


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

    Raises:
        CheckpointError: If it does not run.
    """
    inputs = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.to(device)}
    cached = uncached = None
    with translated(*RUNNING):
        output = model(**inputs, output_hidden_states=True, use_cache=False)
        if new_tokens:
            options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
            cached = model.generate(**inputs, **options, use_cache=True).cpu()
            uncached = model.generate(**inputs, **options, use_cache=False).cpu()
    return ProbeRun(
        logits=output.logits.cpu(),
        base_logits=_base_logits(model, output.hidden_states[-1][: len(batch.ids), :, :width]).cpu(),
        # of a routed model, the preserve path comes first, among features and after the last norm in the batch
        hidden=tuple(state[: len(batch.ids), ..., :width].cpu() for state in base_states(model, output.hidden_states)),
        cached=cached,
        uncached=uncached,
        attention=str(model.config._attn_implementation),
        device=device,
        load_problems=tuple(problems),
    )


def _base_logits(model: Any, base: Tensor) -> Tensor:
    """Logits of a base stream (b, t, d); where the model routes, of the one that its preserve path reads."""
    head = model.get_output_embeddings()
    if getattr(model, "is_fused", False):
        found: Tensor = head.base_logits(base.contiguous(), base)
    elif hasattr(head, "capped"):
        # where a model is streamed, a module has its weights only while it runs
        with model.expansion_disabled():
            found = head(base.contiguous())
    else:
        found = head(base.contiguous())
    # some families cap logits after the head
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return found if cap is None else torch.tanh(found / cap) * cap


def _prompt_losses(run: ProbeRun, batch: Batch) -> Tensor:
    """Sum of -log p over the tokens of each prompt but its first, in nats, float64."""
    scores = run.logits[:, :-1].double().log_softmax(-1)
    losses = -scores.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    return losses.masked_fill(batch.mask[:, :-1] == 0, 0).sum(-1)


def compare(
    base: ProbeRun, expanded: ProbeRun, encoded: EncodedPrompts, new_tokens: int, tokens: tuple[str, ...]
) -> Numbers:
    """Compare two runs on the same prompts.

    Args:
        base: The base model's.
        expanded: The expanded model's.
        encoded: The prompts.
        new_tokens: Tokens generated for each.
        tokens: What `token_problems` found.

    Returns:
        What they showed.
    """
    batch = encoded.batch
    real = batch.mask.bool()
    found = compare_logits(base.logits, expanded.logits, batch, base.device)
    known = set(base.load_problems)
    largest = found.largest_logit * torch.finfo(base.logits.dtype).eps
    lost = _prompt_losses(expanded, batch) - _prompt_losses(base, batch)
    return Numbers(
        **vars(found),
        longest=batch.ids.shape[1],
        is_text=encoded.tokenizer is not None,
        attention=base.attention,
        base_logits_bit_equal=torch.equal(base.base_logits[real], expanded.base_logits[real]),
        base_logits_drift=largest_difference(base.base_logits[real], expanded.base_logits[real]),
        excess=float(lost.max()),
        worst=f"prompt {int(lost.argmax()) + 1}",
        # errors of rounding are as often up as down
        rounding=4 * largest * math.sqrt(batch.ids.shape[1]),
        layers=tuple(
            _compare_layer(layer - 1, before[real], after[real])
            for layer, (before, after) in enumerate(zip(base.hidden, expanded.hidden, strict=True))
        ),
        generation_equal=same_tokens(base.cached, expanded.cached),
        uncached_equal=same_tokens(base.uncached, expanded.uncached),
        new_tokens=new_tokens,
        load_problems=tuple(problem for problem in expanded.load_problems if problem not in known),
        token_problems=tokens,
    )


def _compare_layer(layer: int, before: Tensor, after: Tensor) -> Layer:
    mean = float(cosines(before, after).mean())
    return Layer(layer, largest_difference(before, after), mean, torch.equal(before, after))


def same_tokens(one: Tensor | None, other: Tensor | None) -> bool | None:
    """Whether two continuations are the same; None where one was not run."""
    return None if one is None or other is None else torch.equal(one, other)
