"""Two paths and two routers: what is equal bit for bit, what the routers compute, and what forgetting is bounded by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from scale_surgery.modeling import expanded_mixture, expanded_modules, expanded_routing
from scale_surgery.modeling.expanded_mixture import log_odds_after, mix
from scale_surgery.modeling.expanded_modules import LinearBlocks
from scale_surgery.modeling.expanded_paths import Paths
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.modeling.expanded_routing import Features, PathFeatures, route
from scale_surgery.modeling.expanded_state import RouterCall, find_restarts
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from tests import routed
from tests.by_hand import expand_alone
from tests.conftest import load
from tests.each import FEW, mostly, woven
from tests.routed import (
    REQUESTS,
    ROUTINGS,
    Trio,
    between,
    cosines_of,
    head_features,
    padded,
    prompts,
    put_router,
    random_ids,
    train,
)
from tests.tiny import FAMILIES

trio_of = routed.trio_of
# each family once a router; every request with several families
REQUEST_OF = dict(
    zip(FAMILIES, ("adapt", "deep", "without_heads", "without_up_stream", "without_inner") * 2, strict=True)
)
OTHER_REQUEST_OF = dict(zip(FAMILIES, ("deep", "adapt", "adapt", "deep", "adapt") * 2, strict=True))
HALF_PRECISION = (
    ("llama", "adapt", "posterior"),
    ("gemma3_text", "deep", "cosine"),
    ("phi3", "adapt", "strict"),
    ("gpt2", "deep", "posterior"),
    ("gpt_neox", "adapt", "cosine"),
    ("olmo2", "preserve", "posterior"),
)
EAGER = (("qwen3", "adapt", "cosine"), ("phi3", "deep", "posterior"), ("gpt2", "adapt", "strict"))


@torch.no_grad()
def unequal_paths(models: tuple[Any, Any, Any]) -> list[str]:
    """What is not equal bit for bit, of all that has to be."""
    base, expanded, model = models
    found = []
    for prompt in prompts(device=base.device):
        # as path_logits runs: with a cache keys lie otherwise in memory, and a model may differ from itself
        uncached = {**prompt, "use_cache": False}
        wanted, unrouted = base(**uncached).logits, expanded(**uncached).logits
        preserve, adapt = model.path_logits(**prompt)
        with model.routing_disabled():
            alone = model(**uncached).logits
        with model.expansion_disabled():
            off = model(**uncached).logits
        pairs = {"preserve": (preserve, wanted), "adapt": (adapt, unrouted), "alone": (alone, unrouted)}
        pairs["off"] = (off, wanted)
        found += [f"{name} {tuple(one.shape)}" for name, (one, other) in pairs.items() if not torch.equal(one, other)]
    return found


def check_paths(trio: Trio, **options: Any) -> None:
    base, expanded, model = trio.load(**options)
    with torch.no_grad():
        for prompt in prompts(((3, 13),), base.device):
            assert torch.equal(model(**prompt).logits, base(**prompt).logits), "output_at_init"
        train(expanded)
        train(model)
        assert not torch.equal(expanded(**prompt).logits, base(**prompt).logits), "the control: it was trained"
    assert unequal_paths((base, expanded, model)) == []
    assert model.is_routing_enabled and model.is_expansion_enabled


@pytest.mark.parametrize(("family", "routing"), woven(FEW, ("posterior", "cosine", "strict"), among=FAMILIES))
def test_each_path_is_its_model_bit_for_bit(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    request = (OTHER_REQUEST_OF if routing == "cosine" else REQUEST_OF)[family]
    check_paths(trio_of(family, request, routing))


@pytest.mark.parametrize(("family", "request_name", "routing"), mostly(HALF_PRECISION, HALF_PRECISION[:3].__contains__))
def test_each_path_in_half_precision(
    trio_of: Callable[..., Trio], family: str, request_name: str, routing: str
) -> None:
    check_paths(trio_of(family, request_name, routing, "bfloat16"))


@pytest.mark.parametrize(("family", "request_name", "routing"), mostly(EAGER, EAGER[1:2].__contains__))
def test_each_path_with_eager_attention(
    trio_of: Callable[..., Trio], family: str, request_name: str, routing: str
) -> None:
    check_paths(trio_of(family, request_name, routing), attn_implementation="eager")


@pytest.mark.parametrize("family", mostly(("llama", "gpt2", "gemma2"), "gemma2".__eq__))
def test_the_paths_of_a_preserve_model(trio_of: Callable[..., Trio], family: str) -> None:
    check_paths(trio_of(family, "preserve"))


@pytest.mark.parametrize(
    ("family", "dtype", "routing"),
    mostly((("llama", "float32", "posterior"), ("gemma2", "bfloat16", "cosine")), lambda own: own[0] == "llama"),
)
def test_each_path_with_a_tied_head(trio_of: Callable[..., Trio], family: str, dtype: str, routing: str) -> None:
    trio = trio_of(family, "adapt", routing, dtype, True)
    assert len(list(trio.path.glob("model-*.safetensors"))) > 1, "a tied one is sharded"
    check_paths(trio)


@pytest.mark.parametrize("routing", mostly(("posterior", "cosine"), "posterior".__eq__))
def test_each_path_with_new_tensors_in_float32(base_of: Callable[..., Path], tmp_path: Path, routing: str) -> None:
    base = base_of("llama", "bfloat16")
    expanded = expand(base, replace(REQUESTS["adapt"], dtype="float32"), tmp_path / "expanded").path
    check_paths(Trio(base, expanded, route_export(expanded, tmp_path / "routed", ROUTINGS[routing]).path))


def read_what_w12_wrote(monkeypatch: Any) -> None:
    """Let the base read the last base stream, which an expansion wrote into."""
    place_of = Paths.place_of

    def last(self: Paths, path: Any, layer: int) -> tuple[int, int | None]:
        return (len(self.groups(layer)) - 1, None) if not path.expansion else place_of(self, path, layer)

    monkeypatch.setattr(Paths, "place_of", last)


def test_a_base_path_that_reads_what_w12_wrote_is_noticed(trio_of: Callable[..., Trio], monkeypatch: Any) -> None:
    models = trio_of("llama", "adapt", "cosine").trained()
    assert unequal_paths(models) == []
    read_what_w12_wrote(monkeypatch)
    found = unequal_paths(models)
    assert found
    assert {name.split()[0] for name in found} == {"preserve"}


def test_one_bit_of_the_base_is_noticed_on_every_path(trio_of: Callable[..., Trio]) -> None:
    base, expanded, model = trio_of("qwen2", "deep").trained()
    weight = model.get_parameter("model.layers.2.mlp.down_proj.weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert {name.split()[0] for name in unequal_paths((base, expanded, model))} == {"preserve", "adapt", "alone", "off"}


def test_an_activation_on_both_paths_at_once_breaks_the_bits(trio_of: Callable[..., Trio], monkeypatch: Any) -> None:
    monkeypatch.setattr(expanded_modules.ExpandedActivation, "through", lambda self, run, x, layout: run(x))
    if not any(unequal_paths(trio_of(family, "adapt", "cosine").trained()) for family in ("llama", "gpt2", "phi3")):
        pytest.skip(
            "the kernels of this machine round the same in every lane: what is guarded against is not seen here"
        )


def test_a_switch_that_was_off_before_stays_off(trio_of: Callable[..., Trio]) -> None:
    trio = trio_of("llama")
    _, expanded, model = trio.trained()
    model.enable_routing(False)
    with model.routing_disabled(), model.expansion_disabled():
        assert not model.is_expansion_enabled
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert model.is_expansion_enabled and not model.is_routing_enabled
        assert torch.equal(model(ids).logits, expanded(ids).logits)
        model.enable_routing()
        assert not torch.equal(model(ids).logits, expanded(ids).logits)
        loaded = train(load(trio.path, routing_enabled=False))
        assert torch.equal(loaded(ids).logits, expanded(ids).logits)
    with pytest.raises(ZeroDivisionError), model.routing_disabled():
        _ = 1 / 0
    assert model.is_routing_enabled


# ---- the cosine router: equation 5 of the paper


def equation_5(head: Any, features: Tensor, threshold: float, strict: bool) -> tuple[Tensor, Tensor]:
    """Routed logits and cosines in float64, with nothing of ours but the tensors."""
    width = head.weight.shape[1]
    z_p, z_a = features[..., :width].double() @ head.weight.double().T
    own = head.expansions["default"].up_weight if "default" in head.expansions else None
    up = torch.zeros(2, 1) if own is None else features[..., width:].double() @ own.double().T
    cosine = (z_p * z_a).sum(-1) / (z_p.norm(dim=-1) * z_a.norm(dim=-1))
    preserve = z_p if strict else (z_p + z_a) / 2 + up[0]
    logits = torch.where((cosine > threshold)[..., None], preserve, z_a + up[1])
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap), cosine


@pytest.mark.parametrize("routing", ("cosine", "strict"))
@pytest.mark.parametrize("family", mostly(("llama", "gemma2", "gpt2", "phi3"), ("llama", "gemma2").__contains__))
@torch.no_grad()
def test_cosine_is_equation_5(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    base, expanded, model = trio_of(family, "adapt", routing).trained()
    head, strict = model.get_output_embeddings(), routing == "strict"
    for prompt in prompts(((1, 33), (3, 13))):
        features = head_features(model, prompt)
        threshold = between(equation_5(head, features, 0.0, strict)[1])
        put_router(model, CosineRouter(threshold, strict))
        wanted, cosines = equation_5(head, features, threshold, strict)
        found, is_preserve = model(**prompt).logits, cosines > threshold
        assert is_preserve.any() and not is_preserve.all(), "the control: both sides are taken"
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-5)
        assert torch.equal(found[~is_preserve], expanded(**prompt).logits[~is_preserve])
        assert torch.equal(found[is_preserve], base(**prompt).logits[is_preserve]) == strict


def test_what_the_head_reads_are_the_streams_of_both_models(trio_of: Callable[..., Trio], monkeypatch: Any) -> None:
    """Ties the reference above to models without a router: the preserve path is the expansion without W12."""
    base, expanded, model = trio_of("gemma3_text", "adapt", "cosine").trained()
    prompt = {"input_ids": random_ids(3, 13)}
    with torch.no_grad():
        preserve, adapt = head_features(model, prompt)
        (unrouted,) = head_features(expanded, prompt)
        for name, parameter in expanded.named_parameters():
            if name.endswith("w12"):
                parameter.zero_()
        (without,) = head_features(expanded, prompt)
        (alone,) = head_features(base, prompt)
    assert torch.equal(adapt, unrouted)
    assert torch.equal(preserve, without)
    assert torch.equal(preserve[..., : alone.shape[-1]], alone)
    assert not torch.equal(unrouted, without)
    forward = LinearBlocks.forward
    monkeypatch.setattr(LinearBlocks, "forward", lambda self, base, up, y, writes: forward(self, base, up, y, True))
    assert not torch.equal(head_features(model, prompt)[0], without), "the control: a preserve path that reads W12"


@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_the_ends_of_the_threshold(trio_of: Callable[..., Trio], family: str) -> None:
    base, expanded, model = trio_of(family, "adapt", "strict").trained()
    for prompt in prompts():
        with torch.no_grad():
            put_router(model, CosineRouter(-1.0, strict=True))
            assert torch.equal(model(**prompt).logits, base(**prompt).logits)
            put_router(model, CosineRouter(1.0, strict=True))
            assert torch.equal(model(**prompt).logits, expanded(**prompt).logits)


def test_no_cosine_is_above_one(trio_of: Callable[..., Trio]) -> None:
    """Where both paths agree to the bit the cosine is 1, and must not be rounded above a threshold of 1."""
    base, expanded, model = trio_of("llama", "adapt", "strict").load()
    ids = random_ids(3, 60)
    with torch.no_grad():
        for one in (expanded, model):
            one.get_parameter("lm_head.expansions.default.up_weight").normal_(
                generator=torch.Generator().manual_seed(0)
            )
        put_router(model, CosineRouter(1.0, strict=True))
        assert torch.equal(model(ids).logits, expanded(ids).logits)
        assert model.score_tokens(ids).weights[..., 1].eq(1).all()
        assert not torch.equal(base(ids).logits, expanded(ids).logits), "the control: the sides differ"


# ---- the posterior router: weights


def slow_odds(
    evidence: list[float], restarts: list[bool], prior: float, rate: float, before: float = 0.0
) -> list[float]:
    """Log odds after each token, one after the other in float64."""
    found, odds = [], before
    for gain, is_start in zip(evidence, restarts, strict=True):
        odds = math.log(prior) - math.log(1 - prior) if is_start else shared(odds + gain, rate)
        found.append(odds)
    return found


def shared(odds: float, rate: float) -> float:
    """Log odds after each side gave a share to the other."""
    if rate == 0:
        return odds
    # weights relative to the larger one
    preserve, adapt = math.exp(min(odds, 0.0)), math.exp(min(-odds, 0.0))
    return math.log((1 - rate) * preserve + rate * adapt) - math.log(rate * preserve + (1 - rate) * adapt)


RATES = (0.0, 1e-6, 0.01, 0.3, 0.5, 0.9)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.floats(-1000, 1000, width=32), st.sampled_from((False,) * 9 + (True,))), min_size=1, max_size=40
    ),
    prior=st.sampled_from((0.5, 0.01, 0.999)),
    rate=st.sampled_from(RATES),
    before=st.none() | st.floats(-50, 50, width=32),
)
def test_follow_is_the_posterior(
    steps: list[tuple[float, bool]], prior: float, rate: float, before: float | None
) -> None:
    evidence, restarts = [step[0] for step in steps], [step[1] for step in steps]
    restarts[0] |= before is None
    odds = None if before is None else torch.tensor([before])
    found = log_odds_after(odds, torch.tensor([evidence]), torch.tensor([restarts]), prior, rate)
    assert found.shape == (1, len(steps)) and found.dtype == torch.float32
    wanted = slow_odds(evidence, restarts, prior, rate, before or 0.0)
    # float32 holds a sum of so many nats to so much
    room = 1e-4 + 1e-6 * sum(map(abs, evidence))
    assert found[0].tolist() == pytest.approx(wanted, abs=room, rel=1e-5)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("spread", (0.1, 3.0, 1000.0))
def test_follow_over_a_long_text(rate: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(7)
    evidence = (torch.rand(2, 2000, generator=generator) * 2 - 1) * spread
    if spread == 1000:
        evidence = evidence.sign() * spread
    restarts = torch.rand(2, 2000, generator=generator) < 0.003
    restarts[:, 0] = True
    assert restarts.sum() > 6, "the control: texts begin inside"
    found = log_odds_after(None, evidence, restarts, 0.3, rate)
    assert found.isfinite().all()
    for row in range(2):
        wanted = slow_odds(evidence[row].tolist(), restarts[row].tolist(), 0.3, rate)
        assert found[row].tolist() == pytest.approx(wanted, abs=2e-3, rel=1e-4)
    without = log_odds_after(None, evidence, restarts & (torch.arange(2000) == 0), 0.3, rate)
    assert not torch.allclose(found, without, atol=0.1), "the control: restarts matter"


def test_follow_in_pieces_is_follow(trio_of: Callable[..., Trio]) -> None:
    generator = torch.Generator().manual_seed(8)
    evidence, restarts = torch.randn(3, 50, generator=generator), torch.rand(3, 50, generator=generator) < 0.05
    restarts[:, 0] = True
    whole = log_odds_after(None, evidence, restarts, 0.5, 0.01)
    odds, pieces = None, []
    for piece in (slice(0, 1), slice(1, 20), slice(20, 21), slice(21, 50)):
        pieces.append(log_odds_after(odds, evidence[:, piece], restarts[:, piece], 0.5, 0.01))
        odds = pieces[-1][:, -1]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-5)


RESTARTS = {
    "one text": ({"length": 4}, "1000"),
    "a continuation": ({"length": 4, "past": 3}, "0000"),
    "padding before": ({"mask": "00111"}, "11100"),
    "padding behind": ({"mask": "11100"}, "10011"),
    "the first real token comes after what was read": ({"mask": "00111", "past": 2, "length": 3}, "100"),
    "its last token alone": ({"mask": "00111", "past": 4, "length": 1}, "0"),
    "packed": ({"positions": (0, 1, 2, 0, 1, 0)}, "100101"),
    "packed, after what was read": ({"positions": (5, 6, 0, 1), "past": 5}, "0010"),
    "packed, a text begins where the call does": ({"positions": (0, 1), "past": 5}, "10"),
    "positions that stand still are padding": ({"positions": (1, 1, 0, 1)}, "1110"),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_text_begins_at_the_prior(name: str) -> None:
    call, wanted = RESTARTS[name]
    mask, positions = call.get("mask"), call.get("positions")
    length = call.get("length") or len(mask or positions)
    found = find_restarts(
        None if mask is None else torch.tensor([[int(sign) for sign in mask]]),
        None if positions is None else torch.tensor([positions]),
        call.get("past", 0),
        torch.zeros(1, length),
    )
    assert "".join(str(int(flag)) for flag in found[0]) == wanted


# ---- the posterior router: mixtures, and what they can lose


def plain_head(size: int) -> Any:
    """A head that gives its input back, so that any logits can be routed."""
    head = expand_alone(nn.Linear(size, size, bias=False), "head", base=size, up=0, dtype=None)
    with torch.no_grad():
        head.weight.copy_(torch.eye(size))
    return head


def first_only(ids: Tensor) -> Tensor:
    """Restarts of texts that were not cut."""
    return (torch.arange(ids.shape[1]) == 0).expand_as(ids)


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def mixed(router: Any, *paths: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """Log-probabilities that a router makes of any logits, float64."""
    call = RouterCall(ids, first_only(ids), None, slice(None), **options)
    own = tuple(PathFeatures(number, None, None) for number in range(len(paths)))
    features = Features(plain_head(paths[0].shape[-1]), tuple(path.clone() for path in paths), own, paths[0])
    with torch.no_grad():
        return log_probabilities(route(router, features, call))


def losses(log_p: Tensor, ids: Tensor) -> Tensor:
    """Nats of each token but the first."""
    return -log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


def slow_mixture(z_p: Tensor, z_a: Tensor, ids: Tensor, prior: float, rate: float) -> Tensor:
    """The definition, in float64."""
    log_p, log_a = log_probabilities(z_p), log_probabilities(z_a)
    evidence = losses(log_a, ids) - losses(log_p, ids)
    rows = [slow_odds([0.0, *row], [True] + [False] * len(row), prior, rate) for row in evidence.tolist()]
    odds = torch.tensor(rows, dtype=torch.float64)[..., None]
    return torch.logaddexp(functional.logsigmoid(odds) + log_p, functional.logsigmoid(-odds) + log_a)


@pytest.mark.parametrize("at_once", (5, 2**20), ids=("in pieces", "at once"))
@pytest.mark.parametrize("rate", (0.0, 0.01, 0.5))
@pytest.mark.parametrize("scale", (1.0, 10.0, 300.0))
def test_posterior_is_the_bayes_mixture(scale: float, rate: float, at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(expanded_mixture, "CHUNK_ON_CPU", at_once)
    generator = torch.Generator().manual_seed(2)
    z_p, z_a = (torch.randn(3, 30, 7, generator=generator) * scale for _ in range(2))
    ids = torch.randint(0, 7, (3, 30), generator=generator)
    found = mixed(PosteriorRouter((0.3, 0.7), rate), z_p, z_a, ids=ids)
    wanted = slow_mixture(z_p, z_a, ids, 0.3, rate)
    # beyond this a probability is no float32
    torch.testing.assert_close(found.clamp(min=-50), wanted.clamp(min=-50), atol=2e-4 * max(1, scale / 10), rtol=1e-5)
    assert (found - log_probabilities(z_p)).abs().max() > 0.1, "the control: it is neither path alone"
    assert (found - log_probabilities(z_a)).abs().max() > 0.1


@st.composite
def texts(draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of two paths and a text, random or adversarial."""
    length, generator = draw(st.integers(2, 25)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from((0.1, 2.0, 30.0, 1000.0)))
    z_p, z_a = (torch.randn(1, length, 4, generator=generator).clamp(-1, 1) * scale for _ in range(2))
    ids = torch.randint(0, 4, (1, length), generator=generator)
    turns = draw(st.lists(st.sampled_from(("as it is", "preserve", "adapt")), min_size=length - 1, max_size=length - 1))
    for place, right in enumerate(turns):
        token = int(ids[0, place + 1])
        if right != "as it is":
            z_p[0, place, token], z_a[0, place, token] = (scale, -scale) if right == "preserve" else (-scale, scale)
    return z_p, z_a, ids


