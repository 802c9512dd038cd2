"""Many expansions in one folder: it loads as one model, each path is the model alone, and all comes back."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import scale_surgery
from scale_surgery import (
    PosteriorRouter,
    Request,
    apply,
    compose,
    expand,
    extract,
    load_expansion,
    route_export,
    strip,
)
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.cli.program import main
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.modeling import register
from scale_surgery.running.loading import loaded
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.intact import IntegrityReport, check_integrity
from scale_surgery.surgery.record import read_manifest
from tests.composed import LLAMA, REQUESTS, Made, mixed
from tests.conftest import load, shake
from tests.each import mostly
from tests.routed import padded, random_ids
from tests.surgery import test_images as images

SHARD = "expansions/law/expansion-default-00001-of-00001.safetensors"
PROMPTS = ({"input_ids": random_ids(2, 9)}, padded(random_ids(3, 13), (5, 2, 0)))
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def llama(made_of) -> Made:
    return made_of("llama", LLAMA)


@pytest.fixture(scope="module")
def folder(llama: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("composed") / "all"
    return compose(llama.base, llama.extracts, path, routing=mixed(switch_rate=0.05)).path


def files_of(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def load_remote(path: Path) -> Any:
    """As a stranger loads it, by its own code."""
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()


@pytest.mark.parametrize("loader", mostly([load, load_remote], lambda own: own is load))
@torch.no_grad()
def test_it_loads_as_the_model_in_memory(llama: Made, folder: Path, loader: Any) -> None:
    """Each path bit for bit the model that apply writes, the mixture that of the expansions loaded one by one."""
    register()
    found, known = loader(folder), llama.composed()
    known.set_expansion(list(LLAMA), switch_rate=0.05)
    assert found.expansions == list(LLAMA) and type(found).__name__ == "ScaleLlamaForCausalLM"
    for prompt in PROMPTS:
        assert torch.equal(found(**prompt).logits, known(**prompt).logits)
        assert torch.equal(found.generate(**prompt, **GREEDY), known.generate(**prompt, **GREEDY))
        for name in (None, *LLAMA):
            with found.use_expansion(name):
                alone = llama.alone(name)
                assert torch.equal(found(**prompt).logits, alone(**prompt).logits)
                assert torch.equal(found.generate(**prompt, **GREEDY), alone.generate(**prompt, **GREEDY))
    trained = {key for key, own in found.named_parameters() if own.requires_grad}
    assert trained and all(".expansions." in key for key in trained)
    assert sum(own.numel() for own in found.parameters()) == sum(own.numel() for own in known.parameters())


@pytest.mark.slow
@torch.no_grad()
def test_it_is_streamed_from_its_files(folder: Path) -> None:
    """Module by module where it is larger than the memory that it gets: the same bits, alone and side by side."""
    whole = load(folder)
    with loaded(folder, RunOptions(memory_bytes=60_000)) as (model, problems):
        assert not problems and any(own.is_meta for own in model.parameters())
        for prompt in PROMPTS:
            assert torch.equal(model(**prompt).logits, whole(**prompt).logits)
            assert all(map(torch.equal, model.path_logits(**prompt), whole.path_logits(**prompt)))
            assert torch.equal(model.generate(**prompt, **GREEDY), whole.generate(**prompt, **GREEDY))
            with model.use_expansion("chess"), whole.use_expansion("chess"):
                assert torch.equal(model(**prompt).logits, whole(**prompt).logits)
    assert load(folder, device_map={"": "cpu"}).expansions == list(LLAMA)


def test_all_of_it_comes_back(llama: Made, folder: Path, tmp_path: Path) -> None:
    assert files_of(strip(folder, tmp_path / "base").path) == files_of(llama.base)
    for name, own in llama.extracts.items():
        out = extract(folder, tmp_path / name, name=name).path
        assert files_of(out) == files_of(own)
        assert files_of(apply(out, tmp_path / f"{name}-whole", llama.base).path) == files_of(llama.folders[name])
    shards = [file.name for file in llama.base.glob("*.safetensors")]
    assert all(
        (folder / shard).read_bytes() == (llama.base / shard).read_bytes() for shard in shards if len(shards) > 1
    )


def test_one_more_and_one_less(llama: Made, folder: Path, tmp_path: Path) -> None:
    """The bytes of the others stay; what comes and goes leaves the folder as if it had been made so."""
    two = {name: llama.extracts[name] for name in LLAMA[:2]}
    first = compose(llama.base, two, tmp_path / "two", routing=mixed((0.5, 0.3, 0.2), 0.05)).path
    more = compose(first, {name: llama.extracts[name] for name in LLAMA[2:]}, tmp_path / "more").path
    assert files_of(more) == files_of(folder), "and all paths are alike again"
    less = compose(more, {}, tmp_path / "less", remove=LLAMA[2:], routing=mixed((0.5, 0.3, 0.2), 0.05)).path
    assert files_of(less) == files_of(first)
    assert files_of(first).keys() < files_of(folder).keys()


def test_expansions_are_called_as_their_folders_are(llama: Made, tmp_path: Path) -> None:
    """Where nobody named them; with underscores for what no name may have, as hyphens, dots and digits of folders."""
    made = extract(expand(llama.base, Request("1-2"), tmp_path / "made").path, tmp_path / "plain").path
    folders = [tmp_path / name / "v2" / f"{number}qwen3.5-{name}" for number, name in (("", "law"), ("7", "music"))]
    for folder in folders:
        shutil.copytree(made, folder)
    done = compose(llama.base, [*folders, llama.extracts["chess"]], tmp_path / "three")
    assert list(done.expansions) == ["qwen3_5_law", "_7qwen3_5_music", "chess"]
    assert load(done.path).expansions == list(done.expansions)
    same = [Path(shutil.copytree(folders[0], tmp_path / name)) for name in ("my-law", "my_law")]
    with pytest.raises(PlanError, match=r"^names: my_law would be the name of several extracts, .* Give --names\.$"):
        compose(llama.base, same, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_composed(llama: Made, folder: Path, tmp_path: Path, made_of: Any) -> None:
    other = made_of("qwen3", ("medicine",))
    begun: list[str] = []

    @contextmanager
    def track(name: str, total: int) -> Iterator[Any]:
        begun.append(name)
        yield lambda done: None

    with pytest.raises(CheckpointError, match="model_type is 'llama', expected 'qwen3'"):
        compose(llama.base, other.extracts, tmp_path / "out", track=track)
    assert not begun, "what headers show is said before a byte of the base is read"
    changed = Path(shutil.copytree(llama.base, tmp_path / "changed"))
    model = load(changed)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(changed)
    with pytest.raises(CheckpointError) as refused:
        compose(changed, {"law": llama.extracts["law"]}, tmp_path / "out")
    assert "law: changed: 1 of" in str(refused.value)
    assert "model.layers.1.mlp.up_proj.weight: its bytes differ." in str(refused.value)
    with pytest.raises(PlanError) as refused:
        compose(folder, {"law": llama.extracts["law"], "a-b": llama.extracts["law"]}, tmp_path / "out", remove=["x"])
    assert "remove: x is no expansion of this folder, expected medicine or law or music or chess." in str(refused.value)
    with pytest.raises(PlanError) as refused:
        compose(folder, {"law": llama.extracts["law"], "a-b": llama.extracts["law"]}, tmp_path / "out")
    assert "name: law is an expansion of this model already" in str(refused.value)
    assert "name: is 'a-b', expected letters" in str(refused.value)
    own = {name: llama.extracts[name] for name in ("law", "music")}
    with pytest.raises(PlanError, match=r"prior: is \[.*\], expected 3 positive weights of sum 1, the base's first"):
        compose(llama.base, own, tmp_path / "out", routing=mixed((0.5, 0.3, 0.1, 0.1)))
    with pytest.raises(PlanError) as refused:
        wrong = PosteriorRouter(prior=math.nan, switch_rate=math.nan)
        compose(llama.base, own, tmp_path / "out", routing=wrong)
    assert [line.split(":")[0] for line in refused.value.lines] == ["prior", "switch_rate"]
    with pytest.raises(PlanError, match=r"expected an expansion of .*: medicine or law or music or chess"):
        extract(folder, tmp_path / "out", name="history")
    with pytest.raises(PlanError, match=r"expected an expansion of .*: law"):
        extract(llama.folders["law"], tmp_path / "out", name="history")
    deep = extract(expand(llama.base, Request("1", method="depth"), tmp_path / "deep").path, tmp_path / "copies").path
    with pytest.raises(PlanError, match="copies: was made by --method depth"):
        compose(llama.base, [deep], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_python_gives_otherwise(llama: Made, folder: Path, tmp_path: Path) -> None:
    """One name or one extract by itself is meant; what cannot be meant is named."""
    own = Path(shutil.copytree(llama.extracts["law"], tmp_path / "law"))
    one = compose(llama.base, own, tmp_path / "one", routing=mixed([0.5, 0.5])).path
    many = compose(llama.base, (path for path in [str(own)]), tmp_path / "many", routing=mixed((0.5, 0.5))).path
    assert files_of(one) == files_of(many)
    less = compose(folder, {}, tmp_path / "less", remove="law")
    assert less.removed == ("law",) and "law" not in less.expansions
    taken = compose(folder, {}, tmp_path / "taken", remove=(name for name in ["law"]))
    assert files_of(taken.path) == files_of(less.path)
    refused = {
        r"name: is 1, expected letters, digits and underscores": {"extracts": {1: own}},
        r"extracts: 3 is no folder, expected the path of one or a Hub id": {"extracts": {"law": 3}},
        r"base_weights: is 'symlink', expected one of: auto, copy, link": {"base_weights": "symlink"},
        r"router: is {'prior': None}, expected one such as scale_surgery.Post": {"routing": {"prior": None}},
    }
    for message, wrong in refused.items():
        with pytest.raises(PlanError, match=message):
            compose(llama.base, **({"extracts": {"law": own}, "output": tmp_path / "out"} | wrong))
    with pytest.raises(PlanError, match=r"base_weights: is 'symlink'"):
        strip(folder, tmp_path / "out", base_weights="symlink")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def damage_of(path: Path) -> IntegrityReport:
    return check_integrity(open_checkpoint(path), read_manifest(path))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model-00001-of-00001.safetensors", "bytes differ from the base's model.safetensors"),
        ("modeling_scale.py", "modeling_scale.py: is not the code that the expansion wrote"),
    ],
)
def test_damage_is_found(folder: Path, tmp_path: Path, file: str, expected: str) -> None:
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    assert not damage_of(spoiled).problems, "the negative control"
    flip(spoiled / file, -2)
    assert any(expected in problem for problem in damage_of(spoiled).problems)
    with pytest.raises(CheckpointError, match="is not what was written"):
        compose(spoiled, {}, tmp_path / "out", remove=["music"])


def test_a_config_that_says_something_else(folder: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    config = json.loads((spoiled / "config.json").read_text())
    config["scale_surgery"]["router"]["switch_rate"] = 0.5
    (spoiled / "config.json").write_text(json.dumps(config))
    assert damage_of(spoiled).config == ("config.json: scale_surgery is not what the expansion wrote.",)


def test_the_dtype_of_an_expansion_stays(made_of, tmp_path: Path) -> None:
    """Half precision, tied and sharded; new tensors in their own dtype."""
    made = made_of("gemma3_text", ("music", "late"), "bfloat16")
    model = load(compose(made.base, made.extracts, tmp_path / "out").path)
    for name in made.extracts:
        alone = made.alone(name)
        with model.use_expansion(name):
            assert torch.equal(model(**PROMPTS[1]).logits, alone(**PROMPTS[1]).logits)
    assert load_expansion(load(made.base), made.extracts["music"]) is not None
    assert scale_surgery.Composed is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", ("whole", "late")),
        ("gemma2", ("music", "late")),
        pytest.param("gptj", ("medicine", "whole"), marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_other_architectures(made_of, tmp_path: Path, family: str, names: tuple[str, ...]) -> None:
    """Experts whose tensors are put together on load, capped logits, parts that are stock inside."""
    made = made_of(family, names)
    model, known = load(compose(made.base, made.extracts, tmp_path / "out").path), made.composed()
    known.set_expansion(list(names))
    assert torch.equal(model(**PROMPTS[1]).logits, known(**PROMPTS[1]).logits)
    for name in (None, *names):
        with model.use_expansion(name):
            assert torch.equal(model(**PROMPTS[1]).logits, made.alone(name)(**PROMPTS[1]).logits)


@pytest.mark.slow
@torch.no_grad()
def test_names_that_transformers_changes_on_load(tmp_path: Path) -> None:
    """Files of models that see images name modules in another way than the model that reads them."""
    config = images.twin_config("gemma3")
    base = images.write_base(config, torch.float32, tmp_path / "base")
    requests = {"law": REQUESTS["law"], "medicine": REQUESTS["medicine"]}
    folders = {
        name: shake(expand(base, replace(own, name=name), tmp_path / name).path) for name, own in requests.items()
    }
    extracts = {name: extract(folder, tmp_path / f"{name}.extract").path for name, folder in folders.items()}
    composed, prompt = (
        compose(base, extracts, tmp_path / "composed").path,
        images.inputs("gemma3", config, torch.float32),
    )
    expected = [images.logits(images.load(own), **prompt) for own in (base, *folders.values())]
    assert all(map(torch.equal, images.load(composed).path_logits(**prompt), expected))
    assert files_of(extract(composed, tmp_path / "back", name="law").path) == files_of(extracts["law"])


@torch.no_grad()
def test_the_router_of_a_composition_takes_the_place_of_its_own(llama: Made, tmp_path: Path) -> None:
    """A routed model brings its expansion alone, without the router."""
    routed = route_export(llama.folders["law"], tmp_path / "routed").path
    taken = extract(routed, tmp_path / "law").path
    composed = compose(llama.base, [taken], tmp_path / "composed").path
    found = load(composed)(**PROMPTS[0]).logits
    assert torch.equal(found, llama.alone("law")(**PROMPTS[0]).logits)
    assert not torch.equal(found, load(routed)(**PROMPTS[0]).logits), "the negative control"
    assert files_of(extract(composed, tmp_path / "back", name="law").path) == files_of(llama.extracts["law"])


NAME = "--name: is missing, and the model has 4 expansions: medicine, law, music, chess. Say which: --name medicine."
ELSEWHERE = {
    "train {folder} --data {text} -o {out}": NAME,
    "merge {folder} -o {out}": NAME,
    "extract {folder} -o {out}": NAME,
    "adopt {folder} --base {base} -o {out}": "{folder}: has a surgery.json and the layout of an expanded model",
    "rank-layers {folder} --data {text}": "all: is an expanded model, expected a base model",
    "route-export {folder} --router none -o {out}": "--router none: {folder} has 4 expansions",
    "apply {law} --base {folder} -o {out}": "is an expanded model, expected a base model",
    "apply {folder} --base {base} -o {out}": "{folder}: has no extract.json",
    "compose {base} {folder} -o {out} --names more": "{folder}: has no extract.json",
    "expand {folder} --layers 1 --name law -o {out}": "has an expansion called law already",
}


@pytest.mark.parametrize("command", ELSEWHERE)
def test_where_one_of_several_is_needed_it_is_asked_for(
    llama: Made, folder: Path, tmp_path: Path, command: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One line.\n")
    places = {"folder": folder, "base": llama.base, "law": llama.extracts["law"], "text": text, "out": tmp_path / "out"}
    result = CliRunner().invoke(main, command.format(**places).split())
    assert result.exit_code == 1, result.output
    assert ELSEWHERE[command].format(**places) in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_lost_expansion_can_be_left_out(llama: Made, folder: Path, tmp_path: Path) -> None:
    """Where the rest is intact, what comes is what it would be without the damage; the others and the base come out."""
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    (spoiled / "expansion-law-00001-of-00001.safetensors").unlink()
    assert files_of(strip(spoiled, tmp_path / "base").path) == files_of(llama.base)
    shown = CliRunner().invoke(main, ["compose", str(spoiled), "--remove", "law", "-o", str(tmp_path / "out")])
    assert "taken out law; all else is what was written, by sha256" in " ".join(shown.output.split()), shown.output
    assert files_of(tmp_path / "out") == files_of(compose(folder, {}, tmp_path / "expected", remove=["law"]).path)
    with pytest.raises(CheckpointError, match="expansion-law"):
        compose(spoiled, {}, tmp_path / "others", remove=["music"])


def test_all_can_be_taken_out_for_others(llama: Made, folder: Path, tmp_path: Path) -> None:
    one = compose(folder, {"law": llama.extracts["law"]}, tmp_path / "one", remove=LLAMA, routing=mixed()).path
    assert files_of(one) == files_of(
        compose(llama.base, {"law": llama.extracts["law"]}, tmp_path / "new", routing=mixed()).path
    )
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    flip(spoiled / "model-00001-of-00001.safetensors", -2)
    with pytest.raises(CheckpointError, match=r"bytes differ from the base's model.safetensors"):
        compose(spoiled, {"law": llama.extracts["law"]}, tmp_path / "out", remove=LLAMA)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("expansions", {}, "expansions is empty"),
        ("replaced", {"config.json": "{"}, "Expecting property name"),
        ("replaced", {"config.json": "{}", "other.json": "{}"}, "replaced.other.json is no file of the base"),
        ("base_files", {}, "the base's config.json is missing"),
    ],
)
def test_a_record_that_was_spoiled(folder: Path, tmp_path: Path, key: str, value: Any, expected: str) -> None:
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    content = json.loads((spoiled / "surgery.json").read_text())
    (spoiled / "surgery.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(CheckpointError, match="is incomplete") as refused:
        read_manifest(spoiled)
    assert expected in str(refused.value)


def test_paths_in_another_order_are_noticed(folder: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    config = json.loads((spoiled / "config.json").read_text())
    config["scale_surgery"]["expansions"].reverse()
    (spoiled / "config.json").write_text(json.dumps(config))
    found = damage_of(spoiled).config
    assert found == ("config.json: scale_surgery is not what the expansion wrote.",)


def test_the_command_keeps_what_is_not_said(llama: Made, tmp_path: Path) -> None:
    def run(*words: object) -> Any:
        return CliRunner().invoke(main, ["compose", *map(str, words), "-q"])

    two = [llama.extracts[name] for name in LLAMA[:2]]
    first = tmp_path / "first"
    twice = run(llama.base, *two, "--names", "law,law", "-o", first)
    assert twice.exit_code == 2 and "one name stands twice" in twice.output
    said = ("--names", "medicine,law", "--prior", "0.6,0.2,0.2", "--switch-rate", "0")
    assert run(llama.base, *two, *said, "-o", first).exit_code == 0
    router = {"router": "posterior", "prior": [0.6, 0.2, 0.2], "switch_rate": 0.0}
    assert load(first).config.scale_surgery["router"] == router
    assert load(first).choice.router.settings == router
    wrong = run(llama.base, *two, "--names", "medicine,law", "--prior", "0.5,0.5", "-o", tmp_path / "wrong")
    assert wrong.exit_code == 1 and "prior: is [0.5, 0.5], expected 3 positive weights of sum 1" in wrong.output
    assert not (tmp_path / "wrong").exists()
    # what is named twice is removed once
    removed = ("--remove", "law", "--remove", "law", "--prior", "0.7,0.3")
    assert run(first, *removed, "-o", tmp_path / "removed").exit_code == 0
    assert run(first, "--switch-rate", "0.5", "-o", tmp_path / "rate").exit_code == 0
    assert read_manifest(tmp_path / "rate").routing == mixed((0.6, 0.2, 0.2), 0.5)
    assert run(first, "--remove", "law", "--prior", "0.7,0.3", "-o", tmp_path / "prior").exit_code == 0
    assert read_manifest(tmp_path / "prior").routing == mixed((0.7, 0.3), 0.0)
    assert run(first, "--switch-rate", "0.2", "-o", tmp_path / "rate").exit_code == 1
    assert run(first, "--switch-rate", "0.2", "-o", tmp_path / "rate", "--overwrite").exit_code == 0
    assert read_manifest(tmp_path / "rate").routing == mixed((0.6, 0.2, 0.2), 0.2)
    assert load(tmp_path / "rate").choice.router.switch_rate == 0.2
    for name in ("training", "class", "_modules", "base"):
        refused = run(llama.base, two[0], "--names", name, "-o", tmp_path / "out")
        assert refused.exit_code == 1 and "expected letters, digits and underscores" in refused.output


def test_a_name_for_each_row(folder: Path) -> None:
    model, ids = load(folder), random_ids(4, 5)
    for names, expected in ((["law", None], "2 names for 4 rows"), ("law", "expected a list, a name or None for each")):
        with pytest.raises(ValueError, match=expected):
            model(ids, expansion_names=names)
