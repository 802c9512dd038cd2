"""What a report says, against the files that expand wrote, `verify`, and closed forms; and what it refuses."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from scale_surgery import (
    CheckpointError,
    DataError,
    PlanError,
    Probes,
    Request,
    RunOptions,
    expand,
    route_export,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.errors import Problem
from scale_surgery.evidence.report import report
from scale_surgery.evidence.report_records import Norms, Report, TensorChange, add_norms, by_layer
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.show.pages.report import render_page
from scale_surgery.show.tables_report import collaboration, format_norm, format_share, render_report
from tests.conftest import REQUESTS, edited, problems, refused, shake, shown
from tests.each import FEW, mostly
from tests.evidence.test_verify import SHARD
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES, save_tiny

REPORTED = REQUESTS | {
    "grow-freeze": Request("0,2", method="grow", variant="grow-freeze"),
    "grow-train": Request("0,2", method="grow", variant="grow-train", copies=3),
    "depth": Request("0,2", method="depth"),
    "gated": Request("0,2", variant="gated", collaborate="both"),
}
# every family in each method, of which the default run takes a few in one, and other variants and half precision once
COMPARED_FIRST = list(zip(FEW, cycle(("adapt", "grow-train", "depth")), strict=False))
COMPARED = mostly(
    product(FAMILIES, ("adapt", "grow-train", "depth"), ("float32",)), lambda case: case[:2] in COMPARED_FIRST
)
COMPARED += [("llama", "preserve", "float32"), ("llama", "adapt_without_up_stream", "float32")]
COMPARED += [("phi3", "grow-freeze", "float32"), ("phi3", "adapt", "bfloat16"), ("phi3", "gated", "float32")]
COMPARED += mostly([("gpt2", "adapt", "bfloat16")], lambda case: False)
# lines of a log that somebody edited
TEXTS_FOR_NUMBERS = '{"step": "x", "loss": 1.0}\n{"step": 3, "loss": "y"}'
W12 = "model.layers.1.self_attn.q_proj.expansions.default.w12"
W21 = "model.layers.1.self_attn.q_proj.expansions.default.w21"


@pytest.fixture(scope="module")
def made_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """An expansion as it was written, and a copy in which every expansion tensor was changed."""

    @functools.cache
    def make(family: str, request: str, dtype: str = "float32") -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("report")
        written = expand(base_of(family, dtype), REPORTED[request], folder / "written").path
        return written, shake(Path(shutil.copytree(written, folder / "changed")))

    return make


@pytest.fixture(scope="module")
def adapt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A changed adapt model of a tiny llama, W12 in attention and FFN of layer 1."""
    folder = tmp_path_factory.mktemp("adapt")
    base = save_tiny(folder / "base", "llama")
    request = Request("0-1", variant="adapt", collaborate="both", collaborative_layers="1")
    return shake(expand(base, request, folder / "adapt").path)


@pytest.fixture
def spoiled(adapt: Path, tmp_path: Path) -> Path:
    """A private copy of it."""
    return Path(shutil.copytree(adapt, tmp_path / "spoiled"))


def parts_of(summary: Report) -> dict[str, list[TensorChange]]:
    parts: dict[str, list[TensorChange]] = {}
    for tensor in summary.tensors:
        parts.setdefault(tensor.name, []).append(tensor)
    return parts


def read_all(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: read_tensor(checkpoint, name).double() for name in checkpoint.tensors}


# numbers


@pytest.mark.parametrize(("family", "request_name", "dtype"), COMPARED)
def test_changes_are_those_from_the_files_that_expand_wrote(
    made_of, family: str, request_name: str, dtype: str
) -> None:
    written, changed = made_of(family, request_name, dtype)
    before, after = read_all(written), read_all(changed)
    summary = report(changed, files_only=True)
    planned = [tensor.name for tensor in read_manifest(written).plan.tensors]
    assert list(parts_of(summary)) == planned and summary.state == "trained" and summary.notes == ()
    for name, parts in parts_of(summary).items():
        norms = add_norms(part.norms for part in parts)
        assert norms.norm == pytest.approx(float(after[name].norm()), rel=1e-9)
        assert norms.start_norm == pytest.approx(float(before[name].norm()), rel=1e-9)
        assert norms.change == pytest.approx(float((after[name] - before[name]).norm()), rel=1e-9)
        assert all(part.is_trained for part in parts)