def first_then(*sides: str, scale: float = 1000.0) -> tuple[Tensor, Tensor, Tensor]:
    """A text that one path knows first, and the other later."""
    z_p, z_a = torch.zeros(1, len(sides) + 1, 4), torch.zeros(1, len(sides) + 1, 4)
    for place, side in enumerate(sides):
        (z_p if side == "preserve" else z_a)[0, place, 1] = scale
        (z_a if side == "preserve" else z_p)[0, place, 2] = scale
    return z_p, z_a, torch.ones(1, len(sides) + 1, dtype=torch.long)


ADVERSARIAL = {
    "preserve first": first_then(*["preserve"] * 10, *["adapt"] * 10),
    "adapt first": first_then(*["adapt"] * 10, *["preserve"] * 10),
    "in turns": first_then(*["preserve", "adapt"] * 12),
    "a little": first_then(*["adapt"] * 3, *["preserve"] * 20, scale=2.0),
}


def room(z_p: Tensor) -> float:
    """What float32 may lose on logits of this size."""
    return 1e-5 + 4e-7 * float(z_p.abs().max()) * z_p.shape[1]


def excess(router: Any, z_p: Tensor, z_a: Tensor, ids: Tensor) -> float:
    """Nats that routing costs over the whole text beside the better path."""
    total = losses(mixed(router, z_p, z_a, ids=ids), ids).sum()
    return float(total - min(losses(log_probabilities(path), ids).sum() for path in (z_p, z_a)))


