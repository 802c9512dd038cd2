"""Conversations: in a terminal of their own, with keys pressed while a model answers, and line by line from a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ
from types import FrameType
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from rich.text import Text
from transformers.generation.utils import GenerationMixin

from scale_surgery import GenerationSettings, generate
from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.evidence.eval_targets import open_subjects
from scale_surgery.show import chat as conversing
from scale_surgery.show import console
from scale_surgery.show.answers import SideBySide, choose_marking
from scale_surgery.talking import speaker
from scale_surgery.talking.conversation import Conversation
from scale_surgery.talking.interrupt import interruptible
from scale_surgery.talking.records import Look
from scale_surgery.talking.speaker import loaded_speaker
from tests.command import run
from tests.each import mostly

SECONDS = 300
QUESTION = questions(people(1)[0])[1].prompt
GREEDY = GenerationSettings(temperature=0, max_new_tokens=12)
# of the background of a token, that of its path
COLOUR = re.compile(r"\x1b\[38;2;22;24;29;48;2;\d+;\d+;\d+m")
# a pseudo-terminal becomes that of a new session, so that Ctrl-C is the signal that it is; SIGINT is ignored, as in
# what a script starts in the background
OWN_TERMINAL = (
    "import fcntl, runpy, signal, termios; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('scale_surgery', run_name='__main__', alter_sys=True)"
)


class Terminal:
    """Somebody at a terminal."""

    def __init__(self, handle: int) -> None:
        self.handle, self.text, self.done = handle, "", 0

    def type(self, keys: str) -> None:
        os.write(self.handle, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """What comes until something is there that was not there before."""
        until = time.monotonic() + SECONDS
        while not (match := re.search(pattern, self.text[self.done :])):
            assert time.monotonic() < until, f"{pattern!r} does not come: {self.text[self.done :]!r}"
            if select.select([self.handle], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self.handle, 65536).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    pytest.fail(f"{pattern!r} does not come: {self.text[self.done :]!r}")
        start, self.done = self.done, self.done + match.end()
        return self.text[start : self.done]

    def interrupt(self, pattern: str) -> str:
        """What comes after Ctrl-C at a prompt; readline hears one that comes too early at the next one."""
        for _ in range(0, SECONDS, 5):
            self.type("\x03")
            if select.select([self.handle], [], [], 5)[0]:
                return self.wait_for(pattern)
        pytest.fail(f"{pattern!r} does not come: {self.text[-200:]!r}")

    def ask(self, message: str, reply: str) -> str:
        """What comes after a line: a reply, and the next prompt."""
        self.type(f"{message}\n")
        return self.wait_for(rf"(?s){reply}.*\n(?:\x1b\[\?2004h)?> ")


@contextmanager
def chatting(*arguments: object, **environment: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """A chat in a pseudo-terminal of 80 columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    command = [sys.executable, "-c", OWN_TERMINAL, "chat", *map(str, arguments)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    child = subprocess.Popen(command, **streams, start_new_session=True, env=inherited | environment)
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.wait_for("> ")
        yield terminal, child
    finally:
        child.kill()
        child.wait()
        os.close(ours)


@pytest.mark.slow
def test_a_conversation_in_a_terminal(place: Path) -> None:
    settings = ("--max-new-tokens", "100000", "--temperature", "0")
    with chatting(place / "posterior", *settings, TERM="xterm-256color", COLORTERM="truecolor") as (terminal, child):
        assert "Ctrl-C stops an answer" in terminal.text and " default" in terminal.text
        # it streams: a token is there long before the last one
        terminal.type("Anna\n")
        terminal.wait_for(COLOUR.pattern)
        terminal.type("\x03")
        stopped = terminal.wait_for("> ")
        assert "stopped; an empty line continues it" in stopped
        # at the prompt, Ctrl-C ends nothing
        assert "Ctrl-D or /exit ends" in terminal.interrupt(r"\n[^\n]*> ")
        # another question, in the colours of its paths
        terminal.ask("/reset", "cleared")
        terminal.ask("/set max-new-tokens 12", "at most 12 tokens")
        answer = terminal.ask("Anna", "stopped after 12 tokens")
        wanted = generate(place / "posterior", "Anna", GREEDY).answers[0]
        assert len(COLOUR.findall(answer)) == sum(bool(token.text.strip("\n")) for token in wanted.tokens)
        terminal.type("\x04")
        assert child.wait(SECONDS) == 0


def press(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("before", "during", "tokens"),
    mostly([(0, 1, 2), (0, 3, 1), (1, 0, 1), (3, 0, 0)], [(0, 3, 1), (1, 0, 1)].__contains__),
)
def test_an_interrupt_ends_an_answer_and_nothing_else(place: Path, before: int, during: int, tokens: int) -> None:
    (subject,), handler = open_subjects([place / "posterior"]), signal.getsignal(signal.SIGINT)
    terminated = signal.getsignal(signal.SIGTERM)
    wanted = generate(place / "posterior", "Anna", GREEDY).answers[0]
    ids = Conversation(subject, has_template=False).encode("Anna", GREEDY).ids
    with loaded_speaker(subject) as speaker:
        with interruptible() as interrupt:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            press(before)
            with interrupt.speaking():
                answer = speaker.speak("Anna", ids, GREEDY, lambda token: press(during), interrupt)
            assert not interrupt(), "the next answer is not stopped"
        assert (answer.tokens, answer.ended) == (wanted.tokens[:tokens], "interrupted")
        assert signal.getsignal(signal.SIGINT) == handler
        assert signal.getsignal(signal.SIGTERM) == terminated
        # it goes on routing as if nothing had been
        assert speaker.speak("Anna", ids, GREEDY) == wanted


class Typist(StringIO):
    """Somebody who types, and presses Ctrl-C three times wherever a line of the code is reached first."""

    MESSAGES = ("Anna", "/reset", "/help", "/wat")
    CODE = (conversing.__file__, str(Path(speaker.__file__).parent), console.__file__)

    def __init__(self) -> None:
        super().__init__()
        self.pressed: set[tuple[str, int]] = set()
        # how many lines were reached when each message was typed
        self.reached: list[int] = []

    def readline(self, size: int | None = -1) -> str:
        self.reached.append(len(self.pressed))
        if self.reached[-1:] == self.reached[-2 * len(self.MESSAGES) - 1 : -2 * len(self.MESSAGES)]:
            sys.settrace(None)
            return "/exit\n"
        sys.settrace(self.trace)  # what a press raises ends it
        return f"{self.MESSAGES[len(self.reached) % len(self.MESSAGES)]}\n"

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.CODE):
            return None
        where = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and where not in self.pressed:
            self.pressed.add(where)
            press(3)
        return self.trace


