"""Options: under which heading each stands in the help, and what --set takes."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.headings import COMMON, SUBJECTS, Headed
from scale_surgery.cli.program import main
from scale_surgery.fields import fields_of
from scale_surgery.planning.request import Request
from scale_surgery.training.settings import TrainingSettings
from tests.command import run

each_command = pytest.mark.parametrize("name", sorted(main.commands))


def options_of(name: str) -> list[click.Option]:
    return [option for option in main.commands[name].params if isinstance(option, click.Option)]


@each_command
def test_the_help_lists_every_option_once_in_80_columns(name: str) -> None:
    text = run(name, "--help").output
    assert max(map(len, text.splitlines())) <= 80 and "\\b" not in text
    assert [option.name for option in options_of(name) if not option.help] == []
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text[text.index(f"Example: scale-surgery {name}") :], re.MULTILINE)
    assert sorted(listed) == sorted([option.opts[-1] for option in options_of(name)] + ["--help"])


@each_command
def test_at_most_nine_options_stand_first(name: str) -> None:
    command = main.commands[name]
    assert isinstance(command, Headed) and len(command.first) <= 5
    first = [option for option in options_of(name) if command.heading_of(option) == "Options"]
    if command.first:
        assert {option.name for option in first} == set(command.first)
        text = run(name, "--help").output
        assert text.index("\nOptions:") < text.index("\nMore options:") < text.index("\nMessages:")
    elif name != "rank-layers" and name != "push":
        assert len(first) <= 9


def test_headings_name_options_that_there_are() -> None:
    known = {option.name for name in main.commands for option in options_of(name)}
    named = [name for names in (*SUBJECTS.values(), *COMMON.values()) for name in names]
    assert set(named) <= known and len(named) == len(set(named))


@pytest.mark.parametrize(("command", "owner"), (("plan", Request), ("train", TrainingSettings)))
def test_what_has_no_option_is_named_by_set(command: str, owner: type) -> None:
    (option,) = (option for option in options_of(command) if option.opts == ["--set"])
    rare = [name for name, field in fields_of(owner).items() if not field.has_option and field.is_plain]
    assert rare and all(re.search(rf"\b{name}\b", option.help or "") for name in rare)


def test_set_fills_the_field(tmp_path: Path) -> None:
    planned = ["plan", str(SHIPPED_MODEL), "--layers", "last:1"]
    text = run(*planned).output
    assert "zero" in text and "random" not in text
    text = run(*planned, "--set", "init-w22=random", "--set", "seed=3").output
    assert "random" in text and "--set init_w22=random --set seed=3" in text, "and the line to type next says it"


def test_all_that_is_wrong_with_set_is_said() -> None:
    wrong = ["--set", "warmup=2", "--set", "steps=3", "--set", "learn_prompts=maybe"]
    text = " ".join(run("train", ".", "--data", "x", *wrong, code=2).output.split())
    assert "--set warmup is 2, expected a share of the steps, at least 0 and less than 1." in text
    assert "--set steps: there is no such setting, expected one of: packing, learn_prompts," in text
    assert "--set learn_prompts is 'maybe', expected True or False." in text
    assert "--set seed is not KEY=VALUE" in run("plan", ".", "--set", "seed", code=2).output
