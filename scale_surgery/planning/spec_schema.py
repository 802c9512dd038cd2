"""What the key `scale_surgery` of config.json and the specifications in a plan may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.checkpoint.schema import misfits
from scale_surgery.planning.specs import Collaboration, Widths


@dataclass(frozen=True)
class ModuleSpec:
    """What `specs` may say of a module, whatever its kind; see specs.py."""

    kind: str
    group: str = ""
    in_features: tuple[int, int] = (0, 0)
    out_features: tuple[tuple[int, int], ...] = ()
    base: int | None = None
    up: int = 0
    style: str = ""
    epsilon: float = 0
    heads: int = 0
    axis: int = 0
    share: float = 1
    trains_base: bool = False
    inner: int = 0
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class KindSpecs:
    """What `specs` may say of one of several kinds of layers."""

    expanded: Mapping[str, ModuleSpec]
    passing: Mapping[str, ModuleSpec]
    attention: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StoredSpecs:
    """What the module specifications of a plan may hold, of any method."""

    base_model: str
    layers: str
    expanded_layers: tuple[int, ...]
    format: int = 2
    name: str = DEFAULT_NAME
    method: str = ""
    variant: str = ""
    dtype: str | None = None
    new_layers: tuple[int, ...] = ()
    widths: Widths | None = None
    collaborative: Collaboration | None = None
    model: Mapping[str, ModuleSpec] | None = None
    head: Mapping[str, Any] | None = None
    expanded: Mapping[str, ModuleSpec] | None = None
    passing: Mapping[str, ModuleSpec] | None = None
    attention: Mapping[str, Mapping[str, Any]] | None = None
    kinds: tuple[KindSpecs, ...] = ()
    kind_of_layer: tuple[int, ...] = ()
    enter: str = ""
    groups: Mapping[str, str] | None = None
    problems: tuple[str, ...] = ()
    origin: Mapping[str, Any] | None = None
    fused: bool = False
    fused_head: bool = False


@dataclass(frozen=True)
class BaseKind:
    """What `base` says of a kind of layer."""

    modules: Mapping[str, ModuleSpec]
    attention: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StoredBase:
    """What `base` says: through what all paths pass."""

    hidden: int
    base_model: str
    layers: str
    last: str
    softcap: float | None
    softcap_key: str | None
    kinds: tuple[BaseKind, ...]
    kind_of_layer: tuple[int, ...]


@dataclass(frozen=True)
class StoredKey:
    """The key `scale_surgery` of config.json; a model with duplicated layers has its specifications there."""

    base: StoredBase
    expansions: tuple[StoredSpecs, ...]
    router: Mapping[str, Any] | None = None


def key_problems(key: Any, place: str) -> list[str]:
    """Find what in the key `scale_surgery` of a config.json is of another kind than what is written there.

    Args:
        key: Plain JSON values.
        place: What they are called.
    """
    is_deepened = isinstance(key, Mapping) and "method" in key
    return list(misfits(key, StoredSpecs if is_deepened else StoredKey, place))


def spec_problems(specs: Any, place: str) -> list[str]:
    """Find what in module specifications is of another kind than any method writes.

    Args:
        specs: Plain JSON values.
        place: What they are called.
    """
    return list(misfits(specs, StoredSpecs, place))
