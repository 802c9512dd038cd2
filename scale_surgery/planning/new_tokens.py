"""Tokens that an expansion adds to the base's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NewTokens:
    """Tokens that an expansion adds to the base's tokenizer; their ids begin after the last row of its embedding.

    Attributes:
        tokens: The tokens, as tokenizer.json writes them, in the order of their ids.
        merges: "left right" as tokenizer.json has them, where tokens were learned by going on with the base's BPE
            merges; empty where texts are searched for the tokens as they stand (added tokens).
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...] = ()


def extended_tokenizer(text: str, rows: int, new: NewTokens) -> str:
    """The text of tokenizer.json with new tokens; ids from `rows` (rows of the base's embedding) on."""
    import json

    content = json.loads(text)
    known = {**content["model"]["vocab"], **{entry["content"]: entry["id"] for entry in content["added_tokens"]}}
    names = [f"<|unused_{number}|>" for number in range(1 + max(known.values()), rows)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    for number, token in enumerate((*names, *new.tokens), rows - len(names)):
        content["added_tokens"].append({"id": number, "content": token, **flags})
    return json.dumps(content, ensure_ascii=False, indent=2)
