"""-o means the same in every command: a folder, or a file whose suffix says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from scale_surgery import CheckpointError, Request, expand
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.staging import check_output_files
from scale_surgery.cli.outputs import OutputFile, OutputFolder
from scale_surgery.cli.program import main
from scale_surgery.errors import Problem
from tests.command import run
from tests.conftest import digests, problems
from tests.each import mostly

WRITING = {
    name: next(option for option in command.params if "--output" in option.opts)
    for name, command in main.commands.items()
    if any("--output" in option.opts for option in command.params)
}
FOLDERS = sorted(name for name, option in WRITING.items() if isinstance(option.type, OutputFolder))
FILES = sorted(name for name, option in WRITING.items() if isinstance(option.type, OutputFile))


def needed(name: str) -> list[str]:
    """Arguments and options without which a command is not understood; nothing of that name exists."""
    parameters = [parameter for parameter in main.commands[name].params if parameter.required]
    options = [(parameter.opts[-1], "nothing") for parameter in parameters if isinstance(parameter, click.Option)]
    arguments = ["nothing" for parameter in parameters if isinstance(parameter, click.Argument)]
    return arguments + [word for option in options for word in option if option[0] != "--output"]


def test_every_command_that_writes_has_one_of_two_kinds_of_output():
    assert sorted(WRITING) == sorted(FOLDERS + FILES)
    assert sorted(main.commands.keys() - WRITING.keys()) == ["chat", "inspect", "push", "serve"], "they write no file"
    assert all("-o" in option.opts for option in WRITING.values())
    for name, command in main.commands.items():
        for option in command.params:
            says = (getattr(option, "help", None) or "").split(" ")[0]
            if says in ("Draw", "Write") and not getattr(option, "is_flag", False):
                assert option is WRITING[name] or (says == "Write" and name in FOLDERS), f"{name} {option.name}"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("file", ("result.pdf", "result", "result.JSON.txt"))
def test_another_suffix_is_refused_with_those_that_are_right(name, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in WRITING[name].opts:
        shown = " ".join(run(name, *needed(name), option, file, code=2).stderr.split())
        right = " or ".join(WRITING[name].type.suffixes)
        assert f"{file}: its suffix has to say what is written, expected {right}." in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("file", ("made.json", "model.safetensors", "report.HTML"))
def test_a_folder_does_not_have_the_name_of_a_file(name, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = " ".join(run(name, *needed(name), "-o", file, code=2).stderr.split())
    assert f"{file} is the name of a file, expected that of a folder." in shown
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), folder / "wide-1.5")
    (folder / "text.txt").write_text("Ada was born in Rome.", encoding="utf-8")
    return folder


COMMANDS = (
    ("plan {model} --layers last:1", (".json",)),
    ("verify {wide} --files-only", (".json",)),
    ("report {wide} --files-only", (".html", ".json")),
    ("evaluate {model} --old {text} --new {text}", (".json", ".png", ".svg")),
    ("rank-layers {model} --data {text} --steps 1 --budget 90% --sequence-length 4", (".json", ".png", ".svg")),
)
BEGINNINGS = {".json": b"{\n", ".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml"}


@pytest.mark.parametrize(
    ("command", "suffixes"), mostly(COMMANDS, COMMANDS[:4].__contains__), ids=lambda value: value[:10]
)
def test_the_suffix_says_what_is_written(command, suffixes, place, tmp_path):
    places = {"model": SHIPPED_MODEL, "wide": place / "wide-1.5", "text": place / "text.txt"}
    arguments = command.format(**places).split()
    assert set(suffixes) == set(WRITING[arguments[0]].type.suffixes)
    files = [tmp_path / f"result{suffix}" for suffix in suffixes]
    # again over what is there
    for _ in range(2):
        printed = run(*arguments, *(word for file in files for word in ("-o", file)), "--json").stdout
    for file in files:
        assert file.read_bytes()[:15].lower().startswith(BEGINNINGS[file.suffix].lower()), file
    # a saved plan is what expand reads
    assert arguments[0] == "plan" or json.loads((tmp_path / "result.json").read_text()) == json.loads(printed)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in files}


def test_a_file_that_cannot_be_written_is_refused_before_any_work(place, tmp_path):
    model, text, twice = place / "wide-1.5", place / "text.txt", tmp_path / "report.html"
    check_output_files([tmp_path / "new" / "report.html", twice, None], [model, text])
    files = [
        tmp_path / "a.json",
        twice,
        tmp_path / "x" / ".." / "report.html",
        text,
        tmp_path,
        text / "a.html",
        model / "config.json",
    ]
    assert problems(check_output_files, files, [model, text], error=CheckpointError) == [
        Problem("output-file-is-input", text, input=str(text)),
        Problem("output-file-is-input", text / "a.html", input=str(text)),
        Problem("output-file-is-input", model / "config.json", input=str(model)),
        Problem("output-file-is-folder", tmp_path),
        Problem("output-file-closed", text / "a.html", parent=text),
        Problem("output-file-twice", twice),
    ]


@pytest.mark.slow
def test_a_file_that_breaks_off_leaves_nothing(place, tmp_path):
    """The largest size of a file, as a full disk: in a process of its own, which it is for."""
    page = tmp_path / "report.html"
    command = f'ulimit -f 8; "{sys.executable}" -m scale_surgery report "{place / "wide-1.5"}" --files-only -o "{page}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"{page}: cannot be written (File too large). Choose another place." in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_equal_pictures_have_equal_bytes(place, tmp_path):
    texts = ("--old", place / "text.txt", "--new", place / "text.txt")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run("evaluate", SHIPPED_MODEL, *texts, "-o", tmp_path / name / "plane.svg", "-o", tmp_path / name / "plane.png")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
