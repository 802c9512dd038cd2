"""Merge: joined matrices compute what the blocks compute but for rounding, and come apart bit for bit."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    EvaluationSettings,
    PlanError,
    PosteriorRouter,
    Probes,
    Request,
    RunOptions,
    TrainingSettings,
    evaluate,
    expand,
    inspect,
    merge,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.errors import Problem
from scale_surgery.evidence.promises import Promise
from scale_surgery.folder.check import check_integrity
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.joining import join_pieces, joined_tensors, take_piece
from scale_surgery.folder.record import read_manifest
from scale_surgery.running.drift import TOLERANCES, measure_drift
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.fused import check_fusible
from scale_surgery.surgery.merge import MergedPart
from tests.command import run
from tests.conftest import REQUESTS, digests, edited, load, problems, refusal, refused, shake
from tests.each import each_shape, mostly, woven
from tests.routed import between
from tests.tiny import FAMILIES, save_tiny


def change(file: Path, name: str, index: tuple[int, ...]) -> None:
    """Change one element of one tensor of a shard."""
    with edited(file) as tensors:
        tensors[name][index] += 1


@pytest.fixture(scope="module")
def expanded_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Expand a tiny base and shake its blocks, once; each test gets a copy that it may change."""

    @functools.cache
    def made(family: str, request: str, dtype: str, tied: bool) -> Path:
        folder = tmp_path_factory.mktemp("expanded") / f"{family}-{request}"
        return shake(expand(base_of(family, dtype, tied), REQUESTS[request], folder).path)

    def make(family: str, request: str = "adapt", dtype: str = "float32", *, tied: bool = False) -> Path:
        folder = made(family, request, dtype, tied)
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy") / folder.name))

    return make


@pytest.fixture(scope="module")
def expanded(expanded_of: Callable[..., Path]) -> Path:
    return expanded_of("qwen3", tied=True)


