"""What binds a model to its form: logits changed after the head, layers that know their number, a batch that stays."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scale_surgery.deriving.build import find_place, token_ids
from scale_surgery.deriving.watch import first_tensor, is_same


@torch.no_grad()
def alters_logits(model: PreTrainedModel, softcap: tuple[str, float | None] | None) -> bool:
    """Find whether logits are others than the head gives, but for a cap.

    Args:
        model: A twin.
        softcap: Key of the config that caps the logits, where there is one.
    """
    given: list[Tensor] = []
    own: Any = copy.deepcopy(model)
    if softcap is not None:
        setattr(own.config.get_text_config(decoder=True), softcap[0], None)
    head = own.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: given.append(output))
    logits = own(input_ids=token_ids(own.config), use_cache=False).logits
    return not torch.equal(given[-1], logits)


@torch.no_grad()
def is_numbered(model: PreTrainedModel, kinds: Sequence[int]) -> bool:
    """Find whether layers compute with their number: two of one kind with equal weights, given the same, differ.

    Args:
        model: A twin.
        kinds: Of each layer the number of its kind.

    Returns:
        Whether a pair differs; False where no two layers are of one kind.
    """
    own: Any = copy.deepcopy(model)
    place = find_place(own)
    assert place is not None
    layers = own.get_submodule(place.path)
    pairs = ((one, other) for other in range(place.count) for one in range(other) if kinds[one] == kinds[other])
    pair = next(pairs, None)
    if pair is None:
        return False
    first, second = (layers.get_submodule(str(number)) for number in pair)
    second.load_state_dict(first.state_dict())
    seen: list[tuple[Any, Any, Any]] = []
    first.register_forward_hook(lambda module, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True)
    own(input_ids=token_ids(own.config), use_cache=False)
    args, kwargs, output = seen[0]
    return not is_same(first_tensor(second(*args, **kwargs)), first_tensor(output))


@torch.no_grad()
def keeps_batch(model: PreTrainedModel, final_norm: str) -> bool:
    """Find whether what leaves the last norm has to be as many texts as were given: two paths leave it as two batches.

    Args:
        model: A twin.
        final_norm: Path of its last norm.
    """
    own: Any = copy.deepcopy(model)
    own.get_submodule(final_norm).register_forward_hook(lambda module, inputs, output: torch.cat((output, output)))
    ids = token_ids(own.config)
    try:
        return len(own(input_ids=ids, use_cache=False).logits) != 2 * len(ids)
    # a view of another shape, in most models
    except RuntimeError:
        return True
