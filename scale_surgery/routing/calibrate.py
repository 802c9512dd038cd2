"""Try the numbers of a router on old and new text, and propose the best trade of forgetting for learning.

old and new text --one pass--> path_scores --every setting--> sweep --the rule--> proposed --> config.json
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import finished_file
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.sources import listed
from scale_surgery.checkpoint.staging import output_file_problems
from scale_surgery.command_lines import changed_options
from scale_surgery.errors import CheckpointError, DataError, Problem
from scale_surgery.evidence.eval_targets import Subject, choose_lengths, open_subjects, read_sides, sequences_of
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import is_even, routing_of, weights_of
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.progress import Track, no_track
from scale_surgery.routing.calibration import Calibration
from scale_surgery.routing.choice import CalibrationSettings, choose, read_limits, relative
from scale_surgery.routing.outcome import Outcome
from scale_surgery.routing.sweep import SweepTexts, sweep_model
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.route import set_routing

if TYPE_CHECKING:
    from scale_surgery.text.documents import Document
    from scale_surgery.text.sequences import Sequences

# problem of a missing side, by side
SIDES = {"old": "old-text-missing", "new": "new-text-missing"}


def route_calibrate(
    routed: str | Path,
    old: str | Path | Sequence[str | Path],
    new: str | Path | Sequence[str | Path],
    settings: CalibrationSettings = CalibrationSettings(),
    *,
    sequence_length: int | None = None,
    step: int | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Calibration:
    """Sweep the threshold of a cosine router, or prior and switch rate of a posterior one, and propose the best.

    The best setting learns most among those that forget at most `most_forgetting`, on old text and on the first 8
    tokens of old texts. If there is none, it is the setting that forgets least, and it is not written. Settings with a
    looser bound than now are excluded unless `bound` allows them. A present setting that keeps the limits is replaced
    only for a gain above twice its standard error over texts. Of equal settings, the present one wins, then the
    default. Nothing is written if any step fails.

    Args:
        routed: Folder of a routed checkpoint, or a composed folder.
        old: Old text, which the base knows: a file or saved dataset, or several; see `documents.read_documents`.
        new: New text, which the expansion was to learn: a file or saved dataset, or several.
        settings: Limits, and outputs to write.
        sequence_length: Most tokens of a window; by default the context, at most 1024.
        step: Tokens from one window of a longer text to the next; by default half of that.
        run: Options of the run: device, dtype, trust_remote_code, batch_size.
        track: Makes progress bars.

    Returns:
        Forgetting, learning and routed shares of every setting, and the best one.

    Raises:
        PlanError: If a number is out of range, or no setting keeps the requested bound.
        DataError: If there is no old or no new text, a file cannot be read or holds nothing to score, the lengths do
            not fit, or no tokenizer of the model loads.
        CheckpointError: If this is no routed model, it cannot be loaded, a loss is not finite, or the plot or the
            model cannot be written.
    """
    folder, drawn = Path(routed), None if settings.plot is None else Path(settings.plot)
    files = {"old": list(map(Path, listed(old))), "new": list(map(Path, listed(new)))}
    present, paths = routing_of(folder, open_checkpoint(folder))
    limits = read_limits(settings, present)
    _check_outputs(folder, drawn, [*files["old"], *files["new"]], write=settings.write)
    documents = _read(files)
    (subject,) = open_subjects([folder], run)
    length, step = choose_lengths([subject], sequence_length, step)
    windows = _read_windows(subject, documents, length, step)
    has_several = len(paths) > 2
    swept = sweep_model(subject, windows, present, run, track, has_several=has_several)
    choice = choose(swept.outcomes, relative(limits, swept.outcomes[0]) if has_several else limits)
    result = Calibration(
        path=folder,
        name=subject.name,
        paths=paths,
        base=swept.base,
        adapt=swept.adapt,
        present=swept.outcomes[0],
        proposed=choice.proposed,
        best=choice.best,
        is_within=choice.is_within,
        outcomes=tuple(sorted(swept.outcomes, key=_numbers)),
        most_forgetting=settings.most_forgetting,
        old=tuple(map(str, files["old"])),
        new=tuple(map(str, files["new"])),
        sequence_length=length,
        step=step,
        dtype=run.dtype,
        plot=drawn,
        written=settings.write and choice.is_within and choice.proposed.routing != present,
        options=(
            *changed_options(settings, CalibrationSettings(), {"write", "plot"}),
            *([] if sequence_length is None else ["--sequence-length", str(sequence_length)]),
            *changed_options(run, RunOptions(), {"memory_bytes"}),
        ),
    )
    _write(result)
    return result


def _check_outputs(folder: Path, plot: Path | None, texts: Sequence[Path], *, write: bool) -> None:
    """Check that the outputs can be written, before any work."""
    problems = output_file_problems([plot], [folder, *texts])
    if write:
        read_manifest(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            problems.append(Problem("model-read-only", folder))
    if problems:
        raise CheckpointError(*problems)


def _read(files: Mapping[str, Sequence[Path]]) -> dict[str, list[Document]]:
    if missing := [Problem(code, f"--{side}") for side, code in SIDES.items() if not files[side]]:
        raise DataError(*missing)
    return read_sides(files)


def _read_windows(subject: Subject, documents: Mapping[str, Sequence[Document]], length: int, step: int) -> SweepTexts:
    """Return the windows of both sides, and the beginnings of old texts."""
    from scale_surgery.routing.short_prompts import beginnings
    from scale_surgery.text.tokenizing import number_windows, start_tokens, stride

    # no document is as long as this, so each is one sequence
    whole = sequences_of(subject, subject.tokenizer, documents, sys.maxsize, 1)
    start = start_tokens(subject.tokenizer)
    old, new = (stride(whole[side], length, step, start) for side in SIDES)
    of_base: tuple[Sequences, ...] = ()
    if subject.base_tokenizer is not subject.tokenizer:
        read = sequences_of(subject, subject.base_tokenizer, documents, length, step)
        of_base = tuple(read[side] for side in SIDES)
    short = beginnings(whole["old"], subject.base_vocabulary)
    return SweepTexts(old, new, short, tuple(number_windows(whole["new"], length, step)), of_base)


def _numbers(outcome: Outcome) -> tuple[Any, ...]:
    """Return the sort key of an outcome."""
    routing = outcome.routing
    assert routing is not None
    if isinstance(routing, PosteriorRouter):
        prior = weights_of(routing)
        return (routing.switch_rate, not is_even(prior[1:]), *prior)
    return tuple(value for name, value in routing.settings.items() if name != "router")


def _write(result: Calibration) -> None:
    """Write the setting and the plot, both or none."""
    from scale_surgery.drawing.figures import save_figure
    from scale_surgery.routing.figure import calibration_figure

    try:
        with ExitStack() as stack:
            if result.plot is not None:
                # the file is renamed after the setting is written
                save_figure(calibration_figure(result), stack.enter_context(finished_file(result.plot)))
            if result.written:
                assert result.proposed.routing is not None
                set_routing(result.path, result.proposed.routing)
    except OSError as error:
        place = error.filename or result.path
        raise CheckpointError(Problem("path-unwritable", place, error=error.strerror or error)) from error
