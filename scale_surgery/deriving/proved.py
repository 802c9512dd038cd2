"""Facts that hold on a twin: where an expansion breaks its promises there, blocks are treated in a weaker way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scale_surgery.deriving.fallback import hooked, weaker
from scale_surgery.deriving.prove import Twin, failure_of
from scale_surgery.errors import UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture

# each costs a few forwards of a tiny model; blocks are of few classes, and each has at most three weaker treatments
MOST_TRIES = 16


@dataclass(frozen=True)
class Attempt:
    """Facts about the real model, and the same with the numbers of its twin."""

    real: Architecture
    twin: Architecture

    def weakened(self) -> Iterator[Attempt]:
        """The same with the blocks of one class treated in the next weaker way, or with another start."""
        kinds = dict.fromkeys(block.kind for kind in self.real.kinds for block in kind.blocks)
        pairs = [(weaker(self.real, kind), weaker(self.twin, kind)) for kind in kinds]
        pairs.append((hooked(self.real), hooked(self.twin)))
        yield from (Attempt(real, twin) for real, twin in pairs if real is not None and twin is not None)


def prove(architecture: Architecture, twin: Twin) -> tuple[Architecture, Twin]:
    """Find the strongest treatment of all blocks with which an expansion of a twin keeps its promises."""
    waiting, seen, first = [Attempt(architecture, twin.architecture)], list[Attempt](), ""
    while waiting and len(seen) < MOST_TRIES:
        attempt = waiting.pop(0)
        seen.append(attempt)
        candidate = replace(twin, architecture=attempt.twin)
        failure = failure_of(candidate)
        if failure is None:
            return attempt.real, candidate
        first = first or failure
        waiting += [weakened for weakened in attempt.weakened() if weakened not in seen and weakened not in waiting]
    raise UnsupportedFamilyError(
        f"{architecture.config_class}: an expansion of a tiny twin of this model does not keep its promises: {first}. "
        f"{len(seen)} ways to expand it were tried. Supported are decoders whose layers add blocks to a stream."
    )
