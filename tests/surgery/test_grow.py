"""Grown models: copies of the MLP give what the one gave, learn apart from it, and join in a larger plain MLP."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scale_surgery import RunOptions
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import CheckpointError, PlanError, Problem, TrainingError
from scale_surgery.evidence.inspect import inspect
from scale_surgery.evidence.verification import Verification
from scale_surgery.evidence.verify import verify
from scale_surgery.folder.record import read_manifest
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.planning.request import COPIES, Request
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.load_expansion import load_expansion
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from scale_surgery.tensors import blocks
from scale_surgery.training.settings import GROUPS, TrainingSettings
from scale_surgery.training.train import train
from tests.conftest import digests, edited, load, problems, refused, shake
from tests.each import DTYPES, SHAPES, mostly, woven
from tests.families import FAMILIES as FACTS
from tests.tiny import FAMILIES

FREEZE = Request("0,2", method="grow")
TRAIN = Request("0,2", method="grow", variant="grow-train")
ROUTINGS = (PosteriorRouter(switch_rate=0), CosineRouter())
SHARD = "expansion-default-00001-of-00001.safetensors"
IDS = torch.tensor([[5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]])


@pytest.fixture(scope="session")
def grown_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Grow a tiny base model, once; each test gets a copy that it may change."""

    @functools.cache
    def grow(family: str, request: Request, dtype: str, tied: bool) -> Path:
        return expand(base_of(family, dtype, tied), request, tmp_path_factory.mktemp("grown") / family).path

    def make(family: str, request: Request = FREEZE, dtype: str = "float32", tied: bool = False) -> Path:
        return Path(shutil.copytree(grow(family, request, dtype, tied), tmp_path_factory.mktemp("copy") / family))

    return make


def promise(result: Verification, name: str) -> Any:
    return next(promise for promise in result.promises if promise.name == name)


# each family in both variants and in both dtypes
@pytest.mark.parametrize(
    ("family", "request_", "dtype"),
    mostly(
        product(FAMILIES, (FREEZE, TRAIN), DTYPES),
        [("llama", TRAIN, "float32"), ("phi3", FREEZE, "bfloat16"), ("gpt2", FREEZE, "float32")].__contains__,
    ),
    ids=lambda value: value if isinstance(value, str) else value.variant or "grow-freeze",
)
def test_output_at_init(
    family: str, dtype: str, request_: Request, grown_of: Callable[..., Path], base_of: Callable[..., Path]
) -> None:
    grown, base = load(grown_of(family, request_, dtype)), load(base_of(family, dtype))
    with torch.no_grad():
        for batch in (IDS, IDS[:, :1], IDS.repeat(3, 1)):
            assert torch.equal(grown(batch).logits, base(batch).logits)
        # negative control: the copies do compute what is added
        down = FACTS[family].linears[-1].name
        layers = getattr(grown, FACTS[family].base_model).get_submodule(FACTS[family].layers)
        layers[2].get_submodule(down).expansions.default.w12[3, 4] += 1
        assert not torch.equal(grown(IDS).logits, base(IDS).logits)


@pytest.mark.parametrize(
    ("copies", "dtype", "claimed"),
    mostly(
        [
            (2, "float32", "output_at_init"),
            (2, "float16", "near_output_at_init"),
            (3, "float32", "near_output_at_init"),
            (3, "bfloat16", "near_output_at_init"),
            (4, "float32", "near_output_at_init"),
        ],
        lambda case: (case[0] < 4 and case[1] != "float32") or case[0] == 2,
    ),
)
def test_verify_claims_and_proves(copies: int, dtype: str, claimed: str, grown_of: Callable[..., Path]) -> None:
    """Bit-equal where a share is a half, and float16 has no half of its smallest numbers; else near."""
    grown = grown_of("qwen2", Request("1", method="grow", copies=copies), dtype)
    result = verify(grown, record=False)
    assert result.passed
    promises = {promise.name: promise for promise in result.promises if promise.claimed and "output" in promise.name}
    assert list(promises) == [claimed] and promises[claimed].holds
    wording = "bit-equal" if claimed == "output_at_init" else ""
    assert promises[claimed].evidence.startswith(f"copies are the base's; logits {wording}")
    described = inspect(grown).expanded
    assert described is not None
    (added,) = described.expansions.values()
    assert (added.method, added.copies, added.layers) == ("grow", copies, (1,))


