"""Learn the new tokens that shorten a text most.

Learning continues the base's byte pair encoding. The base's merges always apply first, and no new merge makes a token
that the base has. So the base tokenizes the text, each token is written as one character, and the tokenizers library
learns from these characters.

    "für Straße"  --base-->  f ü r ▁ S t r a <0xC3> <0x9F> e  --one character a token-->  words  --BpeTrainer-->  merges
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.planning.new_tokens import ADDED_TOKENS, NewTokens, token_ids
from scale_surgery.progress import Track, no_track
from scale_surgery.running.base_tokenizer import check_as_before, extend, ids_of, open_base
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import load_tokenizer
from scale_surgery.text.documents import in_pieces, read_documents
from scale_surgery.text.sources import parse_source

# most distinct words of a text in memory; the rarest are dropped
MOST_WORDS = 1_000_000
MOST_SHOWN = 10
# the character for token id 0 of the base
FIRST_CHARACTER = 0x10000
# the first character of a SentencePiece word
WORD_BEGIN = "▁"
BYTE = re.compile("<0x([0-9A-F]{2})>")
# a text without spaces would be a single word
LONGEST_WORD = 64
# a pair that occurs once is not worth a token
LEAST_OFTEN = 2
# words, or repetitions of a word, that the library gets at once
AT_ONCE = 10_000


@dataclass(frozen=True)
class SavingToken:
    """A new token and its savings.

    Attributes:
        token: The token as tokenizer.json writes it.
        text: Its text after another token.
        count: Number of its occurrences in the text, outside of longer tokens.
        pieces: Number of base tokens that it replaces.
    """

    token: str
    text: str
    count: int
    pieces: int

    @property
    def saved(self) -> int:
        """The number of tokens by which the text gets shorter."""
        return self.count * (self.pieces - 1)


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens that shorten a text most, and their savings.

    Attributes:
        new_tokens: The tokens in order. A smaller count would give the first of them.
        wanted: The requested number. There are fewer if no pair occurs twice any more.
        characters: Characters of the text.
        bytes: Its bytes in UTF-8.
        tokens_before: Its tokens with the base's tokenizer.
        tokens_after: Its tokens with a quarter, half and all of the new tokens, by their number.
        most_saving: The tokens with the largest savings.
    """

    new_tokens: NewTokens
    wanted: int
    characters: int
    bytes: int
    tokens_before: int
    tokens_after: Mapping[int, int]
    most_saving: tuple[SavingToken, ...]


