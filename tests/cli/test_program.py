"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from scale_surgery.cli.options import output_options, parse_size
from scale_surgery.cli.program import main, terminated_as_interrupted
from scale_surgery.deriving.planned import make_plan
from scale_surgery.folder.record import read_manifest
from scale_surgery.show.console import Output
from tests.command import run
from tests.conftest import digests
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("cli") / "base", "llama")


@pytest.fixture(scope="module")
def expanded(base: Path) -> Path:
    run("expand", base, "--layers", "last:1", "-o", base.parent / "expanded")
    return base.parent / "expanded"


@pytest.mark.parametrize(
    ("written", "completed"),
    [("l", ["lora"]), ("lora,", ["lora,full", "lora,osf"]), ("full,lora,o", ["full,lora,osf"]), ("x", [])],
)
def test_a_shell_completes_the_names_of_a_list(written: str, completed: list[str]) -> None:
    asked = ShellComplete(main, {}, "scale-surgery", "_COMPLETE")
    found = [item.value for item in asked.get_completions(["compare", "--methods"], written)]
    assert found[: len(completed)] == completed and bool(found) == bool(completed)


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from scale_surgery.cli.program import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_sigterm_is_an_interrupt_while_a_command_runs() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_module_and_command_are_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "scale_surgery", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == run("--version").output


def test_each_command_is_in_the_module_of_its_name() -> None:
    modules = {name: command.callback.__module__ for name, command in main.commands.items()}
    assert modules == {name: f"scale_surgery.cli.{name.replace('-', '_')}" for name in modules}


def test_the_whole_job(base: Path, tmp_path: Path) -> None:
    plan, expanded, stripped = tmp_path / "plan.json", tmp_path / "expanded", tmp_path / "stripped"
    assert "family" in run("inspect", base).stdout
    run("plan", base, "--layers", "1-2", "-o", plan)
    assert "expanded layers   1-2  (2 of 3)" in run("expand", base, "--plan", plan, "-o", expanded).stdout
    report = tmp_path / "certificate.json"
    shown = run("verify", expanded, "--base", base, "-o", report).stdout
    assert "bit-equal" in shown and "verified  preserve, untrained, base base" in " ".join(shown.split("\n"))
    assert json.loads(report.read_text())["passed"] is True
    run("strip", expanded, "-o", stripped)
    assert digests(stripped) == digests(base)


@pytest.mark.parametrize("saved", (False, True))
def test_expand_plans_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    run("plan", base, "--layers", "1-2", "-o", tmp_path / "plan.json")
    made = []

    def counting(*args: Any, **options: Any) -> Any:
        made.append(args)
        return make_plan(*args, **options)

    for module in ("scale_surgery.deriving.planned", "scale_surgery.surgery.expand"):
        monkeypatch.setattr(f"{module}.make_plan", counting)
    asked = ["--plan", tmp_path / "plan.json"] if saved else ["--layers", "1-2"]
    run("expand", base, *asked, "-o", tmp_path / "out")
    assert len(made) == 1


def test_json_is_all_that_stdout_holds(base: Path, expanded: Path, tmp_path: Path) -> None:
    assert json.loads(run("inspect", base, "--json").stdout)["family"] == "llama"
    plan = json.loads(run("plan", base, "--layers", "all", "--json").stdout)
    assert plan["layers"] == [0, 1, 2]
    done = json.loads(run("expand", base, "--layers", "all", "-o", tmp_path / "e", "--json").stdout)
    assert done["plan"]["tensors"] == plan["tensors"]
    result = json.loads(run("verify", expanded, "--max-new-tokens", "2", "--json").stdout)
    assert [promise["name"] for promise in result["promises"]] == [
        "recoverable",
        "output_at_init",
        "base_stream_always",
        "bounded_forgetting",
    ]
    assert json.loads(run("strip", expanded, "-o", tmp_path / "s", "--json").stdout)["base_name"] == "base"


def test_verify_exits_with_1_when_a_promise_is_broken(expanded: Path) -> None:
    shown = run("verify", expanded, "--files-only").stdout
    assert "BROKEN" not in shown and "not checked" in shown
    assert "NOT verified" in run("verify", expanded, "--files-only", "--promise", "output_at_init", code=1).stdout


def test_a_known_error_is_one_line_on_stderr_and_exit_code_1(base: Path, tmp_path: Path) -> None:
    result = run("expand", base, "--layers", "9", "-o", tmp_path / "no", code=1)
    assert result.stdout == ""
    assert " ".join(result.stderr.split()) == (
        "error: --layers 9: layer 9 is out of range, the model has layers 0 to 2."
    )
    assert "Traceback" in run("expand", base, "--layers", "9", "--debug", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expand", "BASE"], "Give --layers or new tokens, or --plan with a saved plan, one of the two."),
        (["plan", "BASE"], "--layers is missing, for example --layers last:4."),
        (["plan", "BASE", "--copies", "2", "--set", "seed=1"], "--copies, seed needs --layers."),
        (["verify", "BASE", "--memory", "four"], "--memory four is not a size, expected for example 4GiB or 500MB."),
        (["verify", "BASE", "--memory", "-4GiB"], "--memory -4GiB is not a size, expected for example 4GiB or 500MB."),
    ],
)
def test_wrong_usage_exits_with_2(base: Path, arguments: list[str], message: str) -> None:
    result = run(*[str(base) if word == "BASE" else word for word in arguments], code=2)
    assert message in result.stderr
    sizes = {"4GiB": 4 * 1024**3, "500MB": 500_000_000, "77": 77, "1.5 KB": 1500}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_errors_of_others_are_one_line_too(base: Path, tmp_path: Path) -> None:
    result = run("expand", base, "--layers", "0", "-o", tmp_path / "e", "--device", "meta", code=1)
    assert result.stderr.startswith("error: ") and "--debug shows where." in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "e").exists()
    (tmp_path / "file").touch()
    result = run("plan", base, "--layers", "0", "-o", tmp_path / "file" / "plan.json", code=1)
    assert "plan.json" in result.stderr and "Traceback" not in result.stderr
    run("plan", base, "--layers", "0", "-o", tmp_path / "new" / "plan.json")
    assert (tmp_path / "new" / "plan.json").is_file()


