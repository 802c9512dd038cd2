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


# digits of the numbers of a token; float32 has no more
DIGITS = 6


def rounded(number: float) -> float:
    """Round a number of a token for writing."""
    return float(f"{number:.{DIGITS}g}")


@dataclass(frozen=True)
class TokenRoute:
    """A token with its scores on each path; logarithms are natural, and None at the first token.

    Attributes:
        position: Its position in the document, from 0.
        text: Its text; a character split over several tokens is shown at one of them.
        piece: Its spelling in the tokenizer's vocabulary.
        id: Its id.
        is_counted: True if totals count it; they exclude prompts, start tokens and the first token, which nothing
            predicts.
        base_log_probability: Its log-probability under the base model.
        log_probabilities: Its log-probability on each of the router's paths.
        weights: Weight of each path in its prediction; they sum to 1. A hard router gives one path the whole weight.
        routed_log_probability: Its log-probability under the routed output.
        cosine: Cosine of both paths' base logits at its prediction; None with more than two paths.
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
    """The tokens of one document; `source` names its place."""

    source: str
    tokens: tuple[TokenRoute, ...]

    def place_in(self, file: str) -> str:
        """Return its place in its file, such as "line 3"; empty for a file that is one document."""
        return self.source.removeprefix(file).lstrip(", ")


@dataclass(frozen=True)
class Totals:
    """Means over the counted tokens of a file.

    Attributes:
        documents: Documents of the file.
        tokens: Counted tokens.
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
    """A file with its totals and its documents."""

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
        paths: Names of the router's paths: the base, or `preserve side` if it includes an up stream, and the
            expansions. Numbers of paths are in this order.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: Dtype that weights were cast to; None for the stored dtype.
        files: Totals and tokens of each file.
        base_vocabulary: Number of token ids of the base. It cannot predict tokens with other ids, so its losses here
            exceed those of `evaluate`, which reads the text in the base's own tokens.
    """

    model: str
    base: str
    routing: Router
    paths: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    files: tuple[FileRoute, ...]
    base_vocabulary: int

    @property
    def new_tokens(self) -> int:
        """Number of tokens that the base does not have."""
        documents = (document for file in self.files for document in file.documents)
        return sum(token.id >= self.base_vocabulary for document in documents for token in document.tokens)

    @property
    def weighs_base(self) -> bool:
        """True if one of the paths is the base; a cosine router may have a path with an up stream instead."""
        return self.paths[0] == BASE_NAME

    @property
    def shares(self) -> tuple[float, ...]:
        """Mean weight of each path over all files."""
        tokens = sum(file.totals.tokens for file in self.files)
        sums = zip(*([file.totals.tokens * share for share in file.totals.shares] for file in self.files), strict=True)
        return tuple(sum(total) / tokens for total in sums)

    def records(self) -> list[dict[str, Any]]:
        """Return each token as plain JSON values, with its file and the number of its document there, from 0."""
        return [
            plain_json({"file": file.file, "document": number, **self._by_name(asdict(token))})
            for file in self.files
            for number, document in enumerate(file.documents)
            for token in document.tokens
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values: totals by file, then all tokens."""
        facts = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("files", "routing")
        }
        files = [{"file": file.file, **self._by_name(asdict(file.totals))} for file in self.files]
        content = {**facts, "routing": self.routing.settings, "files": files}
        return {**plain_json(content), "tokens": self.records()}

    def _by_name(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of paths by the paths' names."""
        return {
            key: dict(zip(self.paths, value, strict=True)) if isinstance(value, tuple) else value
            for key, value in content.items()
        }


def token_of(place: int, names: tuple[str, str, int], is_counted: bool, scores: Sequence[float]) -> TokenRoute:
    """Return the record of a token."""
    if not place:
        return TokenRoute(place, *names, is_counted)
    base, routed, cosine, sides, weights = _parts(list(map(rounded, scores)))
    return TokenRoute(place, *names, is_counted, base, sides, weights, routed, cosine)


def totals_of(documents: int, tokens: int, means: Sequence[float]) -> Totals:
    """Return the totals of a file, from the means of its tokens' scores."""
    base, routed, _, sides, weights = _parts(means)
    return Totals(documents, tokens, -base, tuple(-side for side in sides), weights, -routed)


def _parts(
    numbers: Sequence[float],
) -> tuple[float, float, float | None, tuple[float, ...], tuple[float, ...]]:
    base, routed, cosine, *paths = numbers
    half = len(paths) // 2
    return base, routed, None if math.isnan(cosine) else cosine, tuple(paths[:half]), tuple(paths[half:])
