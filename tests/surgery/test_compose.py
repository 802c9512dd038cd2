"""Many expansions in one folder: it loads as one model, each path is the model alone, and all comes back."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery import (
    CosineRouter,
    PosteriorRouter,
    Request,
    adopt,
    apply,
    compose,
    expand,
    extract,
    route_export,
    strip,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.modeling import register
from scale_surgery.surgery.load_expansion import load_expansion
from tests.command import run
from tests.composed import LLAMA, REQUESTS, Made, mixed
from tests.conftest import digests, edited, load, problems, shake
from tests.each import mostly
from tests.routed import padded, random_ids
from tests.surgery import test_images as images

PROMPTS = ({"input_ids": random_ids(2, 9)}, padded(random_ids(3, 13), (5, 2, 0)))
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def llama(made_of) -> Made:
    return made_of("llama", LLAMA)


@pytest.fixture(scope="module")
def folder(llama: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("composed") / "all"
    return compose(llama.base, llama.extracts, path, routing=mixed(switch_rate=0.05)).path


@pytest.fixture
def spoiled(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged by a test."""
    return Path(shutil.copytree(folder, tmp_path / "spoiled"))


def load_remote(path: Path) -> Any:
    """As a stranger loads it, by its own code."""
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()


@pytest.mark.parametrize("loader", mostly([load, load_remote], lambda loader: loader is load))
@torch.no_grad()
def test_it_loads_as_the_model_in_memory(llama: Made, folder: Path, loader: Any) -> None:
    """Each path bit for bit the model that apply writes, the mixture that of the expansions loaded one by one."""
    register()
    model, known = loader(folder), llama.composed()
    known.set_expansion(list(LLAMA), switch_rate=0.05)
    assert model.expansions == list(LLAMA) and type(model).__name__ == "ScaleLlamaForCausalLM"
    for prompt in PROMPTS:
        assert torch.equal(model(**prompt).logits, known(**prompt).logits)
        assert torch.equal(model.generate(**prompt, **GREEDY), known.generate(**prompt, **GREEDY))
        for name in (None, *LLAMA):
            with model.use_expansion(name):
                alone = llama.alone(name)
                assert torch.equal(model(**prompt).logits, alone(**prompt).logits)
                assert torch.equal(model.generate(**prompt, **GREEDY), alone.generate(**prompt, **GREEDY))
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".expansions." in key for key in trained)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        parameter.numel() for parameter in known.parameters()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("gemma3", "qwen3_vl"))
@torch.no_grad()
def test_models_that_see_images(tmp_path: Path, kind: str) -> None:
    """Their files name modules in another way than they do; some add images between layers, to every path."""
    config = images.config_of(kind)
    base = images.write_base(config, torch.float32, tmp_path / "base")
    requests = {"law": REQUESTS["law"], "medicine": REQUESTS["medicine"]}
    folders = {
        name: shake(expand(base, replace(request, name=name), tmp_path / name).path)
        for name, request in requests.items()
    }
    extracts = {name: extract(folder, tmp_path / f"{name}.extract").path for name, folder in folders.items()}
    composed, prompt = compose(base, extracts, tmp_path / "composed").path, images.inputs(kind, config, torch.float32)
    expected = [images.logits(images.load(folder), **prompt) for folder in (base, *folders.values())]
    assert all(map(torch.equal, images.load(composed).path_logits(**prompt), expected))
    assert not torch.equal(expected[0], expected[1]), "the negative control"
    assert digests(extract(composed, tmp_path / "back", name="law").path) == digests(extracts["law"])


def test_all_of_it_comes_back(llama: Made, folder: Path, tmp_path: Path) -> None:
    assert digests(strip(folder, tmp_path / "base").path) == digests(llama.base)
    for name, path in llama.extracts.items():
        out = extract(folder, tmp_path / name, name=name).path
        assert digests(out) == digests(path)
        assert digests(apply(out, tmp_path / f"{name}-whole", llama.base).path) == digests(llama.folders[name])


