"""One case: a copy of a seed, one mutation, one operation, and what has to hold afterwards.

A case is a function of the seed of the campaign and its own number, so that it can be repeated alone.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery import SurgeryError, apply
from tests.fuzz import oracles
from tests.fuzz.documents import mutate_document
from tests.fuzz.files import mutate_file, plant_code
from tests.fuzz.operations import OPERATIONS, Call, Operation
from tests.fuzz.seeds import BASE_OF, BASES, EXPANDED
from tests.fuzz.tensors import flip_byte, mutate_header

SECONDS = 60
MORE_MEMORY = 2 << 30
Mutator = Callable[[random.Random, Path, Path], str]
MUTATORS: dict[str, Mutator] = {
    "documents": mutate_document,
    "headers": mutate_header,
    "bytes": flip_byte,
    "files": mutate_file,
    "planted code": plant_code,
}
SHARES = {"documents": 8, "headers": 4, "bytes": 3, "files": 4, "planted code": 1, "options": 2}


@dataclass(frozen=True)
class Outcome:
    """What came of a case: "refused", "accepted" or "finding", and of a finding its kind, its key and more."""

    number: int
    mutator: str
    operation: str
    outcome: str
    did: str = ""
    kind: str = ""
    key: str = ""
    detail: str = ""


class FindingError(Exception):
    """Something that has to hold does not."""

    def __init__(self, kind: str, key: str, detail: str = "") -> None:
        super().__init__(kind, key, detail)


class OutOfTime(BaseException):
    """Raised by the alarm; no handler of errors takes it for one of its own."""


def run_case(seeds: Path, seed: int, number: int) -> Outcome:
    """Run one case."""
    dice = random.Random(f"{seed}/{number}")
    operation = dice.choices(OPERATIONS, [operation.weight for operation in OPERATIONS])[0]
    name = operation.name
    place = Path(tempfile.mkdtemp(prefix="scale-surgery-fuzz-"))
    did = []
    mutator = "options" if operation.has_options and dice.random() < 0.3 else ""
    try:
        model = dice.choice(operation.models)
        call = _prepare(seeds, place, dice, operation, model, is_odd=bool(mutator))
        mutator = mutator or _mutate(dice, operation, call, did)
        outcome = _judge(seeds, place, operation, call, model)
        return Outcome(number, mutator, name, outcome, ", ".join(did))
    except FindingError as finding:
        return Outcome(number, mutator, name, "finding", ", ".join(did), *map(str, finding.args))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _prepare(seeds: Path, place: Path, dice: random.Random, operation: Operation, model: str, *, is_odd: bool) -> Call:
    inputs = place / "in"
    for name in dict.fromkeys((model, *operation.beside)):
        copy = shutil.copytree if (seeds / name).is_dir() else shutil.copy2
        inputs.mkdir(exist_ok=True)
        copy(seeds / name, inputs / name)
    (place / "outside").mkdir()
    (place / "outside" / "canary").write_text("nobody asked for this\n", encoding="utf-8")
    (place / "out").mkdir()
    return Call(dice, inputs, inputs / model, place / "out" / "made", is_odd)


def _mutate(dice: random.Random, operation: Operation, call: Call, did: list[str]) -> str:
    """Mutate one input, mostly the model; gives the mutator's name."""
    beside = [call.beside(name) for name in operation.beside]
    subject = dice.choice([call.model, call.model, *beside])
    mutator = dice.choices(list(MUTATORS), [SHARES[name] for name in MUTATORS])[0]
    suitable = [file for file in _files(subject) if _is_suitable(mutator, file)]
    mutator = mutator if suitable else "files"
    for _ in range(dice.choice([1, 1, 1, 2])):
        left = [file for file in _files(subject) if _is_suitable(mutator, file)]
        if not left:
            break
        file = _choose(dice, left)
        try:
            change = MUTATORS[mutator](dice, file, call.place.parent / "outside" / "canary")
        except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            break  # the first mutation left nothing that a second one can read
        did.append(f"{subject.name}/{file.name}: {change}")
    return mutator


def _files(subject: Path) -> list[Path]:
    """Regular files, in an order that does not depend on the disk."""
    paths = [subject] if not subject.is_dir() else sorted(subject.rglob("*"))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _is_suitable(mutator: str, file: Path) -> bool:
    suffixes = {"documents": (".json", ".jsonl"), "headers": (".safetensors",)}
    return file.suffix in suffixes.get(mutator, (file.suffix,))


def _choose(dice: random.Random, files: list[Path]) -> Path:
    """A file; what is read most is mutated most."""
    known = ("surgery.json", "config.json", "model.safetensors.index.json", "extract.json", "plan.json")
    first = [file for file in files if file.name in known or file.suffix == ".safetensors"]
    return dice.choice(first if first and dice.random() < 0.7 else files)


