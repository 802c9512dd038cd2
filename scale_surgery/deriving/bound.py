"""Checks of a model: whether logits change after the head, whether the batch size and the width are fixed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from scale_surgery.deriving.build import token_ids


@torch.no_grad()
def alters_logits(model: PreTrainedModel, softcap: tuple[str, float | None] | None) -> bool:
    """Find whether the model changes the logits of its head in another way than by a cap."""
    given: list[Tensor] = []
    twin: Any = copy.deepcopy(model)
    if softcap is not None:
        setattr(twin.config.get_text_config(decoder=True), softcap[0], None)
    head = twin.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: given.append(output))
    logits = twin(input_ids=token_ids(twin.config), use_cache=False).logits
    return not torch.equal(given[-1], logits)


@torch.no_grad()
def keeps_batch(model: PreTrainedModel, final_norm: str) -> bool:
    """Find whether the last norm must give as many texts as the model read; two paths give twice as many."""
    twin: Any = copy.deepcopy(model)
    twin.get_submodule(final_norm).register_forward_hook(lambda module, inputs, output: torch.cat((output, output)))
    ids = token_ids(twin.config)
    try:
        return len(twin(input_ids=ids, use_cache=False).logits) != 2 * len(ids)
    # a view of another shape, in most models
    except RuntimeError:
        return True


@torch.no_grad()
def keeps_width(model: PreTrainedModel, final_norm: str) -> bool:
    """Find whether the last norm of a twin must give as many features as entered the first layer."""
    twin: Any = copy.deepcopy(model)
    twin.get_submodule(final_norm).register_forward_hook(lambda module, inputs, output: functional.pad(output, (0, 1)))
    twin.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: (inputs[0][..., :-1],))
    try:
        twin(input_ids=token_ids(twin.config), use_cache=False)
    # a view of another shape, in most models
    except RuntimeError:
        return True
    return False
