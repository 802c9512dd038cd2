"""apply(extract(x), base) == x, every file byte for byte; another base is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scale_surgery import Probes
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.files import write_tensors
from scale_surgery.checkpoint.folder import open_checkpoint, read_json
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.verify import verify
from scale_surgery.planning.request import Request
from scale_surgery.show.tables_forms import render_applied
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.route import route_export, unroute
from scale_surgery.surgery.strip import strip
from scale_surgery.training.settings import TrainingSettings
from scale_surgery.training.train import train
from tests.conftest import digests, edited, flip, load, name_base, problems, refusal, shown
from tests.routed import random_ids
from tests.tiny import save_tiny

EXPANSION = "expansion-default-00001-of-00001.safetensors"


@pytest.fixture
def extracted(pair_of, tmp_path) -> Path:
    """An extract of the tiny llama, to be damaged by a test."""
    return extract(pair_of("llama", "adapt").path, tmp_path / "extract").path


@pytest.fixture
def other_base(llama_base) -> Path:
    """The tiny llama with one bit changed in two tensors."""
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        info = open_checkpoint(llama_base).tensors[name]
        flip(llama_base / info.file, info.offset)
    return llama_base


def rewrite(file: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file in place."""
    with edited(file) as content:
        change(content)


def admit(extracted: Path, *names: str) -> None:
    """Let extract.json name files with the hashes that they have."""
    entries = {
        name: {"sha256": hash_file(extracted / name), "bytes": (extracted / name).stat().st_size} for name in names
    }
    rewrite(extracted / "extract.json", lambda content: content["files"].update(entries))


def refused(extracted: Path | str, base: Any, out: Path) -> list[str]:
    """Lines of the message with which apply refuses; nothing is written."""
    message = refusal(apply, extracted, out, base, error=CheckpointError)
    assert not out.exists() and not out.with_name(f"{out.name}.partial").exists()
    return message.splitlines()


def unfit(extracted: Path | str, base: Any, out: Path) -> list[Problem]:
    """The problems for which apply refuses; nothing is written."""
    found = problems(apply, extracted, out, base, error=CheckpointError)
    assert not out.exists() and not out.with_name(f"{out.name}.partial").exists()
    return found


def test_what_train_and_route_export_wrote_comes_back(tmp_path):
    (tmp_path / "text.txt").write_text("Mara Lind was born in Oslo.")
    before = digests(SHIPPED_MODEL)
    expanded = expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), tmp_path / "expanded").path
    (expanded / "NOTES.md").write_text("of its own")
    settings = TrainingSettings(steps=1, batch_size=1, sequence_length=8)
    trained = train(expanded, [tmp_path / "text.txt"], tmp_path / "trained", settings).path
    routed = route_export(trained, tmp_path / "routed").path
    for folder in (expanded, trained, routed):
        extracted = extract(folder, tmp_path / f"{folder.name}-extract").path
        applied = apply(extracted, tmp_path / f"{folder.name}-again", SHIPPED_MODEL)
        assert digests(applied.path) == digests(folder)
        assert (applied.other_files, applied.base_name) == ((), SHIPPED_MODEL.name)
    assert "training/log.jsonl" in digests(applied.path) and digests(SHIPPED_MODEL) == before
    assert digests(unroute(applied.path, tmp_path / "unrouted").path) == digests(trained)


@pytest.mark.parametrize("how", ("copy", "link"))
def test_shards_are_taken_over_as_files(pair_of, extracted, tmp_path, how):
    base = pair_of("llama").base_path
    done = apply(extracted, tmp_path / "again", base, base_weights=how)
    shared = (base / "model.safetensors").samefile(done.path / "model-00001-of-00001.safetensors")
    assert shared == (extracted / EXPANSION).samefile(done.path / EXPANSION) == (how == "link")
    assert (done.bytes_written == 0) == (how == "link")


