"""Try the numbers of a router on old and on new text, and set the best: forgetting against learning.

old and new text --one pass--> path_scores --every setting--> routing_sweep --the rule--> proposed --> config.json
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.sources import listed
from scale_surgery.checkpoint.staging import output_file_problems
from scale_surgery.errors import CheckpointError, DataError, PlanError
from scale_surgery.evidence.subjects import choose_lengths, open_subjects, read_texts
from scale_surgery.planning.routing_specs import Routing, read_routing
from scale_surgery.progress import Track, no_track
from scale_surgery.routing.sweep import Outcome, sweep_model
from scale_surgery.running.options import Dtype, RunOptions
from scale_surgery.surgery.record import read_manifest
from scale_surgery.surgery.route import set_routing

if TYPE_CHECKING:
    from scale_surgery.running.documents import Document

# what is measured on which text
SIDES = {"old": "forgetting", "new": "learning"}


@dataclass(frozen=True)
class CalibrationSettings:
    """Which setting of a router is the best, and what becomes of it.

    Attributes:
        most_forgetting: Nats per token of old text that may be lost against the base.
        write: Whether the best setting is written into the model.
        plot: PNG or SVG to be, forgetting against learning; replaced where it exists.
    """

    most_forgetting: float = 0.02
    write: bool = False
    plot: str | Path | None = None


@dataclass(frozen=True)
class Calibration:
    """The result of `route_calibrate`.

    Attributes:
        path: The model.
        name: What it is called.
        base: What its base model scores.
        adapt: What its adapt path alone scores.
        present: What it scores as it was found.
        proposed: What it scores with the best setting: the one that learns most among those that forget at most
            `most_forgetting`; where there is none, the one that forgets least.
        is_within: Whether that forgets no more.
        outcomes: Every setting in the order of its numbers, the present and the proposed one among them.
        most_forgetting: Nats per token of old text that may be lost against the base.
        old: Files of old text.
        new: Files of new text.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: What weights were cast to, or None where they stayed as stored.
        plot: Where it was drawn, or None.
        written: Whether the proposed setting was written into the model; not where it was there already.
    """

    path: Path
    name: str
    base: Outcome
    adapt: Outcome
    present: Outcome
    proposed: Outcome
    is_within: bool
    outcomes: tuple[Outcome, ...]
    most_forgetting: float
    old: tuple[str, ...]
    new: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    plot: Path | None
    written: bool

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        outcomes = {"outcomes": [outcome.to_json() for outcome in self.outcomes]}
        single = {name: content[name].to_json() for name in ("base", "adapt", "present", "proposed")}
        # JSON has no infinity: it becomes a text
        plain: dict[str, Any] = plain_json(content | single | outcomes)
        return plain


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
    """Sweep the threshold of a cosine router, or prior and switch rate of a posterior router, and propose the best.

    The best setting is the one that learns most among those that forget at most `most_forgetting`; where there is
    none, the one that forgets least. Of equal ones the present wins, then the default. Nothing is written unless all
    went well.

    Args:
        routed: Folder of a routed checkpoint.
        old: A file or saved dataset that tells what the base knows, or several, as for `data.read_documents`.
        new: The same with what was to be learned.
        settings: What may be lost, and what is written.
        sequence_length: Most tokens that are read at once; by default the context, at most 1024.
        step: Tokens from one window of a longer text to the next; by default half of that.
        run: How the model runs: device, dtype, trust_remote_code, batch_size.
        track: Makes progress bars.

    Returns:
        Forgetting, learning and routed shares of every setting, and the best one.

    Raises:
        PlanError: If `most_forgetting` is negative or no number, or a setting is to be written and none forgets so
            little.
        DataError: If there is no old or no new text, a file cannot be read or holds nothing to score, the lengths do
            not fit, or the model has no tokenizer that loads.
        CheckpointError: If this is no routed model, it cannot be loaded, a loss is not finite, or the plot or the
            model cannot be written.
    """
    most_forgetting = settings.most_forgetting
    if not most_forgetting >= 0:
        raise PlanError(f"--most-forgetting is {most_forgetting}, expected nats per token, at least 0.")
    folder, drawn = Path(routed), None if settings.plot is None else Path(settings.plot)
    files = {"old": list(map(Path, listed(old))), "new": list(map(Path, listed(new)))}
    present = _open_routing(folder)
    _check_outputs(folder, drawn, [*files["old"], *files["new"]], write=settings.write)
    documents = _read(files)
    (subject,) = open_subjects([folder], run)
    length, step = choose_lengths([subject], sequence_length, step)
    found = sweep_model(subject, read_texts(subject, documents, length, step), present, run, track)
    best = propose(found.outcomes, most_forgetting)
    if settings.write and best.forgetting > most_forgetting and best.routing is not None:
        raise PlanError(
            f"{folder}: no setting forgets at most {most_forgetting:g} nats per token, so none is set; the least is "
            f"{best.forgetting:.4f}, with {best.routing.description}. Raise --most-forgetting, or leave --write out to "
            "see every setting."
        )
    result = Calibration(
        path=folder,
        name=subject.name,
        base=found.base,
        adapt=found.adapt,
        present=found.outcomes[0],
        proposed=best,
        is_within=best.forgetting <= most_forgetting,
        outcomes=tuple(sorted(found.outcomes, key=_numbers)),
        most_forgetting=most_forgetting,
        old=tuple(map(str, files["old"])),
        new=tuple(map(str, files["new"])),
        sequence_length=length,
        step=step,
        dtype=run.dtype,
        plot=drawn,
        written=settings.write and best.routing != present,
    )
    _write(result)
    return result


def propose(outcomes: Sequence[Outcome], most_forgetting: float) -> Outcome:
    """Choose the best setting: see `route_calibrate`.

    Args:
        outcomes: What settings score, the preferred of equal ones first.
        most_forgetting: Nats per token that may be lost against the base.

    Returns:
        One of them.
    """
    within = [outcome for outcome in outcomes if outcome.forgetting <= most_forgetting]
    if within:
        return max(within, key=lambda outcome: (outcome.learning, -outcome.forgetting))
    return min(outcomes, key=lambda outcome: (outcome.forgetting, -outcome.learning))


def _open_routing(folder: Path) -> Routing:
    """How a model routes, as its config.json says."""
    specs = open_checkpoint(folder).config.get("scale_surgery")
    if specs is None:
        raise CheckpointError(
            f"{folder}: is no expanded model, expected a routed one. Make one: scale-surgery expand, then "
            "scale-surgery route-export."
        )
    routing = read_routing(specs)
    if routing is None:
        raise CheckpointError(f"{folder}: has no router. Give it one: scale-surgery route-export {folder} -o ROUTED.")
    return routing


def _check_outputs(folder: Path, plot: Path | None, texts: Sequence[Path], *, write: bool) -> None:
    """Refuse before any work what could not be written after it."""
    problems = output_file_problems([plot], [folder, *texts])
    if write:
        read_manifest(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            problems.append(
                f"{folder}: is read-only, and --write changes its config.json. Leave --write out, or copy the folder "
                "to where you may write."
            )
    if problems:
        raise CheckpointError.from_problems(problems)


def _read(files: Mapping[str, Sequence[Path]]) -> dict[str, list[Document]]:
    from scale_surgery.running.documents import read_documents

    missing = [
        f"There is no {side} text, on which {measured} is measured. Give files with --{side}."
        for side, measured in SIDES.items()
        if not files[side]
    ]
    if missing:
        raise DataError.from_problems(missing)
    documents = {side: list(read_documents(some)) for side, some in files.items()}
    empty = [
        f"The {side} text is empty: {', '.join(map(str, files[side]))}. Give at least one document."
        for side, some in documents.items()
        if not some
    ]
    if empty:
        raise DataError.from_problems(empty)
    return documents


def _numbers(outcome: Outcome) -> tuple[float, ...]:
    """What outcomes are sorted by."""
    routing = outcome.routing
    assert routing is not None
    return (routing.threshold, routing.switch_rate, routing.prior)


def _write(result: Calibration) -> None:
    """Write the setting and the plot, both or none."""
    from scale_surgery.show.figure_calibration import plot_calibration

    drawn = None if result.plot is None else result.plot.with_name(f".drawn-{result.plot.name}")
    try:
        if drawn is not None:
            plot_calibration(result, drawn)
        if result.written and result.proposed.routing is not None:
            set_routing(result.path, result.proposed.routing)
        if drawn is not None and result.plot is not None:
            drawn.rename(result.plot)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or result.path}: cannot be written ({error.strerror or error}). Check the folder and its "
            "permissions."
        ) from error
    finally:
        if drawn is not None:
            drawn.unlink(missing_ok=True)
