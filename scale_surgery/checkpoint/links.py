"""Symbolic links in a folder that somebody else made: they may lead to anything that the reader's owner can read."""

from __future__ import annotations

from pathlib import Path

# version control and download bookkeeping, no part of a checkpoint
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


def leads_out(path: Path, name: str) -> bool:
    """Whether a file of a folder lies outside of it; the Hub's cache alone is made of links, into its own blobs."""
    root, target = path.resolve(), (path / name).resolve()
    places = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    return not any(target.is_relative_to(place) for place in places)


def links_that_are_no_files(path: Path) -> tuple[str, ...]:
    """Links to folders, which nobody walks into, and links to nothing, by name."""
    links = (link for link in sorted(path.rglob("*")) if link.is_symlink() and not link.is_file())
    names = (link.relative_to(path) for link in links)
    return tuple(name.as_posix() for name in names if not set(name.parts).intersection(IGNORED_FOLDERS))
