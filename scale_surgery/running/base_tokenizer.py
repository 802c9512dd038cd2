"""A base's tokenizer that can take tokens, and the same with new ones, loaded as a user would load it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import scratch_folder, write_text
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import CheckpointError, counted, name_some
from scale_surgery.planning.new_tokens import NewTokens, extended_tokenizer, extended_tokenizer_config, token_ids
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import VOCABULARY_FILES, load_tokenizer

SAVE_IT = (
    "Write it with the tokenizers library: AutoTokenizer.from_pretrained(...).save_pretrained(...), and put its files "
    "beside the weights."
)
LEARN_THEM = "Or learn tokens from a text: --new-tokens-from TEXT --count N."


@dataclass(frozen=True)
class TokenizerFacts:
    """Ids, kind of model, prefix of continuing pieces and number of merges of a tokenizer.json."""

    ids: Mapping[str, int]
    kind: str
    prefix: str
    merges: int


@dataclass(frozen=True)
class BaseTokenizer:
    """A base's tokenizer: the text of its tokenizer.json, its facts, and as it loads; `rows` are its embedding's."""

    path: Path
    rows: int
    text: str
    facts: TokenizerFacts
    loaded: Any


def open_base(model: Path, loaded: Any | None, rows: int) -> BaseTokenizer:
    """Open a base's tokenizer that can take tokens."""
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{model}: has no {TOKENIZER_FILE}, which new tokens are written into. {SAVE_IT} "
            "A tokenizer that is written in Python has none and can take no tokens."
        )
    if loaded is None:
        read_tokenizer(file)
        raise CheckpointError(
            f"{model}: its tokenizer does not load. --trust-remote-code lets one run its own code, and new tokens need "
            "one that runs none."
        )
    if not loaded.is_fast:
        raise CheckpointError(
            f"{model}: its tokenizer is written in Python ({type(loaded).__name__}), expected one of the tokenizers "
            f"library, of which {TOKENIZER_FILE} says all."
        )
    text = text_of(file)
    facts = facts_of(text.encode())
    known, used = facts.ids, loaded.get_vocab()
    # equal dicts compare in a tenth of the time
    both = {} if known == used else {**known, **used}
    if differing := [token for token in both if known.get(token) != used.get(token)]:
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
    return BaseTokenizer(model, rows, text, facts, loaded)


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Parse a tokenizer.json that the library can read."""
    from tokenizers import Tokenizer

    content = read_json(file)
    try:
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises it bare
        raise CheckpointError(f"{file}: the tokenizers library does not read it ({error}). {SAVE_IT}") from error
    return content


@lru_cache(maxsize=1)
def facts_of(text: bytes) -> TokenizerFacts:
    """Read the facts of a tokenizer.json."""
    content = json.loads(text)
    model = content["model"]
    return TokenizerFacts(
        token_ids(content),
        model.get("type", ""),
        model.get("continuing_subword_prefix") or "",
        len(model.get("merges") or ()),
    )


def text_of(file: Path) -> str:
    """A file's text, byte for byte."""
    return read_bytes(file).decode("utf-8")


def extend(base: BaseTokenizer, new: NewTokens, run: RunOptions) -> Any:
    """Load the base's tokenizer with new tokens."""
    return load_extended(base, new, extended_tokenizer(base.text, base.rows, new), run)


def load_extended(base: BaseTokenizer, new: NewTokens, text: str, run: RunOptions) -> Any:
    """Load the base's tokenizer with this tokenizer.json, which has new tokens, as from a folder."""
    with scratch_folder() as folder:
        for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE, *VOCABULARY_FILES):
            if (base.path / name).is_file():
                shutil.copyfile(base.path / name, folder / name)
        if (config := folder / TOKENIZER_CONFIG_FILE).exists():
            write_text(config, extended_tokenizer_config(text_of(config), base.rows, new))
        write_text(folder / TOKENIZER_FILE, text)
        loaded = load_tokenizer(folder, run)
    if loaded is None:
        raise CheckpointError(f"{base.path}: its tokenizer does not load any more with new tokens. {LEARN_THEM}")
    return loaded


def check_as_before(base: BaseTokenizer, extended: Any, new: NewTokens) -> None:
    """Check that every old token keeps its id, and that each new one has its own."""
    now = extended.get_vocab()
    wanted = {**base.facts.ids} | {token: base.rows + place for place, token in enumerate(new.tokens)}
    moved = [f"{token!r} has {now.get(token)}" for token, id_ in wanted.items() if now.get(token) != id_]
    added = base.loaded.get_added_vocab()
    moved += [f"{token!r} is cut" for token in added if ids_of(extended, token) != ids_of(base.loaded, token)]
    if moved:
        raise CheckpointError(
            f"{base.path}: its tokenizer does not keep its ids with these tokens: {name_some(moved, 3)}. Leave out "
            "tokens that begin or end like one of its own."
        )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text alone, without what a tokenizer puts around it."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids
