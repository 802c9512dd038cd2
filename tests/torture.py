"""Kills and errors at random moments in every command that writes, and what has to hold afterwards.

    python -m tests.torture --count 1000 --seed 0

After each: the inputs are what they were; the output is absent, or whole, the new one or that which it replaces; the
same command then succeeds, with the bytes of a run that nobody disturbed; and nothing else is left beside the output.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scale_surgery import register
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.checkpoint.files import remove_unfinished
from tests.conftest import digests, load
from tests.interrupted_steps import Disturbance, run_apart, run_disturbed
from tests.tiny import save_tiny

KINDS = {"kill": 5, "alarm": 2, "error": 2, "full": 1}
UNDISTURBED = Disturbance()
# of a training run, and of what another trainer saved: times and dates
TIMED = ("surgery.json", "training/log.jsonl", "training/curves.png")
ADAPT = ("--layers", "1-2", "--variant", "adapt", "--collaborate", "both")
TRAIN = (
    *("--steps", "3", "--batch-size", "2", "--sequence-length", "32", "--device", "cpu"),
    *("--set", "save_every=1", "--set", "log_every=1"),
)


@dataclass(frozen=True)
class Verb:
    """A command that writes, on files that `make_inputs` made.

    Attributes:
        words: What is typed; IN/ and OUT stand for places.
        old: The input that lies at the output before; the command replaces it, or works in it.
        weight: How often it is taken, among the others.
        is_in_place: Whether it changes files of the folder, each for itself.
    """

    words: Sequence[str]
    old: str | None = None
    weight: int = 4
    is_in_place: bool = False


VERBS = {
    "expand": Verb(["expand", "IN/base", "-o", "OUT", *ADAPT]),
    "expand --base-weights link": Verb(["expand", "IN/base", "-o", "OUT", *ADAPT, "--base-weights", "link"]),
    "expand --overwrite": Verb(["expand", "IN/base", "-o", "OUT", *ADAPT, "--overwrite"], "grown", 6),
    "expand --method grow": Verb(["expand", "IN/base", "-o", "OUT", "--layers", "1", "--method", "grow"]),
    "expand --method depth": Verb(["expand", "IN/base", "-o", "OUT", "--layers", "0,2", "--method", "depth"]),
    "strip": Verb(["strip", "IN/narrow", "-o", "OUT"]),
    "strip --overwrite": Verb(["strip", "IN/narrow", "-o", "OUT", "--overwrite"], "deep", 6),
    "strip, of depth": Verb(["strip", "IN/deep", "-o", "OUT"]),
    "strip, of fused": Verb(["strip", "IN/fused", "-o", "OUT"]),
    "route-export": Verb(["route-export", "IN/adapt", "-o", "OUT"]),
    "route-export --router none": Verb(["route-export", "IN/routed", "-o", "OUT", "--router", "none"]),
    "set_routing": Verb(["set-routing", "OUT"], "routed", is_in_place=True),
    "extract": Verb(["extract", "IN/adapt", "-o", "OUT"]),
    "apply": Verb(["apply", "IN/extract", "--base", "IN/base", "-o", "OUT"]),
    "apply, to other shards": Verb(["apply", "IN/extract", "--base", "IN/resharded", "-o", "OUT"]),
    "compose": Verb(["compose", "IN/base", "IN/extract", "IN/other", "-o", "OUT", "--names", "law,chess"]),
    "compose, one less": Verb(["compose", "IN/composed", "--remove", "law", "-o", "OUT", "--base-weights", "link"]),
    "extract --name": Verb(["extract", "IN/composed", "-o", "OUT", "--name", "law"]),
    "strip, of composed": Verb(["strip", "IN/composed", "-o", "OUT"]),
    "adopt": Verb(["adopt", "IN/saved", "--expanded", "IN/adapt", "-o", "OUT"]),
    "merge --to fused": Verb(["merge", "IN/narrow", "-o", "OUT", "--to", "fused"], weight=2),
    "merge --to stock": Verb(["merge", "IN/narrow", "-o", "OUT", "--to", "stock"], weight=2),
    "merge --to blocks": Verb(["merge", "IN/fused", "-o", "OUT", "--to", "blocks"]),
    "plan -o": Verb(["plan", "IN/base", "-o", "OUT", *ADAPT], weight=1),
    "train": Verb(["train", "IN/shipped", "--data", "IN/texts.jsonl", "-o", "OUT", *TRAIN], weight=1),
}


def make_inputs(place: Path) -> None:
    """Make what the commands read."""
    made = place / "in"
    save_tiny(made / "base", "llama", shard_size="30KB", tie_word_embeddings=True)
    save_tiny(made / "resharded", "llama", shard_size="1GB", tie_word_embeddings=True)
    _do(place, ["expand", "IN/base", "-o", "IN/adapt", *ADAPT])
    register()
    load(made / "adapt").save_pretrained(made / "saved", max_shard_size="50KB")
    _do(place, ["expand", "IN/base", "-o", "IN/narrow", *ADAPT, "--up-width", "0"])
    _do(place, ["expand", "IN/base", "-o", "IN/grown", "--layers", "0", "--method", "grow"])
    _do(place, ["expand", "IN/base", "-o", "IN/deep", "--layers", "0,2", "--method", "depth"])
    _do(place, ["route-export", "IN/adapt", "-o", "IN/routed"])
    _do(place, ["extract", "IN/adapt", "-o", "IN/extract"])
    _do(place, ["extract", "IN/grown", "-o", "IN/other"])
    _do(place, ["compose", "IN/base", "IN/extract", "IN/other", "-o", "IN/composed", "--names", "law,chess"])
    _do(place, ["merge", "IN/narrow", "-o", "IN/fused", "--to", "fused"])
    _do(place, ["expand", str(SHIPPED_MODEL), "-o", "IN/shipped", "--layers", "2-3"])
    rows = ({"text": biography(person, 3)} for person in people(4, start=400))
    (made / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Torture:
    """A place with inputs, and what each command does there when nobody disturbs it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        make_inputs(place)
        self.inputs = digests(place / "in")
        self.whole = cache(self._run_whole)

    def _run_whole(self, name: str) -> tuple[dict[str, int], dict[str, str]]:
        self._clear(VERBS[name])
        record = self.place / "record.json"
        done = _run(self.place, VERBS[name].words, record=record)
        assert done.returncode == 0, (name, done.stderr)
        sizes = {"bytes": max(file.stat().st_size for file in self.place.rglob("out/**/*") if file.is_file())}
        return json.loads(record.read_text()) | sizes, _content(self.made)

    def _clear(self, verb: Verb) -> None:
        self.made = _target(self.place, verb.words)
        shutil.rmtree(self.place / "out", ignore_errors=True)
        (self.place / "out").mkdir()
        if verb.old is not None:
            shutil.copytree(self.place / "in" / verb.old, self.made)

    def draw(self, name: str, chance: random.Random) -> Disturbance:
        """A disturbance that falls into the command, or hardly after its end."""
        counts, _ = self.whole(name)
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        most = counts[{"kill": "calls", "alarm": "milliseconds", "error": "writes", "full": "bytes"}[kind]]
        return Disturbance(kind, chance.randrange(most), chance.choice([errno.ENOSPC, errno.EIO]))

    def disturb(self, name: str, disturbance: Disturbance) -> tuple[str, list[str]]:
        """Disturb a command, and run it again: what became of it, and what does not hold."""
        verb, (_, whole) = VERBS[name], self.whole(name)
        self._clear(verb)
        old = None if verb.old is None else _content(self.made)
        done = _run(self.place, verb.words, disturbance)
        problems = [*self._after(verb, done.stderr, old, whole)]
        if done.returncode < 0 and (verb.is_in_place or verb.words[0] == "plan"):
            # of a single file a kill may leave what it was begun in: see the pages of the commands
            remove_unfinished(self.place / "out")
        repeated = _run(self.place, self._again(verb, old, whole))
        if repeated.returncode != 0:
            problems.append(f"a second run fails: {repeated.stderr[-500:]}")
        else:
            problems += self._at_the_end(whole)
        return _outcome(done.returncode), problems

    def _again(self, verb: Verb, old: dict[str, str] | None, whole: dict[str, str]) -> Sequence[str]:
        """The same command once more; a run that was begun goes on, and what is whole already is replaced."""
        settings = self.made / "training" / "settings.json"
        if settings.is_file() and not json.loads(settings.read_text()).get("finished"):
            return [*verb.words, "--resume"]
        is_whole = self._state(old, whole) == "new" or settings.is_file()
        may_replace = "--overwrite" in verb.words or verb.is_in_place or verb.words[0] == "plan"
        return [*verb.words, "--overwrite"] if is_whole and not may_replace else verb.words

    def _state(self, old: dict[str, str] | None, whole: dict[str, str]) -> str:
        if not self.made.exists():
            return "absent"
        content = _content(self.made)
        return "new" if content == whole else "old" if content == old else "neither"

    def _after(self, verb: Verb, stderr: str, old: dict[str, str] | None, whole: dict[str, str]) -> Iterator[str]:
        if digests(self.place / "in") != self.inputs:
            yield "an input was changed"
        if "Traceback" in stderr:
            yield f"a traceback: {stderr[-500:]}"
        state = self._state(old, whole)
        if state == "neither" and not (verb.is_in_place or "train" in verb.words):
            yield "the output is neither absent nor whole"
        if state == "new" and whole != old and "not written" in stderr:
            yield "the output is there, and said not to be"
        if state == "absent" and old is not None and not any(map(old.__eq__, self._beside())):
            yield "the old output is lost"
        if verb.is_in_place:
            content = _content(self.made)
            yield from (
                f"{name}: is neither as before nor as after"
                for name in whole
                if content.get(name) not in (whole[name], (old or {})[name])
            )

    def _beside(self) -> Iterator[dict[str, str]]:
        return (_content(folder) for folder in (self.place / "out").glob(".made.replaced-*") if folder.is_dir())

    def _at_the_end(self, whole: dict[str, str]) -> Iterator[str]:
        if digests(self.place / "in") != self.inputs:
            yield "an input was changed by the second run"
        content = _content(self.made)
        if content != whole:
            names = sorted(name for name in {*content, *whole} if content.get(name) != whole.get(name))
            yield f"other bytes than those of an undisturbed run: {names}"
        left = sorted(file.name for file in (self.place / "out").iterdir() if file.name != self.made.name)
        if left:
            yield f"left beside the output: {left}"


