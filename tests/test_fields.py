"""An option is written once: what is read from a dataclass, what is refused, and what the command line makes of it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, Literal

import click
import pytest

from scale_surgery import (
    CalibrationSettings,
    GenerationSettings,
    PlanError,
    Probes,
    Push,
    RankingSettings,
    Request,
    RunOptions,
    TrainingSettings,
    TrainingStart,
)
from scale_surgery.cli.program import main
from scale_surgery.errors import Problem
from scale_surgery.fields import Range, fields_of, problems_of
from scale_surgery.folder.routers import RouterOptions
from scale_surgery.planning.request import VARIANTS
from scale_surgery.talking.serve import Address
from tests.conftest import problems, refused

TABLE = {"red": 1, "blue": 2}
# where a command takes the fields of a dataclass; fields that it does not take are set by it
TAKEN = {
    "plan": (Request, set()),
    "expand": (Request, set()),
    "train": (TrainingSettings, set()),
    "rank-layers": (RankingSettings, set()),
    "route-export": (RouterOptions, set()),
    "route-calibrate": (CalibrationSettings, {"plot"}),
    "push": (Push, {"check"}),
    "generate": (GenerationSettings, set()),
    "chat": (GenerationSettings, set()),
    "verify": (Probes, set()),
    "serve": (Address, set()),
    "evaluate": (RunOptions, {"memory_bytes"}),
}


@dataclass(frozen=True)
class Bread:
    """A loaf.

    Attributes:
        flour: What it is made of: rye, wheat
            or both.
        minutes: Minutes in the oven.
        salt: Share of salt.
        seeds: Seeds on top.
        colour: Its colour.

    And what follows is about no field: none at all.
    """

    flour: Literal["rye", "wheat"] | None = None
    minutes: Annotated[int, Range(least=1, most=90)] = 40
    salt: Annotated[float, Range(above=0, below=1, noun="a share")] = 0.02
    seeds: tuple[Literal["poppy", "sesame"], ...] = ()
    colour: str = field(default="red", metadata={"option": "color", "choices": lambda: TABLE})
    sliced: bool | None = None


def test_all_is_read_from_the_dataclass():
    fields = fields_of(Bread)
    assert list(fields) == ["flour", "minutes", "salt", "seeds", "colour", "sliced"]
    assert fields["flour"].help == "What it is made of: rye, wheat or both." and fields["colour"].help == "Its colour."
    assert [each.kind for each in fields.values()] == [str, int, float, tuple, str, bool]
    assert [each.choices for each in fields.values()] == [
        ("rye", "wheat"),
        (),
        (),
        ("poppy", "sesame"),
        ("red", "blue"),
        (),
    ]
    assert [name for name, each in fields.items() if each.is_optional] == ["flour", "sliced"]
    assert (fields["minutes"].default, fields["colour"].option) == (40, "color")


@pytest.mark.parametrize(
    ("values", "option", "kind"),
    [
        ({"flour": "corn"}, "--flour", "one of: rye, wheat"),
        ({"minutes": 91}, "--minutes", "from 1 to 90"),
        ({"minutes": 1.0}, "--minutes", "a whole number"),
        ({"minutes": True}, "--minutes", "a whole number"),
        ({"minutes": None}, "--minutes", "a whole number"),
        ({"salt": 1}, "--salt", "a share, more than 0 and less than 1"),
        ({"salt": math.nan}, "--salt", "a share, more than 0 and less than 1"),
        ({"salt": "much"}, "--salt", "a number"),
        ({"seeds": None}, "--seeds", "some of: poppy, sesame"),
        ({"seeds": (1,)}, "--seeds", "some of: poppy, sesame"),
        ({"sliced": 1}, "--sliced", "True or False"),
        ({"colour": "green"}, "--color", "one of: red, blue"),
    ],
)
def test_what_a_field_may_not_hold_is_said(values: dict[str, Any], option: str, kind: str):
    (value,) = values.values()
    assert problems_of(Bread(**values)) == [Problem("value-unfit", option, value=repr(value), kind=kind)]


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("minutes", "30", 30),
        ("minutes", "-7", -7),
        ("minutes", 30, 30),
        *(("minutes", text, text) for text in ("0100", "1:30", "1_000", "0x10", "1.0", "9" * 5000, "")),
        ("minutes", True, True),
        ("salt", "1e-3", 1e-3),
        ("salt", "2", 2),
        ("salt", "1:30", "1:30"),
        ("colour", "1.10", "1.10"),
        ("colour", 4, "4"),
        ("seeds", "poppy, sesame", ("poppy", "sesame")),
    ],
)
def test_a_number_is_read_where_one_is_expected(name: str, typed: Any, value: Any):
    """What says no number without a doubt stays text, which is refused."""
    read = fields_of(Bread)[name].read(typed)
    assert read == value and type(read) is type(value)


def test_what_a_field_may_hold_is_fine():
    assert problems_of(Bread()) == problems_of(Bread("rye", 1, 0.5, ("poppy",), "blue", True)) == []


def test_ends_of_ranges():
    assert [value in Range(least=0, below=1) for value in (-1, 0, 0.5, 1)] == [False, True, True, False]
    assert [value in Range(above=0) for value in (0, 1, math.inf, -math.inf, math.nan)] == [False, True, *[False] * 3]
    assert [value in Range(most=1) for value in (-math.inf, -9, 1, 2)] == [False, True, True, False]


def test_choices_that_are_rows_of_a_table_are_those_of_now(monkeypatch: pytest.MonkeyPatch):
    assert problems_of(Request("0", method="toy"))  # type: ignore[arg-type]
    monkeypatch.setitem(VARIANTS, "toy", VARIANTS["grow"])  # type: ignore[arg-type]
    assert not problems_of(Request("0", method="toy"))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", TAKEN)
def test_a_command_takes_every_field_as_the_dataclass_has_it(command: str):
    owner, left_out = TAKEN[command]
    options = {option.name: option for option in main.commands[command].params}
    for name, each in fields_of(owner).items():
        if name in left_out:
            continue
        if not each.has_option:
            assert name not in options
            continue
        option = options[name]
        assert isinstance(option, click.Option) and option.help
        assert f"--{each.option}" in option.opts
        if each.kind is str and each.choices:
            assert isinstance(option.type, click.Choice)
            assert set(each.choices) <= set(option.type.choices) <= {*each.choices, "none"}
        says_default = "efault" in option.help or option.show_default
        assert says_default or each.kind is bool or each.default is MISSING, f"{command} --{each.option}"
        assert each.range is None or each.range.bounds in option.help


@pytest.mark.parametrize(
    "owner",
    [Request, TrainingSettings, TrainingStart, RankingSettings, RouterOptions, CalibrationSettings, Push],
)
def test_every_field_is_described(owner: type):
    assert [name for name, each in fields_of(owner).items() if not each.help.endswith(".")] == []


def test_how_models_run_is_checked_before_one_is_opened():
    RunOptions(batch_size=1), Probes(max_new_tokens=0)
    assert [
        (problem.code, problem.where) for problem in problems(RunOptions, dtype="int8", batch_size=0, error=PlanError)
    ] == [("value-unfit", "--dtype"), ("value-unfit", "--batch-size")]
    with refused("value-unfit", "--max-new-tokens", PlanError):
        Probes(max_new_tokens=-1)


def test_commands_run_where_python_drops_docstrings():
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "scale_surgery", "train", "--help"], capture_output=True, text=True, check=True
    )
    assert "--learning-rate" in done.stdout and "default: 8" in done.stdout
