"""Which tokens an expansion adds: those that somebody names, and those that save most on a text.

    FILE, a token a line  --> read_new_tokens   --> NewTokens
    FOLDER of a tokenizer -->
    TEXT                  --> choose_new_tokens --> NewTokens, and what they save

The tokenizer that comes of it is loaded as a user would load it, and tried, before anything else is done.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import scratch_folder, write_text
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import CheckpointError, DataError, PlanError, counted, name_some, shorten
from scale_surgery.planning.new_tokens import (
    ADDED_TOKENS,
    NewTokens,
    extended_tokenizer,
    extended_tokenizer_config,
    placeholder,
    token_ids,
)
from scale_surgery.progress import Track, no_progress, no_track
from scale_surgery.running.documents import in_pieces, read_documents
from scale_surgery.running.loading import quiet_transformers
from scale_surgery.running.options import RunOptions
from scale_surgery.running.sources import parse_source
from scale_surgery.running.text_files import open_text
from scale_surgery.running.texts import in_groups
from scale_surgery.running.tokenizer import VOCABULARY_FILES, load_tokenizer

# of tokenizer.json, what does not decide which tokens a text has
CHANGED_BY_CALLS = ("truncation", "padding")
SAVE_IT = (
    "Write it with the tokenizers library: AutoTokenizer.from_pretrained(...).save_pretrained(...), and put its files "
    "beside the weights."
)
LEARN_THEM = "Learn tokens from a text instead: --new-tokens-from TEXT --count N."
GIVE_A_FILE = "Name the tokens yourself: --new-tokens FILE, one a line."


@dataclass(frozen=True)
class BaseTokenizer:
    """A base's tokenizer: the text of its tokenizer.json, parsed too, and as it loads."""

    name: str
    text: str
    content: Mapping[str, Any]
    loaded: Any


def read_new_tokens(model: Path, source: Path, rows: int, run: RunOptions = RunOptions()) -> NewTokens:
    """Read the tokens that an expansion adds, and try the tokenizer with them.

    Args:
        model: The base's folder.
        source: A text file, one token a line, or a folder of a tokenizer whose first ids are the base's. Where the
            folder's new ids lie in padded rows of the base's embedding, they get others, from `rows` on.
        rows: Rows of the base's embedding.
        run: Whose code; `trust_remote_code` is read.

    Returns:
        The tokens, and their merges where the folder's tokenizer has learned them.

    Raises:
        CheckpointError: If the base's tokenizer cannot take tokens, or has ids beyond the embedding.
        DataError: If a token is empty, special or given twice, or if the base has it; if the folder's tokenizer gives
            old tokens other ids, or differs in something else; if a token does not come back from its id.
    """
    base = _open_base(model, rows, run)
    new = _read_folder(source, base, rows) if source.is_dir() else _read_file(source, base)
    with _loaded(model, base, rows, new, run) as extended:
        problems = [] if new.merges else _unreadable(base.loaded, extended, new)
        _check_as_before(base, extended, rows, new)
    if problems:
        raise DataError.from_problems(shorten(problems))
    return new


def _open_base(model: Path, rows: int, run: RunOptions) -> BaseTokenizer:
    """Open a base's tokenizer that can take tokens."""
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{model}: has no {TOKENIZER_FILE}, which new tokens are written into. {SAVE_IT}")
    content = read_json(file)
    with quiet_transformers():
        loaded = load_tokenizer(model, run)
    if loaded is None:
        raise CheckpointError(
            f"{model}: its tokenizer does not load, and new tokens need one. --trust-remote-code lets it run its own "
            "code."
        )
    if not loaded.is_fast:
        raise CheckpointError(
            f"{model}: its tokenizer is written in Python ({type(loaded).__name__}), expected one of the tokenizers "
            f"library, which {TOKENIZER_FILE} describes whole. {SAVE_IT}"
        )
    known = token_ids(content)
    highest = max(known, key=known.__getitem__)
    if known[highest] >= rows:
        raise CheckpointError(
            f"{model}: its tokenizer gives the id {known[highest]} for {highest!r}, expected ids below {rows}, the "
            "rows of its embedding. Use the tokenizer that the model was trained with."
        )
    return BaseTokenizer(str(model), read_bytes(file).decode("utf-8"), content, loaded)


