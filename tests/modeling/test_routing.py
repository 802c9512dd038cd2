"""Two paths and two routers: what is equal bit for bit, what the routers compute, and what forgetting is bounded by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.modeling import expanded_routing
from scale_surgery.modeling.expanded_blocks import LinearBlocks
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.modeling.expanded_routing import (
    Features,
    PathFeatures,
    RouterContext,
    find_restarts,
    mix,
    posterior_weights,
    route,
)
from tests import routed
from tests.by_hand import expand_alone
from tests.conftest import load
from tests.each import mostly, woven
from tests.modeling.test_training_modes import enable_checkpointing
from tests.routed import (
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

trio_of = routed.trio_of


def test_a_switch_that_was_off_before_stays_off(trio_of: Callable[..., Trio]) -> None:
    trio, ids = trio_of("llama"), random_ids(2, 9)
    base, expanded, model = trio.trained()
    with torch.no_grad():
        old, new, mixture = (module(ids).logits for module in (base, expanded, model))
        model.enable_routing(False)
        with model.routing_disabled(), model.expansion_disabled():
            assert not model.is_expansion_enabled
        assert model.is_expansion_enabled and not model.is_routing_enabled
        assert torch.equal(model(ids).logits, new) and not torch.equal(new, old)
        model.enable_routing()
        assert torch.equal(model(ids).logits, mixture) and not torch.equal(mixture, new)
        for options, wanted in (({"routing_enabled": False}, new), ({"expansion_enabled": False}, old)):
            loaded = train(load(trio.path, **options))
            with loaded.expansion_disabled():
                pass
            assert torch.equal(loaded(ids).logits, wanted) and not loaded.is_routing_enabled
    for off in (model.routing_disabled, model.expansion_disabled):
        with pytest.raises(ZeroDivisionError), off():
            _ = 1 / 0
    assert model.is_routing_enabled


# ---- the cosine router: equation 5 of the paper


def equation_5(head: Any, features: Tensor, threshold: float, strict: bool) -> tuple[Tensor, Tensor]:
    """Routed logits and cosines in float64, with nothing of ours but the tensors."""
    width = head.weight.shape[1]
    z_p, z_a = features[..., :width].double() @ head.weight.double().T
    up_weight = head.expansions["default"].up_weight if "default" in head.expansions else None
    up = torch.zeros(2, 1) if up_weight is None else features[..., width:].double() @ up_weight.double().T
    cosine = (z_p * z_a).sum(-1) / (z_p.norm(dim=-1) * z_a.norm(dim=-1))
    preserve = z_p if strict else (z_p + z_a) / 2 + up[0]
    logits = torch.where((cosine > threshold)[..., None], preserve, z_a + up[1])
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap), cosine


@pytest.mark.parametrize(
    ("family", "routing"), woven(("llama", "gemma2"), ("cosine", "strict"), among=("llama", "gemma2", "gpt2", "phi3"))
)
@torch.no_grad()
def test_cosine_is_equation_5(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    base, expanded, model = trio_of(family, "adapt", routing).trained()
    head, strict = model.get_output_embeddings(), routing == "strict"
    for prompt in prompts(((1, 33), (3, 13))):
        features = head_features(model, prompt)
        threshold = between(equation_5(head, features, 0.0, strict)[1])
        put_router(model, CosineRouter(threshold, strict))
        wanted, cosines = equation_5(head, features, threshold, strict)
        logits, is_preserve = model(**prompt).logits, cosines > threshold
        assert is_preserve.any() and not is_preserve.all(), "the control: both sides are taken"
        torch.testing.assert_close(logits.double(), wanted, atol=2e-5, rtol=1e-5)
        assert torch.equal(logits[~is_preserve], expanded(**prompt).logits[~is_preserve])
        assert torch.equal(logits[is_preserve], base(**prompt).logits[is_preserve]) == strict


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
def test_a_cosine_of_one_is_not_above_a_threshold_of_one(trio_of: Callable[..., Trio], family: str) -> None:
    """Where both paths agree to the bit the cosine is 1, and must not be rounded up."""
    base, expanded, model = trio_of(family, "adapt", "strict").load()
    ids = random_ids(3, 60)
    with torch.no_grad():
        for module in (expanded, model):
            generator = torch.Generator().manual_seed(0)
            module.get_parameter("lm_head.expansions.default.up_weight").normal_(generator=generator)
        put_router(model, CosineRouter(1.0, strict=True))
        assert torch.equal(model(ids).logits, expanded(ids).logits)
        assert model.score_tokens(ids).weights[..., 1].eq(1).all()
        assert not torch.equal(base(ids).logits, expanded(ids).logits), "the control: the sides differ"


# ---- the posterior router: weights


def slow_weights(
    log_p: Tensor, restarts: list[bool], prior: tuple[float, ...], rate: float, before: Tensor | None = None
) -> Tensor:
    """Log weights (t, k) after each token, one after the other: v ∝ w p, then (1 - r) v + r / (k - 1) (1 - v)."""
    start, count = torch.tensor(prior, dtype=torch.float64).log(), len(prior)
    weights, rows = start if before is None else before.double(), []
    for gains, is_start in zip(log_p.double(), restarts, strict=True):
        weights = (weights + gains).log_softmax(-1)
        if rate > 0:
            others = [
                weights[[other_path for other_path in range(count) if other_path != path]].logsumexp(0)
                for path in range(count)
            ]
            given = torch.stack(others) + math.log(rate / (count - 1))
            weights = torch.logaddexp(weights + math.log1p(-rate), given)
        weights = start if is_start else weights
        rows.append(weights)
    return torch.stack(rows)


PRIORS = ((0.5, 0.5), (0.01, 0.99), (0.999, 0.001), (0.5, 0.3, 0.2), (0.1, 0.2, 0.3, 0.4))
RATES = (0.0, 1e-6, 0.01, 0.3, 0.5, 0.9)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from((0.1, 3.0, 1000.0)),
    starts=st.lists(st.sampled_from((False,) * 9 + (True,)), min_size=1, max_size=40),
    prior=st.sampled_from(PRIORS),
    rate=st.sampled_from(RATES),
    is_first=st.booleans(),
)
def test_weights_follow_their_formula(
    seed: int, scale: float, starts: list[bool], prior: tuple[float, ...], rate: float, is_first: bool
) -> None:
    generator, starts = torch.Generator().manual_seed(seed), [starts[0] or is_first, *starts[1:]]
    log_p = -scale * torch.rand(1, len(starts), len(prior), generator=generator)
    before = None if is_first else torch.randn(1, len(prior), generator=generator).log_softmax(-1)
    weights = posterior_weights(before, log_p, torch.tensor([starts]), prior, rate)
    assert weights.dtype == torch.float32 and weights.isfinite().all()
    wanted = slow_weights(log_p[0], starts, prior, rate, None if before is None else before[0])
    # float32 holds a sum of so many nats to so much
    torch.testing.assert_close(weights[0].double(), wanted, atol=1e-4 + 1e-6 * scale * len(starts), rtol=1e-5)


@pytest.mark.parametrize(("rate", "scale"), woven(RATES, (0.1, 3.0, 1000.0)))
def test_weights_over_a_long_text(rate: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    log_p = -scale * torch.rand(1, 2000, 2, generator=generator)
    restarts = torch.rand(1, 2000, generator=generator) < 0.003
    restarts[:, 0] = True
    assert restarts.sum() > 3, "the control: texts begin inside"
    weights = posterior_weights(None, log_p, restarts, (0.3, 0.7), rate)
    wanted = slow_weights(log_p[0], restarts[0].tolist(), (0.3, 0.7), rate)
    torch.testing.assert_close(weights[0].double(), wanted, atol=2e-3, rtol=1e-4)
    without = posterior_weights(None, log_p, restarts & (torch.arange(2000) == 0), (0.3, 0.7), rate)
    assert not torch.allclose(weights, without, atol=0.1), "the control: restarts matter"


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
    restarts = find_restarts(
        None if mask is None else torch.tensor([[int(sign) for sign in mask]]),
        None if positions is None else torch.tensor([positions]),
        call.get("past", 0),
        torch.zeros(1, length),
    )
    assert "".join(str(int(flag)) for flag in restarts[0]) == wanted


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
    call = RouterContext(ids, first_only(ids), None, slice(None), **options)
    path_features = tuple(PathFeatures(number, None, None) for number in range(len(paths)))
    features = Features(plain_head(paths[0].shape[-1]), tuple(path.clone() for path in paths), path_features, paths[0])
    with torch.no_grad():
        return log_probabilities(route(router, features, call))


def losses(log_p: Tensor, ids: Tensor) -> Tensor:
    """Nats of each token but the first."""
    return -log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


def slow_mixture(
    log_p: Tensor, ids: Tensor, restarts: Tensor, prior: tuple[float, ...], rate: float
) -> tuple[Tensor, Tensor]:
    """The definition, from log-probabilities (b, t, v, k) of all paths, and log weights, constants in float64."""
    gains = log_p.detach()[:, :-1].gather(2, ids[:, 1:, None, None].expand(-1, -1, 1, len(prior)))[:, :, 0]
    gains = functional.pad(gains, (0, 0, 1, 0))
    rows = zip(gains, restarts.tolist(), strict=True)
    weights = torch.stack([slow_weights(row_gains, starts, prior, rate) for row_gains, starts in rows])
    return (log_p + weights[:, :, None]).logsumexp(-1), weights


@pytest.mark.parametrize("at_once", (5, 2**20), ids=("in pieces", "at once"))
@pytest.mark.parametrize("rate", (0.0, 0.01, 0.5))
@pytest.mark.parametrize("scale", (1.0, 10.0, 300.0))
def test_posterior_is_the_bayes_mixture(scale: float, rate: float, at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(expanded_routing, "CHUNK_ON_CPU", at_once)
    generator = torch.Generator().manual_seed(2)
    z_p, z_a = (torch.randn(3, 30, 7, generator=generator) * scale for _ in range(2))
    ids = torch.randint(0, 7, (3, 30), generator=generator)
    mixture = mixed(PosteriorRouter((0.3, 0.7), rate), z_p, z_a, ids=ids)
    log_p = torch.stack([log_probabilities(logits) for logits in (z_p, z_a)], -1)
    wanted, _ = slow_mixture(log_p, ids, first_only(ids), (0.3, 0.7), rate)
    # beyond this a probability is no float32
    torch.testing.assert_close(mixture.clamp(min=-50), wanted.clamp(min=-50), atol=2e-4 * max(1, scale / 10), rtol=1e-5)
    assert (mixture - log_probabilities(z_p)).abs().max() > 0.1, "the control: it is neither path alone"
    assert (mixture - log_probabilities(z_a)).abs().max() > 0.1


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


@settings(max_examples=60, deadline=None)
@given(text=texts(), prior=st.sampled_from((0.5, 0.5, 0.01, 0.3, 0.9)))
@example(text=ADVERSARIAL["preserve first"], prior=0.5)
@example(text=ADVERSARIAL["adapt first"], prior=0.5)
@example(text=ADVERSARIAL["in turns"], prior=0.5)
@example(text=ADVERSARIAL["a little"], prior=0.5)
def test_bounded_forgetting(text: tuple[Tensor, Tensor, Tensor], prior: float) -> None:
    """At most ln 2 nats where both paths begin alike, and ln 1/w against a path that begins with the weight w."""
    z_p, z_a, ids = text
    total = losses(mixed(PosteriorRouter((prior, 1 - prior), 0.0), z_p, z_a, ids=ids), ids).sum()
    assert total <= losses(log_probabilities(z_p), ids).sum() - math.log(prior) + room(z_p)
    assert total <= losses(log_probabilities(z_a), ids).sum() - math.log(1 - prior) + room(z_p)


def cheapest_switching(z_p: Tensor, z_a: Tensor, ids: Tensor, rate: float) -> float:
    """Least of what any sequence of paths loses, and its price: ln 1/rate a switch, ln 1/(1 - rate) a stay."""
    stay, switch = -math.log1p(-rate), -math.log(rate)
    best: tuple[float, float] | None = None
    for preserve_loss, adapt_loss in zip(
        *(losses(log_probabilities(path), ids)[0].tolist() for path in (z_p, z_a)), strict=True
    ):
        before = best
        best = (preserve_loss, adapt_loss)
        if before is not None:
            best = (
                preserve_loss + min(before[0] + stay, before[1] + switch),
                adapt_loss + min(before[1] + stay, before[0] + switch),
            )
    assert best is not None
    return min(best)


@settings(max_examples=50, deadline=None)
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
    monkeypatch.setattr(expanded_routing, "log_odds_after", lambda before, evidence, *_: torch.zeros_like(evidence))
    assert excess(PosteriorRouter((0.5, 0.5), 0.0), *steady) > math.log(2) + 10


# ---- training: what gradients reach


@pytest.mark.parametrize("at_once", (5, 2**20), ids=("in pieces", "at once"))
@pytest.mark.parametrize("odds", (-40.0, -3.0, -0.2, 0.0, 0.2, 3.0, 40.0))
@pytest.mark.parametrize("scale", (1.0, 30.0))
def test_the_gradient_of_the_mixture(odds: float, scale: float, at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(expanded_routing, "CHUNK_ON_CPU", at_once)
    generator = torch.Generator().manual_seed(4)
    z_p, z_a = (torch.randn(6, 7, generator=generator) * scale for _ in range(2))
    # what a loss of probabilities sends back sums to zero in each row
    sent = torch.randn(6, 7, generator=generator)
    sent -= sent.mean(-1, keepdim=True)
    adapt_logits, exact, odds_of = z_a.clone().requires_grad_(), z_a.double().requires_grad_(), torch.full((6,), odds)
    weights = functional.logsigmoid(torch.stack((odds_of, -odds_of), -1))
    out = mix([z_p.clone(), adapt_logits], [z_p.logsumexp(-1), z_a.logsumexp(-1)], weights)
    log_p = torch.stack((z_p.double().log_softmax(-1), exact.log_softmax(-1)), -1)
    wanted = (log_p + weights.double()[:, None]).logsumexp(-1)
    torch.testing.assert_close(log_probabilities(out.detach()), wanted.detach(), atol=1e-4, rtol=1e-5)
    out.backward(sent)
    wanted.backward(sent.double())
    torch.testing.assert_close(adapt_logits.grad.double(), exact.grad, atol=2e-5 * scale, rtol=1e-4)
    assert (adapt_logits.grad.abs().max() < 1e-3) == (odds == 40.0 and scale == 1.0) or scale > 1, "the control"


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name in actual.keys() | wanted.keys():
        # what is far from everything that was used has no gradient at all, or zeros
        actual_gradient, wanted_gradient = (grads.get(name, torch.zeros(())) for grads in (actual, wanted))
        torch.testing.assert_close(
            *torch.broadcast_tensors(actual_gradient, wanted_gradient), atol=1e-4 * largest, rtol=1e-3, msg=name
        )


def prepare_training(model: Any) -> Any:
    """The model in training, without what would be random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


