"""Paths in use: pieces, padding, packed texts, caches of all kinds, beams, crops, assistants; one path or a mixture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Mamba2Config, StaticCache
from transformers.cache_utils import CacheLayerMixin

from scale_surgery.modeling import expanded_model, expanded_routing
from scale_surgery.modeling.expanded_releases import CACHE, OLD_CACHES, find_cache
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.modeling.expanded_routing import RouterContext, RouterState, state_of
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from tests import routed
from tests.by_hand import make_base
from tests.conftest import load
from tests.each import mostly
from tests.routed import Trio, padded, put_router, random_ids, train
from tests.sweep.take import twin_config, write_base

trio_of = routed.trio_of
DRIFT = 2e-4  # float32: cached and uncached runs multiply matrices of other shapes
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
THREE = ("medicine", "law", "late")
# full attention, sliding windows, both with a cap, learned positions, heads fused one by one
USED = ("llama", "mistral", "gemma2", "gpt2", "gpt_neox")
# an expansion alone, its router beside the base, or three expansions
RUNS = ("alone", "posterior", "cosine", "strict", "three")
KEPT = {("gpt2", "alone"), ("llama", "posterior"), ("mistral", "cosine"), ("gemma2", "strict"), ("gemma2", "three")}
each_run = pytest.mark.parametrize(("family", "run"), mostly(product(USED, RUNS), KEPT.__contains__))
# a cosine router keeps no state: where states are at stake, one of the default run has none, and the others have one
STATES = {("gpt2", "alone"), ("llama", "posterior"), ("gemma2", "three")}
each_state = pytest.mark.parametrize(("family", "run"), mostly(product(USED, RUNS), STATES.__contains__))


@pytest.fixture
def model_of(trio_of: Callable[..., Trio], made_of: Callable[..., Any]) -> Callable[..., Any]:
    """A trained model of a family, which runs in one of RUNS."""

    def make(family: str = "llama", run: str = "three") -> Any:
        if run == "alone":
            return train(load(trio_of(family).expanded_path))
        if run != "three":
            return trio_of(family, "adapt", run).routed()
        model = made_of(family, THREE).composed()
        model.set_expansion(list(THREE), switch_rate=0.05)
        return model

    return make


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def logits(model: Any, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    return model(**prompt, **options).logits


@torch.no_grad()
def in_pieces(model: Any, prompt: dict[str, Tensor], sizes: tuple[int, ...], cache: Any = None) -> Tensor:
    """Logits of a prompt that is read piece by piece into one cache."""
    ids, pieces, start = prompt["input_ids"], [], 0
    mask = prompt.get("attention_mask", torch.ones_like(ids))
    for size in sizes:
        now = slice(start, start + size)
        output = model(
            input_ids=ids[:, now],
            attention_mask=mask[:, : now.stop],
            position_ids=positions_of(mask)[:, now],
            cache=cache,
            use_cache=True,
        )
        cache, start, pieces = output.cache, now.stop, [*pieces, output.logits]
    return torch.cat(pieces, 1)


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=DRIFT, rtol=1e-4)


def assert_same_generation(actual: Any, wanted: Any) -> None:
    assert torch.equal(actual.sequences, wanted.sequences)
    for first, second in zip(actual.logits, wanted.logits, strict=True):
        assert_close(first, second)


@each_run
def test_pieces_give_what_the_whole_gives(
    model_of: Callable[..., Any], family: str, run: str, monkeypatch: Any
) -> None:
    model, prompt = model_of(family, run), padded(random_ids(3, 14), (5, 0, 2))
    at = {"position_ids": positions_of(prompt["attention_mask"])}
    # from the first token on that is no padding in any row
    whole = logits(model, prompt, **at)
    for sizes in ((1,) * 14, (6, 5, 1, 2), (2, 12), (13, 1)):
        assert_close(in_pieces(model, prompt, sizes)[:, 5:], whole[:, 5:])
    for keep in (1, 4, 14, 99, torch.tensor([13]), torch.tensor([8, 5, 13]), torch.tensor([7, 7])):
        kept = whole[:, -keep:] if isinstance(keep, int) else whole[:, keep]
        assert_close(logits(model, prompt, logits_to_keep=keep, **at)[1:], kept[1:])
        # a cache goes on, whatever was kept
        with torch.no_grad():
            ids, kept = prompt["input_ids"][1:2], keep if isinstance(keep, int) else keep.clamp(max=9)
            cache = model(ids[:, :10], logits_to_keep=kept, use_cache=True).cache
            assert_close(model(ids[:, 10:], cache=cache).logits, whole[1:2, 10:])
    # one call, whose logits are made, and of those that are not kept scored, some positions at a time
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 4 * 3 * 5 * 97)
    assert_close(logits(model, prompt, **at)[:, 5:], whole[:, 5:])
    assert_close(logits(model, prompt, logits_to_keep=2, **at), whole[:, -2:])


def test_a_router_that_forgets_is_noticed(model_of: Callable[..., Any], monkeypatch: Any) -> None:
    model, prompt = model_of("llama", "posterior"), {"input_ids": random_ids(2, 14)}
    whole, remembering = logits(model, prompt), RouterState.set
    monkeypatch.setattr(
        RouterState, "set", lambda self, evidence, weights, tokens: remembering(self, evidence, weights * 0, tokens)
    )
    assert (in_pieces(model, prompt, (1,) * 14) - whole).abs().max() > 10 * DRIFT


@each_state
def test_texts_that_are_padded_or_packed_are_texts_of_their_own(
    model_of: Callable[..., Any], family: str, run: str
) -> None:
    model, ids, counts = model_of(family, run), random_ids(3, 10), (4, 0, 7)
    batch = model.generate(**padded(ids, counts), **GREEDY, pad_token_id=0)
    for row, count in enumerate(counts):
        alone = model.generate(ids[row : row + 1, count:], **GREEDY, pad_token_id=0)
        tokens = alone.sequences[0, 10 - count :]
        assert torch.equal(batch.sequences[row, 10 : 10 + len(tokens)], tokens)
        # a text that ends alone goes on as padding in a batch
        for first, second in zip(batch.logits, alone.logits, strict=False):
            assert_close(first[row], second[0])
    behind = torch.nn.functional.pad(ids, (0, 4))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 4))
    assert_close(
        logits(model, {"input_ids": behind, "attention_mask": mask})[:, :10], logits(model, {"input_ids": ids})
    )
    ids, lengths = random_ids(2, 17), (6, 1, 10)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = logits(model, {"input_ids": ids}, position_ids=positions, use_cache=False)
    alone = torch.cat([logits(model, {"input_ids": text}) for text in ids.split(lengths, 1)], 1)
    assert_close(packed, alone)
    assert (logits(model, {"input_ids": ids}) - alone).abs().max() > 100 * DRIFT, "the control"


@each_state
def test_generation_with_and_without_a_cache(model_of: Callable[..., Any], family: str, run: str) -> None:
    model, prompt = model_of(family, run), padded(random_ids(2, 9), (0, 4))
    uncached = model.generate(**prompt, **GREEDY, use_cache=False)
    assert_same_generation(model.generate(**prompt, **GREEDY), uncached)
    assert_same_generation(model.generate(**prompt, **GREEDY, prefill_chunk_size=4), uncached)
    with model.use_expansion(None):
        assert not torch.equal(model.generate(**prompt, **GREEDY).logits[-1], uncached.logits[-1]), "the control"
    beams = GREEDY | {"num_beams": 4, "num_return_sequences": 3, "output_scores": True}
    cached, uncached = (model.generate(**prompt, **beams, use_cache=use_cache) for use_cache in (True, False))
    assert cached.sequences.shape[0] == 6 and torch.equal(cached.sequences, uncached.sequences)
    assert_close(cached.sequences_scores, uncached.sequences_scores)
    # rows of one batch, each its own; beams of a row stay that row's
    rows = GREEDY | {"expansion_names": [model.expansions[0], None], "num_beams": 3}
    cached, uncached = (model.generate(**prompt, **rows, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 4, "use_cache": use_cache}
        sampled.append(model.generate(random_ids(1, 6), **options))
    assert torch.equal(*sampled) and len({tuple(row) for row in sampled[0].tolist()}) > 1


def test_a_state_that_does_not_follow_its_beam_is_noticed(model_of: Callable[..., Any], monkeypatch: Any) -> None:
    model = model_of("llama", "posterior")
    options = GREEDY | {"num_beams": 4, "num_return_sequences": 4, "output_scores": True, "max_new_tokens": 16}
    wanted = model.generate(random_ids(1, 7), **options)
    monkeypatch.setattr(RouterState, "reorder_cache", lambda *_: None)
    output = model.generate(random_ids(1, 7), **options)
    same_text = torch.equal(output.sequences, wanted.sequences)
    assert not same_text or (output.sequences_scores - wanted.sequences_scores).abs().max() > 1e-3


@each_state
def test_caches_of_other_kinds(model_of: Callable[..., Any], family: str, run: str) -> None:
    """Static ones, one that knows nothing of the model's layers, one that is copied, emptied or begun again."""
    model, prompt = model_of(family, run), padded(random_ids(2, 9), (0, 4))
    wanted = model.generate(**prompt, **GREEDY)
    assert_same_generation(model.generate(**prompt, **GREEDY, cache_implementation="static"), wanted)
    # the cache would be made before the first layer says how many heads it keeps
    chunked = model.generate(**prompt, **GREEDY, cache_implementation="static", prefill_chunk_size=3)
    assert torch.equal(chunked.sequences, wanted.sequences)
    cache = StaticCache(config=model.config, max_cache_len=30)
    for _ in range(2):
        assert_same_generation(model.generate(**prompt, **GREEDY, cache=cache), wanted)
        cache.reset()
    # without padding masks are left out where all layers of a cache grow, and this one's do not
    ids = random_ids(2, 14)
    static = model.generate(ids, **GREEDY, cache_implementation="static")
    assert_same_generation(static, model.generate(ids, **GREEDY))
    assert_close(in_pieces(model, {"input_ids": ids}, (6, 1, 4, 3), DynamicCache()), logits(model, {"input_ids": ids}))
    first = model.generate(ids[:1], **GREEDY)
    asked = torch.cat((first.sequences, random_ids(1, 5, seed=9)), 1)
    # a token that was written may be the one that pads
    later = GREEDY | {"attention_mask": torch.ones_like(asked)}
    wanted = model.generate(asked, **later)
    copied = copy.deepcopy(first.cache)
    with torch.no_grad():
        model(random_ids(1, 4), cache=copied)
    for cache in (copy.deepcopy(first.cache), first.cache):
        assert_same_generation(model.generate(asked, cache=cache, **later), wanted)


