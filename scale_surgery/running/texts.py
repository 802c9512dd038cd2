"""Texts to train on and to measure with: files become documents, documents become token sequences.

    FILE.jsonl   an object a line: {"text"}, {"question", "answer"} or {"prompt", "completion"}
    FILE.json    the same, or an array of such objects
    FILE.*       any other file is one document of plain text
    FOLDER       a dataset saved by the library `datasets`, with the same fields as columns

Of a question and its answer the answer alone is learned and scored. Tokens lie in flat arrays, so that a corpus
takes eight bytes a token in memory and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scale_surgery.errors import DataError, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# labels of tokens that are read and not scored: any, as in torch's cross-entropy, and those of a prompt, after which
# an answer begins; `collate` makes them one
IGNORED = -100
PROMPT = -101
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
DOCUMENTS_AT_ONCE = 1000
QUESTION = ("question", "answer")
FIELDS = (("text",), QUESTION, ("prompt", "completion"))
EXPECTED = 'expected {"text"}, {"question", "answer"} or {"prompt", "completion"}, each a text'


@dataclass(frozen=True)
class Document:
    """A text: `prompt` is read only and may be empty, `text` is learned and scored; `source` says where it stands."""

    prompt: str
    text: str
    source: str


@dataclass(frozen=True)
class Sequences:
    """Token sequences of any length, one after the other.

    Attributes:
        ids: Token ids of all sequences, int32, (tokens,).
        labels: The same, IGNORED or PROMPT where a token is read and not scored, int32, (tokens,).
        starts: Where each sequence begins, and where the last one ends; (sequences + 1,).
    """

    ids: Tensor
    labels: Tensor
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, end = self.starts[index], self.starts[index + 1]
        return {"input_ids": self.ids[start:end].long(), "labels": self.labels[start:end].long()}

    @property
    def scored(self) -> int:
        """Tokens that are scored; the first of a sequence never is, since nothing predicts it."""
        is_scored = self.labels >= 0
        is_scored[list(self.starts[:-1])] = False
        return int(is_scored.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(end - start for start, end in pairwise(self.starts))

    def fingerprint(self) -> str:
        """sha256 of the tokens, the labels and where sequences begin."""
        digest = hashlib.sha256(self.ids.numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        digest.update(repr(self.starts).encode())
        return digest.hexdigest()


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Read documents from files and from saved datasets.

    Args:
        paths: Files and folders, in this order.

    Yields:
        The documents, those without any text left out.

    Raises:
        DataError: If a file cannot be read or has other fields; every problem of the file is named.
    """
    for path in paths:
        if path.is_dir():
            yield from _from_rows(_read_dataset(path), f"{path}, row")
        elif path.suffix in (".jsonl", ".json"):
            rows = _read_array(path) if path.suffix == ".json" else None
            yield from _from_rows(rows, f"{path}, entry") if rows else _from_rows(_read_lines(path), f"{path}, line")
        else:
            yield from _documents([_read_text(path)], str(path))


def _read_text(path: Path) -> str:
    with _readable(path):
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no text


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as text ({error}). Give UTF-8 text, JSONL or a saved dataset."
        ) from error


def _read_lines(path: Path) -> Iterator[Any]:
    with _readable(path), path.open(encoding="utf-8-sig", newline="\n") as stream:
        # texts in JSON may hold other line ends, which end no line here
        for line in stream:
            try:
                yield json.loads(line.removesuffix("\n")) if line.strip() else {"text": ""}
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                yield error


def _read_array(path: Path) -> list[Any] | None:
    """The objects of a file that is one JSON array, or None where it is none."""
    try:
        found = json.loads(_read_text(path))
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _read_dataset(path: Path) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: a saved dataset needs the library datasets: pip install 'scale-surgery[datasets]'."
        ) from error
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is no saved dataset ({error}). Give a folder that save_to_disk wrote.") from error
    if isinstance(found, datasets.DatasetDict):
        raise DataError(
            f"{path}: holds the splits {', '.join(found)}. Give the folder of one, {path}/{next(iter(found))}."
        )
    rows: Iterable[Any] = found
    return rows


