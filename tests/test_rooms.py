"""Rooms: imports that run point one way, and none goes in a circle."""

from __future__ import annotations

import ast
import functools
import shutil
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import scale_surgery

PACKAGE = Path(scale_surgery.__file__).parent
# an import, for type checkers too, may point to a room further left, or stay in its own
ROOMS = [
    "errors",
    "visible",
    "fields",
    "command_lines",
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
    "drawing",
    "training",
    "routing",
    "talking",
    "hub",
    "show",
    "learning",
    "comparing",
    "serving",
    "api",
    "demo",
    "cli",
    "__main__",
]
# imports that are still to be cut, with the reason why each is still here; the list only gets shorter
LEFT = {
    "modeling.expanded_routers imports modeling.expanded_routing": "both travel, and the first is read without torch",
}


def imports(file: Path, root: Path) -> Iterator[str]:
    """Modules of this package that a file imports: when it runs, in functions, and for type checkers alone."""
    for node in _import_statements(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "scale_surgery")
            continue
        if node.level and file.parent.name != "modeling":
            raise AssertionError(f"{file}: a relative import, {ast.unparse(node)}")
        module = f"scale_surgery.modeling.{node.module}" if node.level else str(node.module)
        names = [f"{module}.{alias.name}" for alias in node.names]
        modules = [name for name in names if _is_module(name, root)]
        targets = modules + ([module] if len(modules) < len(names) else [])
        yield from (name for name in targets if name.split(".")[0] == "scale_surgery")


@functools.cache
def _import_statements(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom))


def _is_module(name: str, root: Path) -> bool:
    path = root.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def graph(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports; the package itself, a table of contents, is left out."""
    named = {".".join(file.relative_to(root.parent).with_suffix("").parts): file for file in root.rglob("*.py")}
    names = {name.removesuffix(".__init__"): file for name, file in named.items()}
    return {name: set(imports(file, root)) - {name} for name, file in names.items() if name != "scale_surgery"}


def _named(module: str, target: str) -> str:
    return f"{module} imports {target}".replace("scale_surgery.", "")


def _without(imported: dict[str, set[str]], left: Collection[str]) -> dict[str, set[str]]:
    return {
        module: {target for target in targets if _named(module, target) not in left}
        for module, targets in imported.items()
    }


def wrong_imports(root: Path) -> list[str]:
    """Imports that point to a room further right, or out of every room."""
    violations = []
    for module, imported in graph(root).items():
        for target in sorted(imported):
            rooms = [name.split(".")[1] if "." in name else name for name in (module, target)]
            if rooms[1] not in ROOMS or ROOMS.index(rooms[1]) > ROOMS.index(rooms[0]):
                violations.append(_named(module, target))
    return violations


def circles(root: Path) -> list[str]:
    """A circle of imports, or nothing."""
    try:
        TopologicalSorter(_without(graph(root), LEFT)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's source, to be spoiled by a test."""
    ignored = shutil.ignore_patterns("__pycache__", "models")
    return Path(shutil.copytree(PACKAGE, tmp_path / "scale_surgery", ignore=ignored))


def test_imports_point_to_rooms_further_left():
    assert sorted(set(wrong_imports(PACKAGE)) - set(LEFT)) == []


def test_nothing_imports_itself_in_a_circle():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize("left", LEFT)
def test_what_is_left_to_cut_is_still_there(left):
    """An import that was cut leaves the list: it points the wrong way, or closes a circle without the others."""
    edges = _without(graph(PACKAGE), set(LEFT) - {left})
    try:
        TopologicalSorter(edges).prepare()
    except CycleError:
        return
    assert left in wrong_imports(PACKAGE)


def test_one_import_the_wrong_way_is_found(copy):
    file = copy / "surgery" / "strip.py"
    text, violation = file.read_text(), "surgery.strip imports evidence.verify"
    verify = "from scale_surgery.evidence.verify import verify"
    for line, wrong in (
        (verify, [violation]),
        ("from scale_surgery.evidence import verify", [violation]),
        ("import scale_surgery.evidence.verify", [violation]),
        (f"def later():\n    {verify}", [violation]),
        (f"if TYPE_CHECKING:\n    {verify}", [violation]),
        # the package itself is no room
        ("from scale_surgery import verify", ["surgery.strip imports scale_surgery"]),
    ):
        file.write_text(f"{text}\n{line}\n")
        assert sorted(set(wrong_imports(copy)) - set(LEFT)) == wrong, line


@pytest.mark.parametrize("form", ("def later():\n    {}", "if TYPE_CHECKING:\n    {}"))
@pytest.mark.parametrize(
    ("file", "line", "names"),
    (
        ("planning/specs.py", "from scale_surgery.planning.plan import Plan", {"planning.plan", "planning.specs"}),
        # code that travels imports its neighbours by dots
        ("modeling/expanded_shapes.py", "from .expanded_modules import KINDS", {"modeling.expanded_shapes"}),
    ),
)
def test_one_circle_inside_a_room_is_found(copy, form, file, line, names):
    text = (copy / file).read_text()
    (copy / file).write_text(f"{text}\n{form.format(line)}\n")
    assert names <= {module.removeprefix("scale_surgery.") for module in circles(copy)}


def test_rooms_say_what_they_are():
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder.name


def test_no_room_bears_the_name_of_a_public_verb():
    assert not {name for name in ROOMS if name in scale_surgery.__all__}
