"""docs/promises.ipynb: its cells run in order, as in a kernel, and it is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "promises.ipynb"


def cells() -> list[str]:
    """The code of each cell."""
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for number, body in enumerate(cells()):
        compile(body, f"cell {number}", "exec")


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {"__name__": "__main__"}
    for number, body in enumerate(cells()):
        exec(compile(body, f"cell {number}", "exec"), names)