def test_one_more_and_one_less(llama: Made, folder: Path, tmp_path: Path) -> None:
    """The bytes of the others stay; what comes and goes leaves the folder as if it had been made so."""
    two = {name: llama.extracts[name] for name in LLAMA[:2]}
    first = compose(llama.base, two, tmp_path / "two", routing=mixed((0.5, 0.3, 0.2), 0.05)).path
    more = compose(first, {name: llama.extracts[name] for name in LLAMA[2:]}, tmp_path / "more").path
    assert digests(more) == digests(folder), "and all paths are alike again"
    less = compose(more, {}, tmp_path / "less", remove=LLAMA[2:], routing=mixed((0.5, 0.3, 0.2), 0.05)).path
    assert digests(less) == digests(first)
    # one name by itself is meant, and all can be taken out for others
    composition = compose(folder, {}, tmp_path / "one", remove="law")
    assert composition.removed == ("law",) and "law" not in composition.expansions
    law = {"law": llama.extracts["law"]}
    anew = compose(folder, law, tmp_path / "anew", remove=LLAMA, routing=mixed()).path
    assert digests(anew) == digests(compose(llama.base, law, tmp_path / "law", routing=mixed()).path)


def test_expansions_are_called_as_their_folders_are(llama: Made, tmp_path: Path) -> None:
    """Where nobody named them; with underscores for what no name may have, as hyphens, dots and digits of folders."""
    made = extract(expand(llama.base, Request("1-2"), tmp_path / "made").path, tmp_path / "plain").path
    folders = [tmp_path / name / "v2" / f"{number}qwen3.5-{name}" for number, name in (("", "law"), ("7", "music"))]
    for folder in folders:
        shutil.copytree(made, folder)
    done = compose(llama.base, [*folders, llama.extracts["chess"]], tmp_path / "three")
    assert list(done.expansions) == ["qwen3_5_law", "_7qwen3_5_music", "chess"]
    assert load(done.path).expansions == list(done.expansions)
    # one by itself is meant, any iterable of them, and a list of weights as a tuple
    path = compose(llama.base, folders[0], tmp_path / "one", routing=mixed([0.6, 0.4])).path  # type: ignore[arg-type]
    given = (str(folder) for folder in folders[:1])
    assert digests(path) == digests(compose(llama.base, given, tmp_path / "of-one", routing=mixed((0.6, 0.4))).path)
    same = [Path(shutil.copytree(folders[0], tmp_path / name)) for name in ("my-law", "my_law")]
    named = {"Law": llama.extracts["law"], "law": llama.extracts["music"]}
    assert [problem.code for problem in problems(compose, llama.base, named, tmp_path / "out", error=PlanError)] == [
        "name-taken"
    ], "some disks ignore case"
    twice = [Problem("extract-name-twice", "names", name="my_law")]
    assert problems(compose, llama.base, same, tmp_path / "out", error=PlanError) == twice
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_the_router_of_a_composition_takes_the_place_of_its_own(llama: Made, tmp_path: Path) -> None:
    """A routed model brings its expansion alone, without the router."""
    routed = route_export(llama.folders["law"], tmp_path / "routed").path
    taken = extract(routed, tmp_path / "law").path
    composed = compose(llama.base, [taken], tmp_path / "composed").path
    logits = load(composed)(**PROMPTS[0]).logits
    assert torch.equal(logits, llama.alone("law")(**PROMPTS[0]).logits)
    assert not torch.equal(logits, load(routed)(**PROMPTS[0]).logits), "the negative control"
    assert digests(extract(composed, tmp_path / "back", name="law").path) == digests(llama.extracts["law"])


def test_files_beside_the_tensors_come_along_unless_two_differ(llama: Made, tmp_path: Path) -> None:
    pieces = {name: Path(shutil.copytree(llama.folders[name], tmp_path / name)) for name in ("law", "music")}
    for name, folder in pieces.items():
        (folder / "chat_template.jinja").write_text(name)
        (folder / f"{name}.txt").write_text(name)
        pieces[name] = extract(folder, tmp_path / f"{name}-piece").path
    composed = compose(llama.base, pieces, tmp_path / "out")
    assert composed.left_out == ("chat_template.jinja",) and not (tmp_path / "out" / "chat_template.jinja").exists()
    assert [(tmp_path / "out" / f"{name}.txt").read_text() for name in pieces] == ["law", "music"]
    one = compose(llama.base, {"law": pieces["law"]}, tmp_path / "one")
    assert one.left_out == () and (tmp_path / "one" / "chat_template.jinja").read_text() == "law"