def test_near_is_not_far(grown_of: Callable[..., Path]) -> None:
    """Negative control: what is not explained by rounding is noticed."""
    path = grown_of("qwen2", Request("1", method="grow", copies=3))
    shard = path / SHARD
    name = "model.layers.1.mlp.down_proj.expansions.default.w12"
    with edited(shard) as tensors:
        tensors[name] *= 1.1
    result = verify(path, required=("near_output_at_init",), record=False)
    assert not result.passed
    problems = promise(result, "near_output_at_init").problems
    assert f"{name}: is not the copy of model.layers.1.mlp.down_proj.weight that it began as." in problems
    assert any(problem.startswith("logits: drift") and "expected at most" in problem for problem in problems)


def trained_mlp(path: Path, steps: int = 5, frozen: tuple[str, ...] = ()) -> Any:
    """Train a grown model on a few tokens, but for blocks of these names; give its layer 2's MLP."""
    model = load(path).train()
    for name, parameter in model.named_parameters():
        if name.endswith(frozen):
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2, weight_decay=0
    )
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.model.layers[2].mlp


@pytest.mark.parametrize(("request_", "frozen"), [(FREEZE, ()), (TRAIN, ()), (TRAIN, (".w12",))])
def test_copies_separate_in_training(request_: Request, frozen: tuple[str, ...], grown_of: Callable[..., Path]) -> None:
    """The negative control: where both halves of the down projection are frozen, they stay equal for ever."""
    up = trained_mlp(grown_of("llama", request_), 20 if frozen else 5, frozen).up_proj
    new = up.expansions.default
    apart = (new.w21 - (up.weight if new.w11 is None else new.w11)).norm()
    assert apart == 0 if frozen else apart > 0.1
    start = load(grown_of("llama", request_)).model.layers[2].mlp.up_proj.expansions.default
    assert not torch.equal(new.w21, start.w21), "they do train"