@settings(max_examples=120, deadline=None)
@given(text=texts())
@example(text=ADVERSARIAL["preserve first"])
@example(text=ADVERSARIAL["adapt first"])
@example(text=ADVERSARIAL["in turns"])
@example(text=ADVERSARIAL["a little"])
def test_bounded_forgetting(text: tuple[Tensor, Tensor, Tensor]) -> None:
    assert excess(PosteriorRouter((0.5, 0.5), 0.0), *text) <= math.log(2) + room(text[0])


@settings(max_examples=60, deadline=None)
@given(text=texts(), prior=st.sampled_from((0.01, 0.3, 0.9)))
def test_bounded_forgetting_with_another_prior(text: tuple[Tensor, Tensor, Tensor], prior: float) -> None:
    z_p, z_a, ids = text
    total = losses(mixed(PosteriorRouter((prior, 1 - prior), 0.0), z_p, z_a, ids=ids), ids).sum()
    assert total <= losses(log_probabilities(z_p), ids).sum() - math.log(prior) + room(z_p)
    assert total <= losses(log_probabilities(z_a), ids).sum() - math.log(1 - prior) + room(z_p)


def cheapest_switching(z_p: Tensor, z_a: Tensor, ids: Tensor, rate: float) -> float:
    """Least of what any sequence of paths loses, and its price: ln 1/rate a switch, ln 1/(1 - rate) a stay."""
    stay, switch = -math.log1p(-rate), -math.log(rate)
    best: tuple[float, float] | None = None
    for one, other in zip(*(losses(log_probabilities(path), ids)[0].tolist() for path in (z_p, z_a)), strict=True):
        before = best
        best = (one, other)
        if before is not None:
            best = (
                one + min(before[0] + stay, before[1] + switch),
                other + min(before[1] + stay, before[0] + switch),
            )
    assert best is not None
    return min(best)


