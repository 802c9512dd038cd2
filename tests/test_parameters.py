"""A function of many parameters hides a value that nobody named: none has more than eight."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import scale_surgery

PACKAGE = Path(scale_surgery.__file__).parent
MOST_PARAMETERS = 8


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of what a function takes; a method's own object is none."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
    return [name for name in names if name not in ("self", "cls")]


def long_functions(root: Path) -> Iterator[str]:
    """Public functions and methods with more parameters; code that travels with checkpoints keeps its own."""
    for file in sorted(root.rglob("*.py")):
        if file.parent.name == "modeling":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                names = parameters(node)
                if len(names) > MOST_PARAMETERS:
                    yield f"{file.relative_to(root)}: {node.name}({', '.join(names)})"


def test_no_public_function_has_more_than_eight_parameters():
    assert list(long_functions(PACKAGE)) == []


def test_a_ninth_parameter_is_found(tmp_path):
    (tmp_path / "one.py").write_text(
        "def eight(a, b, /, c, d, *e, f, g, **h): ...\ndef _nine(a, b, c, d, e, f, g, h, i): ..."
    )
    assert list(long_functions(tmp_path)) == []
    (tmp_path / "two.py").write_text("class Some:\n    async def nine(self, a, b, /, c, d, *e, f, g, h, **i): ...")
    assert list(long_functions(tmp_path)) == ["two.py: nine(a, b, c, d, f, g, h, e, i)"]