THREE = ("medicine", "law", "late")
TRAINED = [
    ("llama", ("law",)),
    ("gemma2", ("deep",)),
    ("gpt_neox", ("without_up_stream",)),
    ("olmo2", ("medicine",)),
    ("gemma2", THREE),
    ("llama", THREE),
]


# each of the first five families and names beside one rate
@pytest.mark.parametrize(
    ("family", "names", "rate"),
    mostly(
        [(*case, rate) for rate in (0.0, 0.05) for case in TRAINED],
        lambda case: case[:2] != TRAINED[-1] and TRAINED.index(case[:2]) % 2 == (case[2] > 0),
    ),
)
def test_training_on_the_mixture(made_of: Callable[..., Any], family: str, names: tuple[str, ...], rate: float) -> None:
    """Equal to the definition and to autograd through it, where the base's path and the weights are constants."""
    model, prompt = prepare_training(made_of(family, names).composed()), padded(random_ids(3, 13), (0, 3, 0))
    model.set_expansion(list(names), switch_rate=rate)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    model_gradients = gradients(model, model(**prompt, labels=labels, use_cache=False).loss)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(model_gradients) <= trainable, "what is frozen has no gradient"
    paths = model.path_logits(**prompt)
    assert not paths[0].requires_grad and all(path.requires_grad for path in paths[1:]), (
        "nothing trains the base's path"
    )
    log_p, prior = torch.stack([path.log_softmax(-1) for path in paths], -1), (1 / len(paths),) * len(paths)
    mixture, weights = slow_mixture(log_p.double(), ids, find_restarts(mask, None, 0, ids), prior, rate)
    wanted = gradients(model, functional.cross_entropy(mixture[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()))
    assert {expansion_of(name) for name in wanted} == set(names)
    assert_same_gradients(model_gradients, wanted)
    assert all(wanted[name].any() for name in trainable if name.endswith("w12") or name.startswith("lm_head."))
    # the control: with equal weights everywhere the gradient is another
    equal = torch.stack([path.log_softmax(-1) for path in model.path_logits(**prompt)], -1).logsumexp(-1)
    equal_gradients = gradients(model, functional.cross_entropy(equal[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    assert max((equal_gradients[name] - wanted[name]).abs().max() for name in wanted) > 1e-4
    with torch.no_grad():
        logits, scores = model.eval()(**prompt).logits, model.score_tokens(**prompt)
    following = ids[:, 1:, None, None].expand(-1, -1, 1, len(paths))
    for actual, defined in (
        (logits.log_softmax(-1), mixture),
        (scores.routed, mixture[:, :-1].gather(2, following[..., 0])[..., 0]),
        (scores.sides, log_p[:, :-1].gather(2, following)[:, :, 0]),
        (scores.weights, weights[:, :-1].exp()),
    ):
        real = mask[:, : actual.shape[1]].bool()
        torch.testing.assert_close(actual[real].double(), defined[real].double(), atol=2e-5, rtol=0)
    assert (weights[:, -1].exp().amax(-1) - weights[:, -1].exp().amin(-1)).min() > 0.01, "the control: not all alike"


@pytest.mark.parametrize(("family", "routing"), woven(("llama", "gemma2"), ("cosine", "strict")))
def test_training_on_equation_5(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    """Equal to autograd through the definition, where base path and decision are constants."""
    model, prompt = prepare_training(trio_of(family, "adapt", routing).routed()), {"input_ids": random_ids(3, 13)}
    strict, head = routing == "strict", model.get_output_embeddings()
    with torch.no_grad():
        features = head_features(model, prompt)
        threshold = between(equation_5(head, features, 0.0, strict)[1])
    put_router(model, CosineRouter(threshold, strict))
    with torch.no_grad():
        inference = model.eval()(**prompt).logits
    output = model.train()(**prompt, labels=prompt["input_ids"], use_cache=False)
    assert torch.equal(output.logits, inference), "with and without gradients: other memory, the same numbers"
    model_gradients = gradients(model, output.loss)
    logits, cosines = equation_5(head, head_features(model, prompt), threshold, strict)
    assert (cosines > threshold).any() and (cosines <= threshold).any()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), prompt["input_ids"][:, 1:].flatten())
    wanted = {name: grad for name, grad in gradients(model, loss).items() if model.get_parameter(name).requires_grad}
    assert set(model_gradients) <= {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same_gradients(model_gradients, wanted)
    if strict:
        with torch.no_grad():
            put_router(model, CosineRouter(-1.0, strict=True))
        assert not model(**prompt).logits.requires_grad or not any(
            grad.any() for grad in gradients(model, model(**prompt, labels=prompt["input_ids"]).loss).values()
        ), "the base model's logits teach nothing"


@pytest.mark.parametrize("options", ({"use_reentrant": False}, {"use_reentrant": True}), ids=("hooks", "reentrant"))
@pytest.mark.parametrize("family", mostly(("llama", "gemma2"), "gemma2".__eq__))
def test_gradient_checkpointing(made_of: Callable[..., Any], family: str, options: dict[str, Any]) -> None:
    """What is computed again runs the paths that ran before, whatever was chosen meanwhile."""
    ids, runs = random_ids(2, 11), []
    for is_checkpointed in (False, True):
        model = prepare_training(made_of(family, THREE).composed())
        if is_checkpointed:
            enable_checkpointing(model, options)
        with model.use_expansion(["law", "medicine"]):
            loss = model(ids, labels=ids, use_cache=False).loss
        model.set_expansion("late")
        runs.append(gradients(model, loss))
    assert runs[0].keys() == runs[1].keys() and {expansion_of(name) for name in runs[0]} == {"law", "medicine"}
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_gradients_of_rows_reach_their_own_expansion(made_of: Callable[..., Any]) -> None:
    model, ids = prepare_training(made_of("llama", THREE).composed()), random_ids(2, 11)
    row_gradients = gradients(model, model(ids, labels=ids, expansion_names=["law", None], use_cache=False).loss)
    assert {expansion_of(name) for name, gradient in row_gradients.items() if gradient.any()} == {"law"}
    with model.use_expansion("law"):
        alone = gradients(model, model(ids[:1], labels=ids[:1], use_cache=False).loss)
    # the loss is the mean over both rows
    assert_same_gradients({name: 2 * row_gradients[name] for name in alone}, alone)


# ---- scores of tokens


@pytest.mark.parametrize(
    ("family", "request_name", "routing"),
    mostly(
        [
            (*case, routing)
            for case in (("llama", "adapt"), ("gemma2", "deep"), ("gpt2", "adapt"))
            for routing in ("posterior", "cosine", "strict")
        ],
        [("llama", "adapt", "posterior"), ("gemma2", "deep", "cosine"), ("gemma2", "deep", "strict")].__contains__,
    ),
)
@torch.no_grad()
def test_scores_are_those_of_the_models(
    trio_of: Callable[..., Trio], family: str, request_name: str, routing: str, monkeypatch: Any
) -> None:
    base, expanded, model = trio_of(family, request_name, routing).trained()
    prompt = padded(random_ids(3, 13), (0, 4, 2))
    ids, kept = prompt["input_ids"], prompt["attention_mask"][:, :-1].bool()
    score = model.score_tokens(**prompt)
    preserve, adapt = score.sides.unbind(-1)
    weight = score.weights[..., 1]
    for log_p, module in ((score.base, base), (adapt, expanded), (score.routed, model)):
        wanted = -losses(log_probabilities(module(**prompt).logits), ids)
        torch.testing.assert_close(log_p[kept].double(), wanted[kept], atol=1e-4, rtol=1e-4)
    assert score.base.shape == score.routed.shape == (3, 12) and score.sides.shape == score.weights.shape == (3, 12, 2)
    assert ((weight >= 0) & (weight <= 1)).all()
    torch.testing.assert_close(score.weights.sum(-1), torch.ones(3, 12))
    is_adapt = weight[kept] > 0.5
    assert is_adapt.any() and not is_adapt.all(), "the control"
    if routing == "posterior":
        mixture = torch.logaddexp(score.base + (1 - weight).log(), adapt + weight.log())
        torch.testing.assert_close(score.routed, mixture, atol=1e-4, rtol=1e-4)
        assert torch.equal(preserve, score.base)
        starts = kept & ~functional.pad(kept, (1, 0))[:, :-1]
        torch.testing.assert_close(weight[starts], torch.full((3,), 0.5))
    else:
        assert torch.equal(weight, (cosines_of(model, prompt)[:, :-1] <= model.choice.router.threshold).float())
        assert torch.equal(score.routed, torch.where(weight.bool(), adapt, preserve))
        assert torch.equal(preserve, score.base) == (routing == "strict")
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 2 * 5 * 97)
    for chunked_scores, whole_scores in zip(model.score_tokens(**prompt)[:4], score[:4], strict=True):
        torch.testing.assert_close(chunked_scores, whole_scores, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_scores_of_packed_and_short_texts(trio_of: Callable[..., Trio]) -> None:
    model = trio_of("llama").routed()
    ids, lengths = random_ids(2, 12), (5, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = model.score_tokens(ids, position_ids=positions)
    for start, text in zip((0, 5), ids.split(lengths, 1), strict=True):
        alone = model.score_tokens(text)
        for packed_scores, text_scores in zip(packed[:4], alone[:4], strict=True):
            torch.testing.assert_close(
                packed_scores[:, start : start + text.shape[1] - 1], text_scores, atol=1e-4, rtol=1e-4
            )
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
