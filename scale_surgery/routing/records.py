"""Records of `route_report`: each token, document and file that a routed model read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.checkpoint.files import plain_json
from scale_surgery.modeling.expanded_routers import Router

if TYPE_CHECKING:
    from scale_surgery.running.options import Dtype


# digits of a number of a token; float32 has no more
DIGITS = 6


def rounded(number: float) -> float:
    """A number of a token, rounded for writing."""
    return float(f"{number:.{DIGITS}g}")


@dataclass(frozen=True)
class TokenRoute:
    """One token and what each path made of it; logarithms are natural, and None at the first token.

    Attributes:
        position: Its place in the document, from 0.
        text: Its text; a character that is split over several tokens stands at one of them.
        piece: Its spelling in the tokenizer's vocabulary.
        id: Its id.
        is_counted: Whether totals count it; they leave out prompts, start tokens and the first token, which nothing
            predicts.
        base_log_probability: Its log-probability under the base model.
        log_probabilities: The same on each path that the router weighs.
        weights: Weight of each path where it is predicted; they sum to 1. A router that decides gives one path all.
        routed_log_probability: Its log-probability under the routed output.
        cosine: Cosine of both paths' base logits where it is predicted; None where there are more paths than two.
    """

    position: int
    text: str
    piece: str
    id: int
    is_counted: bool
    base_log_probability: float | None = None
    log_probabilities: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    routed_log_probability: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class DocumentRoute:
    """The tokens of one document; `source` says where it stands."""

    source: str
    tokens: tuple[TokenRoute, ...]

    def place_in(self, file: str) -> str:
        """Where it stands in its file, such as "line 3"; empty for a file that is one document."""
        return self.source.removeprefix(file).lstrip(", ")


@dataclass(frozen=True)
class Totals:
    """Means over the tokens of a file that count.

    Attributes:
        documents: Documents of the file.
        tokens: Tokens that count.
        base_nats_per_token: Loss of the base model.
        nats_per_token: Loss of each path alone.
        shares: Mean weight of each path.
        routed_nats_per_token: Loss of the routed model.
    """

    documents: int
    tokens: int
    base_nats_per_token: float
    nats_per_token: tuple[float, ...]
    shares: tuple[float, ...]
    routed_nats_per_token: float


@dataclass(frozen=True)
class FileRoute:
    """A file, what was measured on it, and its documents."""

    file: str
    totals: Totals
    documents: tuple[DocumentRoute, ...]


@dataclass(frozen=True)
class RouteReport:
    """The result of `route_report`.

    Attributes:
        model: Name of the model.
        base: Name of its base model.
        routing: Its router.
        paths: Names of the paths that the router weighs: the base, or `preserve side` where an up stream goes with it,
            and the expansions. Numbers of paths are in this order.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: Dtype that weights were cast to; None where they stayed as stored.
        files: Totals and tokens of each file.
    """

    model: str
    base: str
    routing: Router
    paths: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    files: tuple[FileRoute, ...]

    @property
    def weighs_base(self) -> bool:
        """Whether one of the paths is the base; a cosine router may weigh one with an up stream instead."""
        return self.paths[0] == BASE_NAME

    @property
    def shares(self) -> tuple[float, ...]:
        """Mean weight of each path over all files."""
        tokens = sum(file.totals.tokens for file in self.files)
        sums = zip(*([file.totals.tokens * share for share in file.totals.shares] for file in self.files), strict=True)
        return tuple(sum(total) / tokens for total in sums)

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
        facts = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("files", "routing")
        }
        files = [{"file": file.file, **self._by_name(asdict(file.totals))} for file in self.files]
        content = {**facts, "routing": self.routing.settings, "files": files}
        return {**plain_json(content), "tokens": self.records()}

    def _by_name(self, content: dict[str, Any]) -> dict[str, Any]:
        """Numbers of paths by the names of these."""
        return {
            key: dict(zip(self.paths, value, strict=True)) if isinstance(value, tuple) else value
            for key, value in content.items()
        }


def token_of(place: int, names: tuple[str, str, int], is_counted: bool, scores: Sequence[float]) -> TokenRoute:
    """The record of a token."""
    if not place:
        return TokenRoute(place, *names, is_counted)
    base, routed, cosine, sides, weights = _parts(list(map(rounded, scores)))
    return TokenRoute(place, *names, is_counted, base, sides, weights, routed, cosine)


def totals_of(documents: int, tokens: int, means: Sequence[float]) -> Totals:
    """The same of a file, from the means of these numbers."""
    base, routed, _, sides, weights = _parts(means)
    return Totals(documents, tokens, -base, tuple(-side for side in sides), weights, -routed)


def _parts(
    numbers: Sequence[float],
) -> tuple[float, float, float | None, tuple[float, ...], tuple[float, ...]]:
    base, routed, cosine, *paths = numbers
    half = len(paths) // 2
    return base, routed, None if math.isnan(cosine) else cosine, tuple(paths[:half]), tuple(paths[half:])
