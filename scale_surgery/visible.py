"""Visible text: blanks, control characters and bytes become signs.

Text from a file may contain escapes that move the cursor, marks of writing direction, or lone surrogates, which no
encoding can write. The console, pages, figures and model cards all show text with these functions.
"""

from __future__ import annotations

import re
import unicodedata

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
SIGNS = {"\n": "↵", "\t": "→", "\r": "␍", "\x7f": "␡"}
# joiners are part of the spelling of emoji and of several scripts
JOINERS = "\u200c\u200d"


def visible_text(text: str) -> str:
    """Replace control characters, marks of direction and lone surrogates by signs. Line breaks remain."""
    if text.isprintable():
        return text
    return "".join(character if character == "\n" else _visible_character(character) for character in text)


def visible_line(text: str) -> str:
    """Replace the same characters as `visible_text`, and line breaks."""
    return visible_text(text).replace("\n", SIGNS["\n"])


def visible(text: str, piece: str) -> str:
    """Return the text of a token with visible blanks, or its spelling in the vocabulary if it has no text."""
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
    """Spell the bytes of a piece in hexadecimal, or None if the piece does not represent bytes."""
    if byte := BYTE_PIECE.fullmatch(piece):
        return byte[1]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # pieces of a byte-level vocabulary, such as GPT-2's
    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    bytes_of = {character: byte for byte, character in characters.items()}
    is_bytes = piece != "" and all(character in bytes_of for character in piece)
    return " ".join(f"{bytes_of[character]:02X}" for character in piece) if is_bytes else None