def _do(place: Path, words: Sequence[str]) -> None:
    done = _run(place, words)
    assert done.returncode == 0, (words, done.stderr)


def _run(place: Path, words: Sequence[str], disturbance: Disturbance = UNDISTURBED, record: Path | None = None):
    typed = [word.replace("IN/", f"{place}/in/") if word != "OUT" else str(_target(place, words)) for word in words]
    return run_apart(run_disturbed, typed, str(place), disturbance, str(record or place / "record.json"))


def _target(place: Path, words: Sequence[str]) -> Path:
    """What a command makes: a folder, or a plan."""
    return place / "out" / ("made.json" if words[0] == "plan" else "made")


def _content(target: Path) -> dict[str, str]:
    if target.is_file():
        return {"": target.read_text()}
    hashes = digests(target)
    record = target / "surgery.json"
    expansions = json.loads(record.read_text())["expansions"] if record.is_file() else {}
    is_trained = any(expansion["training"] for expansion in expansions.values())
    return {name: digest for name, digest in hashes.items() if not (is_trained and name in TIMED)}


def _outcome(code: int) -> str:
    known = {0: "came to its end", 1: "stopped with an error", -signal.SIGKILL: "killed", -signal.SIGPROF: "killed"}
    return known.get(code, f"ended with {code}")


