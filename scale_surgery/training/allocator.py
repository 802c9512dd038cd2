"""Keep freed memory between the steps of a training run on the CPU.

A step allocates the same large tensors as the step before. By default glibc's malloc requests each block above a
threshold from the system (M_MMAP_THRESHOLD) and returns it when it is freed. It also returns the end of its heap
(M_TRIM_THRESHOLD). So in each step the system provides the same memory again: page by page, each with a fault, and
filled with zeros. benchmarks/training.md gives the cost. See mallopt(3).

Kept memory stays in one heap, with gaps between used blocks, and so the peak rises. The gaps of very large blocks would
be large too, so these blocks are still returned.
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
# upper limit before glibc 2.35
LARGEST_BEFORE = 2**25
# memory limits of control groups, version 2 and 1, as seen inside a container
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# variables by which a user configures malloc
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for the rest of this process; return False without glibc, or if the user set it."""
    if not is_glibc() or any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    mallopt, size = ctypes.CDLL(None).mallopt, largest_kept()
    is_set = any(mallopt(M_MMAP_THRESHOLD, bytes_) for bytes_ in (size, min(size, LARGEST_BEFORE)))
    return is_set and bool(mallopt(M_TRIM_THRESHOLD, NEVER))


def largest_kept() -> int:
    """Return the size in bytes of the largest block that is kept after it is freed."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory // SHARE, container_memory() // SHARE, LARGEST)


def container_memory() -> int:
    """Return the bytes that this process's container may use, by its control groups; without a limit, a huge number."""
    for file in CONTAINER_LIMITS:
        try:
            return int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return sys.maxsize


def is_glibc() -> bool:
    """Return True if the C library is glibc; musl, macOS and Windows have other mallocs."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc ")
    except (AttributeError, ValueError, OSError):
        return False
