"""A router that somebody adds: one class, one row of ROUTERS, and everything that runs a model runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from scale_surgery import CheckpointError, GenerationSettings, PlanError, Probes, evaluate, generate, verify
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import describe_router
from scale_surgery.modeling import expanded_routing
from scale_surgery.modeling.expanded_routers import ROUTERS, Router
from scale_surgery.modeling.expanded_routing import Evidence, state_of
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.report import route_report
from scale_surgery.routing.watched import watched
from scale_surgery.show.tables_calibrate import render_calibration
from scale_surgery.show.tables_route_report import render_route_report
from scale_surgery.surgery.route import route_export
from tests.composed import LLAMA
from tests.conftest import load, problems, refused
from tests.each import mostly
from tests.routed import padded, random_ids
from tests.routing.test_report import shown

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
IDS = random_ids(2, 13)


@dataclass(frozen=True)
class Newest(Router):
    """The newest expansion, always; it reads nothing."""

    router: str = field(default="newest", init=False)
    reads_tokens: ClassVar[bool] = False
    is_hard: ClassVar[bool] = True

    def weights(self, evidence: Evidence) -> Tensor:
        weights = torch.full((*evidence.restarts.shape, evidence.paths), -torch.inf, device=evidence.restarts.device)
        weights[..., -1] = 0
        return weights


@dataclass(frozen=True)
class Shares(Router):
    """Shares that never change: it reads nothing, and mixes."""

    router: str = field(default="shares", init=False)
    reads_tokens: ClassVar[bool] = False
    shares: tuple[float, ...] = ()

    def problems(self, expansions: int) -> list[str]:
        return [] if len(self.shares) == 1 + expansions else [f"shares: are {len(self.shares)}"]

    def weights(self, evidence: Evidence) -> Tensor:
        shares = torch.tensor(self.shares, device=evidence.restarts.device).log()
        return shares.expand(*evidence.restarts.shape, -1)


@dataclass(frozen=True)
class LastToken(Router):
    """Weighs by how well each path predicted the last token alone, and begins with equal weights."""

    router: str = field(default="last_token", init=False)
    sharpness: float = 2.0

    def weights(self, evidence: Evidence) -> Tensor:
        assert evidence.log_likelihoods is not None
        known = (self.sharpness * evidence.log_likelihoods).log_softmax(-1)
        return torch.where(evidence.restarts[..., None], torch.zeros_like(known).log_softmax(-1), known)


@dataclass(frozen=True)
class BestOfNewest(Router):
    """The path that predicted the newest tokens best, and no other: the older a token, the less it counts."""

    router: str = field(default="best_of_newest", init=False)
    is_hard: ClassVar[bool] = True
    last_tokens: int = 4

    def weights(self, evidence: Evidence) -> Tensor:
        log_likelihoods, sums = evidence.log_likelihoods, []
        start = torch.zeros_like(log_likelihoods[:, 0])
        latest = start if evidence.before is None else evidence.before
        for here, is_start in zip(log_likelihoods.unbind(1), evidence.restarts[..., None].unbind(1), strict=True):
            latest = torch.where(is_start, start, (1 - 1 / self.last_tokens) * latest + here)
            sums.append(latest)
        return torch.stack(sums, 1)


TOYS: dict[str, tuple[type, dict[str, Any]]] = {
    "newest": (Newest, {}),
    "shares": (Shares, {"shares": [0.1, 0.2, 0.3, 0.25, 0.15]}),
    "last_token": (LastToken, {"sharpness": 3.0}),
    "best_of_newest": (BestOfNewest, {"last_tokens": 3}),
}
each_toy = pytest.mark.parametrize("name", TOYS)
# one that reads tokens and one that reads none
of_each_kind = pytest.mark.parametrize("name", mostly(TOYS, ("last_token", "shares").__contains__))


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (kind, _) in TOYS.items():
        monkeypatch.setitem(ROUTERS, name, kind)


def choose(model: Any, name: str) -> Any:
    model.set_expansion(list(LLAMA), router=name, **TOYS[name][1])
    return model


@torch.no_grad()
def defined(model: Any, name: str, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the routed output and weights of the paths, written down, from the logits of each path."""
    ids, paths = prompt["input_ids"], model.path_logits(**prompt)
    log_p = torch.stack([path_logits.double().log_softmax(-1) for path_logits in paths], -1)
    mask = prompt.get("attention_mask", torch.ones_like(ids))
    is_start = (mask.cumsum(-1) == 1) & mask.bool()
    weights = torch.full((*ids.shape, len(paths)), 1 / len(paths), dtype=torch.float64)
    if name == "newest":
        weights = torch.nn.functional.one_hot(torch.tensor(len(paths) - 1), len(paths)).expand_as(weights).double()
    elif name == "shares":
        weights = torch.tensor(TOYS[name][1]["shares"], dtype=torch.float64).expand_as(weights)
    else:
        known = log_p[:, :-1].gather(2, ids[:, 1:, None, None].expand(-1, -1, 1, len(paths)))[:, :, 0]
        numbers, later = TOYS[name][1], [torch.zeros_like(known[:, 0])]
        for token, start in zip(known.unbind(1), is_start[:, 1:, None].unbind(1), strict=True):
            earlier = (1 - 1 / numbers["last_tokens"]) * later[-1] if "last_tokens" in numbers else 0
            later.append(torch.where(start, 0.0, earlier + numbers.get("sharpness", 1.0) * token))
        weights = torch.stack(later, 1).softmax(-1)
    if TOYS[name][0].is_hard:
        best = weights.argmax(-1)
        chosen = torch.nn.functional.one_hot(best, len(paths)).double()
        return log_p.gather(-1, best[..., None, None].expand(*log_p.shape[:-1], 1))[..., 0], chosen
    return (log_p + weights[:, :, None].log()).logsumexp(-1), weights


