"""What imports what: planning needs no torch, and exported code needs torch and transformers only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

from scale_surgery import modeling
from scale_surgery.planning.families import FAMILIES
from tests.conftest import REQUESTS

EXPORTED = sorted({file for family in FAMILIES.values() for file in family.code_files})
LIGHT = [
    f"{room}.{file.stem}"
    for room in ("checkpoint", "planning")
    for file in (modeling.FOLDER.parent / room).glob("[!_]*.py")
]


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


def test_a_plan_is_made_without_torch(base_of):
    script = """
import sys
from scale_surgery import Request, plan
print(plan(sys.argv[1], Request("last:2")).costs.parameters_added)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    command = [sys.executable, "-c", script, str(base_of("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


@pytest.mark.parametrize("file", EXPORTED)
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
            assert f"{node.module}.py" in EXPORTED
            continue
        else:
            continue
        assert roots <= {"torch", "transformers"} | set(sys.stdlib_module_names), file
    opens = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"open", "exec", "eval", "Path"}
    assert not opens, "opens no file"


def test_every_code_file_belongs_to_a_family():
    present = {file.name for file in modeling.FOLDER.glob("*.py")} - {"__init__.py"}
    assert present == set(EXPORTED)
    for family in FAMILIES.values():
        imported = [modeling.code_text(file) for file in family.code_files]
        assert f"class Scale{family.stem}ForCausalLM" in imported[1]
        assert f"class Scale{family.stem}Config" in imported[0]
        assert f'model_type = "scale_{family.model_type}"' in imported[0]
        classes = modeling.model_classes(family)
        assert classes[0].model_type == family.expanded_type
        assert issubclass(classes[1].config_class, classes[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_modeling_file_imports_every_file_itself(family):
    """transformers 4 copies what the file that it loads imports itself, and nothing that those import."""
    _, modeling_file, *shared = FAMILIES[family].code_files
    own = get_relative_imports(modeling.FOLDER / modeling_file)
    assert {f"{name}.py" for name in own} == {FAMILIES[family].code_files[0], *shared}


@pytest.mark.parametrize("family", FAMILIES)
def test_code_in_a_checkpoint_is_the_package_s(pair_of, family):
    for request in REQUESTS:
        folder: Path = pair_of(family, request).path
        assert {file.name for file in folder.glob("*.py")} == set(FAMILIES[family].code_files)
        for file in FAMILIES[family].code_files:
            assert (folder / file).read_bytes() == (modeling.FOLDER / file).read_bytes()
