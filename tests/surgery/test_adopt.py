"""adopt(saved, expanded): the blocks are those that were saved, all else is the expanded folder, byte for byte."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from scale_surgery import (
    Adopted,
    PosteriorRouter,
    Probes,
    Request,
    adopt,
    apply,
    compose,
    expand,
    extract,
    freeze_base,
    report,
    route_export,
    strip,
    train,
    unroute,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import open_checkpoint, read_json, read_tensor
from scale_surgery.checkpoint.trainer_files import LeftBehind, read_left_behind
from scale_surgery.errors import Problem
from scale_surgery.folder.config import stored_shard
from scale_surgery.folder.record import read_manifest
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import read_contents
from scale_surgery.running.stored_names import reading_of
from scale_surgery.show.tables_forms import render_adopted
from scale_surgery.surgery.load_expansion import load_expansion
from scale_surgery.training.settings import TrainingSettings
from tests.command import run
from tests.conftest import REQUESTS, Pair, digests, edited, load, problems, shown
from tests.each import mostly
from tests.fuzz.files import Planted
from tests.routed import random_ids
from tests.routed import train as move
from tests.surgery.test_images import config_of as image_config
from tests.surgery.test_images import load as load_images
from tests.surgery.test_images import write_base as write_image_base
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES, save_tiny

ADAPT = Request("last:2", variant="adapt", collaborate="both", init_w22="random")
EXPANSION = "expansion-default-00001-of-00001.safetensors"
NEW = "model.layers.2.self_attn.q_proj.expansions.default.w21"
IDS = random_ids(2, 11)


@pytest.fixture(scope="module")
def pair(pair_of: Callable[..., Pair]) -> Pair:
    """The tiny llama in bfloat16, tied, its base in several shards."""
    return pair_of("llama", "adapt", "bfloat16", True)


@pytest.fixture(scope="module")
def trained(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a plain loop saved of it."""
    return save(move(pair.load()), tmp_path_factory.mktemp("saved") / "saved")


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    """A copy of that, to be damaged by a test."""
    return Path(shutil.copytree(trained, tmp_path / "saved"))


def save(model: Any, path: Path, **options: Any) -> Path:
    """Save a model as a trainer does, in shards of its own."""
    model.save_pretrained(path, **({"max_shard_size": "30KB"} | options))
    return path


