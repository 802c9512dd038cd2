"""The expanded folder: what stands in it, what is refused before and while it is made, and that it is repeatable."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import expansion_of, nameless
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.names import CODE_FILES
from scale_surgery.deriving.planned import load_plan, plan
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.evidence.verify import verify
from scale_surgery.folder.record import read_manifest
from scale_surgery.hub.repository import read_contents
from scale_surgery.planning.request import Request
from scale_surgery.planning.saved import save_plan
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.surgery.adopt import adopt
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from scale_surgery.training.rank_layers import rank_layers
from tests.conftest import digests, edited, load, problems, refused
from tests.tiny import save_tiny

REQUEST = Request("0,2", variant="adapt", collaborate="both", init_w22="random")


def test_what_stands_in_the_folder(pair_of):
    pair = pair_of("llama", tied=True)
    base, expanded = digests(pair.base_path), digests(pair.path)
    new = {"expansion-default-00001-of-00001.safetensors", "surgery.json", *CODE_FILES}
    assert expanded.keys() == base.keys() | new
    assert {name for name in base if expanded[name] != base[name]} == {"config.json", "model.safetensors.index.json"}
    assert all((pair.path / file).read_bytes() == (modeling.FOLDER / file).read_bytes() for file in CODE_FILES)
    index = json.loads((pair.path / "model.safetensors.index.json").read_text())
    stored = open_checkpoint(pair.path).tensors
    assert {name: info.file for name, info in stored.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(info.bytes for info in stored.values())


@pytest.mark.parametrize("given", ["1", {"layers": "1"}, ("1",), None])
def test_what_is_no_request_is_named(base_of, tmp_path, given):
    unfit = [Problem("value-unfit", "request", value=repr(given), kind="Request")]
    assert problems(plan, base_of("llama"), given, error=PlanError) == unfit
    assert problems(expand, base_of("llama"), given, tmp_path / "wide", error=PlanError) == unfit
    assert problems(rank_layers, base_of("llama"), "no such text", given, error=PlanError) == unfit


def test_the_config_keeps_everything_else(pair_of):
    pair = pair_of("llama")
    base = json.loads((pair.base_path / "config.json").read_text())
    config = json.loads((pair.path / "config.json").read_text())
    new_keys = {"architectures", "model_type", "auto_map", "scale_surgery"}
    assert {key for key in config if key not in base or base[key] != config[key]} == new_keys
    assert list(base) == [key for key in config if key in base], "in the base's order"
    assert config["model_type"] == "scale_llama"
    assert list(config["scale_surgery"]) == ["base", "expansions"]
    (added,) = config["scale_surgery"]["expansions"]
    assert (added["name"], added["variant"]) == ("default", "preserve")
    assert AutoConfig.from_pretrained(pair.path).scale_surgery == config["scale_surgery"]


def test_a_config_without_dtype_gets_the_base_s_and_keeps_the_base_s_own_auto_map(llama_base, tmp_path):
    """The first shard that a loader opens may be one of ours, in another dtype."""
    with edited(llama_base / "config.json") as config:
        del config["dtype"]
        config["auto_map"] = {"AutoTokenizer": ["tok.Tok", None], "AutoConfig": "old.Old"}
    expanded = expand(llama_base, replace(REQUEST, dtype="bfloat16"), tmp_path / "expanded").path
    made = json.loads((expanded / "config.json").read_text())
    assert made["torch_dtype"] == "float32" and AutoConfig.from_pretrained(expanded).dtype == torch.float32
    assert made["auto_map"]["AutoTokenizer"] == ["tok.Tok", None]
    assert made["auto_map"]["AutoConfig"] == "configuration_scale.ScaleLlamaConfig"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("kept", ["lm_head.weight", "model.norm.weight"])
def test_a_model_loads_in_the_dtype_of_its_base(tmp_path: Path, key: str, kept: str) -> None:
    """Where config.json has null for it, and tensors are of two dtypes."""
    base = save_tiny(tmp_path / "base", "llama", dtype=torch.bfloat16)
    with edited(base / "config.json") as config:
        del config["dtype"]
        config[key] = None
    tensors = load_file(base / "model.safetensors")
    tensors[kept] = tensors[kept].float()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    expanded = expand(base, replace(REQUEST, dtype="float32"), tmp_path / "expanded").path
    assert load(expanded).dtype == load(base).dtype
    assert load(base).dtype == (torch.float32 if kept == "lm_head.weight" else torch.bfloat16), "the control"
    assert verify(expanded, probes=Probes(max_new_tokens=0)).passed


def test_the_manifest_records_what_was_done(pair_of):
    pair = pair_of("llama", "adapt", "bfloat16", True)
    manifest = read_manifest(pair.path)
    assert {name: file.sha256 for name, file in manifest.base_files.items()} == digests(pair.base_path)
    base, stored = open_checkpoint(pair.base_path), open_checkpoint(pair.path)
    assert manifest.base_hashes == hash_tensors(base, list(base.tensors)) == hash_tensors(stored, list(base.tensors))
    new = [tensor.name for tensor in pair.expansion.plan.tensors]
    assert manifest.expansion_tensors == hash_tensors(stored, new)
    assert manifest.code == {file: digests(pair.path)[file] for file in CODE_FILES}
    assert manifest.plan == pair.expansion.plan
    assert manifest.base_name == pair.base_path.name
    assert manifest.base_revision is None
    assert set(manifest.tool) == {"scale-surgery", "torch", "transformers", "safetensors", "python", "device"}
    assert manifest.tool["device"] == RunOptions().placed().device
    assert set(manifest.replaced) == {"config.json", "model.safetensors.index.json"}


def test_no_path_of_this_machine_stands_in_the_folder(base_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expanded = expand(os.path.relpath(base_of("llama")), REQUEST).path
    assert expanded == Path("llama_float32_untied-scale"), "the default output"
    for file in expanded.iterdir():
        content = file.read_bytes()
        for path in (tmp_path, base_of("llama").parent, Path.cwd(), Path.home(), Path(modeling.FOLDER).parent):
            assert str(path).encode() not in content, file


def test_twice_gives_the_same_bytes_and_another_seed_does_not(base_of, tmp_path):
    first, repeated, reseeded = (
        digests(expand(base_of("llama"), replace(REQUEST, seed=seed), tmp_path / name).path)
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert first == repeated
    changed = {name for name in first if first[name] != reseeded[name]}
    assert changed == {"config.json", "expansion-default-00001-of-00001.safetensors", "surgery.json"}, "no base shard"


def test_a_name_changes_no_value(base_of, tmp_path):
    requests = [Request("1-2", init_w22="random"), Request("1", method="grow", variant="grow-train", copies=3)]
    for number, request in enumerate(requests):
        expansions = []
        for name in ("default", "law"):
            made = expand(base_of("llama"), replace(request, name=name), tmp_path / f"{name}{number}")
            values = load_file(made.path / made.plan.shards[0])
            assert {expansion_of(key) for key in values} == {name}
            expansions.append({nameless(key): value for key, value in values.items()})
            model = load(made.path)
            assert (model.expansions, model.active_expansion) == ([name], name)
        assert expansions[0].keys() == expansions[1].keys()
        assert all(torch.equal(value, expansions[1][key]) for key, value in expansions[0].items())


def test_initial_values(base_of, tmp_path):
    expansion = expand(base_of("llama"), REQUEST, tmp_path / "expanded")
    values = load_file(expansion.path / expansion.plan.shards[0])
    assert {tensor.name for tensor in expansion.plan.tensors} == set(values)
    base = load_file(base_of("llama") / "model.safetensors")
    for tensor in expansion.plan.tensors:
        value = values[tensor.name]
        is_zero = tensor.block in ("w12", "up_bias") or tensor.name == "lm_head.expansions.default.up_weight"
        assert bool(value.any()) != is_zero, tensor.name
        assert value.isfinite().all()
        if "norm" in tensor.name:
            assert torch.equal(value, torch.full_like(value, float(base[tensor.source].mean())))


@pytest.mark.parametrize("init", ("svd", "random", "zero"))
def test_ways_to_begin(base_of, tmp_path, init):
    request = replace(REQUEST, init_w21=init, init_w22=init, init_embedding="zero", svd="exact")
    expansion = expand(base_of("gpt_neox"), request, tmp_path / "expanded")
    values = load_file(expansion.path / expansion.plan.shards[0])
    blocks = {name: value for name, value in values.items() if name.endswith(("w21", "w22"))}
    assert len(blocks) == 16
    assert all(bool(value.any()) == (init != "zero") for value in blocks.values())
    assert not values["gpt_neox.embed_in.expansions.default.up_weight"].any()


def test_names_that_differ_in_case_alone_are_one(llama_base, tmp_path):
    """Files are named after expansions, and some disks ignore case."""
    law = expand(llama_base, Request("1", name="law"), tmp_path / "law").path
    with refused("name-taken", "name", PlanError):
        expand(law, Request("1", name="Law"), tmp_path / "both")
    assert set(read_manifest(expand(law, Request("1", name="laws"), tmp_path / "two").path).expansions) == {
        "law",
        "laws",
    }


def test_weights_that_are_not_finite_are_named(llama_base, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    with edited(llama_base / "model.safetensors") as tensors:
        tensors[name].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert problems(expand, llama_base, REQUEST, tmp_path / "expanded", error=CheckpointError) == [
        Problem("weight-not-finite", name, count=3, total=2080)
    ]
    assert not (tmp_path / "expanded").exists()
    expand(llama_base, replace(REQUEST, init_w21="random"), tmp_path / "random")
    expand(llama_base, replace(REQUEST, layers="0-1"), tmp_path / "without")


TARGETS = {
    "there": (False, "output-exists"),
    "mine": (True, "output-no-model"),
    "base": (True, "output-touches-input"),
    "base/..": (True, "output-touches-input"),
    "base/deep/er": (False, "output-touches-input"),
    ".": (True, "output-unnamed"),
    "to the base": (True, "output-touches-input"),
    "to another": (True, "output-is-link"),
    "file": (True, "output-is-file"),
    "begun": (False, "output-not-ours"),
    "file/below": (False, "output-closed"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_cannot_be_is_refused_before_any_work(llama_base, tmp_path, name, monkeypatch):
    for folder in ("there", "mine", "begun.partial"):
        (tmp_path / folder).mkdir()
    for file in ("mine/precious", "file"):
        (tmp_path / file).write_text("x")
    for link, to in (("to the base", llama_base), ("to another", tmp_path / "there")):
        (tmp_path / link).symlink_to(to, target_is_directory=True)
    before = digests(tmp_path)
    overwrite, code = TARGETS[name]
    monkeypatch.chdir(tmp_path / "there")
    target = Path() if name == "." else tmp_path / name
    refused = problems(expand, llama_base, REQUEST, target, overwrite=overwrite, error=CheckpointError)
    assert refused[0].code == code
    assert refused[0].where == str(target.with_name("begun.partial") if name == "begun" else target)
    assert digests(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_in_a_folder_that_may_not_be_written(llama_base, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    target = tmp_path / "locked" / "out"
    wanted = Problem("output-closed", target, parent=tmp_path / "locked")
    assert problems(expand, llama_base, REQUEST, target, error=CheckpointError) == [wanted]


def test_names_that_the_base_has_already(sharded_base, tmp_path):
    """Also names that are needed later: of a trained, a fused or a routed model, and of an extract."""
    needed = ["expanded.index.json", "expanded_modules.py", "expanded_routers.py", "training/log.jsonl"]
    (sharded_base / "training").mkdir()
    for file in (*needed, "training.txt", "sub-expansions"):
        (sharded_base / file).write_text("x")
    shards = sorted(sharded_base.glob("*.safetensors"))
    renamed = {shards[0].name: "expansion-default-00001-of-00001.safetensors"}
    renamed[shards[1].name] = "fused-00001-of-00001.safetensors"
    name = "model.layers.0.mlp.up_proj.expansions.default.w21"
    law_name = name.replace("default", "law")
    with edited(shards[-1]) as tensors, edited(sharded_base / "model.safetensors.index.json") as index:
        tensors |= {name: torch.zeros(2), law_name: torch.zeros(2)}
        index["weight_map"] |= dict.fromkeys((name, law_name), shards[-1].name)
        for key, file in index["weight_map"].items():
            index["weight_map"][key] = renamed.get(file, file)
    for shard, file in renamed.items():
        (sharded_base / shard).rename(sharded_base / file)
    wanted = {
        Problem("tensor-name-taken", name),
        Problem("tensor-name-reserved", law_name, infix=".expansions."),
        *(Problem("file-name-reserved", file) for file in (*needed, *renamed.values())),
    }
    assert set(problems(expand, sharded_base, REQUEST, tmp_path / "out", error=CheckpointError)) == wanted
    assert not list(tmp_path.glob("*out*"))
    assert set(problems(plan, sharded_base, REQUEST, error=CheckpointError)) == wanted


def test_a_base_with_files_whose_names_end_like_temporary_ones(llama_base, tmp_path):
    """They are the base's, whatever is written beside them; all that is made of the folder is whole.

    What may hold keys, or names of hosts, is no part of a model: it is named and left out.
    """
    private = (".env", ".ssh/id_rsa", "runs/host/events.out.tfevents.1.host", "checkpoint-5/trainer_state.json")
    for name in ("surgery.json.tmp", "config.json.tmp", ".gitattributes", "training_args.json", *private):
        (llama_base / name).parent.mkdir(parents=True, exist_ok=True)
        (llama_base / name).write_text(name)
    before = {name: digest for name, digest in digests(llama_base).items() if name not in private}
    done = expand(llama_base, replace(REQUEST, up_width=0), tmp_path / "expanded")
    expanded = done.path
    assert set(done.left_out) == set(private)
    assert verify(expanded, probes=None).recorded
    assert (expanded / "surgery.json.tmp").read_text() == "surgery.json.tmp"
    taken = extract(expanded, tmp_path / "extract").path
    load(expanded).save_pretrained(tmp_path / "saved")
    made = [
        apply(taken, tmp_path / "applied", llama_base).path,
        route_export(expanded, tmp_path / "routed").path,
        merge(expanded, tmp_path / "fused").path,
        adopt(tmp_path / "saved", expanded, tmp_path / "adopted").path,
        compose(llama_base, taken, tmp_path / "composed").path,
    ]
    for path in (expanded, *made):
        assert verify(path, probes=None).passed, path
        assert digests(strip(path, tmp_path / f"{path.name}-stripped").path) == before
        assert set(read_contents(path).left_out) == set()


def test_a_plan_gives_what_its_request_gives_and_the_record_names_the_model_that_was_read(
    base_of, llama_base, tmp_path
):
    made = plan(base_of("llama"), REQUEST)
    planned = expand(llama_base, made, tmp_path / "planned").path
    assert (made.base_name, read_manifest(planned).base_name) == (base_of("llama").name, llama_base.name)
    assert digests(planned) == digests(expand(llama_base, REQUEST, tmp_path / "asked").path)


def test_a_plan_of_another_base_is_not_executed(base_of, llama_base, tmp_path):
    save_plan(plan(base_of("llama", "bfloat16"), REQUEST), tmp_path / "plan.json")
    other = {"base": "llama_bfloat16_untied"}
    assert problems(load_plan, llama_base, tmp_path / "plan.json", error=PlanError) == [
        Problem("plan-of-other-base", tmp_path / "plan.json", **other, found="base")
    ]
    made = plan(base_of("llama", "bfloat16"), REQUEST)
    assert problems(expand, llama_base, made, tmp_path / "out", error=PlanError) == [
        Problem("plan-unfit", llama_base, **other)
    ]
    assert not (tmp_path / "out").exists()


def test_a_plan_is_executed_on_its_own_commit(base_of, tmp_path):
    """A branch that moved to other weights of the same shapes: what was planned is expanded and recorded."""
    repo = Path(os.environ["HF_HOME"]) / "hub" / "models--surgeons--moving"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(base_of("llama"), repo / "snapshots" / commit)
    with edited(repo / "snapshots" / commits[1] / "model.safetensors") as tensors:
        tensors["model.norm.weight"] += 1
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commits[0])
    made = plan("surgeons/moving", REQUEST)
    (repo / "refs" / "main").write_text(commits[1])
    done = expand("surgeons/moving", made, tmp_path / "out", revision="main")
    assert read_manifest(done.path).base_revision == commits[0]
    assert digests(strip(done.path, tmp_path / "base").path) == digests(repo / "snapshots" / commits[0])
    expansion = expand("surgeons/moving", REQUEST, tmp_path / "other")
    assert read_manifest(expansion.path).base_revision == commits[1], "the control: a request takes what is there now"
    assert digests(strip(expansion.path, tmp_path / "moved").path) == digests(repo / "snapshots" / commits[1])
