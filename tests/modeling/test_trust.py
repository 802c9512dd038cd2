"""Exported code is what a stranger runs: known, small, and unable to touch anything but tensors."""

from __future__ import annotations

import ast
import hashlib
import logging
import re
import shutil
from pathlib import Path

import pytest
import transformers

from scale_surgery import Request, expand, modeling, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.names import CODE_FILES, FUSED_CODE_FILES
from scale_surgery.errors import Problem
from scale_surgery.modeling import configuration_scale, expanded_releases
from tests.conftest import Pair, edited, load
from tests.tiny import save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
STANDARD_LIBRARY = {
    *("__future__", "collections", "contextlib", "copy", "dataclasses", "difflib", "functools", "importlib", "inspect"),
    *("math", "re", "threading", "typing", "weakref"),
}
# no files, no network, no processes, no code from texts
FORBIDDEN_CALLS = {"open", "eval", "exec", "compile", "__import__", "input", "getenv", "system", "popen", "load"}
EXPORTED = tuple(dict.fromkeys((*CODE_FILES, *FUSED_CODE_FILES)))


@pytest.mark.parametrize("file", EXPORTED)
def test_exported_code_imports_tensors_and_reaches_nothing_outside(file: str) -> None:
    tree = ast.parse(modeling.code_text(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= STANDARD_LIBRARY | {"torch", "transformers"}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert str(node.module).split(".")[0] in STANDARD_LIBRARY | {"torch", "transformers"}
        elif isinstance(node, ast.ImportFrom):
            # transformers copies a file's relative imports along only in the form `from .x import y`
            assert node.level == 1
            assert all(f"{node.module}.py" in files for files in (CODE_FILES, FUSED_CODE_FILES) if file in files)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not (names | {getattr(call, "attr", "") for call in calls}) & FORBIDDEN_CALLS


def test_exported_code_is_as_small_as_the_page_says() -> None:
    counted = re.search(r"size \| (\d+) files.* and (\d+) `expanded_\*.py`, less than ([\d,]+) lines", PAGE.read_text())
    modules = re.search(r"and (\d+) modules of the standard library", PAGE.read_text())
    assert counted is not None and modules is not None
    expanded = [file for file in CODE_FILES if file.startswith("expanded_")]
    assert [len(CODE_FILES), len(expanded)] == [int(counted[1]), int(counted[2])]
    assert len(STANDARD_LIBRARY - {"__future__"}) == int(modules[1])
    for files, lines in ((CODE_FILES, int(counted[3].replace(",", ""))), (FUSED_CODE_FILES, 1150)):
        assert sum(len(modeling.code_text(file).splitlines()) for file in files) < lines
    # the only module that is imported by its name is one that transformers has loaded already
    importing_files = [file for file in EXPORTED if "import_module(" in modeling.code_text(file)]
    assert importing_files == ["expanded_modules.py"]
    assert "import_module(type(module).__module__)" in modeling.code_text(importing_files[0])


def test_the_releases_that_code_names_are_those_that_are_tested() -> None:
    root = PAGE.parents[1]
    others = re.search(r"^COMPAT \?= (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    installed = re.search(r"^transformers==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert others is not None and installed is not None
    assert (*others[1].split(), installed[1]) == expanded_releases.TESTED
    assert sorted(file.stem for file in (root / "constraints").iterdir()) == sorted(others[1].split())


def messages_under(release: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What transformers logs, as if it were another release."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    # a module of transformers may have put another object in the place of the package meanwhile
    monkeypatch.setattr(expanded_releases.transformers, "__version__", release)
    monkeypatch.setattr(logger, "handlers", [handler])
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    return messages


@pytest.mark.parametrize(
    ("release", "is_told"), (("4.57.6", True), ("5.4.1", True), ("5.5.0", False), ("5.10.0.dev0", False))
)
def test_releases_that_run_code_of_a_config_are_told(
    monkeypatch: pytest.MonkeyPatch, release: str, is_told: bool
) -> None:
    messages = messages_under(release, monkeypatch)
    # classes of modules of their own, which nobody made before; the second says nothing more
    for number in range(2):
        configuration_scale.config_of(transformers.LlamaConfig, f"{release}.{number}")
    wanted = (
        "transformers before 5.5 can run code that a config.json names (CVE-2026-4372, CVE-2026-5241). Install a newer "
        "release, or load only files that you trust."
    )
    assert messages == [wanted] * is_told


@pytest.mark.parametrize(
    ("release", "is_told"), (("5.99.0", True), ("6.0.0.dev0", True), (f"{expanded_releases.TESTED[-1]}.7", False))
)
def test_a_release_that_nobody_tested_is_told_once_for_a_folder(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, release: str, is_told: bool
) -> None:
    messages = messages_under(release, monkeypatch)
    for _ in range(2):
        load(llama.path)
    wanted = (
        f"{llama.path}: transformers {release} is newer than {expanded_releases.TESTED[-1]}, the newest release that "
        f"the code of this model was tested with. Check it: scale-surgery verify {llama.path}"
    )
    assert messages == [wanted] * is_told


def test_verify_warns_of_code_that_no_release_wrote_even_where_the_manifest_vouches_for_it(
    llama: Pair, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "forged"))
    assert verify(folder, probes=None, record=False).warnings == (), "the control: of released code"
    code = folder / "expanded_blocks.py"
    code.write_text(code.read_text() + "# harmless\n")
    with edited(folder / "surgery.json") as manifest:
        manifest["code"]["expanded_blocks.py"] = hashlib.sha256(code.read_bytes()).hexdigest()
    verification = verify(folder, probes=None, record=False)
    assert verification.problems == ()
    assert verification.warnings == (
        "expanded_blocks.py: differs from the code of this release. Read it before you let it run with "
        "trust_remote_code; without, the code of this program runs.",
    )
    # nor is it excused as a file of the base
    with edited(folder / "surgery.json") as manifest:
        manifest["base_files"]["expanded_blocks.py"] = {
            "sha256": manifest["code"]["expanded_blocks.py"],
            "bytes": code.stat().st_size,
            "stored_as": "expanded_blocks.py",
        }
    assert verify(folder, probes=None, record=False).warnings == verification.warnings


def test_verify_warns_of_the_base_models_own_code(llama_base: Path, tmp_path: Path) -> None:
    (llama_base / "custom_generate").mkdir()
    (llama_base / "custom_generate" / "generate.py").write_text("print('anything')\n")
    folder = expand(llama_base, Request("1"), tmp_path / "expanded").path
    verification = verify(folder, probes=None, record=False)
    assert verification.passed
    assert verification.warnings == (
        "custom_generate/generate.py: is code of the base model, not of this program. Read it before you let it run "
        "with trust_remote_code; without, the code of this program runs.",
    )


def test_verify_notices_code_that_a_pinned_tokenizer_names(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen2")
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", base)
    folder = expand(base, Request("last:1"), tmp_path / "expanded").path
    file = folder / "tokenizer_config.json"
    with edited(file) as content:
        assert content.keys() == {"tokenizer_class"} and verify(folder, probes=None, record=False).passed
        content["auto_map"] = {"AutoTokenizer": ["org/evil--code.Code", None]}
    other_code = Problem("tokenizer-key-changed", "tokenizer_config.json: auto_map")
    assert verify(folder, probes=None, record=False).problems == (str(other_code),)