def test_the_same_tensors_in_other_files(pair_of, tmp_path):
    """Other shards, another config.json, new files: an expanded model on these, which gives them back."""
    pair, base = pair_of("llama", "adapt"), tmp_path / "base"
    load(pair.base_path).save_pretrained(base, max_shard_size="30KB")
    rewrite(base / "config.json", lambda config: config.update(pad_token_id=5))
    (base / "README.md").write_text("a later card")
    before = digests(base)
    assert len(list(base.glob("*.safetensors"))) > 1
    routed = route_export(pair.path, tmp_path / "routed").path
    done = apply(extract(routed, tmp_path / "extract").path, tmp_path / "again", base)
    assert {"README.md", "config.json", "model.safetensors"} <= set(done.other_files)
    assert verify(done.path, probes=Probes(max_new_tokens=0)).passed
    plain, ids, model = unroute(done.path, tmp_path / "unrouted").path, random_ids(2, 9), load(done.path)
    assert verify(plain, probes=None).passed and model.config.pad_token_id == 5
    for first, second in ((model, load(routed)), (load(plain), load(pair.path))):
        assert torch.equal(first(ids).logits, second(ids).logits)
    assert digests(strip(done.path, tmp_path / "stripped").path) == before


def test_a_pinned_tokenizer_is_pinned_again(tmp_path):
    base = save_tiny(tmp_path / "base", "qwen2")
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", base)
    pinned = base / "tokenizer_config.json"
    pinned.write_text("{}")
    expansion = expand(base, Request("last:1"), tmp_path / "expanded")
    assert expansion.pinned_tokenizer is not None
    rewrite(pinned, lambda config: config.update(clean_up_tokenization_spaces=True))
    before = digests(base)
    done = apply(extract(expansion.path, tmp_path / "extract").path, tmp_path / "again", base)
    tokenizer_config = read_json(done.path / "tokenizer_config.json")
    assert tokenizer_config["tokenizer_class"] == read_json(expansion.path / "tokenizer_config.json")["tokenizer_class"]
    assert tokenizer_config["clean_up_tokenization_spaces"] is True
    assert digests(strip(done.path, tmp_path / "stripped").path) == before


def test_the_base_that_it_names_is_found(pair_of, tmp_path):
    """By the real client of the Hub, offline, in its cache."""
    pair, commit = pair_of("llama", "adapt"), "0123456789abcdef0123456789abcdef01234567"
    expanded = Path(shutil.copytree(pair.path, tmp_path / "expanded"))
    name_base(expanded, "org/base", commit)
    extract(expanded, tmp_path / "extract")
    for name, folder in (("base", pair.base_path), ("extract", tmp_path / "extract")):
        repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)
    done = apply("org/extract", tmp_path / "again")
    assert (done.base_name, done.base_revision) == ("org/base", commit)
    assert digests(tmp_path / "again") == digests(tmp_path / "expanded")


# ---- another base


def test_another_base_is_refused_by_its_tensors(extracted, other_base, pair_of, tmp_path):
    pair, out = pair_of("llama"), tmp_path / "again"
    changed = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
    details = (Problem("base-tensor-bytes", tensor) for tensor in changed)
    assert unfit(extracted, other_base, out) == [
        Problem("base-differs-apply", other_base, *details, count=2, total=51, base=pair.base_path.name)
    ]
    assert not out.exists() and not out.with_name("again.partial").exists()
    # the control: its own base is taken
    assert apply(extracted, out, pair.base_path).other_files == ()


def test_a_base_that_was_cast_is_refused(extracted, base_of, tmp_path):
    (problem,) = unfit(extracted, base_of("llama", "bfloat16"), tmp_path / "again")
    assert problem.code == "base-differs-apply" and problem.values["count"] == len(problem.details) == 51
    assert problem.details[0] == Problem(
        "base-tensor-form", "lm_head.weight", form="BF16 [97, 40]", recorded="F32 [97, 40]"
    )


