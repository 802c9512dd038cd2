"""Samples of a base, stored in the token cache for the next run with the same base.

The key covers everything that affects them: the base's bytes, config and code, the sampler, the device, and releases.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_file, hash_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import DataError, counted
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import hash_parts
from scale_surgery.folder.record import Manifest, tool_versions
from scale_surgery.progress import Finding, Track
from scale_surgery.text.beginnings import Beginnings
from scale_surgery.text.sequences import Sequences
from scale_surgery.training.sampling import Sampling

# keys of a config that do not affect the base's computation
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
    """Texts that a base wrote.

    `found` notes that an earlier run drew them, or why the next run will not find them; otherwise it is empty. `begun`
    describes how they begin; it is empty for texts that begin with the token that starts a text.
    """

    texts: Sequences
    found: str
    begun: str = ""

    @property
    def description(self) -> str:
        """Number of texts and tokens, with their beginnings and their origin."""
        drawn = f"{counted(len(self.texts), 'sample')} of the base, {counted(self.texts.tokens, 'token')}"
        notes = "; ".join(filter(None, (self.begun, self.found)))
        return f"{drawn} ({notes})" if notes else drawn


def identity_of(manifest: Manifest, hashes: Mapping[str, str] | None = None) -> list[Any]:
    """Return the identity of an expanded model's base: hashes of its tensors, its config and its own code.

    `hashes` are the hashes of the base's tensors. By default they come from the record, for an already checked folder.
    """
    texts = {name: file.sha256 for name, file in manifest.base_files.items() if _decides(name)}
    return [sorted((manifest.base_hashes if hashes is None else hashes).items()), sorted(texts.items())]


def identity_in(model: Checkpoint) -> list[Any]:
    """Return the same identity for a base, or for the base of a folder; its tensors are read and hashed."""
    if isinstance(model, Folder):
        return identity_of(model.manifest, hash_parts(model, model.manifest.base_tensors))
    texts = {name: hash_file(model.path / name) for name in model.side_files if _decides(name)}
    return [sorted(hash_tensors(model, list(model.tensors)).items()), sorted(texts.items())]


def _decides(file: str) -> bool:
    return file == CONFIG_FILE or file.endswith(".py")


def made_of(model: Any, base: Sequence[Any], begins: Beginnings, sampling: Sampling) -> dict[str, Any]:
    """Return everything that affects the samples of a base."""
    return {
        "samples": asdict(sampling) | {"begins": list(map(list, begins.ids)), "ends": list(begins.ends)},
        "base": hashlib.sha256(repr(base).encode()).hexdigest(),
        # rows of new tokens change the random numbers
        "vocabulary": model.config.get_text_config(decoder=True).vocab_size,
        "runs": [model.device.type, str(model.dtype), str(model.config._attn_implementation)],
        # the code that runs, not the record of it: the name of a folder's module contains a hash of its code
        "config": {key: str(value) for key, value in _stock_values(model.config.to_dict()).items()},
        "code": type(model).__module__ if type(model).__module__.startswith("transformers_modules") else "",
        "tool": tool_versions(),
    }


def _stock_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values, nested too, that affect the base's computation; an expanded model has the same."""
    parts = {key: _stock_values(value) for key, value in config.items() if isinstance(value, dict)}
    return {key: value for key, value in ({**config, **parts}).items() if key not in NOT_COMPUTED}


def kept_or_drawn(
    draw: Callable[[], Sequences], made_of: Mapping[str, Any], cache: Path | None, track: Track
) -> OwnText:
    """Find the samples stored by an earlier run of the same base, or draw and store them."""
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
