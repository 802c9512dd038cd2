"""Paths that weigh little are left out while a text is read token by token, and come back as if they had read it."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from scale_surgery.modeling.expanded_left_out import left_out_of
from scale_surgery.modeling.expanded_routing import state_of
from torch import Tensor
from transformers import StaticCache

from scale_surgery.modeling import expanded_composed
from scale_surgery.routing.watched import watched
from tests.composed import LLAMA, Made
from tests.routed import padded, random_ids

NAMES = (None, *LLAMA)
# the base alone, one that has a base stream of its own, and two of those that stand beside each other
INSIDE = [(), ("law",), ("medicine", "chess")]
SMALL = 1e-4


@pytest.fixture(scope="module")
def model(made_of) -> Any:
    made: Made = made_of("llama", LLAMA)
    return made.composed()


def prior_of(inside: tuple[str | None, ...]) -> list[float]:
    """Weights at the start that leave the others far below the threshold."""
    count = 1 + len(inside)
    rest = len(NAMES) - count
    return [SMALL if name and name not in inside else (1 - SMALL * rest) / count for name in NAMES]


def prompt_of(rows: int = 3, length: int = 6) -> dict[str, Tensor]:
    return padded(random_ids(rows, length), (2, 0, 1)[:rows])


def read(model: Any, prompt: dict[str, Tensor], *parts: Tensor) -> tuple[Any, list[Tensor]]:
    """Read a prompt and then some tokens at a time; the KV cache, and the logits after each call."""
    mask, found = prompt["attention_mask"], []
    cache = model(**prompt, use_cache=True, logits_to_keep=1).past_key_values
    for ids in parts:
        mask = torch.cat((mask, torch.ones_like(ids)), 1)
        places = mask.cumsum(1)[:, -ids.shape[1] :] - 1
        options = {"attention_mask": mask, "position_ids": places, "logits_to_keep": 1}
        found.append(model(ids, past_key_values=cache, **options).logits)
    return cache, found


def numbers(cache: Any) -> list[Tensor]:
    """All keys and values of the model's layers."""
    return [own for layer in cache.layers[:3] for own in (layer.keys, layer.values)]


@pytest.mark.parametrize("inside", INSIDE)
@torch.no_grad()
def test_who_comes_back_has_read_all(model, inside):
    """Keys, values and what each would weigh are bit for bit those of a mixture that read the same at once."""
    ids, prior = random_ids(3, 7, seed=1), prior_of(inside)
    with model.use_expansion(list(LLAMA), prior=prior, switch_rate=0, prune=0.01, lag=9):
        cache, _ = read(model, prompt_of(), *ids[:, :5].split(1, dim=1))
        left = left_out_of(cache)
        assert left.inside.names == inside and left.get_seq_length() == 5
        assert cache.layers[1].keys.shape[1] < 8 and cache.get_seq_length() == 11
        few = numbers(cache)
        mask = torch.cat((prompt_of()["attention_mask"], torch.ones_like(ids)), 1)
        options = {"attention_mask": mask, "position_ids": mask.cumsum(1)[:, -2:] - 1}
        last = model(ids[:, 5:], past_key_values=cache, **options).logits
    with model.use_expansion(list(LLAMA), prior=prior, switch_rate=0):
        whole, _ = read(model, prompt_of(), ids[:, :5], ids[:, 5:])
        logits = model(**prompt_of()).logits
    assert left_out_of(cache) is None and logits.shape[-1] == last.shape[-1]
    assert all(map(torch.equal, numbers(cache), numbers(whole)))
    assert torch.equal(state_of(cache).keys, state_of(whole).keys)
    assert torch.equal(state_of(cache).values[..., 1], state_of(whole).values[..., 0])
    mixing = state_of(cache).values[:, :, -1, 0]
    assert torch.allclose(mixing.exp().sum(1), torch.ones(3)) and not torch.allclose(
        mixing, state_of(whole).values[:, :, -1, 0]
    )
    assert not all(one.shape == other.shape for one, other in zip(few, numbers(whole), strict=True))


