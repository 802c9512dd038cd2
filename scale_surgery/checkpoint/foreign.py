"""Folders of other programs: the kind of each, and the command that converts it to a checkpoint.

Only JSON files are opened. States and arguments are pickles, which can run code when they are loaded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from scale_surgery.checkpoint.names import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from scale_surgery.errors import CheckpointError, Problem

DEEPSPEED_SCRIPT = "zero_to_fp32.py"
DEEPSPEED = re.compile(rf"(.*/)?(\w*zero_pp_rank_\w+\.pt|mp_rank_\w+_model_states\.pt|{re.escape(DEEPSPEED_SCRIPT)})")
DISTRIBUTED_SUFFIX = ".distcp"
ADAPTER_CONFIG = "adapter_config.json"
RUN_CHECKPOINT = re.compile(r"(checkpoint-(\d+))/.+")
FSDP_PICKLE = re.compile(r"pytorch_model_fsdp\w*\.bin")
GGUF_SUFFIX = ".gguf"
PICKLED_MODEL = re.compile(r"pytorch_model.*\.bin")


def adopt_line(path: str | Path) -> str:
    """Return the command that adopts the output of a trainer."""
    return shlex.join(["scale-surgery", "adopt", str(path), "--expanded", "EXPANDED", "-o", "OUT"])


# the next command, after the shards were merged into the folder WHOLE
ADOPT_WHOLE = adopt_line("WHOLE")


def refuse_foreign(path: Path, files: Sequence[str]) -> None:
    """Reject a folder with weights of another program, or with an adapter and weights.

    The message names the command that converts it.
    """
    if SINGLE_FILE in files or INDEX_FILE in files:
        if ADAPTER_CONFIG in files:
            raise CheckpointError(Problem("folder-with-adapter", path, file=ADAPTER_CONFIG))
        return
    for find in (_adapter, _run, _deepspeed, _distributed, _pickled, _gguf):
        if (problem := find(path, files)) is not None:
            raise CheckpointError(problem)


def _adapter(path: Path, files: Sequence[str]) -> Problem | None:
    return Problem("folder-adapter", path) if ADAPTER_CONFIG in files else None


def _run(path: Path, files: Sequence[str]) -> Problem | None:
    """Return a problem if the folder is a run of the Trainer, with checkpoints inside."""
    steps = {match[1]: int(match[2]) for file in files if (match := RUN_CHECKPOINT.fullmatch(file))}
    if not steps or any(map(PICKLED_MODEL.fullmatch, files)):
        return None
    last = max(steps, key=lambda name: steps[name])
    return Problem("folder-run", path, last=path / last)


def _deepspeed(path: Path, files: Sequence[str]) -> Problem | None:
    if not any(DEEPSPEED.fullmatch(file) for file in files):
        return None
    script = [str(path / DEEPSPEED_SCRIPT)] if DEEPSPEED_SCRIPT in files else ["-m", "deepspeed.utils.zero_to_fp32"]
    line = shlex.join(["python", *script, str(path), "WHOLE", "--safe_serialization"])
    return Problem("folder-deepspeed", path, merge=line, adopt=ADOPT_WHOLE)


def _distributed(path: Path, files: Sequence[str]) -> Problem | None:
    shares = sorted(file for file in files if file.endswith(DISTRIBUTED_SUFFIX))
    if not shares:
        return None
    # the optimizer has a folder of its own next to the model's
    folders = dict.fromkeys((path / file).parent for file in shares)
    folder = next((inner for inner in folders if "optim" not in inner.name), path)
    return Problem("folder-fsdp", path, merge=_merge(folder), adopt=ADOPT_WHOLE)


def _merge(folder: Path) -> str:
    """Return the command that merges distributed shards. Accelerate's command needs a model alone."""
    listing = folder / ".metadata"
    # a pickle lists the contents of the shards; it is not loaded, but its bytes show the names
    if not (listing.is_file() and b"optim" in listing.read_bytes()):
        return shlex.join(["accelerate", "merge-weights", str(folder), "WHOLE"])
    merge = ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(folder), "whole.pt"]
    take = (
        "import pathlib, torch, safetensors.torch as st; pathlib.Path('WHOLE').mkdir(); "
        f"st.save_file(torch.load('whole.pt', weights_only=True)['model'], 'WHOLE/{SINGLE_FILE}')"
    )
    return f"{shlex.join(merge)}; then: {shlex.join(['python', '-c', take])}"


def _pickled(path: Path, files: Sequence[str]) -> Problem | None:
    """Return a problem if FSDP pickled a full state. Transformers names its pickled weights otherwise."""
    pickle = next((file for file in files if FSDP_PICKLE.fullmatch(file)), None)
    if pickle is None:
        return None
    line = f"save_file(torch.load({str(path / pickle)!r}, weights_only=True), 'WHOLE/{SINGLE_FILE}')"
    return Problem("folder-fsdp-pickle", path, file=pickle, line=line, adopt=ADOPT_WHOLE)


def _gguf(path: Path, files: Sequence[str]) -> Problem | None:
    """Return a problem if the folder has weights of llama.cpp.

    The part for images (mmproj) is not a model alone, so the problem names another file if there is one.
    """
    held = [file for file in files if file.lower().endswith(GGUF_SUFFIX)]
    if not held or any(file.endswith(PICKLE_SUFFIXES) for file in files):
        return None
    file = next((file for file in held if "mmproj" not in file), held[0])
    return Problem("folder-gguf", path, file=file, load=load_gguf(path, file))


def load_gguf(folder: Path, file: str) -> str:
    """Return the call that loads a GGUF file, without its closing bracket."""
    return f"from_pretrained({str(folder)!r}, gguf_file={file!r}"
