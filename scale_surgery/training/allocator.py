"""Keep freed memory between the steps of a training run on the CPU.

A step allocates the same large tensors as the step before. By default the malloc of glibc takes blocks above a
threshold from the system one by one (M_MMAP_THRESHOLD), gives them back when they are freed, and gives back the end of
its heap too (M_TRIM_THRESHOLD). So in each step the system hands out the same memory again: page by page, each with a
fault, and filled with zeros. benchmarks/training.md has what that takes. See mallopt(3).

What is kept lies in one heap, with gaps between blocks that are in use, and so the peak rises. Therefore very large
blocks, for which gaps would be large too, still come and go.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

# from malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = -1
# blocks up to this share of the machine's memory are kept; a few gaps of that size do not fill it
SHARE = 64
LARGEST = 2**30
# releases of glibc before 2.35 take no more
LARGEST_BEFORE = 2**25
# of control groups of version 2 and 1, as a container sees its own
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# variables by which a user configures malloc
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for the rest of this process; False without glibc, or where the user set it."""
    if not is_glibc() or any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    mallopt, size = ctypes.CDLL(None).mallopt, largest_kept()
    is_set = any(mallopt(M_MMAP_THRESHOLD, bytes_) for bytes_ in (size, min(size, LARGEST_BEFORE)))
    return is_set and bool(mallopt(M_TRIM_THRESHOLD, NEVER))


def largest_kept() -> int:
    """Bytes of the largest block that is kept when it is freed."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory // SHARE, container_memory() // SHARE, LARGEST)


def container_memory() -> int:
    """Bytes that the container of this process may use, by its control groups; no limit is a very large number."""
    for file in CONTAINER_LIMITS:
        try:
            return int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return sys.maxsize


def is_glibc() -> bool:
    """Whether the C library of this process is glibc; musl, macOS and Windows have other mallocs."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc ")
    except (AttributeError, ValueError, OSError):
        return False