def torture(made: Torture, count: int, seed: int, verbs: Sequence[str]) -> tuple[Counter, list[str]]:
    """Disturb commands, so many times: how often a command was disturbed so and ended so, and every problem."""
    counts: Counter[tuple[str, str, str]] = Counter()
    problems = []
    with contextlib.suppress(KeyboardInterrupt):  # what was done until then is told
        for trial in range(count):
            # a source of its own: what others draw depends on times, which differ from run to run
            chance = random.Random(f"{seed} {trial}")
            name = chance.choices(verbs, [VERBS[verb].weight for verb in verbs])[0]
            disturbance = made.draw(name, chance)
            outcome, failures = made.disturb(name, disturbance)
            counts[name, disturbance.kind, outcome] += 1
            problems += (lines := [f"{trial}: {name}, {disturbance}: {problem}" for problem in failures])
            if lines or trial % 100 == 99:
                print(*lines, f"{trial + 1} of {count}", sep="\n", file=sys.stderr, flush=True)
    return counts, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbs", nargs="*", default=list(VERBS))
    asked = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place:
        counts, problems = torture(Torture(Path(place)), asked.count, asked.seed, asked.verbs)
    for (name, kind, outcome), number in sorted(counts.items()):
        print(f"{name:28} {kind:6} {outcome:22} {number:5}")
    print(f"{sum(counts.values())} disturbances with seed {asked.seed}, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
