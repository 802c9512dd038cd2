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

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.file_stat import Stamps, take_stamps
from scale_surgery.checkpoint.files import UNFINISHED, plain_json, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.locks import locked
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.sources import find_source, listed
from scale_surgery.comparing.comparison import Base, Comparison, Forecast, Losses, Refused, Row, Try
from scale_surgery.comparing.settings import FOLDERS, CompareSettings
from scale_surgery.errors import CheckpointError, PlanError, Problem, SurgeryError, TrainingError, problems_of
from scale_surgery.fields import choice_problems
from scale_surgery.fields import problems_of as range_problems
from scale_surgery.folder.record import tool_versions
from scale_surgery.learning.hold_out import (
    CALIBRATE,
    LARGEST_SHARE,
    MEASURE,
    HoldOutSettings,
    hold_out,
    text_files,
)
from scale_surgery.learning.job_record import check_job_folder, clear_folder
from scale_surgery.progress import Steps, Track, no_track
from scale_surgery.running.device import is_out_of_memory
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.text.instructions import read_instructions
from scale_surgery.text.sources import paths_of
from scale_surgery.text.uses import texts_of_two_uses

if TYPE_CHECKING:
    from scale_surgery.comparing.methods import Made, Method, Place
    from scale_surgery.comparing.training import Lesson
    from scale_surgery.text.sequences import Sequences

RECORD, PAGE, SAMPLES, LOCK = "compare.json", "compare.html", "samples.jsonl", "compare"
# files before compare.json: the lock, and compare.json half written
BEFORE = (f".{LOCK}.lock", UNFINISHED)
# share of each text in each of its two held-out parts: of old text nothing is learned
SHARES = {"new": HoldOutSettings.share, "old": LARGEST_SHARE}
# characters of a held-out part. All methods are measured on the same text, so differences between them need less text
# than a loss alone
MEASURED = 12_000
# why a method will not be done later either
LASTING = {"method-refused", "method-diverged"}
# between the rates that are tried
FACTORS = (1.0, 1 / 4, 4.0)
# forward passes that take as long as learning: a backward pass takes as long as one, two if the base's weights learn
PASSES_OF_STEP = {False: 2, True: 3}


@dataclass(frozen=True)
class CompareStart:
    """How a comparison starts, and functions that are called as it goes on.

    Attributes:
        revision: Branch, tag or commit of a Hub repository.
        overwrite: Whether the folder of another comparison is replaced.
        forecast: Called once if methods are left, with what is left to do.
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
    from scale_surgery.comparing.methods import Place, check_methods
    from scale_surgery.training.allocator import keep_freed_memory
    from scale_surgery.training.arguments import is_cpu

    files = {"new": list(map(str, listed(data))), "old": list(map(str, listed(old)))}
    problems = [*range_problems(settings), *choice_problems(settings, "methods")]
    if problems := [*problems, *texts_of_two_uses({"--old": (files["old"], {"--data": files["new"]})})]:
        raise PlanError(*problems)
    check_methods(settings.methods)
    if settings.prompts is not None:
        read_instructions(settings.prompts)  # so that a wrong file is an error now
    if is_cpu(run):
        keep_freed_memory()
    folder = Path(output)
    every = [*files["new"], *files["old"], *filter(None, [settings.prompts])]
    check_job_folder(folder, RECORD, BEFORE, {str(path): path for path in (Path(model), *paths_of(every))})
    place = Place.open(find_source(model, start.revision), folder, settings, run)
    new = Comparison(str(model), settings, _machine(place), _stamps(text_files(every), place.checkpoint.stamps))
    begun = new if start.overwrite else _begun(folder, new)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, called=folder):
            if start.overwrite:
                clear_folder(folder, (RECORD, *BEFORE))
            write_record(begun, folder)
            _hold_out(files, folder, track)
            return _Job(place, begun, start, track).run_all()
    except KeyboardInterrupt as error:
        raise TrainingError(Problem("comparison-interrupted", folder)) from error


def _machine(place: Place) -> dict[str, str]:
    """Return the device and the versions of libraries, with which rows can be compared."""
    peft = {"peft": version("peft")} if find_spec("peft") else {}
    return {"device": str(place.run.device)} | tool_versions() | peft


def _stamps(texts: Iterable[Path], base: Stamps) -> dict[str, Any]:
    """Return the sizes and times of the texts and of the base's files."""
    # links to a file and permissions may come and go
    stamps = {**take_stamps(texts), **base}
    return plain_json({str(file): {"bytes": stamp.bytes, "written": stamp.written} for file, stamp in stamps.items()})


