"""Answers of a model, token by token; see `generate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.talking.settings import GenerationSettings

# end: the model ended its answer. length: the answer reached its most tokens. context: it filled the model's context.
# interrupted: the user stopped it
Ending = Literal["end", "length", "context", "interrupted"]


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        id: Its id.
        text: Its text. If a character spans several tokens, the last of them has the whole character. Special tokens
            have an empty text.
        weights: Share of each path of the router in the prediction that it was sampled from; None if the model does not
            route.
    """

    id: int
    text: str
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a model to a prompt.

    Attributes:
        prompt: The prompt.
        read: Number of tokens read, including chat template and earlier turns.
        tokens: Tokens of the answer.
        ended: Reason for its end.
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
        """Mean weight of all expansions together; None if the model does not route or the answer is empty."""
        weights = [sum(token.weights[1:]) for token in self.tokens if token.weights is not None]
        return sum(weights) / len(weights) if weights else None

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        derived = {"text": self.text, "routed_share": self.routed_share}
        return plain_json(asdict(self) | derived)


@dataclass(frozen=True)
class Look:
    """Options for the display of answers.

    Attributes:
        paths: Whether to show the path of each token; by default where there are colours.
    """

    paths: bool | None = None


@dataclass(frozen=True)
class StreamedToken:
    """A token at the moment it is generated.

    Attributes:
        prompt: Index of its prompt, from 0.
        is_base: True if the base generates it, with the expansion disabled.
        token: The token.
        paths: Names of the paths of its weights.
    """

    prompt: int
    is_base: bool
    token: Token
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        model: Name of the model.
        base: Name of its base model; None if it has none.
        routing: Its router; None if it does not route.
        paths: Names of the router's paths, in the order of the tokens' weights.
        has_template: True if a chat template was used; otherwise the texts were continued.
        settings: Settings of prompts and sampling.
        answers: One answer per prompt.
        base_answers: Answers of its base, with the expansion disabled; empty unless requested.
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
        """Return the result as plain JSON values."""
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
