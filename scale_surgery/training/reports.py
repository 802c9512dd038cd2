"""Reports of a run to TensorBoard, Weights & Biases and others, by the callbacks of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.names import REPORTS_FOLDER
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.training.run_folder import TrainingRun

if TYPE_CHECKING:
    from transformers import Trainer

# missing from transformers' list of installed reports; their callbacks check their packages themselves
UNLISTED = ("azure_ml", "flyte", "kubeflow")
# packages with another name than the report
PACKAGES = {"comet_ml": "comet-ml"}


def find_reports(names: Sequence[str]) -> dict[str, Any]:
    """Return the callbacks that report a run."""
    asked = [name for name in dict.fromkeys(names) if name != "none"]
    if not asked:
        return {}
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as CALLBACKS

    if problems := [problem for name in asked if (problem := _report_problem(name)) is not None]:
        raise TrainingError(*problems)
    return {name: CALLBACKS[name]() for name in asked}


def _report_problem(name: str) -> Problem | None:
    """Return the reason why a callback cannot be made, or None."""
    from transformers.integrations import integration_utils

    callbacks = integration_utils.INTEGRATION_TO_CALLBACK
    if name not in callbacks:
        return Problem("choices-unknown", "--report-to", value=name, choices=list(callbacks))
    installed = integration_utils.get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    if name not in (*installed, *UNLISTED):
        return Problem("report-without-package", "--report-to", name=name, package=PACKAGES.get(name, name))
    try:
        callbacks[name]()
    except (RuntimeError, ImportError) as error:
        return Problem("report-refused", "--report-to", name=name, error=" ".join(f"{error}".split()))
    return None


@contextmanager
def reporting(
    trainer: Trainer, callbacks: Mapping[str, Any], training: TrainingRun, *, is_main: bool, resume: bool
) -> Iterator[None]:
    """Report a run inside a `with` block."""
    for callback in callbacks.values():
        trainer.add_callback(callback)
    board = callbacks.get("tensorboard")
    if board is None or not is_main:
        yield
        return
    # TensorBoard's files go into the run's folder unless TENSORBOARD_LOGGING_DIR is set. A resumed run continues there,
    # and hides entries logged after the checkpoint from which it resumes
    latest = training.whole_checkpoints()[-1:]
    begin = training.step_of(latest[0]) + 1 if latest else 0
    # the callback reopens it for the measurement after the last step
    board.logging_dir = board.logging_dir or str(training.target / REPORTS_FOLDER)
    # the callback knows which of two packages is installed
    board.tb_writer = board._SummaryWriter(log_dir=board.logging_dir, purge_step=begin if resume else None)
    try:
        yield
    finally:
        if board.tb_writer is not None:
            board.tb_writer.close()
