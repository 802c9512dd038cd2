"""Which tokens an expansion adds: those that somebody names, and those that save most on a text.

    FILE, a token a line  --> read_new_tokens   --> NewTokens
    FOLDER of a tokenizer -->
    TEXT                  --> choose_new_tokens --> NewTokens, and what they save

The tokenizer that comes of it is loaded as a user would load it, and tried, before anything else is done.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import scratch_folder, write_text
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.checkpoint.sources import find_beside_weights
from scale_surgery.errors import CheckpointError, DataError, PlanError, counted, name_some, shorten
from scale_surgery.planning.new_tokens import (
    ADDED_TOKENS,
    PLAIN,
    NewTokens,
    TokenSource,
    extended_tokenizer,
    extended_tokenizer_config,
    placeholder,
    token_ids,
)
from scale_surgery.progress import Track, no_progress, no_track
from scale_surgery.running.documents import in_pieces, read_documents
from scale_surgery.running.further_merges import Alphabet, count_joined, learn_merges, merges_of
from scale_surgery.running.loading import load_base_config
from scale_surgery.running.options import RunOptions
from scale_surgery.running.sources import parse_source
from scale_surgery.running.text_files import open_text
from scale_surgery.running.tokenizer import CHANGED_BY_CALLS, VOCABULARY_FILES, load_tokenizer

SAVE_IT = (
    "Write it with the tokenizers library: AutoTokenizer.from_pretrained(...).save_pretrained(...), and put its files "
    "beside the weights."
)
LEARN_THEM = "Or learn tokens from a text: --new-tokens-from TEXT --count N."
GIVE_A_FILE = "Name the tokens yourself: --new-tokens FILE, one a line."
# distinct words of a text that are kept; the rarest are forgotten
MOST_WORDS = 1_000_000
MOST_SHOWN = 10


@dataclass(frozen=True)
class BaseTokenizer:
    """A base's tokenizer: the text of its tokenizer.json, parsed too, and as it loads; `rows` are its embedding's."""

    path: Path
    rows: int
    text: str
    content: Mapping[str, Any]
    loaded: Any


def find_new_tokens(
    model: str | Path,
    wanted: TokenSource,
    *,
    revision: str | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> NewTokens | ChosenTokens | None:
    """Find the tokens that an expansion of a model is to add.

    Args:
        model: A folder or a Hub id, of which no weight is downloaded.
        wanted: Where they come from: one of a file or folder, and texts.
        revision: Branch, tag or commit of a Hub repository.
        run: Whose code; `trust_remote_code` is read.
        track: Makes progress bars.

    Returns:
        The tokens; where they were learned from texts, with what they save; None where none are wanted.

    Raises:
        CheckpointError: If the base's tokenizer cannot take tokens; see `read_new_tokens`, `choose_new_tokens`.
        DataError: If the tokens, or the texts, are no use.
        PlanError: If both are given.
    """
    if wanted.token_file is not None and wanted.token_texts:
        raise PlanError("--new-tokens and --new-tokens-from: expected one of them. Leave one out.")
    if not wanted.is_wanted:
        return None
    folder = find_beside_weights(model, revision)
    rows = load_base_config(folder, str(model), run).get_text_config(decoder=True).vocab_size
    if wanted.token_file is not None:
        return read_new_tokens(folder, Path(wanted.token_file), rows, run)
    return choose_new_tokens(folder, wanted.token_texts, wanted.token_count, rows, run, track)


def read_new_tokens(model: Path, source: Path, rows: int, run: RunOptions = RunOptions()) -> NewTokens:
    """Read the tokens that an expansion adds, and try the tokenizer with them."""
    base = _open_base(model, load_tokenizer(model, run), rows)
    # a file has one token a line; the first ids of a folder's tokenizer are the base's, and where its new ids lie in
    # padded rows of the base's embedding, they get others, from `rows` on
    new = _read_folder(source, base) if source.is_dir() else _read_file(source, base)
    extended = _extend(base, new, run)
    if source.is_dir():
        _check_same(source, extended, _load(base, new, _text_of(source / TOKENIZER_FILE), run), base, new)
    _check_extended(base, extended, new)
    return new


def check_new_tokens(
    model: Path, tokenizer: Any | None, new: NewTokens, rows: int, run: RunOptions = RunOptions()
) -> None:
    """Check that a base's tokenizer, as `load_tokenizer` gives it, can take these tokens; see `read_new_tokens`."""
    # they may be those of a saved plan, of somebody's own code, or of an expansion of another model
    base = _open_base(model, tokenizer, rows)
    ids = token_ids(base.content)
    had = {
        token: ids.get(token) if new.merges else ids.get(token, _only_id(base.loaded, token)) for token in new.tokens
    }
    problems = [
        f"--new-tokens: the base has {token!r} already, with the id {id_}. Leave it out."
        for token, id_ in had.items()
        if id_ is not None
    ]
    if new.merges and base.content["model"].get("type") != "BPE":
        problems.append(f"--new-tokens: come with merges, and {model} has no BPE, whose merges they could go on with.")
    prefix = base.content["model"].get("continuing_subword_prefix") or ""
    pairs = [merge.split(" ") for merge in new.merges]
    made = [left + right.removeprefix(prefix) for left, right in pairs]
    # a character that the base writes in bytes is a token without a merge
    known = {*ids, *set(new.tokens).difference(made)}
    for token, pair in zip(made, pairs, strict=True):
        problems += [
            f"--new-tokens: {token!r} is made of {part!r}, which is no token before it."
            for part in pair
            if part not in known
        ]
        known.add(token)
    if problems:
        raise DataError.from_problems(shorten(problems))
    _check_extended(base, _extend(base, new, run), new)