def save_flat(model: Any, path: Path, name: Callable[[str], str] = str, dtype: torch.dtype | None = None) -> Path:
    """Save names and tensors as they are in memory, tied ones twice, and no config.json: as FSDP and DeepSpeed do."""
    path.mkdir()
    tensors = {name(key): value.to(dtype or value.dtype).clone() for key, value in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output_logits: torch.Tensor = model(IDS).logits
    return output_logits


def refusal(*arguments: Any, **options: Any) -> Problem:
    """The problem for which an adoption is refused; nothing is written."""
    target = Path(arguments[2])
    (problem,) = problems(adopt, *arguments, **options)
    assert not target.exists() and not target.with_name(f"{target.name}.partial").exists()
    return problem


def named(problem: Problem) -> tuple[str, str]:
    """Code and place of a problem."""
    return problem.code, problem.where


SPECS = "config.json: scale_surgery.expansions"


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Save another tensor in place of one; what is edited in place is saved as well."""
    file = folder / open_checkpoint(folder, {}).tensors[name].file
    with edited(file) as tensors:
        tensors[name] = edit(tensors[name])


def added(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with another first value."""
    tensor.view(-1)[0] += 64
    return tensor


def without(hashes: dict[str, str], *names: str) -> dict[str, str]:
    return {name: digest for name, digest in hashes.items() if name not in names}


def text_of(done: Adopted) -> str:
    """What the command says, in one line."""
    return " ".join(shown(render_adopted(done), 300).split())


def new_of(pair: Pair) -> list[str]:
    return [tensor.name for tensor in pair.expansion.plan.tensors]


def check_adopted(saved: Path, wide: Path, model: Any, out: Path, reader: Callable[..., Any] = load) -> Adopted:
    """What was saved computes as the model."""
    done = adopt(saved, wide, out)
    adopted = reader(done.path)
    assert torch.equal(logits(adopted), logits(model)) and not done.other_settings
    assert not torch.equal(logits(adopted), logits(reader(wide))), "the negative control"
    return done


@pytest.mark.parametrize(
    ("family", "tied"),
    mostly(
        [(family, place % 2 == 0) for place, family in enumerate(FAMILIES)], lambda case: case[0] in ("llama", "gpt2")
    ),
)
def test_blocks_are_those_that_were_saved_and_all_else_is_the_expanded_folder(
    pair_of: Callable[..., Pair], tmp_path: Path, family: str, tied: bool
) -> None:
    pair = pair_of(family, "adapt", "bfloat16", tied)
    model = move(pair.load())
    saved = save(model, tmp_path / "saved")
    before = digests(saved), digests(pair.path)
    done = check_adopted(saved, pair.path, model, tmp_path / "out")
    assert (digests(saved), digests(pair.path)) == before
    assert without(digests(done.path), EXPANSION, "surgery.json") == without(before[1], EXPANSION, "surgery.json")
    adopted, parameters = open_checkpoint(done.path), dict(model.named_parameters())
    for name, place in reading_of(model).places(new_of(pair)).items():
        assert torch.equal(read_tensor(adopted, name), parameters[place.name])
    assert (done.base_tensors, done.trained_tensors) == (len(read_manifest(pair.path).base_tensors), len(new_of(pair)))
    assert done.base_name == pair.base_path.name and not done.widened and not done.rounded
    assert verify(done.path, probes=None).state == "trained"


@pytest.mark.parametrize(
    "request_",
    mostly(
        (
            Request("1", method="depth"),
            Request("1", method="grow"),
            Request("0", method="grow", variant="grow-train", copies=3),
            Request("1-2", dtype="float32"),
            Request("1", variant="adapt", up_width=0),
        ),
        lambda request: request.method in ("depth", "grow") and request.copies != 3,
    ),
)
def test_every_method(base_of: Callable[..., Path], tmp_path: Path, request_: Request) -> None:
    base = base_of("llama", "bfloat16")
    wide = expand(base, request_, tmp_path / "wide").path
    model = move(freeze_base(load(wide)))
    done = check_adopted(save(model, tmp_path / "saved"), wide, model, tmp_path / "out")
    assert verify(done.path, base).passed
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("experts", "images"))
def test_names_in_memory_of_other_kinds_of_model(tmp_path: Path, kind: str) -> None:
    """Experts lie one by one on disk and are merged in memory; what sees images has parts of other names."""
    if kind == "experts":
        base, reader = write_base(twin_config("phimoe"), torch.bfloat16, tmp_path / "base"), load
    else:
        base, reader = write_image_base(image_config("llava"), torch.bfloat16, tmp_path / "base"), load_images
    wide = expand(base, ADAPT, tmp_path / "wide").path
    model = move(reader(wide))
    flat = save_flat(model, tmp_path / "flat", dtype=torch.float32)
    for saved in (save(model, tmp_path / "saved"), flat):
        check_adopted(saved, wide, model, tmp_path / f"{saved.name}_out", reader=reader)
    if kind == "experts":
        name = "model.layers.0.mlp.experts.gate_up_proj"
        assert name not in open_checkpoint(wide).tensors
        change(flat, name, added)
        problem = refusal(flat, wide, tmp_path / "other")
        (detail,) = problem.details
        assert (problem.code, detail.code) == ("saved-base-changed", "tensor-values-differ")
        assert re.fullmatch(r"model\.layers\.0\..+\.experts\.0\..+", detail.where) and detail.values["count"] == 1