@pytest.mark.parametrize("only_full", (False, True))
@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_an_offloaded_cache_fetches_the_first_layer_after_the_last(
    trio_of: Callable[..., Trio], family: str, only_full: bool
) -> None:
    """On an accelerator a layer that was not fetched fails; here it is seen who is asked."""
    fetches = []
    for model in trio_of(family).trained()[1:]:
        cache = DynamicCache(config=model.config)
        model(random_ids(1, 6), cache=cache, use_cache=True)
        cache.prefetch_stream, fetched = nullcontext(), []
        for index in range(3):
            cache.layers[index].prefetch = lambda index=index, fetched=fetched: fetched.append(index)
        cache.prefetch(3, only_non_sliding=only_full)
        fetches.append(fetched)
    assert fetches[0] == fetches[1] == [1 if only_full and family == "gemma2" else 0]


@pytest.mark.parametrize("run", mostly(("posterior", "three"), "posterior".__eq__))
@torch.no_grad()
def test_rows_of_the_cache_move_together(model_of: Callable[..., Any], run: str) -> None:
    """Reordered, repeated and cropped: as if each row had been read so from its beginning."""
    model, ids, rows = model_of("llama", run), random_ids(3, 10, seed=1), torch.tensor([2, 0, 0])
    cache = model(ids[:, :7], use_cache=True).cache
    cache.reorder_cache(rows)
    moved = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    for changed_cache, picked in ((moved, rows), (cache, rows[[0, 1, 2]])):
        actual = model(ids[:, 7:], cache=changed_cache).logits
        whole = logits(model, {"input_ids": torch.cat((ids[picked, :7], ids[:, 7:]), 1)})
        assert_close(actual, whole[:, 7:])
    assert (actual[0] - actual[1]).abs().max() > DRIFT, "the control: rows differ"


