"""Every verb that writes a folder, in every state in which it may find its inputs, its output and the disk.

The control of each refusal is the undisturbed run of the same verb: it is taken, and gives what all others are compared
with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import scale_surgery as s
from scale_surgery.biographies import biography, people
from scale_surgery.checkpoint import files
from scale_surgery.checkpoint.locks import locked
from scale_surgery.demo import SHIPPED_MODEL
from tests.conftest import digests, edited, flip, load, problems, shake
from tests.tiny import save_tiny

WIDE = s.Request("1-2", variant="adapt", up_width=8)
QUICK = s.Probes(max_new_tokens=0)
STEP = s.TrainingSettings(steps=1, batch_size=1, sequence_length=16)
# records hold the time of a run
TIMED = ("adopt", "train")


@dataclass(frozen=True)
class Verb:
    """How a verb is called, which folders it reads, and in which of them a changed byte is noticed, with which code."""

    call: Callable[..., object]
    reads: tuple[str, ...]
    damaged: str | None
    code: str = "folder-damaged"
    has_base_weights: bool = True


def _train(places: Path, out: Path, *, overwrite: bool = False, base_weights: Any = "auto", track: Any) -> object:
    start = s.TrainingStart(overwrite=overwrite, base_weights=base_weights)
    return s.train(places / "speaks", [places / "new.jsonl"], out, STEP, start=start, track=track)


def _merge(source: str, to: Any) -> Callable[..., object]:
    return lambda places, out, **how: s.merge(places / source, out, to, probes=QUICK, **how)


VERBS: dict[str, Verb] = {
    # of a base nothing is recorded, so nothing can be noticed
    "expand": Verb(lambda places, out, **how: s.expand(places / "base", WIDE, out, **how), ("base",), None),
    "expand a folder": Verb(
        lambda places, out, **how: s.expand(places / "wide", s.Request("0", name="law"), out, **how), ("wide",), "wide"
    ),
    "adopt": Verb(
        lambda places, out, **how: s.adopt(places / "saved", places / "wide", out, **how), ("saved", "wide"), "wide"
    ),
    "apply": Verb(
        lambda places, out, **how: s.apply(places / "extract", out, places / "base", **how),
        ("extract", "base"),
        "extract",
        "extract-file-changed",
    ),
    "compose": Verb(
        lambda places, out, **how: s.compose(places / "base", {"law": places / "extract"}, out, **how),
        ("base", "extract"),
        "base",
        "base-differs-compose",
    ),
    "extract": Verb(lambda places, out, **how: s.extract(places / "wide", out, **how), ("wide",), "wide"),
    "strip": Verb(
        lambda places, out, **how: s.strip(places / "wide", out, **how), ("wide",), "wide", "base-not-given-back"
    ),
    "route": Verb(lambda places, out, **how: s.route_export(places / "wide", out, **how), ("wide",), "wide"),
    "unroute": Verb(lambda places, out, **how: s.unroute(places / "routed", out, **how), ("routed",), "routed"),
    "fuse": Verb(_merge("wide", "fused"), ("wide",), "wide", has_base_weights=False),
    "to blocks": Verb(_merge("fused", "blocks"), ("fused",), "fused", "fused-shard-changed", has_base_weights=False),
    "to stock": Verb(_merge("grown", "stock"), ("grown",), "grown", has_base_weights=False),
    "train": Verb(_train, ("speaks",), "speaks", "expansion-changed"),
}
all_verbs = pytest.mark.parametrize("name", VERBS)


class Undisturbed(NamedTuple):
    """What a verb wrote, how often it moved a bar before its folder got its name, and what it opened for writing."""

    written: dict[str, str]
    moves: int
    opened: list[str]


class Moves:
    """Progress bars that count their moves, and do something at one of them, or at the first at which a thing is so."""

    def __init__(
        self, at: int = 0, then: Callable[[], None] = lambda: None, when: Callable[[], object] = lambda: False
    ) -> None:
        self.count, self.at, self.then, self.when = 0, at, then, when

    @contextlib.contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[..., None]]:
        yield self.move

    def move(self, done: int, note: object = "") -> None:
        self.count += 1
        if self.count == self.at or self.when():
            self.then()


def interrupt() -> None:
    raise KeyboardInterrupt


def content(folder: Path, name: str) -> dict[str, str]:
    """Digests of a folder's files but for logs, and for the record where it holds the time."""
    left = ("training/", "surgery.json") if name in TIMED else ("training/",)
    return {file: digest for file, digest in digests(folder).items() if not file.startswith(left)}


