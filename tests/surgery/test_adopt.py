"""adopt(saved, expanded): the blocks are those that were saved, all else is the expanded folder, byte for byte."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from scale_surgery import (
    Adopted,
    PosteriorRouter,
    Probes,
    Request,
    SurgeryError,
    adopt,
    apply,
    compose,
    expand,
    extract,
    freeze_base,
    inspect,
    merge,
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
from scale_surgery.cli.program import main
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import read_contents
from scale_surgery.progress import no_progress
from scale_surgery.running.stored_names import reading_of
from scale_surgery.show.tables_forms import render_adopted
from scale_surgery.surgery.config import stored_shard
from scale_surgery.surgery.load_expansion import load_expansion
from scale_surgery.surgery.record import read_manifest
from scale_surgery.training.settings import TrainingSettings
from tests.conftest import Pair, digests, load
from tests.each import FEW, mostly
from tests.routed import random_ids
from tests.routed import train as move
from tests.surgery.test_images import load as load_images
from tests.surgery.test_images import twin_config as image_config
from tests.surgery.test_images import write_base as write_image_base
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES, save_tiny

ADAPT = Request("last:2", variant="adapt", collaborate="both", init_w22="random")
EXPANSION = "expansion-default-00001-of-00001.safetensors"
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
    tensors = {name(own): value.to(dtype or value.dtype).clone() for own, value in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def refusal(*arguments: Any, **options: Any) -> str:
    """Message of an adoption that is refused; nothing is written."""
    target = Path(arguments[2])
    with pytest.raises(SurgeryError) as caught:
        adopt(*arguments, **options)
    assert not target.exists() and not target.with_name(f"{target.name}.partial").exists()
    return str(caught.value)


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], Any]) -> None:
    """Edit one saved tensor in place."""
    file = folder / open_checkpoint(folder, {}).tensors[name].file
    tensors = load_file(file)
    edit(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def replace(folder: Path, name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Save another tensor in place of one."""
    file = folder / open_checkpoint(folder, {}).tensors[name].file
    tensors = load_file(file)
    save_file(tensors | {name: made(tensors[name])}, file, metadata={"format": "pt"})


def without(found: dict[str, str], *names: str) -> dict[str, str]:
    return {name: digest for name, digest in found.items() if name not in names}


def shown(done: Adopted) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_adopted(done))
    return capture.get()


@pytest.mark.parametrize(
    ("family", "tied"),
    mostly([(family, place % 2 == 0) for place, family in enumerate(FAMILIES)], lambda own: own[0] in FEW),
)
def test_blocks_are_those_that_were_saved_and_all_else_is_the_expanded_folder(
    pair_of: Callable[..., Pair], tmp_path: Path, family: str, tied: bool
) -> None:
    pair = pair_of(family, "adapt", "bfloat16", tied)
    model = move(pair.load())
    saved = save(model, tmp_path / "saved")
    before = digests(saved), digests(pair.path)
    done = adopt(saved, pair.path, tmp_path / "out")
    assert (digests(saved), digests(pair.path)) == before
    assert without(digests(done.path), EXPANSION, "surgery.json") == without(before[1], EXPANSION, "surgery.json")
    adopted, own = open_checkpoint(done.path), dict(model.named_parameters())
    for name, place in reading_of(model).places(own_new(pair)).items():
        assert torch.equal(read_tensor(adopted, name), own[place.name])
    assert torch.equal(logits(load(done.path)), logits(model))
    # the negative control: the blocks are other than those of the expanded folder
    assert not torch.equal(logits(load(done.path)), logits(pair.expanded))
    assert (done.base_tensors, done.trained_tensors) == (len(read_manifest(pair.path).base_tensors), len(own_new(pair)))
    assert done.base_name == pair.base_path.name and not done.widened and not done.rounded
    assert verify(done.path, probes=None).state == "trained"
    if family not in ("gpt_neox", "gpt2", "phi3"):
        return
    # and without the expanded folder, from the base and config.json; facts are derived, which takes a second
    again = adopt(saved, None, tmp_path / "again", pair.base_path)
    assert without(digests(again.path), "surgery.json") == without(digests(done.path), "surgery.json")
    assert read_manifest(again.path).expansion_tensors == read_manifest(pair.path).expansion_tensors


