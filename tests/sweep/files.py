"""What has to hold of the files of a model type, and of an expansion that is taken off and put on again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from scale_surgery import apply, extract, load_expansion, strip, verify
from tests.sweep.reader import ids_of


class BrokenError(AssertionError):
    """Something does not hold of a model type."""


def check_files(base: Path, expanded: Path, folder: Path) -> None:
    """The program's own promises, and that the base comes out, and the expansion goes out and in, byte for byte."""
    verification = verify(expanded, base)
    if not verification.passed:
        failed = [f"{promise.name}: {promise.evidence}" for promise in verification.promises if promise.holds is False]
        raise BrokenError("; ".join([*failed, *verification.problems]))
    stripped = strip(expanded, folder / "stripped").path
    if files_of(stripped) != files_of(base):
        raise BrokenError("strip does not give the base's files")
    taken = extract(expanded, folder / "extract").path
    applied = apply(taken, folder / "applied", base).path
    differing = files_of(expanded).items() ^ files_of(applied).items()
    if unequal := {name for name, _ in differing} - {"surgery.json"}:
        raise BrokenError(f"apply gives other files: {sorted(unequal)}")
    check_in_memory(base, expanded, taken)


def check_in_memory(base: Path, expanded: Path, taken: Path) -> None:
    """On the base in memory, too, the expansion gives the model of the folder: each tensor, and the logits."""
    from transformers import AutoModelForCausalLM

    stock, wanted = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (base, expanded))
    model, tensors, ids = load_expansion(stock, taken), wanted.state_dict(), ids_of()
    if model.state_dict().keys() != tensors.keys():
        raise BrokenError("load_expansion gives other tensors than the folder")
    if unequal := [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, tensors[name])]:
        raise BrokenError(f"load_expansion gives other values than the folder: {unequal[:2]}")
    with torch.no_grad():
        if not torch.equal(model(ids).logits, wanted(ids).logits):
            raise BrokenError("load_expansion gives other logits than the folder")


def files_of(path: Path) -> dict[str, str]:
    """sha256 of every file of a folder."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
