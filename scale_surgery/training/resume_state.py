"""The files that a resumed run reads besides its tensors: the trainer's state, and pickles loaded without code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.listing import list_files
from scale_surgery.checkpoint.records import open_record, read_record
from scale_surgery.checkpoint.trainer_files import STATE_FILE
from scale_surgery.errors import Problem, SurgeryError, TrainingError
from scale_surgery.fields import Count
from scale_surgery.running.device import is_out_of_memory


@open_record
@dataclass(frozen=True)
class TrainerFile:
    """The required fields of a trainer's state."""

    global_step: Count
    log_history: tuple[Mapping[str, Any], ...]


@contextmanager
def reading_state(checkpoint: Path) -> Iterator[None]:
    """Raise errors of damaged files as TrainingError: the checkpoint cannot be resumed."""
    from torch.distributed import DistError

    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, DistError):
            raise  # the files may be intact
        kind, words = type(error).__name__, " ".join(f"{error}".split())
        foreign = Problem("unforeseen", kind=kind, error=words)
        reasons = error.problems if isinstance(error, SurgeryError) else (foreign,)
        raise TrainingError(Problem("run-damaged", checkpoint, *reasons)) from error


def check_state(checkpoint: Path) -> None:
    """Check the trainer's state of a checkpoint before it is loaded."""
    with reading_state(checkpoint):
        list_files(checkpoint)  # refuses a pipe, which would block
        read_record(read_json(checkpoint / STATE_FILE), TrainerFile, STATE_FILE)
