"""What a base wrote is kept for the next run of the same base, in the cache of tokens.

It is found by all that decides it: the base's bytes, config and code, how it was sampled and where, and the releases.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_file, hash_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import DataError, counted
from scale_surgery.progress import Finding, Track
from scale_surgery.surgery.parts import hash_parts
from scale_surgery.surgery.record import Manifest, tool_versions
from scale_surgery.text.sequences import Sequences

if TYPE_CHECKING:
    from scale_surgery.training.base_samples import Sampling

# keys of a config that say nothing of how its base computes
NOT_COMPUTED = (
    CONFIG_KEY,
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "_name_or_path",
    "vocab_size",
    "dtype",
    "torch_dtype",
)


@dataclass(frozen=True)
class OwnText:
    """Texts that a base wrote; `found` says if an earlier run drew them, or why the next run will not find them."""

    texts: Sequences
    found: str

    @property
    def description(self) -> str:
        """How many texts and tokens."""
        drawn = f"{counted(len(self.texts), 'sample')} of the base, {counted(self.texts.tokens, 'token')}"
        return f"{drawn} ({self.found})" if self.found else drawn


def identity_of(manifest: Manifest, hashes: Mapping[str, str] | None = None) -> list[Any]:
    """The base of an expanded model, by the bytes of its tensors, of its config and of code of its own.

    `hashes` are those of the base's tensors; by default those in the record, for a folder that was checked against it.
    """
    texts = {name: file.sha256 for name, file in manifest.base_files.items() if _decides(name)}
    return [sorted((manifest.base_hashes if hashes is None else hashes).items()), sorted(texts.items())]


def identity_in(path: Path, manifest: Manifest | None) -> list[Any]:
    """The same of a folder, expanded or not, whose base tensors are read and hashed."""
    checkpoint = open_checkpoint(path)
    if manifest is not None:
        return identity_of(manifest, hash_parts(checkpoint, manifest, manifest.base_tensors))
    texts = {name: hash_file(path / name) for name in checkpoint.side_files if _decides(name)}
    return [sorted(hash_tensors(checkpoint, list(checkpoint.tensors)).items()), sorted(texts.items())]


def _decides(file: str) -> bool:
    return file == CONFIG_FILE or file.endswith(".py")


def made_of(
    model: Any, base: Sequence[Any], begins: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any
) -> dict[str, Any]:
    """All that decides what a base writes."""
    return {
        "samples": asdict(sampling) | {"begins": [list(begin) for begin in begins], "end": tokenizer.eos_token_id},
        "base": hashlib.sha256(repr(base).encode()).hexdigest(),
        # rows of new tokens take part in the drawing of lots
        "vocabulary": model.config.get_text_config(decoder=True).vocab_size,
        "runs": [model.device.type, str(model.dtype), str(model.config._attn_implementation)],
        # what runs, whatever a record says of it: the name of a module from a folder holds a hash of its code
        "config": {key: str(value) for key, value in _stock_values(model.config.to_dict()).items()},
        "code": type(model).__module__ if type(model).__module__.startswith("transformers_modules") else "",
        "tool": tool_versions(),
    }


def _stock_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config by which a base computes, those of parts too; an expanded model has them as its base does."""
    parts = {key: _stock_values(value) for key, value in config.items() if isinstance(value, dict)}
    return {key: value for key, value in ({**config, **parts}).items() if key not in NOT_COMPUTED}


def kept_or_drawn(
    draw: Callable[[], Sequences], made_of: Mapping[str, Any], cache: Path | None, track: Track
) -> OwnText:
    """Find the samples that an earlier run of the same base kept, or draw them and keep them."""
    own = _kept_or_drawn(draw, made_of, cache)
    if own.found:
        with track("samples", 1) as advance:
            advance(1, Finding(own.description))
    return own


def _kept_or_drawn(draw: Callable[[], Sequences], made_of: Mapping[str, Any], cache: Path | None) -> OwnText:
    # `datasets` takes a second to import
    from scale_surgery.text.token_cache import find_stored, store

    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:40]
    folder = None if cache is None else str(cache)
    if (stored := find_stored(key, folder)) is not None:
        return OwnText(stored, "drawn by an earlier run")
    samples = draw()
    try:
        store(key, folder, [samples], dict(made_of))
    except DataError as error:
        return OwnText(samples, f"not kept for the next run: {' '.join(error.lines)}")
    return OwnText(samples, "")
