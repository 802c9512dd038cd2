"""What every verb writes, by sha256: for changes of code that may change no byte.

    python -m tests.digests BEFORE.txt      # at the commit before, and again at the one after
    diff BEFORE.txt AFTER.txt

A line for each file of each folder, and for each answer in JSON. The clock of the package stands still, since records
name times, and measured memory is taken out of answers. Sums are those of one machine: another processor rounds
otherwise.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import scale_surgery
from scale_surgery import modeling
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.program import main as command
from tests.by_hand import make_base
from tests.composed import OTHERS
from tests.conftest import shake
from tests.own_code import save_pine
from tests.tiny import save_tiny

# a line of text to learn, in a vocabulary of characters as well as of words
TEXTS = [f"Ada of house {number} counts to {number * 7} and sleeps." for number in range(12)]
# keys of answers whose values differ from run to run
MEASURED = re.compile(r"(seconds|peak|memory|free)", re.IGNORECASE)
VARIANTS = {
    "preserve": ("--layers", "1-2", "--set", "init_w22=random"),
    "adapt": ("--layers", "0,2", "--variant", "adapt"),
    "gated": ("--layers", "all", "--variant", "gated"),
    "inner": ("--layers", "0,2", "--variant", "adapt", "--up-width", "0", "--set", "up_kv_heads=0"),
    "grow": ("--layers", "0,2", "--method", "grow"),
    "grow_train": ("--layers", "1", "--method", "grow", "--variant", "grow-train"),
    "depth": ("--layers", "0,2", "--method", "depth"),
}


class Noon(datetime):
    """A time that stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Noon:
        """Noon of a day."""
        return cls(2026, 1, 1, 12, tzinfo=UTC)


def stop_the_clock() -> None:
    """Let all modules of the package read one date, and a clock that counts how often it is read."""
    ticks = map(float, itertools.count(1))
    clock = SimpleNamespace(**{**vars(time), "monotonic": ticks.__next__, "perf_counter": ticks.__next__})
    for found in pkgutil.walk_packages(scale_surgery.__path__, "scale_surgery."):
        if "__main__" in found.name or ".modeling." in found.name:
            continue
        module = importlib.import_module(found.name)
        if getattr(module, "datetime", None) is datetime:
            module.datetime = Noon
        if getattr(module, "time", None) is time:
            module.time = clock


def without_measured(value: Any) -> Any:
    """A JSON value without numbers that no run repeats."""
    if isinstance(value, dict):
        return {key: without_measured(each) for key, each in value.items() if not MEASURED.search(key)}
    return [without_measured(each) for each in value] if isinstance(value, list) else value


