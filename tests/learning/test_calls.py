"""Lines of stages: a command reads from each what the stage passes to its function."""

from __future__ import annotations

import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.program import main
from scale_surgery.learning.calls import Call
from scale_surgery.learning.learn import prepare, resolve_recipe
from scale_surgery.learning.recipe_file import write_recipe
from scale_surgery.training.settings import EvalData
from tests import command

# parameters of commands that functions call something else
RENAMED = {
    ("hold-out", "data"): "files",
    ("plan", "output"): "outputs",
    ("expand", "plan"): "plan_file",
    ("route-calibrate", "output"): "plot",
}
RARE = {
    "measure_old": ("known.jsonl",),
    "base_weights": "copy",
    "hold_out.share": 0.3,
    "hold_out.most_characters": 900,
    "ranking.budget": "20%",
    "ranking.seed": 5,
    "ranking.steps": 3,
    "expansion.seed": 3,
    "expansion.name": "people",
    "expansion.init_w21": "random",
    "tokens.token_texts": ("new.jsonl",),
    "tokens.token_count": 7,
    "training.steps": 4,
    "training.warmup": 0.2,
    "training.rehearse": ("rehearsed.jsonl",),
    "training.packing": False,
    "training.bf16": False,
    "routing.prior": 0.2,
    "calibration.most_forgetting": 0.1,
    "calibration.bound": 0.5,
    "running.device": "cpu",
    "running.dtype": "bfloat16",
    "running.batch_size": 2,
    "running.trust_remote_code": True,
}
JOBS: dict[str, dict[str, Any]] = {
    "usual": {"expansion.layers": "last:1"},
    "pilot": RARE,
    "layers": RARE | {"expansion.layers": "last:1"},
    "processes": {"expansion.layers": "last:1", "processes": 2},
}


def plain(value: Any) -> Any:
    """A value, with text in place of paths and a tuple in place of a list."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return str(value) if isinstance(value, Path) else value


def parameters(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a command has to read, and those that it takes by default."""
    values: dict[str, Any] = {}
    usual: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if isinstance(value, EvalData):
            values[name] = [f"{side}={file}" for side in ("old", "new") for file in getattr(value, side)]
        elif is_dataclass(value):
            defaults = {field.name: field.default for field in fields(value)}
            # of two fields with one name the one that was changed has the option
            changed = {name: found for name, found in vars(value).items() if found != defaults[name]}
            values, usual = vars(value) | values | changed, defaults | usual
        else:
            values[RENAMED.get((call.command, name), name)] = value
    if call.saved is not None:
        values["outputs"] = call.saved
    if "outputs" in values:
        values["outputs"] = [values["outputs"]]
    usual["layers"] = "all" if call.command == "rank-layers" else "auto"
    return {name: plain(value) for name, value in values.items()}, usual


@pytest.mark.parametrize("job", JOBS)
def test_a_command_reads_from_the_line_of_a_stage_what_the_stage_passes(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("new", "old", "known", "rehearsed"):
        Path(f"{name}.jsonl").write_text(f'{{"text": "A short text, {name}, of one line."}}\n' * 30)
    recipe = resolve_recipe({"model": str(SHIPPED_MODEL), "data": ("new.jsonl",), "old": ("old.jsonl",)} | JOBS[job])
    write_recipe(recipe, Path("recipe.yaml"))
    shown = command.run("learn", "--recipe", "recipe.yaml", "-o", "job", "--dry-run").output.splitlines()
    lines = [shlex.split(line) for line in shown if line.startswith(("scale-surgery ", "accelerate launch "))]
    calls = [stage.call({}) for stage in prepare(recipe, "job").stages]
    assert len(lines) == len(calls) >= 9
    for words, call in zip(lines, calls, strict=True):
        if call.launch:
            assert words[: words.index("-m") + 2] == ["accelerate", "launch", *call.launch, "-m", "scale_surgery"]
            words = words[words.index("-m") + 1 :]
        _, name, *options = words
        assert name == call.command
        assert name != "expand" or ("--base-weights" in options) is (recipe.base_weights != "auto")
        read = {name: plain(value) for name, value in main.commands[name].make_context(name, options).params.items()}
        values, usual = parameters(call)
        for name, value in values.items():
            assert (usual.get(name) if read.get(name) is None else read[name]) == value, (call.command, name)
        # the line says nothing else
        preset = {parameter.name for parameter in main.commands[call.command].params if parameter.default is not None}
        assert {name for name, value in read.items() if value not in (None, False, ())} <= {*values, *preset}
