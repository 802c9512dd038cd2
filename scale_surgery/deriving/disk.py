"""What modules of a layer are called in files, where transformers converts names while it loads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.deriving.build import Place
from scale_surgery.running.loading import quiet_transformers

# what transformers passes over in files of any model that turns queries and keys
OLD_FREQUENCIES = r"rotary_emb\.inv_freq"


def stored_children(model: PreTrainedModel, place: Place) -> dict[str, str]:
    """Find what the parts of a layer are called on disk.

    Args:
        model: A twin, no two of whose tensors are equal.
        place: Where its layers are.

    Returns:
        Name of a part in the model to its name on disk, such as `mlp` to `block_sparse_moe`; those that differ.
    """
    own = {_digest(value): name for name, value in model.state_dict().items()}
    found: dict[str, str] = {}
    for name, value in _saved(model):
        inside = own.get(_digest(value), "").partition(f"{place.layers}.")[2].partition(".")[2]
        stored = name.partition(f"{place.layers}.")[2].partition(".")[2]
        part, _, rest = inside.partition(".")
        # the same inside a part that is called otherwise
        if rest and stored.endswith(f".{rest}") and (other := stored.removesuffix(f".{rest}")) != part:
            found[part] = other
    return found


def _saved(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    with scratch_folder() as folder, quiet_transformers():
        model.save_pretrained(folder)
        for file in sorted(folder.glob("*.safetensors")):
            yield from load_file(file).items()


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def unread_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Find which tensors transformers passes over where old files hold them, such as masks.

    Args:
        model: The real model; some classes pass over a layer by its number, which another checkpoint has.

    Returns:
        Patterns of whole names, or of their ends after a dot; none that is true of a name that the model has.
    """
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), OLD_FREQUENCIES}
    patterns = sorted(rf"(^|\.)(?:{pattern})$" for pattern in ignored)
    own = list(model.state_dict())
    return tuple(pattern for pattern in patterns if not any(re.search(pattern, name) for name in own))