def _check_extended(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check a tokenizer with new tokens, and read texts with it."""
    _check_as_before(base, extended, new)
    if problems := [] if new.merges else _unreadable(base, extended, new):
        raise DataError.from_problems(shorten(problems))


def _open_base(model: Path, loaded: Any | None, rows: int) -> BaseTokenizer:
    """Open a base's tokenizer that can take tokens."""
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{model}: has no {TOKENIZER_FILE}, which new tokens are written into. {SAVE_IT} "
            "A tokenizer that is written in Python has none and can take no tokens."
        )
    content = _read_tokenizer(file)
    if loaded is None:
        raise CheckpointError(
            f"{model}: its tokenizer does not load. --trust-remote-code lets one run its own code, and new tokens need "
            "one that runs none."
        )
    if not loaded.is_fast:
        raise CheckpointError(
            f"{model}: its tokenizer is written in Python ({type(loaded).__name__}), expected one of the tokenizers "
            f"library, of which {TOKENIZER_FILE} says all."
        )
    known, used = token_ids(content), loaded.get_vocab()
    if differing := [token for token in {**known, **used} if known.get(token) != used.get(token)]:
        raise CheckpointError(
            f"{file}: {counted(len(differing), 'token')} of the tokenizer {'has' if len(differing) == 1 else 'have'} "
            f"another id there, or none: {name_some(sorted(map(repr, differing)))}. {SAVE_IT}"
        )
    highest = max(known, key=known.__getitem__)
    if known[highest] >= rows:
        raise CheckpointError(
            f"{model}: its tokenizer gives the id {known[highest]} for {highest!r}, expected ids below {rows}, the "
            "rows of its embedding. Use the tokenizer that the model was trained with."
        )
    return BaseTokenizer(model, rows, _text_of(file), content, loaded)


def _read_tokenizer(file: Path) -> dict[str, Any]:
    """Parse a tokenizer.json that the library can read."""
    from tokenizers import Tokenizer

    content = read_json(file)
    try:
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises it bare
        raise CheckpointError(f"{file}: the tokenizers library does not read it ({error}). {SAVE_IT}") from error
    return content


def _text_of(file: Path) -> str:
    return read_bytes(file).decode("utf-8")


def _read_file(source: Path, base: BaseTokenizer) -> NewTokens:
    """Tokens that stand in a file, one a line; blanks belong to them."""
    if not source.is_file():
        raise DataError(
            f"{source}: there is no such file, expected a text with one token a line, or a folder of a tokenizer."
        )
    with open_text(source, no_progress) as (text, _):
        lines = text.read().removesuffix("\n").split("\n")
    known = token_ids(base.content)
    names = {id_: token for token, id_ in known.items()}
    first: dict[str, int] = {}
    problems = []
    for number, token in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        if not token.strip():
            problems.append(f"{where}: is {'blank' if token else 'empty'}, expected a token. Leave it out.")
        elif token in first:
            problems.append(f"{where}: {token!r} stands in line {first[token]} too. Leave one out.")
        elif (id_ := known.get(token, _only_id(base.loaded, token))) is not None:
            written = "" if names[id_] == token else f" as {names[id_]!r}"
            problems.append(f"{where}: the base has {token!r} already{written}, with the id {id_}. Leave it out.")
        else:
            first[token] = number
    if problems:
        raise DataError.from_problems(shorten(problems))
    return NewTokens(tuple(first))


