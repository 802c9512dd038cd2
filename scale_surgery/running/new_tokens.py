"""New tokens of an expansion: tokens from a list, or the tokens that shorten a text most.

    FILE, a token a line  --> read_new_tokens   --> NewTokens
    FOLDER of a tokenizer -->
    TEXT                  --> choose_new_tokens --> NewTokens, and their savings

The resulting tokenizer is loaded as a user would load it, and tested, before any other work.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.checkpoint.sources import find_beside_weights
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.planning.new_tokens import ADDED_TOKENS, PLAIN, NewTokens, TokenSource, placeholder, token_ids
from scale_surgery.progress import Track, no_progress, no_track
from scale_surgery.running.base_tokenizer import (
    BaseTokenizer,
    check_as_before,
    extend,
    ids_of,
    load_extended,
    open_base,
    read_tokenizer,
)
from scale_surgery.running.learned_tokens import ChosenTokens, choose_new_tokens
from scale_surgery.running.loading import load_config
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import CHANGED_BY_CALLS, identify_tokenizer, load_tokenizer
from scale_surgery.text.text_files import open_text

OPTION = "--new-tokens"
# tested tokenizers, by class and files, rows and tokens: `expand` gets the tokens that a command has already tested
_tried = set[tuple[object, int, NewTokens]]()


def find_new_tokens(
    model: str | Path,
    wanted: TokenSource,
    *,
    revision: str | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> NewTokens | ChosenTokens | None:
    """Find the tokens that an expansion adds to a model.

    Args:
        model: A folder or a Hub id. No weights are downloaded.
        wanted: Their source: a file or folder, or texts.
        revision: Branch, tag or commit of a Hub repository.
        run: Only `trust_remote_code` is used.
        track: Creates progress bars.

    Returns:
        The tokens, with their savings if they were learned from texts, or None if no source is given.

    Raises:
        CheckpointError: If the base's tokenizer cannot take tokens; see `read_new_tokens`, `choose_new_tokens`.
        DataError: If the tokens or the texts are not usable.
        PlanError: If both are given, or a count without texts.
    """
    check_source(wanted)
    if not wanted.is_wanted:
        return None
    folder = find_beside_weights(model, revision)
    rows = load_config(folder, str(model), run).get_text_config(decoder=True).vocab_size
    found: NewTokens | ChosenTokens
    if wanted.token_file is not None:
        found = new = read_new_tokens(folder, Path(wanted.token_file), rows, run)
    else:
        found = choose_new_tokens(folder, wanted.token_texts, wanted.token_count, rows, run, track)
        new = found.new_tokens
    if (key := identify_tokenizer(folder, run)) is not None:
        _tried.add((key, rows, new))
    return found


def check_source(wanted: TokenSource) -> None:
    """Check the options of a source before it is read."""
    if wanted.token_count != TokenSource().token_count and not wanted.token_texts:
        raise PlanError(Problem("count-without-texts", "--count", count=wanted.token_count))
    if wanted.token_file is None:
        return
    if wanted.token_texts:
        raise PlanError(Problem("token-sources-both", f"{OPTION} and --new-tokens-from"))
    _check_there(Path(wanted.token_file))


def _check_there(source: Path) -> None:
    if not source.is_file() and not source.is_dir():
        raise DataError(Problem("tokens-missing", source))


def read_new_tokens(model: Path, source: Path, rows: int, run: RunOptions = RunOptions()) -> NewTokens:
    """Read the tokens that an expansion adds, and test the tokenizer with them."""
    base = open_base(model, load_tokenizer(model, run), rows)
    # A file has one token per line. In a folder's tokenizer, the first ids must be the base's. New ids inside padded
    # rows of the base's embedding are replaced by ids from `rows` on.
    new = _read_folder(source, base) if source.is_dir() else _read_file(source, base)
    extended = extend(base, new, run)
    if source.is_dir():
        _check_same(source, extended, load_extended(base, new, read_bytes(source / TOKENIZER_FILE), run), base, new)
    _check_extended(base, extended, new)
    return new


def check_new_tokens(
    model: Path, tokenizer: Any | None, new: NewTokens, rows: int, run: RunOptions = RunOptions()
) -> None:
    """Check that a base's tokenizer from `load_tokenizer` can take these tokens; see `read_new_tokens`."""
    if (identify_tokenizer(model, run), rows, new) in _tried:
        return
    # tokens may come from a saved plan, from user code, or from an expansion of another model
    base = open_base(model, tokenizer, rows)
    ids = base.facts.ids
    had = {
        token: ids.get(token) if new.merges else ids.get(token, _only_id(base.loaded, token)) for token in new.tokens
    }
    problems = [Problem("token-known", OPTION, token=token, id=id_) for token, id_ in had.items() if id_ is not None]
    if new.merges and base.facts.kind != "BPE":
        problems.append(Problem("tokenizer-not-bpe", model, kind=base.facts.kind))
    pairs = [merge.split(" ") for merge in new.merges]
    made = [left + right.removeprefix(base.facts.prefix) for left, right in pairs]
    # a character that the base writes in bytes becomes a token without a merge
    known = {*ids, *set(new.tokens).difference(made)}
    for token, pair in zip(made, pairs, strict=True):
        problems += [Problem("merge-of-no-token", OPTION, token=token, part=part) for part in pair if part not in known]
        known.add(token)
    if problems:
        raise DataError(*problems)
    _check_extended(base, extend(base, new, run), new)


