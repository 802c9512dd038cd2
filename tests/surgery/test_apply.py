"""apply(extract(x), base) == x, every file byte for byte; another base is refused, or recorded when it is forced."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from scale_surgery import GivenBase, Probes, RunOptions
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.files import write_json, write_tensors
from scale_surgery.checkpoint.folder import open_checkpoint, read_json, read_tensor
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.errors import CheckpointError, SurgeryError
from scale_surgery.evidence.verify import verify
from scale_surgery.planning.request import Request
from scale_surgery.progress import no_progress
from scale_surgery.show.tables_forms import render_applied
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.record import read_manifest
from scale_surgery.surgery.route import route_export, unroute
from scale_surgery.surgery.strip import strip
from scale_surgery.training.settings import TrainingSettings
from scale_surgery.training.train import train
from tests.conftest import digests, load, name_base
from tests.each import mostly
from tests.routed import random_ids
from tests.surgery.test_strip import furnished  # noqa: F401
from tests.tiny import save_tiny

EXPANSION = "expansion-default-00001-of-00001.safetensors"


@pytest.fixture
def extracted(pair_of, tmp_path) -> Path:
    """An extract of the tiny llama, to be damaged by a test."""
    return extract(pair_of("llama", "adapt").path, tmp_path / "extract").path


@pytest.fixture
def other_base(llama_base) -> Path:
    """The tiny llama with other values in two tensors."""
    flip(llama_base, "model.layers.1.mlp.up_proj.weight", "lm_head.weight")
    return llama_base


def flip(folder: Path, *names: str) -> None:
    """Change one bit in each of some tensors of a checkpoint."""
    for name in names:
        info = open_checkpoint(folder).tensors[name]
        content = bytearray((folder / info.file).read_bytes())
        content[info.offset] ^= 1
        (folder / info.file).write_bytes(content)


def rewrite(file: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file in place."""
    content = read_json(file)
    change(content)
    write_json(file, content)


def admit(extracted: Path, name: str) -> None:
    """Let extract.json name a file with the hash that it has."""
    file = extracted / name
    entry = {"sha256": hash_file(file), "bytes": file.stat().st_size}
    rewrite(extracted / "extract.json", lambda content: content["files"].update({name: entry}))


def assert_nothing(folder: Path) -> None:
    assert not folder.exists() and not folder.with_name(f"{folder.name}.partial").exists()


@pytest.mark.parametrize("variant", ("preserve", "adapt"))
def test_the_folder_comes_back_byte_for_byte(furnished, tmp_path, variant):  # noqa: F811
    expanded = expand(furnished, Request("0-1", variant=variant), tmp_path / "expanded").path
    (expanded / "NOTES.md").write_text("of its own")
    before = digests(furnished)
    extracted = extract(expanded, tmp_path / "extract").path
    done = apply(extracted, tmp_path / "again", furnished)
    assert digests(tmp_path / "again") == digests(expanded)
    assert digests(furnished) == before
    assert (done.other_files, done.differing, done.base_name) == ((), (), furnished.name)


def test_what_train_and_route_export_wrote_comes_back(tmp_path):
    (tmp_path / "text.txt").write_text("Mara Lind was born in Oslo.")
    expanded = expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), tmp_path / "expanded").path
    settings = TrainingSettings(steps=1, batch_size=1, sequence_length=8)
    trained = train(expanded, [tmp_path / "text.txt"], tmp_path / "trained", settings, run=RunOptions()).path
    routed = route_export(trained, tmp_path / "routed").path
    for folder in (trained, routed):
        extracted = extract(folder, tmp_path / f"{folder.name}-extract").path
        again = apply(extracted, tmp_path / f"{folder.name}-again", SHIPPED_MODEL).path
        assert digests(again) == digests(folder)
        assert "training/log.jsonl" in digests(again)
    assert digests(unroute(again, tmp_path / "unrouted").path) == digests(trained)