@pytest.mark.parametrize("inside", INSIDE)
@torch.no_grad()
def test_meanwhile_it_is_the_mixture_of_the_others(model, inside):
    """Token by token as under set_expansion with fewer names; the base alone bit for bit, as log-probabilities."""
    ids, prior = random_ids(3, 5, seed=1).split(1, dim=1), prior_of(inside)
    with model.use_expansion(list(LLAMA), prior=prior, switch_rate=0, prune=0.01):
        found = read(model, prompt_of(), *ids)[1]
    few = [own for own in prior if own > SMALL]
    options = {"prior": [own / sum(few) for own in few], "switch_rate": 0} if inside else {}
    with model.use_expansion(list(inside) or None, **options):
        expected = read(model, prompt_of(), *ids)[1]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5) if inside else torch.equal(one, other.log_softmax(-1))
    with model.use_expansion(list(LLAMA), switch_rate=0):
        assert not torch.allclose(read(model, prompt_of(), *ids)[1][-1].log_softmax(-1), found[-1].log_softmax(-1))


@torch.no_grad()
def test_where_none_weighs_little_nothing_changes(model):
    """A threshold below all weights: bit for bit the mixture without one."""
    ids, found = random_ids(3, 5, seed=1).split(1, dim=1), []
    for prune in (0, 1e-6):
        with model.use_expansion(list(LLAMA), switch_rate=0.05, prune=prune):
            cache, logits = read(model, prompt_of(), *ids)
        found.append(logits)
        assert left_out_of(cache) is None and state_of(cache).values.shape[-1] == 1 + (prune > 0)
    assert all(map(torch.equal, *found))


@torch.no_grad()
def test_no_path_weighs_less_than_its_share(model):
    """A threshold below the share that each path gets at every token leaves none out, and a higher one does."""
    ids = random_ids(1, 12, seed=2).split(1, dim=1)
    for prune, is_out in ((0.01, False), (0.2, True)):
        with model.use_expansion(list(LLAMA), prior=prior_of(("law",)), switch_rate=0.05, prune=prune, lag=64):
            cache, _ = read(model, prompt_of(1), *ids)
        assert (left_out_of(cache) is not None) is is_out


@torch.no_grad()
@pytest.mark.parametrize("inside", INSIDE)
def test_more_is_cropped_than_is_remembered(model, inside):
    ids = random_ids(3, 3, seed=1).split(1, dim=1)
    with model.use_expansion(list(LLAMA), prior=prior_of(inside), switch_rate=0, prune=0.01):
        cache, _ = read(model, prompt_of(), *ids)
        assert left_out_of(cache) is not None
        cache.crop(-4)
        with pytest.raises(ValueError, match=r"that this mixture has not read"):
            model(ids[0], past_key_values=cache)


@torch.no_grad()
def test_rows_of_the_cache_move_together(model):
    """Reordered, repeated and cropped while paths are out: as if all had read each row from its beginning."""
    ids, rows = random_ids(3, 9, seed=1), torch.tensor([2, 0, 0])
    with model.use_expansion(list(LLAMA), prior=prior_of(()), switch_rate=0, prune=0.01):
        cache, _ = read(model, {"input_ids": ids[:, :4], "attention_mask": torch.ones(3, 4)}, ids[:, 4:5], ids[:, 5:6])
        cache.reorder_cache(rows)
        moved = copy.deepcopy(cache)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 5]))
        after = [torch.cat((ids[rows, :6], ids[:, 6:8]), 1), torch.cat((ids[rows[[0, 1, 2]], :5], ids[:, 6:8]), 1)]
        model(ids[:, 6:8], past_key_values=moved), model(ids[:, 6:8], past_key_values=cache)
    with model.use_expansion(list(LLAMA), prior=prior_of(()), switch_rate=0):
        for own, text in zip((moved, cache), after, strict=True):
            expected = model(text, use_cache=True).past_key_values
            assert own.get_seq_length() == text.shape[1]
            assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(numbers(own), numbers(expected), strict=True))
            found = state_of(own).values[..., -1, 1]
            assert torch.allclose(found, state_of(expected).values[..., -1, 0], atol=1e-4)
            assert not torch.allclose(found, found[[1, 0, 2]], atol=1e-2), "the control: rows differ"


@torch.no_grad()
def test_generation(model):
    """Greedy, beams, several tokens tried at once, an emptied cache: where only the base is in, as the base."""
    prompt = {"input_ids": random_ids(1, 4).repeat(1, 3), "max_new_tokens": 12, "do_sample": False}
    kinds = ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3})
    with model.use_expansion(None):
        expected = [model.generate(**prompt, **kind) for kind in kinds]
    with model.use_expansion(list(LLAMA), prior=prior_of(()), switch_rate=0, prune=0.1, lag=3):
        assert all(
            torch.equal(model.generate(**prompt, **kind), own) for kind, own in zip(kinds, expected, strict=True)
        )
        found = model.generate(**prompt, return_dict_in_generate=True)
        cache = found.past_key_values
        assert left_out_of(cache) is not None and torch.equal(found.sequences, expected[0])
        cache.reset()
        again = model.generate(**prompt, past_key_values=cache)
        assert torch.equal(again, expected[0])
    with model.use_expansion(list(LLAMA), prior=prior_of(("law",)), switch_rate=0, prune=0.1, lag=3):
        assert not torch.equal(model.generate(**prompt), expected[0]), "the control"


