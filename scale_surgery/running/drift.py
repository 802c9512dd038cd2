"""Drift: the distance of one model's logits from another's, for example from the original of a rewritten model.

The same products summed in another order round differently. Each dtype has a tolerance for rounding, as a share of the
largest logit. A rewritten model with a larger drift was not rewritten correctly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.errors import CheckpointError
from scale_surgery.progress import Track, no_track
from scale_surgery.running.loading import RUNNING, translated
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.own_generation import continue_greedily

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.running.prompts import Batch

# most logits in float64 in memory at a time, 32 MB; a vocabulary can be large
LOGITS_AT_ONCE = 2**22
# the largest drift that counts as rounding, as a share of the largest logit
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}


@dataclass(frozen=True)
class LogitDrift:
    """The distance of the logits of two models on the same tokens.

    Attributes:
        prompts: Number of prompts, in one left-padded batch.
        tokens: Tokens in them.
        device: Device of both models. The last bits may differ between devices.
        dtype: Dtype of the logits.
        is_bit_equal: True if they are equal, bit for bit.
        drift: Largest absolute difference.
        largest_logit: Largest absolute logit of the first model.
        kl_divergence: Mean KL(before || after) over tokens, in nats.
        top1_agreement: Share of tokens with the same most likely next token.
    """

    prompts: int
    tokens: int
    device: str
    dtype: str
    is_bit_equal: bool
    drift: float
    largest_logit: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True)
class Drift(LogitDrift):
    """The distance of a rewritten model from its original.

    Attributes:
        tolerance: Largest drift that counts as rounding, as a share of the largest logit.
        generation_agreement: Share of greedily generated tokens that are the same, or None if none were generated.
    """

    tolerance: float
    generation_agreement: float | None

    @property
    def share(self) -> float:
        """The drift as a share of the largest logit."""
        return self.drift / self.largest_logit if self.largest_logit else self.drift

    @property
    def holds(self) -> bool:
        """True if rounding explains the drift. NaN is never explained."""
        return self.share <= self.tolerance


def compare_logits(before: Tensor, after: Tensor, batch: Batch, device: str) -> LogitDrift:
    """Compare the logits of two models (b, t, v) on the same batch, without padding."""
    real = batch.mask.bool()
    return _compare_real(before[real], after[real], len(batch.ids), device)


def _compare_real(first: Tensor, second: Tensor, prompts: int, device: str) -> LogitDrift:
    """Compare logits of the same tokens (tokens, vocabulary)."""
    import torch

    # equal as numbers: -0.0 equals 0.0, because adding a zero product may flip the sign; NaN equals nothing
    is_bit_equal = torch.equal(first, second)
    drift, divergence, agreement = 0.0, 0.0, 1.0
    if not is_bit_equal:
        rows = max(1, LOGITS_AT_ONCE // first.shape[-1])
        pieces = map(_compare_tokens, torch.split(first, rows), torch.split(second, rows))
        differences, divergences, agreements = torch.cat(list(pieces), dim=1)
        drift, divergence, agreement = float(differences.max()), float(divergences.mean()), float(agreements.mean())
    return LogitDrift(
        prompts=prompts,
        tokens=len(first),
        device=device,
        dtype=str(first.dtype).removeprefix("torch."),
        is_bit_equal=is_bit_equal,
        drift=drift,
        largest_logit=float(first.abs().max()),
        kl_divergence=divergence,
        top1_agreement=agreement,
    )


def _compare_tokens(first: Tensor, second: Tensor) -> Tensor:
    """Return difference, divergence and agreement of each token (3, tokens) in float64."""
    import torch

    first, second = first.double(), second.double()
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    divergence = (log_first.exp() * (log_first - log_second)).sum(-1)
    is_same = (first.argmax(-1) == second.argmax(-1)).double()
    return torch.stack([(first - second).abs().amax(-1), divergence, is_same])


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors, computed in float64."""
    # some GPUs have no float64
    return float((a.cpu().double() - b.cpu().double()).abs().max())


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine similarity of each token's states, (tokens, features) each, computed in float64."""
    from torch.nn import functional

    return functional.cosine_similarity(a.cpu().double(), b.cpu().double(), dim=-1)


def measure_drift(
    before: Path | Checkpoint,
    after: Path,
    probes: Probes = Probes(),
    *,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Drift:
    """Run a model and its rewritten form on the same probe prompts, one after the other, and compare."""
    from scale_surgery.running.base_tokenizer import forget_base_tokenizers
    from scale_surgery.running.loading import loaded
    from scale_surgery.running.prompts import encode_prompts

    run = replace(run.placed(), dtype=None)  # compare in the stored dtype
    batch = encode_prompts(before if isinstance(before, Path) else before.path, probes, run).batch
    forget_base_tokenizers()
    runs = []
    with track("probe prompts", 2) as advance:
        for given in (before, after):
            with loaded(given, run) as (model, problems):
                if given is after and problems:
                    raise CheckpointError(*problems)
                runs.append(_run(model, batch, probes.max_new_tokens, run.device))
                # otherwise it would stay in memory until the next model is loaded
                del model
            advance(1)
    (logits, new), (other_logits, other_new) = runs
    pairs = zip(logits, other_logits, strict=True)
    compared = (_compare_real(*pair, len(batch.ids), run.device) for pair in pairs)
    comparison = worst(compared)
    return Drift(
        **vars(comparison),
        tolerance=TOLERANCES[comparison.dtype],
        generation_agreement=None if new is None or other_new is None else float(new.eq(other_new).double().mean()),
    )


def worst(sides: Iterable[LogitDrift]) -> LogitDrift:
    """Return the drift of the side that drifted most. NaN is more than any number."""
    return max(sides, key=lambda side: math.inf if math.isnan(side.drift) else side.drift)


def _run(model: Any, batch: Batch, new_tokens: int, device: str) -> tuple[list[Tensor], Tensor | None]:
    """Return the logits of the batch's tokens and the greedily generated tokens, on the CPU.

    A cosine router gives logits for each of its two sides.
    """
    import torch

    inputs, real = batch.inputs(device), batch.mask.bool()
    logits = []
    with torch.no_grad(), translated(*RUNNING):
        for side in _sides(model):
            with side:
                of_batch = model(**inputs, use_cache=False).logits
                logits.append(of_batch[real.to(of_batch.device)].cpu())
                del of_batch
        if not new_tokens:
            return logits, None
        new = continue_greedily(model, inputs, new_tokens)
    return logits, new[:, batch.ids.shape[1] :].cpu()


def _sides(model: Any) -> list[AbstractContextManager[None]]:
    """Return a context for each run of a model.

    A cosine router runs on each side for all tokens, because rounding may decide near its threshold.
    """
    router = model.config.scale_surgery.get("router", {}) if hasattr(model.config, "scale_surgery") else {}
    if router.get("router") != "cosine":
        return [nullcontext()]
    if getattr(model, "is_fused", False):
        return [model.use_threshold(threshold) for threshold in (-1.0, 1.0)]
    names, settings = model.expansions, {"router": "cosine", "strict": router["strict"]}
    return [model.use_expansion(names, threshold=threshold, **settings) for threshold in (-1.0, 1.0)]
