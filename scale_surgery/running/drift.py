"""Drift: how far the logits of a rewritten model are from those of the model that it was made from.

The same products summed in another order round another way. What rounding can do is stated for each dtype, as a share
of the largest logit; a rewritten model that is further away has not been rewritten correctly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import CheckpointError
from scale_surgery.progress import Track, no_track
from scale_surgery.running.options import Probes, RunOptions

if TYPE_CHECKING:
    from torch import Tensor

    from scale_surgery.running.probe import Batch

# the largest drift that passes for rounding, as a share of the largest logit
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}


@dataclass(frozen=True)
class Drift:
    """What two models' logits on the same tokens have in common.

    Attributes:
        prompts: Number of prompts, in one left-padded batch.
        tokens: Tokens in them.
        dtype: Dtype of the logits.
        is_bit_equal: Whether they are equal, bit for bit.
        drift: Largest absolute difference.
        largest_logit: Largest absolute logit of the model before.
        tolerance: Largest drift that passes for rounding, as a share of the largest logit.
        kl_divergence: Mean KL(before || after) over tokens, in nats.
        top1_agreement: Share of tokens whose most likely next token is the same.
        generation_agreement: Share of greedily generated tokens that are the same; None where none were.
    """

    prompts: int
    tokens: int
    dtype: str
    is_bit_equal: bool
    drift: float
    largest_logit: float
    tolerance: float
    kl_divergence: float
    top1_agreement: float
    generation_agreement: float | None

    @property
    def share(self) -> float:
        """The drift as a share of the largest logit."""
        return self.drift / self.largest_logit if self.largest_logit else self.drift

    @property
    def holds(self) -> bool:
        """Whether rounding explains it; NaN is never explained."""
        return self.share <= self.tolerance


def measure_drift(
    before: Path,
    after: Path,
    probes: Probes = Probes(),
    *,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Drift:
    """Run a model and its rewritten form on the same probe prompts, one after the other, and compare.

    Args:
        before: Folder of the model.
        after: Folder of its rewritten form, with the same tokenizer.
        probes: Prompts, and tokens to generate for each.
        run: How the models run: device, trust_remote_code, memory_bytes.
        track: Makes progress bars.

    Returns:
        The drift.

    Raises:
        CheckpointError: If the rewritten form does not load whole.
    """
    from transformers import AutoConfig

    from scale_surgery import modeling
    from scale_surgery.running import loading, probe
    from scale_surgery.running.tokenizer import load_tokenizer

    run = replace(run, dtype=None)  # what is compared is what is stored
    modeling.register()
    prompts = probe.read_prompts(probes.prompts_file)
    tokenizer = load_tokenizer(before, run)
    config = AutoConfig.from_pretrained(before, trust_remote_code=run.trust_remote_code)
    batch = probe.make_batch(tokenizer, prompts, config, probes.new_tokens)
    runs = []
    with track("probe prompts", 2) as advance:
        for path in (before, after):
            with loading.loaded(path, run) as (model, problems):
                if path == after and problems:
                    raise CheckpointError.from_problems(problems)
                runs.append(_run(model, batch, probes.new_tokens, run.device))
            advance(1)
    return _compare(batch, *runs[0], *runs[1])


def _run(model: Any, batch: Batch, new_tokens: int, device: str) -> tuple[Tensor, Tensor | None]:
    """Logits of the batch, and greedily generated tokens; on the CPU."""
    import torch

    inputs = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.to(device)}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        if not new_tokens:
            return logits.cpu(), None
        new = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return logits.cpu(), new[:, batch.ids.shape[1] :].cpu()


def _compare(batch: Batch, logits: Tensor, new: Tensor | None, other_logits: Tensor, other_new: Tensor | None) -> Drift:
    import torch

    real = batch.mask.bool()
    one, other = logits[real].double(), other_logits[real].double()
    log_one, log_other = one.log_softmax(-1), other.log_softmax(-1)
    dtype = str(logits.dtype).removeprefix("torch.")
    return Drift(
        prompts=int(batch.ids.shape[0]),
        tokens=int(real.sum()),
        dtype=dtype,
        is_bit_equal=torch.equal(logits[real], other_logits[real]),
        drift=float((one - other).abs().max()),
        largest_logit=float(one.abs().max()),
        tolerance=TOLERANCES[dtype],
        kl_divergence=float((log_one.exp() * (log_one - log_other)).sum(-1).mean()),
        top1_agreement=float((one.argmax(-1) == other.argmax(-1)).double().mean()),
        generation_agreement=None if new is None or other_new is None else float(new.eq(other_new).double().mean()),
    )
