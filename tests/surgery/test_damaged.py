"""A folder that `verify` refuses is refused by all that make something of it; one that was trained is not damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    PosteriorRouter,
    Request,
    TrainingSettings,
    apply,
    expand,
    extract,
    merge,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import changed_tensors
from scale_surgery.checkpoint.names import INDEX_FILE
from scale_surgery.errors import Problem
from scale_surgery.folder.check import check_integrity
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.modeling.expanded_routers import Router
from tests.conftest import edited, flip, problems, shake
from tests.evidence.test_verify import promise

BASE_SHARD = "model-00001-of-00001.safetensors"
EXPANSION_SHARD = "expansion-default-00001-of-00001.safetensors"
BLOCK = "model.layers.1.mlp.up_proj.expansions.default.w21"


@pytest.fixture
def expanded(base_of: Callable[..., Path], tmp_path: Path) -> Path:
    base = Path(shutil.copytree(base_of("llama"), tmp_path / "base"))
    (base / "tokenizer.json").write_text("{}")
    return shake(expand(base, Request("1-2", variant="adapt"), tmp_path / "expanded").path)


def rename_tensor(folder: Path) -> None:
    """An expansion tensor that no plan knows, in place of one that it does."""
    with edited(folder / EXPANSION_SHARD) as tensors, edited(folder / INDEX_FILE) as index:
        for table in (tensors, index["weight_map"]):
            table["model.layers.0.other"] = table.pop(BLOCK)


def change_config(folder: Path) -> None:
    """A number with which the model computes."""
    with edited(folder / "config.json") as config:
        config["rms_norm_eps"] = 0.5


def forge_hash(folder: Path) -> None:
    """A record that names another hash of a base tensor."""
    with edited(folder / "surgery.json") as record:
        record["base_tensors"]["model.norm.weight"]["sha256"] = "0" * 64


def flip_block(folder: Path) -> None:
    """A bit of a tensor of the expansion, after a run whose sums the record has."""
    with edited(folder / "surgery.json") as record:
        expansion, written = record["expansions"]["default"], record["expansions"]["default"]["tensors"]
        expansion["trained"] = changed_tensors(open_checkpoint(folder), list(written), written)
    assert verify(folder, probes=None, record=False).passed
    flip(folder / EXPANSION_SHARD, open_checkpoint(folder).tensors[BLOCK].offset)


def retype(folder: Path, *endings: str, to: str = "I32") -> None:
    """Tensors that say another dtype, with the same bytes; by the ends of their names, or all."""
    for shard in folder.glob("*.safetensors"):
        content = shard.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name != "__metadata__" and name.endswith(endings or ""):
                entry["dtype"] = to
        text = json.dumps(header).encode()
        shard.unlink()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


# what is done, and code and place of the problem
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a base tensor": (lambda folder: flip(folder / BASE_SHARD), "base-file-changed", BASE_SHARD),
    "a base file": (lambda folder: flip(folder / "tokenizer.json"), "base-file-changed", "tokenizer.json"),
    "a base file that is gone": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "base-file-missing",
        "tokenizer.json",
    ),
    "the config": (change_config, "config-key-changed", "config.json: rms_norm_eps"),
    "the code": (lambda folder: flip(folder / "expanded_stock.py"), "code-changed", "expanded_stock.py"),
    "code that is gone": (
        lambda folder: (folder / "expanded_stock.py").unlink(),
        "file-missing",
        "expanded_stock.py",
    ),
    "other code": (lambda folder: (folder / "other.py").write_text("print()"), "code-unknown", "other.py"),
    "a tensor that is gone": (rename_tensor, "tensor-missing", BLOCK),
    "a tensor of no plan": (rename_tensor, "tensor-unplanned", "model.layers.0.other"),
    "another dtype": (lambda folder: retype(folder, "up_proj.expansions.default.w21"), "tensor-dtype", BLOCK),
    "a bit of what was learned": (flip_block, "tensor-changed", BLOCK),
    "the record": (forge_hash, "tensor-changed", "model.norm.weight"),
}
WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "route-export": lambda path, out: route_export(path, out, PosteriorRouter()),
    "expand": lambda path, out: expand(path, Request("0", name="law"), out),
    "extract": lambda path, out: extract(path, out),
    "merge": lambda path, out: merge(path, out),
    "train": lambda path, out: train(path, [Path(__file__)], out, TrainingSettings(steps=1)),
}


def refused(call: Callable[[Path, Path], object], path: Path) -> list[Problem]:
    """The problems for which something is refused; nothing is written."""
    out = path.with_name("out")
    found = problems(call, path, out, error=CheckpointError)
    assert not out.exists() and not out.with_name("out.partial").exists()
    return found


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_verify_refuses_is_not_taken_on(expanded: Path, damage: str) -> None:
    change, *wanted = DAMAGE[damage]
    change(expanded)
    assert not verify(expanded, probes=None, record=False).passed
    (problem,) = refused(WRITERS["route-export"], expanded)
    assert (problem.code, problem.where) == ("folder-damaged", f"{expanded}")
    assert wanted in [[detail.code, detail.where] for detail in problem.details]


@pytest.mark.parametrize("router", (None, CosineRouter()), ids=("alone", "routed"))
def test_each_tensor_of_a_fused_model_has_its_dtype(expanded: Path, tmp_path: Path, router: Router | None) -> None:
    """sha256 of tensors are those of the same bytes: what they mean is in a header that joining has replaced."""
    blocks = expanded if router is None else route_export(expanded, tmp_path / "routed", router).path
    fused = merge(blocks, tmp_path / "fused").path
    assert verify(fused, probes=None, record=False).passed
    retype(fused)
    found = check_integrity(open_folder(fused)).structure
    assert {problem.where for problem in found if problem.code == "tensor-dtype"} == {*open_checkpoint(fused).tensors}
    assert not verify(fused, probes=None, record=False).passed


def test_a_fused_model_gives_its_shards_back_byte_for_byte(expanded: Path, tmp_path: Path) -> None:
    """Not the tensors alone: the headers of the base's shards are in the record."""
    fused = merge(expanded, tmp_path / "fused").path
    assert promise(verify(fused, probes=None, record=False), "recoverable").holds
    with edited(fused / "surgery.json") as record:
        name = next(name for name in record["fused"]["shards"] if name.startswith("model-"))
        record["fused"]["shards"][name]["header"] += " "
    found = verify(fused, probes=None, record=False)
    assert not promise(found, "recoverable").holds and not found.passed
    with pytest.raises(CheckpointError):
        strip(fused, tmp_path / "stripped")


