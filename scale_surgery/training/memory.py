"""Forecast the memory of a training run from a plan: weights, AdamW's state, activations, and a piece of logits."""

from __future__ import annotations

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.scale import USUAL_INNER
from scale_surgery.running.pieces import LOGITS_AT_ONCE
from scale_surgery.training.allocator import container_memory
from scale_surgery.training.arguments import Precision
from scale_surgery.training.settings import TrainingSettings

# resident bytes, measured on Gemma 3 270M: of the interpreter with torch, transformers, its Trainer and malloc's kept
# memory; and per byte of a loaded tokenizer.json
TRAINER_BYTES, TOKENIZER_BYTES = 900_000_000, 16
# bytes per trained parameter in float32: itself, its gradient, and two moments of AdamW
TRAINED_BYTES = 16
# bytes per logit of a piece. In half precision: base stream, up stream, their sum, its gradient and one more. In
# float32, with products added in place: one of them and its gradient
LOGIT_BYTES = 10
# the same if a routed model is measured: both paths and their mixture, in float32 and as log-probabilities
ROUTED_LOGIT_BYTES = 45
# numbers per token that a layer keeps for its backward pass, as multiples of its hidden and its inner size: if
# gradients pass through the base stream, and if they pass only through the up stream
KEPT, KEPT_OF_UP = (16, 6), (5, 2)
# further numbers per token while a layer runs
RUNNING = (4, 4)
ACTIVATION_BYTES = 4


def free_bytes(device: str) -> int | None:
    """Return the free memory of a device in bytes; None if it does not say."""
    import psutil
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        # what torch keeps without using it is free for this process
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(psutil.virtual_memory().available, container_memory()) if kind == "cpu" else None


def forecast_memory(
    plan: Plan, base: Checkpoint, trained: int, settings: TrainingSettings, precision: Precision, length: int
) -> int:
    """Forecast the peak memory in bytes of one training process.

    Args:
        plan: Plan of the expansion.
        base: The base.
        trained: Number of trained parameters.
        settings: Settings of the training.
        precision: Precision of the model.
        length: Tokens of a sequence.
    """
    sizes, costs = plan.sizes, plan.costs
    # rehearsal has its own forward and backward pass
    tokens = max(settings.batch_size, settings.rehearsed_rows if settings.rehearse else 0) * length
    layers = sizes.layers + (len(plan.layers) if plan.method.adds_layers else 0)
    first = layers if costs.base_stream_from is None else costs.base_stream_from
    # a mixture, say, has no inner size of its own
    features = sizes.hidden, sizes.inner or USUAL_INNER * sizes.hidden

    def numbers(multiples: tuple[int, int]) -> int:
        return multiples[0] * features[0] + multiples[1] * features[1]

    # layers through which gradients of both streams pass, and of the up stream alone
    whole, beside = layers - first, max(0, first - costs.up_stream_from)
    kept = whole * numbers(KEPT) + beside * numbers(KEPT_OF_UP)
    if settings.gradient_checkpointing:
        # the input of each layer, and everything inside one layer
        kept = numbers(KEPT if whole else KEPT_OF_UP) + (whole + beside) * sizes.hidden
    running = numbers(RUNNING)
    logits = min(LOGITS_AT_ONCE, tokens * sizes.vocabulary)
    stored = sum(info.bytes for info in base.tensors.values())
    weights = stored * (2 if precision.widens else 1) + TRAINED_BYTES * trained
    return _process(base) + weights + LOGIT_BYTES * logits + ACTIVATION_BYTES * tokens * (kept + running)


def forecast_measuring(plan: Plan, base: Checkpoint, tokens: int) -> int:
    """Forecast the peak memory in bytes of a process that measures a routed model after training."""
    stored = sum(info.bytes for info in base.tensors.values())
    logits = min(LOGITS_AT_ONCE, tokens * plan.sizes.vocabulary)
    return _process(base) + stored + plan.costs.bytes_added + ROUTED_LOGIT_BYTES * logits


def _process(base: Checkpoint) -> int:
    tokenizer = base.path / TOKENIZER_FILE
    return TRAINER_BYTES + TOKENIZER_BYTES * (tokenizer.stat().st_size if tokenizer.is_file() else 0)
