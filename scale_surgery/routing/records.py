"""What is known of each token that a routed model read; see `route_report`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.planning.routing_specs import Routing

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
        decision: The path that a cosine router took; None for the posterior router, which mixes.
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
class FileRoute(Generic[OneToken, Sums]):
    """A file, what was measured on it, and its documents."""

    file: str
    totals: Sums
    documents: tuple[DocumentRoute[OneToken], ...]


@dataclass(frozen=True)
class RouteReport:
    """The result of `route_report`.

    Attributes:
        model: What the model is called.
        base: What its base model is called.
        routing: How it routes.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: What weights were cast to, or None where they stayed as stored.
        files: What happened on each file.
    """

    model: str
    base: str
    routing: Routing
    sequence_length: int
    step: int
    dtype: Dtype | None
    files: tuple[FileRoute[TokenRoute, Totals], ...]

    def records(self) -> list[dict[str, Any]]:
        """Each token as plain JSON values, with its file and the number of its document there, from 0."""
        return [
            plain_json({"file": file.file, "document": number, **self._token_to_json(token)})
            for file in self.files
            for number, document in enumerate(file.documents)
            for token in document.tokens
        ]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values: totals by file, then all tokens."""
        own = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("files", "routing")
        }
        files = [{"file": file.file, **asdict(file.totals)} for file in self.files]
        return {**own, "routing": self.routing.settings, "files": plain_json(files), "tokens": self.records()}

    def _token_to_json(self, token: TokenRoute) -> dict[str, Any]:
        content = asdict(token)
        if self.routing.router != "cosine":
            del content["decision"]
        return content