def _only_id(tokenizer: Any, text: str) -> int | None:
    """The id of a text that is one known token; None where it is more."""
    ids = _ids(tokenizer, text)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _read_folder(source: Path, base: BaseTokenizer) -> NewTokens:
    """The tokens that a tokenizer has beyond those of the base."""
    file = source / TOKENIZER_FILE
    if not file.is_file():
        raise DataError(f"{source}: has no {TOKENIZER_FILE}, expected a folder of a tokenizer. {SAVE_IT}")
    content = _read_tokenizer(file)
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
    if odd := list(_with_flags(content, set(tokens))):
        raise DataError(
            f"{source}: of its {counted(len(tokens), 'new token')}, {len(odd):,} {'is' if len(odd) == 1 else 'are'} no "
            f"usual one: {name_some(odd)}. Expected tokens as add_tokens(...) adds texts; special ones stay the base's."
        )
    return NewTokens(tokens, tuple(map(" ".join, _merges(content)[len(_merges(base.content)) :])))


def _with_flags(content: Mapping[str, Any], tokens: Collection[str]) -> Iterator[str]:
    """Those of the tokens that are special, take spaces away or stand alone."""
    for token in content.get(ADDED_TOKENS, ()):
        flags = [name for name, value in PLAIN.items() if token.get(name, value) != value]
        if token["content"] in tokens and flags:
            yield f"{token['content']!r} ({', '.join(f'{name} is {token[name]}' for name in flags)})"


def _merges(content: Mapping[str, Any]) -> list[list[str]]:
    merges = content["model"].get("merges") or []
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _extend(base: BaseTokenizer, new: NewTokens, run: RunOptions) -> Any:
    return _load(base, new, extended_tokenizer(base.text, base.rows, new), run)


def _load(base: BaseTokenizer, new: NewTokens, text: str, run: RunOptions) -> Any:
    """Load the base's tokenizer with this tokenizer.json, which has new tokens, as from a folder."""
    with scratch_folder() as folder:
        for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE, *VOCABULARY_FILES):
            if (base.path / name).is_file():
                shutil.copyfile(base.path / name, folder / name)
        if (config := folder / TOKENIZER_CONFIG_FILE).exists():
            write_text(config, extended_tokenizer_config(_text_of(config), base.rows, new))
        write_text(folder / TOKENIZER_FILE, text)
        loaded = load_tokenizer(folder, run)
    if loaded is None:
        raise CheckpointError(f"{base.path}: its tokenizer does not load any more with new tokens. {LEARN_THEM}")
    return loaded


def _check_same(source: Path, ours: Any, theirs: Any, base: BaseTokenizer, new: NewTokens) -> None:
    """Check that a folder's tokenizer is what its tokens make of the base's, whatever ids they have there."""
    named = {*token_ids(base.content), *new.tokens}
    a, b = (_parts(json.loads(loaded.backend_tokenizer.to_str()), named) for loaded in (ours, theirs))
    if differing := [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]:
        raise DataError(
            f"{source}: beside its new tokens, its tokenizer differs from the base's in: {name_some(differing)}. "
            "Expected the base's with tokens that add_tokens(...) added, or with merges behind the base's."
        )


