"""What the parts of surgery.json may hold that are kept as plain values: fused, verification and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.schema import known_misfits
from scale_surgery.fields import Range
from scale_surgery.planning.request import Request

Size = Annotated[int, Range(least=0)]


@dataclass(frozen=True)
class JoinedShard:
    """A shard that a fused model was made of."""

    header: str
    sha256: str


@dataclass(frozen=True)
class MeasuredDrift:
    """What a model card says of a drift."""

    drift: float
    dtype: str


@dataclass(frozen=True)
class Fused:
    """`fused`: what `merge --to blocks` gives back."""

    shards: Mapping[str, JoinedShard]
    texts: Mapping[str, str]
    drift: Mapping[str, Any]


@dataclass(frozen=True)
class Certificate:
    """`verification`: what `inspect` and a model card say of it."""

    passed: bool
    date: str
    promises: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class ForcedBase:
    """`forced_base`: the base that an expansion was made on."""

    expected_name: str
    differing: tuple[str, ...]
    expected_revision: str | None = None


@dataclass(frozen=True)
class Run:
    """An entry of `training`."""

    steps: float = 0
    measured: Mapping[str, float | None] | None = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in the header of a shard."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True)
class StockFile:
    """A file in merge.json; a base file that was moved has another name."""

    sha256: str
    bytes: Size
    stored_as: str = ""


@dataclass(frozen=True)
class StockRecord:
    """What a push relies on in merge.json of a stock export."""

    base_name: str
    base_files: Mapping[str, StockFile]
    request: Request
    files: Mapping[str, StockFile] | None = None
    base_revision: str | None = None
    training: tuple[Mapping[str, Any], ...] = ()
    drift: Mapping[str, Any] | None = None


PARTS = {"fused": Fused, "verification": Certificate}


def part_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Find what in the parts of a parsed surgery.json is of another kind; what is no object is not looked into."""
    for name, kind in PARTS.items():
        if isinstance(content.get(name), dict):
            yield from known_misfits(content[name], kind, name)
    for name, expansion in content.get("expansions", {}).items():
        for number, run in enumerate(expansion.get("training", ())):
            yield from known_misfits(run, Run, f"expansions.{name}.training[{number}]")
        if isinstance(forced := expansion.get("forced_base"), dict):
            yield from known_misfits(forced, ForcedBase, f"expansions.{name}.forced_base")
    if isinstance(fused := content.get("fused"), dict) and isinstance(fused.get("drift"), dict):
        yield from known_misfits(fused["drift"], MeasuredDrift, "fused.drift")


def header_problems(headers: Mapping[str, str], place: str) -> Iterator[str]:
    """Find recorded headers of shards that are none.

    Args:
        headers: Texts of the headers by shard.
        place: What they are called.
    """
    for shard, text in headers.items():
        try:
            header = parse_json(text)
        except ValueError as error:
            yield f"{place}.{shard} is no header of a shard: {error}"
            continue
        if not isinstance(header, dict):
            yield f"{place}.{shard} is no header of a shard"
            continue
        for name, own in header.items():
            yield from () if name == "__metadata__" else known_misfits(own, HeaderEntry, f"{place}.{shard}: {name}")