def choose_new_tokens(
    model: Path,
    texts: Sequence[str | Path],
    count: int,
    rows: int,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> ChosenTokens:
    """Choose the tokens that shorten a text most, by continuing the base's byte pair encoding."""
    if count < 1:
        raise PlanError(Problem("count-too-low", "--count", count=count))
    base = open_base(model, load_tokenizer(model, run), rows)
    backend = json.loads(base.loaded.backend_tokenizer.to_str())
    if (kind := backend["model"]["type"]) != "BPE":
        raise DataError(Problem("tokenizer-not-bpe", model, kind=kind))
    alphabet = Alphabet(backend)
    # to bound memory, the rarest of more than a million distinct words are dropped
    words, sizes = _count_words(backend, texts, alphabet, track)
    # each new token joins the most frequent pair of neighbours (Sennrich et al., 2016)
    merges = learn_merges(words, count, alphabet)
    if not merges:
        raise DataError(Problem("texts-without-pairs", ", ".join(map(str, texts))))
    names = {merge.joined: merge.token for merge in merges}
    tokens = tuple(dict.fromkeys(names.values()))
    new = NewTokens(tokens, tuple(merge.written for merge in merges if merge.written))
    joined = {
        number: count_joined(words, merges_of(merges, tokens[:number]))
        for number in [max(1, len(tokens) // part) for part in (4, 2, 1)]
    }
    extended = extend(base, new, run)
    # the base's merges always apply first, so a text without any new pair keeps its tokens
    check_as_before(base, extended, new)
    saved = {
        number: {spelling: often * (alphabet.count_pieces(spelling) - 1) for spelling, often in counts.items()}
        for number, counts in joined.items()
    }
    most = sorted(saved[len(tokens)].items(), key=lambda pair: (-pair[1], names[pair[0]]))[:MOST_SHOWN]
    return ChosenTokens(
        new,
        count,
        sizes["characters"],
        sizes["bytes"],
        sizes["tokens"],
        {number: sizes["tokens"] - sum(each.values()) for number, each in saved.items()},
        tuple(
            SavingToken(
                names[spelling],
                _reads_as(extended, names[spelling]),
                joined[len(tokens)][spelling],
                alphabet.count_pieces(spelling),
            )
            for spelling, _ in most
        ),
    )


def _reads_as(tokenizer: Any, token: str) -> str:
    """Return the text of a token after another token, including a leading space."""
    before, backend = ids_of(tokenizer, "a"), tokenizer.backend_tokenizer
    text: str = backend.decode([*before, backend.token_to_id(token)])
    return text.removeprefix(backend.decode(before))


def _count_words(
    backend: Mapping[str, Any], texts: Sequence[str | Path], alphabet: Alphabet, track: Track
) -> tuple[Counter[str], Counter[str]]:
    """Count the words of texts, and return the counts and the sizes of the texts."""
    from tokenizers import Tokenizer

    # imported here, because the module imports torch
    from scale_surgery.text.tokenizing import in_groups

    tokenizer = Tokenizer.from_str(json.dumps(backend))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with track("texts", sum(parse_source(text).bytes for text in texts)) as advance:
        documents = chain.from_iterable(map(in_pieces, read_documents(texts, advance, whole=False)))
        for some in in_groups(documents):
            read = [text for document in some for text in (document.prompt, document.text) if text]
            sizes["characters"] += sum(map(len, read))
            sizes["bytes"] += sum(len(text.encode()) for text in read)
            for encoding in tokenizer.encode_batch(read, add_special_tokens=False):
                sizes["tokens"] += len(encoding.ids)
                words.update(alphabet.words(encoding))
            _forget_rarest(words)
    del words[""]
    return words, sizes


def _forget_rarest(words: Counter[str]) -> None:
    while len(words) > MOST_WORDS:
        least = min(words.values())
        for word in [word for word, count in words.items() if count == least]:
            del words[word]


@dataclass(frozen=True)
class Merge:
    """A pair of neighbours that is joined.

    Attributes:
        left: The left neighbour, in characters of the alphabet.
        right: The right neighbour.
        token: The joined token, as tokenizer.json writes it.
        written: The merge as tokenizer.json writes it. It is empty for a character that the base writes in bytes, which
            needs an entry in the vocabulary and no merge.
    """

    left: str
    right: str
    token: str
    written: str

    @property
    def joined(self) -> str:
        """The joined token, in characters of the alphabet."""
        return self.left + self.right


class Alphabet:
    """An alphabet with one character for each token of the base.

    A text character that the base writes in bytes gets two characters that occur nowhere else, so that it is only
    learned whole. A token with a part of it could not be decoded.
    """

    def __init__(self, backend: Mapping[str, Any]) -> None:
        """Create the alphabet of a parsed tokenizer.json."""
        model, known = backend["model"], token_ids(backend)
        self.names = {chr(FIRST_CHARACTER + id_): token for token, id_ in known.items()}
        self.prefix = model["continuing_subword_prefix"] or ""
        self.begins = {id_ for token, id_ in known.items() if token.startswith(WORD_BEGIN)}
        self.apart = {token["id"] for token in backend[ADDED_TOKENS]} | {known.get(model["unk_token"], -1)}
        matches = {id_: BYTE.fullmatch(token) for token, id_ in known.items()} if model["byte_fallback"] else {}
        self.bytes = {id_: bytes.fromhex(match[1]) for id_, match in matches.items() if match}
        # characters that the base writes in bytes: their spelling, and the reverse
        self.spelling: dict[str, str] = {}
        self.spelt: dict[str, str] = {}
        # number of base tokens for the first half of a spelling; every other character is one token
        self.pieces: dict[str, int] = {}
        self.free = FIRST_CHARACTER + 1 + max(known.values())

    def words(self, encoding: Any) -> Iterator[str]:
        """Yield the words of a text, without tokens that are never joined."""
        word, raw, last = "", b"", None
        for id_, place in zip(encoding.ids, encoding.word_ids, strict=True):
            is_apart = id_ in self.apart
            if place != last or is_apart or id_ in self.begins or len(word) >= LONGEST_WORD:
                yield word
                word, last = "", place
            if id_ in self.bytes:
                raw += self.bytes[id_]
                if (character := _decoded(raw)) is None:
                    continue
                if len(raw) == 1:
                    # such as a line break: its byte cannot be decoded inside another token, and alone it is one token
                    yield word
                    word = ""
                else:
                    word += self.spelling.get(character) or self._spell(character, len(raw))
                raw = b""
            elif not is_apart:
                word += chr(FIRST_CHARACTER + id_)
        yield word

    def _spell(self, character: str, pieces: int) -> str:
        spelling = chr(self.free) + chr(self.free + 1)
        self.free += 2
        self.spelling[character], self.spelt[spelling] = spelling, character
        self.pieces[spelling[0]] = pieces - 1
        return spelling

    def count_pieces(self, word: str) -> int:
        """Return the number of base tokens in a word."""
        return sum(self.pieces.get(character, 1) for character in word)

    def name(self, learned: Iterable[tuple[str, str]]) -> Iterator[Merge]:
        """Yield the merges as tokenizer.json writes them, without those of existing tokens."""
        names = dict(self.names)
        taken = set(names.values())
        for left, right in learned:
            spelling, written = left + right, ""
            if spelling in self.spelt:
                token = self.spelt[spelling]
            elif left in names and right in names:
                token = names[left] + names[right].removeprefix(self.prefix)
                written = f"{names[left]} {names[right]}"
            else:
                continue
            # two merges may give the same token; a token with a space cannot be written in a merge
            if spelling in names or (token not in taken and " " not in token):
                names[spelling] = token
                taken.add(token)
                yield Merge(left, right, token, written)


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def learn_merges(words: Mapping[str, int], count: int, alphabet: Alphabet) -> list[Merge]:
    """Return the merges of the next `count` tokens, or fewer if no pair is left."""
    asked = count
    while True:
        learned = _train(words, asked, alphabet)
        merges = list(alphabet.name(learned))
        tokens = list(dict.fromkeys(merge.token for merge in merges))
        is_all = len({left + right for left, right in learned}) < asked
        if len(tokens) >= count or is_all:
            return merges_of(merges, tokens[:count])
        asked += 2 * (count - len(tokens))


def merges_of(merges: Iterable[Merge], tokens: Iterable[str]) -> list[Merge]:
    """Return the merges that build these tokens from the base's and from each other."""
    wanted, made, kept = set(tokens), set[str](), []
    for merge in merges:
        if merge.token in wanted and all(len(part) == 1 or part in made for part in (merge.left, merge.right)):
            made.add(merge.joined)
            kept.append(merge)
    return kept


def _train(words: Mapping[str, int], count: int, alphabet: Alphabet) -> list[tuple[str, str]]:
    """Return the most frequent pairs of neighbours, each after the previous pairs are joined."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    characters = set().union(*words, *alphabet.spelt)
    trainer = trainers.BpeTrainer(vocab_size=len(characters) + count, min_frequency=LEAST_OFTEN, show_progress=False)
    # each spelling is added once, so that no other pair with half of it is as frequent
    tokenizer.train_from_iterator(chain(_repeated(words), alphabet.spelt), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    for word, count in words.items():
        for done in range(0, count, AT_ONCE):
            yield f"{word} " * min(AT_ONCE, count - done)


def count_joined(words: Mapping[str, int], merges: Iterable[Merge]) -> Counter[str]:
    """Count the occurrences of each joined token in the words, outside of longer tokens."""
    from tokenizers import Tokenizer, models

    pairs = [(merge.left, merge.right) for merge in merges]
    tokens = dict.fromkeys(chain(sorted(set().union(*words)), map("".join, pairs)))
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, pairs))
    counts, every = Counter[str](), iter(words)
    while some := list(islice(every, AT_ONCE)):
        for word, encoding in zip(some, tokenizer.encode_batch(some), strict=True):
            for token in encoding.tokens:
                if len(token) > 1:
                    counts[token] += words[word]
    return counts