def test_a_base_of_other_sizes_is_refused_by_what_differs(extracted, base_of, llama_base, tmp_path):
    """Shapes, sizes that no shape shows, names that the expansion needs."""
    out = tmp_path / "again"
    down, made_on = "model.layers.0.mlp.down_proj", base_of("llama").name
    for name, changes, detail in (
        (
            "wide",
            {"intermediate_size": 60},
            Problem("tensor-shape", f"{down}.weight", shape=(40, 60), planned=(40, 52)),
        ),
        ("plain", {"mlp_bias": False}, Problem("base-tensor-missing", f"{down}.bias")),
        (
            "other",
            {"rms_norm_eps": 1e-3},
            Problem("base-value-differs", "config.json: epsilon", value=1e-3, recorded=1e-6),
        ),
    ):
        base = save_tiny(tmp_path / name, "llama", **changes)
        (problem,) = unfit(extracted, base, out)
        assert (problem.code, problem.where, problem.values) == ("base-unfit", f"{base}", {"base": made_on})
        assert detail in problem.details
    other, type_ = (
        base_of("gpt2"),
        Problem("base-value-differs", "config.json: model_type", value="gpt2", recorded="llama"),
    )
    assert unfit(extracted, other, out) == [Problem("base-unfit", other, type_, base=made_on)]
    assert not out.exists() and not out.with_name("again.partial").exists()
    for name in ("expanded_model.py", "expanded.index.json"):
        (llama_base / name).write_text("of the base")
    assert problems(apply, extracted, out, llama_base) == [
        Problem("file-name-reserved", name) for name in ("expanded.index.json", "expanded_model.py")
    ]


# ---- extracts that are none, or hostile


def test_a_base_that_is_not_named_or_is_none(extracted, pair_of, tmp_path):
    pair, out = pair_of("llama", "adapt"), tmp_path / "again"
    assert problems(apply, extracted, out) == [Problem("extract-base-unknown", "extract", base=pair.base_path.name)]
    (tmp_path / "file").touch()
    for given, base, message in (
        (extracted, pair.path, "is an expanded model, expected a base model. Take its base out"),
        (tmp_path / "nowhere", pair.base_path, "not found"),
    ):
        assert message in refused(given, base, out)[0]
    for given, base in ((pair.path, pair.base_path), (tmp_path / "file", None)):
        assert unfit(given, base, out) == [Problem("extract-without-record", given)]


def test_a_damaged_extract_is_refused(extracted, pair_of, tmp_path):
    def problem() -> Problem:
        (found,) = unfit(extracted, pair_of("llama").base_path, tmp_path / "out" / "again")
        return found

    whole = (extracted / EXPANSION).read_bytes()
    (extracted / EXPANSION).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert (problem().code, problem().where) == ("extract-file-changed", EXPANSION)
    (extracted / "expanded_model.py").rename(tmp_path / "kept.py")
    assert problem() == Problem("extract-file-missing", "expanded_model.py", folder=extracted)
    (tmp_path / "kept.py").rename(extracted / "expanded_model.py")
    whole = (extracted / "extract.json").read_bytes()
    outside = {"../outside.txt": {"sha256": "", "bytes": 1}}
    changes: tuple[tuple[Callable[[dict], object], str], ...] = (
        (lambda content: content.update(format=9), "record-format"),
        (lambda content: content.update(from_base=7), "record-incomplete"),
        (lambda content: content["files"]["config.json"].update(bytes="many"), "record-incomplete"),
        (lambda content: content.update(files=outside), "record-escape"),
        (lambda content: content.update(from_base=["/tmp/outside.txt"]), "record-escape"),
    )
    for change, code in changes:
        (extracted / "extract.json").write_bytes(whole)
        rewrite(extracted / "extract.json", change)
        assert (problem().code, problem().where) == (code, f"{extracted / 'extract.json'}")
    assert not list(tmp_path.rglob("outside.txt")) and not (tmp_path / "out").exists()


def test_lists_that_contradict_surgery_json_are_refused(extracted, pair_of, tmp_path):
    rewrite(extracted / "extract.json", lambda content: content["from_base"].append("config.json"))
    assert unfit(extracted, pair_of("llama").base_path, tmp_path / "again") == [
        Problem("extract-not-base", "extract.json", file="config.json")
    ]


def test_files_of_the_base_come_from_the_base_alone(extracted, pair_of, tmp_path):
    """An extract may not bring another generation_config.json, nor leave out that of the base."""
    (extracted / "generation_config.json").write_text('{"eos_token_id": 5}')
    admit(extracted, "generation_config.json")
    wanted = [Problem("extract-not-base", "extract.json", file="generation_config.json")]
    assert unfit(extracted, pair_of("llama").base_path, tmp_path / "again") == wanted
    rewrite(extracted / "extract.json", lambda content: content["from_base"].remove("generation_config.json"))
    assert unfit(extracted, pair_of("llama").base_path, tmp_path / "again") == wanted