def test_shares_of_one_block(made_of) -> None:
    written, changed = made_of("llama", "adapt")
    name = "model.layers.2.mlp.gate_proj.expansions.default.w21"
    (block,) = parts_of(report(changed, files_only=True))[name]
    now, start = read_all(changed)[name], read_all(written)[name]
    base = read_all(changed)["model.layers.2.mlp.gate_proj.weight"]
    assert (block.layer, block.role, block.group, block.block, block.init) == (2, "gate", "ffn", "w21", "svd")
    assert block.norms.relative_norm == pytest.approx(float(now.norm() / base.norm()))
    assert block.norms.relative_change == pytest.approx(float((now - start).norm() / start.norm()))
    assert block.norms.change_of_base == pytest.approx(float((now - start).norm() / base.norm()))


def test_fused_projections_are_taken_apart_by_role(made_of) -> None:
    """By section in phi3, where new rows follow in each section's order; head by head in GPT-NeoX."""
    _, phi3 = made_of("phi3", "adapt")
    tensors = read_all(phi3)
    rows = {
        part.role: part
        for part in parts_of(report(phi3, files_only=True))["model.layers.2.self_attn.qkv_proj.expansions.default.w12"]
    }
    block, start = tensors["model.layers.2.self_attn.qkv_proj.expansions.default.w12"], 0
    for role, count in (("q", 80), ("k", 40), ("v", 40)):
        assert rows[role].norms.norm == pytest.approx(float(block[start : start + count].norm()))
        assert rows[role].shape == (count, block.shape[1])
        start += count
    assert rows["q"].norms.base_norm == pytest.approx(
        float(tensors["model.layers.2.self_attn.qkv_proj.weight"][:80].norm())
    )
    _, neox = made_of("gpt_neox", "adapt")
    name = "gpt_neox.layers.2.attention.query_key_value.expansions.default.w21"
    by_role = {part.role: part for part in parts_of(report(neox, files_only=True))[name]}
    heads = read_all(neox)[name].view(-1, 3, 10, 40)
    for place, role in enumerate(("q", "k", "v")):
        assert by_role[role].norms.norm == pytest.approx(float(heads[:, place].norm()))


def test_what_runs_beside_a_mixture_writes_into_the_base_stream_as_an_mlp_does(tmp_path: Path) -> None:
    base = write_base(twin_config("mixtral"), torch.float32, tmp_path / "base")
    request = Request("last:1", variant="gated", collaborate="both")
    summary = report(shake(expand(base, request, tmp_path / "wide").path), files_only=True)
    assert [name for name, _ in collaboration(summary)] == ["W12 attention", "W12 FFN"]
    beside = [tensor for tensor in summary.tensors if tensor.role == "beside"]
    assert {(tensor.group, tensor.norms.base_norm) for tensor in beside} == {("ffn", None)}
    assert {"w12", "gate"} <= {tensor.block for tensor in beside}
    assert not [tensor for tensor in summary.tensors if tensor.role == "head" and tensor.layer is not None]
    (said,) = [line for line in shown(render_report(summary)).splitlines() if "W12 FFN" in line]
    assert "norm" in said and "of W" not in said
    assert "W12 FFN" in render_page(summary)
    # and of a copied layer
    deep = report(expand(base, Request("1", method="depth"), tmp_path / "deep").path, files_only=True)
    assert {(tensor.role, tensor.group) for tensor in deep.tensors if "expert" in tensor.name} == {("beside", "beside")}
    assert not [tensor for tensor in deep.tensors if tensor.role == "head"]


def test_layers_add_up_their_tensors(adapt: Path) -> None:
    summary = report(adapt, files_only=True)
    tensors = read_all(adapt)
    linears = ("q_proj", "k_proj", "v_proj", "o_proj")
    (layer,) = [change for change in summary.layers if (change.layer, change.group, change.block) == (1, "attn", "w12")]
    whole = torch.cat(
        [tensors[f"model.layers.1.self_attn.{name}.expansions.default.w12"].flatten() for name in linears]
    )
    assert layer.norms.norm == pytest.approx(float(whole.norm()))
    assert {(change.layer, change.group) for change in summary.layers if change.block == "w12"} == {
        (1, "attn"),
        (1, "ffn"),
    }
    assert summary.to_json()["layers"][0].keys() >= {"layer", "group", "block", "norm", "relative_norm"}


