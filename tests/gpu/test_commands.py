"""Every command that has --device runs on the device: the examples of docs/commands.md, in their order.

The commands are taken from the program, their arguments from the page, so a new one is run without a change here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from scale_surgery.cli.program import main
from tests.test_docs import BLOCK, COMMANDS, run_python, workplace

CODE_AND_COMMANDS = re.compile(r"^\$ (scale-surgery .*)$", re.MULTILINE)


def device_option(name: str) -> click.Parameter | None:
    options = (parameter for parameter in main.commands[name].params if "--device" in parameter.opts)
    return next(options, None)


# results by command, each with the exit code that the page shows
Page = dict[str, list[tuple[Result, int]]]
# on the pages one has no output, which takes hours, and the other serves until it is stopped
WITHOUT_EXAMPLE = {"compare", "serve"}
WITH_DEVICE = sorted(name for name in main.commands if device_option(name) is not None and name not in WITHOUT_EXAMPLE)


def text_of_commands() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in COMMANDS)


def examples() -> list[list[str]]:
    """Words of every example of the page, without the program's name."""
    lines = CODE_AND_COMMANDS.findall(text_of_commands())
    return [shlex.split(line, comments=True)[1:] for line in lines]


def on(device: str, words: list[str]) -> list[str]:
    """An example told to run on a device; a command that takes few names takes the accelerator there is by `auto`."""
    option = device_option(words[0])
    if option is None:
        return words
    names = getattr(option.type, "choices", None)
    return [*words, "--device", device if names is None or device in names else "auto"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Page]]:
    """Pages by device; filled by the first test that asks for a device."""
    yield {}


def run_page(device: str, folder: Path) -> Page:
    """Run the page from top to bottom, its Python too, which writes what commands read."""
    page: Page = {}
    with workplace(folder):
        for language, body in BLOCK.findall(text_of_commands()):
            if language == "python":
                run_python(body)
            for line in CODE_AND_COMMANDS.findall(body) if language == "console" else ():
                words, wanted = shlex.split(line, comments=True)[1:], int("NOT verified" in body)
                page.setdefault(words[0], []).append((CliRunner().invoke(main, on(device, words)), wanted))
    return page


def test_every_command_with_a_device_has_an_example(device: str) -> None:
    assert set(WITH_DEVICE) <= {words[0] for words in examples()}
    assert WITH_DEVICE, "the control"


@pytest.mark.gpu  # the page takes long, and tests of the documentation run it on the CPU
@pytest.mark.parametrize("name", WITH_DEVICE)
def test_a_command_on_the_device(
    ran: dict[str, Page], tmp_path_factory: pytest.TempPathFactory, device: str, name: str
) -> None:
    if device not in ran:
        ran[device] = run_page(device, tmp_path_factory.mktemp("page"))
    for result, wanted in ran[device][name]:
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == wanted, result.output
