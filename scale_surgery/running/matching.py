"""Match the tensors that a trainer saved with those of the model that it trained, whatever their names.

transformers saves names as it read them, or as this release writes them; FSDP, DeepSpeed and plain loops save names in
memory, tied tensors twice, and the experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scale_surgery.running.in_memory import InMemory
from scale_surgery.running.stored_names import TensorPlace

# parts of names that wrappers add: DDP, torch.compile, FSDP, checkpointing of activations
WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that loading joins: name in memory of the joined tensor, of several the first, and its own on disk."""

    joined: str
    name: str


@dataclass(frozen=True)
class Pair:
    """A saved tensor, and the tensor of the trained model that it is, or that it holds as a part."""

    saved: str
    wanted: str
    part: JoinedTensor | None = None


@dataclass(frozen=True)
class Match:
    """Saved names matched with wanted ones.

    Attributes:
        pairs: Saved tensors with what they are; a tied one may be there more than once.
        missing: Wanted tensors that were not saved.
        unexpected: Saved tensors that are none of those.
        joined: Saved tensors that hold others as parts, by their names in memory.
        model: The trained model without weights, where names alone did not tell.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)
    model: InMemory | None = field(default=None, compare=False)


def match_names(
    saved: Collection[str], wanted: Collection[str], unread: Iterable[str], make: Callable[[], Any]
) -> Match:
    """Match saved names with wanted ones; `make` builds the model without weights where names alone do not tell."""
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
    """Pairs with one place in memory, or with tied ones; and the saved tensors left, by their names in memory."""
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
    """Pairs for tensors that loading joins, and the saved tensors that hold them, by their names in memory."""
    parts = [JoinedTensor(model.places[name].name, name) for name in model.headers(model.held_by(left))]
    used = {name for part in parts for name in model.targets(model.places[part.name])}
    pairs = [Pair(left[part.joined], part.name, part) for part in parts]
    return pairs, {name: saved for name, saved in left.items() if name in used}


def _without(names: Iterable[str], known: Collection[str], unread: Iterable[str]) -> tuple[str, ...]:
    left = (name for name in names if name not in known)
    return tuple(name for name in left if not any(re.search(pattern, name) for pattern in unread))
