"""What is known of each token that a composed model read on all of its paths; see `route_report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.composition.paths import MixedPaths
from scale_surgery.routing.records import FileRoute, rounded

if TYPE_CHECKING:
    from scale_surgery.running.options import Dtype


@dataclass(frozen=True)
class TokenPaths:
    """One token and what each path made of it; logarithms are natural, and None at the first token.

    The first attributes are those of `TokenRoute`.

    Attributes:
        log_probabilities: Its log-probability on each path alone, the base's first.
        weights: Weight of each path where it is predicted; they sum to 1.
        mixed_log_probability: Its log-probability under the mixture.
    """

    position: int
    text: str
    piece: str
    id: int
    is_counted: bool
    log_probabilities: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    mixed_log_probability: float | None = None

    @property
    def weight(self) -> tuple[float, ...] | None:
        """By what the token is marked: the weight of each path."""
        return self.weights


@dataclass(frozen=True)
class PathTotals:
    """Means over the tokens of a file that count.

    Attributes:
        documents: Documents of the file.
        tokens: Tokens that count.
        nats_per_token: Loss of each path alone, the base's first.
        shares: Mean weight of each path.
        mixed_nats_per_token: Loss of the mixture.
    """

    documents: int
    tokens: int
    nats_per_token: tuple[float, ...]
    shares: tuple[float, ...]
    mixed_nats_per_token: float


@dataclass(frozen=True)
class PathReport:
    """The result of `route_report` for a composed model; see `RouteReport`.

    Attributes:
        routing: Its paths, and how they are mixed.
    """

    model: str
    base: str
    routing: MixedPaths
    sequence_length: int
    step: int
    dtype: Dtype | None
    files: tuple[FileRoute[TokenPaths, PathTotals], ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Mean weight of each path over all files."""
        tokens = sum(file.totals.tokens for file in self.files)
        sums = zip(*([file.totals.tokens * share for share in file.totals.shares] for file in self.files), strict=True)
        return tuple(sum(own) / tokens for own in sums)

    def records(self) -> list[dict[str, Any]]:
        """Each token as plain JSON values, with its file and the number of its document there, from 0."""
        return [
            plain_json({"file": file.file, "document": number, **self._by_name(asdict(token))})
            for file in self.files
            for number, document in enumerate(file.documents)
            for token in document.tokens
        ]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values: totals by file, then all tokens."""
        own = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("files", "routing")
        }
        files = [{"file": file.file, **self._by_name(asdict(file.totals))} for file in self.files]
        return {**own, "routing": self.routing.settings, "files": plain_json(files), "tokens": self.records()}

    def _by_name(self, content: dict[str, Any]) -> dict[str, Any]:
        """What is known of each path, by its name."""
        return {
            key: dict(zip(self.routing.names, value, strict=True)) if isinstance(value, tuple) else value
            for key, value in content.items()
        }


def token_of_paths(place: int, names: tuple[str, str, int], is_counted: bool, scores: Sequence[float]) -> TokenPaths:
    """Put together what is known of a token: its log-probability and weight on each path, and that of the mixture."""
    if not place:
        return TokenPaths(place, *names, is_counted)
    *paths, mixed = map(rounded, scores)
    half = len(paths) // 2
    return TokenPaths(place, *names, is_counted, tuple(paths[:half]), tuple(paths[half:]), mixed)


def totals_of_paths(documents: int, tokens: int, means: Sequence[float]) -> PathTotals:
    """The same of a file, from the means of these numbers."""
    *paths, mixed = means
    half = len(paths) // 2
    return PathTotals(documents, tokens, tuple(-own for own in paths[:half]), tuple(paths[half:]), -mixed)