@pytest.fixture(scope="module")
def fused(expanded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(expanded, tmp_path_factory.mktemp("fused") / "fused").path


@each_shape
def test_fused_computes_what_the_blocks_compute_and_comes_apart_byte_for_byte(
    expanded_of: Callable[..., Path], base_of: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    # a tied base is sharded, so that linears and their blocks lie in many files
    tied = family in ("gpt2", "gemma2")
    expanded = expanded_of(family, tied=tied)
    done = merge(expanded, tmp_path / "fused")
    assert done.form == "fused" and done.drift is not None and 0 < done.drift.share < 1e-5
    assert done.drift.generation_agreement == 1
    plan = read_manifest(expanded).plan
    linears = [spec for layer in plan.layers for spec in plan.expanded_linears(layer).values()]
    blocks = [name for name in open_checkpoint(done.path).tensors if name.endswith((".w12", ".w21", ".w22"))]
    assert linears and {spec["kind"] for spec in linears} == {"linear"} and not blocks
    merge(done.path, tmp_path / "blocks", "blocks")
    assert digests(tmp_path / "blocks") == digests(expanded)
    strip(done.path, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(base_of(family, "float32", tied))


@pytest.mark.parametrize(
    ("family", "request_name"),
    mostly(
        [(family, request) for family in ("phi3", "gpt2") for request in ("preserve", "adapt_without_up_stream")],
        [("phi3", "preserve")].__contains__,
    ),
)
def test_half_precision_and_other_requests(
    expanded_of: Callable[..., Path], tmp_path: Path, family: str, request_name: str
) -> None:
    expanded = expanded_of(family, request_name, "bfloat16")
    done = merge(expanded, tmp_path / "fused")
    assert done.drift is not None and done.drift.dtype == "bfloat16" and 0 < done.drift.share < 0.05
    assert open_checkpoint(done.path).dtype == "BF16"
    merge(done.path, tmp_path / "blocks", "blocks")
    assert digests(tmp_path / "blocks") == digests(expanded)


@pytest.mark.parametrize(("family", "strict"), woven(("gpt2", "phi3"), (False, True), among=FAMILIES))
def test_the_paper_s_router_is_fused_with_both_paths(
    expanded_of: Callable[..., Path], tmp_path: Path, family: str, strict: bool
) -> None:
    """Decisions, and what each side gives, are those of the blocks; a wrong side is noticed."""
    routed = halfway(expanded_of(family), tmp_path, strict=strict)
    done = merge(routed, tmp_path / "fused")
    assert done.drift is not None and done.drift.share < 1e-5 and done.drift.generation_agreement == 1
    blocks, fused = load(routed), load(done.path)
    with torch.no_grad():
        wanted, logits = (model(IDS).logits for model in (blocks, fused))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        for threshold in (-1.0, 1.0):
            with fused.use_threshold(threshold):
                assert (fused(IDS).logits - wanted).abs().max() > 0.01
    merge(done.path, tmp_path / "blocks", "blocks")
    assert digests(tmp_path / "blocks") == digests(routed)
    result = verify(done.path, record=False)
    assert result.passed
    name = next(name for name in open_checkpoint(done.path).tensors if name.endswith(".gram"))
    change(done.path / open_checkpoint(done.path).tensors[name].file, name, (0, 0))
    assert any(problem.startswith(f"{name}: sha256") for problem in verify(done.path, record=False).problems)


@pytest.mark.parametrize("model_type", mostly(("llama", "phi"), "phi".__eq__))
def test_what_decides_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Of the head's rows, a few at a time; phi's head has a bias."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, vocab_size=131))
    head = base.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    columns = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
    expanded = expand(tmp_path / "base", Request("1", variant="adapt"), tmp_path / "wide").path
    routed = route_export(expanded, tmp_path / "routed", CosineRouter()).path
    monkeypatch.setattr("scale_surgery.surgery.fused.ROWS_AT_ONCE", 50)
    model = load(merge(routed, tmp_path / "fused").path, dtype=torch.bfloat16)
    (gram,) = (parameter for name, parameter in model.named_parameters() if name.endswith(".gram"))
    whole = torch.cat([part.float() for part in columns], dim=1)
    assert gram.dtype == torch.float32 and len(gram) == whole.shape[1]
    torch.testing.assert_close(gram, whole.t() @ whole, rtol=1e-5, atol=1e-5)
    # a model that is cast as a whole runs on
    with torch.no_grad():
        assert model.to(torch.float16)(IDS).logits.isfinite().all()


IDS = torch.arange(3, 63).view(3, 20)


def halfway(expanded: Path, folder: Path, *, strict: bool) -> Path:
    """The model with a cosine router whose threshold parts the tokens in the widest gap between their cosines."""
    probe = load(route_export(expanded, folder / "probe", CosineRouter(strict=strict)).path)
    with torch.no_grad():
        threshold = between(probe.score_tokens(IDS).observed)
    return route_export(expanded, folder / "routed", CosineRouter(threshold=threshold, strict=strict)).path


def test_a_router_with_a_state_cannot_be_fused(expanded_of: Callable[..., Path], tmp_path: Path) -> None:
    routed = route_export(expanded_of("llama"), tmp_path / "routed", PosteriorRouter()).path
    assert problems(merge, routed, tmp_path / "fused", error=PlanError) == [
        Problem("fused-router", "--to fused", router="posterior")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["routed"]


def test_what_a_fused_model_cannot_show_is_not_said_to_hold(
    expanded_of: Callable[..., Path], base_of: Callable[..., Path], tmp_path: Path
) -> None:
    """No path of it can be run alone, so nothing is known of its paths and of what its mixture loses."""
    asked = ("paths_as_alone", "bounded_forgetting")
    routed = halfway(expanded_of("gpt2"), tmp_path, strict=True)
    fused = merge(routed, tmp_path / "fused").path
    verification = verify(fused, base_of("gpt2"), required=asked, record=False)
    assert verification.numbers is not None and not verification.passed
    assert not any(promise.holds for promise in verification.promises if promise.name in asked)
    assert verify(routed, base_of("gpt2"), required=asked[:1], record=False).passed, "the control"


def test_a_fused_model_is_held_against_its_base(base_of: Callable[..., Path], tmp_path: Path) -> None:
    """Untrained, its logits are the base's but for rounding; another number in its config shows."""
    base = base_of("llama")
    fused = merge(expand(base, Request("1", variant="adapt"), tmp_path / "expanded").path, tmp_path / "fused").path

    def near() -> Promise:
        result = verify(fused, base, run=RunOptions(trust_remote_code=True), record=False)
        (found,) = (promise for promise in result.promises if promise.name == "near_output_at_init")
        return found

    assert near().claimed and near().holds
    with edited(fused / "config.json") as config:
        config["rms_norm_eps"] = 0.5
    assert not near().holds and any("drift" in problem for problem in near().problems)


def test_joining_copies_every_bit_and_leaves_the_rest_zero(expanded_of: Callable[..., Path]) -> None:
    path = expanded_of("phi3")
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    tensors = {name: tensor for file in checkpoint.shards for name, tensor in load_file(path / file).items()}
    tensors["model.layers.0.mlp.gate_up_proj.expansions.default.w21"][0, 0] = float("nan")
    for item in joined_tensors(manifest):
        whole = join_pieces(item, tensors.__getitem__)
        assert whole.shape == item.shape and whole.is_contiguous()
        for block, name in item.pieces.items():
            bits = [part.view(torch.int32) for part in (take_piece(item, block, whole), tensors[name])]
            assert torch.equal(*bits), name
        pieces = sum(tensors[name].count_nonzero() for name in item.pieces.values())
        assert whole.count_nonzero() == pieces


def test_the_folder_runs_its_own_code(fused: Path, expanded: Path) -> None:
    # a dtype changes nothing: what is compared is what is stored
    drift = measure_drift(expanded, fused, run=RunOptions(trust_remote_code=True, dtype="bfloat16"))
    assert drift.share < 1e-5 and drift.dtype == "float32"


def test_nothing_of_a_fused_model_trains(fused: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load(fused).parameters())
    (expansion,) = inspect(fused).expanded.expansions.values()  # type: ignore[union-attr]
    assert expansion.is_fused and "w12" not in expansion.parameters_by_block


def test_a_fused_model_that_cannot_be_opened_is_not_begun_to_be_stripped(fused: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(fused, tmp_path / "fused"))
    (damaged / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        strip(damaged, tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["fused"]


def test_a_fused_model_is_saved_and_loaded_by_transformers(fused: Path, tmp_path: Path) -> None:
    model, ids = load(fused), torch.arange(3, 20)[None]
    model.save_pretrained(tmp_path / "saved")
    copy = load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, copy(ids).logits)


# a head that is tied to the embedding

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied_base(folder: Path, family: str, *, has_copy: bool = False) -> Path:
    """A base whose head is tied to the embedding; its file may hold a copy of it."""
    base = save_tiny(folder, family, tie_word_embeddings=True)
    if has_copy:
        with edited(base / "model.safetensors") as tensors:
            tensors[HEAD] = tensors[EMBEDDING].clone()
    return base


@pytest.mark.parametrize(
    ("family", "request_name", "has_copy", "reasons"),
    mostly(
        [
            # layer 1 alone, below which there is no up stream
            ("qwen3", "middle", False, {"zeros"}),
            ("qwen3", "adapt", False, {"zeros"}),
            ("qwen3", "middle", True, {"zeros", "copy"}),
            ("gemma3_text", "routed", False, {"zeros", "router"}),
            # after the last norm it expects the width that entered the layers
            ("gpt2", "adapt", False, {"zeros", "head"}),
        ],
        lambda case: case[3] != {"zeros"},
    ),
)
def test_a_tied_head_is_written_once_and_differences_are_counted(
    tmp_path: Path, family: str, request_name: str, has_copy: bool, reasons: set[str]
) -> None:
    base = tied_base(tmp_path / "base", family, has_copy=has_copy)
    request = REQUESTS["adapt"] if request_name == "adapt" else Request("1", variant="adapt", init_w22="random")
    expanded = shake(expand(base, request, tmp_path / "expanded").path)
    if request_name == "routed":
        expanded = route_export(expanded, tmp_path / "routed", CosineRouter(threshold=0.5)).path
    done = merge(expanded, tmp_path / "fused")
    assert done.drift is not None and done.drift.share < 1e-5
    assert set(done.differences) == reasons
    assert sum(done.differences.values()) == done.parameters - done.parameters_before
    tensors = open_checkpoint(done.path).tensors
    embedding = tensors[read_manifest(expanded).plan.embedding]
    rows = [info.name for info in tensors.values() if info.shape[0] == embedding.shape[0]]
    assert len(rows) == 1 + ("head" in reasons)
    apart = merge(done.path, tmp_path / "blocks", "blocks")
    assert digests(apart.path) == digests(expanded)
    assert apart.differences == {reason: -count for reason, count in done.differences.items()}
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    assert verify(done.path, record=False).passed
    # the controls: each part of the matrix is compared
    shard = done.path / embedding.file
    content = shard.read_bytes()
    change(shard, embedding.name, (5, 0))
    assert [name for name in (embedding.name, HEAD) if f"{name}: sha256" in str(verify(done.path, record=False))] == [
        embedding.name,
        *[HEAD] * has_copy,
    ]
    shard.write_bytes(content)
    change(shard, embedding.name, (5, -1))
    (problem,) = problems(merge, done.path, tmp_path / "refused", "blocks")
    assert problem.code == "fused-shard-changed" and problem.where.startswith("expansion-default-")


def test_the_command_says_why_parameters_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expanded = expand(tied_base(tmp_path / "base", "gpt2"), REQUESTS["adapt"], tmp_path / "expanded").path
    output = " ".join(run("merge", expanded, "-o", "fused").output.split())
    assert re.search(r"of them \+[\d,]+ zeros .* of them \+[\d,]+ parameters of the head, a separate matrix", output)
    output = " ".join(run("merge", "fused", "-o", "again", "--to", "blocks").output.split())
    assert re.search(r"of them -[\d,]+ parameters of the head, a separate matrix", output)


# what notices a fault


def test_a_changed_element_is_noticed(fused: Path, expanded: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(fused, tmp_path / "broken"))
    name = "model.layers.0.self_attn.q_proj.weight"
    shard = open_checkpoint(broken).tensors[name].file
    change(broken / shard, name, (0, 0))
    drift = measure_drift(expanded, broken)
    assert not drift.holds and drift.drift > 1e-3
    (problem,) = problems(merge, broken, tmp_path / "blocks", "blocks", error=CheckpointError)
    assert problem.code == "folder-damaged" and [detail.where for detail in problem.details] == [name]
    assert not (tmp_path / "blocks").exists()
    (problem,) = problems(strip, broken, tmp_path / "base", error=CheckpointError)
    assert problem.code == "base-not-given-back"
    result = verify(broken, record=False)
    assert not result.passed and result.promises[0].problems[0].startswith(f"{name}: sha256")


def test_a_tensor_of_a_fused_model_is_read_once_for_each_use_of_it(
    fused: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def count(checkpoint: Any, name: str) -> torch.Tensor:
        read.append(name)
        return read_tensor(checkpoint, name)

    monkeypatch.setattr("scale_surgery.folder.parts.read_tensor", count)
    folder = open_folder(fused)
    assert not check_integrity(folder).problems
    joined = {item.name for item in joined_tensors(folder.manifest)}
    # for the shard of the base that it was in, and if it is joined, for its blocks
    assert joined <= set(read) and all(count <= 1 + (name in joined) for name, count in Counter(read).items())


def test_a_changed_block_is_named(fused: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(fused, tmp_path / "broken"))
    name = "model.layers.0.self_attn.q_proj.weight"
    change(broken / open_checkpoint(broken).tensors[name].file, name, (-1, 0))
    # the base is as it was, and what is no base tensor may have been trained: only the blocks do not come back
    assert verify(broken, record=False).passed
    with refused("fused-shard-changed", "expansion-default-00001-of-00001.safetensors", CheckpointError):
        merge(broken, tmp_path / "blocks", "blocks")
    # another run would be of another file, so no part of this one is kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_merge_whose_logits_drift_is_not_written(expanded: Path, tmp_path: Path) -> None:
    # the folder's own code computes something else than the code that the merged folder gets
    copy = Path(shutil.copytree(expanded, tmp_path / "other"))
    code = copy / "expanded_blocks.py"
    text = code.read_text()
    assert "            y_up = product(base, w21, y)\n" in text
    code.write_text(text.replace("y_up = product(base, w21, y)\n", "y_up = 2 * product(base, w21, y)\n"))
    (problem,) = problems(merge, copy, tmp_path / "fused", run=RunOptions(trust_remote_code=True))
    assert (problem.code, problem.where) == ("merge-drift", f"{tmp_path / 'fused'}")
    assert problem.values["share"] > problem.values["tolerance"] == TOLERANCES["float32"]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["other"]


def test_verify_compares_a_fused_model_with_its_base(fused: Path, base_of: Callable[..., Path]) -> None:
    alone = verify(fused, record=False)
    assert alone.passed and alone.required == ("recoverable",)
    assert alone.not_run == "a fused model holds no base shards to compare with; --base compares its logits"
    against = verify(fused, base_of("qwen3", "float32", True), record=False)
    assert against.passed and against.numbers is not None and against.numbers.drift > 0.01
    mismatch = verify(fused, base_of("qwen3", "bfloat16", True), record=False)
    assert not mismatch.passed and any("BF16" in problem for problem in mismatch.promises[0].problems)


@pytest.mark.slow
def test_a_fused_model_is_evaluated_beside_its_base(tmp_path: Path) -> None:
    expanded = expand(SHIPPED_MODEL, Request("2-3"), tmp_path / "expanded").path
    done = merge(expanded, tmp_path / "fused")
    (tmp_path / "old.txt").write_text("Paula was born in Lisbon. She is a baker.")
    limited = EvaluationSettings(max_forgetting=0.01)
    result = evaluate([done.path, SHIPPED_MODEL], [tmp_path / "old.txt"], settings=limited)
    of_base, of_fused = result.scores
    assert (of_base.kind, of_fused.kind) == ("base", "other") and not result.notes
    assert of_fused.base == of_base.name and of_fused.forgetting == pytest.approx(0, abs=1e-6)
    assert result.limit is not None and result.limit.holds
    trained = merge(shake(Path(shutil.copytree(expanded, tmp_path / "trained"))), tmp_path / "changed").path
    spoiled = evaluate([trained, expanded], [tmp_path / "old.txt"], settings=limited)
    by_name = {score.name: score for score in spoiled.scores}
    assert by_name["changed"].base == by_name["expanded"].base == of_base.name
    assert by_name["changed"].forgetting != 0 == by_name["expanded"].forgetting
    assert evaluate(done.path, [tmp_path / "old.txt"]).notes == (
        "fused: is fused and holds no base that could be measured with it. What it forgot and learned shows beside its "
        "base: give that as one more model.",
    )


# interruptions and bad input


def test_bad_input_is_refused(expanded: Path, fused: Path, base_of: Callable[..., Path], tmp_path: Path) -> None:
    base, out = base_of("qwen3", "float32", True), tmp_path / "out"
    (prompts := tmp_path / "old" / "prompts.txt").parent.mkdir()
    prompts.write_text("a")
    with refused("form-expanded-not-fused", expanded):
        merge(expanded, out, "blocks")
    with refused("output-exists", fused):
        merge(expanded, fused)
    with pytest.raises(CheckpointError) as inside:
        merge(expanded, expanded / "inside")
    assert {problem.code for problem in inside.value.problems} == {"output-touches-input"}
    with refused("output-touches-input", prompts.parent):
        merge(expanded, prompts.parent, probes=Probes(prompts_file=prompts), overwrite=True)
    for call in (
        lambda: merge(fused, out),
        lambda: train(fused, [base / "config.json"], out, TrainingSettings(steps=1)),
        lambda: route_export(fused, out),
    ):
        with refused("form-fused-not-expanded", fused):
            call()
    assert not out.exists()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.complex64], ids=["scales of MX", "complex"])
def test_tensors_of_rare_dtypes_are_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"model.layers.0.extra": torch.ones(3).to(dtype)}, base / "model.safetensors", {"format": "pt"})
    wide = shake(expand(base, Request("1-2", variant="adapt"), tmp_path / "wide").path)
    fused = merge(wide, tmp_path / "fused", probes=Probes(max_new_tokens=0)).path
    strip(fused, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(base)


def test_biases_of_another_dtype_than_their_weights(tmp_path: Path) -> None:
    """New biases are stored as those that they are joined with."""
    base = save_tiny(tmp_path / "base", "qwen2", dtype=torch.bfloat16)
    weights = load_file(base / "model.safetensors")
    wider = {name: tensor.float() for name, tensor in weights.items() if name.endswith(".bias")}
    assert wider
    save_file(weights | wider, base / "model.safetensors", {"format": "pt"})
    wide = shake(expand(base, Request("1-2", variant="adapt"), tmp_path / "wide").path)
    fused = merge(wide, tmp_path / "fused", probes=Probes(max_new_tokens=0)).path
    merge(fused, tmp_path / "blocks", "blocks")
    assert {name: digest for name, digest in digests(tmp_path / "blocks").items() if name.endswith(".safetensors")} == {
        name: digest for name, digest in digests(wide).items() if name.endswith(".safetensors")
    }
    strip(fused, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(base)


def test_blocks_in_another_dtype_are_not_cast(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = base_of("llama", "bfloat16")
    path = expand(base, Request("1", dtype="float32", up_width=0, variant="adapt"), tmp_path / "expanded").path
    found = problems(check_fusible, open_folder(path), error=PlanError)
    name = "model.layers.1.self_attn.q_proj.expansions.default.w21"
    assert found[0] == Problem("block-other-dtype", name, dtype="F32", base="BF16")
    assert problems(merge, path, tmp_path / "fused", error=PlanError) == found


INSIDE = "is said to be a file of the model, expected a name inside the folder."
HEADER = '{"no.such":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
HOSTILE: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda made: made["shards"].update({"../out.safetensors": {"header": "{}", "sha256": ""}}), INSIDE),
    (lambda made: made["texts"].update({"/x.json": "{}"}), INSIDE),
    (
        lambda made: next(iter(made["shards"].values())).update(header=HEADER),
        "surgery.json: its header of expansion-default-00001-of-00001.safetensors does not fit the tensors",
    ),
]


@pytest.mark.parametrize(("change_record", "reason"), HOSTILE)
def test_a_hostile_record_writes_nothing(
    fused: Path, tmp_path: Path, change_record: Callable[[dict[str, Any]], None], reason: str
) -> None:
    broken = Path(shutil.copytree(fused, tmp_path / "broken"))
    with edited(broken / "surgery.json") as content:
        change_record(content["fused"])
    assert reason in refusal(merge, broken, tmp_path / "blocks", "blocks", error=CheckpointError)


def test_a_plan_that_claims_a_base_tensor_is_refused(expanded: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(expanded, tmp_path / "broken"))
    with edited(broken / "surgery.json") as content:
        name = next(iter(content["expansions"]["default"]["tensors"]))
        content["base_tensors"][name] = content["base_tensors"]["model.norm.weight"]
    wanted = Problem("record-tensor-both", broken / "surgery.json", tensor=name)
    assert problems(verify, broken, error=CheckpointError) == [wanted]


def damaged_piece(path: Path, out: Path, to: Any) -> str:
    """The first of the tensors for which a merge is refused, in words."""
    (problem,) = problems(merge, path, out, to)
    assert (problem.code, problem.where) == ("blocks-damaged", f"{path}")
    return problem.details[0].phrase


@pytest.mark.parametrize("to", ["fused", "stock"])
def test_a_missing_or_misshapen_block_is_named_before_anything_is_written(
    expanded_of: Callable[..., Path], tmp_path: Path, to: Any
) -> None:
    path = expanded_of("llama", "adapt_without_up_stream")
    (shard,) = path.glob("expansion-*.safetensors")
    name = "model.layers.1.mlp.gate_proj.expansions.default.w21"
    with edited(shard) as tensors:
        shape = tuple(tensors[name].shape)
        tensors[name] = tensors[name][1:].contiguous()
    assert f"{name}: shape {(shape[0] - 1, shape[1])}, expected {shape}" in damaged_piece(path, tmp_path / "out", to)
    with edited(shard) as tensors, edited(path / "model.safetensors.index.json") as index:
        del index["weight_map"][name], tensors[name]
    assert f"{name}: is missing" in damaged_piece(path, tmp_path / "out", to)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("part", "value"), [("shards", {}), ("drift", {}), ("texts", None), ("made", None)])
def test_a_spoiled_record_is_one_line(fused: Path, tmp_path: Path, part: str, value: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(fused / "surgery.json", tmp_path)
    with edited(tmp_path / "surgery.json") as content:
        content["fused"][part] = value
    with refused("record-incomplete", tmp_path / "surgery.json", CheckpointError):
        read_manifest(tmp_path)


def test_a_base_shard_that_was_changed_is_not_merged(expanded: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(expanded, tmp_path / "broken"))
    name = "model.norm.weight"
    shard = open_checkpoint(broken).tensors[name].file
    change(broken / shard, name, (0,))
    (problem,) = problems(merge, broken, tmp_path / "fused", error=CheckpointError)
    assert (problem.code, problem.where) == ("folder-damaged", f"{broken}")
    tensor, file = problem.details
    assert (tensor.code, tensor.where) == ("tensor-changed", name)
    assert file == Problem("base-file-changed", shard, file=shard)


def test_a_stock_export_is_a_base_like_any_other(base_of: Callable[..., Path], tmp_path: Path) -> None:
    request = Request("all", variant="adapt", up_width=0, up_kv_heads=0)
    stock = merge(expand(base_of("llama"), request, tmp_path / "grown").path, tmp_path / "stock", "stock").path
    assert refusal(verify, stock, error=CheckpointError) == (
        f"{stock}: is a plain checkpoint that scale-surgery merge --to stock made, it has no blocks, expected one that "
        "has. Give the expanded model that it was made from."
    )
    expanded = expand(stock, request, tmp_path / "again").path
    assert verify(expanded, probes=Probes(max_new_tokens=0)).passed
    assert digests(strip(expanded, tmp_path / "stripped").path) == digests(stock)
    twice = merge(expanded, tmp_path / "twice", "stock").path
    assert json.loads((twice / "merge.json").read_text())["base_name"] == "stock"


def test_states_of_an_unfinished_run_are_named_and_left_out(expanded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(expanded, tmp_path / "trained"))
    for name in ("training/checkpoint-2/optimizer.pt", "training/checkpoint-2/complete.json", "training/log.jsonl"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    for done in (merge(path, tmp_path / "fused"), route_export(path, tmp_path / "routed")):
        assert set(done.left_out) == {"training/checkpoint-2/optimizer.pt", "training/checkpoint-2/complete.json"}
        training = done.path / "training"
        assert (training / "log.jsonl").exists() and not (training / "checkpoint-2").exists()


def test_what_a_merge_of_one_of_several_leaves_out_is_named(expanded: Path, tmp_path: Path) -> None:
    taken = extract(expanded, tmp_path / "extract").path
    both = compose(strip(expanded, tmp_path / "base").path, {"law": taken, "art": taken}, tmp_path / "both").path
    (both / "training").mkdir()
    for name in ("training/log.jsonl", "pytorch_model.bin"):
        (both / name).write_text("{}")
    done = merge(both, tmp_path / "fused", part=MergedPart("law"))
    assert set(done.left_out) == {"training/log.jsonl", "pytorch_model.bin"}
    assert not any((done.path / name).exists() for name in done.left_out)


def test_a_stock_form_leaves_out_what_the_base_did_not_have(base_of: Callable[..., Path], tmp_path: Path) -> None:
    """A base's README.md that lies under another name comes along, and a card in its place does not."""
    base = Path(shutil.copytree(base_of("llama"), tmp_path / "base"))
    (base / "README.md").write_text("the base's")
    wide = expand(base, Request("all", variant="adapt", up_width=0), tmp_path / "wide").path
    (wide / "README.md").rename(wide / "README.base.md")
    with edited(wide / "surgery.json") as record:
        record["base_files"]["README.md"]["stored_as"] = "README.base.md"
    for name in ("README.md", "chat_template.jinja"):
        (wide / name).write_text("mine")
    for name, part in (("stock", MergedPart()), ("none", MergedPart(strength=0))):
        done = merge(wide, tmp_path / name, "stock", part=part)
        assert set(done.left_out) == {"README.md", "chat_template.jinja"}
        assert (done.path / "README.md").read_text() == "the base's"


@pytest.mark.parametrize("is_elsewhere", (False, True))
def test_shards_in_a_folder_of_their_own(base_of: Callable[..., Path], tmp_path: Path, is_elsewhere: bool) -> None:
    """Also on another disk, which a link to a folder leads to."""
    base = Path(shutil.copytree(base_of("llama", tied=True), tmp_path / "base"))
    if is_elsewhere:
        (tmp_path / "disk").mkdir()
        (base / "weights").symlink_to(tmp_path / "disk")
    else:
        (base / "weights").mkdir()
    for shard in base.glob("*.safetensors"):
        shard.rename(base / "weights" / shard.name)
    with edited(base / "model.safetensors.index.json") as index:
        index["weight_map"] = {name: f"weights/{shard}" for name, shard in index["weight_map"].items()}
    expanded = expand(base, REQUESTS["adapt"], tmp_path / "expanded").path
    assert verify(expanded, probes=None, record=False).passed
    fused = merge(expanded, tmp_path / "fused").path
    assert open_checkpoint(base).left_out == ()
    whole = shutil.copytree(base, tmp_path / "whole")  # with files for links
    assert digests(strip(fused, tmp_path / "again").path) == digests(whole)
    assert digests(merge(fused, tmp_path / "blocks", "blocks").path) == digests(expanded)


BLOCKS_SPOILED: dict[str, tuple[str, Callable[[str], str], str]] = {
    "surgery.json": ("surgery.json", lambda text: text.replace('"base_files"', '"base_filez"'), "is incomplete ("),
    "index": (
        "model.safetensors.index.json",
        lambda text: text.replace("mlp.down_proj.expansions.default.w12", "mlp.down_proj.expansions.default.w13"),
        "mlp.down_proj.expansions.default.w13",
    ),
    "config": (
        "config.json",
        lambda text: text.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'),
        "rms_norm_eps is not",
    ),
}


@pytest.mark.parametrize("name", BLOCKS_SPOILED)
def test_texts_that_make_no_whole_model_are_not_written(fused: Path, tmp_path: Path, name: str) -> None:
    """Texts that surgery.json keeps of the blocks are compared with nothing until they are written."""
    broken = Path(shutil.copytree(fused, tmp_path / "broken"))
    file, change_text, reason = BLOCKS_SPOILED[name]
    with edited(broken / "surgery.json") as content:
        texts = content["fused"]["texts"]
        before, texts[file] = texts[file], change_text(texts[file])
        assert texts[file] != before
    (problem,) = problems(merge, broken, tmp_path / "blocks", "blocks")
    assert (problem.code, problem.where) == ("blocks-not-restored", f"{broken}")
    assert any(reason in detail.phrase for detail in problem.details)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_the_command_prints_the_drift(expanded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(run("merge", expanded, "-o", tmp_path / "fused", "--json").output)
    assert content["form"] == "fused"
    assert content["drift"]["drift"] == read_manifest(tmp_path / "fused").fused["drift"]["drift"]  # type: ignore[index]
    monkeypatch.chdir(tmp_path)  # a long path stays whole
    output = run("merge", expanded, "-o", "again").output
    *lines, last = output.splitlines()
    assert "passes for rounding" in output and max(map(len, lines)) <= 80
    assert " ".join(last.split()) == "next scale-surgery verify again"
    refused = run("merge", expanded, "-o", tmp_path / "again", "--to", "blocks", code=1).output
    assert "is an expanded model, expected a fused one" in " ".join(refused.split())
