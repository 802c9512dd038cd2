"""Safetensors checkpoints on disk: headers, index, side files, and reading one tensor at a time.

`open_checkpoint` returns a `Checkpoint` with the name, dtype, shape and place of every tensor, and reads no weights.
It reports all problems that are visible in headers and index.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scale_surgery.checkpoint.code_names import kernel_problems
from scale_surgery.checkpoint.file_stat import Stamps, take_stamps
from scale_surgery.checkpoint.foreign import refuse_foreign
from scale_surgery.checkpoint.forms import refuse_extract
from scale_surgery.checkpoint.headers import FLOAT_DTYPES, TensorInfo, read_header
from scale_surgery.checkpoint.listing import links_that_are_no_files, list_files, stays_behind
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    INDEX_FILE,
    JOB_FILE,
    MANIFEST_FILE,
    OTHER_WEIGHT_SUFFIXES,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    is_inside,
)
from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.checkpoint.reading import open_regular, parse_json, places_of_nan, read_bytes
from scale_surgery.errors import CheckpointError, Problem, name_some

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 22

# config keys of the number of layers
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with headers that were read and checked.

    Attributes:
        path: The folder.
        config: Parsed config.json.
        tensors: Every tensor by name.
        shards: Names of the safetensors files of these tensors, in order.
        side_files: Names of all other files of the checkpoint, relative, in order.
        left_out: Files that are not copied: weights in other formats (pickles, shards outside the index), and links out
            of the folder.
        stamps: Stamps of its files, taken before the first file was read.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[str, ...]
    side_files: tuple[str, ...]
    left_out: tuple[str, ...]
    stamps: Stamps = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def recorded(self) -> Mapping[str, Any] | None:
        """Parsed surgery.json, unchecked, or None if it is missing."""
        file = self.path / MANIFEST_FILE
        return read_json(file) if file.is_file() else None

    @property
    def dtype(self) -> str:
        """Dtype of most of the parameters, in safetensors' name."""
        return most_common_dtype(self.tensors.values())

    @property
    def running_dtype(self) -> str:
        """Dtype of the computation; see `running_dtype`."""
        return running_dtype(self.tensors.values())


class Sized(Protocol):
    """A tensor with a dtype, in safetensors' name, and a number of elements."""

    @property
    def dtype(self) -> str:
        """The dtype."""

    @property
    def elements(self) -> int:
        """The number of elements."""


def most_common_dtype(tensors: Iterable[Sized]) -> str:
    """Return the dtype of most of the parameters, in safetensors' name."""
    counts: Counter[str] = Counter()
    for info in tensors:
        counts[info.dtype] += info.elements
    return max(counts, key=counts.__getitem__)


def running_dtype(tensors: Collection[Sized]) -> str:
    """Return the dtype of most unquantised parameters. Experts may be quantised."""
    kept = [info for info in tensors if info.dtype in FLOAT_DTYPES.values()]
    return most_common_dtype(kept or tensors)


def loaded_dtype(tensors: Mapping[str, Any]) -> str:
    """Return the dtype in which transformers loads tensors whose config names none: that of the first by name."""
    dtypes = {name: str(info.dtype) for name, info in tensors.items()}
    kept = {name: dtype for name, dtype in dtypes.items() if dtype in FLOAT_DTYPES.values()} or dtypes
    return kept[min(kept)]


def holding_dtype(dtypes: Iterable[str]) -> str:
    """Return the narrowest dtype, in torch's name, that rounds none of these dtypes, in safetensors' names."""
    floats = {dtype for dtype in dtypes if dtype in FLOAT_DTYPES.values()}
    return next((name for name, dtype in FLOAT_DTYPES.items() if floats == {dtype}), "float32")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = parse_json(read_bytes(file).decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(_missing(file)) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem("json-unreadable", file, error=error)) from error
    if not isinstance(content, dict):
        raise CheckpointError(Problem("json-no-object", file, kind=type(content).__name__))
    return content


