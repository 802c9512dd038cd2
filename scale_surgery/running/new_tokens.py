"""Which tokens an expansion adds: those that somebody names, and those that save most on a text.

    FILE, a token a line  --> read_new_tokens   --> NewTokens
    FOLDER of a tokenizer -->
    TEXT                  --> choose_new_tokens --> NewTokens, and what they save

The tokenizer that comes of it is loaded as a user would load it, and tried, before anything else is done.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.checkpoint.sources import find_beside_weights
from scale_surgery.errors import DataError, PlanError, counted, name_some, shorten
from scale_surgery.planning.new_tokens import ADDED_TOKENS, PLAIN, NewTokens, TokenSource, placeholder, token_ids
from scale_surgery.progress import Track, no_progress, no_track
from scale_surgery.running.base_tokenizer import (
    LEARN_THEM,
    SAVE_IT,
    BaseTokenizer,
    check_as_before,
    extend,
    ids_of,
    load_extended,
    open_base,
    read_tokenizer,
    text_of,
)
from scale_surgery.running.learned_tokens import ChosenTokens, choose_new_tokens
from scale_surgery.running.loading import load_config
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import CHANGED_BY_CALLS, load_tokenizer
from scale_surgery.text.text_files import open_text


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
        PlanError: If both are given, or a count without texts.
    """
    check_source(wanted)
    if not wanted.is_wanted:
        return None
    folder = find_beside_weights(model, revision)
    rows = load_config(folder, str(model), run).get_text_config(decoder=True).vocab_size
    if wanted.token_file is not None:
        return read_new_tokens(folder, Path(wanted.token_file), rows, run)
    return choose_new_tokens(folder, wanted.token_texts, wanted.token_count, rows, run, track)


def check_source(wanted: TokenSource) -> None:
    """Check what can be said of a source before it is read."""
    if wanted.token_count != TokenSource().token_count and not wanted.token_texts:
        raise PlanError(
            f"--count {wanted.token_count}: says how many tokens to learn from a text. Give one with "
            "--new-tokens-from, or leave it out."
        )
    if wanted.token_file is None:
        return
    if wanted.token_texts:
        raise PlanError("--new-tokens and --new-tokens-from: expected one of them. Leave one out.")
    _check_there(Path(wanted.token_file))


def _check_there(source: Path) -> None:
    if not source.is_file() and not source.is_dir():
        raise DataError(
            f"{source}: there is no such file, expected a text with one token a line, or a folder of a tokenizer."
        )


def read_new_tokens(model: Path, source: Path, rows: int, run: RunOptions = RunOptions()) -> NewTokens:
    """Read the tokens that an expansion adds, and try the tokenizer with them."""
    base = open_base(model, load_tokenizer(model, run), rows)
    # a file has one token a line; the first ids of a folder's tokenizer are the base's, and where its new ids lie in
    # padded rows of the base's embedding, they get others, from `rows` on
    new = _read_folder(source, base) if source.is_dir() else _read_file(source, base)
    extended = extend(base, new, run)
    if source.is_dir():
        _check_same(source, extended, load_extended(base, new, text_of(source / TOKENIZER_FILE), run), base, new)
    _check_extended(base, extended, new)
    return new


def check_new_tokens(
    model: Path, tokenizer: Any | None, new: NewTokens, rows: int, run: RunOptions = RunOptions()
) -> None:
    """Check that a base's tokenizer, as `load_tokenizer` gives it, can take these tokens; see `read_new_tokens`."""
    # they may be those of a saved plan, of somebody's own code, or of an expansion of another model
    base = open_base(model, tokenizer, rows)
    ids = base.facts.ids
    had = {
        token: ids.get(token) if new.merges else ids.get(token, _only_id(base.loaded, token)) for token in new.tokens
    }
    problems = [
        f"--new-tokens: the base has {token!r} already, with the id {id_}. Leave it out."
        for token, id_ in had.items()
        if id_ is not None
    ]
    if new.merges and base.facts.kind != "BPE":
        problems.append(f"--new-tokens: come with merges, and {model} has no BPE, whose merges they could go on with.")
    pairs = [merge.split(" ") for merge in new.merges]
    made = [left + right.removeprefix(base.facts.prefix) for left, right in pairs]
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
    _check_extended(base, extend(base, new, run), new)


def _check_extended(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check a tokenizer with new tokens, and read texts with it."""
    check_as_before(base, extended, new)
    if problems := [] if new.merges else _unreadable(base, extended, new):
        raise DataError.from_problems(shorten(problems))


def _read_file(source: Path, base: BaseTokenizer) -> NewTokens:
    """Tokens that stand in a file, one a line; blanks belong to them."""
    _check_there(source)
    with open_text(source, no_progress) as (text, _):
        lines = text.read().removesuffix("\n").split("\n")
    known = base.facts.ids
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
    ids = ids_of(tokenizer, text)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _read_folder(source: Path, base: BaseTokenizer) -> NewTokens:
    """The tokens that a tokenizer has beyond those of the base."""
    file = source / TOKENIZER_FILE
    if not file.is_file():
        raise DataError(f"{source}: has no {TOKENIZER_FILE}, expected a folder of a tokenizer. {SAVE_IT}")
    content = read_tokenizer(file)
    theirs, ours = token_ids(content), base.facts.ids
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
    return NewTokens(tokens, tuple(map(" ".join, _merges(content)[base.facts.merges :])))


def _with_flags(content: Mapping[str, Any], tokens: Collection[str]) -> Iterator[str]:
    """Those of the tokens that are special, take spaces away or stand alone."""
    for token in content.get(ADDED_TOKENS, ()):
        flags = [name for name, value in PLAIN.items() if token.get(name, value) != value]
        if token["content"] in tokens and flags:
            yield f"{token['content']!r} ({', '.join(f'{name} is {token[name]}' for name in flags)})"


def _merges(content: Mapping[str, Any]) -> list[list[str]]:
    merges = content["model"].get("merges") or []
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _check_same(source: Path, ours: Any, theirs: Any, base: BaseTokenizer, new: NewTokens) -> None:
    """Check that a folder's tokenizer is what its tokens make of the base's, whatever ids they have there."""
    named = {*base.facts.ids, *new.tokens}
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


def _unreadable(base: BaseTokenizer, extended: Any, new: NewTokens) -> list[str]:
    """Tokens that no text gives, or that do not come back as the base gives their text back."""
    problems = []
    for place, token in enumerate(new.tokens):
        is_spaced = token[0].isspace()
        among = f"a{token} a" if is_spaced else f"a {token} a"
        texts = (among,) if is_spaced else (among, token)
        alternative = f"without the space, {token[1:]!r}" if is_spaced else f"with a space before it, {f' {token}'!r}"
        if not any(base.rows + place in ids_of(extended, text) for text in texts):
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
    written: str = tokenizer.backend_tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False)
    return written
