"""The expanded folder: what stands in it, what is refused before and while it is made, and that it is repeatable."""

from __future__ import annotations

import contextlib
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
from scale_surgery.deriving.planned import load_plan, plan
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.evidence.verify import verify
from scale_surgery.hub.repository import read_contents
from scale_surgery.planning.request import Request
from scale_surgery.planning.saved import save_plan
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.adopt import adopt
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.record import read_manifest
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from tests.conftest import digests, load
from tests.families import FAMILIES

REQUEST = Request("0,2", variant="adapt", collaborate="both", init_w22="random")


def refusal(*args: object, error: type[Exception] = CheckpointError, **options: object) -> str:
    with pytest.raises(error) as found:
        expand(*args, **options)
    return str(found.value)


def test_what_stands_in_the_folder(pair_of):
    pair = pair_of("llama")
    files = set(digests(pair.path))
    assert files == {
        "config.json",
        "configuration_scale.py",
        "expanded_attention.py",
        "expanded_loading.py",
        "expanded_mixture.py",
        "expanded_model.py",
        "expanded_modules.py",
        "expanded_paths.py",
        "expanded_routers.py",
        "expanded_routing.py",
        "expanded_shapes.py",
        "expanded_state.py",
        "expanded_streams.py",
        "expansion-default-00001-of-00001.safetensors",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "modeling_scale.py",
        "surgery.json",
    }
    for file in FAMILIES["llama"].code_files:
        assert (pair.path / file).read_bytes() == (modeling.FOLDER / file).read_bytes()


def test_base_shards_are_the_base_files(pair_of):
    pair = pair_of("llama", tied=True)
    base, expanded = digests(pair.base_path), digests(pair.path)
    shards = [name for name in base if name.endswith(".safetensors")]
    assert len(shards) > 1
    assert {name: expanded[name] for name in shards} == {name: base[name] for name in shards}
    index = json.loads((pair.path / "model.safetensors.index.json").read_text())
    stored = open_checkpoint(pair.path).tensors
    assert {name: info.file for name, info in stored.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(info.bytes for info in stored.values())


def test_the_config_keeps_everything_else(pair_of):
    pair = pair_of("llama")
    base = json.loads((pair.base_path / "config.json").read_text())
    config = json.loads((pair.path / "config.json").read_text())
    own = {"architectures", "model_type", "auto_map", "scale_surgery"}
    assert {key for key in config if key not in base or base[key] != config[key]} == own
    assert list(base) == [key for key in config if key in base], "in the base's order"
    assert config["model_type"] == "scale_llama"
    assert list(config["scale_surgery"]) == ["base", "expansions"]
    (added,) = config["scale_surgery"]["expansions"]
    assert (added["name"], added["variant"]) == ("default", "preserve")
    assert AutoConfig.from_pretrained(pair.path).scale_surgery == config["scale_surgery"]


def test_a_config_without_dtype_gets_the_base_s(llama_base, tmp_path):
    """The first shard that a loader opens may be one of ours, in another dtype."""
    config = json.loads((llama_base / "config.json").read_text())
    del config["dtype"]
    (llama_base / "config.json").write_text(json.dumps(config))
    expanded = expand(llama_base, replace(REQUEST, dtype="bfloat16"), tmp_path / "expanded").path
    assert json.loads((expanded / "config.json").read_text())["torch_dtype"] == "float32"
    assert AutoConfig.from_pretrained(expanded).dtype == torch.float32


def test_the_base_s_own_auto_map_is_kept(llama_base, tmp_path):
    config = json.loads((llama_base / "config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tok.Tok", None], "AutoConfig": "old.Old"}
    (llama_base / "config.json").write_text(json.dumps(config))
    expanded = expand(llama_base, REQUEST, tmp_path / "expanded").path
    auto_map = json.loads((expanded / "config.json").read_text())["auto_map"]
    assert auto_map["AutoTokenizer"] == ["tok.Tok", None]
    assert auto_map["AutoConfig"] == "configuration_scale.ScaleLlamaConfig"


def test_the_manifest_records_what_was_done(pair_of):
    pair = pair_of("llama", "adapt", "bfloat16", True)
    manifest = read_manifest(pair.path)
    assert {name: file.sha256 for name, file in manifest.base_files.items()} == digests(pair.base_path)
    base, stored = open_checkpoint(pair.base_path), open_checkpoint(pair.path)
    assert manifest.base_hashes == hash_tensors(base, list(base.tensors)) == hash_tensors(stored, list(base.tensors))
    new = [tensor.name for tensor in pair.expansion.plan.tensors]
    assert manifest.expansion_tensors == hash_tensors(stored, new)
    assert manifest.code == {file: digests(pair.path)[file] for file in FAMILIES["llama"].code_files}
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
    one, two = (digests(expand(base_of("llama"), REQUEST, tmp_path / name).path) for name in ("one", "two"))
    assert one == two
    other = digests(expand(base_of("llama"), replace(REQUEST, seed=1), tmp_path / "other").path)
    shard = "expansion-default-00001-of-00001.safetensors"
    assert other[shard] != one[shard]
    assert other["model-00001-of-00001.safetensors"] == one["model-00001-of-00001.safetensors"]


def test_a_name_changes_no_value(base_of, tmp_path):
    requests = [Request("1-2", init_w22="random"), Request("1", method="grow", variant="grow-train", copies=3)]
    for number, request in enumerate(requests):
        found = []
        for name in ("default", "law"):
            made = expand(base_of("llama"), replace(request, name=name), tmp_path / f"{name}{number}")
            values = load_file(made.path / made.plan.shards[0])
            assert {expansion_of(own) for own in values} == {name}
            found.append({nameless(own): value for own, value in values.items()})
            model = load(made.path)
            assert (model.expansions, model.active_expansion) == ([name], name)
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(value, found[1][own]) for own, value in found[0].items())


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


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_weights_that_are_not_finite_are_named(llama_base, tmp_path, value):
    shard, name = llama_base / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(shard)
    tensors[name][3, 5] = value
    save_file(tensors, shard)
    assert refusal(llama_base, REQUEST, tmp_path / "expanded") == (
        f"{name}: holds 1 NaN or infinite values of 2080, expected finite numbers to decompose. "
        "Check the checkpoint, leave out its layer, or set init_w21 to random."
    )
    assert not (tmp_path / "expanded").exists()
    expand(llama_base, replace(REQUEST, init_w21="random"), tmp_path / "random")
    expand(llama_base, replace(REQUEST, layers="0-1"), tmp_path / "without")