@pytest.mark.parametrize("how", ("copy", "link"))
def test_shards_are_taken_over_as_files(pair_of, extracted, tmp_path, how):
    base = pair_of("llama").base_path
    done = apply(extracted, tmp_path / "again", base, base_weights=how)
    shared = (base / "model.safetensors").samefile(done.path / "model-00001-of-00001.safetensors")
    assert shared == (extracted / EXPANSION).samefile(done.path / EXPANSION) == (how == "link")
    assert (done.bytes_written == 0) == (how == "link")


@pytest.mark.parametrize("is_other", (False, True))
def test_an_interrupted_run_continues(extracted, llama_base, tmp_path, is_other):
    if is_other:
        (llama_base / "README.md").write_text("a later card")

    @contextlib.contextmanager
    def interrupted(label: str, total: int):
        yield stop if label == "files" else no_progress

    def stop(advance: int, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(extracted, tmp_path / "again", llama_base, track=interrupted)
    assert not (tmp_path / "again").exists() and (tmp_path / "again.partial").is_dir()
    done, whole = (apply(extracted, tmp_path / name, llama_base) for name in ("again", "whole"))
    assert digests(done.path) == digests(whole.path)
    assert not (tmp_path / "again.partial").exists()


def test_another_base_is_refused_and_its_tensors_are_listed(extracted, other_base, pair_of, tmp_path):
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", other_base)
    assert str(error.value).splitlines() == [
        f"{other_base}: 2 of 51 tensors differ from those of {pair_of('llama').base_path.name}, on which this "
        "expansion was made.",
        "lm_head.weight: its bytes differ.",
        "model.layers.1.mlp.up_proj.weight: its bytes differ.",
        "Give that base; or --force, and no promise but recoverable is made.",
    ]
    assert_nothing(tmp_path / "again")


def test_a_base_that_was_cast_is_refused_in_one_line(extracted, base_of, tmp_path):
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", base_of("llama", "bfloat16"))
    (line,) = str(error.value).splitlines()
    assert ": 51 of 51 tensors differ from those of " in line
    assert line.endswith(
        " The first of 51 differences: lm_head.weight: BF16 [97, 40], expected F32 [97, 40]. Give that base; or "
        "--force, and no promise but recoverable is made."
    )


def test_a_forced_base_is_recorded_and_comes_back(extracted, other_base, pair_of, tmp_path):
    before = digests(other_base)
    done = apply(extracted, tmp_path / "forced", GivenBase(other_base, force=True))
    assert set(done.differing) == {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"}
    expected = {"expected_name": pair_of("llama").base_path.name, "expected_revision": None}
    assert read_manifest(done.path).forced_base == expected | {"differing": list(done.differing)}
    result = verify(done.path)
    assert [promise.name for promise in result.promises if promise.claimed] == ["recoverable"]
    assert result.passed and result.required == ("recoverable",)
    for promise in result.promises[1:]:
        assert promise.evidence.startswith(
            f"put by --force on a base of which 2 tensors are not those of {pair_of('llama').base_path.name}; "
        )
    strip(done.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == before
    # and it can be extracted and applied again, on that base
    again = apply(extract(done.path, tmp_path / "second").path, tmp_path / "again", other_base)
    assert (again.differing, digests(again.path)) == ((), digests(done.path))


def test_blocks_stay_what_they_are_on_a_base_that_was_cast(extracted, base_of, tmp_path):
    """By its dtype alone another base would have blocks of that; what is recorded is what lies in the files."""
    cast = base_of("llama", "bfloat16")
    forced = apply(extracted, tmp_path / "forced", GivenBase(cast, force=True)).path
    stored, manifest = open_checkpoint(forced), read_manifest(forced)
    assert {tensor.dtype for tensor in manifest.plan.tensors} == {"F32"}
    assert all(stored.tensors[tensor.name].dtype == tensor.dtype for tensor in manifest.plan.tensors)
    assert verify(forced).passed
    again = apply(extract(forced, tmp_path / "second").path, tmp_path / "again", cast).path
    assert digests(again) == digests(forced)
    assert digests(strip(forced, tmp_path / "stripped").path) == digests(cast)


def test_blocks_of_several_dtypes_are_refused_on_a_base_that_was_cast(base_of, tmp_path):
    mixed = Path(shutil.copytree(base_of("llama"), tmp_path / "mixed"))
    (shard,) = mixed.glob("*.safetensors")
    write_tensors(shard, {name: own.bfloat16() if "mlp" in name else own for name, own in load_file(shard).items()})
    extract(expand(mixed, Request("1", variant="adapt"), tmp_path / "wide").path, tmp_path / "of-mixed")
    with pytest.raises(CheckpointError, match=r"are of several \(BF16, F32\), .* Cast this one\.$"):
        apply(tmp_path / "of-mixed", tmp_path / "forced", GivenBase(base_of("llama", "bfloat16"), force=True))
    assert_nothing(tmp_path / "forced")


def test_without_force_promises_are_claimed(extracted, pair_of, tmp_path):
    """The negative control of the test above."""
    done = apply(extracted, tmp_path / "again", GivenBase(pair_of("llama").base_path, force=True))
    assert read_manifest(done.path).forced_base is None
    claimed = [promise.name for promise in verify(done.path, probes=Probes(new_tokens=0)).promises if promise.claimed]
    assert claimed == ["recoverable", "output_at_init"]


def test_force_does_not_bend_shapes(extracted, base_of, tmp_path):
    save_tiny(tmp_path / "wide", "llama", intermediate_size=60)
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", GivenBase(tmp_path / "wide", force=True))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path / 'wide'}: does not fit, this expansion was made on {base_of('llama').name}. ")
    assert "model.layers.0.mlp.down_proj.weight: shape [40, 60], expected [40, 52]." in line
    save_tiny(tmp_path / "plain", "llama", mlp_bias=False)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias: no such tensor in this base\."):
        apply(extracted, tmp_path / "again", GivenBase(tmp_path / "plain", force=True))
    with pytest.raises(CheckpointError, match=r"config\.json: model_type is 'gpt2', expected 'llama'\."):
        apply(extracted, tmp_path / "again", GivenBase(base_of("gpt2"), force=True))
    # a size that no shape shows
    save_tiny(tmp_path / "other", "llama", rms_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match=r"config\.json: epsilon is 0\.001, expected 1e-0[56]\."):
        apply(extracted, tmp_path / "again", GivenBase(tmp_path / "other", force=True))
    assert_nothing(tmp_path / "again")


@pytest.mark.parametrize("request_name", mostly(("preserve", "adapt"), "adapt".__eq__))
def test_the_same_tensors_in_other_files(pair_of, tmp_path, request_name):
    """Other shards, another config.json, new files: an expanded model on these, which gives them back."""
    pair = pair_of("llama", request_name)
    model = load(pair.base_path)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    rewrite(tmp_path / "base" / "config.json", lambda config: config.update(pad_token_id=5))
    (tmp_path / "base" / "README.md").write_text("a later card")
    before = digests(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    routed = route_export(pair.path, tmp_path / "routed").path
    done = apply(extract(routed, tmp_path / "extract").path, tmp_path / "again", tmp_path / "base")
    assert done.differing == () and {"README.md", "config.json", "model.safetensors"} <= set(done.other_files)
    assert verify(done.path, probes=Probes(new_tokens=0)).passed
    ids = random_ids(2, 9)
    again = load(done.path)
    assert torch.equal(again(ids).logits, load(routed)(ids).logits)
    assert again.config.pad_token_id == 5
    strip(done.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == before
    plain = unroute(done.path, tmp_path / "unrouted").path
    assert verify(plain, probes=None).passed
    assert torch.equal(load(plain)(ids).logits, load(pair.path)(ids).logits)


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
    found = read_json(done.path / "tokenizer_config.json")
    assert found["tokenizer_class"] == read_json(expansion.path / "tokenizer_config.json")["tokenizer_class"]
    assert found["clean_up_tokenization_spaces"] is True
    assert digests(strip(done.path, tmp_path / "stripped").path) == before


def test_a_base_with_a_file_that_the_expansion_needs(extracted, llama_base, tmp_path):
    for name in ("expanded_model.py", "expanded.index.json"):
        (llama_base / name).write_text("of the base")
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", llama_base)
    assert str(error.value).splitlines() == [
        f"{name}: the base model has a file of this name, which the expansion needs. Take it out of the base, or "
        "rename it."
        for name in ("expanded.index.json", "expanded_model.py")
    ]
    assert_nothing(tmp_path / "again")


def test_the_base_that_it_names_is_found(pair_of, tmp_path):
    """By the real client of the Hub, offline, in its cache."""
    pair, commit = pair_of("llama", "adapt"), "0123456789abcdef0123456789abcdef01234567"
    cache = Path(os.environ["HF_HOME"]) / "hub"
    for name, folder in (("base", pair.base_path), ("extract", tmp_path / "extract")):
        source = Path(shutil.copytree(pair.path, tmp_path / "expanded")) if name == "base" else None
        if source is not None:
            name_base(source, "org/base", commit)
            extract(source, tmp_path / "extract")
        repository = cache / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)
    done = apply("org/extract", tmp_path / "again")
    assert (done.base_name, done.base_revision) == ("org/base", commit)
    assert digests(tmp_path / "again") == digests(tmp_path / "expanded")


def test_a_base_that_is_not_named_or_is_none(extracted, pair_of, tmp_path):
    pair = pair_of("llama", "adapt")
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again")
    assert str(error.value) == (
        f"extract: was made on a folder called {pair.base_path.name}, which cannot be looked up, expected a Hub "
        "repository. Give the base: --base MODEL."
    )
    with pytest.raises(CheckpointError, match=r"is an expanded model, expected a base model\. Take its base out"):
        apply(extracted, tmp_path / "again", pair.path)
    with pytest.raises(CheckpointError, match=r"has no extract\.json, expected a folder made by scale-surgery extract"):
        apply(pair.path, tmp_path / "again", pair.base_path)
    with pytest.raises(CheckpointError, match="not found"):
        apply(tmp_path / "nowhere", tmp_path / "again", pair.base_path)


def test_a_damaged_extract_is_refused(extracted, pair_of, tmp_path):
    base = pair_of("llama").base_path
    flip_file = extracted / EXPANSION
    content = bytearray(flip_file.read_bytes())
    content[-1] ^= 1
    flip_file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"^{EXPANSION}: sha256 .* from extract\.json\. Download the extract again"
    ):
        apply(extracted, tmp_path / "again", base)
    (extracted / "expanded_model.py").rename(tmp_path / "kept.py")
    with pytest.raises(CheckpointError, match=r"^expanded_model\.py: not found in .*\. Download the extract again\.$"):
        apply(extracted, tmp_path / "again", base)
    (tmp_path / "kept.py").rename(extracted / "expanded_model.py")
    whole = (extracted / "extract.json").read_bytes()
    for change, message in (
        (lambda content: content.update(format=9), r"format 9, expected 1\. Use the release that made it"),
        (lambda content: content.update(from_base=7), r"is incomplete \("),
        (lambda content: content["files"]["config.json"].update(bytes="many"), r"is incomplete \("),
    ):
        (extracted / "extract.json").write_bytes(whole)
        rewrite(extracted / "extract.json", change)
        with pytest.raises(CheckpointError, match=message):
            apply(extracted, tmp_path / "again", base)
    assert_nothing(tmp_path / "again")


def test_an_extract_writes_nothing_outside_its_folder(extracted, pair_of, tmp_path):
    for key, value in (("files", {"../outside.txt": {"sha256": "", "bytes": 1}}), ("from_base", ["/tmp/outside.txt"])):
        before = (extracted / "extract.json").read_bytes()
        rewrite(extracted / "extract.json", lambda content, key=key, value=value: content.update({key: value}))
        with pytest.raises(CheckpointError, match=r"outside\.txt' is said to be a file of the model, expected a name"):
            apply(extracted, tmp_path / "out" / "again", pair_of("llama").base_path)
        (extracted / "extract.json").write_bytes(before)
    assert not list(tmp_path.rglob("outside.txt")) and not (tmp_path / "out").exists()


def test_hostile_files_are_refused(extracted, pair_of, tmp_path):
    base = pair_of("llama").base_path
    (extracted / "evil.py").write_text("print('boo')")
    (extracted / "evil.bin").write_bytes(b"pickle")
    with (extracted / "expanded_model.py").open("a") as file:
        file.write("print('boo')\n")
    (extracted / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["org/evil--code.Code", null]}}')
    rewrite(extracted / "config.json", lambda config: config["auto_map"].update(AutoModel="org/evil--code.Code"))

    def mislead(content: dict) -> None:
        content["replaced"]["config.json"] += " "

    rewrite(extracted / "surgery.json", mislead)
    for name in ("evil.py", "evil.bin", "expanded_model.py", "tokenizer_config.json", "config.json", "surgery.json"):
        admit(extracted, name)
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", base)
    assert str(error.value).splitlines() == [
        "surgery.json: its text of the base's config.json is not what it was.",
        "config.json: auto_map is not what the expansion wrote.",
        "evil.py: unknown code file. Read it before you trust it.",
        "expanded_model.py: is not the code that the expansion wrote. Read it before you trust it.",
        "evil.bin: holds weights in another format, expected none in an expansion.",
        "tokenizer_config.json: auto_map names code that the base does not name. Read it before you trust it.",
    ]
    assert_nothing(tmp_path / "again")


def test_code_that_no_release_wrote_is_named(extracted, pair_of, tmp_path):
    base, code = pair_of("llama").base_path, extracted / "expanded_model.py"
    assert apply(extracted, tmp_path / "known", base).foreign_code == ()
    code.write_text("print('boo')\n")
    rewrite(extracted / "surgery.json", lambda content: content["code"].update({code.name: hash_file(code)}))
    for name in (code.name, "surgery.json"):
        admit(extracted, name)
    done = apply(extracted, tmp_path / "again", base)
    assert done.foreign_code == (code.name,)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(render_applied(done))
    assert "no release wrote it, read it before you trust it: expanded_model.py" in " ".join(shown.get().split())


def test_tensors_that_are_no_expansion_are_refused(extracted, pair_of, tmp_path):
    pair = pair_of("llama", "adapt")
    tensors = {}
    checkpoint = open_checkpoint(pair.path)
    for name, info in checkpoint.tensors.items():
        if info.file == EXPANSION:
            tensors[name] = read_tensor(checkpoint, name)
    write_tensors(extracted / EXPANSION, tensors | {"model.norm.weight": torch.zeros(40)})
    admit(extracted, EXPANSION)
    with pytest.raises(CheckpointError) as error:
        apply(extracted, tmp_path / "again", pair.base_path)
    assert str(error.value) == f"model.norm.weight: lies in {EXPANSION}, and is no tensor of the expansion's plan."
    # under the name that loaders prefer to any index
    write_tensors(extracted / "model.safetensors", tensors)
    (extracted / EXPANSION).unlink()
    rewrite(extracted / "extract.json", lambda content: content["files"].pop(EXPANSION))
    admit(extracted, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"do not make the model that its surgery\.json describes"):
        apply(extracted, tmp_path / "again", pair.base_path)
    assert not (tmp_path / "again").exists()


def test_lists_that_contradict_surgery_json_are_refused(extracted, pair_of, tmp_path):
    def contradict(content: dict) -> None:
        content["from_base"].append("config.json")

    rewrite(extracted / "extract.json", contradict)
    with pytest.raises(SurgeryError) as error:
        apply(extracted, tmp_path / "again", pair_of("llama").base_path)
    assert str(error.value).splitlines() == [
        "extract.json: config.json is said to be the base's, which surgery.json does not say.",
    ]


def test_a_file_is_no_extract(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: has no extract\.json, expected a folder made by"):
        apply(tmp_path / "file", tmp_path / "out")