def _from_rows(rows: Iterable[Any], where: str) -> Iterator[Document]:
    problems = []
    for number, row in enumerate(rows, start=1):
        names = _fields_of(row)
        if names is None:
            problems.append(f"{where} {number}: {_problem(row)}.")
        else:
            yield from _documents([row[name] for name in names], f"{where} {number}", is_question=names == QUESTION)
    if problems:
        raise DataError.from_problems(shorten(problems))


def _fields_of(row: Any) -> tuple[str, ...] | None:
    if not isinstance(row, Mapping):
        return None
    return next((names for names in FIELDS if all(_is_text(row.get(name)) for name in names)), None)


def _is_text(value: Any) -> bool:
    # JSON can name halves of a character, which are no Unicode
    return isinstance(value, str) and not _has_half_characters(value)


def _has_half_characters(text: str) -> bool:
    return HALF_A_CHARACTER.search(text) is not None


def _problem(row: Any) -> str:
    if isinstance(row, ValueError):
        return f"is not JSON ({row})"
    if not isinstance(row, Mapping):
        return f"found {type(row).__name__}, {EXPECTED}"
    if any(isinstance(value, str) and _has_half_characters(value) for value in row.values()):
        return "holds half a character (a lone surrogate), expected Unicode text"
    return f"has the fields {', '.join(map(str, row)) or 'none'}; {EXPECTED}"


def _documents(texts: Sequence[str], source: str, *, is_question: bool = False) -> Iterator[Document]:
    """The document of a text, or of a prompt and a text; nothing where there is no text."""
    *prompt, text = texts
    if text.strip():
        # the answer follows the question after a space
        yield Document("".join(prompt), f" {text.lstrip()}" if is_question else text, source)


def tokenize(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, learn_prompts: bool = False
) -> Sequences:
    """Turn documents into token sequences, with the tokenizer's own start token and an end token after each.

    Args:
        documents: The documents.
        tokenizer: The model's tokenizer.
        learn_prompts: Whether prompts are scored too.

    Returns:
        One sequence a document.

    Raises:
        DataError: If there is no document, or one becomes no token.
    """
    ids, labels, starts = array("i"), array("i"), [0]
    for some in _groups(documents):
        for document, (prompt, text) in zip(some, _tokenize_some(some, tokenizer), strict=True):
            if not prompt + text:
                raise DataError(f"{document.source}: has no token in this model's tokenizer. Leave it out.")
            # without a prompt there is at most a start token
            read_only = PROMPT if document.prompt else IGNORED
            ids.extend(prompt + text)
            labels.extend(prompt if learn_prompts and document.prompt else [read_only] * len(prompt))
            labels.extend(text)
            starts.append(len(ids))
    if not ids:
        raise DataError("The data hold no text: every file is empty. Give at least one document.")
    return Sequences(
        torch.frombuffer(ids, dtype=torch.int32), torch.frombuffer(labels, dtype=torch.int32), tuple(starts)
    )


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    rest = iter(documents)
    while some := list(islice(rest, DOCUMENTS_AT_ONCE)):
        yield some


def _tokenize_some(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    # a tokenizer puts its start token before an empty prompt too
    prompts = tokenizer([document.prompt for document in documents], **options)["input_ids"]
    texts = tokenizer([document.text for document in documents], add_special_tokens=False, **options)["input_ids"]
    special = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id}
    for prompt, text in zip(prompts, texts, strict=True):
        while prompt and prompt[-1] in special:
            prompt.pop()  # some tokenizers end every text themselves
        yield prompt, [*text, *end]


def pack(sequences: Sequences, length: int) -> Sequences:
    """Cut all sequences, one after the other, into windows of equal length; the last may be shorter.

    Args:
        sequences: What to cut.
        length: Tokens of a window.

    Returns:
        The windows; a document may begin in one and end in the next.
    """
    total = len(sequences.ids)
    return Sequences(sequences.ids, sequences.labels, (*range(0, total, length), total))