def test_norms_add_up_as_squares_and_what_is_unknown_stays_unknown() -> None:
    norms = add_norms([Norms(3.0, 1.0, 0.0, None), Norms(4.0, 0.0, 2.0, 8.0)])
    assert norms == Norms(5.0, 1.0, 2.0, None)
    assert norms.relative_change == 2 and norms.relative_norm is None
    assert Norms(1.0, 0.0, 1.0, 4.0).relative_change is None
    assert by_layer(()) == ()


def test_an_untrained_model_is_reported_as_untrained_with_zeros(made_of) -> None:
    for request in ("preserve", "adapt", "grow-freeze", "depth"):
        written, changed = made_of("llama", request)
        summary = report(written)
        assert summary.state == "initial"
        assert summary.notes[0] == "Nothing was trained: every expansion tensor has the bytes that the expansion wrote."
        assert all(tensor.norms.change == 0 and not tensor.is_trained for tensor in summary.tensors)
        assert summary.streams is not None and summary.streams.is_bit_equal
        assert report(changed, files_only=True).state == "trained"


def test_only_what_changed_counts_as_changed(spoiled: Path, made_of) -> None:
    written, _ = made_of("llama", "preserve")
    path = Path(shutil.copytree(written, spoiled.parent / "one"))
    with edited(path / SHARD) as tensors:
        tensors[W21].view(-1)[0] += 0.5
    changed = [tensor for tensor in report(path, files_only=True).tensors if tensor.is_trained]
    assert [tensor.name for tensor in changed] == [W21]
    assert changed[0].norms.change == pytest.approx(0.5, rel=1e-5)


def test_a_start_with_another_hash_is_named(spoiled: Path) -> None:
    assert report(spoiled, files_only=True).notes == ()
    with edited(spoiled / "surgery.json") as record:
        record["expansions"]["default"]["tensors"][W21] = "0" * 64
    summary = report(spoiled, files_only=True)
    assert summary.notes == (
        f"The start of {W21} was made again and has another sha256 than the one that was written: another machine, "
        "device or release rounds the last bits another way. Changes hold up to that.",
    )


def test_numbers_that_are_none_are_named(spoiled: Path) -> None:
    with edited(spoiled / SHARD) as tensors:
        tensors[W12].view(-1)[0] = math.nan
    summary = report(spoiled, files_only=True)
    assert f"NaN or infinity in {W12}: the model is broken." in summary.notes
    content = json.loads(json.dumps(summary.to_json()), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    (row,) = [row for row in content["tensors"] if row["name"] == W12]
    assert row["norm"] == "NaN"
    assert "nan" in render_page(summary)


# copies


def test_copies_that_move_together_do_not_separate(made_of, tmp_path: Path) -> None:
    """The symmetry trap: originals and copies that train alike change and gain nothing."""
    written, changed = made_of("llama", "grow-train")
    together = Path(shutil.copytree(written, tmp_path / "together"))
    with edited(together / SHARD) as tensors:
        for name in [name for name in tensors if name.endswith(".w11")]:
            noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(3))
            tensors[name] += noise
            tensors[name.replace("w11", "w21")] += torch.cat([noise, noise])
    copies = report(together, files_only=True).find("w21")
    assert len(copies) == 4 and all(copy.separation == pytest.approx(0, abs=1e-6) for copy in copies)
    assert all(copy.norms.relative_change > 1 for copy in copies)
    apart = report(changed, files_only=True).find("w21")
    assert all(copy.separation > 0.1 for copy in apart)
    # from a frozen original it is the relative change
    summary = report(made_of("llama", "grow-freeze")[1], files_only=True)
    assert {tensor.role for tensor in summary.tensors if tensor.separation is not None} == {"gate", "up_proj"}
    assert all(copy.separation == pytest.approx(copy.norms.relative_change) for copy in summary.find("w21"))


def test_copied_layers_start_as_copies_and_write_nothing(made_of) -> None:
    _, changed = made_of("llama", "depth")
    summary = report(changed, files_only=True)
    assert {tensor.layer for tensor in summary.tensors} == {0, 2} and summary.method == "depth"
    starts = {tensor.role: tensor.norms.start_norm for tensor in summary.find("weight")}
    assert starts["o"] == starts["down"] == 0 and all(starts[role] > 0 for role in ("q", "k", "v", "gate", "up_proj"))
    assert "Copied weight, from zeros" in render_page(summary)


# the base stream