@pytest.mark.parametrize("run", mostly(("posterior", "three"), "posterior".__eq__))
@torch.no_grad()
def test_a_cropped_cache_goes_on(model_of: Callable[..., Any], run: str) -> None:
    model, ids = model_of("llama", run), random_ids(2, 64)
    cache = model(ids[:, :10], use_cache=True).cache
    for removed in (0, 3, 6):
        before = cache.get_seq_length()
        cache.crop(-removed)
        now = ids[:, before - removed : before + 4]
        # what several logits are asked for is remembered as long
        actual = model(now, cache=cache, logits_to_keep=now.shape[1]).logits
        assert_close(actual, logits(model, {"input_ids": ids[:, : before + 4]})[:, before - removed :])
    # as assisted generation asks: so many logits, and all guesses but the first few were wrong
    read = cache.get_seq_length()
    model(ids[:, read : read + 41], cache=cache, logits_to_keep=41)
    cache.crop(-38)
    actual = model(ids[:, read + 3 : read + 10], cache=cache).logits
    assert_close(actual, logits(model, {"input_ids": ids})[:, read + 3 : read + 10])
    cache.crop(-20)
    with pytest.raises(ValueError, match=r"^The KV cache holds 12 tokens that this router has not read, or f"):
        model(ids[:, :1], cache=cache)
    cache.reset()
    assert torch.equal(model(ids, cache=cache).logits, model(ids, use_cache=True).logits)
    cache.crop(-64)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, use_cache=True).logits)


