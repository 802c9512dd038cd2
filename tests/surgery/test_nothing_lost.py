"""What a user has is never touched: inputs, folders of others, and what an earlier run made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import CheckpointError, PlanError, Request, expand
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import Problem
from tests.command import run
from tests.conftest import digests, edited, problems, refused
from tests.tiny import save_tiny

REQUEST = Request("1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture
def expanded_as(base: Path, tmp_path: Path):
    """A private copy of the base under a chosen name."""
    return lambda name: Path(shutil.copytree(base, tmp_path / name))


def test_an_input_whose_name_the_output_would_use_is_refused(expanded_as: Any, base: Path, tmp_path: Path) -> None:
    source = expanded_as("model.partial")
    with refused("output-touches-input", source, CheckpointError):
        expand(source, REQUEST, tmp_path / "model", overwrite=True)
    assert digests(source) == digests(base)


def test_a_folder_named_replaced_is_of_no_interest(expanded_as: Any, base: Path, tmp_path: Path) -> None:
    source = expanded_as("model.replaced")
    (tmp_path / "model").mkdir()
    expand(source, REQUEST, tmp_path / "model", overwrite=True)
    expand(source, REQUEST, tmp_path / "model", overwrite=True)
    assert digests(source) == digests(base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.replaced"]


def test_a_target_that_holds_what_the_input_links_to_is_refused(expanded_as: Any, base: Path, tmp_path: Path) -> None:
    store = expanded_as("store")
    source = tmp_path / "source"
    source.mkdir()
    for file in store.iterdir():
        (source / file.name).symlink_to(file)
    found = problems(expand, source, REQUEST, store, overwrite=True, error=CheckpointError)
    assert {(problem.code, problem.where) for problem in found} == {("output-touches-input", f"{store}")}
    assert digests(store) == digests(base)


def test_a_python_caller_is_told_all_typos_at_once_as_a_command_line_user_is_told(base: Path) -> None:
    asked = Request("1", variant="presrve", init_w21="sdv", up_width=10.0, seed=None)  # type: ignore[arg-type]
    found = problems(plan, base, asked, error=PlanError)
    assert [(problem.code, problem.where) for problem in found] == [
        ("value-unfit", option) for option in ("--variant", "--up-width", "init_w21", "seed")
    ]


HEAD, Q_BIAS, DOWN_BIAS = "lm_head.weight", "model.layers.1.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.bias"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (HEAD, torch.zeros(50, 40), Problem("tensor-unlike-config", HEAD, shape=(50, 40), wanted=(97, 40))),
        (Q_BIAS, torch.zeros(7), Problem("tensor-unlike-config", Q_BIAS, shape=(7,), wanted=(80,))),
        (DOWN_BIAS, None, Problem("bias-missing", DOWN_BIAS)),
        (HEAD, None, Problem("weight-missing", HEAD, shape=(97, 40))),
    ],
)
def test_heads_and_biases_must_fit_too(
    expanded_as: Any, name: str, value: torch.Tensor | None, wanted: Problem
) -> None:
    source = expanded_as("spoiled")
    with edited(source / "model.safetensors") as tensors:
        tensors.pop(name)
        tensors |= {} if value is None else {name: value}
    assert problems(plan, source, REQUEST, error=CheckpointError) == [wanted]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{model}", "--layers", "1", "-o", "{file}"],
        ["verify", "{expanded}", "--base", "{model}", "-o", "{file}"],
        ["evaluate", "{model}", "--old", "{text}", "--new", "{text}", "-o", "{file}"],
        ["rank-layers", "{model}", "--data", "{text}", "-o", "{file}"],
        ["report", "{expanded}", "--text", "{text}", "-o", "{file}"],
        ["route-report", "{expanded}", "--text", "{text}", "-o", "{file}"],
        ["generate", "{expanded}", "--prompts", "{text}", "-o", "{file}"],
        ["generate", "{expanded}", "--prompts", "{text},column=text", "-o", "{file}"],
        ["evaluate", "{model}", "--old", "{text},column=text", "-o", "{file}"],
        ["verify", "{expanded}", "--prompts", "{text}", "-o", "{file}"],
        ["plan", "{model}", "--layers", "1", "--new-tokens", "{text}", "-o", "{file}"],
        ["plan", "{model}", "--layers", "1", "--new-tokens-from", "{text},column=text", "-o", "{file}"],
    ],
)
def test_a_file_to_be_written_is_no_input(arguments: list[str], expanded_as: Any, base: Path, tmp_path: Path) -> None:
    model, text = expanded_as("model"), tmp_path / "text.json"
    text.write_text('{"text": "A text."}')
    expanded = expand(base, REQUEST, tmp_path / "expanded").path
    places = {"model": model, "expanded": expanded, "text": text}
    folder = model if "{model}" in arguments else expanded
    files = [folder / "config.json", *([text] if any("{text}" in part for part in arguments) else [])]
    for file in files:
        before = digests(tmp_path)
        refused = run(*(part.format(**places, file=file) for part in arguments), code=1)
        source = text if file == text else folder
        message = " ".join(refused.stderr.split())
        assert f"{file}: would be written into {source}, which is read. Choose another file." in message
        assert digests(tmp_path) == before
