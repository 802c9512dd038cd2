"""Which tensor of a saved model is which of the model that was trained, whatever the names that it was saved under.

transformers writes names as it found them, or as it would have them today; FSDP, DeepSpeed and plain loops keep names
in memory, tied tensors twice, and the experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scale_surgery.running.in_memory import InMemory
from scale_surgery.running.stored_names import TensorPlace

# what wrappers around a model or a module put into names: DDP, torch.compile, FSDP, checkpointing of activations
WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True)
class JoinedTensor:
    """One of the tensors that loading joins: name in memory of what it goes into, of several the first, and on disk."""

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
    """What was found.

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
    """Find out which saved tensor is which."""
    plain = {name: WRAPPERS.sub("", name) for name in saved}
    pairs, joined, model = [Pair(name, own) for name, own in plain.items() if own in wanted], dict[str, str](), None
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
    """Pairs that come to stand at one place in memory, or at tied ones; and those left, by names in memory."""
    ours: dict[tuple[str, str | None], list[str]] = {}
    for name, place in model.reading.places(wanted).items():
        ours.setdefault(_place(place, model), []).append(name)
    theirs, pairs, left = model.reading.places(set(plain.values())), list[Pair](), dict[str, str]()
    for name, own in plain.items():
        found = ours.get(_place(theirs[own], model), ())
        pairs += [Pair(name, other) for other in found]
        left |= {} if found else {theirs[own].name: name}
    return pairs, left


def _place(place: TensorPlace, model: InMemory) -> tuple[str, str | None]:
    if place.part is not None:
        return place.renamed, place.part
    return model.tied.get(place.name, place.name), None


def _parts(left: Mapping[str, str], model: InMemory) -> tuple[list[Pair], dict[str, str]]:
    """Pairs of what loading joins and what holds it, and these by their names in memory."""
    found = model.headers(model.held_by(left))
    parts = [JoinedTensor(model.places[name].name, name) for name in found]
    used = {name for part in parts for name in model.targets(model.places[part.name])}
    pairs = [Pair(left[part.joined], part.name, part) for part in parts]
    return pairs, {name: own for name, own in left.items() if name in used}


def _without(names: Iterable[str], known: Collection[str], unread: Iterable[str]) -> tuple[str, ...]:
    left = (name for name in names if name not in known)
    return tuple(name for name in left if not any(re.search(pattern, name) for pattern in unread))