def test_a_cache_of_state_space_layers_alone_keeps_the_state(tmp_path: Path) -> None:
    """Such a cache counts no tokens; before transformers 5.24 its argument is called cache_params."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "num_heads": 4, "head_dim": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = make_base(tmp_path / "base", Mamba2Config(**sizes, state_size=8, n_groups=1, expand=2, **ends))
    wide = expand(base, Request("all"), tmp_path / "wide").path
    model = train(load(route_export(wide, tmp_path / "routed", PosteriorRouter(switch_rate=0.05)).path))
    prompt = random_ids(2, 9)
    made = model.generate(prompt, **GREEDY, min_new_tokens=8)
    assert_same_generation(made, model.generate(prompt, **GREEDY, min_new_tokens=8, use_cache=False))
    assert state_of(find_cache(made)).seen == find_cache(made).get_seq_length() == 16
    # a conversation goes on with its cache
    more = torch.cat((made.sequences, random_ids(2, 5)), 1)
    options = {"attention_mask": torch.ones_like(more), "min_new_tokens": 8, **GREEDY}
    going_on = model.generate(more, cache=find_cache(made), **options)
    assert_same_generation(going_on, model.generate(more, use_cache=False, **options))
    # states that were filled under another choice
    with model.routing_disabled():
        cache = find_cache(model(prompt, use_cache=True))
        assert model(prompt[:, :1], cache=copy.deepcopy(cache)).logits.isfinite().all(), "the control"
    with pytest.raises(ValueError, match="holds states of tokens that were not read under this choice"):
        model(prompt[:, :1], cache=cache)
    with model.expansion_disabled(), pytest.raises(ValueError, match="holds states of tokens that were not read"):
        model(prompt[:, :1], cache=cache)
    cache.expansion_choice = made_by(model)
    with pytest.raises(ValueError, match="holds states of tokens that this router has not read"):
        model(prompt[:, :1], cache=cache)


def made_by(model: Any) -> Any:
    """The mark that the present choice of a model leaves on a cache."""
    return find_cache(model(random_ids(1, 3), use_cache=True)).expansion_choice


@torch.no_grad()
def test_a_quantised_cache_is_warned_of(model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(expanded_model, "warn", said.append)
    model, options = model_of("llama", "alone"), {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    quantised = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    model.generate(random_ids(1, 5), **options)
    with model.expansion_disabled():
        model.generate(random_ids(1, 5), **options, **quantised)
    assert not said
    model.generate(random_ids(1, 5), **options, **quantised)
    assert "The KV cache is quantised" in said[0]


def test_the_state_of_a_router_stands_for_a_layer_with_keys(tmp_path: Path) -> None:
    """An offloaded cache fetches it in place of the model's first such layer, after the last."""
    base = write_base(twin_config("qwen3_next"), torch.float32, tmp_path / "base")
    model = load(route_export(expand(base, Request("last:1"), tmp_path / "wide").path, tmp_path / "routed").path)
    cache = find_cache(model(random_ids(1, 6), use_cache=True))
    linear = [layer for layer in cache.layers if not isinstance(layer, CacheLayerMixin)]
    assert cache.layers[0] in linear
    assert isinstance(state_of(cache).first, CacheLayerMixin)


