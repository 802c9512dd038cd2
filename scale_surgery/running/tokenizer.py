"""Token ids: an expanded model must tokenize as its base does.

transformers chooses a tokenizer class by the model type among other things, and an expanded model has a model
type of its own. Where that changes the class, the expanded folder's tokenizer_config.json names the base's.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from scale_surgery import modeling
from scale_surgery.checkpoint.files import write_json
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
from scale_surgery.errors import DataError
from scale_surgery.running.loading import quiet_transformers, trusts_code
from scale_surgery.running.options import RunOptions

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", TOKENIZER_CONFIG_FILE)
# more files that decide token ids, or the input of images
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
# files of prompting and generation
ASKING_FILES = ("chat_template.jinja", "chat_template.json", GENERATION_FILE)
# a folder of more of them; that called default takes the place of the model's own
MORE_TEMPLATES = "additional_chat_templates/"
# keys of a tokenizer that its calls change
CHANGED_BY_CALLS = ("truncation", "padding")
# files that a tokenizer written in Python may read, and those among them that belong to the model
CODE_SUFFIXES = (".json", ".model", ".txt", ".py")
MODEL_FILES = (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE)
# the class name of a tokenizer in tokenizer.json alone that transformers 4 and 5 both know
PORTABLE_NAMES = {"TokenizersBackend": "PreTrainedTokenizerFast"}


def load_tokenizer(path: Path, run: RunOptions = RunOptions()) -> Any | None:
    """Load a folder's tokenizer as a user would, by AutoTokenizer; None where it has none or it needs its own code."""
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    modeling.register()
    is_trusted = trusts_code(path, run)
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(path, trust_remote_code=is_trusted)
    except Exception:  # tokenizers raise it bare
        return None


def need_tokenizer(path: Path, name: str, run: RunOptions = RunOptions()) -> Any:
    """Load a folder's tokenizer where there are texts to read."""
    tokenizer = load_tokenizer(path, run)
    if tokenizer is None:
        raise DataError(
            f"{name}: has no tokenizer that loads, and texts need one. Put the tokenizer's files beside the weights; "
            "--trust-remote-code lets one run its own code."
        )
    return tokenizer


def check_token_ids(name: str, highest: int, vocabulary: int, text: str = "") -> None:
    """Check that a model's embedding has every id that its tokenizer gives."""
    if highest >= vocabulary:
        raise DataError(
            f"{name}: its tokenizer gives the id {highest}{text and f' for {text}'}, expected ids below {vocabulary}, "
            "the size of its embedding. Use the tokenizer that the model was trained with."
        )


def digest_tokenizer(tokenizer: Any, path: Path) -> str:
    """A sha256 of all that decides which tokens a tokenizer gives, releases of the libraries included."""
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
    """Write the base's tokenizer class into the expanded folder where transformers would choose another; its name."""
    wanted = load_tokenizer(base, run)
    if wanted is None or type(wanted) is type(load_tokenizer(expanded, run)):
        return None
    name = type(wanted).__name__
    file = expanded / TOKENIZER_CONFIG_FILE
    config = read_config(file) if file.exists() else {}
    write_json(file, config | {"tokenizer_class": PORTABLE_NAMES.get(name, name)})
    return name