def own_new(pair: Pair) -> list[str]:
    return [tensor.name for tensor in pair.expansion.plan.tensors]


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
        lambda own: own.method in ("depth", "grow") and own.copies != 3,
    ),
)
def test_every_method(base_of: Callable[..., Path], tmp_path: Path, request_: Request) -> None:
    base = base_of("llama", "bfloat16")
    wide = expand(base, request_, tmp_path / "wide").path
    model = move(freeze_base(load(wide, dtype="auto")))
    saved = save(model, tmp_path / "saved")
    done = adopt(saved, wide, tmp_path / "out")
    assert torch.equal(logits(load(done.path, dtype="auto")), logits(model))
    assert not torch.equal(logits(load(done.path, dtype="auto")), logits(load(wide, dtype="auto")))
    assert verify(done.path, base).passed
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    again = adopt(saved, None, tmp_path / "again", base)
    assert without(digests(again.path), "surgery.json") == without(digests(done.path), "surgery.json")


def test_a_model_of_several_expansions(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = base_of("llama")
    one = expand(base, Request("last:2", variant="adapt", name="law"), tmp_path / "one").path
    wide = expand(one, Request("0", method="grow", name="chess"), tmp_path / "wide").path
    model = move(load(wide))
    saved = save(model, tmp_path / "saved")
    done = adopt(saved, wide, tmp_path / "out")
    assert done.trained_tensors == done.expansion_tensors
    for name in ("law", "chess"):
        with model.use_expansion(name):
            wanted = logits(model)
        adopted, before = load(done.path), load(wide)
        with adopted.use_expansion(name), before.use_expansion(name):
            assert torch.equal(logits(adopted), wanted)
            assert not torch.equal(logits(before), wanted), "the negative control"
    assert verify(done.path, base).passed
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    again = adopt(saved, None, tmp_path / "again", base)
    assert without(digests(again.path), "surgery.json") == without(digests(done.path), "surgery.json")
    # of two, the one that trained has a run
    model = load(done.path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".law." in name:
                parameter.add_(0.1)
    further = adopt(save(model, tmp_path / "further"), done.path, tmp_path / "more").path
    runs = {name: len(own.training) for name, own in read_manifest(further).expansions.items()}
    assert runs == {"law": 2, "chess": 1}
    # another expansion under the same name is another one
    other = expand(one, Request("1", method="grow", name="chess"), tmp_path / "other").path
    message = refusal(saved, other, tmp_path / "no")
    assert "config.json: scale_surgery.expansions[1].expanded_layers is another." in message
    assert "expansions[0]" not in message


def test_one_bit_of_a_trained_block_is_noticed(pair: Pair, trained: Path, base_of: Any, tmp_path: Path) -> None:
    """What a run left is known by its sums, in a folder of several as well; what no run has ended on is not."""
    done = adopt(trained, pair.path, tmp_path / "out").path
    beside = expand(pair.base_path, Request("1", name="law"), tmp_path / "beside").path
    taken = {"art": extract(done, tmp_path / "art").path, "law": extract(beside, tmp_path / "law").path}
    both = compose(pair.base_path, taken, tmp_path / "both").path
    for folder, name in ((done, "default"), (both, "art")):
        assert verify(folder, probes=None, record=False).passed
        flip(folder / EXPANSION.replace("default", name))
        found = verify(folder, probes=None, record=False)
        assert not found.passed
        (problem,) = [line for line in found.problems if f"expansions.{name}." in line]
        assert re.fullmatch(r"model\.\S+: sha256 \w{16}\.\.\., expected \w{16}\.\.\. from surgery\.json\.", problem)
    flip(beside / "expansion-law-00001-of-00001.safetensors")
    found = verify(beside, probes=None, record=False)
    assert found.passed and found.state == "trained"


def test_a_tensor_whose_start_no_record_knows_counts_as_trained(pair: Pair, trained: Path, tmp_path: Path) -> None:
    wide = Path(shutil.copytree(pair.path, tmp_path / "wide"))
    content = json.loads((wide / "surgery.json").read_text())
    sums = content["expansions"]["default"]["tensors"]
    unknown = own_new(pair)[0]
    sums["model.nothing"] = sums.pop(unknown)
    (wide / "surgery.json").write_text(json.dumps(content))
    done = adopt(trained, wide, tmp_path / "out")
    known = read_manifest(done.path).expansions["default"].trained
    assert known is not None and unknown in known and "model.nothing" not in known
    assert done.trained_tensors == done.expansion_tensors


def flip(file: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_trainer_and_all_that_comes_after(tmp_path: Path) -> None:
    """A real run of the Trainer, and then every command that takes an expanded folder."""
    wide = expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), tmp_path / "wide").path
    text = tmp_path / "text.txt"
    text.write_text("Mara Lind was born in Oslo and works as a clerk.")
    model = load(wide).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(wide)
    run_trainer(model, tokenizer, [text.read_text()] * 4, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoint-2"
    (saved / "training_args.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "went_off")))
    assert refusal(tmp_path / "run", wide, tmp_path / "out") == (
        f"{tmp_path}/run: holds checkpoints of a training run and no model beside them, expected one model. Give one: "
        f"{saved}"
    )
    done = adopt(saved, wide, tmp_path / "out")
    assert not (tmp_path / "went_off").exists(), "nothing is unpickled"
    assert pickle.loads((saved / "training_args.bin").read_bytes()) and (tmp_path / "went_off").exists()
    assert torch.equal(logits(load(done.path)), logits(model.eval()))
    assert done.steps == 2 and done.read == ("trainer_state.json",)
    assert {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(done.not_read)
    assert "were trained, after 2 steps" in shown(done) and f"scale-surgery verify {done.path}" in shown(done)
    (run,) = read_manifest(done.path).training
    assert run["by"] == "another trainer" and run["steps"] == 2 and run["state"]["epoch"] > 0
    assert "training_args.bin" in run["not_read"] and not run["settings"]
    # what follows takes it as any trained model
    verified = verify(done.path, SHIPPED_MODEL, probes=Probes(new_tokens=2))
    assert verified.passed and verified.state == "trained"
    found = report(done.path, files_only=True)
    assert found.state == "trained" and [entry["step"] for entry in found.log if "loss" in entry] == [1, 2]
    assert inspect(done.path).expanded.changed_since is None, "verified after it was adopted"  # type: ignore[union-attr]
    card = make_card(read_contents(done.path), "lab/wide", None, None, None).text
    assert re.search(r"\| 1 \| 2 \| [\d,]+ \| – \| 20", card) and "Another trainer made run 1, adopted on" in card
    assert "Only new tensors were trained, none of the base. " in card and "could not be compared" not in card
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(SHIPPED_MODEL)
    taken = extract(done.path, tmp_path / "extract").path
    assert digests(apply(taken, tmp_path / "applied", SHIPPED_MODEL).path) == digests(done.path)
    assert merge(done.path, tmp_path / "fused").path.is_dir()
    assert route_export(done.path, tmp_path / "routed").path.is_dir()
    settings = TrainingSettings(steps=1, batch_size=1, sequence_length=8)
    further = train(done.path, [text], tmp_path / "further", settings).path
    assert [run.get("steps") for run in read_manifest(further).training] == [2, 1]
    assert verify(further, probes=None).passed


def run_trainer(model: Any, tokenizer: Any, texts: list[str], output: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(output),
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    rows = [tokenizer(text, return_token_type_ids=False) for text in texts]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    with contextlib.redirect_stdout(None):
        trainer.train()


class Bomb:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.file, "it went off")


def test_one_changed_value_of_the_base_ends_it(pair: Pair, saved: Path, tmp_path: Path) -> None:
    change(saved, "model.layers.1.mlp.up_proj.weight", lambda own: own[3, 4].add_(64))
    change(saved, "model.norm.weight", lambda own: own.neg_())
    for wide, base in ((pair.path, None), (None, pair.base_path)):
        message = refusal(saved, wide, tmp_path / "out", base).splitlines()
        assert message[0] == f"{saved}: 2 of 50 base tensors are not those of {wide or base}."
        assert message[1].startswith("model.layers.1.mlp.up_proj.weight: 1 of 2,080 values differ, by up to 6")
        assert message[2].startswith("model.norm.weight: 40 of 40 values differ, by up to ")
        assert message[3].startswith("Only the new tensors may train: from_pretrained freezes all others, ")


def test_another_expansion_is_named_tensor_by_tensor(pair: Pair, trained: Path, tmp_path: Path) -> None:
    other = expand(pair.base_path, Request("1", variant="adapt"), tmp_path / "other").path
    message = refusal(trained, other, tmp_path / "out").splitlines()
    assert message[0] == f"{trained}: was saved from another expansion than {other}."
    assert "config.json: scale_surgery.expansions[0].expanded_layers is another." in message
    assert message[-1] == f"Give the expanded model that was trained: --expanded EXPANDED, not {other}."
    # where nothing names the expansion, its tensors tell
    flat = save_flat(pair.load(), tmp_path / "flat")
    message = refusal(flat, other, tmp_path / "out").splitlines()
    assert message[0] == f"{flat}: 88 tensors do not fit {other}."
    assert re.fullmatch(r"model\.\S+: was not saved\.", message[1])
    assert "... and 76 more." in message
    # the same shapes, begun otherwise
    seeded = expand(pair.base_path, Request("0,2", **(asked(pair) | {"seed": 1})), tmp_path / "seeded").path
    message = refusal(trained, seeded, tmp_path / "out")
    assert "config.json: scale_surgery.expansions[0].origin.request.seed is another." in message


def asked(pair: Pair) -> dict[str, Any]:
    return {"variant": "adapt", "collaborate": "both", "init_w22": "random"}


def test_another_base_is_refused(pair: Pair, trained: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    base = Path(shutil.copytree(pair.base_path, tmp_path / "base"))
    change(base, "model.embed_tokens.weight", lambda own: own.add_(1))
    message = refusal(trained, None, tmp_path / "out", base)
    assert f"1 of 50 base tensors are not those of {base}." in message
    larger = save_tiny(tmp_path / "larger", "llama", dtype=torch.bfloat16, tie_word_embeddings=True, hidden_size=48)
    assert "was saved from another expansion than" in refusal(trained, None, tmp_path / "out", larger)


def test_float32_beside_a_base_in_half_precision(pair: Pair, tmp_path: Path) -> None:
    """The base's numbers are the same; blocks are rounded once, as `train` does."""
    model = move(pair.load(dtype=torch.float32))
    saved = save(model, tmp_path / "saved")
    done = adopt(saved, pair.path, tmp_path / "out")
    assert done.widened == {"F32 for BF16": 50} and done.rounded == {"F32 to BF16": len(own_new(pair))}
    assert "saved in another dtype: 50 F32 for BF16" in shown(done) and "once, as train does" in shown(done)
    adopted, own = open_checkpoint(done.path), dict(model.named_parameters())
    for name in own_new(pair):
        assert torch.equal(read_tensor(adopted, name), own[name].to(torch.bfloat16))
    # a change that casting back would hide
    change(saved, "model.norm.weight", lambda value: value[0].mul_(1 + 1e-6))
    assert "model.norm.weight: 1 of 40 values differ, by up to" in refusal(saved, pair.path, tmp_path / "other")


def test_a_base_that_was_rounded_is_another(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pair_of("llama", "adapt")
    saved = save(pair.load(dtype=torch.bfloat16), tmp_path / "saved")
    message = refusal(saved, pair.path, tmp_path / "out").splitlines()
    assert message[1].endswith(": was rounded to bfloat16.")
    assert message[-1].startswith("The base was cast before it was trained with, so the new tensors learned beside")


def test_what_the_dtype_of_the_plan_cannot_hold(base_of: Callable[..., Path], tmp_path: Path) -> None:
    wide = expand(base_of("llama", "float16"), Request("1"), tmp_path / "wide").path
    saved = save_flat(load(wide), tmp_path / "saved", dtype=torch.float32)
    name = "model.layers.1.self_attn.q_proj.expansions.default.w21"
    change(saved, name, lambda own: own[0, 0].fill_(1e6))
    assert f"{name}: holds values up to 1e+06, expected such as F16 has" in refusal(saved, wide, tmp_path / "out")


NEW = "model.layers.2.self_attn.q_proj.expansions.default.w21"


@pytest.mark.parametrize("name", (NEW, "model.norm.weight"))
@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64), ids=str)
def test_numbers_of_another_kind(pair: Pair, saved: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Whatever made them, they are not what trained, and are not rounded to it."""
    replace(saved, name, lambda own: own.to(dtype))
    message = refusal(saved, pair.path, tmp_path / "out").splitlines()
    assert message[0] == f"{saved}: 1 tensor does not fit {pair.path}."
    assert re.fullmatch(rf"{name}: dtype \w+, expected BF16\.", message[1])
    assert message[-1].startswith("Numbers of such dtypes were made of the trained ones")


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_training_that_diverged(pair: Pair, saved: Path, tmp_path: Path, value: float) -> None:
    change(saved, NEW, lambda own: own[0, 0].fill_(value))
    assert refusal(saved, pair.path, tmp_path / "out") == (
        f"{NEW}: holds numbers that are not finite, so this training diverged. Adopt an earlier checkpoint of it, or "
        "train again with a lower learning rate."
    )


def test_one_tensor_saved_under_two_names(pair: Pair, tmp_path: Path) -> None:
    """Where both are the same it does not matter; else nobody knows which of them trained."""
    model, twice = move(pair.load()), tmp_path / "twice"
    save_flat(model, twice)
    tensors = load_file(twice / "model.safetensors")
    part = NEW.removeprefix("model.")
    save_file(tensors | {part: tensors[NEW].clone()}, twice / "model.safetensors")
    assert torch.equal(logits(load(adopt(twice, pair.path, tmp_path / "same").path)), logits(model))
    save_file(tensors | {part: tensors[NEW] + 1}, twice / "model.safetensors")
    message = refusal(twice, pair.path, tmp_path / "out")
    assert message.startswith(f"{NEW}: was saved as ") and " values differ, by up to 1" in message
    # a wrapper's name beside the plain one
    tensors.pop("lm_head.weight")
    save_file(tensors | {f"module.{NEW}": tensors[NEW] + 1}, twice / "model.safetensors")
    assert f"{NEW}: was saved as {NEW} and as module.{NEW}, expected the same" in refusal(
        twice, pair.path, tmp_path / "out"
    )


@pytest.mark.parametrize("wrapper", mostly(("{}", "module.{}", "module._orig_mod.{}"), "module._orig_mod.{}".__eq__))
def test_names_in_memory_and_tied_tensors_twice(pair: Pair, tmp_path: Path, wrapper: str) -> None:
    model = move(pair.load())
    done = adopt(save_flat(model, tmp_path / "flat", wrapper.format), pair.path, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model))
    assert done.base_tensors == 51, "the tied head was saved beside the embedding, and compared too"
    change(tmp_path / "flat", wrapper.format("lm_head.weight"), lambda own: own[0, 0].add_(64))
    message = refusal(tmp_path / "flat", pair.path, tmp_path / "other")
    assert "model.embed_tokens.weight: 1 of 3,880 values differ, by up to 64." in message


def test_a_head_that_transformers_renames(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    """Old files of GPT-NeoX call it embed_out, and what is saved of them may call it lm_head."""
    base = Path(shutil.copytree(pair_of("gpt_neox", "adapt").base_path, tmp_path / "base"))
    file = base / "model.safetensors"
    tensors = {name.replace("lm_head", "embed_out"): own for name, own in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    wide = expand(base, ADAPT, tmp_path / "wide").path
    assert "embed_out.weight" in read_manifest(wide).base_tensors
    model = move(load(wide))
    for name, saved in (
        ("memory", save_flat(model, tmp_path / "flat")),
        ("old", save_flat(model, tmp_path / "old", lambda own: own.replace("lm_head", "embed_out"))),
        ("pretrained", save(model, tmp_path / "pretrained")),
    ):
        done = adopt(saved, wide, tmp_path / f"out_{name}")
        assert torch.equal(logits(load(done.path)), logits(model)) and done.base_tensors == len(tensors)


@pytest.mark.slow
def test_experts_one_by_one_or_merged(tmp_path: Path) -> None:
    base = write_base(twin_config("phimoe"), torch.bfloat16, tmp_path / "base")
    wide = expand(base, ADAPT, tmp_path / "wide").path
    model = move(load(wide, dtype="auto"))
    merged = save_flat(model, tmp_path / "merged", dtype=torch.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert name in open_checkpoint(merged, {}).tensors and name not in open_checkpoint(wide).tensors
    for saved in (save(model, tmp_path / "saved"), merged):
        done = adopt(saved, wide, tmp_path / f"{saved.name}_out")
        assert torch.equal(logits(load(done.path, dtype="auto")), logits(model))
        assert done.base_tensors == len(read_manifest(wide).base_tensors)
    change(merged, name, lambda own: own[1, 0, 0].add_(1))
    message = refusal(merged, wide, tmp_path / "other").splitlines()
    assert "1 of " in message[0] and re.match(r"model\.layers\.0\..+\.experts\.1\..+: 1 of [\d,]+ values", message[1])


@pytest.mark.slow
def test_a_model_that_sees_images(tmp_path: Path) -> None:
    base = write_image_base(image_config("llava"), torch.bfloat16, tmp_path / "base")
    wide = expand(base, ADAPT, tmp_path / "wide").path
    model = move(load_images(wide))
    for saved in (save(model, tmp_path / "saved"), save_flat(model, tmp_path / "flat")):
        done = adopt(saved, wide, tmp_path / f"{saved.name}_out")
        assert torch.equal(logits(load_images(done.path)), logits(model)) and not done.other_settings
    again = adopt(tmp_path / "saved", None, tmp_path / "again", base)
    assert without(digests(again.path), "surgery.json") == without(digests(done.path), "surgery.json")


def test_a_routed_model_keeps_its_router(pair: Pair, tmp_path: Path) -> None:
    routed = route_export(pair.path, tmp_path / "routed", PosteriorRouter(switch_rate=0.05)).path
    model = move(load(routed))
    saved = save(model, tmp_path / "saved")
    done = adopt(saved, routed, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model)) and not done.other_settings
    again = adopt(saved, None, tmp_path / "again", pair.base_path)
    assert without(digests(again.path), "surgery.json") == without(digests(done.path), "surgery.json")
    assert not again.other_settings
    unrouted = unroute(again.path, tmp_path / "unrouted").path
    assert without(digests(unrouted), EXPANSION, "surgery.json") == without(
        digests(pair.path), EXPANSION, "surgery.json"
    )
    # onto the folder that was routed: it has no router, and that is said
    plain = adopt(saved, pair.path, tmp_path / "plain")
    assert read_manifest(plain.path).routing is None
    assert plain.other_settings == (
        f"the saved model routes in another way than {pair.path}, OUT has none: route-export gives it one",
    )


@pytest.mark.slow
def test_an_expansion_that_was_given_another_name(pair: Pair, tmp_path: Path) -> None:
    """It was taken out of its folder and put on its base under that name; values begin as under any other."""
    taken = extract(pair.path, tmp_path / "extract").path
    model = load_expansion(load(pair.base_path), taken, name="law")
    untrained = adopt(save(model, tmp_path / "untrained"), None, tmp_path / "same", pair.base_path)
    assert untrained.trained_tensors == 0
    done = adopt(save(move(model), tmp_path / "saved"), None, tmp_path / "out", pair.base_path)
    loaded = load(done.path)
    assert loaded.expansions == ["law"] and torch.equal(logits(loaded), logits(model))
    assert done.trained_tensors == len(own_new(pair)) and verify(done.path, pair.base_path).passed
    assert "scale_surgery.expansions[0].name is another" in refusal(tmp_path / "saved", pair.path, tmp_path / "other")


def test_settings_that_were_changed_are_told(pair: Pair, saved: Path, tmp_path: Path) -> None:
    config = read_json(saved / "config.json")
    other = {"attention_dropout": 0.5, "rms_norm_eps": 0.25, "eos_token_id": 5, "use_cache": False}
    write_json(saved / "config.json", {**config, **other})
    done = adopt(saved, pair.path, tmp_path / "out")
    assert done.other_settings == (
        "attention_dropout is 0.5 in what was saved, 0.0 stays",
        f"eos_token_id is 5 in what was saved, {config['eos_token_id']} stays",
    )
    assert done.other_computation == (
        f"rms_norm_eps is 0.25 in what was saved, {config['rms_norm_eps']} stays: the saved model computes with its "
        "own, so this one may give other numbers. Where the training meant it, write it into the base's config.json "
        "and expand that.",
    )
    console = Console(width=300)
    with console.capture() as shown:
        console.print(render_adopted(done))
    text = " ".join(shown.get().split())
    assert "settings attention_dropout is 0.5" in text and "warning: rms_norm_eps is 0.25 in what was saved" in text
    assert text.endswith(f"next scale-surgery verify {done.path}")
    assert read_json(done.path / "config.json")["attention_dropout"] == 0.0


def test_a_chat_template_that_was_given_is_told(pair: Pair, saved: Path, tmp_path: Path) -> None:
    """The tokenizer stays the base's, so a model that learned by a template would be asked without it."""
    write_json(saved / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    expected = f"the chat template is another in what was saved, that of {pair.path} stays: it has none"
    assert adopt(saved, pair.path, tmp_path / "out").other_settings == (expected,)
    (saved / "tokenizer_config.json").unlink()
    (saved / "chat_template.jinja").write_text("{{ messages }}")
    assert adopt(saved, pair.path, tmp_path / "again").other_settings == (expected,)


def test_a_vocabulary_that_was_changed(base_of: Callable[..., Path], tmp_path: Path) -> None:
    wide = expand(base_of("llama"), Request("1", method="depth"), tmp_path / "wide").path
    model = load(wide)
    model.resize_token_embeddings(101, mean_resizing=False)
    message = refusal(save(model, tmp_path / "saved"), wide, tmp_path / "out").splitlines()
    assert "model.embed_tokens.weight: shape [101, 40], expected [97, 40]." in message
    assert message[-1] == (
        "Its vocabulary was changed, from 97 tokens to 101, and an expansion keeps that of its base. Resize the "
        "embedding of the base model, save that, expand it, and train again."
    )


def test_new_tensors_alone(pair: Pair, tmp_path: Path) -> None:
    """What leaves frozen tensors out, as DeepSpeed's exclude_frozen_parameters: there is nothing to compare."""
    model, saved = move(pair.load()), tmp_path / "saved"
    saved.mkdir()
    new = {name: own.detach().clone() for name, own in model.named_parameters() if own.requires_grad}
    save_file(new, saved / "model.safetensors", metadata={"format": "pt"})
    done = adopt(saved, pair.path, tmp_path / "out")
    assert torch.equal(logits(load(done.path)), logits(model))
    assert done.base_tensors == 0 and "none was saved, so none could be compared" in shown(done)
    card = make_card(read_contents(done.path), "lab/wide", None, None, None).text
    assert "The base that run 1 had was not saved" in card and "none of the base" not in card
    # but a part of the base is none
    save_file(new | {"model.norm.weight": model.model.norm.weight.detach()}, saved / "model.safetensors")
    assert "49 tensors do not fit" in refusal(saved, pair.path, tmp_path / "other")


def test_saved_into_the_expanded_folder(pair: Pair, tmp_path: Path) -> None:
    """save_pretrained takes the base's shards away; what it left can be adopted still."""
    wide = Path(shutil.copytree(pair.path, tmp_path / "wide"))
    assert refusal(wide, pair.path, tmp_path / "out") == (
        f"{wide}: has a surgery.json and the layout of an expanded model: there is nothing to adopt. Use it as it is."
    )
    model = move(load(wide))
    model.save_pretrained(wide)
    assert not verify(wide, probes=None, record=False).passed
    done = adopt(wide, None, tmp_path / "out", pair.base_path)
    assert torch.equal(logits(load(done.path)), logits(model)) and verify(done.path).passed


def test_nothing_says_where_it_is_from(pair: Pair, saved: Path, tmp_path: Path) -> None:
    assert refusal(saved, None, tmp_path / "out") == (
        f"{saved}: was made from a folder called {pair.base_path.name}, which cannot be looked up. Give the expanded "
        "model that was trained, --expanded EXPANDED, or that folder, --base MODEL."
    )
    assert refusal(saved, pair.path, tmp_path / "out", pair.base_path) == (
        "--base with --expanded: an expanded model holds its base. Leave out one of the two."
    )
    config = read_json(saved / "config.json")
    (added,) = config["scale_surgery"]["expansions"]
    del added["origin"]
    write_json(saved / "config.json", config)
    assert refusal(saved, None, tmp_path / "out", pair.base_path).startswith(
        f"{saved}: its config.json does not say how it was expanded."
    )
    assert adopt(saved, pair.path, tmp_path / "out").trained_tensors == len(own_new(pair))
    added["origin"] = {"a": 1}
    write_json(saved / "config.json", config)
    message = refusal(saved, None, tmp_path / "other", pair.base_path)
    place = "scale_surgery.expansions[0].origin"
    assert f"{place}.base_name is missing; " in message and f"; {place}.a is unknown)" in message
    config["scale_surgery"]["expansions"].clear()
    write_json(saved / "config.json", config)
    message = refusal(saved, None, tmp_path / "other", pair.base_path)
    assert message.startswith(f"{saved}: is a base model, expected what a trainer saved of an expanded model.")
    (saved / "config.json").unlink()
    assert f"{saved}: has no config.json" in refusal(saved, None, tmp_path / "other", pair.base_path)
    message = refusal(pair.base_path, pair.path, tmp_path / "other")
    assert message.startswith(f"{pair.base_path}: is a base model, expected what a trainer saved of an expanded model.")


FOREIGN = {
    "deepspeed": (
        ("config.json", "latest", "zero_to_fp32.py", "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "is a checkpoint of DeepSpeed, in shares of its processes, expected safetensors. Put them together: python "
        "{path}/zero_to_fp32.py {path} WHOLE --safe_serialization; then: scale-surgery adopt WHOLE --expanded EXPANDED "
        "-o OUT",
    ),
    "fsdp": (
        ("config.json", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"),
        "is a checkpoint of FSDP, in shares of its processes, expected safetensors. Put them together: accelerate "
        "merge-weights {path}/pytorch_model_fsdp_0 WHOLE; then: scale-surgery adopt WHOLE --expanded EXPANDED -o OUT",
    ),
    "fsdp_whole": (
        ("config.json", "pytorch_model_fsdp.bin"),
        "holds pickled weights of FSDP (pytorch_model_fsdp.bin), expected safetensors. Put them together: in Python, "
        "save_file(torch.load('{path}/pytorch_model_fsdp.bin', weights_only=True), 'WHOLE/model.safetensors'); then: "
        "scale-surgery adopt WHOLE --expanded EXPANDED -o OUT",
    ),
    "adapter": (
        ("adapter_config.json", "adapter_model.safetensors"),
        "is an adapter of PEFT, which lies beside a model and is none, expected a model. Merge it in Python: "
        "PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(MERGED). Merged into an expanded "
        "model it changes the base; expansion blocks train without PEFT.",
    ),
    "pickles": (
        ("config.json", "pytorch_model.bin", "checkpoint-3/optimizer.pt"),
        "found only pickled weights (pytorch_model.bin), expected model.safetensors or model.safetensors.index.json. "
        "Pickles can run code when they are read; convert them once, where you trust them: "
        "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW).",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_weights_in_a_form_of_another_program(pair: Pair, tmp_path: Path, kind: str) -> None:
    files, expected = FOREIGN[kind]
    for file in files:
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("{}")
    assert refusal(tmp_path / "run", pair.path, tmp_path / "out") == (
        f"{tmp_path}/run: {expected.format(path=tmp_path / 'run')}"
    )


@pytest.mark.parametrize(
    "label",
    mostly(("base tensors", "new tensors", "files", "base shards"), ("new tensors", "base shards").__contains__),
)
def test_an_interrupted_run_continues(pair: Pair, trained: Path, tmp_path: Path, label: str) -> None:
    wide, base = (pair.path, None) if label != "base shards" else (None, pair.base_path)

    @contextlib.contextmanager
    def interrupted(name: str, total: int) -> Iterator[Callable[..., None]]:
        yield stop if name == label else no_progress

    def stop(advance: int, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adopt(trained, wide, tmp_path / "out", base, track=interrupted)
    assert not (tmp_path / "out").exists()
    again, undisturbed = adopt(trained, wide, tmp_path / "out", base), adopt(trained, wide, tmp_path / "other", base)
    assert without(digests(again.path), "surgery.json") == without(digests(undisturbed.path), "surgery.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "out"]


@pytest.mark.parametrize("how", ("copy", "link"))
def test_base_shards_are_taken_over_as_files(pair: Pair, trained: Path, tmp_path: Path, how: Any) -> None:
    done = adopt(trained, pair.path, tmp_path / "out", base_weights=how)
    again = adopt(trained, None, tmp_path / "again", pair.base_path, base_weights=how)
    shard = next(iter(open_checkpoint(pair.base_path).shards))
    assert (pair.path / stored_shard(shard)).samefile(done.path / stored_shard(shard)) == (how == "link")
    assert (pair.base_path / shard).samefile(again.path / stored_shard(shard)) == (how == "link")


COMMANDS = (
    ("verify",),
    ("strip", "-o", "{out}"),
    ("report",),
    ("merge", "-o", "{out}"),
    ("extract", "-o", "{out}"),
    ("route-export", "-o", "{out}"),
    ("train", "--data", "text.txt", "-o", "{out}"),
    ("push", "someone/something", "--dry-run"),
    ("inspect",),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("revision", (None, "0123abc"))
def test_every_command_says_what_to_type(saved: Path, tmp_path: Path, command: tuple[str, ...], revision: Any) -> None:
    config = read_json(saved / "config.json")
    config["scale_surgery"]["expansions"][0]["origin"]["base_revision"] = revision
    write_json(saved / "config.json", config)
    name, *options = (word.format(out=tmp_path / "out") for word in command)
    result = CliRunner().invoke(main, [name, str(saved), *options], env={"COLUMNS": "300"})
    given = "" if revision else "--expanded EXPANDED "
    assert f"scale-surgery adopt {saved} {given}-o OUT" in " ".join(result.output.split()), result.output
    assert result.exit_code == (name != "inspect") and not (tmp_path / "out").exists()


def test_the_command(pair: Pair, trained: Path, tmp_path: Path) -> None:
    words = ["adopt", str(trained), "--expanded", str(pair.path), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "50 compared by sha256, all equal" in result.output
    assert CliRunner().invoke(main, words).exit_code == 1
    again = CliRunner().invoke(main, [*words, "--overwrite", "--json"])
    assert json.loads(again.stdout)["base_tensors"] == 50


def test_what_a_trainer_left_is_read_as_numbers(tmp_path: Path) -> None:
    state = {
        "global_step": 7,
        "epoch": 1.5,
        "best_model_checkpoint": "/home/somebody/run",
        "is_world_process_zero": True,
        "log_history": [{"step": 1, "loss": 2.0, "note": "x"}, {"loss": 1}, 3, {"step": 2, "loss": float("nan")}],
    }
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "training_args.json").write_text('{"learning_rate": 0.01, "output_dir": "/home/somebody"}')
    for name in ("training_args.bin", "rng_state_0.pth", "model.bin"):
        (tmp_path / name).write_bytes(b"\x80")
    found = read_left_behind(tmp_path)
    assert found == LeftBehind(
        state={"global_step": 7, "epoch": 1.5},
        settings={"learning_rate": 0.01},
        log=({"step": 1, "loss": 2.0}, {"step": 2}),
        read=("trainer_state.json", "training_args.json"),
        not_read=("rng_state_0.pth", "training_args.bin"),
    )
    assert found.steps == 7
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7')
    found = read_left_behind(tmp_path)
    assert found.steps is None and "trainer_state.json" in found.not_read
