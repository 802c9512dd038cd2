"""Files that a trainer saves with a model: numbers from JSON, and names of files that are not read.

trainer_state.json     steps, epochs, and a log of losses (transformers, TRL)
training_args.json     settings, if they were saved as JSON
training_args.bin      a pickle, which can run code when it is loaded: listed and never opened
chat_template.jinja    the chat template of the tokenizer, if it has one
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint, read_json, read_text
from scale_surgery.checkpoint.names import TOKENIZER_CONFIG_FILE
from scale_surgery.errors import CheckpointError

STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"
TEMPLATE_FILE = "chat_template.jinja"
# arguments in other formats, and states of optimizer, schedule, scaler and random generators
NOT_READ = re.compile(r"training_args\.(?!json$)\w+|(optimizer|scheduler|scaler|rng_state|random_states)\w*\.\w+")
STEP = "global_step"


@dataclass(frozen=True)
class LeftBehind:
    """The numbers and the files that a trainer saved.

    Attributes:
        state: Numbers of its state, such as global_step and epoch.
        settings: Numbers of its arguments.
        log: Numbers of its log, in order.
        read: Files that were read.
        not_read: Files that were not read.
    """

    state: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    log: tuple[Mapping[str, float], ...] = ()
    read: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps, or None if it is not recorded."""
        return int(self.state[STEP]) if STEP in self.state else None


def read_left_behind(path: Path) -> LeftBehind:
    """Read a trainer's state and arguments from a folder. Invalid JSON files are skipped."""
    contents = {name: content for name in (STATE_FILE, ARGUMENTS_FILE) if (content := _read(path / name)) is not None}
    state = contents.get(STATE_FILE, {})
    history = state.get("log_history")
    log = (_numbers(entry) for entry in history if isinstance(entry, dict)) if isinstance(history, list) else ()
    unreadable = [name for name in (STATE_FILE, ARGUMENTS_FILE) if (path / name).is_file() and name not in contents]
    others = sorted(file.name for file in path.iterdir() if NOT_READ.fullmatch(file.name))
    return LeftBehind(
        state=_numbers(state),
        settings=_numbers(contents.get(ARGUMENTS_FILE, {})),
        log=tuple(entry for entry in log if "step" in entry),
        read=tuple(contents),
        not_read=(*unreadable, *others),
    )


def chat_template(checkpoint: Checkpoint) -> Any:
    """Return the chat template of a tokenizer, or None if it has none."""
    if TEMPLATE_FILE in checkpoint.side_files:
        return read_text(checkpoint, TEMPLATE_FILE)
    return (_read(checkpoint.path / TOKENIZER_CONFIG_FILE) or {}).get("chat_template")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_json(file) if file.is_file() else None
    except CheckpointError:
        return None


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in content.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
