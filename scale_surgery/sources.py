"""Find the model that the user named: a folder, or a repository on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint import OTHER_WEIGHT_SUFFIXES
from scale_surgery.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """Where a model lies and what to call it; the path of a folder is never recorded, only its name."""

    path: Path
    name: str
    revision: str | None


def find_source(model: str | Path, revision: str | None = None) -> Source:
    """Find a model; a Hub repository is downloaded into the local cache, weights in other formats left out.

    Honours HF_HUB_OFFLINE, HF_HOME and the other settings of huggingface_hub.

    Args:
        model: A folder, or a Hub id such as org/name.
        revision: Branch, tag or commit of a Hub repository.

    Returns:
        The folder, the model's name, and the commit of a Hub repository.

    Raises:
        CheckpointError: If there is no such folder, and no such repository can be had.
    """
    path = Path(model)
    if path.exists():
        return Source(path, path.resolve().name, None)
    if not _is_hub_id(str(model)):
        raise CheckpointError(f"{model}: not found. Give a model folder or a Hub id such as org/name.")
    folder = _download(str(model), revision)
    # snapshots lie in a folder named after their commit
    return Source(folder, str(model), folder.name)


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(parts) and not model.startswith((".", "~"))


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    skipped = [f"*{suffix}" for suffix in OTHER_WEIGHT_SUFFIXES]
    try:
        return Path(snapshot_download(repo, revision=revision, ignore_patterns=skipped))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{repo}: no such folder, and the Hub does not give it ({reason}). Check the name, your access "
            "(hf auth login), the network, and HF_HUB_OFFLINE."
        ) from error
