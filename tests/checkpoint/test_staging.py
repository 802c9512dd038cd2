"""Writing folders and files: whole or absent, with the right modes, and taking files over as files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from scale_surgery.checkpoint import files
from scale_surgery.checkpoint.file_stat import check_unchanged, take_stamps
from scale_surgery.checkpoint.files import (
    UNFINISHED,
    finished_file,
    makes_links,
    take_over,
    unfinished_prefix,
    way_to,
    write_json,
    write_tensors,
    write_text,
)
from scale_surgery.checkpoint.locks import locked, locked_scratch
from scale_surgery.checkpoint.staging import check_space, check_target, output_file_problems, staged, touches
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.learning.recipe import make_recipe
from scale_surgery.learning.stages import Work
from tests.conftest import digests, problems, refused

# what a writer that was killed leaves
LEFT = f"{UNFINISHED}x1y2z3"


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "folder" / "out.v1-x"
    with staged(target, {}, overwrite=False) as partial:
        assert partial.name == "out.v1-x.partial"
        write_text(partial / "sub" / "a.txt", "a")
        assert not target.exists()
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*")) == ["sub", "sub/a.txt"]
    assert [path.name for path in target.parent.iterdir()] == ["out.v1-x"]


def test_another_state_starts_clean_and_the_same_goes_on(tmp_path):
    def interrupted(state: dict) -> list[str]:
        with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out", state, overwrite=False) as partial:
            names = sorted(path.name for path in partial.iterdir())
            (partial / "finished").write_text("x")
            (partial / LEFT).mkdir()
            (partial / LEFT / "half").write_text("x")
            raise KeyboardInterrupt
        return names

    assert interrupted({"a": 1}) == []
    assert interrupted({"a": 1}) == ["finished"]
    assert interrupted({"a": 2}) == []
    assert interrupted({"a": 2}) == ["finished"]
    (tmp_path / ".out.partial.json").write_text("{")
    assert interrupted({"a": 2}) == []


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    """A writer has a folder of its own for each file, in which safetensors puts one more; others may end in .tmp."""
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "made", {}, overwrite=False) as partial:
        (partial / "sub" / LEFT).mkdir(parents=True)
        (partial / "sub" / LEFT / ".tmpvZVzs1").write_text("half")
        for name in (".template", ".tmpvZVzs1", "sub/notes.tmp"):
            (partial / name).write_text("theirs")
        raise ZeroDivisionError
    with staged(tmp_path / "made", {}, overwrite=False) as partial:
        assert sorted(digests(partial)) == [".template", ".tmpvZVzs1", "sub/notes.tmp"]
        assert not (partial / "sub" / LEFT).exists()


@pytest.mark.parametrize("name", (".out.partial.json", ".out.replaced.json"))
def test_what_a_run_left_beside_its_output_goes_with_the_next(tmp_path, monkeypatch, name):
    """A kill, or a disk that is read-only from then on, while a file beside the output is written."""
    replace = Path.replace

    def fail(file: Path, target: Path) -> None:
        if Path(target).name == name:
            monkeypatch.setattr(shutil, "rmtree", lambda *paths, **options: None)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
        replace(file, target)

    (tmp_path / "out").mkdir()
    for other in (tmp_path / "page.html", tmp_path / ".other.partial.json"):
        (tmp_path / f"{unfinished_prefix(other)}x1y2z3").mkdir()
    others = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "replace", fail)
    with refused("output-unwritten", tmp_path / "out"), staged(tmp_path / "out", {}, overwrite=True):
        pass
    monkeypatch.undo()
    (left,) = tmp_path.glob(f"{unfinished_prefix(tmp_path / name)}*")
    assert (left / name).is_file()
    with staged(tmp_path / "out", {}, overwrite=True):
        assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == others, "those of other files are other processes'"


def test_a_scratch_folder_is_one_outputs_and_is_cleaned(tmp_path):
    with locked_scratch(tmp_path / "out") as folder:
        (folder / "shard").write_text("x")
        with refused("output-busy", tmp_path / "out"), locked_scratch(tmp_path / "out"):
            pass
        with locked_scratch(tmp_path / "other") as other:
            assert other != folder
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    (folder / "shard").write_text("half, of a run that was killed")
    with locked_scratch(tmp_path / "out") as again:
        assert again == folder and list(again.iterdir()) == []
    folder.symlink_to(tmp_path)
    with refused("link-not-ours", folder), locked_scratch(tmp_path / "out"):
        pass


def test_an_error_calls_a_file_by_its_own_name(tmp_path, refuse_to_write):
    refuse_to_write(tmp_path / "page.html")
    with pytest.raises(OSError, match=rf"^\[Errno 5\] Input/output error: '{tmp_path}/page\.html'$"):
        write_text(tmp_path / "page.html", "x")
    assert list(tmp_path.iterdir()) == []


def test_texts_keep_their_line_ends_and_json_its_letters(tmp_path):
    write_text(tmp_path / "a", "one\r\ntwo\n\x00é")
    assert (tmp_path / "a").read_bytes() == "one\r\ntwo\n\x00é".encode()
    write_json(tmp_path / "b", {"ü": [1, 1e-5]})
    assert (tmp_path / "b").read_text(encoding="utf-8") == '{\n  "ü": [\n    1,\n    1e-05\n  ]\n}\n'


def test_a_file_that_fails_keeps_the_old_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), finished_file(file) as temporary:
        temporary.write_text("new, half")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    write_text(file, "new")
    assert file.read_text() == "new"


def test_the_longest_name_leaves_room_for_no_ending(tmp_path):
    for name in ("x" * 255, "\u00fc" * 127):
        write_text(tmp_path / name, "a")
        assert (tmp_path / name).read_text() == "a"
    assert len(list(tmp_path.iterdir())) == 2


def test_tensors_are_readable_by_others(tmp_path):
    """safetensors itself writes files that only their owner can read."""
    old = os.umask(0o022)
    try:
        write_tensors(tmp_path / "a.safetensors", {"w": torch.ones(3)})
    finally:
        os.umask(old)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o644
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], torch.ones(3))


@pytest.mark.parametrize(("how", "is_shared"), (("auto", False), ("copy", False), ("link", True)))
def test_taking_a_file_over(tmp_path, how, is_shared):
    (tmp_path / "blob").write_bytes(b"bytes")
    (tmp_path / "blob").chmod(0o444)
    (tmp_path / "source").symlink_to("blob")
    file = tmp_path / "sub" / "a.safetensors"
    take_over(tmp_path / "source", file, how)
    assert file.read_bytes() == b"bytes"
    assert not file.is_symlink()
    assert file.samefile(tmp_path / "blob") == is_shared
    assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o444, "the mode of the input is not ours to change"
    assert [path.name for path in file.parent.iterdir()] == ["a.safetensors"]
    # small files are never shared: programs edit them in place
    take_over(tmp_path / "source", tmp_path / "sub" / "config.json", how)
    assert not (tmp_path / "sub" / "config.json").samefile(tmp_path / "blob")


@pytest.mark.parametrize("how", ("auto", "copy", "link"))
def test_taking_over_says_how_far_it_is_and_gives_the_whole_file(tmp_path, monkeypatch, how):
    monkeypatch.setattr(files, "COPIED_AT_ONCE", 4096)
    (tmp_path / "source.safetensors").write_bytes(content := os.urandom(3 * 4096 + 1))
    (tmp_path / "a.safetensors").write_bytes(b"of another size")
    for is_there in (False, True):
        done: list[int] = []

        def advance(bytes_: int, done: list[int] = done) -> None:
            done.append(bytes_)
            assert sum(done) < 3 * 4096 + 1 or (tmp_path / "a.safetensors").is_file(), "done is what has its name"

        take_over(tmp_path / "source.safetensors", tmp_path / "a.safetensors", how, advance)
        assert sum(done) == 3 * 4096 + 1
        assert (tmp_path / "a.safetensors").read_bytes() == content
        assert how != "copy" or len(done) == (1 if is_there else 4), "block by block, where there is something to copy"


def test_a_copy_that_fails_names_both_files(tmp_path):
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(OSError, match="Is a directory") as error:
        files._copy(tmp_path / "source", tmp_path, 1, lambda bytes_: None)
    assert (error.value.filename, error.value.filename2) == (str(tmp_path / "source"), str(tmp_path))


def test_a_link_to_another_file_system_says_so(tmp_path, monkeypatch):
    def refuse(*ignored):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "source").write_bytes(b"x")
    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    assert problems(take_over, source, tmp_path / "a.safetensors", "link", error=CheckpointError) == [
        Problem("hard-link-failed", source, folder=tmp_path, error="Invalid cross-device link")
    ]
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EDQUOT))
def test_a_full_disk_says_what_helps(tmp_path, number):
    with (
        refused("output-disk-full", tmp_path / "out", CheckpointError),
        staged(tmp_path / "out", {}, overwrite=False) as partial,
    ):
        raise OSError(number, os.strerror(number), str(partial / "x"))
    assert not (tmp_path / "out").exists()


def test_what_is_replaced_is_a_model(tmp_path):
    """Other programs call their files config.json too."""
    (target := tmp_path / "project").mkdir()
    for config in ("{}", "[", '{"auths": {}}'):
        (target / "config.json").write_text(config)
        assert problems(check_target, target, [], overwrite=True) == [Problem("output-no-model", target)]
    (target / "config.json").write_text('{"model_type": "llama"}')
    check_target(target, [], overwrite=True)


def test_a_folder_that_another_process_trains_is_not_replaced(tmp_path):
    """Who holds its lock goes on writing it, and may begin it anew."""
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        with (
            refused("output-busy", tmp_path / "run"),
            staged(tmp_path / "run", {}, overwrite=True),
        ):
            pass
        with staged(tmp_path / "run", {}, overwrite=True, is_locked=True) as partial:
            (partial / "new").write_text("x")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["new"]


def test_a_target_that_cannot_be_reached(tmp_path):
    # with `.partial.json` it is longer than names can be
    target = tmp_path / ("x" * 245)
    assert problems(check_target, target, [], overwrite=False, error=CheckpointError) == [
        Problem("path-unreachable", target, error="File name too long")
    ]


def test_several_problems_of_a_target(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("x")
    source = tmp_path / "source"
    assert problems(check_target, source / "file", [source], overwrite=True, error=CheckpointError) == [
        Problem("output-touches-input", source / name, input=source) for name in ("file", "file.partial")
    ]
    check_target(tmp_path / "other" / "deep", [tmp_path / "source"], overwrite=False)
    # a name that only begins like the source's
    check_target(tmp_path / "source-2", [tmp_path / "source"], overwrite=False)


def test_a_refusal_leaves_nothing(tmp_path):
    """What was refused has to change before a next run; what checks every file by a hash may keep it."""
    for keeps in (False, True):
        with (
            pytest.raises(CheckpointError),
            staged(tmp_path / "out", {}, overwrite=False, keeps_refused=keeps) as partial,
        ):
            (partial / "file").write_text("x")
            raise CheckpointError(Problem("interrupted"))
        assert partial.exists() is (tmp_path / ".out.partial.json").exists() is keeps


@pytest.mark.parametrize(
    ("code", "stays"), (("out-of-memory", True), ("file-unreadable", True), ("file-changed", False))
)
def test_what_a_machine_refused_goes_on(tmp_path: Path, code: str, stays: bool) -> None:
    """A model that did not fit on a device is whole on the disk: another device may measure it."""
    with pytest.raises(CheckpointError), staged(tmp_path / "out", {}, overwrite=False) as partial:
        (partial / "shard").write_text("x")
        raise CheckpointError(Problem(code))
    assert partial.exists() is stays
    with staged(tmp_path / "out", {}, overwrite=False) as partial:
        assert (partial / "shard").exists() is stays


def test_a_disk_that_does_not_answer_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "shard").write_text("x")
    stamps, stat = take_stamps([file]), Path.stat

    def answer(error: OSError) -> Callable[..., os.stat_result]:
        def asked(path: Path, **options: Any) -> os.stat_result:
            if path == file:
                raise error
            return stat(path, **options)

        return asked

    for number, code in ((errno.ESTALE, "file-unreadable"), (errno.ENOENT, "file-changed")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", answer(OSError(number, os.strerror(number), str(file))))
            assert [problem.code for problem in problems(check_unchanged, stamps, error=CheckpointError)] == [code]
    check_unchanged(stamps)


def test_room_is_counted_with_what_an_unfinished_run_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10))
    partial = tmp_path / "out.partial"
    partial.mkdir()
    check_space(tmp_path / "out", 10)
    with refused("output-without-space", tmp_path / "out", CheckpointError):
        check_space(tmp_path / "out", 15)
    (partial / "shard").write_bytes(b"12345")
    check_space(tmp_path / "out", 15)
    # bytes that another folder has, too, are not freed
    os.link(partial / "shard", tmp_path / "shard")
    with refused("output-without-space", tmp_path / "out", CheckpointError):
        check_space(tmp_path / "out", 15)


@pytest.mark.parametrize("shares", (True, False))
def test_the_way_of_a_file_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    (source := tmp_path / "source").write_bytes(b"x")
    monkeypatch.setattr(files, "_reflink", lambda source, file: shares)
    target = tmp_path / "new" / "out"
    assert way_to(target, source, "auto") == ("auto" if shares else "copy")
    assert (way_to(target, source, "copy"), way_to(target, source, "link")) == ("copy", "link")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    elsewhere, stat = source.stat(), Path.stat
    other = os.stat_result((*elsewhere[:2], elsewhere.st_dev + 1, *elsewhere[3:]))
    monkeypatch.setattr(Path, "stat", lambda path, **options: other if path == source else stat(path, **options))
    assert problems(way_to, target, source, "link", error=CheckpointError) == [
        Problem("hard-link-failed", source, folder=tmp_path, error="Invalid cross-device link")
    ]


@pytest.mark.parametrize("name", (".", "../job/inside/.."))
def test_a_folder_that_is_named_by_dots_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder := tmp_path / "job").mkdir()
    (folder / "inside").mkdir()
    monkeypatch.chdir(folder)
    with locked(Path(name)), refused("output-busy", folder, CheckpointError), locked(folder):
        pass


def test_a_disk_without_hard_links_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "new" / "job"
    recipe = make_recipe({"model": "m", "data": "d"})
    assert makes_links(place) and Work(recipe, place, False).taking == "link"

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert not makes_links(place) and Work(recipe, place, False).taking == "copy"
    linked = make_recipe({"model": "m", "data": "d", "base_weights": "link"})
    assert Work(linked, place, False).taking == "link", "what is asked for is not replaced"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", (OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")))
def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def acquire(lock: Any) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with refused("disk-without-locks", tmp_path / "out", CheckpointError), locked(tmp_path / "out"):
        pass


def test_an_input_is_known_by_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system ignores case, or is mounted twice, resolve() leaves two spellings of one place."""
    model, alias = tmp_path / "Model", tmp_path / "model"
    (model / "inside").mkdir(parents=True)
    alias.symlink_to(model)
    monkeypatch.setattr(Path, "resolve", Path.absolute)
    for output in (alias, alias / "inside", alias / "new" / "deeper"):
        assert touches(output, model), output
        assert output_file_problems([output / "file.json"], [model])[:1] == [
            Problem("output-file-is-input", output / "file.json", input=str(model))
        ]
    assert touches(tmp_path, alias)
    assert not touches(tmp_path / "other", model), "the control"
    assert not output_file_problems([tmp_path / "file.json"], [model])
