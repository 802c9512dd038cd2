"""Interim."""

from dataclasses import dataclass
from typing import Any

from scale_surgery.planning.architecture import Architecture, Sizes


@dataclass(frozen=True)
class Derived:
    architecture: Architecture
    sizes: Sizes


def derive(config: Any) -> Derived:
    from tests.written import written_architecture, written_sizes

    plain = config.to_dict()
    return Derived(written_architecture(plain), written_sizes(plain))