@pytest.mark.parametrize("has_own", (False, True))
def test_a_tokenizer_that_the_user_gave_comes_along_whole(
    base_of: Callable[..., Path], tmp_path: Path, has_own: bool
) -> None:
    """The base has none, or has got one since: that stays."""
    base = Path(shutil.copytree(base_of("llama"), tmp_path / "base"))
    wide = expand(base, Request("1", variant="adapt"), tmp_path / "wide").path
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(wide)
    given = {file.name for file in wide.iterdir()} - {file.name for file in base.iterdir()}
    given &= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {"tokenizer.json", "tokenizer_config.json"} <= given
    piece = extract(wide, tmp_path / "piece").path
    (base / "README.md").write_text("another")
    if has_own:
        for name in given:
            (base / name).write_bytes((wide / name).read_bytes() + b"\n")
    done = compose(base, {"law": piece}, tmp_path / "composed"), apply(piece, tmp_path / "applied", base)
    for made in done:
        assert set(made.left_out) == (given if has_own else set())
        for name in given:
            assert (made.path / name).read_bytes() == (wide / name).read_bytes() + b"\n" * has_own
        assert verify(made.path, probes=None, record=False).passed


def test_an_extract_of_an_unfinished_run_is_applied_to_another_base(llama: Made, tmp_path: Path) -> None:
    """Its shards have other names, as the index says."""
    wide = Path(shutil.copytree(llama.folders["law"], tmp_path / "wide"))
    (shard,) = wide.glob("expansion-*.safetensors")
    unfinished = shard.with_name(shard.name.replace("-00001-of", "-step-200-00001-of"))
    shard.rename(unfinished)
    with edited(wide / "model.safetensors.index.json") as index:
        index["weight_map"] = {
            name: unfinished.name if file == shard.name else file for name, file in index["weight_map"].items()
        }
    piece = extract(wide, tmp_path / "piece").path
    base = Path(shutil.copytree(llama.base, tmp_path / "base"))
    (base / "README.md").write_text("newer")
    again = apply(piece, tmp_path / "again", base).path
    assert (again / shard.name).read_bytes() == unfinished.read_bytes()
    assert verify(again, base, probes=None, record=False).passed


def test_logs_of_training_stay_in_the_extract_and_are_listed(llama: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.folders["law"], tmp_path / "law"))
    (folder / "training").mkdir(exist_ok=True)
    (folder / "training" / "log.jsonl").write_text("{}")
    piece = extract(folder, tmp_path / "piece").path
    composed = compose(llama.base, {"law": piece}, tmp_path / "out")
    assert "training/log.jsonl" in composed.left_out and not (tmp_path / "out" / "training").exists()
    # of an expanded folder too
    assert "training/log.jsonl" in expand(folder, Request("1", name="more"), tmp_path / "two").left_out
    assert "training/log.jsonl" in compose(folder, {"music": llama.extracts["music"]}, tmp_path / "both").left_out
    load(folder).save_pretrained(tmp_path / "saved")
    adopted = adopt(tmp_path / "saved", folder, tmp_path / "adopted")
    assert "training/log.jsonl" in adopted.left_out


