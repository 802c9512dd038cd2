"""What each token of a document reads as, and how that is made visible.

Joined, the texts of a document's tokens read as the document. A character that is split over several tokens stands
at one of them; the others are empty and are shown by their bytes.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scale_surgery.data import Document

REPLACEMENT = "\ufffd"
# UTF-8 spends no more on a character, so after as many tokens nothing is waited for any more
MOST_BYTES = 4
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
SIGNS = {"\n": "↵", "\t": "→", "\r": "␍", "\x7f": "␡"}
# joiners belong to the spelling of emoji and of several scripts
JOINERS = "\u200c\u200d"


def token_texts(document: Document, ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Find what each token of a document reads as.

    Args:
        document: The document.
        ids: Its token ids, as `data.tokenize` made them.
        tokenizer: The model's tokenizer.

    Returns:
        A text for each token; special tokens by their names.
    """
    texts = _by_offsets(document, ids, tokenizer) if getattr(tokenizer, "is_fast", False) else None
    return _by_decoding(ids, tokenizer) if texts is None else texts


def _by_offsets(document: Document, ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """Cut the document where its tokens end; None where the tokenizer gives other tokens this time."""
    end = 0 if tokenizer.eos_token_id is None else 1
    options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
    text = tokenizer(document.text, add_special_tokens=False, **options)
    prompt = tokenizer(document.prompt, **options)
    read_only = len(ids) - end - len(text["input_ids"])
    if [*prompt["input_ids"][:read_only], *text["input_ids"]] != list(ids[: len(ids) - end]):
        return None
    shares = _cut(document.prompt, prompt["offset_mapping"][:read_only])
    shares += [*_cut(document.text, text["offset_mapping"]), *[""] * end]
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [share or (name if id_ in special else "") for share, name, id_ in zip(shares, names, ids, strict=True)]


def _cut(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Give each token what stands before its end and no token before it has; the last one gets the rest."""
    shares, done = [], 0
    for _, end in offsets:
        shares.append(text[done : max(done, end)])
        done = max(done, end)
    if shares:
        shares[-1] += text[done:]
    return shares


def _by_decoding(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Decode token by token, each behind the one before it, which decides about spaces."""

    def decode(start: int, end: int) -> str:
        some = list(ids[start:end])
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts, before, done = [], 0, 0
    for place in range(len(ids)):
        known, now = decode(before, done), decode(before, place + 1)
        # some tokenizers show a character that has only begun as a replacement, others not at all
        is_part = (now.endswith(REPLACEMENT) or now == known) and place + 1 - done < MOST_BYTES
        is_part = is_part and place + 1 < len(ids)
        texts.append("" if is_part else now[len(known) :])
        if not is_part:
            before, done = done, place + 1
    return texts


def visible(text: str, piece: str) -> str:
    """Show a token so that nothing of it is invisible.

    Args:
        text: What it reads as.
        piece: How the vocabulary spells it, shown where it reads as nothing.

    Returns:
        A text without line breaks, tabs, control characters and blanks that stand alone.
    """
    if not text:
        return f"⟨{_bytes_of(piece) or piece or '?'}⟩"
    if text.isspace():
        text = text.replace(" ", "·")
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    category = unicodedata.category(character)
    if category == "Cc":
        return chr(0x2400 + ord(character)) if character < " " else f"⟨U+{ord(character):04X}⟩"
    is_hidden = category in ("Cf", "Cs", "Cn", "Zl", "Zp") and character not in JOINERS
    return f"⟨U+{ord(character):04X}⟩" if is_hidden else character


def _bytes_of(piece: str) -> str | None:
    """Spell the bytes of a piece in hexadecimal; None where it does not stand for bytes."""
    if found := BYTE_PIECE.fullmatch(piece):
        return found[1]
    alphabet = _byte_alphabet()
    is_bytes = piece != "" and all(character in alphabet for character in piece)
    return " ".join(f"{alphabet[character]:02X}" for character in piece) if is_bytes else None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Map characters to the bytes for which they stand in a byte-level vocabulary, GPT-2's and its heirs'."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
