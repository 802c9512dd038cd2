"""learn.json: the stages that a job has done, and whether their outputs are still there.

A stage is recorded after its outputs are complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from scale_surgery.checkpoint.files import nearest_folder, plain_json, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.staging import touches
from scale_surgery.errors import CheckpointError, Problem, problems_of
from scale_surgery.learning.recipe import Recipe, differences
from scale_surgery.learning.stages import Kept, Stage, Work


@dataclass
class Record:
    """Content of learn.json: recipe, stamps of texts, results and seconds of stages, and whether it has to clear."""

    file: Path
    recipe: Mapping[str, Any]
    read: Mapping[str, Any]
    kept: dict[str, Kept] = field(default_factory=dict)
    done: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    clears: bool = False
    format: Literal[1] = 1

    def write(self) -> None:
        """Write it, whole or not at all."""
        content = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "file"}
        write_json(self.file, plain_json(content))


def check_job_folder(folder: Path, record: str, before: tuple[str, ...], inputs: Mapping[str, Path]) -> None:
    """Check that a folder is new, empty or of a job, and is no input.

    Args:
        folder: The folder.
        record: Name of the file that a job keeps there.
        before: How the names of files begin that are there before it.
        inputs: Paths that the job reads, by their names.
    """
    problems = []
    if folder.exists() and not folder.is_dir():
        problems.append(Problem("output-is-file", folder))
    elif (
        folder.is_dir()
        and not (folder / record).is_file()
        and any(not path.name.startswith(before) for path in folder.iterdir())
    ):
        problems.append(Problem("output-no-job", folder, record=record))
    problems += [
        Problem("output-touches-input", folder, input=given)
        for given, path in inputs.items()
        if path.exists() and touches(folder, path)
    ]
    parent = nearest_folder(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        problems.append(Problem("output-closed", folder, parent=parent))
    if problems:
        raise CheckpointError(*problems)


def clear_folder(folder: Path, kept: tuple[str, ...]) -> None:
    """Remove the files of another job; names that begin with one of `kept` stay."""
    for path in folder.iterdir():
        if not path.name.startswith(kept):
            remove(path)


def remove(output: Path) -> None:
    """Remove a file or a folder, if it is there."""
    shutil.rmtree(output) if output.is_dir() and not output.is_symlink() else output.unlink(missing_ok=True)


def take_up(record: Record, recipe: Recipe) -> Record:
    """Continue the record of an earlier run of the same recipe."""
    content = {**read_json(record.file), "file": str(record.file)}
    try:
        before = read_record(content, Record)
    except ValueError as error:
        raise CheckpointError(Problem("job-record-unfit", record.file, *problems_of(error))) from error
    folder = record.file.parent
    settings = [problem.within(folder) for problem in differences(recipe, before.recipe)]
    texts = [
        Problem("text-changed" if name in record.read else "text-gone", name, folder=folder)
        for name in {**before.read, **record.read}
        if not _is_same(before.read.get(name, ()), record.read.get(name, ()))
    ]
    # another recipe may name other files; of the same files, a changed text changes the preset's settings
    same_files = before.read.keys() == record.read.keys()
    if problems := (texts if texts and same_files else settings or texts):
        raise CheckpointError(*problems)
    return replace(record, kept=before.kept, done=before.done, seconds=before.seconds, clears=before.clears)


def _is_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if two stamps (bytes, time, perhaps sha256) are of one content."""
    return list(before) == list(now) or (len(before) == len(now) == 3 and before[2] == now[2])


def gone_since(stages: Sequence[Stage], record: Record) -> dict[str, Path]:
    """Missing outputs of stages that are done, by the name of the stage."""
    done = [(stage.name, stage.output) for stage in stages if stage.name in record.kept]
    return {name: output for name, output in done if not output.exists()}


def check_there(work: Work, stages: Sequence[Stage], record: Record) -> None:
    """Refuse to continue where a needed output is missing; of a finished job that is its result alone."""
    is_done = all(stage.name in record.kept for stage in stages)
    gone = {name: output for name, output in gone_since(stages, record).items() if output == work.result or not is_done}
    if gone:
        raise CheckpointError(*(Problem("stage-output-gone", output, stage=name) for name, output in gone.items()))