def test_a_cosine_router_needs_paths_that_differ(llama: Made, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cosine"):
        compose(llama.base, {"medicine": llama.extracts["medicine"]}, tmp_path / "out", routing=CosineRouter())
    compose(llama.base, {"law": llama.extracts["law"]}, tmp_path / "out", routing=CosineRouter())


def test_a_router_for_one_expansion_takes_no_other_beside_it(llama: Made, tmp_path: Path) -> None:
    routed = route_export(llama.folders["law"], tmp_path / "routed", CosineRouter()).path
    reason = Problem("other-program", error="cosine: decides between the base and one expansion, not 2")
    assert problems(compose, routed, {"music": llama.extracts["music"]}, tmp_path / "out") == [
        Problem("router-for-others", llama.base.name, reason, count=2)
    ]
    # with another router both run
    both = compose(routed, {"music": llama.extracts["music"]}, tmp_path / "both", routing=PosteriorRouter())
    assert list(both.expansions) == ["law", "music"]


def test_a_base_that_computes_otherwise_is_warned_of(llama: Made, tmp_path: Path) -> None:
    """With the same tensors; `verify` compares with this base alone, and passes."""
    base, extracted = Path(shutil.copytree(llama.base, tmp_path / "base")), llama.extracts["law"]
    assert compose(base, {"law": extracted}, tmp_path / "same").warnings == (), "the control"
    with edited(base / "config.json") as config:
        config["rope_parameters"]["rope_theta"] = 500.0
        config["eos_token_id"] = 5
    (line,) = compose(base, {"law": extracted}, tmp_path / "other").warnings
    assert "rope_parameters.rope_theta is 10000.0, and in base it is 500.0" in line
    with pytest.warns(UserWarning, match="rope_theta is 10000.0, and in the model it is 500.0"):
        load_expansion(load(base), extracted)


def test_another_base_is_refused(llama: Made, tmp_path: Path, made_of: Any) -> None:
    begun: list[str] = []

    @contextmanager
    def track(name: str, total: int) -> Iterator[Any]:
        begun.append(name)
        yield lambda done: None

    of_qwen3 = made_of("qwen3", ("medicine",)).extracts
    (problem,) = problems(compose, llama.base, of_qwen3, tmp_path / "out", track=track, error=CheckpointError)
    differs = Problem("base-value-differs", "config.json: model_type", value="llama", recorded="qwen3")
    assert problem.code == "base-unfit" and problem.details == (differs,)
    assert not begun, "what headers show is said before a byte of the base is read"
    model = load(llama.base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "changed")
    law = {"law": llama.extracts["law"]}
    (problem,) = problems(compose, tmp_path / "changed", law, tmp_path / "out", error=CheckpointError)
    assert (problem.code, problem.where) == ("base-differs-compose", "law: changed")
    assert problem.details == (Problem("base-tensor-bytes", "model.layers.1.mlp.up_proj.weight"),)
    assert not (tmp_path / "out").exists()


def test_wishes_that_make_no_sense_are_refused(llama: Made, folder: Path, tmp_path: Path) -> None:
    law, out = llama.extracts["law"], tmp_path / "out"
    deep = extract(expand(llama.base, Request("1", method="depth"), tmp_path / "deep").path, tmp_path / "copies").path
    two = {name: llama.extracts[name] for name in ("law", "music")}
    for call, *messages in (
        (
            lambda: compose(folder, {"law": law, "a-b": law}, out),
            "name: law is an expansion of this model already",
            "name: is 'a-b', expected letters",
        ),
        (
            lambda: compose(llama.base, two, out, routing=mixed((0.5, 0.3, 0.1, 0.1))),
            "prior: is [0.5, 0.3, 0.1, 0.1], expected 3 positive weights of sum 1, the base's first",
        ),
        (
            lambda: compose(llama.base, two, out, routing=PosteriorRouter(math.nan, math.nan)),
            "prior: is ",
            "switch_rate: is nan",
        ),
        (lambda: extract(folder, out, name="history"), "expected an expansion of", "medicine or law or music or chess"),
        (lambda: compose(llama.base, [deep], out), "copies: --method depth puts copies between"),
        (lambda: compose(llama.base, {1: law}, out), "name: is 1, expected letters, digits and underscores"),
        (
            lambda: compose(llama.base, {"law": law}, out, routing={"prior": None}),
            "router is {'prior': None}, expected one such as scale_surgery.Post",
        ),
    ):
        with pytest.raises(PlanError) as refused:
            call()
        assert all(part in str(refused.value) for part in messages), refused.value
    for base, extracts, options, problem in (
        (folder, {}, {"remove": ["x"]}, Problem("remove-unknown", "remove", name="x", known=list(LLAMA))),
        (llama.base, [law], {"remove": "x"}, Problem("remove-from-base", "remove", model=llama.base.name)),
        (llama.base, {"law": 3}, {}, Problem("extract-no-path", "extracts", value=3)),
        (folder, [], {"remove": LLAMA}, Problem("expansions-none", "extracts")),
    ):
        assert problems(compose, base, extracts, out, error=PlanError, **options) == [problem]
    assert not out.exists() and not out.with_name("out.partial").exists()


def test_damage_is_found(llama: Made, spoiled: Path, tmp_path: Path) -> None:
    """Unless it is an expansion that was lost and is left out: then the rest is what it would be without the damage."""
    lost = spoiled / "expansion-law-00001-of-00001.safetensors"
    kept = lost.read_bytes()
    expected = compose(spoiled, {}, tmp_path / "expected", remove=["law"]).path
    lost.unlink()
    assert digests(strip(spoiled, tmp_path / "base").path) == digests(llama.base)
    shown = run("compose", spoiled, "--remove", "law", "-o", tmp_path / "less").output
    assert "removed law; all other files are unchanged, by sha256" in " ".join(shown.split()), shown
    assert digests(tmp_path / "less") == digests(expected)
    with pytest.raises(CheckpointError, match="expansion-law"):
        compose(spoiled, {}, tmp_path / "out", remove=["music"])
    lost.write_bytes(kept)
    shard = spoiled / "model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    law = {"law": llama.extracts["law"]}
    for extracts, removed in (({}, ["music"]), (law, LLAMA)):
        (problem,) = problems(compose, spoiled, extracts, tmp_path / "out", remove=removed, error=CheckpointError)
        assert problem.code == "folder-damaged"
        assert Problem("base-file-changed", shard.name, file="model.safetensors") in problem.details
    assert not (tmp_path / "out").exists()


NAME = "--name is missing, expected one of the model's expansions: medicine or law or music or chess."
ELSEWHERE = {
    "train {folder} --data {text} -o {out}": NAME,
    "merge {folder} -o {out}": NAME,
    "extract {folder} -o {out}": NAME,
    "adopt {folder} --expanded {folder} -o {out}": "{folder}: is an expanded model as it was written",
    "rank-layers {folder} --data {text}": "all: is an expanded model, expected a base model",
    "route-export {folder} --router none -o {out}": "{folder}: has several expansions (medicine, law, music, chess)",
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
    output = run(*command.format(**places).split(), code=1).output
    assert ELSEWHERE[command].format(**places) in " ".join(output.split())
    assert not (tmp_path / "out").exists()


def test_the_command_keeps_what_is_not_said(llama: Made, tmp_path: Path) -> None:
    two, first, second = [llama.extracts[name] for name in LLAMA[:2]], tmp_path / "first", tmp_path / "other"
    twice = run("compose", llama.base, *two, "--names", "law,law", "-o", first, code=2)
    assert "one name stands twice" in twice.output
    for name in ("training", "class", "_modules", "base"):
        refused = run("compose", llama.base, two[0], "--names", name, "-o", first, code=1).output
        assert "expected letters, digits and underscores" in " ".join(refused.split())
    options = ("--names", "medicine,law", "--prior", "0.6,0.2,0.2", "--switch-rate", "0")
    run("compose", llama.base, *two, *options, "-o", first, "-q")
    router = {"router": "posterior", "prior": [0.6, 0.2, 0.2], "switch_rate": 0.0}
    model = load(first)
    assert model.config.scale_surgery["router"] == model.choice.router.settings == router
    for words, wanted in (
        (("--switch-rate", "0.5"), mixed((0.6, 0.2, 0.2), 0.5)),
        # what is named twice is removed once
        (("--remove", "law", "--remove", "law", "--prior", "0.7,0.3", "--overwrite"), mixed((0.7, 0.3), 0.0)),
    ):
        run("compose", first, *words, "-o", second, "-q")
        assert read_manifest(second).routing == wanted
    run("compose", first, "--switch-rate", "0.2", "-o", second, code=1)  # it is there already