def test_a_record_replaces_no_other_file_than_an_expansion_does(extracted, pair_of, tmp_path):
    def forge(content: dict) -> None:
        content["base_files"]["chat_template.jinja"] = {"sha256": "0" * 64, "bytes": 1, "stored_as": None}
        content["replaced"]["chat_template.jinja"] = "x"

    rewrite(extracted / "surgery.json", forge)
    (problem,) = unfit(extracted, pair_of("llama").base_path, tmp_path / "again")
    assert [detail.where for detail in problem.details] == ["replaced.chat_template.jinja"]


def test_a_file_that_the_base_has_too_is_that_of_the_base(pair_of, tmp_path):
    """A template or a README that was added to the expanded folder, and since then to the base."""
    made = pair_of("llama", "adapt")
    for file, place in (("mine", shutil.copytree(made.path, tmp_path / "wide")), ("theirs", None)):
        place = place or shutil.copytree(made.base_path, tmp_path / "base")
        (Path(place) / "chat_template.jinja").write_text(file)
    piece = extract(tmp_path / "wide", tmp_path / "piece").path
    applied = apply(piece, tmp_path / "again", tmp_path / "base")
    assert applied.left_out == ("chat_template.jinja",)
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "theirs"
    assert verify(tmp_path / "again", probes=None, record=False).passed
    # the control: a base without one
    assert apply(piece, tmp_path / "mine", made.base_path).left_out == ()
    assert (tmp_path / "mine" / "chat_template.jinja").read_text() == "mine"


def test_hostile_files_are_refused(extracted, pair_of, tmp_path):
    (extracted / "evil.py").write_text("print('boo')")
    (extracted / "evil.bin").write_bytes(b"pickle")
    with (extracted / "expanded_model.py").open("a") as file:
        file.write("print('boo')\n")
    (extracted / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["org/evil--code.Code", null]}}')
    rewrite(extracted / "config.json", lambda config: config["auto_map"].update(AutoModel="org/evil--code.Code"))

    def mislead(content: dict) -> None:
        content["replaced"]["config.json"] += " "

    rewrite(extracted / "surgery.json", mislead)
    names = ("evil.py", "evil.bin", "expanded_model.py", "tokenizer_config.json", "config.json", "surgery.json")
    admit(extracted, *names)
    assert unfit(extracted, pair_of("llama").base_path, tmp_path / "again") == [
        Problem("base-text-changed", "surgery.json", file="config.json"),
        Problem("config-key-changed", "config.json: auto_map"),
        Problem("code-unknown", "evil.py"),
        Problem("code-changed", "expanded_model.py"),
        Problem("extract-other-weights", "evil.bin"),
        Problem("code-not-of-base", "tokenizer_config.json: auto_map"),
    ]


def test_code_that_no_release_wrote_is_named(extracted, pair_of, tmp_path):
    base, code = pair_of("llama").base_path, extracted / "expanded_model.py"
    assert apply(extracted, tmp_path / "known", base).foreign_code == ()
    code.write_text("print('boo')\n")
    rewrite(extracted / "surgery.json", lambda content: content["code"].update({code.name: hash_file(code)}))
    admit(extracted, code.name, "surgery.json")
    done = apply(extracted, tmp_path / "again", base)
    assert done.foreign_code == (code.name,)
    text = " ".join(shown(render_applied(done)).split())
    assert "not from a release, read it before you trust it: expanded_model.py" in text


def test_tensors_that_are_no_expansion_are_refused(extracted, pair_of, tmp_path):
    base, tensors = pair_of("llama").base_path, load_file(extracted / EXPANSION)
    write_tensors(extracted / EXPANSION, tensors | {"model.norm.weight": torch.zeros(40)})
    admit(extracted, EXPANSION)
    assert unfit(extracted, base, tmp_path / "again") == [
        Problem("tensor-unplanned", "model.norm.weight", shard=EXPANSION)
    ]
    # under the name that loaders prefer to any index
    write_tensors(extracted / "model.safetensors", tensors)
    (extracted / EXPANSION).unlink()
    rewrite(extracted / "extract.json", lambda content: content["files"].pop(EXPANSION))
    admit(extracted, "model.safetensors")
    assert problems(apply, extracted, tmp_path / "again", base) == [Problem("extract-tensors-differ", "extract")]
    assert not (tmp_path / "again").exists()
