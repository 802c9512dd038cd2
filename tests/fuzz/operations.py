"""What is run on a mutated copy: public functions, and commands of the command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
from click.testing import CliRunner
from huggingface_hub import constants

import scale_surgery as s
from scale_surgery.cli.program import main
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import read_contents
from scale_surgery.text.documents import read_documents
from tests.fuzz.requests import draw_request, draw_routing
from tests.fuzz.seeds import BASES, EXPANDED, WHOLE
from tests.hub_server import running

TEXT_FILES = ("texts.jsonl", "array.json", "plain.txt")
NO_TOKENS = s.Probes(max_new_tokens=0)


@dataclass(frozen=True)
class Call:
    """The copies that an operation reads, and where it may write.

    With `has_odd_options` it is the options that are mutated, and not a copy.
    """

    dice: random.Random
    place: Path
    model: Path
    out: Path
    has_odd_options: bool

    def beside(self, name: str) -> Path:
        """Another copy."""
        return self.place / name

    @property
    def request(self) -> s.Request:
        """What to ask for."""
        return draw_request(self.dice, is_odd=self.has_odd_options)

    @property
    def routing(self) -> Any:
        """How to route."""
        return draw_routing(self.dice, is_odd=self.has_odd_options)


@dataclass(frozen=True)
class Operation:
    """Something that a user can do.

    `models` are the seeds that it takes, `beside` what it reads too; `weight` says how often it is drawn: what runs a
    model takes a second, what reads files some milliseconds.
    """

    name: str
    run: Callable[[Call], Any]
    models: tuple[str, ...]
    beside: tuple[str, ...] = ()
    weight: int = 10
    has_options: bool = False
    writes: bool = True
    # what is given back must be the base, whatever became of the rest
    gives_base: bool = False
    changes: tuple[str, ...] = field(default=())


class EscapedError(Exception):
    """The command line caught an error that is none of the program's own."""