def without_unscored(sequences: Sequences) -> Sequences:
    """Leave out sequences in which nothing is scored, such as a window that lies inside a long prompt.

    Args:
        sequences: Any sequences.

    Returns:
        Those with at least one scored token.

    Raises:
        DataError: If none is left.
    """
    starts = torch.tensor(sequences.starts)
    lengths = starts.diff()
    is_scored = sequences.labels >= 0
    is_scored[starts[:-1][lengths > 0]] = False
    before = torch.cat((torch.zeros(1, dtype=torch.long), is_scored.cumsum(0)))
    kept = before[starts[1:]] > before[starts[:-1]]
    if not kept.any():
        raise DataError("The data hold nothing to learn: every sequence is a prompt, or one token. Give longer texts.")
    tokens = kept.repeat_interleave(lengths)
    ends = lengths[kept].cumsum(0).tolist()
    return Sequences(sequences.ids[tokens], sequences.labels[tokens], (0, *ends))


def check_length(sequences: Sequences, documents: Sequence[Document], length: int) -> None:
    """Check that every sequence fits.

    Raises:
        DataError: If one is longer than `length` tokens; every such document is named.
    """
    sizes = [end - start for start, end in pairwise(sequences.starts)]
    problems = [
        f"{document.source}: {size} tokens, expected at most {length}."
        for document, size in zip(documents, sizes, strict=True)
        if size > length
    ]
    if problems:
        advice = "Pack the documents (--packing), raise --sequence-length, or split them."
        raise DataError.from_problems([*shorten(problems), advice])


def stride(sequences: Sequences, length: int, step: int) -> Sequences:
    """Cut long sequences into overlapping windows, in which each token is scored once.

    A token after the first window is predicted from at least `length - step` tokens before it.

    Args:
        sequences: What to cut.
        length: Tokens of a window.
        step: Tokens from one window to the next.

    Returns:
        The windows.
    """
    ids, labels, starts = [], [], [0]
    for start, end in pairwise(sequences.starts):
        for left in range(start, max(start + 1, end - length + step), step):
            window = slice(left, min(left + length, end))
            ids.append(sequences.ids[window])
            labels.append(sequences.labels[window].clone())
            if left > start:
                again = labels[-1][: length - step]
                again[again >= 0] = IGNORED  # scored in the window before; the end of a prompt stays known
            starts.append(starts[-1] + len(ids[-1]))
    return Sequences(torch.cat(ids), torch.cat(labels), tuple(starts))


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join sequences into a right-padded batch.

    Args:
        rows: Items of `Sequences`.

    Returns:
        `input_ids`, `labels` and `attention_mask`, each (rows, tokens of the longest).
    """
    ids, labels = pad(rows, "input_ids"), pad(rows, "labels")
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": labels.masked_fill(labels < 0, IGNORED), "attention_mask": mask}


def pad(rows: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Join the ids or the labels of sequences, as they stand, into one right-padded tensor."""
    # which id stands in the padding does not matter: nothing attends to it, nothing is scored
    value = IGNORED if name == "labels" else 0
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)


def read_files(texts: Sequence[str | Path]) -> dict[str, list[Document]]:
    """Read texts, each file once.

    Args:
        texts: Files and saved datasets.

    Returns:
        Documents by file.

    Raises:
        DataError: If there is no file, or one cannot be read or holds no text; every such file is named.
    """
    documents: dict[str, list[Document]] = {}
    problems = [] if texts else ["There is no text to report on. Give a file with --text."]
    for file in dict.fromkeys(map(str, texts)):
        try:
            documents[file] = list(read_documents([Path(file)]))
        except DataError as error:
            problems.append(str(error))
        else:
            problems += [] if documents[file] else [f"{file}: is empty, expected at least one document with some text."]
    if problems:
        raise DataError.from_problems(problems)
    return documents
