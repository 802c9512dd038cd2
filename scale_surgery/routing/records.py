"""What is known of each token that a routed or composed model read; see `route_report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.modeling.expanded_routers import Router

if TYPE_CHECKING:
    from scale_surgery.running.options import Dtype


# digits of a number of a token; float32 has no more
DIGITS = 6
# what is known of a token, and what was measured on a file: of two paths, or of many
OneToken = TypeVar("OneToken")
Sums = TypeVar("Sums")


def rounded(number: float) -> float:
    """A number of a token as it is written."""
    return float(f"{number:.{DIGITS}g}")


@dataclass(frozen=True)
class TokenRoute:
    """One token and how it was routed; logarithms are natural, and None at the first token, which nothing predicts.

    Attributes:
        position: Its place in the document, from 0.
        text: What it reads as; a character that is split over several tokens stands at one of them.
        piece: How the tokenizer's vocabulary spells it.
        id: Its id.
        is_counted: Whether totals count it; they leave out prompts, start tokens and the first token.
        base_log_probability: Its log-probability under the base model.
        preserve_log_probability: The same under what the router gives out on the preserve side.
        adapt_log_probability: The same under the adapt path.
        routed_log_probability: The same under the routed output.
        cosine: Cosine of both paths' base logits where it is predicted.
        adapt_weight: Weight of the adapt path there, from 0 to 1.
        decision: The path that the router took; None for one that mixes.
    """

    position: int
    text: str
    piece: str
    id: int
    is_counted: bool
    base_log_probability: float | None = None
    preserve_log_probability: float | None = None
    adapt_log_probability: float | None = None
    routed_log_probability: float | None = None
    cosine: float | None = None
    adapt_weight: float | None = None
    decision: Literal["preserve", "adapt"] | None = None

    @property
    def weight(self) -> float | None:
        """By what the token is marked: the weight of the adapt path."""
        return self.adapt_weight


@dataclass(frozen=True)
class TokenPaths:
    """One token and what each path of a composed model made of it; the first attributes are those of `TokenRoute`.

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
class DocumentRoute(Generic[OneToken]):
    """The tokens of one document; `source` says where it stands."""

    source: str
    tokens: tuple[OneToken, ...]

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
        preserve_nats_per_token: Loss of what the router gives out on the preserve side.
        adapt_nats_per_token: Loss of the adapt path alone.
        routed_nats_per_token: Loss of the routed model.
        routed_share: Mean weight of the adapt path.
    """

    documents: int
    tokens: int
    base_nats_per_token: float
    preserve_nats_per_token: float
    adapt_nats_per_token: float
    routed_nats_per_token: float
    routed_share: float


@dataclass(frozen=True)
class PathTotals:
    """Means over the tokens of a file that count, of a composed model.

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
class FileRoute(Generic[OneToken, Sums]):
    """A file, what was measured on it, and its documents."""

    file: str
    totals: Sums
    documents: tuple[DocumentRoute[OneToken], ...]


@dataclass(frozen=True)
class RouteReport:
    """The result of `route_report`; of a composed model its tokens are `TokenPaths`, its totals `PathTotals`.

    Attributes:
        model: What the model is called.
        base: What its base model is called.
        routing: How it routes.
        paths: Names of the paths of a composed model, the base's first; none of one with a single expansion.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: What weights were cast to, or None where they stayed as stored.
        files: What happened on each file.
    """

    model: str
    base: str
    routing: Router
    paths: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    files: tuple[FileRoute[Any, Any], ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Mean weight of each path of a composed model over all files."""
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
        content = {**own, "routing": self.routing.settings, "files": files}
        return {**plain_json(content), "tokens": self.records()}

    def _by_name(self, content: dict[str, Any]) -> dict[str, Any]:
        """What is known of each path of a composed model, by its name; a mixture decides nothing."""
        return {
            key: dict(zip(self.paths, value, strict=True)) if isinstance(value, tuple) else value
            for key, value in content.items()
            if key != "decision" or self.routing.is_hard
        }


def token_of(
    place: int,
    names: tuple[str, str, int],
    is_counted: bool,
    scores: Sequence[float],
    routing: Router,
    paths: tuple[str, ...],
) -> TokenRoute | TokenPaths:
    """What is known of a token.

    Args:
        place: Its place in the document.
        names: What it reads as, its piece and its id.
        is_counted: Whether totals count it.
        scores: Its log-probability under the base and under what comes out, the cosine, its log-probability on each
            path, and the weight of each.
        routing: How the model routes.
        paths: Names of its paths, where they are many.
    """
    if not place:
        return (TokenPaths if paths else TokenRoute)(place, *names, is_counted)
    base, routed, cosine, sides, weights = _parts(list(map(rounded, scores)))
    if paths:
        return TokenPaths(place, *names, is_counted, sides, weights, routed)
    (preserve, adapt), (_, weight) = sides, weights
    decision: Any = None if not routing.is_hard else "adapt" if weight == 1 else "preserve"
    return TokenRoute(place, *names, is_counted, base, preserve, adapt, routed, cosine, weight, decision)


def totals_of(documents: int, tokens: int, means: Sequence[float], paths: tuple[str, ...]) -> Totals | PathTotals:
    """The same of a file, from the means of these numbers."""
    base, routed, _, sides, weights = _parts(means)
    losses = tuple(-side for side in sides)
    if paths:
        return PathTotals(documents, tokens, losses, weights, -routed)
    (preserve, adapt), (_, weight) = losses, weights
    return Totals(documents, tokens, -base, preserve, adapt, -routed, weight)


def _parts(numbers: Sequence[float]) -> tuple[float, float, float, tuple[float, ...], tuple[float, ...]]:
    base, routed, cosine, *paths = numbers
    half = len(paths) // 2
    return base, routed, cosine, tuple(paths[:half]), tuple(paths[half:])