@torch.no_grad()
def test_who_is_watched_is_not_left_out(model):
    """Where the weights of all paths are shown, a set of them for each token, and the answer of all."""
    prompt = {"input_ids": random_ids(1, 4), "max_new_tokens": 8, "do_sample": False}
    found = []
    for prune in (0, 0.1):
        with model.use_expansion(list(LLAMA), prior=prior_of(("law",)), switch_rate=0, prune=prune, lag=3):
            with watched(model) as weights:
                found.append((model.generate(**prompt).tolist(), weights))
            out = left_out_of(model.generate(**prompt, return_dict_in_generate=True).past_key_values)
        assert (out is not None) == (prune > 0), "the control: unwatched it does"
    assert found[0] == found[1] and len(weights) == 8 and all(sum(own) == pytest.approx(1) for own in weights)


@torch.no_grad()
def test_caches_that_do_not_hold_all_tokens_leave_nothing_out(model):
    ids, found = random_ids(2, 8), []
    for prune in (0, 0.01):
        with model.use_expansion(list(LLAMA), prior=prior_of(()), switch_rate=0, prune=prune):
            cache = StaticCache(model.config, max_cache_len=16)
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).logits)
            assert left_out_of(cache) is None
    assert torch.equal(*found)


@torch.no_grad()
def read_hostile(model: Any, name: str, length: int, **options: Any) -> tuple[Tensor, Tensor, list[bool]]:
    """Read, token by token, what a path predicts well while it is out, and badly while it is in.

    Returns:
        What the mixture loses more than each path; what each would have won while it was out; whether that one was in.
    """
    names, ids, number = list(LLAMA), random_ids(1, 1), NAMES.index(name)
    with model.use_expansion(names, switch_rate=0, **options):
        output = model(ids, use_cache=True)
        cache, lost, won, seen = output.past_key_values, torch.zeros(len(NAMES)), torch.zeros(len(NAMES)), []
        for _ in range(length):
            paths = torch.stack([own[0, -1].log_softmax(-1) for own in model.path_logits(ids)])
            left = left_out_of(cache)
            is_in = torch.tensor([not left or own is None or own in left.inside.names for own in NAMES])
            ahead = paths[number] - paths[0]
            token = ahead.argmin() if is_in[number] else ahead.argmax()
            more = paths[:, token] - output.logits[0, -1].log_softmax(-1)[token]
            lost, won, seen = lost + more, won + more.where(~is_in, 0.0), [*seen, bool(is_in[number])]
            ids = torch.cat((ids, token.view(1, 1)), 1)
            output = model(ids[:, -1:], past_key_values=cache)
    return lost, won, seen


def test_no_text_loses_more_than_its_share_against_the_base(model, monkeypatch):
    """Whatever a text does: ln(K + 1) against the base, and against another what that would have won while out."""
    lost, won, seen = read_hostile(model, "medicine", 100, prune=0.05, lag=16)
    assert lost[0] <= math.log(len(NAMES)) and won[0] == 0
    # the weights say so: each is its prior times exp(lost - won), and their sum is 1
    assert (lost - won).logsumexp(0) == pytest.approx(math.log(len(NAMES)), abs=1e-3)
    assert (lost > 1.7).any(), "the control: more is lost against one that was out"
    changes = [one for one, other in itertools.pairwise(seen) if one != other]
    assert len(changes) >= 3, "it goes out and comes back"

    def leave_out(choice: Any, heads: Any, cache: Any, ids: Tensor) -> Any:
        state_of(cache).values[..., 0] = state_of(cache).values[..., 1]
        return stock(choice, heads, cache, ids)

    stock = expanded_composed.leave_out
    monkeypatch.setattr(expanded_composed, "leave_out", leave_out)
    lost, _, _ = read_hostile(model, "medicine", 100, prune=0.05, lag=16)
    assert lost[0] > math.log(len(NAMES)) + 1, (
        "the negative control: paths come back as if they had predicted what nobody asked them"
    )