WATCHED: list[list[tuple[str, str]]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note files that are opened for writing, removed or renamed while somebody watches; a hook stays for good."""
    if WATCHED:
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            WATCHED[-1].append((event, arguments[0]))
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime"):
            WATCHED[-1].append((event, str(arguments[0])))


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """List what is opened for writing meanwhile."""
    WATCHED.append([])
    try:
        yield WATCHED[-1]
    finally:
        WATCHED.pop()


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that verbs read, of small models."""
    made = tmp_path_factory.mktemp("places")
    save_tiny(made / "base", "llama", tie_word_embeddings=True)
    s.expand(made / "base", WIDE, made / "wide")
    load(made / "wide").save_pretrained(made / "saved", max_shard_size="50KB")
    s.extract(made / "wide", made / "extract")
    s.route_export(made / "wide", made / "routed")
    s.merge(made / "wide", made / "fused", "fused", probes=QUICK)
    shake(s.expand(made / "base", s.Request("1", method="grow"), made / "grown").path)
    s.expand(SHIPPED_MODEL, s.Request("3", variant="adapt", up_width=8), made / "speaks")
    texts = (json.dumps({"text": biography(person)}) + "\n" for person in people(4, start=400))
    (made / "new.jsonl").write_text("".join(texts), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def undisturbed(places: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """What a verb does when nothing stands in its way."""

    @functools.cache
    def run(name: str) -> Undisturbed:
        out, moves = tmp_path_factory.mktemp("undisturbed") / "out", Moves()
        with watching() as opened:
            VERBS[name].call(places, out, track=moves)
        return Undisturbed(content(out, name), moves.count, [f"{event} {file}" for event, file in opened])

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The output, in a folder of its own."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"


def refused(name: str, places: Path, out: Path, **how: Any) -> list[str]:
    """The codes of the problems for which a verb is refused; nothing is written or left."""
    before = sorted(out.parent.iterdir())
    found = problems(VERBS[name].call, places, out, track=Moves(), **how)
    assert sorted(out.parent.iterdir()) == before
    return [problem.code for problem in found]


def copies(name: str, places: Path, to: Path) -> Path:
    """Copy the inputs of a verb, to be changed."""
    for folder in VERBS[name].reads:
        shutil.copytree(places / folder, to / folder)
    shutil.copy(places / "new.jsonl", to)
    return to


@all_verbs
def test_inputs_stay_as_they_are(name: str, places: Path, undisturbed: Any) -> None:
    before = {folder: digests(places / folder) for folder in VERBS[name].reads}
    done = undisturbed(name)
    assert {folder: digests(places / folder) for folder in VERBS[name].reads} == before
    assert done.written and done.opened, "the control: something was written"
    assert [line for line in done.opened if f" {places}" in line] == [], "not even opened for writing"


@all_verbs
def test_read_only_inputs_are_enough(name: str, places: Path, undisturbed: Any, out: Path, tmp_path: Path) -> None:
    copied = copies(name, places, tmp_path / "copied")
    closed = [*copied.rglob("*"), copied]
    for path in closed:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        VERBS[name].call(copied, out, track=Moves())
    finally:
        for path in closed:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert content(out, name) == undisturbed(name).written
    assert all(os.access(file, os.W_OK) and file.stat().st_mode & 0o200 for file in out.rglob("*")), "the output is not"


@all_verbs
def test_an_interrupted_run_leaves_nothing_under_its_name_and_continues(
    name: str, places: Path, undisturbed: Any, out: Path
) -> None:
    done, before = undisturbed(name), {folder: digests(places / folder) for folder in VERBS[name].reads}

    def finished(folder: Path) -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}

    left = out.with_name("out.partial")
    with pytest.raises(KeyboardInterrupt):
        VERBS[name].call(places, out, track=Moves(then=interrupt, when=lambda: finished(left)))
    shards = finished(left)
    assert shards and not out.exists()
    assert {folder: digests(places / folder) for folder in VERBS[name].reads} == before
    VERBS[name].call(places, out, track=Moves())
    assert content(out, name) == done.written
    assert shards.items() <= finished(out).items(), "a finished shard is not made again"
    assert [file.name for file in out.parent.iterdir()] == ["out"], "nothing is left beside it"


@all_verbs
def test_an_occupied_target_stays_until_it_may_be_replaced(
    name: str, places: Path, undisturbed: Any, out: Path
) -> None:
    shutil.copytree(places / "base", out)
    before = digests(out)
    assert refused(name, places, out) == ["output-exists"] and digests(out) == before
    with pytest.raises(KeyboardInterrupt):
        VERBS[name].call(places, out, overwrite=True, track=Moves(2 if name == "train" else 1, interrupt))
    assert digests(out) == before, "it is replaced when the new one is whole"
    VERBS[name].call(places, out, overwrite=True, track=Moves())
    assert content(out, name) == undisturbed(name).written


@all_verbs
def test_no_input_is_written_into(name: str, places: Path) -> None:
    for folder in VERBS[name].reads:
        before = digests(places / folder)
        for out in (places / folder, places / folder / "inside"):
            found = problems(VERBS[name].call, places, out, overwrite=True, track=Moves())
            assert {problem.code for problem in found} == {"output-touches-input"}
        assert digests(places / folder) == before


@all_verbs
def test_a_link_beside_the_output_is_refused(name: str, places: Path, out: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    out.with_name("out.partial").symlink_to(elsewhere)
    assert refused(name, places, out) == ["link-not-ours"]
    assert list(elsewhere.iterdir()) == []


@all_verbs
def test_a_full_disk_is_noticed_before_any_work(
    name: str, places: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=0))
    # a disk that shares no blocks copies by default
    monkeypatch.setattr(files, "_reflink", lambda source, file: False)
    for how in ("copy", "auto") if VERBS[name].has_base_weights else (None,):
        given = {} if how is None else {"base_weights": how}
        assert refused(name, places, out, **given) == ["output-without-space"], how


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.damaged is not None])
def test_a_damaged_input_is_refused(name: str, places: Path, out: Path, tmp_path: Path) -> None:
    copied, verb = copies(name, places, tmp_path / "copied"), VERBS[name]
    (shard, *_) = sorted((copied / str(verb.damaged)).glob("[!e]*.safetensors")) or sorted(
        (copied / str(verb.damaged)).glob("*.safetensors")
    )
    flip(shard)
    if name == "strip":
        # what was laid out stays, so that a second run need not take it over again
        (problem,) = problems(verb.call, copied, out, track=Moves())
        assert (problem.code, out.exists()) == (verb.code, False)
    else:
        assert refused(name, copied, out) == [verb.code]