def command(call: Call, *words: object) -> None:
    """Run a command; refused, accepted or a finding, like a function."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    call.out.with_name("printed").write_text(result.output, encoding="utf-8", errors="surrogatepass")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "--debug shows where" in result.output:
        raise EscapedError(result.output.split("--debug")[0][-300:])
    if result.exit_code != 0:
        raise s.SurgeryError(result.output)


def _verify_on_files(call: Call, base: str | None = None) -> bool:
    given = call.beside(base) if base is not None else None
    return s.verify(call.model, given, probes=None, record=False).passed


def _load_plan(call: Call) -> None:
    s.load_plan(call.model, call.beside("plan.json"))


def _expand_plan(call: Call) -> None:
    s.expand(call.model, s.load_plan(call.model, call.beside("plan.json")), call.out)


def _resume(call: Call) -> None:
    from tests.fuzz.seeds import SETTINGS

    run = s.RunOptions(device="cpu")
    start, data = s.TrainingStart(resume=True), call.beside("plain.txt")
    sides = s.EvalData(old=[call.beside("texts.jsonl")])
    s.train(call.beside("expanded"), [data], call.model, SETTINGS, eval_data=sides, start=start, run=run)


def _train(call: Call) -> None:
    settings, run = s.TrainingSettings(steps=1, sequence_length=16, batch_size=1), s.RunOptions(device="cpu")
    s.train(call.model, [call.beside("plain.txt")], call.out, settings, run=run)


def _load_expansion(call: Call) -> None:
    s.load_expansion(call.beside("base"), call.model)


@contextmanager
def _hub_for_one() -> Iterator[None]:
    """Run a Hub with one writer, and let this process ask it."""
    huggingface_hub.utils.disable_progress_bars()
    with (
        patch.object(constants, "HF_HUB_OFFLINE", new=False),
        patch.object(constants, "HF_HUB_DISABLE_XET", new=True),
        running() as hub,
        patch.object(constants, "ENDPOINT", hub.address),
    ):
        try:
            yield
        finally:
            huggingface_hub.close_session()


def _push(call: Call) -> bool:
    """Push to a Hub of its own; what a card says is looked at like what is printed."""
    with _hub_for_one():
        done = s.push(call.model, "me/wide", token="hf_writer")
    call.out.with_name("printed").write_text(done.card or "", encoding="utf-8", errors="surrogatepass")
    return True


def _card(call: Call) -> None:
    card = make_card(read_contents(call.model), "me/wide", None, None, None)
    call.out.with_name("printed").write_text(card.text, encoding="utf-8", errors="surrogatepass")


def _route_report(call: Call) -> None:
    s.route_report(call.model, call.beside("plain.txt"), run=s.RunOptions(device="cpu"))


def _route_calibrate(call: Call) -> None:
    s.route_calibrate(call.model, call.beside("texts.jsonl"), call.beside("plain.txt"), run=s.RunOptions(device="cpu"))


MERGED = partial(s.merge, probes=NO_TOKENS)
OPERATIONS = (
    Operation("inspect", lambda c: s.inspect(c.model), (*BASES, *EXPANDED, "stock"), writes=False),
    Operation("plan", lambda c: s.plan(c.model, c.request), (*BASES, "stock"), has_options=True, writes=False),
    Operation("load_plan", _load_plan, ("base",), ("plan.json",), writes=False),
    Operation("expand", lambda c: s.expand(c.model, c.request, c.out), (*BASES, "stock"), has_options=True),
    Operation("expand a plan", _expand_plan, ("base",), ("plan.json",), weight=4),
    Operation("verify files", _verify_on_files, EXPANDED, weight=20, writes=False),
    Operation(
        "verify files with a base",
        partial(_verify_on_files, base="base"),
        ("expanded", "grown", "routed"),
        ("base",),
        writes=False,
    ),
    Operation("strip", lambda c: s.strip(c.model, c.out), EXPANDED, weight=20, gives_base=True),
    Operation("extract", lambda c: s.extract(c.model, c.out), EXPANDED),
    Operation("apply", lambda c: s.apply(c.model, c.out, c.beside("base")), ("extract",), ("base",), weight=12),
    Operation("adopt", lambda c: s.adopt(c.model, c.beside("expanded"), c.out), ("saved",), ("expanded",)),
    Operation("adopt into", lambda c: s.adopt(c.beside("saved"), c.model, c.out), ("expanded",), ("saved",), weight=5),
    Operation(
        "route_export", lambda c: s.route_export(c.model, c.out, c.routing), ("expanded", "grown"), has_options=True
    ),
    Operation("unroute", lambda c: s.unroute(c.model, c.out), ("routed",)),
    Operation(
        "set_routing",
        lambda c: s.set_routing(c.model, c.routing),
        ("routed",),
        weight=5,
        has_options=True,
        writes=False,
        changes=("config.json", "surgery.json"),
    ),
    Operation("merge to blocks", lambda c: s.merge(c.model, c.out, "blocks"), ("fused",)),
    Operation("report", lambda c: s.report(c.model, files_only=True), EXPANDED, weight=5, writes=False),
    Operation("read texts", lambda c: list(read_documents([c.model])), TEXT_FILES, writes=False),
    Operation("push", _push, (*EXPANDED, "stock", "extract"), weight=4, writes=False),
    Operation("make a card", _card, (*EXPANDED, "stock", "extract"), writes=False),
    # what runs a model
    Operation(
        "verify", lambda c: s.verify(c.model, probes=NO_TOKENS, record=False).passed, WHOLE, weight=1, writes=False
    ),
    Operation("merge to fused", lambda c: MERGED(c.model, c.out), ("expanded", "grown"), weight=1),
    Operation("merge to stock", lambda c: MERGED(c.model, c.out, "stock"), ("grown",), weight=1),
    Operation(
        "evaluate",
        lambda c: s.evaluate(c.model, c.beside("texts.jsonl")),
        ("base", "expanded"),
        ("texts.jsonl",),
        weight=1,
        writes=False,
    ),
    Operation("route_report", _route_report, ("routed",), ("plain.txt",), weight=1, writes=False),
    Operation("route_calibrate", _route_calibrate, ("routed",), ("texts.jsonl", "plain.txt"), weight=1, writes=False),
    Operation("load_expansion", _load_expansion, ("extract",), ("base",), weight=1, writes=False),
    Operation("train", _train, ("expanded",), ("plain.txt",), weight=1),
    Operation(
        "resume", _resume, ("run",), ("expanded", "plain.txt", "texts.jsonl"), weight=1, writes=False, changes=("",)
    ),
    # the command line: the same work, and what it prints
    Operation("$ inspect", lambda c: command(c, "inspect", c.model), (*BASES, *EXPANDED), weight=4, writes=False),
    Operation("$ plan", lambda c: command(c, "plan", c.model, "--layers", "1"), BASES, weight=4, writes=False),
    Operation("$ expand", lambda c: command(c, "expand", c.model, "--layers", "1", "-o", c.out), BASES, weight=3),
    Operation(
        "$ verify",
        lambda c: command(c, "verify", c.model, "--files-only"),
        EXPANDED,
        weight=4,
        writes=False,
        changes=("surgery.json",),
    ),
    Operation("$ strip", lambda c: command(c, "strip", c.model, "-o", c.out), EXPANDED, weight=3, gives_base=True),
    Operation("$ extract", lambda c: command(c, "extract", c.model, "-o", c.out), WHOLE, weight=3),
    Operation(
        "$ apply",
        lambda c: command(c, "apply", c.model, "--base", c.beside("base"), "-o", c.out),
        ("extract",),
        ("base",),
        weight=3,
    ),
    Operation(
        "$ report",
        lambda c: command(c, "report", c.model, "--files-only", "-o", c.out.with_suffix(".html")),
        EXPANDED,
        weight=2,
        writes=False,
    ),
)
