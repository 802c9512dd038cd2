"""Copies have the bytes of what they are made of, and a large one does not go through the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from pathlib import Path

import pytest

from scale_surgery.checkpoint import copying
from scale_surgery.checkpoint.copying import copy_file

BLOCK = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(copying, "BLOCK_BYTES", BLOCK)


def written(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


@pytest.mark.parametrize("is_direct", (True, False))
@pytest.mark.parametrize("size", (0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4097))
def test_a_copy_has_the_same_bytes(tmp_path, monkeypatch, size, is_direct):
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    source, copy = written(tmp_path / "source", size), tmp_path / "copy"
    copy.write_bytes(b"something longer that was here before" * BLOCK)
    copy_file(source, copy)
    assert copy.read_bytes() == source.read_bytes()


def is_cached(path: Path) -> bool:
    """Whether the first page of a file is in memory, asked in a way that does not bring it there."""
    page = ctypes.c_ubyte()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
        first = (ctypes.c_char * mmap.PAGESIZE).from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(page))
        del first  # what points into a map keeps it open
    assert not failed
    return bool(page.value & 1)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system does not write beside its cache")
def test_a_copy_is_not_kept_in_memory(tmp_path):
    source = written(tmp_path / "source", 3 * BLOCK)
    shutil.copyfile(source, tmp_path / "plain")
    copy_file(source, tmp_path / "copy")
    try:
        os.close(os.open(tmp_path / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system cannot write beside its cache")
    assert is_cached(tmp_path / "plain")
    assert not is_cached(tmp_path / "copy")
    assert is_cached(source), "what is copied stays, to be hashed"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error(tmp_path):
    source = written(tmp_path / "source", BLOCK + 1)
    with pytest.raises(OSError, match="No space left") as raised:
        copy_file(source, Path("/dev/full"))
    assert (raised.value.filename, raised.value.filename2) == (str(source), "/dev/full")