def test_a_model_of_several_expansions(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = base_of("llama")
    law_path = expand(base, Request("last:2", variant="adapt", name="law"), tmp_path / "one").path
    wide = expand(law_path, Request("0", method="grow", name="chess"), tmp_path / "wide").path
    model = move(load(wide))
    saved = save(model, tmp_path / "saved")
    done = check_adopted(saved, wide, model, tmp_path / "out")
    assert done.trained_tensors == done.expansion_tensors
    adopted = load(done.path)
    for name in ("law", "chess"):
        with adopted.use_expansion(name), model.use_expansion(name):
            assert torch.equal(logits(adopted), logits(model))
    assert verify(done.path, base).passed
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    # of two, the one that trained has a run
    with torch.no_grad():
        for name, parameter in adopted.named_parameters():
            if ".law." in name:
                parameter.add_(0.1)
    further = adopt(save(adopted, tmp_path / "further"), done.path, tmp_path / "more").path
    assert {name: len(expansion.training) for name, expansion in read_manifest(further).expansions.items()} == {
        "law": 2,
        "chess": 1,
    }
    # another expansion under the same name is another one
    other_path = expand(law_path, Request("1", method="grow", name="chess"), tmp_path / "other").path
    differing = [detail.where for detail in refusal(saved, other_path, tmp_path / "no").details]
    assert f"{SPECS}[1].expanded_layers" in differing and not [key for key in differing if "[0]" in key]


def test_a_routed_model_keeps_its_router(pair: Pair, tmp_path: Path) -> None:
    routed = route_export(pair.path, tmp_path / "routed", PosteriorRouter(switch_rate=0.05)).path
    model = move(load(routed))
    saved = save(model, tmp_path / "saved")
    done = check_adopted(saved, routed, model, tmp_path / "out")
    unrouted = unroute(done.path, tmp_path / "unrouted").path
    names = (EXPANSION, "surgery.json")
    assert without(digests(unrouted), *names) == without(digests(pair.path), *names)
    # onto the folder that was routed: it has no router, and that is said
    plain = adopt(saved, pair.path, tmp_path / "plain")
    assert read_manifest(plain.path).routing is None
    assert plain.other_settings == (
        f"the saved model routes in another way than {pair.path}, OUT has none: route-export gives it one",
    )


def test_an_expansion_that_was_given_another_name(pair: Pair, tmp_path: Path) -> None:
    """`compose` makes the folder of an expansion that was put on its base in memory under another name."""
    taken = extract(pair.path, tmp_path / "extract").path
    model = load_expansion(load(pair.base_path), taken, name="law")
    saved, named_law = save(move(model), tmp_path / "saved"), tmp_path / "law"
    compose(pair.base_path, {"law": taken}, named_law)
    done = adopt(saved, named_law, tmp_path / "out")
    loaded = load(done.path)
    assert loaded.expansions == ["law"] and torch.equal(logits(loaded), logits(model))
    assert done.trained_tensors == len(new_of(pair)) and verify(done.path, pair.base_path, probes=None).passed
    problem = refusal(saved, pair.path, tmp_path / "other")
    assert Problem("saved-key-differs", f"{SPECS}[0].name") in problem.details


def test_what_a_run_left_is_known_by_its_sums(pair: Pair, trained: Path, tmp_path: Path) -> None:
    """In a folder of several as well; a tensor whose start no record knows counts as trained."""
    wide = Path(shutil.copytree(pair.path, tmp_path / "wide"))
    content = read_json(wide / "surgery.json")
    sums, unknown = content["expansions"]["default"]["tensors"], new_of(pair)[0]
    sums["model.nothing"] = sums.pop(unknown)
    write_json(wide / "surgery.json", content)
    done = adopt(trained, wide, tmp_path / "out")
    known = read_manifest(done.path).expansions["default"].trained
    assert known is not None and unknown in known and "model.nothing" not in known
    assert done.trained_tensors == done.expansion_tensors
    beside = expand(pair.base_path, Request("1", name="law"), tmp_path / "beside").path
    taken = {"art": extract(done.path, tmp_path / "art").path, "law": extract(beside, tmp_path / "law").path}
    both = compose(pair.base_path, taken, tmp_path / "both").path
    for folder, name in ((done.path, "default"), (both, "art"), (beside, "law")):
        assert verify(folder, probes=None, record=False).passed
        file = folder / EXPANSION.replace("default", name)
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        verification = verify(folder, probes=None, record=False)
        lines = [line for line in verification.problems if f"expansions.{name}." in line]
        assert verification.passed == (folder == beside) == (not lines), "what no run has ended on is not known"
        pattern = r"model\.\S+: sha256 starts with \w{16}, expected \w{16} from surgery\.json\."
        assert all(re.fullmatch(pattern, line) for line in lines) and len(lines) < 2


def test_trainer_and_all_that_comes_after(tmp_path: Path) -> None:
    """A real run of the Trainer, and then what takes a trained folder."""
    wide = expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), tmp_path / "wide").path
    text = tmp_path / "text.txt"
    text.write_text("Mara Lind was born in Oslo and works as a clerk.")
    model, tokenizer = load(wide).train(), transformers.AutoTokenizer.from_pretrained(wide)
    options = {"max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "report_to": "none"}
    quiet = {"use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True, "per_device_train_batch_size": 1}
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), **options, **quiet)
    rows = [tokenizer(text.read_text(), return_token_type_ids=False)] * 4
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with contextlib.redirect_stdout(None):
        transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    saved = tmp_path / "run" / "checkpoint-2"
    (saved / "training_args.bin").write_bytes(pickle.dumps(Planted(tmp_path / "went_off")))
    assert refusal(tmp_path / "run", wide, tmp_path / "out") == Problem("folder-run", tmp_path / "run", last=saved)
    done = adopt(saved, wide, tmp_path / "out")
    assert not (tmp_path / "went_off").exists(), "nothing is unpickled"
    pickle.loads((saved / "training_args.bin").read_bytes())
    assert (tmp_path / "went_off").exists(), "the control"
    assert torch.equal(logits(load(done.path)), logits(model.eval()))
    assert done.steps == 2 and done.read == ("trainer_state.json",)
    assert {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(done.not_read)
    assert "were trained, after 2 steps" in text_of(done) and f"scale-surgery verify {done.path}" in text_of(done)
    (run,) = read_manifest(done.path).training
    assert run["by"] == "another trainer" and run["steps"] == 2 and run["state"]["epoch"] > 0
    assert "training_args.bin" in run["not_read"] and not run["settings"]
    # what follows takes it as any trained model
    verified = verify(done.path, SHIPPED_MODEL, probes=Probes(max_new_tokens=2))
    assert verified.passed and verified.state == "trained"
    run_report = report(done.path, files_only=True)
    assert run_report.state == "trained" and [entry["step"] for entry in run_report.log if "loss" in entry] == [1, 2]
    card = make_card(read_contents(done.path), "lab/wide", None, None, None).text
    assert re.search(r"\| 1 \| 2 \| [\d,]+ \| – \| 20", card) and "Another trainer made run 1, adopted on" in card
    assert "Only new tensors were trained, none of the base. " in card and "could not be compared" not in card
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(SHIPPED_MODEL)
    taken = extract(done.path, tmp_path / "extract").path
    assert digests(apply(taken, tmp_path / "applied", SHIPPED_MODEL).path) == digests(done.path)
    settings = TrainingSettings(steps=1, batch_size=1, sequence_length=8)
    further = train(done.path, [text], tmp_path / "further", settings).path
    assert [run.get("steps") for run in read_manifest(further).training] == [2, 1]
    assert verify(further, probes=None).passed


# ---- bases and expansions that are others


def test_one_changed_value_of_the_base_ends_it(pair: Pair, saved: Path, tmp_path: Path) -> None:
    change(saved, "model.layers.1.mlp.up_proj.weight", added)
    change(saved, "model.norm.weight", torch.neg)
    problem = refusal(saved, pair.path, tmp_path / "out")
    assert named(problem) == ("saved-base-changed", f"{saved}")
    assert problem.values == {"count": 2, "total": 50, "trained": f"{pair.path}"}
    changed = {detail.where: detail.values for detail in problem.details}
    assert list(changed) == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert [(values["count"], values["total"]) for values in changed.values()] == [(1, 2080), (40, 40)]
    assert 60 < changed["model.layers.1.mlp.up_proj.weight"]["most"] < 70


def test_another_expansion_is_named_tensor_by_tensor(pair: Pair, trained: Path, tmp_path: Path) -> None:
    other_path = expand(pair.base_path, Request("1", variant="adapt"), tmp_path / "other").path
    problem = refusal(trained, other_path, tmp_path / "out")
    assert (*named(problem), problem.values) == ("saved-other-expansion", f"{trained}", {"trained": f"{other_path}"})
    assert Problem("saved-key-differs", f"{SPECS}[0].expanded_layers") in problem.details
    # where nothing names the expansion, its tensors tell
    flat = save_flat(pair.load(), tmp_path / "flat")
    problem = refusal(flat, other_path, tmp_path / "out")
    assert named(problem) == ("saved-tensors-unfit", f"{flat}")
    assert problem.values["count"] == len(problem.details) == 88
    assert {detail.code for detail in problem.details} == {"tensor-not-saved", "tensor-not-trained"}
    # the same shapes, begun otherwise
    seeded = expand(pair.base_path, replace(REQUESTS["adapt"], seed=1), tmp_path / "seeded").path
    problem = refusal(trained, seeded, tmp_path / "out")
    assert Problem("saved-key-differs", f"{SPECS}[0].origin.request.seed") in problem.details
    larger = save_tiny(tmp_path / "larger", "llama", dtype=torch.bfloat16, tie_word_embeddings=True, hidden_size=48)
    wider = expand(larger, REQUESTS["adapt"], tmp_path / "wider").path
    assert refusal(trained, wider, tmp_path / "out").code == "saved-other-expansion"


# ---- numbers and names in other forms


def test_float32_beside_a_base_in_half_precision(pair: Pair, tmp_path: Path) -> None:
    """The base's numbers are the same; blocks are rounded once, as `train` does."""
    model = move(pair.load(dtype=torch.float32))
    saved = save(model, tmp_path / "saved")
    done = adopt(saved, pair.path, tmp_path / "out")
    assert done.widened == {"F32 for BF16": 50} and done.rounded == {"F32 to BF16": len(new_of(pair))}
    assert "saved in another dtype: 50 F32 for BF16" in text_of(done) and "once, as train does" in text_of(done)
    adopted, parameters = open_checkpoint(done.path), dict(model.named_parameters())
    for name in new_of(pair):
        assert torch.equal(read_tensor(adopted, name), parameters[name].to(torch.bfloat16))
    # a change that casting back would hide
    change(saved, "model.norm.weight", lambda value: value * (1 + 1e-6))
    (detail,) = refusal(saved, pair.path, tmp_path / "other").details
    assert named(detail) == ("tensor-values-differ", "model.norm.weight") and detail.values["count"] == 40


def test_a_base_that_was_rounded_is_another(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pair_of("llama", "adapt")
    saved = save(pair.load(dtype=torch.bfloat16), tmp_path / "saved")
    problem = refusal(saved, pair.path, tmp_path / "out")
    assert problem.code == "saved-base-rounded" and problem.values["holds"] == "float32"
    assert {(detail.code, detail.values["dtype"]) for detail in problem.details} == {("tensor-rounded", "bfloat16")}


@pytest.mark.parametrize("name", (NEW, "model.norm.weight"))
def test_numbers_that_are_none_of_a_training(pair: Pair, saved: Path, tmp_path: Path, name: str) -> None:
    """Numbers of other kinds are not what trained, whatever made them, and are not rounded to it."""
    kept = read_tensor(open_checkpoint(saved), name)
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64):
        change(saved, name, lambda tensor, dtype=dtype: kept.to(dtype))
        problem = refusal(saved, pair.path, tmp_path / "out")
        (detail,) = problem.details
        assert named(problem) == ("saved-converted", f"{saved}") and named(detail) == ("tensor-dtype", name)
        assert detail.values["planned"] == "BF16" != detail.values["dtype"]
    if name == NEW:
        for value in (float("nan"), float("inf")):
            change(saved, name, lambda tensor, value=value: torch.full_like(kept, value))
            assert refusal(saved, pair.path, tmp_path / "out") == Problem("saved-not-finite", NEW)


def test_what_the_dtype_of_the_plan_cannot_hold(base_of: Callable[..., Path], tmp_path: Path) -> None:
    wide = expand(base_of("llama", "float16"), Request("1-2"), tmp_path / "wide").path
    saved = save_flat(load(wide), tmp_path / "saved", dtype=torch.float32)
    change(saved, NEW, lambda tensor: torch.full_like(tensor, 1e6))
    wanted = Problem("saved-out-of-range", NEW, most=1e6, dtype="F16")
    assert refusal(saved, wide, tmp_path / "out") == wanted


def test_one_tensor_saved_under_two_names(pair: Pair, tmp_path: Path) -> None:
    """Where both are the same it does not matter; else nobody knows which of them trained."""
    model, twice = move(pair.load()), tmp_path / "twice"
    save_flat(model, twice)
    tensors = load_file(twice / "model.safetensors")
    part = NEW.removeprefix("model.")
    save_file(tensors | {part: tensors[NEW].clone()}, twice / "model.safetensors")
    assert torch.equal(logits(load(adopt(twice, pair.path, tmp_path / "same").path)), logits(model))
    save_file(tensors | {part: tensors[NEW] + 1}, twice / "model.safetensors")
    problem = refusal(twice, pair.path, tmp_path / "out")
    assert named(problem) == ("saved-twice", NEW) and {*problem.values.values()} == {NEW, part}
    assert [detail.code for detail in problem.details] == ["tensor-values-differ"]
    # a wrapper's name beside the plain one
    save_file(tensors | {f"module.{NEW}": tensors[NEW] + 1}, twice / "model.safetensors")
    problem = refusal(twice, pair.path, tmp_path / "out")
    assert named(problem) == ("saved-twice", NEW) and problem.values == {"first": NEW, "second": f"module.{NEW}"}


@pytest.mark.parametrize("wrapper", mostly(("{}", "module.{}", "module._orig_mod.{}"), "module._orig_mod.{}".__eq__))
def test_names_in_memory_and_tied_tensors_twice(pair: Pair, tmp_path: Path, wrapper: str) -> None:
    model = move(pair.load())
    done = adopt(save_flat(model, tmp_path / "flat", wrapper.format), pair.path, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model))
    assert done.base_tensors == 51, "the tied head was saved beside the embedding, and compared too"
    change(tmp_path / "flat", wrapper.format("lm_head.weight"), added)
    (detail,) = refusal(tmp_path / "flat", pair.path, tmp_path / "other").details
    differs = {"count": 1, "total": 3880, "most": pytest.approx(64, rel=0.01)}
    assert detail == Problem("tensor-values-differ", "model.embed_tokens.weight", **differs)


