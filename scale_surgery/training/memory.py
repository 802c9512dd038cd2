"""Forecast the memory of a training run from a plan: weights, what AdamW keeps, activations, and a piece of logits."""

from __future__ import annotations

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.planning.plan import Plan
from scale_surgery.running.pieces import LOGITS_AT_ONCE
from scale_surgery.training.arguments import Precision
from scale_surgery.training.settings import TrainingSettings

# measured on Gemma 3 270M, resident: the interpreter with torch, transformers and its Trainer, and what malloc keeps; a
# byte of tokenizer.json, once it is loaded
TRAINER_BYTES, TOKENIZER_BYTES = 900_000_000, 16
# bytes of a trained parameter in float32: itself, its gradient, and two moments of AdamW
TRAINED_BYTES = 16
# bytes of each logit of a piece: of the base stream, of the up stream, their sum, its gradient and one more in half
# precision, or one of them and its gradient in float32, where products are added in place
LOGIT_BYTES = 10
# the same where a routed model is measured: of both paths and of their mixture, in float32 and as log-probabilities
ROUTED_LOGIT_BYTES = 45
# numbers of a token that a layer keeps for its backward pass, as multiples of its hidden and its inner size: where
# gradients pass through the base stream, and where through the up stream alone
KEPT, KEPT_OF_UP = (16, 6), (5, 2)
# numbers of a token that stand beside them while a layer runs
RUNNING = (4, 4)
ACTIVATION_BYTES = 4


def forecast_memory(
    plan: Plan, base: Checkpoint, trained: int, settings: TrainingSettings, precision: Precision, length: int
) -> int:
    """Forecast the peak memory of one process that trains.

    Args:
        plan: What was added to the base.
        base: The base.
        trained: Parameters that train.
        settings: How they train.
        precision: In what the model computes.
        length: Tokens of a sequence.
    """
    sizes, costs = plan.sizes, plan.costs
    # rehearsal has a forward and a backward pass of its own
    tokens = max(settings.batch_size, settings.rehearsed_rows if settings.rehearse else 0) * length
    first = costs.up_stream_from if costs.base_stream_from is None else costs.base_stream_from
    hidden, inner = KEPT_OF_UP if costs.base_stream_from is None else KEPT
    kept = (sizes.layers - first) * (hidden * sizes.hidden + inner * sizes.inner)
    if settings.gradient_checkpointing:
        # the input of each layer, and all of one
        kept = kept // max(1, sizes.layers - first) + (sizes.layers - first) * sizes.hidden
    running = RUNNING[0] * sizes.hidden + RUNNING[1] * sizes.inner
    logits = min(LOGITS_AT_ONCE, tokens * sizes.vocabulary)
    stored = sum(info.bytes for info in base.tensors.values())
    weights = stored * (2 if precision.widens else 1) + TRAINED_BYTES * trained
    return _process(base) + weights + LOGIT_BYTES * logits + ACTIVATION_BYTES * tokens * (kept + running)


def forecast_measuring(plan: Plan, base: Checkpoint, tokens: int) -> int:
    """Forecast the peak memory of the process that has trained, and measures a routed model on batches of tokens."""
    stored = sum(info.bytes for info in base.tensors.values())
    logits = min(LOGITS_AT_ONCE, tokens * plan.sizes.vocabulary)
    return _process(base) + stored + plan.costs.bytes_added + ROUTED_LOGIT_BYTES * logits


def _process(base: Checkpoint) -> int:
    tokenizer = base.path / TOKENIZER_FILE
    return TRAINER_BYTES + TOKENIZER_BYTES * (tokenizer.stat().st_size if tokenizer.is_file() else 0)