def _read_file(source: Path, base: BaseTokenizer) -> NewTokens:
    """Tokens that stand in a file, one a line; spaces belong to them."""
    with open_text(source, no_progress) as (text, _):
        lines = text.read().removesuffix("\n").split("\n")
    known, backend = token_ids(base.content), base.loaded.backend_tokenizer
    first: dict[str, int] = {}
    problems = []
    for number, token in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        if not token.strip():
            problems.append(f"{where}: is {'blank' if token else 'empty'}, expected a token. Leave it out.")
        elif token in first:
            problems.append(f"{where}: {token!r} stands in line {first[token]} too. Leave one out.")
        elif (id_ := known.get(token, _only_id(backend, token))) is not None:
            problems.append(f"{where}: {token!r} is a token of the base already, with the id {id_}. Leave it out.")
        else:
            first[token] = number
    if problems:
        raise DataError.from_problems(shorten(problems))
    return NewTokens(tuple(first))


def _only_id(backend: Any, text: str) -> int | None:
    """The id of a text that is one token; None where it is more, or an unknown one."""
    encoding = backend.encode(text, add_special_tokens=False)
    return encoding.ids[0] if len(encoding.ids) == 1 and backend.decode(encoding.ids) == text else None


def _read_folder(source: Path, base: BaseTokenizer, rows: int) -> NewTokens:
    """The tokens that a tokenizer has beyond those of the base."""
    file = source / TOKENIZER_FILE
    if not file.is_file():
        raise DataError(f"{source}: has no {TOKENIZER_FILE}, expected a folder of a tokenizer. {SAVE_IT}")
    content = read_json(file)
    theirs, ours = token_ids(content), token_ids(base.content)
    moved = [
        f"{token!r} has the id {theirs[token]}, the base's is {id_}" if token in theirs else f"{token!r} is missing"
        for token, id_ in ours.items()
        if theirs.get(token) != id_
    ]
    if moved:
        raise DataError(
            f"{source}: of the base's {counted(len(ours), 'token')}, {len(moved):,} have another id or none: "
            f"{name_some(moved, 3)}. Expected the base's tokenizer with tokens at its end."
        )
    added = sorted((id_, token) for token, id_ in theirs.items() if token not in ours and token != placeholder(id_))
    if not added:
        raise DataError(f"{source}: its tokenizer has no token that the base's has not. Nothing is to be added.")
    tokens = tuple(token for _, token in added)
    flags = {token["content"]: token for token in content.get(ADDED_TOKENS, ())}
    if special := [token for token in tokens if flags.get(token, {}).get("special")]:
        raise DataError(
            f"{source}: {counted(len(special), 'new token')} of its tokenizer {'is' if len(special) == 1 else 'are'} "
            f"special: {name_some(list(map(repr, special)))}. Special tokens stay the base's; add it as a usual token, "
            "with add_tokens(...)."
        )
    new = NewTokens(tokens, tuple(map(" ".join, _merges(content)[len(_merges(base.content)) :])))
    wanted = json.loads(extended_tokenizer(base.text, rows, new))
    if differing := _differing(wanted, content, {*tokens, *ours}):
        raise DataError(
            f"{source}: beside its new tokens, its tokenizer differs from the base's in: {name_some(differing)}. "
            "Expected the base's with tokens that add_tokens(...) added, or with merges behind the base's."
        )
    return new