def _judge(seeds: Path, place: Path, operation: Operation, call: Call, model: str) -> str:
    before = oracles.snapshot(place)
    try:
        answer = _bounded(lambda: operation.run(call))
        outcome = "accepted" if answer is not False else "refused"
    except SurgeryError:
        answer, outcome = None, "refused"
    _check_places(operation, call, before, oracles.snapshot(place), is_refused=outcome == "refused")
    _check_printed(call)
    if outcome == "accepted":
        _bounded(lambda: _check_accepted(seeds, operation, call, model, answer))
    return outcome


def _bounded(work: Callable[[], Any]) -> Any:
    """What the work gives; whatever else but our own errors comes out of it is a finding."""
    try:
        with bounded():
            return work()
    except (SurgeryError, FindingError):
        raise
    except OutOfTime as error:
        raise FindingError("slow", _place_of(error), f"more than {SECONDS} s") from error
    except MemoryError as error:
        raise FindingError("memory", _place_of(error), f"more than {MORE_MEMORY >> 30} GiB") from error
    except BaseException as error:
        raise FindingError("escape", f"{type(error).__name__} in {_place_of(error)}", str(error)[:300]) from error


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the time and the memory of this process while the block runs."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _place_of(error: BaseException) -> str:
    """The innermost function of the program that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/scale_surgery/" in frame.filename]
    frame = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('/scale_surgery/')[2]}:{frame.name}"


def _check_places(
    operation: Operation, call: Call, before: oracles.Snapshot, after: oracles.Snapshot, *, is_refused: bool
) -> None:
    if "outside/it-ran" in after:
        raise FindingError("code ran", str(call.model.name))
    changed = oracles.differing(before, after)
    allowed = tuple(f"in/{call.model.name}/{name}" for name in operation.changes)
    inputs = [name for name in changed if name.startswith("in/") and not (allowed and name.startswith(allowed))]
    if inputs:
        raise FindingError("input changed", inputs[0], ", ".join(inputs[:5]))
    outside = [name for name in changed if not name.startswith(("in/", "out/"))]
    if outside:
        raise FindingError("written outside", outside[0], ", ".join(outside[:5]))
    left = [name for name in changed if name.startswith("out/") and name not in ("out/printed", "out/made.html")]
    if is_refused and operation.gives_base and _is_begun(left):
        return  # documented: once the file has been repaired, the same command continues
    if left and (is_refused or not operation.writes):
        top = sorted({name.split("/")[1] for name in left})
        raise FindingError("left behind", ", ".join(top), ", ".join(left[:5]))
    if any(name.split("/")[1] != "made" for name in left):
        raise FindingError("left beside the target", ", ".join(sorted({name.split("/")[1] for name in left})))


def _is_begun(left: list[str]) -> bool:
    """Whether what is left is an unfinished folder with some files in it, and its record."""
    begun = ("out/made.partial", "out/.made.partial.json")
    return any(name.startswith("out/made.partial/") for name in left) and all(name.startswith(begun) for name in left)


def _check_printed(call: Call) -> None:
    printed = call.out.with_name("printed")
    if printed.is_file():
        text = printed.read_bytes().decode("utf-8", "surrogatepass")
        if characters := sorted(set(oracles.unprintable(text))):
            raise FindingError("raw control characters", ", ".join(characters), text[:300])


def _check_accepted(seeds: Path, operation: Operation, call: Call, model: str, answer: Any) -> None:
    """What was said to be good, or was made of it, is what it was; or was a base, which may be anything."""
    if model in EXPANDED and not operation.gives_base and (operation.writes or answer is True):
        is_verified = oracles.is_verified(call.model)
        if is_verified and (changed := oracles.changed_content(call.model, seeds / model)):
            raise FindingError("verified over changed bytes", changed[0], ", ".join(changed[:5]))
        if not is_verified:
            raise FindingError("accepted what verify refuses", f"{operation.name} of {model}")
    if operation.writes and operation.gives_base:
        if problems := oracles.base_problems(call.out, seeds / BASE_OF[model]):
            raise FindingError("not the base", problems[0], ", ".join(problems[:5]))
    elif operation.writes and (call.out / "surgery.json").is_file():
        _check_made(seeds, call, model)


def _check_made(seeds: Path, call: Call, model: str) -> None:
    """What was made keeps what it promises: it verifies, and the base comes back out of it."""
    made = call.out
    if (made / "extract.json").is_file():
        made = apply(made, call.out.with_name("applied"), seeds / BASE_OF[model]).path
    if not oracles.is_verified(made):
        raise FindingError("made what verify refuses", model)
    if model in BASES:
        problems = oracles.strip_problems(call.out, call.model, call.out.with_name("stripped"))
        if problems:
            raise FindingError("the base does not come back", problems[0], ", ".join(problems[:5]))