# of a base and an extract other things are recorded, and `strip` looks at the base alone
TAKERS = [name for name in VERBS if name not in ("expand", "apply", "compose", "strip")]


def _change_config(folder: Path) -> None:
    with edited(folder / "config.json") as config:
        config["rms_norm_eps"] = 0.5


def _forge_hash(folder: Path) -> None:
    with edited(folder / "surgery.json") as record:
        record["base_tensors"]["model.norm.weight"]["sha256"] = "0" * 64


# where a problem is named, and how it comes about
DAMAGE: dict[str, Callable[[Path], object]] = {
    "generation_config.json": lambda folder: (folder / "generation_config.json").write_text("{}"),
    "config.json: rms_norm_eps": _change_config,
    "other.py": lambda folder: (folder / "other.py").write_text("print()"),
    "model.norm.weight": _forge_hash,
}


@pytest.mark.parametrize("name", TAKERS)
def test_all_that_is_damaged_is_named_at_once(name: str, places: Path, out: Path, tmp_path: Path) -> None:
    copied = copies(name, places, tmp_path / "copied")
    # what a training loop saved is compared with the record before the folder is
    named = [where for where in DAMAGE if (name, where) != ("adopt", "model.norm.weight")]
    for where in named:
        DAMAGE[where](copied / str(VERBS[name].damaged))
    found = problems(VERBS[name].call, copied, out, track=Moves())
    message = str(s.CheckpointError(*found))
    assert all(where in message for where in named), message
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("name", [*TAKERS, "apply", "compose"])
def test_code_that_lies_elsewhere_is_refused(name: str, places: Path, out: Path, tmp_path: Path) -> None:
    """With the bytes that it had: such a link is never taken along."""
    copied = copies(name, places, tmp_path / "copied")
    folder = str(VERBS[name].damaged) if name in TAKERS else "extract"
    code = copied / folder / "expanded_stock.py"
    shutil.move(code, tmp_path / "outside.py")
    code.symlink_to(tmp_path / "outside.py")
    assert refused(name, copied, out) == ["file-is-link"]


@pytest.mark.parametrize(
    ("name", "folder"),
    # `strip` compares what it wrote with the record
    [(name, folder) for name, verb in VERBS.items() if name != "strip" for folder in verb.reads],
)
def test_an_input_that_changes_at_the_last_moment_is_noticed(
    name: str, folder: str, places: Path, undisturbed: Any, out: Path, tmp_path: Path
) -> None:
    copied = copies(name, places, tmp_path / "copied")
    shard = max((copied / folder).glob("*.safetensors"), key=lambda file: file.stat().st_size)
    # the first moves of a training are those of its folder
    at = 2 if name == "train" else undisturbed(name).moves
    (problem,) = problems(VERBS[name].call, copied, out, track=Moves(at, lambda: flip(shard)))
    assert (problem.code, problem.where) == ("file-changed", f"{shard}")
    assert not out.exists()


@all_verbs
def test_two_at_a_time_do_not_write_one_target(name: str, places: Path, out: Path) -> None:
    with locked(out):
        assert [problem.code for problem in problems(VERBS[name].call, places, out, track=Moves())] == ["output-busy"]
    assert not out.exists()
