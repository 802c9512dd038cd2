"""Find the model that the user named: a folder, or a repository on the Hugging Face Hub.

`find_source` returns a folder with the whole model. `open_model` returns the headers. If a Hub repository is not in the
local cache, it downloads only the headers, so a plan for a model of any size takes seconds.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.files import is_there
from scale_surgery.checkpoint.folder import (
    Checkpoint,
    checkpoint_of,
    declared_shards,
    open_checkpoint,
    read_config,
    read_json,
)
from scale_surgery.checkpoint.forms import refuse_extract
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.listing import reached
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    EXTRACT_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    OTHER_WEIGHT_SUFFIXES,
    SINGLE_FILE,
    as_unicode,
)
from scale_surgery.errors import CheckpointError, PlanError, Problem

SKIPPED_PATTERNS = [f"*{suffix}" for suffix in OTHER_WEIGHT_SUFFIXES]


@dataclass(frozen=True)
class Source:
    """The path and the name of a model. Only the name is ever recorded."""

    path: Path
    name: str
    revision: str | None


def listed(given: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """Return a list of models or files. A single one may be passed without a list."""
    return [given] if isinstance(given, str | Path) else list(given)


def find_source(model: str | Path, revision: str | None = None, *, recorded: str | None = None) -> Source:
    """Find a model. A Hub repository is downloaded into the local cache; of its weights, only what the index names.

    `recorded` is the commit that a record names. It is used if the user names no revision, and a folder has none.
    """
    if (local := _local_source(model, revision)) is not None:
        return local
    from huggingface_hub import snapshot_download

    # huggingface_hub respects HF_HUB_OFFLINE, HF_HOME and its other settings
    folder = find_beside_weights(model, revision or recorded)
    # the folder of a snapshot is named after its commit
    commit = folder.name
    with _hub_errors(str(model)):
        snapshot_download(str(model), revision=commit, allow_patterns=_weights(folder))
    return Source(folder, str(model), commit)


def find_beside_weights(model: str | Path, revision: str | None = None) -> Path:
    """Find a model's folder. A Hub repository is downloaded without its weights, for example for its tokenizer."""
    if (local := _local_source(model, revision)) is not None:
        return local.path
    from huggingface_hub import snapshot_download

    with _hub_errors(str(model)):
        skipped = [*SKIPPED_PATTERNS, "*.safetensors"]
        return Path(snapshot_download(str(model), revision=revision, ignore_patterns=skipped))


def _weights(beside: Path) -> list[str]:
    """Return patterns of the weights to download: repositories often have a second copy, such as `consolidated-*`."""
    if (beside / EXTRACT_FILE).is_file():
        return ["*.safetensors"]
    index = beside / INDEX_FILE
    named = declared_shards(read_json(index)).values() if index.is_file() else ()
    return [SINGLE_FILE, *map(glob.escape, sorted(set(named)))]


def open_model(model: str | Path, revision: str | None = None) -> tuple[Source, Checkpoint]:
    """Read a model's config and headers from a folder or from the Hub. No weights are read or downloaded."""
    if (local := _local_source(model, revision)) is not None:
        return local, open_checkpoint(local.path)
    cached = _cached_model(str(model), revision)
    if isinstance(cached, tuple):
        return cached
    try:
        return _remote_model(str(model), revision)
    except CheckpointError as error:
        # where the Hub cannot be asked, what is missing in the cache is the reason
        if cached is not None and {problem.code for problem in error.problems} == {"repository-unreachable"}:
            raise cached from error
        raise


def is_local(model: str | Path) -> bool:
    """Return True if a model is a folder. A folder comes before a Hub repository of the same name."""
    path = Path(model)
    with reached(path):
        return is_there(path)


def _local_source(model: str | Path, revision: str | None) -> Source | None:
    path = Path(model)
    if is_local(path):
        if revision is not None:
            raise PlanError(Problem("revision-of-folder", "--revision", revision=revision, model=model))
        return Source(path, as_unicode(path.resolve().name), None)
    parts = str(model).split("/")
    if len(parts) != 2 or not all(parts) or str(model).startswith((".", "~")):
        raise CheckpointError(Problem("model-not-found", model))
    return None


def _cached_model(repo: str, revision: str | None) -> tuple[Source, Checkpoint] | CheckpointError | None:
    """Read a model in the local cache: the error if it is there in part, None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _hub_errors(repo):
        try:
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    try:
        return Source(folder, repo, folder.name), open_checkpoint(folder)
    except CheckpointError as error:
        return error


def _remote_model(repo: str, revision: str | None) -> tuple[Source, Checkpoint]:
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(repo):
        api = HfApi()
        info = api.model_info(repo, revision=revision)
        files = sorted(sibling.rfilename for sibling in info.siblings or ())
        refuse_extract(repo, files)
        # the model's code is needed if it is trusted to run
        small = [file for file in (CONFIG_FILE, MANIFEST_FILE, *filter(is_code, files)) if file in files]
        folders = [Path(hf_hub_download(repo, file, revision=info.sha)).parent for file in small]
        if not folders:
            raise CheckpointError(Problem("repository-without-config", repo))
        headers = api.get_safetensors_metadata(repo, revision=info.sha).files_metadata
    tensors = {
        # offsets are relative to the data section, because the weights are not read
        name: TensorInfo(name, file, tensor.dtype, tuple(tensor.shape), begin, end - begin)
        for file, header in headers.items()
        for name, tensor in header.tensors.items()
        for begin, end in [tensor.data_offsets]
    }
    others = tuple(file for file in files if file not in headers)
    left_out = tuple(file for file in others if file.endswith((*OTHER_WEIGHT_SUFFIXES, ".safetensors")))
    side_files = tuple(file for file in others if file not in left_out and file != MANIFEST_FILE)
    config = read_config(folders[0] / CONFIG_FILE)
    checkpoint = checkpoint_of(folders[0], config, tensors, sorted(headers), side_files, left_out, {})
    return Source(folders[0], repo, info.sha), checkpoint


def is_code(file: str) -> bool:
    """Return True if a file of a repository is Python code that transformers may import."""
    return file.endswith(".py") and "/" not in file


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        yield
    except NotASafetensorsRepoError as error:
        raise CheckpointError(Problem("repository-without-safetensors", repo)) from error
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP library, and so its errors, depend on the release
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(Problem("repository-unreachable", repo, error=reason)) from error
