"""The numbers of the router of a composed folder are changed in place."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import ROUTER_KEY
from scale_surgery.checkpoint.files import write_json, write_text
from scale_surgery.checkpoint.folder import read_text
from scale_surgery.checkpoint.names import COMPOSED_FILE, CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.composition.record import Mixing, mixing_problems, read_composition
from scale_surgery.errors import CheckpointError, PlanError


def set_mixing(composed: str | Path, mixing: Mixing) -> None:
    """Change the numbers of the router of a composed folder in place; config.json and composed.json are written.

    Args:
        composed: The folder.
        mixing: How its paths are to be mixed.

    Raises:
        PlanError: If the numbers make no sense.
        CheckpointError: If this is no composed folder, or it cannot be written; then nothing has changed.
    """
    path = Path(composed)
    checkpoint, record = read_composition(path)
    if problems := mixing_problems(mixing, record.names):
        raise PlanError.from_problems(problems)
    own = {**checkpoint.config[CONFIG_KEY], ROUTER_KEY: mixing.router(len(record.names))}
    before = read_text(checkpoint, CONFIG_FILE)
    try:
        write_json(path / CONFIG_FILE, {**checkpoint.config, CONFIG_KEY: own})
        # the last verification stays; it names the numbers that it is about
        write_json(path / COMPOSED_FILE, asdict(replace(record, mixing=mixing)))
    except OSError as error:
        # the two say the same, or nothing has changed
        with contextlib.suppress(OSError):
            write_text(path / CONFIG_FILE, before)
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error}). Check the folder.") from error