def _check_extended(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check a tokenizer with new tokens, and test it on texts."""
    check_as_before(base, extended, new)
    if problems := [] if new.merges else _unreadable(base, extended, new):
        raise DataError(*problems)


def _read_file(source: Path, base: BaseTokenizer) -> NewTokens:
    """Read tokens from a file, one per line. Blanks are part of them."""
    _check_there(source)
    with open_text(source, no_progress) as (text, _):
        lines = text.read().removesuffix("\n").split("\n")
    known = base.facts.ids
    first: dict[str, int] = {}
    problems = []
    for number, token in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        if not token.strip():
            problems.append(Problem("token-blank", where))
        elif token in first:
            problems.append(Problem("token-repeated", where, token=token, line=first[token]))
        elif (id_ := known.get(token, _only_id(base.loaded, token))) is not None:
            problems.append(Problem("token-known", where, token=token, id=id_))
        else:
            first[token] = number
    if problems:
        raise DataError(*problems)
    return NewTokens(tuple(first))


def _only_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of a text that is a single known token, or None otherwise."""
    ids = ids_of(tokenizer, text)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _read_folder(source: Path, base: BaseTokenizer) -> NewTokens:
    """Read the tokens that a folder's tokenizer adds to the base's."""
    file = source / TOKENIZER_FILE
    if not file.is_file():
        raise DataError(Problem("tokenizer-json-missing", source))
    content = read_tokenizer(file)
    theirs, ours = token_ids(content), base.facts.ids
    if moved := [repr(token) for token, id_ in ours.items() if theirs.get(token) != id_]:
        raise DataError(Problem("tokens-moved", source, moved=len(moved), of=len(ours), tokens=moved))
    added = sorted((id_, token) for token, id_ in theirs.items() if token not in ours and token != placeholder(id_))
    if not added:
        raise DataError(Problem("tokens-none-new", source))
    tokens = tuple(token for _, token in added)
    if odd := list(_with_flags(content, set(tokens))):
        raise DataError(Problem("tokens-with-flags", source, *odd, odd=len(odd), of=len(tokens)))
    return NewTokens(tokens, tuple(map(" ".join, _merges(content)[base.facts.merges :])))


def _with_flags(content: Mapping[str, Any], tokens: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each token that is special, strips spaces or matches whole words only."""
    for token in content.get(ADDED_TOKENS, ()):
        flags = [name for name, value in PLAIN.items() if token.get(name, value) != value]
        if token["content"] in tokens and flags:
            yield Problem("token-with-flags", repr(token["content"]), flags=flags)


def _merges(content: Mapping[str, Any]) -> list[list[str]]:
    merges = content["model"].get("merges") or []
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _check_same(source: Path, ours: Any, theirs: Any, base: BaseTokenizer, new: NewTokens) -> None:
    """Check that a folder's tokenizer equals the base's with the new tokens, except for ids."""
    named = {*base.facts.ids, *new.tokens}
    a, b = (_parts(json.loads(loaded.backend_tokenizer.to_str()), named) for loaded in (ours, theirs))
    if differing := [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]:
        raise DataError(Problem("tokenizer-differs", source, parts=differing))


def _parts(content: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return all settings that determine tokenization, without ids. Only named added tokens are included."""
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


def _unreadable(base: BaseTokenizer, extended: Any, new: NewTokens) -> list[Problem]:
    """Return a problem for each token that no text produces, or that is decoded to another text than in the base."""
    problems = []
    for place, token in enumerate(new.tokens):
        is_spaced = token[0].isspace()
        among = f"a{token} a" if is_spaced else f"a {token} a"
        texts = (among,) if is_spaced else (among, token)
        other = token[1:] if is_spaced else f" {token}"
        if not any(base.rows + place in ids_of(extended, text) for text in texts):
            problems.append(Problem("token-not-found", repr(token), text=among, other=other))
            continue
        kept = [text for text in texts if _read_back(base.loaded, text) == text]
        if lost := next((text for text in kept if _read_back(extended, text) != text), ""):
            read = _read_back(extended, lost)
            problems.append(Problem("token-read-otherwise", repr(token), text=lost, read=read, other=other))
    return problems


def _read_back(tokenizer: Any, text: str) -> str:
    written: str = tokenizer.backend_tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False)
    return written
