"""About how many tokens texts have: those of their beginnings are counted, and the bytes of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from scale_surgery.errors import DataError
from scale_surgery.learning.hold_out import text_files
from scale_surgery.running.chat_template import tokenize_chat
from scale_surgery.running.documents import read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 1000, 100_000


def count_tokens(files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Estimate the tokens of texts.

    Args:
        files: Files and saved datasets.
        tokenizer: The model's tokenizer.

    Returns:
        Their number, about; 0 where there is no file.

    Raises:
        DataError: If a file cannot be read, or holds no text.
    """
    return sum(_count(file, tokenizer) for file in files)


def _count(file: str, tokenizer: PreTrainedTokenizerBase) -> int:
    documents = list(islice(read_documents([file]), SAMPLED_DOCUMENTS))
    if not documents:
        raise DataError(f"{file}: holds no text, expected at least one document.")
    for document in documents:
        if document.chat is not None:
            tokenize_chat(document.chat, document.source, tokenizer)  # what cannot be read is refused before any work
            break
    texts = [document.prompt + document.text for document in documents]
    sample = "\n".join(texts)[:SAMPLED_CHARACTERS]
    tokens = len(tokenizer(sample, verbose=False)["input_ids"])
    characters = sum(map(len, texts)) + len(texts) - 1
    # where there are more documents than were read, they are as long as these, byte by byte
    is_all = len(texts) < SAMPLED_DOCUMENTS or not bytes_of(file)
    more = 1.0 if is_all else bytes_of(file) / sum(len(text.encode()) for text in texts)
    return max(1, round(tokens * characters / len(sample) * max(1.0, more)))


def bytes_of(file: str) -> int:
    """Bytes of a file, or of all files in a folder; 0 for what is not here, such as a dataset of the Hub."""
    return sum(own.stat().st_size for own in text_files([file]))