@pytest.mark.parametrize(
    ("family", "run", "count"),
    mostly(
        [("llama", "posterior", 30), ("gemma3_text", "posterior", 1), ("mistral", "three", 5)],
        lambda case: case[0] == "llama",
    ),
)
def test_prompt_lookup_gives_what_greedy_gives(model_of: Callable[..., Any], family: str, run: str, count: int) -> None:
    """Guesses are taken back from the cache where they are wrong."""
    model, options = model_of(family, run), {"max_new_tokens": 32, "do_sample": False}
    prompt = random_ids(1, 10).repeat(1, 2)
    wanted = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options, prompt_lookup_num_tokens=count), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("run", ("posterior", "cosine", "three"))
def test_assisted_generation(trio_of: Callable[..., Trio], model_of: Callable[..., Any], run: str) -> None:
    model, (base, expanded, _) = model_of("llama", run), trio_of("llama").trained()
    if run == "posterior":
        put_router(model, PosteriorRouter((0.1, 0.9), 0.0))
    prompt, options = random_ids(1, 9), {"max_new_tokens": 16, "do_sample": False}
    wanted = model.generate(prompt, **options)
    for assistant in (base, expanded):
        assert torch.equal(model.generate(prompt, **options, assistant_model=assistant), wanted)
    if run == "cosine":
        assert torch.equal(base.generate(prompt, **options, assistant_model=model), base.generate(prompt, **options))
    elif run == "posterior":
        # it writes token by token, and is taken back by several
        with pytest.raises(ValueError, match="from which more were taken back than it remembers"):
            base.generate(prompt, **options, assistant_model=model)


WITHOUT_STATE = "^The text goes on .* no KV cache holds the router's state"


@pytest.mark.parametrize("run", mostly(("posterior", "three"), "posterior".__eq__))
@torch.no_grad()
def test_a_text_that_goes_on_without_its_state_is_refused(model_of: Callable[..., Any], run: str) -> None:
    model, ids = model_of("llama", run), random_ids(2, 14)
    positions = torch.arange(14)[None]
    later = {"position_ids": positions[:, 9:]}
    for options in ({"attention_mask": torch.ones_like(ids)}, later, {"attention_mask": torch.ones(2, 5), **later}):
        with pytest.raises(ValueError, match=WITHOUT_STATE):
            model(ids[:, 9:], **options)
    wanted = model(ids[:, 9:]).logits
    for options in ({"attention_mask": torch.ones_like(ids[:, 9:])}, {"position_ids": positions[:, :5]}):
        assert torch.equal(model(ids[:, 9:], **options).logits, wanted), "the control: a whole text"
    # padding may have any position, without a mask 1, and a router that reads no tokens needs no state
    assert model(ids[:, 9:], position_ids=torch.tensor([[1, 0, 1, 2, 3]])).logits.isfinite().all()
    padding = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 2), "position_ids": torch.tensor([[7, 0, 1, 2, 3]])}
    assert model(ids[:, 9:], **padding).logits.isfinite().all()
    cosine = model_of("llama", "cosine")
    assert cosine(ids[:, 9:], attention_mask=torch.ones_like(ids)).logits.isfinite().all()


@pytest.mark.parametrize("run", mostly(("posterior", "three"), "posterior".__eq__))
@torch.no_grad()
def test_a_mask_may_have_columns_for_tokens_to_come(model_of: Callable[..., Any], run: str) -> None:
    """As many as a cache of a fixed size has room for; columns of tokens that came before are another matter."""
    model, ids, mask = model_of("llama", run), random_ids(2, 12), torch.zeros(2, 30, dtype=torch.long)
    cache, given = StaticCache(config=model.config, max_cache_len=30), []
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 12)):
        mask[:, :end] = 1
        options = {"attention_mask": mask.clone(), "position_ids": torch.arange(begin, end)[None]}
        given.append(model(ids[:, begin:end], cache=cache, **options).logits)
    assert_close(torch.cat(given, 1), logits(model, {"input_ids": ids}))
    empty = StaticCache(config=model.config, max_cache_len=30)
    with pytest.raises(ValueError, match=WITHOUT_STATE):
        model(ids[:, 9:], cache=empty, attention_mask=mask)