@pytest.mark.parametrize(
    "request_name",
    mostly(
        ["preserve", "adapt", "adapt_without_up_stream", "grow-train", "depth"],
        ("preserve", "adapt", "depth").__contains__,
    ),
)
def test_the_base_stream_is_that_of_verify(made_of, request_name: str) -> None:
    """Which loads the base by itself, from its own files."""
    _, changed = made_of("llama", request_name)
    streams, numbers = report(changed).streams, verify(changed, probes=Probes(max_new_tokens=0), record=False).numbers
    assert streams is not None and numbers is not None
    assert streams.tokens == numbers.tokens and streams.source == "random ids, there is no tokenizer"
    assert [layer.layer for layer in streams.layers] == [layer.layer for layer in numbers.layers]
    for layer, theirs in zip(streams.layers, numbers.layers, strict=True):
        assert layer.drift == pytest.approx(theirs.drift, rel=1e-4)
        assert layer.cosine == pytest.approx(theirs.cosine, rel=1e-6) and layer.is_bit_equal == theirs.is_bit_equal
    assert streams.is_bit_equal == (request_name == "preserve") and streams.layers[0].is_bit_equal


def test_of_a_routed_model_the_adapt_path_is_compared(adapt: Path, tmp_path: Path) -> None:
    routed = route_export(adapt, tmp_path / "routed").path
    # a dtype changes nothing: what is compared is what is stored
    plain, summary = report(adapt).streams, report(routed, run=RunOptions(dtype="bfloat16"))
    assert summary.streams is not None and summary.streams.path == "adapt" and plain.path == "expanded"
    assert summary.streams.layers == plain.layers and not plain.is_bit_equal
    assert summary.notes == (
        "Routed: these numbers are of the adapt path, routing disabled; the preserve path always equals the base bit "
        "for bit.",
    )
    numbers = verify(routed, probes=Probes(max_new_tokens=0), record=False).numbers
    assert numbers is not None and all(layer.is_bit_equal for layer in numbers.layers)


@pytest.mark.slow
def test_own_text_is_read_whole_in_windows(tmp_path: Path) -> None:
    request = Request("2-3", variant="adapt", collaborate="both")
    path = shake(expand(SHIPPED_MODEL, request, tmp_path / "wide").path)
    text, asked = tmp_path / "text.txt", tmp_path / "asked.jsonl"
    text.write_text("Once upon a time there was a fox. " * 20)
    asked.write_text('{"question": "Who?", "answer": "The fox."}\n')
    streams = report(path, [text, asked], sequence_length=32).streams
    same = report(path, [text, asked], sequence_length=32, run=RunOptions(batch_size=4)).streams
    whole = report(path, text).streams
    prompts = report(path).streams
    assert streams is not None and same is not None and whole is not None and prompts is not None
    assert streams.tokens == same.tokens > whole.tokens and streams.source == f"{text}, {asked}"
    for layer, batched_layer in zip(streams.layers, same.layers, strict=True):
        assert layer.drift == pytest.approx(batched_layer.drift, rel=1e-4)
        assert layer.cosine == pytest.approx(batched_layer.cosine, rel=1e-6)
    assert prompts.source == "built-in prompts" and prompts.layers != whole.layers
    assert streams.layers[2].is_bit_equal and not streams.layers[3].is_bit_equal


def test_an_expansion_is_reported_in_its_own_tokens(tmp_path: Path) -> None:
    """New tokens are of one expansion; the others read a text as their base does."""
    words = NewTokens((" upon", "Water"))
    first = Request("2", variant="adapt", collaborate="both", name="a")
    one = shake(expand(SHIPPED_MODEL, first, tmp_path / "one").path)
    two = expand(one, Request("3", name="b", new_tokens=words), tmp_path / "two").path
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time. " * 30)
    for texts in ((), (text,)):
        alone, beside, other = report(one, texts), report(two, texts, name="a"), report(two, texts, name="b")
        assert alone.streams is not None and beside.streams is not None and other.streams is not None
        assert (beside.streams.layers, beside.streams.tokens) == (alone.streams.layers, alone.streams.tokens)
        assert other.streams.tokens < alone.streams.tokens, "the control"


