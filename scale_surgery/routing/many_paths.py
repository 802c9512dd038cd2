"""What all paths of a composed model say of a text, noted in one pass.

The other path beside the base, what a routed model calls the adapt path, is here the best one of each window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scale_surgery.composition.paths import MixedPaths
from scale_surgery.modeling.expanded_posterior import PathMixture
from scale_surgery.modeling.expanded_routing import Tokens, TokenScores
from scale_surgery.progress import Progress, no_progress
from scale_surgery.routing.path_scores import Answers, PathBatch, Weigh, reading_order
from scale_surgery.running.sequences import Sequences
from scale_surgery.running.texts import collate, pad


def read_many(
    model: Any, sequences: Sequences, batch_size: int, advance: Progress = no_progress
) -> tuple[PathBatch, ...]:
    """Read token sequences once, in the order of `read_paths`.

    Args:
        model: A composed model in evaluation mode that mixes its paths, on any device.
        sequences: What to read and what to score.
        batch_size: Sequences in one forward pass.
        advance: Called with the tokens done after each pass.

    Returns:
        What the paths say, all in one batch: each setting then takes one walk through the longest sequence.
    """
    order = reading_order(sequences)
    device, paths = next(model.parameters()).device, []
    for start in range(0, len(order), batch_size):
        batch = collate([sequences[row] for row in order[start : start + batch_size]])
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        paths += list(model.score_tokens(**inputs).paths.cpu())
        advance(int(batch["attention_mask"].sum()))
    return (_join(torch.nn.utils.rnn.pad_sequence(paths, batch_first=True), [sequences[row] for row in order]),)


def _join(paths: Tensor, rows: Sequence[Any]) -> PathBatch:
    """One batch of what all paths say (windows, t - 1, k)."""
    ids, is_scored = pad(rows, "input_ids"), pad(rows, "labels")[:, 1:] >= 0
    restarts = torch.zeros_like(ids, dtype=torch.bool)
    restarts[:, 0] = True
    base, best = paths[..., 0], best_of(paths, is_scored)
    alone = paths.gather(-1, best[:, None, None].expand(-1, paths.shape[1], 1))[..., 0]
    nothing = torch.zeros_like(base)
    scores = TokenScores(base, base, alone, base, nothing, nothing)
    none = torch.zeros(0)
    # a mixture of many is the most likely token at weights that no two numbers tell: answers are left to evaluate
    answers = Answers(none.long(), none.long(), none, none, none.bool())
    return PathBatch(scores, Tokens(ids, restarts, None, slice(None)), is_scored, answers, paths)


def best_of(paths: Tensor, is_scored: Tensor) -> Tensor:
    """The path that predicts each window best (windows,), given (windows, t - 1, k)."""
    return paths.double().where(is_scored[..., None], 0.0).sum(1).argmax(-1)


def best_alone(batch: PathBatch) -> TokenScores:
    """Route each window to the path that predicts it best."""
    assert batch.paths is not None
    is_expansion = (best_of(batch.paths, batch.is_scored) > 0).float()[:, None]
    return batch.scores._replace(routed=batch.scores.adapt, weight=is_expansion.expand_as(batch.scores.adapt))


def mixed_by(setting: MixedPaths) -> Weigh:
    """Mix as a composed model does, with any numbers; the weight is that of all expansions together."""
    mixture = PathMixture(setting.prior, setting.switch_rate)

    def weigh(batch: PathBatch) -> TokenScores:
        assert batch.paths is not None
        found = mixture.weigh(batch.paths, batch.tokens.restarts)
        return batch.scores._replace(routed=found.mixed, weight=1 - found.weights[..., 0])

    return weigh


def best_expansions(batches: Sequence[PathBatch]) -> Tensor:
    """The expansion that predicts each window best (windows,), from 0."""
    return torch.cat([best_of(batch.paths[..., 1:], batch.is_scored) for batch in batches if batch.paths is not None])
