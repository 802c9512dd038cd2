"""Where W12 is worth it: what a step of one layer's W12 promises on new text, against what it costs on old text.

The model is expanded in all its layers with W12 = 0. One pass over new text gives the gradient g_l of the loss by the
W12 of layer l. The step s_l = -delta g_l / |g_l|^2 then promises delta nats per token on new text, the same for every
layer, to first order; what it costs is measured, one forward pass for each layer:

    divergence_l = KL(base || W12_l = s_l)    on old text, nats per token
    worth_l = delta^2 / (2 divergence_l)

Near W12 = 0 the divergence is quadratic in the step, so worth_l does not depend on delta, nor on the scale of W12. If
divergences of layers add up, the most that any step of divergence e can promise is sqrt(2 e sum_l worth_l). The
estimate is ours; the papers leave the place of collaborative layers open.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Progress, Track
from scale_surgery.running.loading import loaded_whole
from scale_surgery.running.loss import LOGITS_AT_ONCE
from scale_surgery.running.options import RunOptions
from scale_surgery.running.sequences import Sequences
from scale_surgery.running.texts import collate
from scale_surgery.surgery.config import expanded_config, planned_index, stored_shard
from scale_surgery.surgery.expand import write_expansion
from scale_surgery.surgery.initialise import TORCH_DTYPES
from scale_surgery.training.ranking import LayerWorth

# what each step promises on new text, nats per token: small enough for the divergence to be quadratic, large enough to
# be seen through rounding
PROMISED = 0.02
# text that is read, spread over all that is given
NEW_TOKENS, OLD_TOKENS = 32_768, 8_192
# a divergence below this is rounding of probabilities in float32
LEAST_DIVERGENCE = 1e-9

ModelInputs = dict[str, Tensor]


def estimate_worth(
    checkpoint: Checkpoint, plan: Plan, new: Sequences, old: Sequences, device: torch.device, track: Track
) -> list[LayerWorth]:
    """Estimate for each collaborative layer of a plan what its W12 is worth.

    Args:
        checkpoint: The base model.
        plan: An expansion of it, variant adapt.
        new: Text to be learned.
        old: Text that tells what the base knows.
        device: Where to run.
        track: Makes progress bars.

    Returns:
        Gradient energy, divergence and worth of each layer, ascending.
    """
    with expanded_for_a_while(checkpoint, plan, device, track) as model:
        found = find_w12(model, plan)
        learn, keep = spread_batches(new, NEW_TOKENS, model), spread_batches(old, OLD_TOKENS, model)
        with track("W12", len(learn) + len(keep) * (1 + len(found))) as advance:
            energy = measure_energy(model, found, learn, advance)
            divergence = measure_divergence(model, found, energy, keep, advance)
    return [
        LayerWorth(layer, energy[layer], divergence[layer], worth(energy[layer], divergence[layer])) for layer in found
    ]


def worth(energy: float, divergence: float) -> float:
    """What W12 of a layer is worth, in nats: promised^2 / (2 divergence), and 0 where there is no gradient."""
    return PROMISED**2 / (2 * max(divergence, LEAST_DIVERGENCE)) if energy else 0.0


@contextmanager
def expanded_for_a_while(checkpoint: Checkpoint, plan: Plan, device: torch.device, track: Track) -> Iterator[Any]:
    """Load an expansion from a temporary folder, in which base shards are links."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shard in checkpoint.shards:
            (folder / stored_shard(shard)).symlink_to((checkpoint.path / shard).resolve())
        write_expansion(plan, checkpoint, folder, device.type, track)
        dtype = str(TORCH_DTYPES[checkpoint.running_dtype]).removeprefix("torch.")
        config = expanded_config(checkpoint.config, [plan], dtype)
        write_json(folder / CONFIG_FILE, config)
        write_json(folder / INDEX_FILE, planned_index([plan], checkpoint))
        # in half precision the divergence of two runs is rounding, whatever the step
        run = RunOptions(device=str(device), dtype="float32")
        with loaded_whole(folder, plan.base_name, run) as model:
            yield model