def test_quiet_leaves_out_what_libraries_warn_of(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    @click.command()
    @output_options
    def command(out: Output) -> None:
        warnings.warn("old", stacklevel=1)
        logging.getLogger("library").warning("slow")
        logging.getLogger("library").error("broken")

    assert CliRunner().invoke(command, ["-q"]).exit_code == 0
    assert caplog.messages == ["broken"] and not recwarn.list
    assert CliRunner().invoke(command, []).exit_code == 0, "the control, and nothing stays silent"
    assert caplog.messages == ["broken", "slow", "broken"] and [str(warning.message) for warning in recwarn] == ["old"]


@pytest.mark.parametrize(("command", "suffix"), (("plan", ".json"), ("expand", "")))
def test_what_is_not_taken_along_is_named(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, suffix: str
) -> None:
    """In the result, and by a warning."""
    (tmp_path / "secret").write_text("key")
    (llama_base / "notes.txt").symlink_to(tmp_path / "secret")
    (llama_base / "pytorch_model.bin").write_bytes(b"pickle")
    monkeypatch.chdir(tmp_path)
    if command == "expand":
        silent = run(command, llama_base, "--layers", "0", "-q")
        assert "not copied   pytorch_model.bin" in silent.stdout and silent.stderr == ""
        assert (tmp_path / "base-scale" / "surgery.json").is_file(), "named after the model"
    notice = run(command, llama_base, "--layers", "1", "-o", tmp_path / f"out{suffix}").stderr
    both = "other weight formats, links out of the folder and logs are not copied: pytorch_model.bin, notes.txt"
    assert notice == f"warning: {both}\n"
    for name in ("notes.txt", "pytorch_model.bin"):
        (llama_base / name).unlink()
    assert "taken along" not in run(command, llama_base, "--layers", "1", "-o", tmp_path / f"again{suffix}").stderr


@pytest.mark.parametrize(
    "command",
    (
        ("verify",),
        ("strip", "-o", "{out}"),
        ("train", "--data", "text", "-o", "{out}"),
        ("report",),
        ("merge", "-o", "{out}"),
        ("extract", "-o", "{out}"),
        ("route-export", "-o", "{out}"),
    ),
)
def test_a_base_model_is_told_to_be_expanded_first(base: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = (word.format(out=tmp_path / "out") for word in command)
    shown = run(name, base, *options, code=1).stderr
    assert f"{base}: is a base model, expected one made by scale-surgery expand." in shown
    assert f"Expand it first: scale-surgery expand {base} --layers LAYERS -o EXPANDED." in shown
    assert not (tmp_path / "out").exists()


def test_expand_refuses_before_it_shows_a_plan_and_plans_alone_when_asked(base: Path, expanded: Path) -> None:
    for output, reason in ((expanded, "exists already"), (base, "lies inside, around or at the input")):
        refused = run("expand", base, "--layers", "last:1", "-o", output, code=1)
        assert refused.stdout == "" and reason in refused.stderr
    before = digests(expanded)
    planned = run("plan", base, "--layers", "last:2").stdout
    assert run("expand", base, "--layers", "last:2", "-o", expanded, "--dry-run").stdout == planned
    assert digests(expanded) == before
    run("expand", base, "--layers", "0", "-o", base.parent / "f")
    run("expand", base, "--layers", "1", "-o", base.parent / "f", "--overwrite")
    # what is read is not replaced
    plan = base.parent / "f" / "plan.json"
    run("plan", base, "--layers", "2", "-o", plan)
    refused = run("expand", base, "--plan", plan, "-o", base.parent / "f", "--overwrite", code=1)
    assert "lies inside, around or at the input" in refused.stderr and plan.is_file()
    assert read_manifest(base.parent / "f").plan.layers == (1,)


def test_what_a_stream_cannot_encode_is_escaped(base: Path, tmp_path: Path) -> None:
    named = tmp_path / "東京"
    named.symlink_to(base)
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    line = [sys.executable, "-m", "scale_surgery", "inspect", str(named)]
    shown = subprocess.run(line, capture_output=True, env=environment, check=True).stdout
    assert rb"\u6771\u4eac" in shown


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_closed_stdout_ends_no_command(base: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    line = [
        sys.executable,
        "-m",
        "scale_surgery",
        "plan",
        str(base),
        "--layers",
        "2",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    with subprocess.Popen([*line, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert (tmp_path / "plan.json").is_file()


def test_a_job_whose_stderr_was_closed_runs(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `2>&-` closes it: Python has no stream then, and 2 is the number of the next file."""
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"), monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        Output()  # the control
    monkeypatch.setattr(sys, "stderr", None)
    words = ["expand", str(base), "--layers", "2", "-o", str(tmp_path / "wide")]
    assert main.main(words, "scale-surgery", standalone_mode=False) is None
    assert (tmp_path / "wide").is_dir() and sys.stderr.name == os.devnull
    sys.stderr.close()