@pytest.mark.parametrize("noise", [blocks.COPY_NOISE, 0.0])
def test_several_new_copies_separate(
    noise: float, base_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two new copies that begin the same are kept apart by noise; without it (the control) they never separate."""
    monkeypatch.setattr(blocks, "COPY_NOISE", noise)
    grown = expand(base_of("llama"), Request("2", method="grow", copies=3), tmp_path / "grown").path
    up = trained_mlp(grown, steps=20).up_proj
    first, second = up.expansions.default.w21.chunk(2)
    assert (first - up.weight).norm() > 1
    # without noise, kernels may round rows of one matrix differently by where they lie
    apart = (first - second).norm()
    assert apart > 0.01 if noise else apart < 1e-5


@pytest.mark.parametrize(("request_", "expected"), [(FREEZE, {"w12", "w21", "up_bias"}), (TRAIN, None)])
def test_what_trains(request_: Request, expected: set[str] | None, grown_of: Callable[..., Path]) -> None:
    model = load(grown_of("gpt2", request_))
    trains = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == (expected or {"w12", "w21", "w11", "up_bias", "bias11"})
    with model.expansion_disabled():
        named = model.named_parameters()
        assert {name.rpartition(".")[2] for name, parameter in named if parameter.requires_grad} == trains


def test_training_into_the_trap_is_refused(stories: Path, tmp_path: Path) -> None:
    grown = expand(stories, Request("4", method="grow", variant="grow-train"), tmp_path / "grown").path
    (tmp_path / "new.txt").write_text("Zork was a green dragon. " * 40)
    settings = TrainingSettings(steps=2, sequence_length=32, groups=("w11", "w21"))
    with refused("copies-stay-equal", grown, TrainingError):
        train(grown, [tmp_path / "new.txt"], tmp_path / "trained", settings)
    assert not (tmp_path / "trained").exists()
    apart = train(grown, [tmp_path / "new.txt"], tmp_path / "apart", replace(settings, groups=GROUPS)).path
    before, after = (load_file(path / SHARD) for path in (grown, apart))
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    result = verify(apart, stories, record=False)
    assert result.passed and result.state == "trained"
    assert digests(strip(apart, tmp_path / "again").path) == digests(stories)
    # copies that are no longer equal may train so, and so may three, which noise keeps apart
    train(apart, [tmp_path / "new.txt"], tmp_path / "trained", settings)
    three = expand(stories, Request("4", method="grow", variant="grow-train", copies=3), tmp_path / "three").path
    train(three, [tmp_path / "new.txt"], tmp_path / "three-trained", settings)


@pytest.mark.parametrize(
    ("family", "request_"),
    woven(SHAPES, (FREEZE, TRAIN), among=FAMILIES),
    ids=lambda value: value if isinstance(value, str) else "train" if value == TRAIN else "freeze",
)
def test_strip_extract_apply(
    family: str, request_: Request, grown_of: Callable[..., Path], base_of: Callable[..., Path], tmp_path: Path
) -> None:
    base, grown = base_of(family), shake(grown_of(family, request_))
    strip(grown, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(base)
    extract(grown, tmp_path / "extract")
    apply(tmp_path / "extract", tmp_path / "again", base)
    assert digests(tmp_path / "again") == digests(grown)
    loaded = load_expansion(load(base), tmp_path / "extract")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, load(grown)(IDS).logits)


@pytest.mark.parametrize(
    ("family", "variant", "copies"),
    mostly(
        [(family, *case) for family in FAMILIES for case in (("grow-freeze", 3), ("grow-train", 2))],
        [("llama", "grow-train", 2), ("phi3", "grow-freeze", 3), ("gpt2", "grow-freeze", 3)].__contains__,
    ),
)
def test_stock_form(family: str, variant: Any, copies: int, grown_of: Callable[..., Path], tmp_path: Path) -> None:
    grown = shake(grown_of(family, Request("0,2", method="grow", variant=variant, copies=copies)))
    done = merge(grown, tmp_path / "stock", "stock")
    assert done.drift is not None and done.drift.share < 2e-6
    stock, plan_ = load(tmp_path / "stock"), read_manifest(grown).plan
    assert not type(stock).__name__.startswith("Scale")
    assert getattr(stock.config, FACTS[family].key("inner")) == 52 * copies
    # every other layer is filled with zeros, so the cost that the plan states is that of one layer
    planned = plan_.costs.stock
    assert done.parameters == planned.parameters
    assert planned.padding * 2 == planned.parameters - planned.padding - plan_.costs.parameters_before


def test_wrong_share_is_noticed_by_the_merge(grown_of: Callable[..., Path], tmp_path: Path) -> None:
    """Negative control: a down projection that counts whole is too far from the blocks to be written."""
    grown = shake(grown_of("llama"))
    with edited(grown / "config.json") as config:
        config["scale_surgery"]["expansions"][0]["expanded"]["mlp.down_proj"]["share"] = 0.4
    (problem,) = problems(merge, grown, tmp_path / "stock", "stock", error=CheckpointError)
    assert problem == Problem("folder-damaged", grown, Problem("config-key-changed", "config.json: scale_surgery"))
    # trusted, the model counts as its config says, and the merge as its record says
    with refused("merge-drift", tmp_path / "stock"):
        merge(grown, tmp_path / "stock", "stock", run=RunOptions(trust_remote_code=True))
    assert not (tmp_path / "stock").exists()


@pytest.mark.parametrize(
    ("family", "routing"),
    woven(("llama", "gpt2"), ROUTINGS, among=FACTS),
    ids=lambda value: value if isinstance(value, str) else value.router,
)
def test_routed(family: str, routing: Router, grown_of: Callable[..., Path], tmp_path: Path) -> None:
    """The preserve path of a routed grown model is its base, which counts whole there."""
    routed = route_export(shake(grown_of(family, TRAIN)), tmp_path / "routed", routing).path
    result = verify(routed, record=False)
    assert result.passed
    assert promise(result, "base_stream_always").claimed
    assert promise(result, "base_stream_always").holds


def unfit(copies: int) -> Problem:
    return Problem("copies-out-of-range", "--copies", copies=copies, range=COPIES)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (Request("0", method="grow", copies=10**400), [unfit(10**400)]),
        (
            Request("9", method="grow", copies=1),
            [unfit(1), Problem("layer-out-of-range", "--layers 9", layer=9, last=2)],
        ),
        (
            Request("0", method="grow", copies=0, variant="adapt", up_width=8),
            [
                Problem(
                    "variant-of-other-method",
                    "--variant",
                    variant="adapt",
                    variants=("grow-freeze", "grow-train"),
                    method="grow",
                ),
                Problem("option-of-other-method", "--up-width", value=8, owner="scale"),
                unfit(0),
            ],
        ),
        (Request("0", copies=2), [Problem("option-of-other-method", "--copies", value=2, owner="grow")]),
    ],
)
def test_bad_requests(request_: Request, wanted: list[Problem], base_of: Callable[..., Path]) -> None:
    assert problems(plan, base_of("llama"), request_, error=PlanError) == wanted


def test_fused_is_refused(grown_of: Callable[..., Path], tmp_path: Path) -> None:
    with refused("grown-not-fused", "--to fused", PlanError):
        merge(grown_of("llama"), tmp_path / "fused")
