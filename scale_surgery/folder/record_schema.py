"""Fields that this program reads in the parts of surgery.json and merge.json that are kept as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.records import RecordError, open_record, read_record
from scale_surgery.errors import Problem
from scale_surgery.fields import Range
from scale_surgery.planning.request import Request

Size = Annotated[int, Range(least=0)]
Strength = Annotated[float, Range(least=0, most=1)]


@open_record
class JoinedShard(TypedDict):
    """A shard that a fused model was made of."""

    header: str
    sha256: str


@open_record
class MeasuredDrift(TypedDict):
    """A drift, for the model card."""

    drift: float
    dtype: str


@open_record
class Fused(TypedDict):
    """`fused`: what `merge --to blocks` gives back."""

    made: Mapping[str, str]
    shards: Mapping[str, JoinedShard]
    texts: Mapping[str, str]
    drift: MeasuredDrift


@open_record
class Certificate(TypedDict):
    """`verification`, for `inspect` and the model card."""

    passed: bool
    date: str
    promises: NotRequired[list[Mapping[str, Any]]]


@open_record
class Run(TypedDict, total=False):
    """An entry of `training`."""

    steps: float
    measured: Mapping[str, float | None] | None
    settings: Mapping[str, Any] | None
    routed: bool


@open_record
@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in the header of a shard."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


@open_record
@dataclass(frozen=True)
class StockFile:
    """A file in merge.json; a base file that was moved has another name."""

    sha256: str
    bytes: Size
    stored_as: str = ""


@open_record
@dataclass(frozen=True)
class StockRecord:
    """merge.json of a stock export, for a push."""

    base_name: str
    base_files: Mapping[str, StockFile]
    request: Request
    files: Mapping[str, StockFile] | None = None
    base_revision: str | None = None
    training: tuple[Mapping[str, Any], ...] = ()
    drift: Mapping[str, Any] | None = None
    strength: Strength = 1.0


def check_headers(headers: Mapping[str, str], place: str) -> None:
    """Check the texts of recorded headers, by shard; RecordError calls them by their `place` in the record."""
    parsed = {}
    for shard, text in headers.items():
        try:
            parsed[shard] = parse_json(text)
        except ValueError as error:
            raise RecordError(Problem("record-header-unreadable", f"{place}.{shard}", error=error)) from error
        if isinstance(parsed[shard], dict):
            parsed[shard].pop("__metadata__", None)
    read_record(parsed, dict[str, dict[str, HeaderEntry]], place)