def _merges(content: Mapping[str, Any]) -> list[list[str]]:
    merges = content["model"].get("merges") or []
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], named: Iterable[str]) -> list[str]:
    """What differs between two tokenizers with the same tokens, whatever the ids of the new ones are."""
    a, b = _parts(ours, set(named)), _parts(theirs, set(named))
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def _parts(content: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    model = {f"model.{name}": value for name, value in content["model"].items() if name not in ("vocab", "merges")}
    around = {
        name: value
        for name, value in content.items()
        if name not in ("model", "version", ADDED_TOKENS, *CHANGED_BY_CALLS)
    }
    flags = {
        token["content"]: {name: value for name, value in token.items() if name != "id"}
        for token in content.get(ADDED_TOKENS, ())
    }
    added = {token: value for token, value in flags.items() if token in named}
    return {**around, **model, "merges": _merges(content), "added tokens": added}


@contextmanager
def _loaded(model: Path, base: BaseTokenizer, rows: int, new: NewTokens, run: RunOptions) -> Iterator[Any]:
    """The tokenizer with new tokens, as it loads from a folder."""
    with scratch_folder() as folder:
        for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE, *VOCABULARY_FILES):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
        config = folder / TOKENIZER_CONFIG_FILE
        if config.exists():
            write_text(config, extended_tokenizer_config(config.read_text("utf-8"), rows, new))
        write_text(folder / TOKENIZER_FILE, extended_tokenizer(base.text, rows, new))
        with quiet_transformers():
            loaded = load_tokenizer(folder, run)
        if loaded is None:
            raise CheckpointError(f"{base.name}: its tokenizer does not load any more with new tokens. {LEARN_THEM}")
        yield loaded


def _check_as_before(base: BaseTokenizer, extended: Any, rows: int, new: NewTokens) -> None:
    """Check that every old token keeps its id, and that each new one has its own."""
    before, now = base.loaded.get_vocab(), extended.get_vocab()
    wanted = before | {token: rows + place for place, token in enumerate(new.tokens)}
    moved = [
        f"{token!r} has {now.get(token)}, expected {id_}" for token, id_ in wanted.items() if now.get(token) != id_
    ]
    special = [token for token in base.loaded.get_added_vocab() if _ids(extended, token) != _ids(base.loaded, token)]
    moved += [f"{token!r} is cut into other tokens" for token in special]
    if moved:
        raise CheckpointError(
            f"{base.name}: its tokenizer cannot take these tokens, ids would be others: {name_some(moved, 3)}. "
            "Name fewer tokens, or learn them from a text: --new-tokens-from TEXT --count N."
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _unreadable(before: Any, extended: Any, new: NewTokens) -> list[str]:
    """Tokens that a text does not give, or that their ids do not give back where the base gives the text back."""
    problems = []
    for token in new.tokens:
        for text in (token, f"a {token} a"):
            wrong = _read_back(extended, text)
            if wrong != text and _read_back(before, text) == text:
                problems.append(
                    f"{token!r}: as a token of its own it does not come back, {text!r} becomes {wrong!r}. "
                    + ("" if token.startswith(" ") else f"Give it with a space before it, {f' {token}'!r}. ")
                    + LEARN_THEM
                )
                break
    return problems


def _read_back(tokenizer: Any, text: str) -> str:
    written: str = tokenizer.backend_tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=False)
    return written


