"""Strength: a dial between the base and what was learned, in memory and in a merged folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    MergedPart,
    PlanError,
    PosteriorRouter,
    Request,
    TrainingSettings,
    adopt,
    expand,
    inspect,
    merge,
    route_export,
    set_strength,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.errors import Problem
from scale_surgery.evidence.report import report
from scale_surgery.folder.record import read_manifest
from scale_surgery.modeling.expanded_releases import find_cache
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.running.strength import at_strength, scaled
from scale_surgery.surgery.strength import writing_tensors
from tests.command import run
from tests.conftest import DEEPENED, REQUESTS, digests, edited, load, problems, refused, shake
from tests.each import DTYPES, mostly
from tests.tiny import FAMILIES

IDS = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
HALF, NONE = MergedPart(strength=0.5), MergedPart(strength=0)
GATED = Request("0,2", variant="gated", collaborate="both", init_w22="random")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers: they tell -0.0 from 0.0."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def learned(base: Path, folder: Path, request: Request) -> Path:
    return shake(expand(base, request, folder).path)


@pytest.fixture(scope="module")
def adapted(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned(base_of("llama"), tmp_path_factory.mktemp("strength") / "adapted", REQUESTS["adapt"])


# a model in memory


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    mostly(
        product(FAMILIES, (*REQUESTS, "gated"), DTYPES),
        [("llama", "adapt", "float32")].__contains__,
    ),
)
def test_both_ends_are_exact(base_of: Callable[..., Path], tmp_path: Path, family: str, name: str, dtype: str) -> None:
    """0 is the base and 1 what was learned, to the last bit; between them, neither."""
    base = base_of(family, dtype)
    model = load(learned(base, tmp_path / "wide", REQUESTS.get(name, GATED)))
    parameters = dict(model.named_parameters())
    before, of_base = logits(model), logits(load(base))
    assert not torch.equal(before, of_base)
    assert torch.equal(bits(logits(set_strength(model, 0))), bits(of_base))
    half = logits(set_strength(model, 0.5))
    assert not torch.equal(half, before) and not torch.equal(half, of_base)
    with at_strength(model, 0.25):
        assert not torch.equal(logits(model), half)
    assert torch.equal(bits(logits(set_strength(model, 1))), bits(before))
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())


def test_nothing_is_multiplied_at_0(adapted: Path, base_of: Callable[..., Path]) -> None:
    """An up stream of infinities would make NaN of a product with zeros."""
    model = load(adapted)
    for name, group, parameter in model.expansion_parameters():
        if group in ("norms", "w22") and name.endswith("weight"):
            parameter.data.fill_(torch.inf)
    assert logits(model).isnan().any()
    assert torch.equal(logits(set_strength(model, 0)), logits(load(base_of("llama"))))


def test_the_dial_is_relative_to_what_was_learned(adapted: Path) -> None:
    model, folder = load(adapted), open_checkpoint(adapted)
    for strength in (0.5, 0, 0.5):
        set_strength(model, strength)
    names = writing_tensors(read_manifest(adapted).plan)
    assert {name.rpartition(".")[2] for name in names} == {"w12", "up_weight"}
    parameters = dict(model.named_parameters())
    for name, group, parameter in model.expansion_parameters():
        is_scaled = group in ("w12", "head")
        assert is_scaled is (name in names)
        value = read_tensor(folder, name)
        assert torch.equal(parameter, scaled(value, 0.5) if is_scaled else value), name
        assert parameters[name].requires_grad is not is_scaled


def test_what_is_scaled_is_neither_saved_nor_freed(adapted: Path, tmp_path: Path) -> None:
    model = load(adapted)
    set_strength(model, 0.5)
    with pytest.raises(ValueError, match="default: has another strength than 1"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.freeze_base()
    names = writing_tensors(read_manifest(adapted).plan)
    assert {
        name for name, tensor in model.named_parameters() if ".expansions." in name and not tensor.requires_grad
    } == set(names)
    set_strength(model, 1).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved").exists()
    set_strength(model, 0.5)
    model.delete_expansion("default")
    assert not model.strengths, "an expansion that comes back has its own"


@torch.no_grad()
def test_a_cache_of_another_strength_is_refused(adapted: Path) -> None:
    model, ids = load(adapted), torch.arange(5, 14)[None]
    set_strength(model, 0.5)
    cache = find_cache(model(ids[:, :6], use_cache=True))
    assert model(ids[:, 6:7], cache=cache).logits.isfinite().all()
    set_strength(model, 1)
    with pytest.raises(ValueError, match="not read under this choice and strength"):
        model(ids[:, 7:], cache=cache)


@pytest.mark.slow
def test_one_of_several_expansions(speaking: tuple[Any, Path]) -> None:
    _, composed = speaking
    model = load(composed)
    first, second = model.expansions[:2]
    before = {}
    for name in (None, first, second):
        with model.use_expansion(name):
            before[name] = logits(model)
    set_strength(model, 0, first)
    for name, expected in ((first, None), (second, second)):
        with model.use_expansion(name):
            assert torch.equal(logits(model), before[expected])
    with refused("path-unknown", "expansion law_", PlanError):
        set_strength(model, 0.5, "law_")


# a merged folder


@pytest.mark.slow
def test_merged_at_1_as_ever(adapted: Path, tmp_path: Path) -> None:
    written = merge(adapted, tmp_path / "one", part=MergedPart(strength=1)).path
    assert digests(written) == digests(merge(adapted, tmp_path / "ever").path)
    assert "strength" not in json.loads((written / "surgery.json").read_text())["expansions"]["default"]


@pytest.mark.parametrize("to", ("fused", "stock"))
def test_merged_at_0_is_the_base(base_of: Callable[..., Path], tmp_path: Path, to: Any) -> None:
    base = base_of("llama")
    wide = learned(base, tmp_path / "wide", REQUESTS["adapt_without_up_stream"])
    done = merge(wide, tmp_path / "merged", to, part=NONE)
    assert digests(done.path) == digests(base)
    assert done.form == "stock" and done.drift is None
    assert done.parameters_before + done.differences["strength"] == done.parameters
    # whatever would keep the expansion from that form
    wider = learned(base, tmp_path / "wider", REQUESTS["adapt"])
    routed = route_export(wider, tmp_path / "routed", PosteriorRouter()).path
    assert digests(merge(routed, tmp_path / "again", to, part=NONE).path) == digests(base)
    with pytest.raises(PlanError):
        merge(routed, tmp_path / "never", to)


@pytest.mark.parametrize(
    ("family", "name", "to"),
    mostly(
        [(family, name, "fused") for family in FAMILIES for name in ("preserve", "adapt", "gated")]
        + [(family, "adapt_without_up_stream", to) for family in ("llama", "qwen3") for to in ("fused", "stock")],
        [("llama", "gated", "fused"), ("llama", "adapt_without_up_stream", "stock")].__contains__,
    ),
)
def test_merged_in_between(base_of: Callable[..., Path], tmp_path: Path, family: str, name: str, to: Any) -> None:
    """A merged model computes what the same strength computes in memory, and another strength does not."""
    wide = learned(base_of(family), tmp_path / "wide", REQUESTS.get(name, GATED))
    done = merge(wide, tmp_path / "half", to, part=HALF)
    assert done.drift is not None and done.drift.share < 1e-5
    model, found = load(wide), logits(load(done.path))
    torch.testing.assert_close(found, logits(set_strength(model, 0.5)), rtol=0, atol=1e-5)
    assert (found - logits(set_strength(model, 0.6))).abs().max() > 1e-3
    if to == "stock":
        assert json.loads((done.path / "merge.json").read_text())["strength"] == 0.5
        return
    # its blocks are the scaled ones, and whole
    blocks = merge(done.path, tmp_path / "blocks", "blocks").path
    assert torch.equal(logits(load(blocks)), logits(set_strength(model, 0.5)))
    assert read_manifest(blocks).expansions["default"].strength == 0.5
    assert verify(blocks, record=False).passed and verify(done.path, record=False).passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "half", "wide"]


def test_what_learns_on_is_whole(tmp_path: Path) -> None:
    """A model that was merged at a strength and trained further has that strength no more."""
    wide = learned(SHIPPED_MODEL, tmp_path / "wide", Request("3", variant="adapt"))
    blocks = merge(merge(wide, tmp_path / "half", part=HALF).path, tmp_path / "blocks", "blocks").path
    assert read_manifest(blocks).expansions["default"].strength == 0.5
    (tmp_path / "text.txt").write_text("Nobody Example was born in Utrecht. " * 9)
    settings = TrainingSettings(steps=1, batch_size=1, sequence_length=16)
    trained = train(blocks, tmp_path / "text.txt", tmp_path / "trained", settings).path
    assert read_manifest(trained).expansions["default"].strength == 1
    saved = load(trained)
    with torch.no_grad():
        block = next(tensor for name, tensor in saved.named_parameters() if name.endswith("w12"))
        block.add_(0.25)
    saved.save_pretrained(tmp_path / "saved")
    record = read_manifest(adopt(tmp_path / "saved", trained, tmp_path / "adopted").path).expansions["default"]
    assert record.strength == 1 and record.training[-1]["trained_parameters"] == block.numel()


@pytest.mark.slow
def test_merged_twice(adapted: Path, tmp_path: Path) -> None:
    half = merge(merge(adapted, tmp_path / "half", part=HALF).path, tmp_path / "blocks", "blocks").path
    quarter = merge(half, tmp_path / "quarter", part=HALF).path
    assert read_manifest(quarter).expansions["default"].strength == 0.25
    assert inspect(quarter).expanded.expansions["default"].strength == 0.25
    blocks = merge(quarter, tmp_path / "quartered", "blocks").path
    assert any(note.startswith("Strength 0.25: ") for note in report(blocks, files_only=True).notes)
    assert not any("Strength" in note for note in report(adapted, files_only=True).notes), "the control"


@pytest.mark.slow
def test_a_cosine_router_is_merged_at_a_strength(adapted: Path, tmp_path: Path) -> None:
    routed = route_export(adapted, tmp_path / "routed", CosineRouter(threshold=0.9)).path
    done = merge(routed, tmp_path / "half", part=HALF)
    assert done.drift is not None and done.drift.share < 1e-5
    assert digests(merge(routed, tmp_path / "none", part=NONE).path) == digests(strip(routed, tmp_path / "base").path)


@pytest.mark.slow
def test_one_of_several_expansions_is_merged(speaking: tuple[Any, Path], tmp_path: Path) -> None:
    _, composed = speaking
    model = load(composed)
    name = model.expansions[1]
    done = merge(composed, tmp_path / "half", part=MergedPart(name, 0.5))
    set_strength(model, 0.5)
    with model.use_expansion(name):
        torch.testing.assert_close(logits(load(done.path)), logits(model), rtol=0, atol=1e-5)


def test_damage_is_not_scaled(adapted: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(adapted, tmp_path / "broken"))
    names = writing_tensors(read_manifest(adapted).plan)
    with edited(broken / "surgery.json") as record:
        record["expansions"]["default"]["trained"] = dict.fromkeys(names, "0" * 64)
    (problem,) = problems(merge, broken, tmp_path / "half", part=HALF, error=CheckpointError)
    assert problem.code == "folder-damaged" and not (tmp_path / "half").exists()


# refusals


def test_strengths_that_are_refused(adapted: Path, tmp_path: Path) -> None:
    model = load(adapted)
    for strength in (-0.1, 1.1, float("nan")):
        with refused("strength-out-of-range", "strength", PlanError):
            set_strength(model, strength)
        with refused("strength-out-of-range", "strength", PlanError):
            merge(adapted, tmp_path / "out", part=MergedPart(strength=strength))
    fused = merge(adapted, tmp_path / "fused").path
    with refused("strength-of-blocks", "--to blocks", PlanError):
        merge(fused, tmp_path / "out", "blocks", part=HALF)
    with refused("strength-fused", "model", PlanError):
        set_strength(load(fused), 0.5)


def test_expansions_without_a_strength(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = base_of("llama")
    grown = expand(base, Request("1", method="grow"), tmp_path / "grown").path
    with refused("grown-not-dialled", "--strength", PlanError):
        merge(grown, tmp_path / "out", "stock", part=NONE)
    with refused("grown-not-dialled", "expansion default", PlanError):
        set_strength(load(grown), 0)
    deep = expand(base, DEEPENED, tmp_path / "deep").path
    with refused("deepened-is-stock", deep, PlanError):
        merge(deep, tmp_path / "out", part=HALF)
    with refused("deepened-not-dialled", "model", PlanError):
        set_strength(load(deep), 0.5)
    with refused("model-without-expansion", "model", PlanError):
        set_strength(load(base), 0.5)
    worded = expand(SHIPPED_MODEL, Request("none", new_tokens=NewTokens(("Xylophone",))), tmp_path / "worded").path
    with refused("strength-new-tokens", "--strength", PlanError):
        merge(worded, tmp_path / "out", part=NONE)
    with refused("strength-new-tokens", "expansion default", PlanError):
        set_strength(load(worded), 0)


def test_weights_that_are_not_in_memory(adapted: Path) -> None:
    model = load(adapted).to("meta")
    assert problems(set_strength, model, 0.5, error=PlanError) == [Problem("strength-offloaded", "model")]


# the command


def test_command(adapted: Path, tmp_path: Path) -> None:
    shown = run("merge", adapted, "-o", tmp_path / "base", "--strength", "0").stdout
    assert "which strength 0 leaves out" in " ".join(shown.split())
    done = json.loads(run("merge", adapted, "-o", tmp_path / "half", "--strength", "0.5", "--json").stdout)
    assert done["form"] == "fused" and read_manifest(tmp_path / "half").expansions["default"].strength == 0.5
    run("merge", adapted, "-o", tmp_path / "over", "--strength", "1.5", code=1)
    assert inspect(tmp_path / "half")
