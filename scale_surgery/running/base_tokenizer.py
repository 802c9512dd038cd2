"""The tokenizer of a base, without and with new tokens, loaded as a user would load it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from scale_surgery.checkpoint.reading import collector_paused, read_bytes
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.planning.new_tokens import NewTokens, extend_json, extended_tokenizer_config, token_ids
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import VOCABULARY_FILES, forget_tokenizers, load_tokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    """The ids, the model type, the prefix of continuing pieces and the number of merges of a tokenizer.json."""

    ids: Mapping[str, int]
    kind: str
    prefix: str
    merges: int


@dataclass(frozen=True)
class BaseTokenizer:
    """A base's tokenizer: the bytes and facts of its tokenizer.json, and the loaded object.

    `rows` is the number of rows of the embedding.
    """

    path: Path
    rows: int
    text: bytes
    facts: TokenizerFacts
    loaded: Any


def open_base(model: Path, loaded: Any | None, rows: int) -> BaseTokenizer:
    """Open a base's tokenizer, and check that it can take new tokens."""
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(Problem("tokenizer-json-missing", model))
    if loaded is None:
        read_tokenizer(file)
        raise CheckpointError(Problem("tokenizer-not-loaded", model))
    if not loaded.is_fast:
        raise CheckpointError(Problem("tokenizer-in-python", model, kind=type(loaded).__name__))
    text = read_bytes(file)
    facts = facts_of(text)
    known, used = facts.ids, loaded.get_vocab()
    # comparing equal dicts takes a tenth of the time of the union
    both = {} if known == used else {**known, **used}
    if differing := [token for token in both if known.get(token) != used.get(token)]:
        names = sorted(map(repr, differing))
        raise CheckpointError(Problem("tokenizer-json-differs", file, count=len(names), tokens=names))
    highest = max(known, key=known.__getitem__)
    if known[highest] >= rows:
        problem = Problem("token-id-too-high", model, id=known[highest], text=repr(highest), rows=rows)
        raise CheckpointError(problem)
    return BaseTokenizer(model, rows, text, facts, loaded)


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Parse a tokenizer.json, and check that the tokenizers library can read it."""
    from tokenizers import Tokenizer

    content = read_json(file)
    try:
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(Problem("tokenizer-json-unreadable", file, error=error)) from error
    return content


@lru_cache(maxsize=1)
def facts_of(text: bytes) -> TokenizerFacts:
    """Read the facts of a tokenizer.json."""
    with collector_paused():
        content = json.loads(text)
    model = content["model"]
    return TokenizerFacts(
        token_ids(content),
        model.get("type", ""),
        model.get("continuing_subword_prefix") or "",
        len(model.get("merges") or ()),
    )


def forget_base_tokenizers() -> None:
    """Drop the cached tokenizers and the cached contents of their files, before models need the memory."""
    forget_tokenizers()
    facts_of.cache_clear()
    extend_json.cache_clear()


def extend(base: BaseTokenizer, new: NewTokens, run: RunOptions) -> Any:
    """Load the base's tokenizer with new tokens."""
    return load_extended(base, new, extend_json(base.text, base.rows, new), run)


def load_extended(base: BaseTokenizer, new: NewTokens, text: bytes, run: RunOptions) -> Any:
    """Load the base's tokenizer with a tokenizer.json that includes the new tokens, as from a folder."""
    with scratch_folder() as folder:
        for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE, *VOCABULARY_FILES):
            if (base.path / name).is_file():
                shutil.copyfile(base.path / name, folder / name)
        if (config := folder / TOKENIZER_CONFIG_FILE).exists():
            config_text = extended_tokenizer_config(config.read_bytes().decode(), base.rows, new)
            config.write_bytes(config_text.encode())
        (folder / TOKENIZER_FILE).write_bytes(text)
        loaded = load_tokenizer(folder, run)
    if loaded is None:
        raise CheckpointError(Problem("tokenizer-not-extended", base.path))
    return loaded


def check_as_before(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check that every old token keeps its id, and that each new token has its own."""
    now = extended.get_vocab()
    wanted = {**base.facts.ids} | {token: base.rows + place for place, token in enumerate(new.tokens)}
    moved = [token for token, id_ in wanted.items() if now.get(token) != id_]
    added = base.loaded.get_added_vocab()
    moved += [token for token in added if ids_of(extended, token) != ids_of(base.loaded, token)]
    if moved:
        raise CheckpointError(Problem("token-ids-not-kept", base.path, tokens=[repr(token) for token in moved]))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without special tokens around it."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids
