"""Symbolic links: those that lead out of a model's folder are named and stay, and none beside an output is followed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.locks import locked
from scale_surgery.checkpoint.staging import check_output_files, staged
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.verify import verify
from scale_surgery.planning.request import Request
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from tests.conftest import digests, problems, refused
from tests.each import woven

REQUEST = Request("1", variant="adapt", up_width=0)
LINKS = ("notes.txt", "sub/notes.txt", "elsewhere", "nowhere")


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file outside of every model folder, in a folder of its own."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("key")
    return tmp_path / "outside" / "secret"


def plant(folder: Path, secret: Path) -> None:
    """Put links into a folder: two to a file outside, one to a folder, one to nothing, and one that stays inside."""
    (folder / "sub").mkdir()
    (folder / "notes.txt").symlink_to(secret)
    (folder / "sub" / "notes.txt").symlink_to(os.path.relpath(secret, folder / "sub"))
    (folder / "elsewhere").symlink_to(secret.parent)
    (folder / "nowhere").symlink_to(secret.parent / "nothing")
    (folder / "again.json").symlink_to("generation_config.json")


def test_links_out_of_the_base_stay_behind_and_are_named(llama_base, tmp_path, secret):
    plant(llama_base, secret)
    done = expand(llama_base, REQUEST, tmp_path / "expanded")
    assert set(done.left_out) == set(LINKS)
    assert not set(LINKS) & set(digests(done.path))
    assert (done.path / "again.json").read_bytes() == (llama_base / "generation_config.json").read_bytes()
    assert verify(done.path, probes=None).passed
    assert set(strip(done.path, tmp_path / "back").left_out) == set(LINKS)
    taken = extract(done.path, tmp_path / "extract").path
    assert set(apply(taken, tmp_path / "applied", llama_base).left_out) == set(LINKS)
    assert digests(tmp_path / "applied") == digests(done.path)


VERBS = {
    "route-export": route_export,
    "extract": extract,
    "fused": lambda expanded, output: merge(expanded, output, "fused"),
    "stock": lambda expanded, output: merge(expanded, output, "stock"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_links_out_of_an_expanded_model_stay_behind_and_are_named(pair_of, tmp_path, secret, verb):
    expanded = Path(shutil.copytree(pair_of("llama", "adapt_without_up_stream").path, tmp_path / "expanded"))
    plant(expanded, secret)
    done = VERBS[verb](expanded, tmp_path / "out")
    # a link that stays inside is copied or, as no file of the base, named too
    others = {"again.json"} - set(digests(done.path))
    assert set(done.left_out) == set(LINKS) | others
    assert not set(LINKS) & set(digests(done.path))
    assert "key" not in [file.read_text(errors="replace") for file in done.path.rglob("*") if file.is_file()]


def test_a_file_that_surgery_json_names_may_be_no_such_link(pair_of, tmp_path, secret):
    expanded = Path(shutil.copytree(pair_of("llama", "adapt_without_up_stream").path, tmp_path / "expanded"))
    (expanded / "generation_config.json").unlink()
    (expanded / "generation_config.json").symlink_to(secret)
    for call in VERBS.values():
        with refused("file-is-link", "generation_config.json", CheckpointError):
            call(expanded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def taken(base_of, tmp_path_factory):
    """The extract of an expansion of the tiny llama."""
    place = tmp_path_factory.mktemp("taken")
    return extract(expand(base_of("llama"), REQUEST, place / "expanded").path, place / "extract").path


PARTS = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json", "own_code.py")


@pytest.mark.parametrize(("name", "to"), woven(PARTS, ("outside/secret", "outside/nothing")))
def test_a_part_of_the_base_may_be_no_such_link(llama_base, taken, tmp_path, secret, name, to):
    """Without its tokenizer the result would be of no use, and what such a link leads to may be anybody's."""
    (llama_base / name).unlink(missing_ok=True)
    (llama_base / name).symlink_to(tmp_path / to)
    calls = (
        lambda: expand(llama_base, REQUEST, tmp_path / "out"),
        lambda: compose(llama_base, [taken], tmp_path / "out"),
        lambda: apply(taken, tmp_path / "out", llama_base),
    )
    for call in calls:
        assert problems(call, error=CheckpointError) == [Problem("file-is-link", name, folder=llama_base)]
    assert not (tmp_path / "out").exists() and secret.read_text() == "key"
    (llama_base / name).unlink()
    (llama_base / "real").write_bytes((llama_base / "config.json").read_bytes())
    (llama_base / name).symlink_to("real")
    assert (expand(llama_base, REQUEST, tmp_path / "out").path / name).is_file(), "one that stays inside is followed"