def _begun(folder: Path, new: Comparison) -> Comparison:
    """Return the record of an earlier run of the same command, or the new one."""
    if not (folder / RECORD).is_file():
        return new
    try:
        before = read_record(read_json(folder / RECORD), Comparison)
    except ValueError as error:
        raise CheckpointError(Problem("comparison-unfit", folder / RECORD, *problems_of(error))) from error
    if before == replace(before, base=None, tries=(), rows=(), refused=()) and not (folder / FOLDERS["new"]).exists():
        return new  # it ended before its text was held out, perhaps since there was too little
    if not new.continues(before):
        raise CheckpointError(Problem("comparison-of-other-settings", folder))
    return replace(before, settings=new.settings, refused=tuple(one for one in before.refused if one.is_lasting))


def _hold_out(files: Mapping[str, list[str]], folder: Path, track: Track) -> None:
    """Hold text out, unless an earlier run did."""
    for side, share in SHARES.items():
        if not (target := folder / FOLDERS[side]).exists():
            hold_out(files[side], target, HoldOutSettings(share=share, most_characters=MEASURED), track=track)


class _Job:
    """A comparison at work."""

    def __init__(self, place: Place, begun: Comparison, start: CompareStart, track: Track) -> None:
        from scale_surgery.comparing.texts import read_texts

        self.place, self.comparison, self.start, self.track = place, begun, start, track
        self.started = time.monotonic() - begun.seconds
        self.texts = read_texts(place)

    def run_all(self) -> Comparison:
        """Measure the base, then train the methods that are left."""
        from scale_surgery.comparing.methods import METHODS
        from scale_surgery.comparing.page import write_page
        from scale_surgery.training.base_samples import as_learned, read_samples

        if self.comparison.base is None:
            with self.place.base() as model:
                self._ask_base(model)
        elif list(self.comparison.left):
            self._forecast(self.comparison.base.batch_seconds)
        samples = read_samples(self.place.folder / SAMPLES)
        self.own = as_learned(samples, self.texts.training, self.place.checkpoint, self.texts.tokenizer)
        left = list(self.comparison.left)
        if not left:
            write_page(self.comparison, self.place.folder / PAGE)  # an interrupted run may have left an older one
        for name in left:
            entry = self._row(name, METHODS[name])
            self._keep(self.comparison.adding(entry))
            write_page(self.comparison, self.place.folder / PAGE)
            self.start.ends(entry, self.comparison)
        return self.comparison

    def _keep(self, comparison: Comparison) -> None:
        self.comparison = replace(comparison, seconds=time.monotonic() - self.started)
        write_record(self.comparison, self.place.folder)

    def _ask_base(self, model: Any) -> None:
        """Forecast the comparison, let the base write its samples, and measure it."""
        from scale_surgery.text.beginnings import find_beginnings
        from scale_surgery.training.base_samples import (
            as_documents,
            read_samples,
            sample_texts,
            tokens_per_second,
            write_samples,
        )
        from scale_surgery.training.sampling import MOST_TEXTS, sampling_of

        texts, tokenizer = self.texts, self.texts.tokenizer
        length = texts.to_learn.longest
        sampling = sampling_of(texts.training, texts.steps, length, length)
        begins = find_beginnings(tokenizer, self.place.name, length, self.comparison.settings.prompts)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        check_token_ids(self.place.name, max(texts.highest, begins.highest), vocabulary)
        batch_seconds, written = texts.seconds_of_batch(model), tokens_per_second(model, begins, sampling)
        drawing = 0.0 if written is None else sampling.tokens / written
        self._forecast(batch_seconds, sampling.tokens, drawing, begins.describe(MOST_TEXTS))
        # those of a run that was interrupted after it wrote them are the same
        if not (file := self.place.folder / SAMPLES).is_file():
            samples = sample_texts(model, begins, sampling, self.track)
            write_samples(file, samples if begins.asked else as_documents(samples, tokenizer), tokenizer)
        begun = begins.describe(len(read_samples(file)))
        losses = self._losses("base", model, MEASURE)
        if not losses.is_finite:
            raise TrainingError(Problem("base-loss-not-finite", self.place.name))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        costs = self.place.served_bytes(model), texts.seconds_of_token(model)
        base = Base(losses, batch_seconds, parameters, *costs)
        self._keep(replace(self.comparison, base=base, begun=begun))

    def _forecast(
        self, batch_seconds: float, to_sample: int = 0, sampling_seconds: float = 0.0, begun: str = ""
    ) -> None:
        """Forecast what is left, by the seconds in which the base reads a batch."""
        texts = self.texts
        seconds = sampling_seconds + batch_seconds * sum(map(self._batches, self.comparison.left))
        passes = texts.steps * texts.training.batch_size / len(texts.to_learn)
        self.start.forecast(Forecast(texts.steps, passes, to_sample, seconds, begun))

    def _batches(self, name: str) -> float:
        """Return how many batches the base would read in the time that a method takes."""
        from scale_surgery.comparing.methods import METHODS

        texts, method = self.texts, METHODS[name]
        tries = self.comparison.settings.rates - sum(done.method == name for done in self.comparison.tries)
        lessons = [(texts.lesson(None), 1), (texts.trial(None), tries)]
        learned = sum(times * lesson.steps * lesson.settings.batch_size for lesson, times in lessons)
        rehearsed = sum(times * lesson.steps * lesson.settings.rehearsed_rows for lesson, times in lessons)
        measured = (tries * texts.measured(CALIBRATE) + texts.measured(MEASURE)) / texts.to_learn.longest
        passes = PASSES_OF_STEP[method.overwrites]
        # the base reads own samples too
        rows = measured + passes * learned + (passes + 1) * rehearsed * method.rehearses
        return rows / texts.training.batch_size

    def _row(self, name: str, method: Method) -> Row | Refused:
        """Try the rates of a method, then train it with the best."""
        from scale_surgery.comparing.training import check_memory

        try:
            check_memory(name, method, self.place)
            best = min(self._tries(name, method), key=lambda done: done.total)
            if best.losses is None:
                raise TrainingError(Problem("method-diverged", name, rate=best.rate))
            with method.make(self.place) as made:
                return self._train(name, method, made, best.rate)
        except SurgeryError as error:
            codes = {problem.code for problem in error.problems}
            return Refused(name, f"{error}", is_lasting=isinstance(error, PlanError) or bool(codes & LASTING))
        except Exception as error:  # the others go on, whatever PEFT or a model's own class does
            code = "out-of-memory" if is_out_of_memory(error) else "method-failed"
            problem = Problem(code, name, kind=type(error).__name__, error=error)
            return Refused(name, f"{TrainingError(problem)}", is_lasting=False)

    def _tries(self, name: str, method: Method) -> list[Try]:
        """Try rates; a higher one only if the middle is better than the lower one."""
        tried: list[Try] = []
        for factor in FACTORS[: self.place.settings.rates]:
            if factor > 1 and tried[0].total >= tried[1].total:
                break
            tried.append(self._try(name, method, factor))
        return tried

    def _try(self, name: str, method: Method, factor: float) -> Try:
        """Try a rate, or return what an earlier run found."""
        for before in self.comparison.tries:
            if (before.method, before.factor) == (name, factor):
                return before
        with method.make(self.place) as made:
            rate = float(f"{made.rate * factor:.2g}")
            self._learn(name, made, rate, self.texts.trial(self._own(method)))
            with made.measuring():
                losses = self._losses(name, made.model, CALIBRATE)
        done = Try(name, factor, rate, losses if losses.is_finite else None)
        self._keep(self.comparison.adding(done))
        return done

    def _own(self, method: Method) -> Sequences | None:
        return self.own if method.rehearses else None

    def _learn(self, name: str, made: Made, rate: float, lesson: Lesson) -> list[float]:
        from scale_surgery.comparing.training import learn

        with self.track(f"{name} at {rate:g}", Steps(lesson.steps, lesson.tokens)) as advance:
            return learn(made, lesson, rate, advance)

    def _losses(self, name: str, model: Any, part: str) -> Losses:
        with self.track(f"measure {name}", self.texts.measured(part)) as advance:
            return self.texts.losses(model, part, advance)

    def _train(self, name: str, method: Method, made: Made, rate: float) -> Row:
        from scale_surgery.comparing.training import watching_memory

        assert self.comparison.base is not None
        base = self.comparison.base.losses
        trained = sum(parameter.numel() for parameter in made.model.parameters() if parameter.requires_grad)
        with watching_memory(next(made.model.parameters()).device) as peak:
            seconds = self._learn(name, made, rate, self.texts.lesson(self._own(method)))
        with made.measuring():
            losses = self._losses(name, made.model, MEASURE)
            if not losses.is_finite:
                raise TrainingError(Problem("method-diverged", name, rate=rate))
            served = made.model if made.served is None else made.served()
            speed = self.texts.seconds_of_token(served)
        return Row(
            name,
            rate,
            method.rehearses,
            trained,
            statistics.median(seconds),
            peak.bytes,
            self.place.served_bytes(served),
            speed,
            losses,
            learning=0.0 - losses.new.loss_against(base.new),
            forgetting=losses.old.loss_against(base.old),
        )


def write_record(comparison: Comparison, folder: Path) -> None:
    """Write compare.json, whole or not at all."""
    write_json(folder / RECORD, plain_json(asdict(comparison)))