def test_no_press_ends_a_conversation(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typist, before, tracing = Typist(), signal.getsignal(signal.SIGINT), sys.gettrace()
    monkeypatch.setattr(sys, "stdin", typist)
    try:
        answers = conversing.chat(place / "posterior", console.Output(), replace(GREEDY, max_new_tokens=3)).answers
    except KeyboardInterrupt:
        pytest.fail("a press ended the conversation")
    finally:
        sys.settrace(tracing)
    # whoever stopped an answer gets the next one whole
    assert {answer.ended for answer in answers} == {"interrupted", "length"} and answers[-1].ended == "length"
    assert {Path(file).name for file, _ in typist.pressed} > {"chat.py", "interrupt.py", "console.py", "speaker.py"}
    assert signal.getsignal(signal.SIGINT) == before


# line by line


def talk(folder: Path, *lines: str, options: tuple[str, ...] = (), code: int = 0) -> Result:
    arguments = ["--temperature", "0", "--max-new-tokens", "12", *options]
    return run("chat", folder, *arguments, input="".join(f"{line}\n" for line in lines), code=code)


def answers(folder: Path, *lines: str, options: tuple[str, ...] = ()) -> list[dict]:
    return list(json.loads(talk(folder, *lines, options=("--json", *options)).stdout)["answers"])


def test_questions_and_answers() -> None:
    first, second = QUESTION.split("\n")
    shown = talk(SHIPPED_MODEL, f"{first}\\", second, "/exit", "never asked").stdout
    assert shown.splitlines() == [
        "biographies",
        "model     stock",
        "messages  no chat template; the model continues your text",
        "answers   the most likely token each time, at most 12 tokens",
        "context   256 tokens",
        "keys      Ctrl-C stops an answer, Ctrl-D or /exit ends, /help lists all commands",
        "",
        " Fresno",
        "",
    ]


def test_a_text_goes_on_where_nothing_is_typed(place: Path) -> None:
    once, more, new = answers(place / "wide", "Anna", "", "Berg")
    assert once["ended"] == "length" and more["read"] == once["read"] + len(f"{once['text']}".encode())
    joined = generate(place / "wide", f"Anna{once['text']}", GREEDY).answers[0]
    assert more["text"] == joined.text
    assert new["read"] == more["read"] + len(f"{more['text']}\nBerg".encode())


def test_commands(place: Path) -> None:
    once, repeated, anew = answers(place / "wide", "", "Anna", "/again", "/reset", "Anna")
    assert once == repeated == anew
    (space,) = answers(place / "wide", " /help me")
    assert space["prompt"] == "/help me"
    shown = talk(place / "wide", "/help", "/set top-p 0.5", "/set", "/reset")
    for line in ("/again  answer the last message again", "the conversation is cleared"):
        assert line in shown.stdout
    assert shown.stderr == ""
    # what is wrong ends nothing
    wrong = talk(place / "wide", "/paths", "/again", "/wat", "/set seed 1", "/set top-k many", "/set top-p 2", "Anna")
    starts = (
        "/paths: wide",
        "/again: nothing",
        "/wat is no",
        "/set seed: cannot",
        "/set top-k is many",
        "/set top-p is 2.0, expected",
    )
    lines = [line for line in wrong.stderr.replace("\n", " ").split("error: ") if line]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * len(starts)
    assert "stopped after 12 tokens, see /set max-new-tokens; an empty line continues it" in wrong.stdout


def test_a_message_without_an_answer_takes_no_other_back(templated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answers(templated, "Who?", "Why?")
    generate_, calls = GenerationMixin.generate, iter(range(10))

    def fail_once(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        return generate_(*args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", fail_once)
    assert answers(templated, "Who?", "Why?", "/again") == whole


def test_an_answer_that_is_not_given_again_stays(templated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answers(templated, "Who?", "Why?")
    generate_, calls = GenerationMixin.generate, iter(range(10))

    def fail_once(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        return generate_(*args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", fail_once)
    assert answers(templated, "Who?", "/again", "Why?") == whole


def test_a_conversation_by_a_chat_template(templated: Path) -> None:
    first, second = answers(templated, "Who?", "", "Why?", options=("--system", "S"))
    before = f"[system]S\n[user]Who?\n[assistant]{first['text']}\n[user]Why?\n[assistant]"
    assert second["read"] == len(before.encode()), "an empty line says nothing here"
    assert "by its chat template" in talk(templated).stdout
    assert "--raw; the model continues your text" in talk(templated, options=("--raw",)).stdout


def test_a_context_that_is_full(templated: Path) -> None:
    shown = talk(templated, "x" * 180, "y" * 100, "z" * 300, "Who?", options=("--raw",))
    notes = " ".join(shown.stdout.split())
    assert notes.count("templated: the context is 256 tokens, so the oldest turn is left out") == 1
    assert "the prompt has 300 tokens, expected fewer than 256, the context of templated" in " ".join(
        shown.stderr.split()
    )
    full = talk(templated, "x" * 250, options=("--raw",)).stdout
    assert "stopped: the context of 256 tokens is full; an empty line continues it" in full


def test_base_and_model_answer_side_by_side(place: Path) -> None:
    content = json.loads(talk(place / "posterior", "Anna", "Berg", options=("--json", "--compare")).stdout)
    for kind, name in (("posterior", "answers"), ("base", "base_answers")):
        assert [answer["text"] for answer in content[name]] == [
            answer["text"] for answer in answers(place / kind, "Anna", "Berg")
        ], "each in a conversation of its own"
    shown = talk(place / "posterior", "Anna", options=("--compare", "--paths")).stdout
    assert re.search(r"(?m)^base +expanded *$", shown) and "⟦" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_columns_fit_the_terminal() -> None:
    texts = (Text("one two three four five six seven"), Text("東京" * 20 + "\nx"))

    def lines(width: int, **options: bool) -> list[str]:
        console = Console(file=StringIO(), width=width, height=6, color_system=None)
        console.print(SideBySide(["base", "a [bold] name"], texts, **options))
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    wide = lines(50)
    assert wide[0].split(maxsplit=1) == ["base", "a [bold] name" + " " * 11]
    assert "".join(line[26:].strip() for line in wide[1:]) == "東京" * 20 + "x"
    # of what is still being said, the last lines
    assert len(lines(50, is_growing=True)) == 4 and "x" in lines(50, is_growing=True)[-1]


def test_paths_are_shown_where_there_are_colours_or_when_asked_for() -> None:
    coloured, plain = (Console(file=StringIO(), color_system=colours) for colours in ("truecolor", None))
    refusing = Console(file=StringIO(), color_system="truecolor", no_color=True)
    assert choose_marking(coloured, Look()) == "colours"
    assert choose_marking(coloured, Look(paths=False)) == "nothing"
    for without, look in ((plain, Look()), (refusing, Look())):
        assert choose_marking(without, look) == "nothing"
        assert choose_marking(without, replace(look, paths=True)) == "brackets"