def test_a_head_that_transformers_renames(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    """Old files of GPT-NeoX call it embed_out, and what is saved of them may call it lm_head."""
    base = Path(shutil.copytree(pair_of("gpt_neox", "adapt").base_path, tmp_path / "base"))
    file = base / "model.safetensors"
    tensors = {name.replace("lm_head", "embed_out"): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    wide = expand(base, ADAPT, tmp_path / "wide").path
    assert "embed_out.weight" in read_manifest(wide).base_tensors
    model = move(load(wide))
    for name, saved in (
        ("memory", save_flat(model, tmp_path / "flat")),
        ("old", save_flat(model, tmp_path / "old", lambda key: key.replace("lm_head", "embed_out"))),
        ("pretrained", save(model, tmp_path / "pretrained")),
    ):
        done = adopt(saved, wide, tmp_path / f"out_{name}")
        assert torch.equal(logits(load(done.path)), logits(model)) and done.base_tensors == len(tensors)


# ---- what is told, or missing


def test_tokens_that_were_added_in_the_training_are_told(tmp_path: Path) -> None:
    """The embedding has rows for them, so no tensor tells; the tokenizer stays the base's."""
    base = save_tiny(tmp_path / "base", "llama", vocab_size=1200)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.save_pretrained(base)
    wide = expand(base, Request("1", variant="adapt"), tmp_path / "wide").path
    saved = save(load(wide), tmp_path / "saved")
    tokenizer.save_pretrained(saved)
    assert not adopt(saved, wide, tmp_path / "same").other_computation, "the control"
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(saved)
    (told,) = adopt(saved, wide, tmp_path / "other").other_computation
    assert told.startswith("the tokenizer of what was saved has 1 other token, such as '<tool>', that of ")


def test_settings_that_were_changed_are_told(pair: Pair, saved: Path, tmp_path: Path) -> None:
    config = read_json(saved / "config.json")
    changes = {"attention_dropout": 0.5, "rms_norm_eps": 0.25, "eos_token_id": 5, "use_cache": False}
    write_json(saved / "config.json", {**config, **changes})
    # the tokenizer stays the base's, so a model that learned by a template would be asked without it
    write_json(saved / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    done = adopt(saved, pair.path, tmp_path / "out")
    template = f"the chat template is another in what was saved, that of {pair.path} stays: it has none"
    assert done.other_settings == (
        template,
        "attention_dropout is 0.5 in what was saved, 0.0 stays",
        f"eos_token_id is 5 in what was saved, {config['eos_token_id']} stays",
    )
    assert done.other_computation == (
        f"rms_norm_eps is 0.25 in what was saved, {config['rms_norm_eps']} stays: the saved model computes with its "
        "own, so this one may give other numbers. Where the training meant it, write it into the base's config.json "
        "and expand that.",
    )
    text = text_of(done)
    assert "settings attention_dropout is 0.5" in text and "warning: rms_norm_eps is 0.25 in what was saved" in text
    assert text.endswith(f"next scale-surgery verify {done.path}")
    assert read_json(done.path / "config.json")["attention_dropout"] == 0.0
    (saved / "tokenizer_config.json").unlink()
    (saved / "chat_template.jinja").write_text("{{ messages }}")
    assert template in adopt(saved, pair.path, tmp_path / "again").other_settings


def test_a_vocabulary_that_was_changed(base_of: Callable[..., Path], tmp_path: Path) -> None:
    wide = expand(base_of("llama"), Request("1", method="depth"), tmp_path / "wide").path
    model = load(wide)
    model.resize_token_embeddings(101, mean_resizing=False)
    problem = refusal(save(model, tmp_path / "saved"), wide, tmp_path / "out")
    resized = Problem("tensor-shape", "model.embed_tokens.weight", shape=(101, 40), planned=(97, 40))
    assert problem.code == "saved-other-vocabulary" and resized in problem.details


def test_new_tensors_alone(pair: Pair, tmp_path: Path) -> None:
    """What leaves frozen tensors out, as DeepSpeed's exclude_frozen_parameters: there is nothing to compare."""
    model, saved = move(pair.load()), tmp_path / "saved"
    saved.mkdir()
    new = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    save_file(new, saved / "model.safetensors", metadata={"format": "pt"})
    done = adopt(saved, pair.path, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model))
    assert done.base_tensors == 0 and "none saved, none compared" in text_of(done)
    card = make_card(read_contents(done.path), "lab/wide", None, None, None).text
    assert "The base that run 1 had was not saved" in card and "none of the base" not in card
    # but a part of the base is none
    save_file(new | {"model.norm.weight": model.model.norm.weight.detach()}, saved / "model.safetensors")
    problem = refusal(saved, pair.path, tmp_path / "other")
    assert (problem.code, problem.values["count"]) == ("saved-tensors-unfit", 49)


def test_saved_into_the_expanded_folder(pair: Pair, tmp_path: Path) -> None:
    """save_pretrained takes the base's shards away; what it left can be adopted still."""
    wide = Path(shutil.copytree(pair.path, tmp_path / "wide"))
    assert refusal(wide, pair.path, tmp_path / "out") == Problem("saved-expanded", wide)
    model = move(load(wide))
    model.save_pretrained(wide)
    assert not verify(wide, probes=None, record=False).passed
    done = adopt(wide, pair.path, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model)) and verify(done.path, probes=None).passed


def test_folders_in_each_others_place(pair: Pair, saved: Path, tmp_path: Path) -> None:
    out, base = tmp_path / "out", pair.base_path
    assert refusal(base, pair.path, out) == Problem("form-base-not-saved", base)
    assert refusal(saved, base, out) == Problem("adopt-base", base)
    command = f"scale-surgery adopt {saved} --expanded {pair.path} -o OUT"
    assert refusal(pair.path, saved, out) == Problem("adopt-exchanged", saved, saved=pair.path, command=command)
    # the origin in config.json is for people: nothing is made of it
    (config_file := saved / "config.json").write_text(config_file.read_text().replace('"origin"', '"unknown"'))
    assert named(refusal(saved, pair.path, out)) == ("saved-other-expansion", f"{saved}")
    config_file.unlink()
    assert adopt(saved, pair.path, tmp_path / "other").trained_tensors == len(new_of(pair))


WHOLE = "scale-surgery adopt WHOLE --expanded EXPANDED -o OUT"
FOREIGN: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "folder-deepspeed": (
        ("config.json", "latest", "zero_to_fp32.py", "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        {"merge": "python {path}/zero_to_fp32.py {path} WHOLE --safe_serialization", "adopt": WHOLE},
    ),
    "folder-fsdp": (
        ("config.json", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"),
        {"merge": "accelerate merge-weights {path}/pytorch_model_fsdp_0 WHOLE", "adopt": WHOLE},
    ),
    "folder-fsdp-pickle": (
        ("config.json", "pytorch_model_fsdp.bin"),
        {
            "file": "pytorch_model_fsdp.bin",
            "line": "save_file(torch.load('{path}/pytorch_model_fsdp.bin', weights_only=True), "
            "'WHOLE/model.safetensors')",
            "adopt": WHOLE,
        },
    ),
    "folder-adapter": (("adapter_config.json", "adapter_model.safetensors"), {}),
}


@pytest.mark.parametrize("code", FOREIGN)
def test_weights_in_a_form_of_another_program(pair: Pair, tmp_path: Path, code: str) -> None:
    (files, values), path = FOREIGN[code], tmp_path / "run"
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("{}")
    expected = {key: value.format(path=path) for key, value in values.items()}
    assert refusal(path, pair.path, tmp_path / "out") == Problem(code, path, **expected)


def test_a_listing_of_shares_is_a_pickle_that_is_not_opened(pair: Pair, tmp_path: Path) -> None:
    """Where it names an optimizer, accelerate's command would fail."""
    (saved := tmp_path / "saved").mkdir()
    (saved / "__0_0.distcp").write_text("")
    (saved / ".metadata").write_bytes(pickle.dumps([Planted(tmp_path / "went_off"), "optim.state.model.norm.weight"]))
    problem = refusal(saved, pair.path, tmp_path / "out")
    assert not (tmp_path / "went_off").exists()
    assert pickle.loads((saved / ".metadata").read_bytes()) and (tmp_path / "went_off").exists(), "the control"
    to_whole = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {saved} whole.pt; then: "
    assert problem.code == "folder-fsdp" and problem.values["merge"].startswith(to_whole)
    (saved / ".metadata").write_bytes(pickle.dumps("model.norm.weight"))
    problem = refusal(saved, pair.path, tmp_path / "out")
    assert problem.values["merge"] == f"accelerate merge-weights {saved} WHOLE"


def test_commands_say_what_to_type(saved: Path, tmp_path: Path) -> None:
    """Inspect looks at what was saved; what needs the expanded folder refuses it, and all read it in one place."""
    for words in (["inspect"], ["verify"], ["strip", "-o", f"{tmp_path}/out"], ["push", "a/b", "--dry-run"]):
        output = run(words[0], saved, *words[1:], code=int(words[0] != "inspect")).output
        assert f"scale-surgery adopt {saved} --expanded EXPANDED -o OUT" in " ".join(output.split()), output
        assert not (tmp_path / "out").exists()


def test_the_command(pair: Pair, trained: Path, tmp_path: Path) -> None:
    shard = stored_shard(next(iter(open_checkpoint(pair.base_path).shards)))
    words = ["adopt", trained, "--expanded", pair.path, "-o", tmp_path / "out"]
    assert "50 compared by sha256, all equal" in run(*words).output
    assert not (pair.path / shard).samefile(tmp_path / "out" / shard)
    run(*words, code=1)
    repeated = run(*words, "--overwrite", "--json", "--base-weights", "link")
    assert json.loads(repeated.stdout)["base_tensors"] == 50
    assert (pair.path / shard).samefile(tmp_path / "out" / shard)


def test_what_a_trainer_left_is_read_as_numbers(pair: Pair, saved: Path, tmp_path: Path) -> None:
    """Its record holds no path of the machine that trained, and no text that anybody wrote."""
    logged = [{"step": 1, "loss": 2.0, "note": "x"}, {"loss": 1}, 3, {"step": 2, "loss": float("nan")}]
    state = {"global_step": 7, "epoch": 1.5, "best_model_checkpoint": "/home/somebody/run", "log_history": logged}
    (saved / "trainer_state.json").write_text(json.dumps(state | {"is_world_process_zero": True}))
    (saved / "training_args.json").write_text('{"learning_rate": 0.01, "output_dir": "/home/somebody"}')
    for name in ("training_args.bin", "rng_state_0.pth"):
        (saved / name).write_bytes(b"\x80")
    assert read_left_behind(saved) == LeftBehind(
        state={"global_step": 7, "epoch": 1.5},
        settings={"learning_rate": 0.01},
        log=({"step": 1, "loss": 2.0}, {"step": 2}),
        read=("trainer_state.json", "training_args.json"),
        not_read=("rng_state_0.pth", "training_args.bin"),
    )
    assert adopt(saved, pair.path, tmp_path / "out").steps == 7
    (saved / "trainer_state.json").write_text('{"global_step": 7')
    done = adopt(saved, pair.path, tmp_path / "other")
    assert done.steps is None and "trainer_state.json" in done.not_read