def find_w12(model: Any, plan: Plan) -> dict[int, list[nn.Parameter]]:
    """W12 of each collaborative layer; they alone require gradients from here on."""
    model.requires_grad_(False)
    layers = model.get_submodule(plan.architecture.layers_path)
    found = {
        number: [own for name, own in layers[number].named_parameters() if name.endswith(".w12")]
        for number in plan.collaboration.layers
    }
    for own in found.values():
        for block in own:
            block.requires_grad_(True)
    return found


def spread_batches(text: Sequences, tokens: int, model: Any) -> list[ModelInputs]:
    """Take sequences from all over a text, about so many tokens, in batches whose logits take no more than 64 MiB."""
    count = min(len(text), max(1, tokens // text.longest))
    rows = [text[place * len(text) // count] for place in range(count)]
    size = max(1, LOGITS_AT_ONCE // (text.longest * model.config.vocab_size))
    return [collate(rows[start : start + size]) for start in range(0, count, size)]


def measure_energy(
    model: Any, found: Mapping[int, Sequence[nn.Parameter]], batches: Sequence[ModelInputs], advance: Progress
) -> dict[int, float]:
    """Square of the norm of the gradient by the W12 of each layer; the gradient stays with the parameters.

        |dL/dW12_l|^2,   L the mean loss over all scored tokens

    Args:
        model: The expanded model, on its device.
        found: W12 of each layer.
        batches: Text to be learned.
        advance: Called after each batch.

    Returns:
        The squares by layer.
    """
    scored = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches]
    for batch, tokens in zip(batches, scored, strict=True):
        loss = model(**_moved(batch, model), use_cache=False).loss
        (loss * (tokens / sum(scored))).backward()
        advance(1)
    return {
        layer: sum(float(block.grad.square().sum(dtype=torch.float32)) for block in own if block.grad is not None)
        for layer, own in found.items()
    }


@torch.no_grad()
def measure_divergence(
    model: Any,
    found: Mapping[int, Sequence[nn.Parameter]],
    energy: Mapping[int, float],
    batches: Sequence[ModelInputs],
    advance: Progress,
) -> dict[int, float]:
    """KL(base || stepped) on old text after a step of one layer's W12, in nats per token.

    Args:
        model: The expanded model, every W12 zero, with gradients.
        found: W12 of each layer.
        energy: Square of the norm of the gradient, by layer.
        batches: Text that tells what the base knows.
        advance: Called after each forward pass.

    Returns:
        The divergence by layer; infinity where the stepped model gives no numbers, 0 where there is no gradient.
    """
    sums, tokens = dict.fromkeys(found, 0.0), 0
    for batch in batches:
        base = _log_probabilities(model, batch)  # (scored, v)
        tokens += len(base)
        advance(1)
        for layer, own in found.items():
            if energy[layer]:
                with stepped(own, PROMISED / energy[layer]):
                    sums[layer] += float(_divergence(base, _log_probabilities(model, batch)))
            advance(1)
    return {layer: total / tokens if total == total else float("inf") for layer, total in sums.items()}


def _moved(batch: ModelInputs, model: Any) -> ModelInputs:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def _log_probabilities(model: Any, batch: ModelInputs) -> Tensor:
    """Log-probabilities of what follows, where it is scored, float32, (scored, v)."""
    inputs = _moved(batch, model)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
    chosen: Tensor = logits[:, :-1][inputs["labels"][:, 1:] >= 0]
    return chosen.float().log_softmax(-1)


def _divergence(base: Tensor, other: Tensor) -> Tensor:
    """Sum of KL(base || other) over tokens, never below zero; both (tokens, v), logarithms."""
    each = (base.exp() * (base - other)).sum(-1)
    return each.sum().clamp_min(0)


@contextmanager
def stepped(own: Sequence[nn.Parameter], length: float) -> Iterator[None]:
    """Take a step of `length` times the gradient downhill with the W12 of one layer inside a `with` block."""
    for block in own:
        if block.grad is not None:
            block.copy_(block.grad, non_blocking=False).mul_(-length)
    try:
        yield
    finally:
        for block in own:
            block.zero_()