@settings(max_examples=120, deadline=None)
@given(text=texts(), rate=st.sampled_from((1e-4, 0.01, 0.3)))
@example(text=ADVERSARIAL["preserve first"], rate=0.01)
@example(text=ADVERSARIAL["adapt first"], rate=0.01)
@example(text=ADVERSARIAL["in turns"], rate=0.01)
def test_bounded_forgetting_with_a_switch_rate(text: tuple[Tensor, Tensor, Tensor], rate: float) -> None:
    z_p, z_a, ids = text
    total = float(losses(mixed(PosteriorRouter((0.5, 0.5), rate), z_p, z_a, ids=ids), ids).sum())
    assert total <= cheapest_switching(z_p, z_a, ids, rate) + math.log(2) + room(z_p)
    stays = (ids.shape[1] - 2) * -math.log1p(-rate)
    assert excess(PosteriorRouter((0.5, 0.5), rate), z_p, z_a, ids) <= math.log(2) + stays + room(z_p)


def test_what_does_not_weigh_by_the_past_breaks_the_bound(monkeypatch: Any) -> None:
    """The negative controls of bounded_forgetting: the other router, another start, weights that stay, each path."""
    steady = first_then(*["adapt"] * 20, scale=30.0)
    assert excess(CosineRouter(-1.0, strict=True), *steady) > 100
    assert excess(PosteriorRouter((0.999, 0.001), 0.0), *steady) > math.log(2) + 1
    assert excess(PosteriorRouter((0.5, 0.5), 0.0), *steady) <= math.log(2) + room(steady[0])
    late = ADVERSARIAL["a little"]
    assert excess(PosteriorRouter((0.5, 0.5), 0.3), *late) > math.log(2) + 1, "a switch rate costs"
    monkeypatch.setattr(expanded_mixture, "log_odds_after", lambda before, evidence, *_: torch.zeros_like(evidence))
    assert excess(PosteriorRouter((0.5, 0.5), 0.0), *steady) > math.log(2) + 10


