"""Rooms: imports that run point one way, and none goes in a circle."""

from __future__ import annotations

import ast
import functools
import shutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import scale_surgery

PACKAGE = Path(scale_surgery.__file__).parent
# an import that runs may point to a room further left, or stay in its own
ROOMS = [
    "errors",
    "fields",
    "progress",
    "checkpoint",
    "modeling",
    "planning",
    "text",
    "running",
    "deriving",
    "biographies",
    "tensors",
    "folder",
    "surgery",
    "evidence",
    "show",
    "training",
    "routing",
    "talking",
    "learning",
    "hub",
    "api",
    "demo",
    "cli",
    "__main__",
]


def imports(file: Path, root: Path) -> Iterator[str]:
    """Modules of this package that a file imports when it runs, in functions too; not for type checkers alone."""
    for node in _that_run(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{file}: a relative import, {ast.unparse(node)}")
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "scale_surgery")
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if _is_module(name, root)]
            targets = modules + ([str(node.module)] if len(modules) < len(names) else [])
            yield from (name for name in targets if name.split(".")[0] == "scale_surgery")


@functools.cache
def _that_run(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Imports of a file's text that are not for type checkers alone; relative ones always."""
    tree = ast.parse(text)
    guarded = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    return tuple(
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and id(node) not in guarded)
        or (isinstance(node, ast.ImportFrom) and (node.level or id(node) not in guarded))
    )


def _is_module(name: str, root: Path) -> bool:
    path = root.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def graph(root: Path) -> dict[str, set[str]]:
    """What each module imports; code that travels with checkpoints stands alone, see test_imports.py."""
    files = [file for file in root.rglob("*.py") if file.parent.name != "modeling" or file.name == "__init__.py"]
    named = {".".join(file.relative_to(root.parent).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): set(imports(file, root)) for name, file in named.items()}


def wrong_imports(root: Path) -> list[str]:
    """Imports that point to a room further right, or out of every room."""
    violations = []
    for module, imported in graph(root).items():
        if module == "scale_surgery":
            continue
        for target in sorted(imported):
            rooms = [name.split(".")[1] if "." in name else name for name in (module, target)]
            if rooms[1] not in ROOMS or ROOMS.index(rooms[1]) > ROOMS.index(rooms[0]):
                violations.append(f"{module} imports {target}")
    return violations


def circles(root: Path) -> list[str]:
    """A circle of imports, or nothing."""
    edges = {module: imported - {module} for module, imported in graph(root).items() if module != "scale_surgery"}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's source, to be spoiled by a test."""
    ignored = shutil.ignore_patterns("__pycache__", "models")
    return Path(shutil.copytree(PACKAGE, tmp_path / "scale_surgery", ignore=ignored))


def test_imports_that_run_point_to_rooms_further_left():
    assert wrong_imports(PACKAGE) == []


def test_nothing_imports_itself_in_a_circle():
    assert circles(PACKAGE) == []


def test_one_import_the_wrong_way_is_found(copy):
    file = copy / "surgery" / "strip.py"
    text, violation = file.read_text(), "scale_surgery.surgery.strip imports scale_surgery.evidence.verify"
    verify = "from scale_surgery.evidence.verify import verify"
    for line, wrong in (
        (verify, [violation]),
        ("from scale_surgery.evidence import verify", [violation]),
        ("import scale_surgery.evidence.verify", [violation]),
        (f"def later():\n    {verify}", [violation]),
        # for type checkers alone it is none, and the package itself is no room
        (f"if TYPE_CHECKING:\n    {verify}", []),
        ("from scale_surgery import verify", ["scale_surgery.surgery.strip imports scale_surgery"]),
    ):
        file.write_text(f"{text}\n{line}\n")
        assert wrong_imports(copy) == wrong, line


def test_one_circle_inside_a_room_is_found(copy):
    file = copy / "planning" / "specs.py"
    file.write_text(f"{file.read_text()}\ndef later():\n    from scale_surgery.planning.plan import plan\n")
    assert {"scale_surgery.planning.plan", "scale_surgery.planning.specs"} <= set(circles(copy))


def test_rooms_say_what_they_are():
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder.name


def test_no_room_bears_the_name_of_a_public_verb():
    assert not {name for name in ROOMS if name in scale_surgery.__all__}