def _missing(file: Path) -> Problem:
    """Return the problem of a missing config.json. In a job folder of `learn` it names the models inside."""
    folder = file.parent
    if not (folder / JOB_FILE).is_file():
        return Problem("json-missing", file)
    models = [model.parent for model in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
    return Problem("json-missing-in-job", file, models=models or "none yet")


def read_config(file: Path) -> dict[str, Any]:
    """Read a config. Reject kernels, an invalid auto_map, and NaN, which does not equal itself."""
    config = read_json(file)
    # infinity is allowed; some models use it as the end of a range
    problems = [*(Problem("config-nan", place) for place in places_of_nan(config)), *kernel_problems(config)]
    if not isinstance(classes := config.get("auto_map") or {}, dict):
        problems.append(Problem("config-auto-map", "auto_map", value=classes))
    if problems:
        raise CheckpointError(*(problem.within(file) for problem in problems))
    return config


def open_checkpoint(path: Path, config: Mapping[str, Any] | None = None, without: tuple[str, ...] = ()) -> Checkpoint:
    """Read config, index and headers of a checkpoint, and check them against each other."""
    files = [file for file in list_files(path) if not file.startswith(without)]
    stamps = take_stamps(path / file for file in files)
    refuse_extract(path, files)
    refuse_foreign(path, files)
    config = config if config is not None and CONFIG_FILE not in files else read_config(path / CONFIG_FILE)
    shards, declared = _find_shards(path, files, without)
    # shards may also be behind a link to a folder, which list_files does not follow
    stamps |= take_stamps(path / shard for shard in shards if (path / shard).exists())
    tensors, problems = _read_shards(path, shards)
    problems += _index_problems(declared, tensors) if declared is not None and not problems else []
    if not tensors and not problems:
        problems = [Problem("weights-empty", name_some(shards))]
    if problems:
        raise CheckpointError(*problems)
    others = [file for file in files if not file.endswith(".safetensors")]
    left_out = tuple(file for file in others if file.endswith(OTHER_WEIGHT_SUFFIXES))
    left_out += tuple(file for file in files if file.endswith(".safetensors") and file not in shards)
    left_out += tuple(file for file in others if file not in left_out and stays_behind(path, file))
    links = links_that_are_no_files(path)
    left_out += tuple(link for link in links if not any(shard.startswith(f"{link}/") for shard in shards))
    side_files = tuple(file for file in others if file not in left_out and file != MANIFEST_FILE)
    belonging = [path / file for file in (*shards, *side_files, MANIFEST_FILE)]
    read = {file: stamps[file] for file in belonging if file in stamps}
    return checkpoint_of(path, config, tensors, shards, side_files, left_out, read)


def checkpoint_of(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    shards: Sequence[str],
    side_files: tuple[str, ...],
    left_out: tuple[str, ...],
    stamps: Stamps,
) -> Checkpoint:
    """Name the tensors of a checkpoint by its config, which is refused if it contradicts them."""
    if not isinstance(specs := config.get(CONFIG_KEY, {}), dict):
        raise CheckpointError(Problem("config-specs", f"{path / CONFIG_FILE}: {CONFIG_KEY}", value=specs))
    if problems := _boundless(config, len(tensors)):
        raise CheckpointError(*problems)
    named = name_tensors(tensors, numbering_of(specs))
    return Checkpoint(path, config, named, tuple(shards), side_files, left_out, stamps)


def _boundless(config: Mapping[str, Any], tensors: int) -> list[Problem]:
    """Return a problem for each number of layers that exceeds the number of tensors."""
    # a multimodal config nests the language model's
    text = config.get("text_config")
    parts = {"": config} | ({"text_config.": text} if isinstance(text, dict) else {})
    # each layer has at least one tensor; loops over a far larger number, also in transformers, would not end
    return [
        Problem("config-count", f"{CONFIG_FILE}: {path}{key}", count=part[key], tensors=tensors)
        for path, part in parts.items()
        for key in LAYER_KEYS
        if isinstance(part.get(key), int | float) and part[key] > tensors
    ]


def name_tensors(tensors: Mapping[str, TensorInfo], numbering: Numbering | None) -> dict[str, TensorInfo]:
    """Rename tensors from their names in files to their names in this package; see numbering.py."""
    if numbering is None:
        return dict(tensors)
    named = {stored: numbering.named(stored) for stored in tensors}
    if len(set(named.values())) < len(named):
        raise CheckpointError(Problem("config-copies-clash", CONFIG_FILE, layers=numbering.copied))
    return {named[stored]: replace(info, name=named[stored], stored_as=stored) for stored, info in tensors.items()}


def _find_shards(path: Path, files: list[str], without: tuple[str, ...]) -> tuple[list[str], dict[str, str] | None]:
    # as in transformers, model.safetensors takes precedence over the index
    if SINGLE_FILE in files:
        return [SINGLE_FILE], None
    if INDEX_FILE in files:
        declared = declared_shards(read_json(path / INDEX_FILE))
        weight_map = {name: file for name, file in declared.items() if not file.startswith(without)}
        return sorted(set(weight_map.values())), weight_map
    raise CheckpointError(_no_weights(path, files))


def declared_shards(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the shard of each tensor in an index."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(Problem("index-without-map", INDEX_FILE))
    _refuse_escapes(weight_map)
    return weight_map


def _no_weights(path: Path, files: list[str]) -> Problem:
    pickles = [file for file in files if file.endswith(PICKLE_SUFFIXES)]
    # files deeper in the folder may belong to a training run
    pickles.sort(key=lambda file: file.count("/"))
    return Problem("weights-pickled", path, file=pickles[0]) if pickles else Problem("weights-missing", path)


def _refuse_escapes(weight_map: Mapping[str, str]) -> None:
    outside = [(name, file) for name, file in weight_map.items() if not is_inside(file)]
    if outside:
        raise CheckpointError(*(Problem("index-escape", INDEX_FILE, tensor=name, file=file) for name, file in outside))


def _read_shards(path: Path, shards: list[str]) -> tuple[dict[str, TensorInfo], list[Problem]]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[Problem] = []
    for shard in shards:
        try:
            header = read_header(path, shard)
        except CheckpointError as error:
            problems += error.problems
            continue
        twice = [name for name in header if name in tensors]
        problems += [Problem("tensor-stored-twice", name, first=tensors[name].file, second=shard) for name in twice]
        tensors |= header
    return tensors, problems


def _index_problems(declared: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> list[Problem]:
    problems = []
    for name, file in declared.items():
        if name not in tensors:
            problems.append(Problem("index-no-shard", INDEX_FILE, tensor=name, declared=file))
        elif (shard := tensors[name].file) != file:
            problems.append(Problem("index-wrong-shard", INDEX_FILE, tensor=name, declared=file, shard=shard))
    unlisted = [info for name, info in tensors.items() if name not in declared]
    problems += [Problem("index-unlisted", INDEX_FILE, tensor=info.name, shard=info.file) for info in unlisted]
    return problems


def read_text(checkpoint: Checkpoint, file: str) -> str:
    """Read a text file of a checkpoint as UTF-8, without changes."""
    try:
        return read_bytes(checkpoint.path / file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(Problem("file-unreadable", file, error=error)) from error


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read one tensor. No other part of its shard is read or stays memory-mapped."""
    from safetensors import SafetensorError, safe_open

    info = checkpoint.tensors[name]
    try:
        with safe_open(checkpoint.path / info.file, framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(info.stored_as or name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem("tensor-unreadable", info.file, tensor=name, error=error)) from error
    return tensor


def read_rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Read a range of the rows of a matrix in chunks of a few MB; each comes with the number of its first row."""
    from safetensors import SafetensorError, safe_open

    info = checkpoint.tensors[name]
    count = max(1, CHUNK_BYTES * info.shape[0] // max(1, info.bytes))
    try:
        with safe_open(checkpoint.path / info.file, framework="pt") as shard:
            rows = shard.get_slice(info.stored_as or name)
            for first in range(start, stop, count):
                yield first, rows[first : min(first + count, stop)]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem("tensor-unreadable", info.file, tensor=name, error=error)) from error


def read_chunks(file: Path, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Read a range of a file in chunks of a few MB."""
    try:
        with open_regular(file) as stream:
            left = os.fstat(stream.fileno()).st_size - start if length is None else length
            stream.seek(start)
            while left > 0 and (chunk := stream.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(Problem("file-unreadable", file, error=error.strerror or error)) from error
