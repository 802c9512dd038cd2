"""Match the tensors that a trainer saved with the tensors of the trained model, in spite of other names.

transformers saves the names that it read, or the names of its release. FSDP, DeepSpeed and plain loops save names in
memory, tied tensors twice, and all experts of a layer as one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scale_surgery.running.in_memory import InMemory
from scale_surgery.running.stored_names import TensorPlace

# name parts that wrappers add: DDP, torch.compile, FSDP, activation checkpointing
WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that loading joins into another: the (first) joined name in memory, and its own name on disk."""

    joined: str
    name: str


@dataclass(frozen=True)
class Pair:
    """A saved tensor, and the tensor of the trained model that it equals or contains."""

    saved: str
    wanted: str
    part: JoinedTensor | None = None


@dataclass(frozen=True)
class Match:
    """A matching of saved names with wanted names.

    Attributes:
        pairs: Saved tensors with their wanted tensors. A tied tensor may be saved more than once.
        missing: Wanted tensors that were not saved.
        unexpected: Saved tensors that match no wanted tensor.
        joined: Saved tensors that contain wanted tensors as parts, by their names in memory.
        model: The trained model without weights, if the names alone were not enough.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)
    model: InMemory | None = field(default=None, compare=False)


def match_names(
    saved: Collection[str], wanted: Collection[str], unread: Iterable[str], make: Callable[[], Any]
) -> Match:
    """Match saved names with wanted names.

    `make` builds the model without weights. It is called only if the names alone are not enough.
    """
    plain = {name: WRAPPERS.sub("", name) for name in saved}
    pairs = [Pair(name, bare) for name, bare in plain.items() if bare in wanted]
    joined, model = dict[str, str](), None
    if len(pairs) != len(saved) or {pair.wanted for pair in pairs} != set(wanted):
        made = make()
        model = None if made is None else InMemory(made, wanted)
    if model is not None:
        pairs, left = _same(plain, wanted, model)
        parts, joined = _parts(left, model)
        pairs += parts
    patterns = tuple(unread)
    return Match(
        tuple(pairs),
        _without(wanted, {pair.wanted for pair in pairs}, patterns),
        _without(saved, {*(pair.saved for pair in pairs), *joined.values()}, patterns),
        joined,
        model,
    )


def _same(plain: Mapping[str, str], wanted: Iterable[str], model: InMemory) -> tuple[list[Pair], dict[str, str]]:
    """Return pairs with the same or a tied place in memory, and the other saved tensors by their names in memory."""
    wanted_at: dict[tuple[str, str | None], list[str]] = {}
    for name, place in model.reading.places(wanted).items():
        wanted_at.setdefault(_place(place, model), []).append(name)
    places, pairs, left = model.reading.places(set(plain.values())), list[Pair](), dict[str, str]()
    for name, bare in plain.items():
        matches = wanted_at.get(_place(places[bare], model), ())
        pairs += [Pair(name, match) for match in matches]
        left |= {} if matches else {places[bare].name: name}
    return pairs, left


def _place(place: TensorPlace, model: InMemory) -> tuple[str, str | None]:
    if place.part is not None:
        return place.renamed, place.part
    return model.tied.get(place.name, place.name), None


def _parts(left: Mapping[str, str], model: InMemory) -> tuple[list[Pair], dict[str, str]]:
    """Return pairs for tensors that loading joins, and the saved joined tensors by their names in memory."""
    parts = [JoinedTensor(model.places[name].name, name) for name in model.headers(model.held_by(left))]
    used = {name for part in parts for name in model.targets(model.places[part.name])}
    pairs = [Pair(left[part.joined], part.name, part) for part in parts]
    return pairs, {name: saved for name, saved in left.items() if name in used}


def _without(names: Iterable[str], known: Collection[str], unread: Iterable[str]) -> tuple[str, ...]:
    left = (name for name in names if name not in known)
    return tuple(name for name in left if not any(re.search(pattern, name) for pattern in unread))
