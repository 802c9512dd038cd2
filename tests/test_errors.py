"""The tree of errors: as drawn in its docstring, each caught by its base, none a programming error."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from scale_surgery import errors
from scale_surgery.errors import (
    CheckpointError,
    DataError,
    HubError,
    PlanError,
    Problem,
    ServingError,
    SurgeryError,
    TrainingError,
    UnsupportedFamilyError,
    counted,
    name_some,
    shorten,
)

PACKAGE = Path(errors.__file__).parent


def test_the_tree_is_the_one_that_is_drawn():
    assert UnsupportedFamilyError.__bases__ == (PlanError,)
    for error in (PlanError, CheckpointError, DataError, TrainingError, HubError, ServingError):
        assert error.__bases__ == (SurgeryError,)
    assert SurgeryError.__bases__ == (Exception,)
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    classes -= {"TextWarning"}
    drawn = {line.strip(" │├└─").split()[0] for line in errors.__doc__.splitlines() if "Error " in line}
    assert drawn == classes


@pytest.mark.parametrize(
    "kind", (SurgeryError, PlanError, CheckpointError, DataError, TrainingError, HubError, ServingError)
)
def test_several_problems_are_one_error_of_the_same_kind(kind):
    error = kind(Problem("key-missing", "one"), Problem("key-unknown", "two"))
    assert str(error) == "one is missing.\ntwo is unknown."


def test_what_the_package_raises_is_in_the_tree():
    """A bare ValueError, KeyError or RuntimeError would reach the user as a traceback."""
    known = {name for name in vars(errors) if name.endswith("Error")}
    # caught inside the package, or a mistake of who calls a function that no command gives a user's values to
    elsewhere = {"selection.py": {"ValueError"}, "files.py": {"OSError"}, "biographies.py": {"ValueError"}}
    # pydantic takes it for what is wrong with a value
    elsewhere["fields.py"] = {"ValueError"}
    # caught by whoever knows the file
    elsewhere |= {file: {"RecordError"} for file in ("records.py", "record.py", "record_schema.py", "routers.py")}
    elsewhere["reading.py"] = {"ValueError", "OSError"}
    # as Python wants it of a module
    elsewhere["__init__.py"] = {"AttributeError"}
    # answered by the server, in the form of OpenAI
    elsewhere |= {file: {"Refusal"} for file in ("request_fields.py", "server.py")}
    # one form of a conversation of several that are tried
    elsewhere["answers.py"] = {"UnfitError"}
    # the class by which vLLM's server knows a mistake of a request; its words are those of a Problem
    elsewhere["plugin.py"] = {"VLLMValidationError"}
    elsewhere |= {"attention.py": {"SplitError"}, "mlp.py": {"SplitError"}}
    # code that travels with checkpoints stands alone and has no tree
    for file in (file for file in PACKAGE.rglob("*.py") if file.parent.name not in ("modeling", "engine")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func)
                is_click = name.startswith(("click.", "SystemExit"))
                assert name in known or is_click or name in elsewhere.get(file.name, set()), f"{file.name}: {name}"


def test_things_are_counted_in_words():
    assert [counted(count, "text") for count in (0, 1, 2, 1024)] == ["0 texts", "1 text", "2 texts", "1,024 texts"]


def test_long_lists_are_shortened_and_counted():
    lines = [f"{number}: a." for number in range(20)]
    assert shorten(lines[:12]) == lines[:12] and name_some(lines[:5]) == ", ".join(lines[:5])
    assert shorten(lines) == [*lines[:12], "... and 8 more."]
    assert shorten(lines, 3, "; see --report") == [*lines[:3], "... and 17 more; see --report"]
    assert name_some(["a", "b", "c"], 2) == "a, b and 1 more"