def _parts(content: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """What decides which tokens a text has, without ids; of added tokens the named ones."""
    model = {f"model.{name}": value for name, value in content["model"].items() if name not in ("vocab", "merges")}
    around = {
        name: value
        for name, value in content.items()
        if name not in ("model", "version", ADDED_TOKENS, *CHANGED_BY_CALLS)
    }
    added = {
        token["content"]: {name: value for name, value in token.items() if name != "id"}
        for token in content[ADDED_TOKENS]
        if token["content"] in named
    }
    return {**around, **model, "merges": _merges(content), "added tokens": added}


def _check_as_before(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check that every old token keeps its id, and that each new one has its own."""
    now = extended.get_vocab()
    wanted = base.loaded.get_vocab() | {token: base.rows + place for place, token in enumerate(new.tokens)}
    moved = [f"{token!r} has {now.get(token)}" for token, id_ in wanted.items() if now.get(token) != id_]
    added = base.loaded.get_added_vocab()
    moved += [f"{token!r} is cut" for token in added if _ids(extended, token) != _ids(base.loaded, token)]
    if moved:
        raise CheckpointError(
            f"{base.path}: its tokenizer does not keep its ids with these tokens: {name_some(moved, 3)}. Leave out "
            "tokens that begin or end like one of its own."
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _unreadable(base: BaseTokenizer, extended: Any, new: NewTokens) -> list[str]:
    """Tokens that no text gives, or that do not come back as the base gives their text back."""
    problems = []
    for place, token in enumerate(new.tokens):
        is_spaced = token[0].isspace()
        among = f"a{token} a" if is_spaced else f"a {token} a"
        texts = (among,) if is_spaced else (among, token)
        alternative = f"without the space, {token[1:]!r}" if is_spaced else f"with a space before it, {f' {token}'!r}"
        if not any(base.rows + place in _ids(extended, text) for text in texts):
            wrong = f"this tokenizer does not find it in {among!r}"
        else:
            kept = [text for text in texts if _read_back(base.loaded, text) == text]
            lost = next((text for text in kept if _read_back(extended, text) != text), None)
            if lost is None:
                continue
            wrong = f"this tokenizer would read {lost!r} back as {_read_back(extended, lost)!r}"
        problems.append(f"{token!r}: {wrong}. Give it {alternative}. {LEARN_THEM}")
    return problems


def _read_back(tokenizer: Any, text: str) -> str:
    written: str = tokenizer.backend_tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=False)
    return written


@dataclass(frozen=True)
class SavingToken:
    """A new token and what it saves.

    Attributes:
        token: As tokenizer.json writes it.
        text: How it reads behind another token.
        count: How often it stands in the text, where it is no part of a longer one.
        pieces: Tokens of the base that stood in its place.
    """

    token: str
    text: str
    count: int
    pieces: int

    @property
    def saved(self) -> int:
        """Tokens that the text has fewer."""
        return self.count * (self.pieces - 1)


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens that save most on a text, and what they save.

    Attributes:
        new_tokens: The tokens; the first of them are those that fewer would be.
        wanted: How many were asked for; there are fewer where no pair stands in the text twice any more.
        characters: Characters of the text.
        bytes: Its bytes in UTF-8.
        tokens_before: Its tokens with the base's tokenizer.
        tokens_after: Its tokens with a quarter of the new tokens, half of them and all, by their number.
        most_saving: The tokens that save most.
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
    """Choose the tokens that save most on a text, by going on with the merges of the base's byte pair encoding."""
    if count < 1:
        raise PlanError(f"--count is {count}, expected at least 1.")
    base = _open_base(model, load_tokenizer(model, run), rows)
    backend = json.loads(base.loaded.backend_tokenizer.to_str())
    if (kind := backend["model"]["type"]) != "BPE":
        raise DataError(
            f"{model}: its tokenizer is of the kind {kind}, expected BPE, whose merges can be gone on with. "
            + GIVE_A_FILE
        )
    alphabet = Alphabet(backend)
    # memory is bounded: of a text with more than a million different words the rarest are left out
    words, sizes = _count_words(backend, texts, alphabet, track)
    # every next token joins the two neighbours that stand side by side most often (Sennrich et al., 2016)
    merges = learn_merges(words, count, alphabet)
    if not merges:
        raise DataError(
            f"{', '.join(map(str, texts))}: no two tokens that could become a new one stand in it side by side twice. "
            "Give more text."
        )
    names = {merge.joined: merge.token for merge in merges}
    tokens = tuple(dict.fromkeys(names.values()))
    new = NewTokens(tokens, tuple(merge.written for merge in merges if merge.written))
    joined = {
        number: count_joined(words, merges_of(merges, tokens[:number]))
        for number in [max(1, len(tokens) // part) for part in (4, 2, 1)]
    }
    extended = _extend(base, new, run)
    # the base's merges come first wherever a text is read, so a text in which no new pair stands keeps its tokens
    _check_as_before(base, extended, new)
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
    """The text of a token behind another, where it keeps the space that it may begin with."""
    before, backend = _ids(tokenizer, "a"), tokenizer.backend_tokenizer
    text: str = backend.decode([*before, backend.token_to_id(token)])
    return text.removeprefix(backend.decode(before))


def _count_words(
    backend: Mapping[str, Any], texts: Sequence[str | Path], alphabet: Alphabet, track: Track
) -> tuple[Counter[str], Counter[str]]:
    """The words of texts and how often they stand, and sizes of the texts."""
    from tokenizers import Tokenizer

    from scale_surgery.running.texts import in_groups

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