def test_an_extract_of_another_dtype_is_not_applied(expanded: Path, tmp_path: Path) -> None:
    alone = extract(expanded, tmp_path / "alone").path
    retype(alone, "up_proj.expansions.default.w21")
    found = problems(apply, alone, tmp_path / "out", tmp_path / "base", error=CheckpointError)
    assert ("tensor-dtype", BLOCK) in [(problem.code, problem.where) for problem in found]


@pytest.mark.parametrize("spoiled", ({"scale_surgery": 7}, {"scale_surgery": None}, {}), ids=str)
def test_specs_that_are_no_object_are_refused_when_they_are_read(expanded: Path, spoiled: dict[str, object]) -> None:
    with edited(expanded / "config.json") as config:
        del config["scale_surgery"]
        config |= spoiled
    for name, call in WRITERS.items():
        (problem,) = refused(call, expanded)
        assert str(problem).startswith(f"{expanded / 'config.json'}: ") and "scale_surgery" in str(problem), name
        assert problem.code == ("config-specs" if spoiled else "config-specs-missing"), name


def test_every_byte_is_read_once(expanded: Path) -> None:
    """A changed byte of a shard is named twice, as its tensor's and as its file's, and the shard is read once."""
    flip(expanded / BASE_SHARD)
    seen: list[int] = []
    folder = open_folder(expanded)
    report = check_integrity(folder, lambda done, note="": seen.append(done))
    assert [problem.code for problem in report.base] == ["tensor-changed", "base-file-changed"]
    assert report.base[1] == Problem("base-file-changed", BASE_SHARD, file="model.safetensors")
    assert list(report.hashes) == list(folder.manifest.base_tensors)
    files = [file for file in folder.manifest.base_files.values() if file.stored_as is not None]
    blocks = sum(tensor.bytes for tensor in folder.manifest.planned.values())
    assert sum(seen) == sum((expanded / str(file.stored_as)).stat().st_size for file in files) + blocks


@pytest.mark.parametrize("writer", ("route-export", "extract", "merge"))
def test_what_was_trained_is_not_damaged(expanded: Path, writer: str) -> None:
    """The tensors of `expanded` are other than those that the expansion wrote."""
    (expanded / "NOTES.md").write_text("files of one's own are no damage")
    count = len(read_manifest(expanded).expansion_tensors)
    assert verify(expanded, probes=None, record=False).trained_tensors == count
    out = expanded.with_name("out")
    WRITERS[writer](expanded, out)
    assert (out / "NOTES.md").is_file()
    if writer != "extract":
        assert open_checkpoint(out).tensors
