"""Token ids: an expanded model must tokenize as its base does.

transformers chooses a tokenizer class partly by the model type, and an expanded model has its own model type. If the
class would change, the tokenizer_config.json of the expanded folder names the class of the base.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from scale_surgery import modeling
from scale_surgery.checkpoint.files import scratch_folder, write_json
from scale_surgery.checkpoint.folder import read_config
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from scale_surgery.checkpoint.reading import collector_paused, read_bytes
from scale_surgery.errors import DataError, Problem
from scale_surgery.running.loading import quiet_transformers, trusts_code
from scale_surgery.running.options import RunOptions

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", TOKENIZER_CONFIG_FILE)
# more files that affect token ids or image inputs
VOCABULARY_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# files for prompting and generation
ASKING_FILES = ("chat_template.jinja", "chat_template.json", GENERATION_FILE)
# a folder of more templates; a template named default replaces the model's own
MORE_TEMPLATES = "additional_chat_templates/"
# keys of a tokenizer that calls modify
CHANGED_BY_CALLS = ("truncation", "padding")
# suffixes of files that a tokenizer in Python may read, and files of the model among them
CODE_SUFFIXES = (".json", ".model", ".txt", ".py")
MODEL_FILES = (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE)
# suffixes of files that a class of transformers may read
READ_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".spm", ".bpe", ".tiktoken")
# class name that both transformers 4 and 5 know for a tokenizer with only a tokenizer.json
PORTABLE_NAMES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# the start of the model in a tokenizer.json, which the tokenizers library writes last; and the smallest models of two
# types
MODEL_BEGIN = re.compile(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"')
SMALLEST: dict[str, dict[str, Any]] = {
    "BPE": {"vocab": {}, "merges": []},
    "Unigram": {"vocab": [["<unk>", 0.0]], "unk_id": 0},
}
# a large tokenizer takes seconds to load; a command needs the base's, and the one with new tokens
MOST_KEPT = 2
_kept: dict[tuple[type, str], Any] = {}


def load_tokenizer(path: Path, run: RunOptions = RunOptions()) -> Any | None:
    """Load a folder's tokenizer with AutoTokenizer, as a user would, or None if it is missing or needs its own code.

    A tokenizer of the same class and files is loaded once. Its copies share the vocabulary, which is never changed.
    """
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        return None
    key = identify_tokenizer(path, run)
    if key is None or key not in _kept:
        loaded = _load(path, is_trusted=run.trust_remote_code)
        # also a final check of the predicted class
        if key is None or type(loaded) is not key[0]:
            return loaded
        for oldest in list(_kept)[: len(_kept) + 1 - MOST_KEPT]:
            del _kept[oldest]
        _kept[key] = loaded
    return _copy_for(path, _kept[key])


def identify_tokenizer(path: Path, run: RunOptions = RunOptions()) -> tuple[type, str] | None:
    """Identify a folder's tokenizer by its class and a hash of its files, or None if only loading tells its class."""
    modeling.register()
    chosen = None if trusts_code(path, run) else _find_class(path)
    return None if chosen is None else (chosen, _hash_files(path))


def forget_tokenizers() -> None:
    """Drop the cached tokenizers, before models need the memory."""
    _kept.clear()


def _load(path: Path, *, is_trusted: bool) -> Any | None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        with quiet_transformers(), warnings.catch_warnings(), collector_paused():
            warnings.simplefilter("ignore")
            loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=is_trusted)
            if type(loaded).__name__ == "MistralCommonBackend" and (path / TOKENIZER_FILE).is_file():
                # chosen where mistral-common is installed; the same folder has to give the same class everywhere
                return PreTrainedTokenizerFast.from_pretrained(path)
            return loaded
    except Exception:  # tokenizers raises bare exceptions
        return None


def _copy_for(path: Path, tokenizer: Any) -> Any:
    """Copy a tokenizer under the path of a folder. The copies share the vocabulary."""
    made = copy.copy(tokenizer)
    for name, value in vars(tokenizer).items():
        if isinstance(value, dict | list):
            vars(made)[name] = copy.copy(value)
    made.name_or_path = str(path)
    return made


def _find_class(path: Path) -> type | None:
    """Find the class that AutoTokenizer chooses, from a copy without vocabulary, or None if only loading tells."""
    text = read_bytes(path / TOKENIZER_FILE) if (path / TOKENIZER_FILE).is_file() else b""
    if (begin := MODEL_BEGIN.search(text)) is None or (kind := begin[1].decode()) not in SMALLEST:
        return None
    try:
        content = json.loads(text[: begin.start()] + b'"model": {}}')
    except ValueError:
        return None
    with scratch_folder() as folder:
        for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
        write_json(folder / TOKENIZER_FILE, content | {"added_tokens": [], "model": {"type": kind, **SMALLEST[kind]}})
        found = _load(folder, is_trusted=False)
    # custom code may read files that are missing here
    return type(found) if type(found).__module__.startswith("transformers.") else None


def _hash_files(path: Path) -> str:
    """Hash the names and contents of all files that may be part of a tokenizer."""
    files = [file for file in path.iterdir() if file.suffix in READ_SUFFIXES and file.name not in MODEL_FILES]
    files += (path / MORE_TEMPLATES).glob("*.jinja")
    hashes = [(str(file.relative_to(path)), hash_file(file)) for file in sorted(files) if file.is_file()]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def need_tokenizer(path: Path, name: str, run: RunOptions = RunOptions()) -> Any:
    """Load a folder's tokenizer, which is needed to read texts."""
    tokenizer = load_tokenizer(path, run)
    if tokenizer is None:
        raise DataError(Problem("tokenizer-needed", name))
    return tokenizer


def check_token_ids(name: str, highest: int, vocabulary: int, text: str = "a text") -> None:
    """Check that a model's embedding has a row for every token id."""
    if highest >= vocabulary:
        raise DataError(Problem("token-id-too-high", name, id=highest, text=text, rows=vocabulary))


def digest_tokenizer(tokenizer: Any, path: Path) -> str:
    """Return a SHA-256 of everything that affects tokenization, including library releases."""
    import tokenizers
    import transformers

    from scale_surgery.text.answers import end_ids

    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id]
    known: list[Any] = [type(tokenizer).__name__, transformers.__version__, tokenizers.__version__, special]
    if getattr(tokenizer, "chat_template", None) is not None:
        known += [tokenizer.chat_template, sorted(end_ids(tokenizer))]
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        known.append({name: value for name, value in backend.items() if name not in CHANGED_BY_CALLS})
    else:
        code = (file for file in sorted(path.iterdir()) if file.suffix in CODE_SUFFIXES)
        files = [file for file in code if file.name not in MODEL_FILES]
        known.append([(file.name, hash_file(file)) for file in files])
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def pin_tokenizer_class(base: Path, expanded: Path, run: RunOptions = RunOptions()) -> str | None:
    """Write the base's tokenizer class into the expanded folder if transformers would choose another.

    Returns:
        The name of the class, or None if nothing was written.
    """
    wanted = type(load_tokenizer(base, run))
    chosen = None if trusts_code(expanded, run) else _find_class(expanded)
    if wanted is type(None) or wanted is (chosen or type(load_tokenizer(expanded, run))):
        return None
    name = wanted.__name__
    file = expanded / TOKENIZER_CONFIG_FILE
    config = read_config(file) if file.exists() else {}
    write_json(file, config | {"tokenizer_class": PORTABLE_NAMES.get(name, name)})
    return name
