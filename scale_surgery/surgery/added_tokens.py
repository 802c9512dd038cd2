"""Tokens that somebody added to a base and never trained: their rows are the base's, so they stay as they are."""

from __future__ import annotations

from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint, read_tensor
from scale_surgery.errors import counted
from scale_surgery.planning.plan import Plan
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import load_tokenizer

# of the distance between a row and the mean of all; transformers begins new rows at a hundred-thousandth of it
NEAR_THE_MEAN = 0.01
MOST_NAMED = 3


def warn_of_untrained_tokens(checkpoint: Checkpoint, plan: Plan, run: RunOptions) -> tuple[str, ...]:
    """Warn where tokens were added to the tokenizer whose rows of the embedding say nothing yet.

    Chat models have added tokens that are trained, and special ones that no text has. What `resize_token_embeddings`
    makes lies where all rows have their mean, and two such rows cannot be told apart.

    Args:
        checkpoint: The base model.
        plan: Of its expansion.
        run: How its tokenizer is loaded: trust_remote_code.

    Returns:
        One warning, or none.
    """
    name = f"{plan.prefix}{plan.architecture.embedding_weight}"
    tokenizer = load_tokenizer(checkpoint.path, run)
    added = {} if tokenizer is None else _added(tokenizer)
    added = {number: token for number, token in added.items() if number < plan.sizes.embedded}
    if not added or name not in checkpoint.tensors:
        return ()
    import torch

    rows = read_tensor(checkpoint, name)
    old, new = rows[: min(added)], rows[torch.tensor(list(added))].float()
    mean = old.mean(dim=0, dtype=torch.float32)
    # a sample says how far rows usually are from their mean
    usual = (old[:: max(1, len(old) // 1000)].float() - mean).norm(dim=-1).median()
    near = (new - mean).norm(dim=-1) < NEAR_THE_MEAN * usual
    untrained = [repr(token) for token, is_near in zip(added.values(), near.tolist(), strict=True) if is_near]
    if not untrained:
        return ()
    return (
        f"the tokenizer has {counted(len(untrained), 'added token')} that nobody trained, such as "
        f"{', '.join(untrained[:MOST_NAMED])}. Their rows of embedding and head belong to the base, which stays "
        "as it is, so the expansion cannot learn them. Train these rows first, or use the base without them.",
    )


def _added(tokenizer: Any) -> dict[int, str]:
    """Tokens beside the vocabulary of the tokenizer's own model, but for special ones, by their ids."""
    known = tokenizer.added_tokens_decoder.items()
    return {number: str(token) for number, token in known if number >= tokenizer.vocab_size and not token.special}