@pytest.mark.parametrize("verb", VERBS)
def test_a_part_that_came_after_the_expansion_may_be_no_such_link(pair_of, tmp_path, secret, verb):
    expanded = Path(shutil.copytree(pair_of("llama", "adapt_without_up_stream").path, tmp_path / "expanded"))
    (expanded / "chat_template.jinja").symlink_to(secret)
    with refused("file-is-link", "chat_template.jinja", CheckpointError):
        VERBS[verb](expanded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ("auto", "copy"))
def test_weights_and_config_may_lie_on_another_disk(llama_base, tmp_path, how):
    """People keep large files elsewhere: these two are a model's own wherever they lie, and become files."""
    before = digests(llama_base)
    (tmp_path / "disk").mkdir()
    for name in ("model.safetensors", "config.json"):
        (llama_base / name).rename(tmp_path / "disk" / name)
        (llama_base / name).symlink_to(tmp_path / "disk" / name)
    done = expand(llama_base, REQUEST, tmp_path / "expanded", base_weights=how)
    assert done.left_out == ()
    assert not [file for file in done.path.rglob("*") if file.is_symlink()]
    assert digests(strip(done.path, tmp_path / "back").path) == before


def test_a_snapshot_of_the_hubs_cache_is_taken_whole(base_of, tmp_path):
    snapshot, blobs = tmp_path / "models--me--wide" / "snapshots" / "abc", tmp_path / "models--me--wide" / "blobs"
    shutil.copytree(base_of("llama"), blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert open_checkpoint(snapshot).left_out == ()
    assert digests(strip(expand(snapshot, REQUEST, tmp_path / "out").path, tmp_path / "back").path) == digests(snapshot)


NEEDED = ("made.partial", ".made.partial.json", ".made.lock", ".made.replaced.json")


@pytest.mark.parametrize("to", ("secret", "nothing", "."))
@pytest.mark.parametrize("name", NEEDED)
def test_a_link_beside_the_output_is_refused_before_any_work(llama_base, tmp_path, secret, name, to):
    """Also one that leads to nothing: what is written through it would appear there."""
    (tmp_path / name).symlink_to(secret.parent / to)
    with refused("link-not-ours", tmp_path / name, CheckpointError):
        expand(llama_base, REQUEST, tmp_path / "made")
    assert secret.read_text() == "key"
    assert [file.name for file in secret.parent.iterdir()] == ["secret"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["base", "outside", name])


@pytest.mark.parametrize("name", NEEDED)
def test_a_link_that_appears_after_the_check_is_not_followed_either(tmp_path, secret, name):
    (tmp_path / name).symlink_to(secret)
    with (
        refused("link-not-ours", tmp_path / name, CheckpointError),
        staged(tmp_path / "made", {}, overwrite=False),
    ):
        pass
    assert secret.read_text() == "key"
    assert not (tmp_path / "made").exists()


def test_a_lock_that_is_not_ours_stays(tmp_path):
    (tmp_path / ".made.lock").write_text("somebody's")
    with refused("lock-not-ours", tmp_path / ".made.lock", CheckpointError), locked(tmp_path / "made"):
        pass
    assert (tmp_path / ".made.lock").read_text() == "somebody's"
    (tmp_path / ".made.lock").write_text("")
    with locked(tmp_path / "made"):
        pass
    assert not (tmp_path / ".made.lock").exists(), "an empty one is what a killed run leaves"


def test_a_temporary_name_is_nobody_elses(tmp_path, secret):
    """Whatever a file beside the output is called, it stays; also a link by which another would be written."""
    (tmp_path / "page.html.tmp").write_text("theirs")
    (tmp_path / ".page.html.tmp").symlink_to(secret)
    (tmp_path / "page.html").symlink_to(secret)
    check_output_files([tmp_path / "page.html"], [])
    for _ in range(2):
        write_text(tmp_path / "page.html", "x")
    assert (tmp_path / "page.html.tmp").read_text() == "theirs" and (tmp_path / ".page.html.tmp").is_symlink()
    assert secret.read_text() == "key"
    assert (tmp_path / "page.html").read_text() == "x" and not (tmp_path / "page.html").is_symlink()
    assert len(list(tmp_path.iterdir())) == 4, "nothing else is left"


# what a run with --overwrite leaves when it is killed between the two renames


def put_aside(tmp_path: Path) -> Path:
    """The folder that was to be replaced is aside; the new one lies beside it as `new`."""
    target, old, new = tmp_path / "made", tmp_path / ".made.replaced-00000000", tmp_path / "new"
    for folder in (target, new):
        folder.mkdir()
    (target / "config.json").write_text("{}")
    inodes = {"inode": target.stat().st_ino, "new": new.stat().st_ino}
    (tmp_path / ".made.replaced.json").write_text(json.dumps({"folder": old.name, **inodes}), encoding="utf-8")
    target.rename(old)
    return target


@pytest.mark.parametrize("is_new_there", (False, True))
def test_a_run_after_an_interrupted_overwrite_leaves_nothing_of_it(tmp_path, is_new_there):
    target = put_aside(tmp_path)
    (tmp_path / "new").rename(target) if is_new_there else (tmp_path / "new").rmdir()
    if not is_new_there:
        with refused("output-put-back", target, CheckpointError), staged(target, {}, overwrite=False):
            pass
    with staged(target, {}, overwrite=True) as partial:
        (partial / "new").write_text("x")
        assert (target / "config.json").is_file() != is_new_there, "the old one is back until the new one is whole"
    assert [file.name for file in tmp_path.iterdir()] == ["made"]
    assert [file.name for file in target.iterdir()] == ["new"]


def test_what_was_put_aside_stays_where_something_else_took_its_place(tmp_path):
    """After a kill between the two renames somebody put another folder there: nothing of ours replaced the old one."""
    target = put_aside(tmp_path)
    target.mkdir()
    (target / "mine").write_text("x")
    with (
        refused("output-replaced", target, CheckpointError),
        staged(target, {}, overwrite=True),
    ):
        pass
    assert (tmp_path / ".made.replaced-00000000" / "config.json").is_file() and (target / "mine").is_file()


@pytest.mark.parametrize(
    "record",
    (
        None,
        {"folder": ".made.replaced-theirs", "inode": 1},
        {"folder": ".made.replaced-theirs/../precious", "inode": "own"},
        {"folder": "precious", "inode": "own"},
        {"folder": ".made.replaced-link", "inode": "own"},
        {},
    ),
)
def test_a_folder_that_merely_has_such_a_name_stays(tmp_path, secret, record):
    precious = tmp_path / "precious"
    for folder in (precious, tmp_path / ".made.replaced-theirs"):
        folder.mkdir()
        (folder / "file").write_text("x")
    (tmp_path / ".made.replaced-link").symlink_to(precious)
    if record is not None:
        if record.get("inode") == "own":
            record["inode"] = (tmp_path / record["folder"]).stat().st_ino
        (tmp_path / ".made.replaced.json").write_text(json.dumps(record))
    with staged(tmp_path / "made", {}, overwrite=True):
        pass
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == [".made.replaced-link", ".made.replaced-theirs", "made", "outside", "precious"]
    assert (precious / "file").is_file() and secret.is_file()
    assert (tmp_path / ".made.replaced-theirs" / "file").is_file()


@pytest.mark.parametrize("left", ("lock", "state"))
def test_what_cannot_be_cleaned_up_is_no_failure(tmp_path, monkeypatch, left):
    """The folder is whole and has its name: nobody is told that it was not written, and the next run cleans up."""
    unlink, stays = Path.unlink, {"lock": ".made.lock", "state": ".made.partial.json"}[left]

    def refuse(file: Path, **options: bool) -> None:
        if file.name == stays:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        unlink(file, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    with staged(tmp_path / "made", {}, overwrite=False) as partial:
        (partial / "config.json").write_text("{}")
    assert (tmp_path / "made" / "config.json").is_file() and (tmp_path / stays).is_file()
    monkeypatch.undo()
    with staged(tmp_path / "made", {}, overwrite=True):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["made"]
