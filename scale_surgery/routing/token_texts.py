"""The text of each token of a document.

The joined texts of a document's tokens equal the document. A character that is split over several tokens is the
text of one of them. The other tokens are empty, and are shown by their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scale_surgery.text.documents import Document

REPLACEMENT = "\ufffd"
# most tokens until the end of a character: its bytes in UTF-8, and a space that some tokenizers put before a text and
# decode to nothing
MOST_TOKENS = 1 + 4


def token_texts(document: Document, ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text of each token of a document; special tokens by their names."""
    texts = _by_offsets(document, ids, tokenizer) if getattr(tokenizer, "is_fast", False) else None
    return _by_decoding(ids, tokenizer) if texts is None else texts


def _by_offsets(document: Document, ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """Cut the document at the ends of its tokens; None if the tokenizer now returns other tokens."""
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
    """Give each token the text up to its end, except text of earlier tokens; the last token gets the rest."""
    shares, done = [], 0
    for _, end in offsets:
        shares.append(text[done : max(done, end)])
        done = max(done, end)
    if shares:
        shares[-1] += text[done:]
    return shares


def _by_decoding(ids: Sequence[int], tokenizer: Any) -> list[str]:
    reader = TextReader(tokenizer)
    return [reader.read(id_, is_last=place + 1 == len(ids)) for place, id_ in enumerate(ids)]


class TextReader:
    """A decoder of single tokens, each after the one before it, which decides about spaces."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.tokenizer, self.ids = tokenizer, list(before)
        self.start, self.done = 0, len(self.ids)

    def read(self, id_: int, *, is_last: bool = False) -> str:
        """Return the text of the next token; empty for a part of a character that a later token ends."""
        self.ids.append(id_)
        known, now = self._decode(self.done), self._decode(len(self.ids))
        # some tokenizers decode an incomplete character to a replacement, others to nothing
        is_part = (now.endswith(REPLACEMENT) or now == known) and len(self.ids) - self.done < MOST_TOKENS
        if is_part and not is_last:
            return ""
        self.start, self.done = self.done, len(self.ids)
        return now[len(known) :]

    def _decode(self, end: int) -> str:
        some = self.ids[self.start : end]
        return str(self.tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))