def test_each_window_of_a_text_begins_as_a_text(tmp_path: Path) -> None:
    """As in `evaluate`; without the start token models such as Gemma compute something else."""
    from scale_surgery.evidence.report_streams import _text_batches

    path = expand(SHIPPED_MODEL, Request("2"), tmp_path / "wide").path
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 8)
    rows = torch.cat([batch.ids for batch in _text_batches(open_folder(path), [text], 16, RunOptions())[:-1]])
    (whole,) = _text_batches(open_folder(path), [text], 256, RunOptions())
    start = whole.ids[0, 0]
    assert len(rows) > 3 and (rows[:, 0] == start).all()
    read = rows[:, 1:].flatten()
    assert torch.equal(read, whole.ids[0, 1 : 1 + len(read)]), "and nothing of the text is left out"


def test_files_only_runs_no_model(adapt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scale_surgery.evidence import report_streams

    monkeypatch.setattr(report_streams, "loaded_whole", lambda *_: pytest.fail("a model was loaded"))
    assert report(adapt, files_only=True).streams is None
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):
        report(adapt)


# the training run


@pytest.mark.slow
def test_what_the_last_run_logged_and_measured(spoiled: Path) -> None:
    measured = {"old_nats_per_token": 1.5, "new_nats_per_token": 0.5, "forgetting": 0.25, "learning": 2.0, "step": 4}
    runs = [{"steps": 3, "settings": {"rehearse": ["self"]}}, {"steps": 4, "measured": measured}]
    with edited(spoiled / "surgery.json") as record:
        record["expansions"]["default"]["training"] = runs
    (spoiled / "training").mkdir()
    entry = {"step": 2, "loss": 3.0}
    (spoiled / "training" / "log.jsonl").write_text(
        f'{json.dumps(entry)}\n[1]\n{{"epoch": 1}}\n{TEXTS_FOR_NUMBERS}\n{{"step": 4, "lo'
    )
    summary = report(spoiled, files_only=True)
    assert summary.log == (entry,) and summary.measured == measured and len(summary.runs) == 2
    page = render_page(summary)
    assert "Training loss" in page and "+0.2500" in page and "2 runs" in page
    assert "on text that the base wrote itself: its effect is measured, not proved" in page
    text = " ".join(shown(render_report(summary), 100).split())
    assert "training 3 steps, rehearsed on text that the base wrote itself; 4 steps" in text


# refusals


def test_missing_and_damaged_tensors_are_all_named(spoiled: Path) -> None:
    with edited(spoiled / SHARD) as tensors, edited(spoiled / "model.safetensors.index.json") as index:
        del tensors[W21], index["weight_map"][W21]
        tensors[W12] = torch.zeros(3, 2)
    details = Problem("tensor-missing", W21), Problem("tensor-shape", W12, shape=(3, 2), planned=(80, 8))
    expected = Problem("shards-damaged", spoiled, *details)
    assert problems(report, spoiled, error=CheckpointError) == [expected]


def test_spoiled_records_are_refused(spoiled: Path) -> None:
    for change, key, value in (
        ({"training": [{"steps": "many"}]}, "steps", "'many'"),
        ({"training": [{"steps": 1, "measured": {"learning": "x"}}]}, "measured.learning", "'x'"),
    ):
        with edited(spoiled / "surgery.json") as record:
            record["expansions"]["default"].update(change)
        unfit = Problem("value-unfit", f"expansions.default.training[0].{key}", value=value, kind="a number")
        expected = Problem("record-incomplete", spoiled / "surgery.json", unfit)
        assert problems(report, spoiled, error=CheckpointError) == [expected]


def test_texts_that_nobody_reads_and_texts_that_are_not_there(adapt: Path, tmp_path: Path) -> None:
    with refused("text-unread", "--text", PlanError):
        report(adapt, tmp_path / "text.txt", files_only=True)
    with refused("length-without-text", "--sequence-length", PlanError):
        report(adapt, sequence_length=64)
    with pytest.raises(DataError, match=r"missing\.txt: there is no such file\. Give UTF-8 text"):
        report(adapt, tmp_path / "missing.txt")
    (tmp_path / "text.txt").write_text("A text.")
    with pytest.raises(DataError, match="has no tokenizer that loads"):
        report(adapt, tmp_path / "text.txt")


def test_numbers_as_text() -> None:
    shown = [format_norm(value) for value in (None, 0.0, 0.012345, 1.0, 123.4, 4321.0)]
    assert shown == ["–", "0", "0.0123", "1.00", "123", "4321"]
    assert [format_share(value) for value in (None, 0.0, 0.1234, 12.5)] == ["–", "0", "12.3%", "1250%"]
