"""What a user has is never touched: inputs, folders of others, and what an earlier run made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from scale_surgery import CheckpointError, PlanError, Request, expand, strip
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.cli.program import main
from scale_surgery.deriving.planned import plan
from tests.conftest import digests
from tests.tiny import save_tiny

REQUEST = Request("1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture
def own(base: Path, tmp_path: Path):
    """A private copy of the base under a chosen name."""
    return lambda name: Path(shutil.copytree(base, tmp_path / name))


@pytest.mark.parametrize("suffix", [".partial", ""])
def test_an_input_whose_name_the_output_would_use_is_refused(own: Any, base: Path, tmp_path: Path, suffix: str) -> None:
    source = own(f"model{suffix}")
    with pytest.raises(CheckpointError, match="lies inside, around or at the input"):
        expand(source, REQUEST, tmp_path / "model", overwrite=True)
    assert digests(source) == digests(base)


def test_a_folder_named_replaced_is_of_no_interest(own: Any, base: Path, tmp_path: Path) -> None:
    source = own("model.replaced")
    (tmp_path / "model").mkdir()
    expand(source, REQUEST, tmp_path / "model", overwrite=True)
    expand(source, REQUEST, tmp_path / "model", overwrite=True)
    assert digests(source) == digests(base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.replaced"]


def test_an_unfinished_folder_that_nobody_here_began_is_not_continued(own: Any, base: Path, tmp_path: Path) -> None:
    other = own("out.partial")
    with pytest.raises(CheckpointError, match=r"out\.partial: was not begun by this program, will not continue it"):
        expand(base, REQUEST, tmp_path / "out")
    assert digests(other) == digests(base)


def test_a_target_that_holds_what_the_input_links_to_is_refused(own: Any, base: Path, tmp_path: Path) -> None:
    store = own("store")
    source = tmp_path / "source"
    source.mkdir()
    for file in store.iterdir():
        (source / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="store: lies inside, around or at the input"):
        expand(source, REQUEST, store, overwrite=True)
    assert digests(store) == digests(base)


def test_a_symbolic_link_is_no_target(base: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="link: is a symbolic link, expected a folder to be"):
        expand(base, REQUEST, tmp_path / "link", overwrite=True)


def test_strip_can_be_repeated_after_what_was_damaged_is_mended(base: Path, tmp_path: Path) -> None:
    path = expand(base, REQUEST, tmp_path / "expanded").path
    shard = path / "model-00001-of-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: sha256"):
        strip(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    shard.write_bytes(whole)
    assert digests(strip(path, tmp_path / "back").path) == digests(base)


def test_links_are_for_shards_only(base: Path, tmp_path: Path) -> None:
    path = expand(base, REQUEST, tmp_path / "expanded", base_weights="link").path
    back = strip(path, tmp_path / "back", base_weights="link").path
    assert (base / "model.safetensors").samefile(path / "model-00001-of-00001.safetensors")
    assert (base / "model.safetensors").samefile(back / "model.safetensors")
    for file in ("generation_config.json", "config.json"):
        assert not (path / file).samefile(base / file) and not (back / file).samefile(path / file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "presrve"},
            "--variant is 'presrve', expected one of: preserve, adapt, grow-freeze, grow-train, depth.",
        ),
        ({"variant": "adapt", "collaborate": "atn"}, "--collaborate is 'atn', expected one of: attn, ffn, both."),
        ({"init_w21": "sdv"}, "init_w21 is 'sdv', expected one of: svd, random, zero."),
        ({"dtype": "fp16"}, "--dtype is 'fp16', expected one of: float32, float16, bfloat16."),
        ({"ratio": "x"}, "--ratio is 'x', expected a number."),
        ({"up_width": 10.0}, "--up-width is 10.0, expected a whole number."),
        ({"seed": None}, "seed is None, expected a whole number."),
    ],
)
def test_a_python_caller_is_told_what_a_command_line_user_is_told(base: Path, options: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(base, Request("1", **options))
    assert str(caught.value) == message


def test_several_typos_are_told_at_once(base: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan(base, Request("1", variant="x", svd="y"))  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lm_head.weight", torch.zeros(50, 40), r"lm_head\.weight: shape \(50, 40\), expected \(97, 40\)"),
        ("model.layers.1.self_attn.q_proj.bias", torch.zeros(7), r"q_proj\.bias: shape \(7,\), expected \(40,\)"),
        (
            "model.layers.1.mlp.down_proj.bias",
            None,
            r"1\.mlp\.down_proj\.bias: no such tensor, other layers",
        ),
        ("lm_head.weight", None, r"lm_head\.weight: no such tensor, expected one of shape \(97, 40\)"),
    ],
)
def test_heads_and_biases_must_fit_too(own: Any, name: str, value: torch.Tensor | None, message: str) -> None:
    source = own("spoiled")
    tensors = load_file(source / "model.safetensors")
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        plan(source, REQUEST)


def rewrite_header(file: Path, change: Any) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_tensors_that_overlap_are_damage(own: Any) -> None:
    source = own("spoiled")

    def overlap(header: dict[str, Any]) -> None:
        first, second = (name for name in header if name.endswith("layernorm.weight") and ".1." in name)
        header[second]["data_offsets"] = header[first]["data_offsets"]

    rewrite_header(source / "model.safetensors", overlap)
    with pytest.raises(CheckpointError, match=r"begins at byte \d+, expected \d+.*It is damaged"):
        open_checkpoint(source)


def test_bytes_behind_the_last_tensor_are_damage(own: Any) -> None:
    source = own("spoiled")
    with (source / "model.safetensors").open("ab") as stream:
        stream.write(b"12345678")
    with pytest.raises(CheckpointError, match=r"its tensors end at byte \d+, the file has \d+ bytes"):
        open_checkpoint(source)


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
    ],
)
def test_a_file_to_be_written_is_no_input(arguments: list[str], own: Any, base: Path, tmp_path: Path) -> None:
    model, text = own("model"), tmp_path / "text.json"
    text.write_text('{"text": "A text."}')
    expanded = expand(base, REQUEST, tmp_path / "expanded").path
    places = {"model": model, "expanded": expanded, "text": text}
    folder = model if "{model}" in arguments else expanded
    files = [folder / "config.json", text] if "{text}" in arguments else [folder / "config.json"]
    for file in files:
        before = digests(tmp_path)
        given = [part.format(**places, file=file) for part in arguments]
        result = CliRunner().invoke(main, given)
        source = text if file == text else folder
        assert result.exit_code == 1
        # lines are broken to the width of the terminal
        assert f"{file}: would be written into {source}, which is read. Choose another file." in joined(result.stderr)
        assert digests(tmp_path) == before


def joined(lines: str) -> str:
    return " ".join(lines.split())
