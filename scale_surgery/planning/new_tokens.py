"""The base's tokenizer with new tokens: tokenizer.json is edited as JSON, so that the same text comes out every time.

    ids of the base's tokenizer | placeholders, up to the last row of its embedding | new tokens

Rows of an embedding that is padded beyond its tokenizer are left; their ids get placeholders, which stand in no text,
because an id that belongs to no token would be given to the next one that somebody adds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from scale_surgery.checkpoint.files import as_json
from scale_surgery.checkpoint.names import is_unicode
from scale_surgery.checkpoint.reading import collector_paused
from scale_surgery.errors import Problem
from scale_surgery.fields import Range

ADDED_TOKENS = "added_tokens"
# of an added token in tokenizer.json, as transformers writes it for a text that is given to add_tokens
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


@dataclass(frozen=True)
class NewTokens:
    """Tokens that an expansion adds to the base's tokenizer; their ids begin after the last row of its embedding.

    Attributes:
        tokens: As tokenizer.json writes them, in the order of their ids.
        merges: "left right" as tokenizer.json has them, where tokens were learned by going on with the base's merges of
            byte pairs; empty where texts are searched for the tokens as they stand.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenSource:
    """Sources of new tokens.

    Attributes:
        token_file: Tokens to add: a text file with one token a line, or a tokenizer folder. The first ids of that
            tokenizer must be the base's.
        token_texts: Text to learn new tokens from. Can be repeated. The tokens that shorten it most are added. The base
            needs a BPE tokenizer, and its merges are extended.
        token_count: Number of tokens to learn from --new-tokens-from.
    """

    token_file: str | None = field(default=None, metadata={"option": "new-tokens"})
    token_texts: tuple[str, ...] = field(default=(), metadata={"option": "new-tokens-from"})
    token_count: Annotated[int, Range(least=1)] = field(default=1000, metadata={"option": "count"})

    @property
    def is_wanted(self) -> bool:
        """True if new tokens are requested."""
        return self.token_file is not None or bool(self.token_texts)


def problems_of_tokens(new: object) -> list[Problem]:
    """List problems that new tokens have with any tokenizer; those of a record may hold anything."""
    place = "--new-tokens"
    if not isinstance(new, NewTokens):
        return [Problem("value-unfit", place, value=_shown(new), kind="NewTokens")]
    given = {"tokens": new.tokens, "merges": new.merges}
    for name, values in given.items():
        if not isinstance(values, tuple) or not all(isinstance(value, str) and is_unicode(value) for value in values):
            return [Problem("value-unfit", f"{place}: {name}", value=_shown(values), kind="a tuple of texts")]
    problems = [Problem("token-blank", f"{place}: {token!r}") for token in new.tokens if not token.strip()]
    counts = Counter(new.tokens)
    problems += [
        Problem("token-given-twice", place, token=token, count=count) for token, count in counts.items() if count > 1
    ]
    if not new.tokens:
        problems.append(Problem("value-empty", f"{place}: tokens"))
    # a single character that the base writes in bytes is a token without a merge
    made = {merge.replace(" ", "", 1) for merge in new.merges}
    wanted = [token for token in new.tokens if token in made or len(token) > 1]
    if new.merges and [merge.replace(" ", "", 1) for merge in new.merges] != wanted:
        problems.append(Problem("merges-unlike-tokens", place, merges=len(new.merges), tokens=len(new.tokens)))
    return problems


def _shown(value: Any) -> str:
    return repr(value)[:60]


def extended_tokenizer(text: str, rows: int, new: NewTokens) -> str:
    """The text of tokenizer.json with new tokens, whose ids begin at the rows of the base's embedding."""
    return extend_json(text.encode(), rows, new).decode()


# it is tried before it is written, and a large one takes seconds to make
@lru_cache(maxsize=1)
@collector_paused()
def extend_json(text: bytes, rows: int, new: NewTokens) -> bytes:
    """Add new tokens to the UTF-8 of a tokenizer.json, which takes a quarter of the memory of a text with an emoji."""
    content = json.loads(text)
    model, added, known = content["model"], content.setdefault(ADDED_TOKENS, []), token_ids(content)
    placeholders = {placeholder(id_): id_ for id_ in unused_ids(content, rows)}
    tokens = {token: rows + place for place, token in enumerate(new.tokens)}
    if isinstance(model["vocab"], dict):
        # an added token that stands in the model's vocabulary keeps its id; others are counted from the vocabulary's
        # size when the file is read
        model["vocab"] |= known | placeholders
    else:
        added += [_added(token, id_) for token, id_ in placeholders.items()]
    if new.merges:
        model["vocab"] |= tokens
        is_pairs = any(isinstance(merge, list) for merge in model["merges"])
        model["merges"] += [merge.split(" ") for merge in new.merges] if is_pairs else new.merges
    else:
        added += [_added(token, id_) for token, id_ in tokens.items()]
    # with indentation, Python's own encoder would write it, for seconds
    return json.dumps(content, ensure_ascii=False, separators=(",\n", ": ")).encode()


def extended_tokenizer_config(text: str, rows: int, new: NewTokens) -> str:
    """The text of tokenizer_config.json with new tokens, where it lists added tokens: transformers reads them there."""
    content = json.loads(text)
    if "added_tokens_decoder" not in content or new.merges:
        return text
    listed = {str(rows + place): {"content": token, **PLAIN} for place, token in enumerate(new.tokens)}
    return as_json(content | {"added_tokens_decoder": content["added_tokens_decoder"] | listed})


def token_ids(content: Mapping[str, Any]) -> dict[str, int]:
    """The id of each token of a parsed tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        vocabulary = {token: id_ for id_, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content.get(ADDED_TOKENS, ())}


def unused_ids(content: Mapping[str, Any], rows: int) -> list[int]:
    """Rows of the embedding that belong to no token of a parsed tokenizer.json."""
    used = set(token_ids(content).values())
    return [id_ for id_ in range(rows) if id_ not in used]


def placeholder(id_: int) -> str:
    """The token of an id that the base's tokenizer never gives."""
    return f"<|unused_{id_}|>"


def _added(token: str, id_: int) -> dict[str, Any]:
    return {"id": id_, "content": token, **PLAIN}