def mask_of_pairs(texts: list[int], hidden: int) -> Tensor:
    """Which token sees which, where texts of these lengths stand in a row behind some padding (1, 1, t, t)."""
    blocks = [torch.ones(length, length).tril() for length in texts]
    seen = torch.block_diag(torch.eye(hidden), *blocks) if hidden else torch.block_diag(*blocks)
    return seen.bool()[None, None]


@pytest.mark.parametrize("form", ("bool", "added", "dict", "dict of none"))
@pytest.mark.parametrize("hidden", (0, 4))
@pytest.mark.parametrize("run", mostly(("posterior", "three"), "posterior".__eq__))
@torch.no_grad()
def test_a_mask_of_pairs_of_tokens_begins_texts(model_of: Callable[..., Any], run: str, hidden: int, form: str) -> None:
    """Also without position ids, and behind a cache; the router does not read on where attention does not."""
    model, ids = model_of("llama", run), random_ids(1, hidden + 16)
    first, second = ids[:, hidden : hidden + 7], ids[:, hidden + 7 :]
    wanted = torch.cat([logits(model, {"input_ids": text}) for text in (first, second)], 1)
    seen = mask_of_pairs([7, 9], hidden)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if form == "added" else seen
    if form == "dict":  # as for layers of two kinds, of which one has a window
        mask = {"full_attention": seen, "sliding_attention": seen.tril() & ~seen.tril(-3)}
        cuts = expanded_routing.find_cuts(mask, 0, ids.shape[1])
        assert torch.equal(cuts, expanded_routing.find_cuts(seen, 0, ids.shape[1]))
        mask = seen
    if form == "dict of none":
        for masks in ({"full_attention": None}, {"sliding_attention": seen, "full_attention": None}):
            assert not expanded_routing.find_cuts(masks, 0, ids.shape[1]).any()
    assert_close(logits(model, {"input_ids": ids}, attention_mask=mask)[:, hidden:], wanted)
    # as one text, they are read otherwise
    whole = logits(model, {"input_ids": ids[:, hidden:]})
    assert (whole - wanted).abs().max() > 100 * DRIFT
    cache = DynamicCache(config=model.config)
    start = {"input_ids": ids[:, : hidden + 9], "attention_mask": seen[:, :, : hidden + 9, : hidden + 9]}
    pieces = [logits(model, start, cache=cache)]
    rest = {"input_ids": ids[:, hidden + 9 :], "attention_mask": seen[:, :, hidden + 9 :]}
    pieces.append(logits(model, rest, cache=cache, position_ids=torch.arange(hidden + 9, hidden + 16)[None]))
    assert_close(torch.cat(pieces, 1)[:, hidden:], wanted)


