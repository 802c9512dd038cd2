"""Which tensor of a saved model is which of the model that was trained, whatever the names that it was saved under.

transformers writes names as it found them, or as it would have them today; FSDP, DeepSpeed and plain loops keep names
in memory, tied tensors twice, and the experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scale_surgery.running.skeleton import Skeleton

# what wrappers around a model or a module put into names: DDP, torch.compile, FSDP, checkpointing of activations
WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True)
class Part:
    """One of the tensors that transformers made one of: name of that in memory, and its own in files."""

    merged: str
    name: str


@dataclass(frozen=True)
class Pair:
    """A saved tensor, and the tensor of the trained model that it is, or that it holds as a part."""

    saved: str
    wanted: str
    part: Part | None = None


@dataclass(frozen=True)
class Match:
    """What was found.

    Attributes:
        pairs: Saved tensors with what they are; a tied one may be there more than once.
        missing: Wanted tensors that were not saved.
        unexpected: Saved tensors that are none of those.
        skeleton: The model, where names alone did not tell.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skeleton: Skeleton | None = field(default=None, compare=False)


def match_names(
    saved: Collection[str], wanted: Collection[str], unread: Iterable[str], make: Callable[[], Skeleton | None]
) -> Match:
    """Find out which saved tensor is which.

    Args:
        saved: Names under which tensors were saved.
        wanted: Names of tensors in the files of the model that was trained.
        unread: Patterns of names that files may hold and the model does not have.
        make: Makes that model, without weights; None where that is not possible, and names alone have to tell.

    Returns:
        Pairs of them, and what is left.
    """
    plain = {name: WRAPPERS.sub("", name) for name in saved}
    pairs = [Pair(name, own) for name, own in plain.items() if own in wanted]
    skeleton = None
    if len(pairs) != len(saved) or {pair.wanted for pair in pairs} != set(wanted):
        skeleton = make()
    if skeleton is not None:
        pairs = _in_memory(plain, wanted, skeleton)
    patterns = tuple(unread)
    return Match(
        tuple(pairs),
        _without(wanted, {pair.wanted for pair in pairs}, patterns),
        _without(saved, {pair.saved for pair in pairs}, patterns),
        skeleton,
    )


def _in_memory(plain: Mapping[str, str], wanted: Iterable[str], skeleton: Skeleton) -> list[Pair]:
    """Pairs of saved tensors, each with its name without wrappers, and wanted ones that are one in memory."""
    ours, found = skeleton.names(wanted), skeleton.names(set(plain.values()))
    theirs = {name: found[own] for name, own in plain.items()}
    pairs = [Pair(name, other) for name, other in _equal(skeleton, theirs, ours)]
    known = {pair.saved for pair in pairs}
    by_own = {own: name for name, own in ours.items()}
    for name, own in theirs.items():
        parts = skeleton.names(skeleton.split(own)) if name not in known and own in skeleton.own else {}
        if parts and all(other in by_own for other in parts.values()):
            pairs += [Pair(name, by_own[other], Part(own, part)) for part, other in parts.items()]
    return pairs


def _equal(skeleton: Skeleton, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Names that mean one tensor in memory; tied ones all mean the same."""
    places: dict[str, list[str]] = {}
    for name, own in ours.items():
        places.setdefault(skeleton.own.get(own, own), []).append(name)
    for name, own in theirs.items():
        yield from ((name, other) for other in places.get(skeleton.own.get(own, own), ()))


def _without(names: Iterable[str], known: Collection[str], unread: Iterable[str]) -> tuple[str, ...]:
    left = (name for name in names if name not in known)
    return tuple(name for name in left if not any(re.search(pattern, name) for pattern in unread))