# each token of the base is one character to the library that learns, from here on
FIRST_CHARACTER = 0x10000
# more distinct words than this are not kept: the rarest are forgotten
MOST_WORDS = 1_000_000
# a text without spaces is one word, and is cut
LONGEST_WORD = 64
# a pair that stands once saves nothing elsewhere
LEAST_OFTEN = 2
MOST_SHOWN = 10
# repetitions of a word that the library is given at once
AT_ONCE = 10_000
WORD_BEGIN = "▁"
BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SavingToken:
    """A new token, as tokenizer.json writes it.

    Attributes:
        token: The token.
        pieces: Tokens of the base that stood in its place.
        count: How often it stands in the text.
    """

    token: str
    pieces: int
    count: int

    @property
    def saved(self) -> int:
        """Tokens that the text has less for it."""
        return self.count * (self.pieces - 1)


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens that save most on a text, and what they save.

    Attributes:
        new_tokens: The tokens, those that save most first.
        wanted: How many were asked for; where the text has no more pairs, there are fewer.
        characters: Characters of the text.
        bytes: Bytes of the text.
        tokens_before: Tokens of the text for the base's tokenizer.
        tokens_after: Tokens of the text with a number of the new tokens: a quarter of them, half, all.
        most_saving: The tokens that save most, each counted where it is not a part of another.
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
    """Choose the tokens that save most on a text, by going on with the merges of the base's byte pair encoding.

    Every next token joins the two neighbours that stand side by side most often (Sennrich et al., 2016). The base's
    merges come first wherever a text is read, so a text in which no new pair stands keeps its tokens. Memory is
    bounded: of a text with more than a million different words the rarest are left out of the choice.

    Args:
        model: The base's folder.
        texts: Files, folders, datasets; see `documents.read_documents`.
        count: How many tokens.
        rows: Rows of the base's embedding.
        run: Whose code; `trust_remote_code` is read.
        track: Makes progress bars.

    Returns:
        The tokens with their merges, and what they save.

    Raises:
        CheckpointError: If the base's tokenizer cannot take tokens.
        DataError: If its tokens are not made by merges, or the text is too short to have a pair twice.
        PlanError: If the count is no positive number.
    """
    if count < 1:
        raise PlanError(f"--count is {count}, expected at least 1.")
    base = _open_base(model, rows, run)
    backend = json.loads(base.loaded.backend_tokenizer.to_str())
    if (kind := backend["model"]["type"]) != "BPE":
        raise DataError(
            f"{model}: its tokenizer is of the kind {kind}, expected BPE, whose merges can be gone on with. "
            + GIVE_A_FILE
        )
    alphabet = _Alphabet(backend)
    words, sizes = _count_words(base, texts, alphabet, track)
    merges = _learn_merges(words, count, alphabet)
    if not merges:
        raise DataError(
            f"{', '.join(map(str, texts))}: no two tokens that could become a new one stand side by side twice. Give "
            "more text."
        )
    new = NewTokens(tuple(dict.fromkeys(merge.token for merge in merges)), tuple(filter(None, map(str, merges))))
    with _loaded(model, base, rows, new, run) as extended:
        _check_as_before(base, extended, rows, new)
    before = sizes["tokens"]
    numbers = [max(1, len(new.tokens) // part) for part in (4, 2, 1)]
    standing = {number: _standing(words, merges, set(new.tokens[:number]), alphabet) for number in numbers}
    most = sorted(standing[len(new.tokens)], key=lambda own: (-own.saved, own.token))[:MOST_SHOWN]
    return ChosenTokens(
        new,
        count,
        sizes["characters"],
        sizes["bytes"],
        before,
        {number: before - sum(own.saved for own in some) for number, some in standing.items()},
        tuple(most),
    )


@dataclass(frozen=True)
class _Merge:
    """Two neighbours that become one: as the library learned them, and as tokenizer.json writes them.

    A character that the base writes in bytes becomes a token of its own without a merge.
    """

    left: str
    right: str
    token: str
    written: str

    def __str__(self) -> str:
        return self.written


class _Alphabet:
    """A text as the library learns from it: one character for each token of the base.

    A character that the base writes in bytes has two, which stand nowhere else, so that it is learned whole.
    """

    def __init__(self, backend: Mapping[str, Any]) -> None:
        """Begin with the tokens of a parsed tokenizer."""
        model, known = backend["model"], token_ids(backend)
        self.tokens = {chr(FIRST_CHARACTER + id_): token for token, id_ in known.items()}
        self.prefix = model["continuing_subword_prefix"] or ""
        self.begins = {id_ for token, id_ in known.items() if token.startswith(WORD_BEGIN)}
        self.apart = {token["id"] for token in backend[ADDED_TOKENS]} | {known.get(model["unk_token"], -1)}
        matches = {id_: BYTE.fullmatch(token) for token, id_ in known.items()} if model["byte_fallback"] else {}
        self.bytes = {id_: bytes.fromhex(match[1]) for id_, match in matches.items() if match}
        self.free = FIRST_CHARACTER + 1 + max(known.values())
        # of characters that the base writes in bytes
        self.spelt: dict[str, str] = {}
        self.pieces: dict[str, int] = {}

    def words(self, encoding: Any) -> Iterator[str]:
        """The words of a text; a token that joins no other stands in none."""
        word, raw, last = "", b"", None
        for id_, place in zip(encoding.ids, encoding.word_ids, strict=True):
            is_apart = id_ in self.apart
            if place != last or is_apart or id_ in self.begins or len(word) >= LONGEST_WORD:
                yield word
                word, last = "", place
            if id_ in self.bytes:
                raw += self.bytes[id_]
                if (character := _decoded(raw)) is not None:
                    if len(raw) == 1:  # a line break, whose byte is no token that decodes beside others
                        yield word
                        word = ""
                    else:
                        word += self.spelt.get(character) or self._spell(character, len(raw))
                    raw = b""
            elif not is_apart:
                word += chr(FIRST_CHARACTER + id_)
        yield word

    def _spell(self, character: str, pieces: int) -> str:
        own = chr(self.free) + chr(self.free + 1)
        self.free += 2
        self.spelt[character] = own
        self.tokens[own] = character
        self.pieces[own[0]] = pieces - 1
        return own

    def count_pieces(self, token: str) -> int:
        """How many tokens of the base a learned one stands for."""
        return sum(self.pieces.get(character, 1) for character in token)

    def name(self, learned: Iterable[tuple[str, str]]) -> list[_Merge]:
        """Merges with the names of tokens; one that would give a token which the tokenizer has is left out."""
        names = {own: token for own, token in self.tokens.items() if len(own) == 1}
        taken, merges = set(names.values()), []
        for left, right in learned:
            own = left + right
            if own in self.tokens:
                token, written = self.tokens[own], ""
            elif left in names and right in names:
                token = names[left] + names[right].removeprefix(self.prefix)
                written = f"{names[left]} {names[right]}"
            else:
                continue
            if own in names or token not in taken:
                names[own] = token
                taken.add(token)
                merges.append(_Merge(left, right, token, written))
        return merges


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _count_words(
    base: BaseTokenizer, texts: Sequence[str | Path], alphabet: _Alphabet, track: Track
) -> tuple[Counter[str], Counter[str]]:
    """The words of texts and how often they stand, and sizes of the texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(base.loaded.backend_tokenizer.to_str())
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


def _learn_merges(words: Mapping[str, int], count: int, alphabet: _Alphabet) -> list[_Merge]:
    """The merges of the next `count` tokens, or of fewer where no pair is left."""
    asked = count
    while True:
        learned = _train(words, asked, alphabet)
        merges = alphabet.name(learned)
        tokens = list(dict.fromkeys(merge.token for merge in merges))
        if len(tokens) >= count or len({left + right for left, right in learned}) < asked:
            return _only(merges, set(tokens[:count]))
        asked += 2 * (count - len(tokens))


def _only(merges: Iterable[_Merge], tokens: set[str]) -> list[_Merge]:
    """The merges that make these tokens of the base's tokens and of each other."""
    made: set[str] = set()
    kept = []
    for merge in merges:
        is_made = all(len(part) == 1 or part in made for part in (merge.left, merge.right))
        if merge.token in tokens and is_made:
            made.add(merge.left + merge.right)
            kept.append(merge)
    return kept


def _train(words: Mapping[str, int], count: int, alphabet: _Alphabet) -> list[tuple[str, str]]:
    """The pairs that stand side by side most often, one after the other."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    size = len(set().union(*words, *alphabet.spelt.values()))
    trainer = trainers.BpeTrainer(vocab_size=size + count, min_frequency=LEAST_OFTEN, show_progress=False)
    # once more, so that no other pair with a half of such a character is as frequent
    tokenizer.train_from_iterator(chain(_repeated(words), alphabet.spelt.values()), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    for word, count in words.items():
        for done in range(0, count, AT_ONCE):
            yield f"{word} " * min(AT_ONCE, count - done)


def _standing(
    words: Mapping[str, int], merges: Iterable[_Merge], tokens: set[str], alphabet: _Alphabet
) -> list[SavingToken]:
    """The tokens that stand in words where no others are new."""
    from tokenizers import Tokenizer, models

    some = _only(merges, tokens)
    names = {merge.left + merge.right: merge.token for merge in some}
    vocabulary = [*sorted(set().union(*words)), *names]
    model = models.BPE({own: id_ for id_, own in enumerate(vocabulary)}, [(merge.left, merge.right) for merge in some])
    tokenizer, counts = Tokenizer(model), Counter[str]()
    every = iter(words)
    while batch := list(islice(every, AT_ONCE)):
        for word, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            for own in encoding.tokens:
                if len(own) > 1:
                    counts[own] += words[word]
    return [SavingToken(names[own], alphabet.count_pieces(own), count) for own, count in counts.items()]