class Campaign:
    """Folders of one base, each made by a command of another.

    Attributes:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object) -> None:
        """Run a command among the folders, its answer in a file; a refusal is an answer."""
        place, typed = Path.cwd(), [str(word) for word in words]
        os.chdir(self.folder)
        try:
            result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(command, [*typed, "--json"])
        finally:
            os.chdir(place)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        # words of a refusal may change, that it is one may not
        answer = json.loads(result.stdout) if result.exit_code == 0 else None
        content = {"exit": result.exit_code, "answer": without_measured(answer)}
        file = self.folder / "answers" / (re.sub(r"[^\w.-]+", "_", "_".join(typed))[:120] + ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content).replace(str(self.folder), "FOLDER"))

    def lines(self, title: str) -> Iterator[str]:
        """A line for each file."""
        for file in sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()):
            yield f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {title}/{file.relative_to(self.folder).as_posix()}"


def take_through(campaign: Campaign, *, trusted: tuple[str, ...] = ()) -> None:
    """Take a base through every verb: the forms of one expansion, several beside each other, and the way back."""
    run, folder = campaign.run, campaign.folder
    run("inspect", "base", *trusted)
    for name, options in VARIANTS.items():
        run("plan", "base", *options, *trusted)
        run("expand", "base", *options, *trusted, "-o", name)
        if not (folder / name).is_dir():
            continue
        shake(folder / name)
        run("verify", name, "--max-new-tokens", 2, *trusted)
        run("extract", name, "-o", f"{name}_alone")
        run("apply", f"{name}_alone", "--base", "base", "-o", f"{name}_again", *trusted)
        run("strip", name, "-o", f"{name}_stripped")
        run("merge", name, "-o", f"{name}_fused", *trusted)
        run("merge", f"{name}_fused", "-o", f"{name}_blocks", "--to", "blocks", *trusted)
        run("strip", f"{name}_fused", "-o", f"{name}_fused_stripped")
        run("merge", name, "-o", f"{name}_stock", "--to", "stock", *trusted)
        run("route-export", name, "-o", f"{name}_routed")
        run("route-export", f"{name}_routed", "--router", "none", "-o", f"{name}_unrouted")
        run("route-export", name, "--router", "cosine", "--threshold", 0.9, "-o", f"{name}_cosine")
        run("merge", f"{name}_cosine", "-o", f"{name}_cosine_fused", *trusted)
        run("inspect", name, *trusted)
        adopt(campaign, name, trusted)
    run("compose", "base", "preserve_alone", "adapt_alone", "-o", "two", "--names", "law,music")
    run("expand", "two", "--layers", "1", "--variant", "adapt", "--name", "third", "-o", "three", *trusted)
    run("compose", "two", "grow_alone", "grow_train_alone", "-o", "four", "--names", "chess,go")
    run("verify", "four", "--max-new-tokens", 2, *trusted)
    run("compose", "four", "--remove", "music", "-o", "less")
    run("extract", "four", "--name", "music", "-o", "music_alone")
    run("apply", "music_alone", "--base", "base", "-o", "music", *trusted)
    run("merge", "four", "--name", "law", "-o", "law_fused", *trusted)
    run("route-export", "four", "--prior", 0.9, "-o", "four_routed")
    run("strip", "four", "-o", "four_stripped")


def adopt(campaign: Campaign, name: str, trusted: tuple[str, ...]) -> None:
    """Save an expanded model as a trainer does, and adopt it."""
    modeling.register()
    saved = campaign.folder / f"{name}_saved"
    model = AutoModelForCausalLM.from_pretrained(campaign.folder / name, trust_remote_code=bool(trusted))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() == 1:
                parameter.add_(0.0)
    model.save_pretrained(saved)
    campaign.run("adopt", f"{name}_saved", "--expanded", name, "-o", f"{name}_adopted")


def teach(campaign: Campaign) -> None:
    """Train expansions of a base that has a tokenizer, and add tokens to it."""
    run, folder = campaign.run, campaign.folder
    (folder / "new.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "tokens.txt").write_text(" Xylophone\n birthplace\n")
    run("expand", "base", *VARIANTS["adapt"], "-o", "adapt")
    run("expand", "base", *VARIANTS["depth"], "-o", "depth")
    run("expand", "base", "--layers", "none", "--new-tokens", "tokens.txt", "-o", "words")
    run("expand", "base", *VARIANTS["gated"], "--new-tokens", "tokens.txt", "-o", "wide_words")
    for name in ("adapt", "depth", "words", "wide_words"):
        for steps in (2, 3):
            before = name if steps == 2 else f"{name}_trained2"
            run(
                "train",
                before,
                "--data",
                "new.jsonl",
                "--steps",
                steps,
                "--device",
                "cpu",
                "-o",
                f"{name}_trained{steps}",
            )
        trained = f"{name}_trained3"
        run("verify", trained, "--max-new-tokens", 2)
        run("extract", trained, "-o", f"{name}_alone")
        run("apply", f"{name}_alone", "--base", "base", "-o", f"{name}_again")
        run("strip", trained, "-o", f"{name}_stripped")
        run("merge", trained, "-o", f"{name}_fused")
        run("merge", f"{name}_fused", "-o", f"{name}_blocks", "--to", "blocks")
        run("route-export", trained, "-o", f"{name}_routed")
        run("report", trained, "-o", f"{name}_report.html")
    run("compose", "base", "adapt_alone", "words_alone", "-o", "both")
    run(
        "train", "both", "--name", "adapt", "--data", "new.jsonl", "--steps", 2, "--device", "cpu", "-o", "both_trained"
    )
    run("extract", "both", "--name", "adapt", "-o", "adapt_of_both")
    run("extract", "both", "--name", "words", "-o", "words_of_both")
    run("compose", "both", "--remove", "words", "-o", "without_words")
    run("strip", "both", "-o", "both_stripped")


def main(file: Path) -> None:
    """Write the sum of every file that the verbs write."""
    stop_the_clock()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for title, make in BASES.items():
            campaign = Campaign(Path(place).resolve() / title)
            campaign.folder.mkdir()
            trusted = make(campaign.folder / "base")
            (teach if title.startswith("taught") else take_through)(campaign, **trusted)
            lines += campaign.lines(title)
            print(f"{title}: {len(lines)} files so far", flush=True)
    file.write_text("\n".join(lines) + "\n")


def _with_tokenizer(path: Path, family: str, **changes: Any) -> dict[str, Any]:
    save_tiny(path, family, vocab_size=1200, **changes)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(path)
    return {}


def _plain(path: Path, family: str, **changes: Any) -> dict[str, Any]:
    save_tiny(path, family, **changes)
    return {}


def _own_code(path: Path) -> dict[str, Any]:
    save_pine(path)
    return {"trusted": ("--trust-remote-code",)}


def _other(path: Path, name: str) -> dict[str, Any]:
    make_base(path, OTHERS[name]())
    return {}


BASES: dict[str, Any] = {
    "llama": lambda path: _plain(path, "llama"),
    "gpt2_tied": lambda path: _plain(path, "gpt2", tie_word_embeddings=True),
    "gemma3_sharded": lambda path: _plain(path, "gemma3_text", shard_size="40KB", dtype=torch.bfloat16),
    "gpt_neox": lambda path: _plain(path, "gpt_neox"),
    "deepseek_v3": lambda path: _other(path, "deepseek_v3"),
    "own_code": _own_code,
    "taught_llama": lambda path: _with_tokenizer(path, "llama"),
    "taught_gpt2_tied": lambda path: _with_tokenizer(path, "gpt2", tie_word_embeddings=True),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
