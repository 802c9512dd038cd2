"""An input that changes while it is read: nothing is written, and it is named; or what was written is recorded."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scale_surgery.checkpoint.file_stat import check_unchanged
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.verify import verify
from scale_surgery.planning.request import Request
from scale_surgery.progress import Track
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from tests.conftest import digests

REQUEST = Request("0-1", variant="adapt")
DEEPENED = Request("0,2", method="depth")
MOMENTS = ("new tensors", "base shards", "base hashes")


def at(label: str, change: Callable[[], None]) -> Track:
    """A track that changes something once, when the work of that name has begun."""
    left = [change]

    @contextlib.contextmanager
    def track(name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: left.pop()() if name == label and left else None

    return track


def rewrite(file: Path) -> None:
    """Change a file in place, its last byte, or of a JSON file a blank."""
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(b" " if last == b"\n" else bytes([last[0] ^ 1]))


def rewrite_and_set_back(file: Path) -> None:
    """The same, and nobody can see it by size and time of writing."""
    before = file.stat()
    rewrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def lengthen(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b" ")


def replace(file: Path) -> None:
    shutil.copyfile(file, file.with_name("other"))
    file.with_name("other").rename(file)


@pytest.mark.parametrize("request_", (REQUEST, pytest.param(DEEPENED, marks=pytest.mark.slow)), ids=("adapt", "depth"))
@pytest.mark.parametrize("change", (rewrite, rewrite_and_set_back, lengthen, replace, Path.unlink))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_base_that_changes_is_not_expanded(llama_base, tmp_path, request_, change, moment):
    target, file = tmp_path / "out" / "expanded", llama_base / "model.safetensors"
    with pytest.raises(CheckpointError, match=rf"^{file}: changed while it was read\. Run again when nothing writes"):
        expand(llama_base, request_, target, track=at(moment, lambda: change(file)))
    assert not [found.name for found in target.parent.iterdir() if not found.name.startswith(".")]


@pytest.mark.parametrize("name", ("config.json", "generation_config.json"))
@pytest.mark.parametrize("moment", MOMENTS)
def test_small_files_are_looked_at_too(llama_base, tmp_path, name, moment):
    with pytest.raises(CheckpointError, match=f"{name}: changed while it was read"):
        expand(llama_base, REQUEST, tmp_path / "expanded", track=at(moment, lambda: rewrite(llama_base / name)))
    assert not (tmp_path / "expanded").exists()
    expanded = expand(llama_base, REQUEST, tmp_path / "expanded").path
    assert verify(expanded, probes=None).passed, "a second run takes what is there now"
    assert digests(strip(expanded, tmp_path / "back").path) == digests(llama_base)


@pytest.mark.parametrize("request_", (REQUEST, DEEPENED), ids=("adapt", "depth"))
def test_what_is_recorded_is_what_was_written(llama_base, tmp_path, request_):
    """Where a file has a second name its change cannot be seen: the hashes are those of the copies, and all holds."""
    os.link(llama_base / "model.safetensors", tmp_path / "backup")
    before = digests(llama_base)
    track = at("base hashes", lambda: rewrite_and_set_back(llama_base / "model.safetensors"))
    expanded = expand(llama_base, request_, tmp_path / "expanded", base_weights="copy", track=track).path
    assert digests(llama_base) != before
    assert verify(expanded, probes=None).passed
    assert digests(strip(expanded, tmp_path / "back").path) == before


def test_hard_links_are_no_change(llama_base, tmp_path):
    """Another expansion of the same base may come and go meanwhile."""
    other = expand(llama_base, REQUEST, tmp_path / "other", base_weights="link").path
    track = at("base hashes", lambda: shutil.rmtree(other))
    expand(llama_base, REQUEST, tmp_path / "expanded", base_weights="link", track=track)
    checkpoint = open_checkpoint(llama_base)
    (llama_base / "another file").write_text("x")
    check_unchanged(checkpoint.stamps)


@pytest.fixture
def expanded(pair_of, tmp_path) -> Path:
    return Path(shutil.copytree(pair_of("llama", "adapt_without_up_stream").path, tmp_path / "expanded"))


VERBS = {
    "route-export": ("files", lambda expanded, _, output, track: route_export(expanded, output, track=track)),
    "extract": ("files", lambda expanded, _, output, track: extract(expanded, output, track=track)),
    "fused": ("fused shards", lambda expanded, _, output, track: merge(expanded, output, "fused", track=track)),
    "stock": ("stock shards", lambda expanded, _, output, track: merge(expanded, output, "stock", track=track)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_looks_again(expanded, tmp_path, verb):
    label, work = VERBS[verb]
    file = expanded / "expansion-default-00001-of-00001.safetensors"
    with pytest.raises(CheckpointError, match=f"{file}: changed while it was read"):
        work(expanded, None, tmp_path / "out", at(label, lambda: rewrite(file)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("side", ("base", "extract"))
def test_apply_looks_at_both_sides(llama_base, expanded, tmp_path, side):
    taken = extract(expanded, tmp_path / "extract").path
    shard = taken / "expansion-default-00001-of-00001.safetensors"
    file = {"base": llama_base / "model.safetensors", "extract": shard}[side]
    with pytest.raises(CheckpointError, match=f"{file}: changed while it was read"):
        apply(taken, tmp_path / "out", llama_base, track=at("files", lambda: rewrite(file)))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_folder_is_not_continued_with_another_file(expanded, tmp_path):
    """A file of the same size, written at another time, is another one, for every verb."""
    file = expanded / "expansion-default-00001-of-00001.safetensors"
    with pytest.raises(KeyboardInterrupt):
        route_export(expanded, tmp_path / "out", track=at("files", _interrupt))
    assert (tmp_path / "out.partial" / file.name).is_file()
    rewrite(file)
    route_export(expanded, tmp_path / "out")
    assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_nobody_changed_anything(expanded, tmp_path):
    """The negative control: a track that changes nothing lets every verb come to its end."""
    for verb, (label, work) in VERBS.items():
        work(expanded, None, tmp_path / verb, at(label, lambda: None))
        assert (tmp_path / verb).is_dir()