def test_a_mask_that_cannot_be_read_needs_positions() -> None:
    inputs: dict[str, Any] = {"input_ids": random_ids(1, 5), "attention_mask": object()}
    taken = {"reads_tokens": True, "is_training": False}
    for more in (inputs, inputs | {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 2, 5])}):
        with pytest.raises(ValueError, match="expected position_ids beside them"):
            RouterContext.of(dict(more), 0, **taken)
        found = RouterContext.of(more | {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, 0, **taken)
        assert found.restarts.tolist() == [[True, False, True, False, False]]
        assert RouterContext.of(dict(more), 0, reads_tokens=False, is_training=False).ids is not None


def test_a_mask_for_each_head_is_refused(model_of: Callable[..., Any]) -> None:
    model, ids = model_of("llama", "posterior"), random_ids(1, 5)
    mask = mask_of_pairs([5], 0).expand(1, model.config.num_attention_heads, 5, 5)
    with pytest.raises(ValueError, match="has a part for each head of the base"):
        model(ids, attention_mask=mask)


@torch.no_grad()
def test_a_model_that_trains_keeps_the_state_if_a_cache_is_asked_for(model_of: Callable[..., Any]) -> None:
    model, ids = model_of("llama", "posterior"), random_ids(1, 9)
    wanted = logits(model, {"input_ids": ids})
    model.train()
    begun = model(ids[:, :5], use_cache=True)
    cache = find_cache(begun)
    assert_close(torch.cat((begun.logits, logits(model, {"input_ids": ids[:, 5:]}, cache=cache)), 1), wanted)


@torch.no_grad()
def test_blocks_that_end_in_another_order_are_refused(model_of: Callable[..., Any]) -> None:
    """Two generators that take turns in a thread would answer with each other's choice."""
    model = model_of("llama", "three")
    before = model.active_expansion

    def answers(name: str) -> Iterator[Any]:
        with model.use_expansion(name):
            yield model.active_expansion
            yield model.active_expansion

    first, second = answers("medicine"), answers("law")
    assert (next(first), next(second)) == ("medicine", "law")
    for generator in (first, second):
        with pytest.raises(RuntimeError, match="ended in another order than they began"):
            list(generator)
    assert model.active_expansion == before
    with model.use_expansion("law"), model.use_expansion("medicine"):
        assert model.active_expansion == "medicine"
    assert model.active_expansion == before


def test_a_cache_that_counts_no_tokens_is_refused(model_of: Callable[..., Any]) -> None:
    """As that of state-space models in transformers 4.57; a router that reads no tokens needs no count."""
    inputs = {"input_ids": random_ids(1, 5), "cache_params": object()}
    with pytest.raises(ValueError, match="a object, counts no tokens"):
        RouterContext.of(inputs, 0, reads_tokens=True, is_training=False)
    assert RouterContext.of(inputs, 0, reads_tokens=False, is_training=False).ids is not None


def test_a_release_that_renames_the_cache_is_noticed(model_of: Callable[..., Any], monkeypatch: Any) -> None:
    """Nothing among the inputs is known as a cache: generation with one is refused, without one it is as before."""
    model, prompt = model_of("llama", "posterior"), {"input_ids": random_ids(2, 9)}
    wanted = model.generate(**prompt, **GREEDY)
    monkeypatch.setattr(expanded_routing, "find_cache", lambda inputs: None)
    with pytest.raises(ValueError, match=WITHOUT_STATE):
        model.generate(**prompt, **GREEDY)
    assert_same_generation(model.generate(**prompt, **GREEDY, use_cache=False), wanted)


@pytest.mark.parametrize("run", ("alone", "posterior"))
@torch.no_grad()
def test_a_cache_may_have_the_name_of_any_release(model_of: Callable[..., Any], run: str) -> None:
    model, ids = model_of("llama", run), random_ids(2, 14)
    wanted = in_pieces(model, {"input_ids": ids}, (9, 5))
    for name in (CACHE, *OLD_CACHES):
        cache = find_cache(model(ids[:, :9], use_cache=True))
        assert torch.equal(model(ids[:, 9:], **{name: cache}).logits, wanted[:, 9:])
        assert cache.get_seq_length() == 14
    with pytest.raises(AssertionError):
        assert_close(model(ids[:, 9:]).logits, wanted[:, 9:])  # the control: without the cache


FOREIGN = "that were not read under this choice and strength of expansions"


@pytest.mark.parametrize(
    ("family", "request_name", "routing"),
    [("llama", "adapt", "posterior"), ("mistral", "adapt", "cosine"), ("llama", "preserve", "posterior")],
)
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(
    trio_of: Callable[..., Trio], family: str, request_name: str, routing: str
) -> None:
    """Also where keys and values are those of the model without a router: what it has read is not known."""
    base, expanded, model = trio_of(family, request_name, routing).trained()
    ids = random_ids(2, 9)
    for foreign_model in (base, expanded):
        cache = foreign_model(ids, use_cache=True).cache
        with pytest.raises(ValueError, match=f"^The KV cache holds 9 tokens {FOREIGN}.*Begin with an empty one"):
            model(ids[:, :1], cache=cache)
    cache = model(ids, use_cache=True).cache
    assert (state_of(cache) is not None) == (routing == "posterior")
    with model.routing_disabled():
        switched_off = model(ids, use_cache=True).cache
        with pytest.raises(ValueError, match=f"holds 9 tokens {FOREIGN}"):
            model(ids, cache=copy.deepcopy(cache))
    with pytest.raises(ValueError, match=FOREIGN):
        model(ids[:, :1], cache=switched_off)
    assert model(ids[:, :1], cache=cache).logits.isfinite().all(), "the control"