@each_toy
@torch.no_grad()
def test_it_gives_what_it_was_defined_to_give(
    made_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = choose(made_of("llama", LLAMA).composed(), name)
    for prompt in ({"input_ids": IDS}, padded(random_ids(3, 12), (0, 5, 2))):
        mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"])).bool()
        wanted, weights = defined(model, name, prompt)
        actual = model(**prompt).logits.double().log_softmax(-1)
        torch.testing.assert_close(actual[mask], wanted[mask], atol=1e-4, rtol=1e-4)
        last = model(**prompt, logits_to_keep=1).logits[:, -1].double().log_softmax(-1)
        torch.testing.assert_close(last, wanted[:, -1], atol=1e-4, rtol=1e-4)
        scores, kept = model.score_tokens(**prompt), mask[:, :-1] & mask[:, 1:]
        torch.testing.assert_close(scores.weights[kept].double(), weights[:, :-1][kept], atol=1e-4, rtol=1e-4)
        following = prompt["input_ids"][:, 1:, None]
        assert_of_paths(model, scores, prompt, kept)
        routed = wanted[:, :-1].gather(-1, following)[..., 0]
        torch.testing.assert_close(scores.routed[kept].double(), routed[kept], atol=1e-4, rtol=1e-4)
    whole = model(**prompt).logits
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(model(**prompt).logits[mask], whole[mask], atol=1e-5, rtol=1e-5)
    with model.use_expansion(list(LLAMA)):
        posterior = model(**prompt).logits.log_softmax(-1)
    assert not torch.allclose(posterior[mask].double(), wanted[mask], atol=0.1), "the control: it is no other router"


def assert_of_paths(model: Any, scores: Any, prompt: dict[str, Tensor], kept: Tensor) -> None:
    """Scores of the sides are those of the paths alone, the base's first."""
    following = prompt["input_ids"][:, 1:, None]
    for number, logits in enumerate(model.path_logits(**prompt)):
        expected = logits.log_softmax(-1)[:, :-1].gather(-1, following)[..., 0]
        torch.testing.assert_close(scores.sides[..., number][kept], expected[kept], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.base, scores.sides[..., 0])


@torch.no_grad()
def test_the_newest_is_that_expansion_bit_for_bit(made_of: Callable[..., Any]) -> None:
    made = made_of("llama", LLAMA)
    model, alone = choose(made.composed(), "newest"), made.alone(LLAMA[-1])
    assert torch.equal(model(IDS).logits, alone(IDS).logits)
    assert torch.equal(model.generate(IDS, **GREEDY), alone.generate(IDS, **GREEDY))
    assert not torch.equal(model(IDS).logits, made.alone(LLAMA[0])(IDS).logits), "the control"


@of_each_kind
def test_gradients_reach_the_expansions_that_it_weighs(made_of: Callable[..., Any], name: str) -> None:
    model = choose(made_of("llama", LLAMA).composed(), name).train()
    model(IDS, labels=IDS).loss.backward()
    reached = {
        path
        for path in LLAMA
        for key, tensor in model.named_parameters()
        if f".expansions.{path}." in key and tensor.grad is not None and tensor.grad.any()
    }
    weighed = model.score_tokens(IDS).weights.amax((0, 1)) > 0
    assert reached == {path for path, is_weighed in zip(LLAMA, weighed[1:], strict=True) if is_weighed} != set()
    assert all(tensor.grad is None for tensor in model.parameters() if not tensor.requires_grad)


@torch.no_grad()
def test_what_a_hard_one_remembers_is_not_shown(made_of: Callable[..., Any]) -> None:
    """Weights beside a token are those of its logits, with a cache too: one path has all."""
    model = choose(made_of("llama", LLAMA).composed(), "best_of_newest")
    with watched(model) as passes:
        ids = model.generate(IDS[:1], **GREEDY)
    assert torch.equal(ids, model.generate(IDS[:1], **GREEDY, use_cache=False))
    assert {tuple(sorted(weights)) for weights in passes} == {(0, 0, 0, 0, 1)}
    last = model.score_tokens(ids).weights[0, IDS.shape[1] - 1 :]
    assert list(passes) == [tuple(weights) for weights in last.tolist()]


def test_a_number_of_another_type_is_named(speaking: tuple[Any, Path], tmp_path: Path) -> None:
    with refused("value-unfit", "last_tokens", PlanError):
        route_export(speaking[1], tmp_path / "routed", BestOfNewest("many"))


def test_its_numbers_are_checked(made_of: Callable[..., Any]) -> None:
    model = made_of("llama", LLAMA).composed("law")
    with pytest.raises(ValueError, match=r"^shares: are 3$"):
        model.set_expansion(["law"], router="shares", shares=[0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match=r"^router: is .*'sharpness'"):
        model.set_expansion(["law"], router="newest", sharpness=1)


@pytest.mark.parametrize("name", mostly(TOYS, "last_token".__eq__))
def test_it_goes_through_every_command(
    speaking: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Written, verified, measured, asked, shown token by token and calibrated, as any other."""
    kind, numbers = TOYS[name]
    router = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()})
    if name == "shares":
        router = kind((0.1, 0.2, 0.3, 0.4))
    routed, text = tmp_path / "routed", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 3, encoding="utf-8")
    assert route_export(speaking[1], routed, router).routing == router
    assert read_manifest(routed).routing == router and load(routed).choice.router == router
    report = verify(routed, probes=Probes(max_new_tokens=4))
    held = {promise.name: promise.holds for promise in report.promises}
    assert report.passed and held["paths_as_alone"] and held["base_stream_always"] and not held["bounded_forgetting"]
    assert f"the {name} router promises no bound" in [promise.evidence for promise in report.promises]
    scores = evaluate(routed, text, text).scores
    assert len({score.old.nats for score in scores if score.old}) > 1, "the mixture and the base differ"
    (answer,) = generate(routed, "the quick", GenerationSettings(temperature=0, max_new_tokens=8)).answers
    ids = AutoTokenizer.from_pretrained(routed)("the quick", return_tensors="pt")["input_ids"]
    alone = load(routed).generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
    assert [token.id for token in answer.tokens] == alone[0, ids.shape[1] :].tolist()
    cache = load(routed)(ids, use_cache=True).cache
    assert (state_of(cache) is not None) == kind.reads_tokens
    assert describe_router(router, LLAMA[:3]) in " ".join(
        shown(render_route_report(route_report(routed, text))).split()
    )
    result = route_calibrate(routed, text, text)
    assert [outcome.routing for outcome in result.outcomes] == [router] and result.proposed == result.present
    assert f"{name} router over 4 paths" in shown(render_calibration(result))
    monkeypatch.delitem(ROUTERS, name)
    (problem,) = problems(read_manifest, routed, error=CheckpointError)
    wanted = Problem("router-unknown", "routing.router", name=name, choices=list(ROUTERS))
    assert problem.details == (wanted,)