@pytest.mark.parametrize(
    ("family", "request_name"),
    mostly((("llama", "adapt"), ("gemma2", "deep"), ("gpt2", "preserve")), lambda own: own[0] != "gpt2"),
)
def test_bounded_forgetting_of_a_model(trio_of: Callable[..., Trio], family: str, request_name: str) -> None:
    check_bounded_forgetting(trio_of(family, request_name))


@torch.no_grad()
def check_bounded_forgetting(trio: Trio, **options: Any) -> None:
    base, expanded, model = trio.trained(**options)
    put_router(model, PosteriorRouter((0.5, 0.5), 0.0))
    for ids in (
        random_ids(4, 50).to(base.device),
        adversarial_text(base, expanded, 1.0),
        adversarial_text(base, expanded, -1.0),
    ):
        routed, old, new = (losses(log_probabilities(one(ids).logits), ids).sum(1) for one in (model, base, expanded))
        assert (routed <= torch.minimum(old, new) + math.log(2) + 1e-3).all()
        mean = model(ids, labels=ids).loss.double() * losses(log_probabilities(base(ids).logits), ids).numel()
        assert mean <= torch.minimum(old, new).sum() + math.log(2) * len(ids) + 1e-3
    assert (old - new).abs().max() < 20, "what was known first is unknown later"
    for side in (1.0, -1.0):
        ids = adversarial_text(base, expanded, side, turns=False)
        old, new = (losses(log_probabilities(one(ids).logits), ids).sum() for one in (base, expanded))
        assert (new - old) * side > 3 * math.log(2), "the control: the wrong path alone breaks the bound"


