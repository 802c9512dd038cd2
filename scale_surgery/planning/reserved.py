"""Names of files and tensors that expanded folders need, and that no base may have.

A base is checked for all of them before anything is written: later commands, such as train and compose, cannot rename a
file of the base any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from scale_surgery.checkpoint.expansions import INFIX, expansion_of
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import (
    CODE_FILES,
    EXTRACT_FILE,
    FUSED_CODE_FILES,
    OWN_CODE_FILES,
    STORED_INDEX,
    TRAINING_FOLDER,
)
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.planning.tensors import TensorPlan

# surgery.json is no side file of a base: whoever has one is taken for an expanded model
FILES = {EXTRACT_FILE, STORED_INDEX, *CODE_FILES, *FUSED_CODE_FILES, *OWN_CODE_FILES}
FOLDERS = (TRAINING_FOLDER,)
SHARDS = re.compile(r"(expansion|fused)-[^/]*\.safetensors")


def check_clashes(base: Checkpoint, tensors: Iterable[TensorPlan] = ()) -> None:
    """Check that a base has no tensor and no file of a reserved name."""
    names = [tensor.name for tensor in tensors if tensor.name in base.tensors]
    problems = [Problem("tensor-name-taken", name) for name in names]
    problems += [
        Problem("tensor-name-reserved", name, infix=INFIX)
        for name in base.tensors
        if expansion_of(name) and name not in names
    ]
    problems += map(name_clash, reserved_names(base))
    if problems:
        raise CheckpointError(*problems)


def reserved_names(base: Checkpoint) -> list[str]:
    """Files of a base that have reserved names."""
    return [
        name
        for name in (*base.shards, *base.side_files)
        if name in FILES or PurePosixPath(name).parts[0] in FOLDERS or SHARDS.fullmatch(name)
    ]


def name_clash(name: str) -> Problem:
    """Return the problem of a file of a base with a reserved name."""
    return Problem("file-name-reserved", name)