def test_a_target_that_exists_is_refused_before_any_work(llama_base, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    wanted = f"{target}: exists already. Choose another output folder, or give --overwrite."
    assert refusal(llama_base, REQUEST, target) == wanted
    (target / "precious").write_text("x")
    message = refusal(llama_base, REQUEST, target, overwrite=True)
    assert message == f"{target}: is no model folder, --overwrite will not replace it. Choose another output folder."
    assert (target / "precious").read_text() == "x"
    shutil.rmtree(target)
    shutil.copytree(llama_base, target)
    (target / "old").write_text("x")
    expand(llama_base, REQUEST, target, overwrite=True)
    assert not (target / "old").exists()
    assert (target / "surgery.json").is_file()


@pytest.mark.parametrize("where", (".", "..", "deep/er"))
def test_a_target_inside_around_or_at_the_source_is_refused(llama_base, where):
    before, target = digests(llama_base), llama_base / where
    for overwrite in (False, True):
        message = refusal(llama_base, REQUEST, target, overwrite=overwrite)
        assert f"{target}: lies inside, around or at the input {llama_base}. Choose another output folder." in message
    link = llama_base.parent / "link"
    link.symlink_to(target, target_is_directory=True)
    assert "lies inside, around or at the input" in refusal(llama_base, REQUEST, link, overwrite=True)
    assert digests(llama_base) == before


def test_a_target_that_is_a_file_or_below_one(llama_base, tmp_path):
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        message = refusal(llama_base, REQUEST, tmp_path / "file", overwrite=overwrite)
        assert f"{tmp_path}/file: is a file, expected a folder to be." in message
    below = refusal(llama_base, REQUEST, tmp_path / "file" / "below")
    assert f"{tmp_path}/file is not a folder you may write to. Choose another output folder." in below
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_in_a_folder_that_may_not_be_written(llama_base, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    message = refusal(llama_base, REQUEST, tmp_path / "locked" / "out")
    assert f"{tmp_path}/locked is not a folder you may write to" in message


def test_a_disk_without_room_is_noticed_before_any_work(llama_base, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    message = refusal(llama_base, REQUEST, tmp_path / "out")
    assert message.startswith(f"{tmp_path}/out: needs ")
    assert f"bytes, {tmp_path} has 10,000 free. Free some space, choose another output folder, or give" in message
    assert not list(tmp_path.glob("out*"))


def test_names_that_the_base_has_already(llama_base, tmp_path):
    """Also names that are needed later: of a trained model, and of an extract."""
    needed = ("expanded.index.json", "expanded_modules.py", "expanded_routers.py")
    needed += ("training/log.jsonl",)
    (llama_base / "training").mkdir()
    for file in (*needed, "training.txt", "sub-expansions"):
        (llama_base / file).write_text("x")
    shard, name = llama_base / "model.safetensors", "model.layers.0.mlp.up_proj.expansions.default.w21"
    other = name.replace("default", "law")
    save_file(load_file(shard) | {name: torch.zeros(2), other: torch.zeros(2)}, shard)
    lines = [
        f"{name}: the base model has a tensor of this name already.",
        f"{other}: the base model has a tensor with '.expansions.' in its name, which tells tensors of expansions from "
        "others. Rename it.",
        *(
            f"{file}: the base model has a file of this name, which the expansion needs. Take it out of the base, or "
            "rename it."
            for file in needed
        ),
    ]
    assert refusal(llama_base, REQUEST, tmp_path / "out").splitlines() == lines
    assert not list(tmp_path.glob("*out*"))
    with pytest.raises(CheckpointError) as found:
        plan(llama_base, REQUEST)
    assert str(found.value).splitlines() == lines


@pytest.mark.parametrize("name", ["expansion-default-00001-of-00001.safetensors", "fused-00001-of-00001.safetensors"])
def test_shards_that_are_called_like_ours(sharded_base, tmp_path, name):
    index = sharded_base / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    shard = next(iter(places.values()))
    (sharded_base / shard).rename(sharded_base / name)
    index.write_text(json.dumps({"weight_map": {own: name if at == shard else at for own, at in places.items()}}))
    assert refusal(sharded_base, REQUEST, tmp_path / "out").startswith(f"{name}: the base model has a file of this")


def test_a_base_with_files_whose_names_end_like_temporary_ones(llama_base, tmp_path):
    """They are the base's, whatever is written beside them; all that is made of the folder is whole."""
    for name in ("surgery.json.tmp", "config.json.tmp", ".tmpvZVzs1", "training_args.json"):
        (llama_base / name).write_text(name)
    before = digests(llama_base)
    expanded = expand(llama_base, replace(REQUEST, up_width=0), tmp_path / "expanded").path
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


def test_a_base_of_one_numbered_shard(sharded_base, tmp_path):
    """Its shard has the name that a single file gets; nothing clashes, and the base comes back."""
    tensors = {}
    for shard in sharded_base.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, sharded_base / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (sharded_base / "model.safetensors.index.json").write_text(json.dumps(index))
    expanded = expand(sharded_base, REQUEST, tmp_path / "expanded").path
    strip(expanded, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(sharded_base)


def test_a_request_or_a_plan(llama_base, tmp_path):
    made = plan(llama_base, REQUEST)
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(llama_base, tmp_path / "plan.json") == made
    expansion = expand(llama_base, made, tmp_path / "planned")
    assert expansion.plan == made
    assert digests(expansion.path) == digests(expand(llama_base, REQUEST, tmp_path / "asked").path)


def test_a_plan_of_another_base_is_not_executed(base_of, llama_base, tmp_path):
    save_plan(plan(base_of("llama", "bfloat16"), REQUEST), tmp_path / "plan.json")
    with pytest.raises(PlanError) as found:
        load_plan(llama_base, tmp_path / "plan.json")
    wanted = "was made for another base model, llama_bfloat16_untied, found"
    assert wanted in str(found.value)
    message = refusal(llama_base, plan(base_of("llama", "bfloat16"), REQUEST), tmp_path / "out", error=PlanError)
    assert message == (
        f"{llama_base}: is not the base model that the plan was made for, llama_bfloat16_untied: config, or names, "
        "dtypes and shapes of tensors differ. Plan again."
    )
    assert not (tmp_path / "out").exists()


def test_a_plan_is_executed_on_its_own_commit(base_of, tmp_path):
    """A branch that moved to other weights of the same shapes: what was planned is expanded and recorded."""
    repo = Path(os.environ["HF_HOME"]) / "hub" / "models--surgeons--moving"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(base_of("llama"), repo / "snapshots" / commit)
    shard = repo / "snapshots" / commits[1] / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commits[0])
    made = plan("surgeons/moving", REQUEST)
    (repo / "refs" / "main").write_text(commits[1])
    done = expand("surgeons/moving", made, tmp_path / "out", revision="main")
    assert read_manifest(done.path).base_revision == commits[0]
    assert digests(strip(done.path, tmp_path / "base").path) == digests(repo / "snapshots" / commits[0])
    other = expand("surgeons/moving", REQUEST, tmp_path / "other")
    assert read_manifest(other.path).base_revision == commits[1], "the control: a request takes what is there now"
    assert digests(strip(other.path, tmp_path / "moved").path) == digests(repo / "snapshots" / commits[1])


def test_the_record_names_the_model_that_was_read(base_of, llama_base, tmp_path):
    made = plan(base_of("llama"), REQUEST)
    done = expand(llama_base, made, tmp_path / "out")
    assert (made.base_name, read_manifest(done.path).base_name) == (base_of("llama").name, llama_base.name)


def test_progress_adds_up(base_of, tmp_path):
    seen: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def track(label, total):
        seen[label] = [total]
        yield seen[label].append

    expand(base_of("llama"), REQUEST, tmp_path / "out", track=track)
    assert list(seen) == ["new tensors", "base shards", "base hashes"]
    assert all(sum(done) == total for total, *done in seen.values())
