"""What a model said, token by token; see `generate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.talking.settings import GenerationSettings

# end: the model ended its answer. length: there were as many tokens as an answer may have. context: as many as the
# model reads at once. interrupted: somebody stopped it
Ending = Literal["end", "length", "context", "interrupted"]


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        id: Its id.
        text: What it reads as; of a character that is split over several tokens all stands at the last one. Special
            tokens read as nothing.
        weights: How much of the prediction that it was drawn from comes from each path that the router weighs; None
            where the model does not route.
    """

    id: int
    text: str
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """What a model said after a prompt.

    Attributes:
        prompt: What it was asked.
        read: Tokens that it read, with chat template and what was said before.
        tokens: Its answer.
        ended: Why it ended.
    """

    prompt: str
    read: int
    tokens: tuple[Token, ...]
    ended: Ending

    @property
    def text(self) -> str:
        """The answer as text."""
        return "".join(token.text for token in self.tokens)

    @property
    def routed_share(self) -> float | None:
        """Mean weight of all expansions together; None where the model does not route or said nothing."""
        weights = [sum(token.weights[1:]) for token in self.tokens if token.weights is not None]
        return sum(weights) / len(weights) if weights else None

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values."""
        derived = {"text": self.text, "routed_share": self.routed_share}
        return plain_json(asdict(self) | derived)


@dataclass(frozen=True)
class Look:
    """How answers are shown.

    Attributes:
        paths: Whether to show the path of each token; by default where there are colours.
    """

    paths: bool | None = None


@dataclass(frozen=True)
class StreamedToken:
    """A token, at the moment when it comes.

    Attributes:
        prompt: Which prompt it answers, from 0.
        is_base: Whether the base says it, with the expansion disabled.
        token: The token.
        paths: Names of the paths of which the token has weights.
    """

    prompt: int
    is_base: bool
    token: Token
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        model: What the model is called.
        base: What its base model is called; None where it has none.
        routing: How it routes; None where it does not.
        paths: Names of the paths that its router weighs, of which tokens have weights.
        has_template: Whether a chat template was used; otherwise the texts were continued.
        settings: How it was asked.
        answers: An answer to each prompt.
        base_answers: Those of its base, with the expansion disabled; empty where they were not asked for.
    """

    model: str
    base: str | None
    routing: Router | None
    paths: tuple[str, ...]
    has_template: bool
    settings: GenerationSettings
    answers: tuple[Answer, ...]
    base_answers: tuple[Answer, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "model": self.model,
            "base": self.base,
            "routing": None if self.routing is None else self.routing.settings,
            "paths": list(self.paths),
            "has_template": self.has_template,
            "settings": asdict(self.settings),
            "answers": [answer.to_json() for answer in self.answers],
            "base_answers": [answer.to_json() for answer in self.base_answers],
        }