def adversarial_text(base: Any, expanded: Any, side: float, *, turns: bool = True) -> Tensor:
    """A text whose every token is the best one for one of two models, and for the other in the second half."""
    ids = random_ids(1, 1).to(base.device)
    for place in range(40):
        turn = -side if turns and place >= 20 else side
        old, new = (log_probabilities(one(ids).logits[:, -1]) for one in (base, expanded))
        ids = torch.cat((ids, ((old - new) * turn).argmax(-1, keepdim=True)), 1)
    return ids


# ---- training: what gradients reach


def plain_mixture(log_p: Tensor, z_a: Tensor, odds: Tensor) -> Tensor:
    """The mixture as torch would write it, with gradients for both paths."""
    return torch.logaddexp(
        functional.logsigmoid(odds)[..., None] + log_p.log_softmax(-1),
        functional.logsigmoid(-odds)[..., None] + z_a.log_softmax(-1),
    )


@pytest.mark.parametrize("at_once", (5, 2**20), ids=("in pieces", "at once"))
@pytest.mark.parametrize("odds", (-40.0, -3.0, -0.2, 0.0, 0.2, 3.0, 40.0))
@pytest.mark.parametrize("scale", (1.0, 30.0))
def test_the_gradient_of_the_mixture(odds: float, scale: float, at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(expanded_mixture, "CHUNK_ON_CPU", at_once)
    generator = torch.Generator().manual_seed(4)
    z_p, z_a = (torch.randn(6, 7, generator=generator) * scale for _ in range(2))
    # what a loss of probabilities sends back sums to zero in each row
    sent = torch.randn(6, 7, generator=generator)
    sent -= sent.mean(-1, keepdim=True)
    own, exact, odds_of = z_a.clone().requires_grad_(), z_a.double().requires_grad_(), torch.full((6,), odds)
    weights = functional.logsigmoid(torch.stack((odds_of, -odds_of), -1))
    out = mix([z_p.clone(), own], [z_p.logsumexp(-1), z_a.logsumexp(-1)], weights)
    wanted = plain_mixture(z_p.double(), exact, odds_of.double())
    torch.testing.assert_close(log_probabilities(out.detach()), wanted.detach(), atol=1e-4, rtol=1e-5)
    out.backward(sent)
    wanted.backward(sent.double())
    torch.testing.assert_close(own.grad.double(), exact.grad, atol=2e-5 * scale, rtol=1e-4)
    assert (own.grad.abs().max() < 1e-3) == (odds == 40.0 and scale == 1.0) or scale > 1, "the control"


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name in found.keys() | wanted.keys():
        # what is far from everything that was used has no gradient at all, or zeros
        one, other = (grads.get(name, torch.zeros(())) for grads in (found, wanted))
        torch.testing.assert_close(*torch.broadcast_tensors(one, other), atol=1e-4 * largest, rtol=1e-3, msg=name)


def prepare_training(trio: Trio) -> Any:
    """A trained model in training, without what would be random."""
    model = trio.routed().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


TRAINED = (("llama", "adapt"), ("gemma2", "deep"), ("gpt_neox", "without_up_stream"), ("olmo2", "preserve"))


@pytest.mark.parametrize(("family", "request_name"), TRAINED)
def test_training_on_the_mixture(trio_of: Callable[..., Trio], family: str, request_name: str) -> None:
    """Equal to autograd through the definition, where base path and weights are constants."""
    model = prepare_training(trio_of(family, request_name))
    ids = padded(random_ids(3, 13), (0, 3, 0))
    labels = ids["input_ids"].masked_fill(ids["attention_mask"] == 0, -100)
    found = gradients(model, model(**ids, labels=labels, use_cache=False).loss)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(found) <= trainable, "what is frozen has no gradient"
    z_p, z_a = model.path_logits(**ids)
    assert z_a.requires_grad and not z_p.requires_grad, "nothing trains the base model's path"
    restarts = find_restarts(ids["attention_mask"], None, 0, ids["input_ids"])
    evidence = losses(log_probabilities(z_a.detach()), ids["input_ids"]) - losses(
        log_probabilities(z_p), ids["input_ids"]
    )
    rows = zip(functional.pad(evidence, (1, 0)).tolist(), restarts.tolist(), strict=True)
    odds = torch.tensor([slow_odds(*row, 0.5, 0.05) for row in rows])
    mixture = plain_mixture(z_p, z_a, odds)
    loss = functional.cross_entropy(mixture[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    wanted = gradients(model, loss)
    assert_same_gradients(found, wanted)
    has_w12 = any(name.endswith("w12") for name in trainable)
    assert has_w12 == (request_name != "preserve")
    assert all(
        wanted[name].any() for name in trainable if name.endswith(("w12", "lm_head.expansions.default.up_weight"))
    )
    # the control: without the weights the gradient is another
    unweighted = gradients(
        model, functional.cross_entropy(z_a_again(model, ids).flatten(0, 1), labels[:, 1:].flatten())
    )
    assert max((unweighted[name] - wanted[name]).abs().max() for name in wanted) > 1e-4


def z_a_again(model: Any, ids: dict[str, Tensor]) -> Tensor:
    return model.path_logits(**ids)[1][:, :-1]


@pytest.mark.parametrize("routing", ("cosine", "strict"))
@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_training_on_equation_5(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    """Equal to autograd through the definition, where base path and decision are constants."""
    model, prompt = prepare_training(trio_of(family, "adapt", routing)), {"input_ids": random_ids(3, 13)}
    strict, head = routing == "strict", model.get_output_embeddings()
    with torch.no_grad():
        features = head_features(model, prompt)
        threshold = between(equation_5(head, features, 0.0, strict)[1])
    put_router(model, CosineRouter(threshold, strict))
    with torch.no_grad():
        inference = model.eval()(**prompt).logits
    output = model.train()(**prompt, labels=prompt["input_ids"], use_cache=False)
    assert torch.equal(output.logits, inference), "with and without gradients: other memory, the same numbers"
    found = gradients(model, output.loss)
    logits, cosines = equation_5(head, head_features(model, prompt), threshold, strict)
    assert (cosines > threshold).any() and (cosines <= threshold).any()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), prompt["input_ids"][:, 1:].flatten())
    wanted = {name: grad for name, grad in gradients(model, loss).items() if model.get_parameter(name).requires_grad}
    assert set(found) <= {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same_gradients(found, wanted)
    if strict:
        with torch.no_grad():
            put_router(model, CosineRouter(-1.0, strict=True))
        assert not model(**prompt).logits.requires_grad or not any(
            grad.any() for grad in gradients(model, model(**prompt, labels=prompt["input_ids"]).loss).values()
        ), "the base model's logits teach nothing"


@pytest.mark.parametrize("routing", ("posterior", "cosine"))
def test_gradient_checkpointing_of_two_paths(trio_of: Callable[..., Trio], routing: str) -> None:
    ids, found = random_ids(2, 11), []
    for is_checkpointed in (False, True):
        model = prepare_training(trio_of("llama", "deep", routing))
        if is_checkpointed:
            model.activation_checkpointing_enable()
        found.append(gradients(model, model(ids, labels=ids, use_cache=False).loss))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---- scores of tokens


@pytest.mark.parametrize("routing", ("posterior", "cosine", "strict"))
@pytest.mark.parametrize(
    ("family", "request_name"),
    mostly((("llama", "adapt"), ("gemma2", "deep"), ("gpt2", "adapt")), lambda own: own[0] != "gpt2"),
)
@torch.no_grad()
def test_scores_are_those_of_the_models(
    trio_of: Callable[..., Trio], family: str, request_name: str, routing: str, monkeypatch: Any
) -> None:
    base, expanded, model = trio_of(family, request_name, routing).trained()
    prompt = padded(random_ids(3, 13), (0, 4, 2))
    ids, kept = prompt["input_ids"], prompt["attention_mask"][:, :-1].bool()
    found = model.score_tokens(**prompt)
    preserve, adapt = found.sides.unbind(-1)
    weight = found.weights[..., 1]
    for scores, one in ((found.base, base), (adapt, expanded), (found.routed, model)):
        wanted = -losses(log_probabilities(one(**prompt).logits), ids)
        torch.testing.assert_close(scores[kept].double(), wanted[kept], atol=1e-4, rtol=1e-4)
    assert found.base.shape == found.routed.shape == (3, 12) and found.sides.shape == found.weights.shape == (3, 12, 2)
    assert ((weight >= 0) & (weight <= 1)).all()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3, 12))
    is_adapt = weight[kept] > 0.5
    assert is_adapt.any() and not is_adapt.all(), "the control"
    if routing == "posterior":
        mixture = torch.logaddexp(found.base + (1 - weight).log(), adapt + weight.log())
        torch.testing.assert_close(found.routed, mixture, atol=1e-4, rtol=1e-4)
        assert torch.equal(preserve, found.base)
        starts = kept & ~functional.pad(kept, (1, 0))[:, :-1]
        torch.testing.assert_close(weight[starts], torch.full((3,), 0.5))
    else:
        assert torch.equal(weight, (cosines_of(model, prompt)[:, :-1] <= model.choice.router.threshold).float())
        assert torch.equal(found.routed, torch.where(weight.bool(), adapt, preserve))
        assert torch.equal(preserve, found.base) == (routing == "strict")
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 2 * 5 * 97)
    for one, other in zip(model.score_tokens(**prompt)[:4], found[:4], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_scores_of_packed_and_short_texts(trio_of: Callable[..., Trio]) -> None:
    model = trio_of("llama").routed()
    ids, lengths = random_ids(2, 12), (5, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = model.score_tokens(ids, position_ids=positions)
    for start, text in zip((0, 5), ids.split(lengths, 1), strict=True):
        alone = model.score_tokens(text)
        for one, other in zip(packed[:4], alone[:4], strict=True):
            torch.testing.assert_close(one[:, start : start + text.shape[1] - 1], other, atol=1e-4, rtol=1e-4)
    base, sides, weights, routed = model.score_tokens(ids[:, :1])[:4]
    assert base.shape == routed.shape == (2, 0) and sides.shape == weights.shape == (2, 0, 2)


@pytest.mark.parametrize("request_name", ("adapt", "deep", "preserve"))
def test_backward_passes_through_the_adapt_path_alone(trio_of: Callable[..., Trio], request_name: str) -> None:
    """What cannot learn costs nothing: as many products as without a router."""
    ids, counts = random_ids(2, 12), []
    for path in (trio_of("llama", request_name).expanded_path, trio_of("llama", request_name).path):
        model = train(load(path, attn_implementation="eager")).train()
        loss = model(ids, labels=ids, use_cache=False).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
