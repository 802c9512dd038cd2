"""Values that a trainer saved: those of the base are the base's, and those of new tensors become an expansion's.

base tensors  --sha256-->  the base's, byte for byte; in another dtype, the same numbers
new tensors   --read-->    cast once, to the dtype that the plan gives them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import read_tensor
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.same_values import difference
from scale_surgery.checkpoint.shards import Entry, computed
from scale_surgery.errors import MOST_LINES, CheckpointError
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Track
from scale_surgery.running.matching import Match, Pair
from scale_surgery.surgery.saved import Saved, Trained

if TYPE_CHECKING:
    from torch import Tensor

FROZEN = (
    "Only the new tensors may train: from_pretrained freezes all others, scale_surgery.freeze_base does it again, and "
    "for a model of --method depth it does it at all. Train the expanded model again."
)
ROUNDED = (
    "The base was cast before it was trained with, so the new tensors learned beside another base. Train again with "
    'the base as it is stored: from_pretrained(..., dtype="auto").'
)


class SavedTensors:
    """Reads saved tensors one by one; the parts of a merged one are asked for one after the other."""

    def __init__(self, saved: Saved, match: Match) -> None:
        self.checkpoint, self._match = saved.checkpoint, match
        self._apart = lru_cache(maxsize=1)(self._parts)

    def read(self, pair: Pair) -> Tensor:
        """The tensor of a pair, as it was saved."""
        if pair.part is None:
            return read_tensor(self.checkpoint, pair.saved)
        return self._apart(pair.part.joined)[pair.part.name]

    def _parts(self, joined: str) -> dict[str, Tensor]:
        model, saved = self._match.model, self._match.joined
        assert model is not None  # parts are only found with one
        names = [name for name, place in model.places.items() if place.part is not None and place.name == joined]
        return dict(model.tensors(lambda own: read_tensor(self.checkpoint, saved[own]), names))


@dataclass(frozen=True)
class Compared:
    """Base tensors that were saved: how many have the bytes of the base, and how many the same numbers otherwise.

    Attributes:
        equal: Tensors with the same bytes.
        widened: Dtypes of tensors with the same numbers in another dtype, such as "F32 for BF16", each counted.
    """

    equal: int
    widened: Mapping[str, int]

    @property
    def count(self) -> int:
        """All of them; 0 where none was saved."""
        return self.equal + sum(self.widened.values())


def compare_base(
    saved: Saved, trained: Trained, match: Match, base_hashes: Mapping[str, str], track: Track
) -> Compared:
    """Compare every base tensor that was saved with the base's.

    Args:
        saved: What was saved.
        trained: What was trained.
        match: Which tensor is which.
        base_hashes: sha256 of each of the base's tensors.
        track: Makes progress bars.

    Returns:
        How many are equal.

    Raises:
        CheckpointError: If one is not; all are counted, the first are named with what differs.
    """
    pairs = [pair for pair in match.pairs if pair.wanted in trained.base_tensors]
    kinds = {pair: _other_dtype(saved, trained, pair) for pair in pairs}
    as_stored = [pair for pair in pairs if pair.part is None and not kinds[pair]]
    values, changed, widened = SavedTensors(saved, match), list[Pair](), dict[str, int]()
    with track("base tensors", sum(trained.checkpoint.tensors[pair.wanted].bytes for pair in pairs)) as advance:
        hashes = hash_tensors(saved.checkpoint, list(dict.fromkeys(pair.saved for pair in as_stored)), advance)
        changed += [pair for pair in as_stored if hashes[pair.saved] != base_hashes[pair.wanted]]
        for pair in (pair for pair in pairs if pair.part is not None or kinds[pair]):
            if _difference(values, trained, pair) is not None:
                changed.append(pair)
            elif kinds[pair]:
                widened[kinds[pair]] = widened.get(kinds[pair], 0) + 1
            advance(trained.checkpoint.tensors[pair.wanted].bytes)
    _refuse_changed(saved, trained, values, changed, len(pairs))
    return Compared(len(pairs) - sum(widened.values()), widened)


def _other_dtype(saved: Saved, trained: Trained, pair: Pair) -> str:
    found, wanted = saved.checkpoint.tensors[pair.saved].dtype, trained.checkpoint.tensors[pair.wanted].dtype
    return "" if found == wanted else f"{found} for {wanted}"


def _difference(values: SavedTensors, trained: Trained, pair: Pair) -> str | None:
    return difference(values.read(pair), read_tensor(trained.checkpoint, pair.wanted))


def _refuse_changed(saved: Saved, trained: Trained, values: SavedTensors, changed: Sequence[Pair], count: int) -> None:
    if not changed:
        return
    lines = [f"{pair.wanted}: {_difference(values, trained, pair)}" for pair in changed[:MOST_LINES]]
    more = [f"... and {len(changed) - MOST_LINES} more."] if len(changed) > MOST_LINES else []
    head = f"{saved.name}: {len(changed)} of {count} base tensors are not those of {trained.name}."
    advice = ROUNDED if all(" was rounded to " in line for line in lines) else FROZEN
    raise CheckpointError.from_problems([head, *lines, *more, advice])


def new_entries(saved: Saved, trained: Trained, match: Match) -> dict[str, list[Entry]]:
    """The new tensors that were saved, to be written, by the shards of their plans.

    Args:
        saved: What was saved.
        trained: What was trained.
        match: Which tensor is which.

    Returns:
        What `write_shard` takes: at no time more than one tensor is in memory.
    """
    values, shards = SavedTensors(saved, match), dict[str, list[Entry]]()
    pairs = dict[str, list[Pair]]()
    for pair in match.pairs:
        pairs.setdefault(pair.wanted, []).append(pair)
    for tensor in trained.planned.values():
        cast = _cast(values, tensor, pairs[tensor.name])
        name = trained.facts.stored_name(tensor.name)
        shards.setdefault(tensor.shard, []).append(computed(name, tensor.dtype, tensor.shape, cast))
    return shards


def _cast(values: SavedTensors, tensor: TensorPlan, pairs: Sequence[Pair]) -> Callable[[], Tensor]:
    from scale_surgery.surgery.initialise import TORCH_DTYPES

    def read() -> Tensor:
        value = values.read(pairs[0])
        if not value.isfinite().all():
            raise CheckpointError(
                f"{tensor.name}: holds numbers that are not finite, so this training diverged. Adopt an earlier "
                "checkpoint of it, or train again with a lower learning rate."
            )
        for other in pairs[1:]:
            if (how := difference(values.read(other), value)) is not None:
                raise CheckpointError(
                    f"{tensor.name}: was saved as {pairs[0].saved} and as {other.saved}, expected the same of both: "
                    f"{how} Save the one alone that trained."
                )
        cast = value.to(TORCH_DTYPES[tensor.dtype])
        if not cast.isfinite().all():
            raise CheckpointError(
                f"{tensor.name}: holds values up to {value.abs().max().item():.3g}, expected such as {tensor.dtype} "
                "has, which the plan gives it. Expand with --dtype float32, and train again."
            )
        return cast

    return read


def rounded_dtypes(saved: Saved, trained: Trained, match: Match) -> Mapping[str, int]:
    """New tensors that are written in a dtype that does not hold all values of the saved one, such as "F32 to BF16"."""
    import torch

    from scale_surgery.surgery.initialise import TORCH_DTYPES

    planned, found = {name: tensor.dtype for name, tensor in trained.planned.items()}, dict[str, int]()
    for pair in match.pairs:
        if pair.wanted in planned:
            own, dtype = saved.checkpoint.tensors[pair.saved].dtype, TORCH_DTYPES[planned[pair.wanted]]
            if own not in TORCH_DTYPES or torch.promote_types(TORCH_DTYPES[own], dtype) != dtype:
                kind = f"{own} to {planned[pair.wanted]}"
                found[kind] = found.get(kind, 0) + 1
    return found
