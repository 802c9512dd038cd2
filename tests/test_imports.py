"""What imports what: torch is imported when facts are derived, and exported code needs torch and transformers only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from transformers.dynamic_module_utils import get_relative_imports

from scale_surgery import modeling
from scale_surgery.planning.architecture import CODE_FILES
from tests.conftest import REQUESTS
from tests.families import FAMILIES

LIGHT = [
    f"{room}.{file.stem}"
    for room in ("checkpoint", "planning")
    for file in (modeling.FOLDER.parent / room).glob("[!_]*.py")
] + [f"deriving.{name}" for name in ("base", "inspect", "planned")]


def heavy_imports(modules: Sequence[str]) -> set[str]:
    """Which of the slow libraries a fresh process has imported after importing our modules."""
    names = ["scale_surgery", *(f"scale_surgery.{name}" for name in modules)]
    script = (
        f"import sys, {', '.join(names)}; print(*(name for name in ('torch', 'transformers') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_planning_imports_neither_torch_nor_transformers():
    assert heavy_imports(LIGHT) == set()


def test_the_test_above_can_fail():
    assert heavy_imports(["surgery.blocks"]) == {"torch"}


def test_torch_is_imported_when_facts_are_derived_and_not_before(base_of, pair_of):
    """Facts come from the stock model itself; what is refused before they are asked for costs no import."""
    script = """
import sys
from scale_surgery import CheckpointError, Request, plan
heavy, base, expanded = {"torch", "transformers"}, *sys.argv[1:]
try:
    plan(expanded, Request("last:2"))
except CheckpointError as error:
    assert not heavy & set(sys.modules), error
    print(plan(base, Request("last:2")).costs.parameters_added)
assert heavy <= set(sys.modules)
"""
    command = [sys.executable, "-c", script, str(base_of("llama")), str(pair_of("llama", "adapt").path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


@pytest.mark.parametrize("file", CODE_FILES)
def test_exported_code_stands_alone(file):
    tree = ast.parse(modeling.code_text(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots = {node.module.split(".")[0]}
        elif isinstance(node, ast.ImportFrom):
            # transformers copies a file's relative imports along only in the form `from .x import y`
            assert node.level == 1
            assert f"{node.module}.py" in CODE_FILES
            continue
        else:
            continue
        assert roots <= {"torch", "transformers"} | set(sys.stdlib_module_names), file
    opens = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"open", "exec", "eval", "Path"}
    assert not opens, "opens no file"


def test_every_code_file_travels():
    assert {file.name for file in modeling.FOLDER.glob("*.py")} - {"__init__.py"} == set(CODE_FILES)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_made_of_the_stock_ones(family):
    classes = modeling.model_classes(FAMILIES[family])
    assert classes["AutoConfig"].model_type == FAMILIES[family].expanded_type
    for auto_class, stock in FAMILIES[family].classes.items():
        assert classes[auto_class].config_class is classes["AutoConfig"]
        assert classes[auto_class].__bases__[1] is getattr(transformers, stock)


def test_the_modeling_file_imports_every_file_itself():
    """transformers 4 copies what the file that it loads imports itself, and nothing that those import."""
    configuration_file, modeling_file, *shared = CODE_FILES
    own = get_relative_imports(modeling.FOLDER / modeling_file)
    assert {f"{name}.py" for name in own} == {configuration_file, *shared}


@pytest.mark.parametrize("family", FAMILIES)
def test_code_in_a_checkpoint_is_the_package_s(pair_of, family):
    for request in REQUESTS:
        folder: Path = pair_of(family, request).path
        assert {file.name for file in folder.glob("*.py")} == set(CODE_FILES)
        for file in CODE_FILES:
            assert (folder / file).read_bytes() == (modeling.FOLDER / file).read_bytes()
