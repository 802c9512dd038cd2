"""Compare methods on a user's own model and text, under one budget of tokens and with the same own samples.

    OUT/compare.json    settings, every rate that was tried, every method that is done
    OUT/texts-new, OUT/texts-old    parts of the texts: to learn, to choose rates, to measure
    OUT/samples.jsonl   text that the base sampled
    OUT/compare.html    the page

The base is measured first. Then each method tries its learning rates on a share of the tokens; the rate with the
lowest sum of the losses on old and on new text is trained with all tokens. No text that a rate was chosen on is
measured at the end. A method is recorded when it is done, and the same command goes on with the next.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.file_stat import take_stamps
from scale_surgery.checkpoint.files import UNFINISHED, plain_json, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.locks import locked
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.sources import find_source, listed
from scale_surgery.comparing.comparison import Base, Comparison, Forecast, Losses, Refused, Row, Try
from scale_surgery.comparing.settings import METHOD_NAMES, CompareSettings
from scale_surgery.errors import CheckpointError, PlanError, Problem, SurgeryError, TrainingError, problems_of
from scale_surgery.fields import problems_of as range_problems
from scale_surgery.learning.hold_out import (
    CALIBRATE,
    LARGEST_SHARE,
    LEARN,
    MEASURE,
    HoldOutSettings,
    hold_out,
    part_file,
    text_files,
)
from scale_surgery.learning.job_record import check_job_folder, clear_folder
from scale_surgery.progress import Steps, Track, no_track
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.options import RunOptions
from scale_surgery.text.documents import read_documents
from scale_surgery.text.sources import paths_of

if TYPE_CHECKING:
    from scale_surgery.comparing.methods import Made, Place
    from scale_surgery.comparing.training import Lesson
    from scale_surgery.text.sequences import Sequences

RECORD, PAGE, SAMPLES, LOCK = "compare.json", "compare.html", "samples.jsonl", "compare"
# files before compare.json: the lock, and compare.json half written
BEFORE = (f".{LOCK}.lock", UNFINISHED)
TEXTS = {"new": "texts-new", "old": "texts-old"}
# share of the steps on which a rate is tried, and the fewest; factors between the rates
TRIED, FEWEST, FACTORS = 1 / 12, 8, (1.0, 1 / 4, 4.0)
LONGEST = 512
# a backward pass takes twice as long as a forward pass
PASSES_OF_STEP = 3
# tokens of an answer whose speed is measured
ANSWERED, PROMPT = 24, 16


@dataclass(frozen=True)
class CompareStart:
    """How a comparison starts, and functions that are called as it goes on.

    Attributes:
        revision: Branch, tag or commit of a Hub repository.
        overwrite: Whether the folder of another comparison is replaced.
        forecast: Called once, with what is left to do.
        ends: Called with each method that is done, and with the comparison so far.
    """

    revision: str | None = None
    overwrite: bool = False
    forecast: Callable[[Forecast], None] = lambda forecast: None
    ends: Callable[[Row | Refused, Comparison], None] = lambda row, comparison: None


def compare(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    old: str | Path | Sequence[str | Path],
    output: str | Path,
    settings: CompareSettings = CompareSettings(),
    *,
    start: CompareStart = CompareStart(),
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Comparison:
    """Train a model on a text by several methods, and measure what each learned and forgot.

    Args:
        model: The base model, a folder or a Hub id. It is only read.
        data: Text to learn: files, folders or datasets; see `documents.read_documents`.
        old: Old text, to measure forgetting, in the same form.
        output: Folder of the comparison. One that an earlier run of the same command began is continued.
        settings: Methods, tokens, rates.
        start: Revision of the model, treatment of an existing folder, and functions to call.
        run: Options of the run: device, trust_remote_code.
        track: Makes progress bars.

    Returns:
        The base, the rates that were tried, and a row for each method.

    Raises:
        PlanError: If a setting is out of range, or a method needs PEFT, which is not installed.
        DataError: If texts cannot be read, or there is too little.
        CheckpointError: If the model cannot be read, or the folder belongs to something else.
        TrainingError: If the comparison was interrupted.
    """
    from scale_surgery.comparing.methods import check_methods

    if problems := [*range_problems(settings), *_method_problems(settings)]:
        raise PlanError(*problems)
    check_methods(settings.methods)
    folder, files = Path(output), {"new": list(map(str, listed(data))), "old": list(map(str, listed(old)))}
    begun = _begin(folder, str(model), files, settings, overwrite=start.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, called=folder):
            if start.overwrite:
                clear_folder(folder, (RECORD, *BEFORE))
            return _Job(folder, begun, files, start, run, track).run_all()
    except KeyboardInterrupt as error:
        raise TrainingError(Problem("comparison-interrupted", folder)) from error


def _method_problems(settings: CompareSettings) -> list[Problem]:
    unknown = [name for name in settings.methods if name not in METHOD_NAMES]
    is_wrong = unknown or not settings.methods
    value = unknown or "nothing"
    return [Problem("choices-unknown", "--methods", value=value, choices=METHOD_NAMES)] if is_wrong else []


def _begin(
    folder: Path, model: str, files: Mapping[str, list[str]], settings: CompareSettings, *, overwrite: bool
) -> Comparison:
    """Return the record of an earlier run of the same command, or a new one."""
    every = [name for side in files.values() for name in side]
    check_job_folder(folder, RECORD, BEFORE, {str(path): path for path in (Path(model), *paths_of(every))})
    stamps = {str(file): asdict(stamp) for file, stamp in take_stamps(text_files(every)).items()}
    new = Comparison(model, settings, plain_json(stamps))
    if (folder / RECORD).is_file() and not overwrite:
        try:
            before = read_record(read_json(folder / RECORD), Comparison)
        except ValueError as error:
            raise CheckpointError(Problem("comparison-unfit", folder / RECORD, *problems_of(error))) from error
        if (before.model, before.settings, before.read) != (new.model, new.settings, new.read):
            raise CheckpointError(Problem("comparison-of-other-settings", folder))
        return before
    return new


class _Job:
    """A comparison at work."""

    def __init__(
        self,
        folder: Path,
        begun: Comparison,
        files: Mapping[str, list[str]],
        start: CompareStart,
        run: RunOptions,
        track: Track,
    ) -> None:
        self.folder, self.comparison, self.files = folder, begun, files
        self.start, self.run, self.track = start, run, track
        self.started = time.monotonic() - begun.seconds

    def run_all(self) -> Comparison:
        """Measure the base, then train the methods that are left."""
        from scale_surgery.comparing.methods import METHODS, Place
        from scale_surgery.comparing.page import write_page

        self._write()
        self._hold_out()
        source = find_source(self.comparison.model, self.start.revision)
        place = Place.open(source, self.folder, self.comparison.settings, self.run)
        self._prepare(place)
        for name in list(self.comparison.left):
            entry = self._row(name, METHODS[name], place)
            self._add(entry)
            self.start.ends(entry, self.comparison)
        write_page(self.comparison, self.folder / PAGE)
        return self.comparison

    def _add(self, entry: Any) -> None:
        self.comparison = self.comparison.adding(entry)
        self._write()

    def _write(self) -> None:
        self.comparison = replace(self.comparison, seconds=time.monotonic() - self.started)
        write_json(self.folder / RECORD, plain_json(asdict(self.comparison)))

    def _hold_out(self) -> None:
        for side, name in TEXTS.items():
            if not (target := self.folder / name).exists():
                share = HoldOutSettings.share if side == "new" else LARGEST_SHARE
                hold_out(self.files[side], target, HoldOutSettings(share=share), track=self.track)

    def _prepare(self, place: Place) -> None:
        """Tokenize texts, let the base write its samples, and measure it."""
        from scale_surgery.running.tokenizer import need_tokenizer
        from scale_surgery.text.tokenizing import pack, stride, tokenize
        from scale_surgery.training.base_samples import as_learned, read_samples

        settings, config = self.comparison.settings, place.checkpoint.config
        tokenizer = need_tokenizer(place.checkpoint.path, place.name, place.run)
        limits = {place.name: context_of(config)}
        length = settings.sequence_length or min(LONGEST, choose_length(None, limits))
        self.training = settings.training(choose_length(length, limits))
        read = {
            (side, part): tokenize(list(read_documents([part_file(self.folder / name, part)])), tokenizer)
            for side, name in TEXTS.items()
            for part in ((LEARN, CALIBRATE, MEASURE) if side == "new" else (CALIBRATE, MEASURE))
        }
        self.texts: Sequences = pack(read["new", LEARN], length)
        self.held_out = {
            key: stride(some, length, max(1, length // 2)) for key, some in read.items() if key[1] != LEARN
        }
        self.steps = max(1, math.ceil(settings.tokens / (length * settings.batch_size)))
        with nullcontext() if self._is_prepared else place.base() as model:
            if model is not None:
                self._ask_base(place, model, tokenizer, length)
        samples = read_samples(self.folder / SAMPLES)
        self.own = as_learned(samples, self.training, place.checkpoint)

    @property
    def _is_prepared(self) -> bool:
        return self.comparison.base is not None and (self.folder / SAMPLES).is_file()

    def _ask_base(self, place: Place, model: Any, tokenizer: Any, length: int) -> None:
        from scale_surgery.training.base_samples import begin_tokens, sample_texts, tokens_per_second, write_samples
        from scale_surgery.training.sampling import sampling_of

        sampling = sampling_of(self.training, self.steps, length, length)
        begins = begin_tokens(tokenizer, (), place.name)
        rows = sampling.rows(len(begins))
        written = tokens_per_second(model, begins[0], rows, tokenizer)
        seconds = 0.0 if written is None else sampling.tokens / written
        seconds += self._seconds_of_methods(model, length)
        passes = self.steps * self.training.batch_size / len(self.texts)
        self.start.forecast(Forecast(self.steps, passes, sampling.tokens, seconds))
        if not (self.folder / SAMPLES).is_file():
            write_samples(
                self.folder / SAMPLES, sample_texts(model, begins, sampling, tokenizer, self.track), tokenizer
            )
        base = Base(
            self._losses(model, MEASURE),
            sum(parameter.numel() for parameter in model.parameters()),
            place.served_bytes(model),
            self._token_seconds(model),
        )
        self.comparison = replace(self.comparison, base=base)
        self._write()

    def _seconds_of_methods(self, model: Any, length: int) -> float:
        """Forecast the training of all methods that are left, by the time that the base takes to read a batch."""
        from scale_surgery.running.loss import measure

        started = time.monotonic()
        measure(model, self.texts.some(self.training.batch_size), self.training.batch_size)
        forward = time.monotonic() - started
        settings, left = self.comparison.settings, len(list(self.comparison.left))
        rehearsed = self.training.rehearsed_rows / self.training.batch_size
        # the base reads own samples too
        step = forward * (PASSES_OF_STEP + (PASSES_OF_STEP + 1) * rehearsed)
        measured = sum(some.tokens for some in self.held_out.values()) / (length * self.training.batch_size)
        steps = self.steps + settings.rates * self._steps_of_try
        return left * (steps * step + forward * measured * settings.rates)

    @property
    def _steps_of_try(self) -> int:
        """Steps on which a rate is tried: fewer would end in the warm-up."""
        return min(self.steps, max(FEWEST, round(self.steps * TRIED)))

    def _losses(self, model: Any, part: str) -> Losses:
        from scale_surgery.running.loss import measure

        old, new = (measure(model, self.held_out[side, part], self.training.batch_size) for side in ("old", "new"))
        return Losses(old, new)

    def _token_seconds(self, model: Any) -> float:
        """Return the median of the seconds between the tokens of an answer."""
        from scale_surgery.running.own_generation import generate_with

        ids, times = self.texts[0]["input_ids"][None, :PROMPT].to(model.device), list[float]()
        inputs = {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)}
        settings = {"max_new_tokens": ANSWERED, "do_sample": False, "pad_token_id": 0}
        generate_with(model, inputs, on_token=lambda ids: times.append(time.monotonic()), **settings)
        return statistics.median(end - start for start, end in pairwise(times))

    def _row(self, name: str, method: Any, place: Place) -> Row | Refused:
        """Try the rates of a method, then train it with the best."""
        rates: dict[float, float] = {}
        try:
            for factor in FACTORS[: place.settings.rates]:
                done = self._try(name, method, place, factor)
                rates[done.rate] = done.losses.total
            rate = min(rates, key=lambda one: rates[one])
            with method.make(place) as made:
                is_edge = len(rates) > 1 and rate in (min(rates), max(rates))
                return self._train(name, method, made, place, rate, is_edge=is_edge)
        except SurgeryError as error:
            return Refused(name, f"{error}")

    def _try(self, name: str, method: Any, place: Place, factor: float) -> Try:
        """Try a rate, or return what an earlier run found."""
        with method.make(place) as made:
            rate = float(f"{made.rate * factor:.2g}")
            for before in self.comparison.tries:
                if (before.method, before.rate) == (name, rate):
                    return before
            self._learn(name, method, made, rate, self._steps_of_try)
            with made.measuring():
                done = Try(name, rate, self._losses(made.model, CALIBRATE))
        self._add(done)
        return done

    def _learn(self, name: str, method: Any, made: Made, rate: float, steps: int) -> list[float]:
        from scale_surgery.comparing.training import Lesson, learn
        from scale_surgery.training.rehearsal import make_rehearsal

        rehearsal = make_rehearsal(self.own, self.training) if method.rehearses else None
        lesson: Lesson = Lesson(self.texts, rehearsal, self.training, steps)
        total = Steps(steps, steps * self.training.batch_size * self.texts.longest)
        with self.track(f"{name} at {rate:g}", total) as advance:
            return learn(made, lesson, rate, advance)

    def _train(self, name: str, method: Any, made: Made, place: Place, rate: float, *, is_edge: bool) -> Row:
        from scale_surgery.comparing.training import watching_memory

        assert self.comparison.base is not None
        base = self.comparison.base.losses
        trained = sum(parameter.numel() for parameter in made.model.parameters() if parameter.requires_grad)
        with watching_memory(next(made.model.parameters()).device) as peak:
            seconds = self._learn(name, method, made, rate, self.steps)
        with made.measuring():
            losses = self._losses(made.model, MEASURE)
            served = made.model if made.served is None else made.served()
            speed = self._token_seconds(served)
        return Row(
            name,
            rate,
            is_edge,
            method.rehearses,
            trained,
            statistics.median(seconds),
            peak.bytes,
            place.served_bytes(served),
            speed,
            losses,
            learning=0.0 - losses.new.loss_against(base.new),
            forgetting=losses.old.loss_against(base.old),
        )
