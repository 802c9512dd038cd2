"""A text that is too long to be tokenized at once: piece by piece, with the tokens that it would have as a whole.

Each piece is read with some text before and after it. Where it overlaps the piece before, both say the same tokens at
the same places but near their ends; in the middle of what they agree on, one takes over from the other.

That is exact for byte pair encoding. Merges never cross a boundary between two final tokens, so what stands on one
side of it is merged as if the other side were not there. If both pieces have a boundary at p, with the same token
before and the same after it, no merge of the whole text crosses p either: the first that did would join the ends of
these two tokens, which stand in either piece too, and would have been made there. Splits before the merges look at few
characters around them; so ever more tokens have to agree than one. Where none do, the pieces are joined and read anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

# characters of a piece, and of what it shares with the next one
PIECE = 2**16
OVERLAP = 2**12
PIECES_AT_ONCE = 16
# tokens that must agree on either side of a place where one piece takes over from another
AGREEING = 16
# places that are tried in an overlap
TRIED = 8


def tokenize_long(pieces: Iterable[str], tokenizer: Any) -> Iterator[array[int]]:
    """Turn a long text into tokens, without start and end.

    Args:
        pieces: The text, in pieces of any length.
        tokenizer: The model's tokenizer; one without offsets is given the text as a whole.

    Yields:
        Token ids, in order.
    """
    if not tokenizer.is_fast:
        yield array("i", _encode(["".join(pieces)], tokenizer)["input_ids"][0])
        return
    left: _Piece | None = None
    for some in _groups(_overlapping(pieces)):
        found = _encode([text for _, text in some], tokenizer)
        for number, (start, text) in enumerate(some):
            right = _Piece(start, text, found, number)
            taken, left = _take_over(left, right, tokenizer)
            yield taken
    if left is not None:
        yield left.ids[left.begin :]


class _Piece:
    """A piece of a text and its tokens; `begin`: its first token that is not taken yet, `place`: where that begins.

    Args:
        start: Where it begins in the whole text.
        text: The piece.
        found: What the tokenizer made of it and of others.
        number: Which of them it is.
    """

    def __init__(self, start: int, text: str, found: Any, number: int) -> None:
        self.start, self.text, self.found, self.number = start, text, found, number
        self.ids, self.begin, self.place = array("i", found["input_ids"][number]), 0, start

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def token_at(self, place: int) -> int | None:
        """The token that a character of the whole text belongs to."""
        token: int | None = self.found.char_to_token(self.number, place - self.start)
        return token

    def around(self, token: int) -> list[tuple[int, int, int]] | None:
        """The tokens around a boundary, and where they stand in the whole text; None where there are too few."""
        if token - AGREEING < 0 or token + AGREEING > len(self.ids):
            return None
        spans = [self.found.token_to_chars(self.number, own) for own in range(token - AGREEING, token + AGREEING)]
        if any(span is None for span in spans):
            return None
        ids = self.ids[token - AGREEING : token + AGREEING]
        return [(own, self.start + span[0], self.start + span[1]) for own, span in zip(ids, spans, strict=True)]


def _take_over(left: _Piece | None, right: _Piece, tokenizer: Any) -> tuple[array[int], _Piece]:
    """The tokens of one piece up to where the next takes over, and the next."""
    if left is None:
        return array("i"), right
    for place, token, other in _boundaries(left, right):
        around = left.around(token)
        if token >= left.begin and around is not None and around == right.around(other):
            right.begin, right.place = other, place
            return left.ids[left.begin : token], right
    # nothing agrees, such as in one letter a thousand times: both are one piece
    text = left.text + right.text[left.end - right.start :]
    joined = _Piece(left.start, text, _encode([text], tokenizer), 0)
    if left.begin:
        joined.begin, joined.place = joined.token_at(left.place) or 0, left.place
    return array("i"), joined


def _boundaries(left: _Piece, right: _Piece) -> Iterator[tuple[int, int, int]]:
    """Places in what both pieces share, its middle first, and the tokens that stand there."""
    shared = left.end - right.start
    for number in range(TRIED):
        step = (number + 1) // 2 * (-1 if number % 2 else 1)
        place = right.start + shared // 2 + step * shared // (TRIED + 2)
        own, other = left.token_at(place), right.token_at(place)
        if own is not None and other is not None:
            yield place, own, other


def _overlapping(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    """A text in pieces of one length that overlap, and where each begins."""
    start, held = 0, ""
    for piece in pieces:
        held += piece
        while len(held) > PIECE:
            yield start, held[:PIECE]
            start, held = start + PIECE - OVERLAP, held[PIECE - OVERLAP :]
    if held:
        yield start, held


def _groups(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    some: list[tuple[int, str]] = []
    for piece in pieces:
        some.append(piece)
        if len(some) == PIECES_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _encode(texts: list[str], tokenizer: Any) -> Any:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
