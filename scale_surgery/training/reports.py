"""Report a run to TensorBoard, Weights & Biases and others, by the callbacks of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.names import REPORTS_FOLDER
from scale_surgery.errors import TrainingError
from scale_surgery.training.run_folder import TrainingRun

if TYPE_CHECKING:
    from transformers import Trainer

# not among the installed reports of transformers; their callbacks check their packages themselves
UNLISTED = ("azure_ml", "flyte", "kubeflow")
# packages whose name differs from that of the report
PACKAGES = {"comet_ml": "comet-ml"}


def find_reports(names: Sequence[str]) -> dict[str, Any]:
    """Find the callbacks that report a run."""
    asked = [name for name in dict.fromkeys(names) if name != "none"]
    if not asked:
        return {}
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as CALLBACKS

    unknown = [name for name in asked if name not in CALLBACKS]
    missing = {name: reason for name in asked if name in CALLBACKS and (reason := _what_is_missing(name))}
    problems = [
        *(f"--report-to {name}: is unknown, expected some of {', '.join(CALLBACKS)}." for name in unknown),
        *(f"--report-to {name}: {reason}" for name, reason in missing.items()),
    ]
    if problems:
        raise TrainingError.from_problems(problems)
    return {name: CALLBACKS[name]() for name in asked}


def _what_is_missing(name: str) -> str | None:
    """Why a callback cannot be made, in a sentence."""
    from transformers.integrations import integration_utils

    installed = integration_utils.get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    if name not in (*installed, *UNLISTED):
        return f"its package is not installed. Run `pip install {PACKAGES.get(name, name)}`."
    try:
        integration_utils.INTEGRATION_TO_CALLBACK[name]()
    except (RuntimeError, ImportError) as error:
        return " ".join(str(error).split())
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
    # files for TensorBoard go into the run's folder, unless TENSORBOARD_LOGGING_DIR says otherwise; a resumed run goes
    # on in the same place, and hides what was logged after the checkpoint that it begins with
    latest = training.whole_checkpoints()[-1:]
    begin = training.step_of(latest[0]) + 1 if latest else 0
    # the callback opens it again for the measurement after the last step
    board.logging_dir = board.logging_dir or str(training.target / REPORTS_FOLDER)
    # the callback knows which of two packages is there
    board.tb_writer = board._SummaryWriter(log_dir=board.logging_dir, purge_step=begin if resume else None)
    try:
        yield
    finally:
        if board.tb_writer is not None:
            board.tb_writer.close()
