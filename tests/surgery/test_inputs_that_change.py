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
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from tests.conftest import digests, refused

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
@pytest.mark.parametrize(
    ("name", "change"),
    (
        *(("model.safetensors", change) for change in (rewrite, rewrite_and_set_back, lengthen, replace, Path.unlink)),
        ("config.json", rewrite),
        ("generation_config.json", rewrite),
    ),
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_base_that_changes_is_not_expanded(llama_base, tmp_path, request_, name, change, moment):
    target, file = tmp_path / "out" / "expanded", llama_base / name
    with refused("file-changed", file, CheckpointError):
        expand(llama_base, request_, target, track=at(moment, lambda: change(file)))
    assert not [path.name for path in target.parent.iterdir() if not path.name.startswith(".")]


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
    sibling = expand(llama_base, REQUEST, tmp_path / "other", base_weights="link").path
    track = at("base hashes", lambda: shutil.rmtree(sibling))
    expand(llama_base, REQUEST, tmp_path / "expanded", base_weights="link", track=track)
    checkpoint = open_checkpoint(llama_base)
    (llama_base / "another file").write_text("x")
    check_unchanged(checkpoint.stamps)


SHARD = "expansion-default-00001-of-00001.safetensors"


def test_an_unfinished_folder_is_not_continued_with_another_file(pair_of, tmp_path):
    """A file of the same size, written at another time, is another one, for every verb."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    expanded, out = shutil.copytree(pair_of("llama", "adapt").path, tmp_path / "expanded"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        route_export(expanded, out, track=at("files", interrupt))
    assert (tmp_path / "out.partial" / SHARD).is_file()
    rewrite(expanded / SHARD)
    route_export(expanded, out)
    assert (out / SHARD).read_bytes() == (expanded / SHARD).read_bytes()
