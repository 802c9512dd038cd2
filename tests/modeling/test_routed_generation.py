"""A routed model in use: caches, beams, padding, packed texts, assistants, pipelines, a fresh process, and misuse."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, DynamicCache, StaticCache, pipeline

from scale_surgery.modeling import expanded_routing
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.modeling.expanded_state import RouterState, state_of
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from tests import routed
from tests.conftest import load
from tests.each import each_way, mostly, woven
from tests.routed import REQUESTS, Trio, padded, put_router, random_ids, train

trio_of = routed.trio_of
DRIFT = 2e-4  # float32: cached and uncached runs multiply matrices of other shapes
# full attention, sliding windows, both with a cap, learned positions, heads fused one by one
USED = ("llama", "mistral", "gemma2", "gpt2", "gpt_neox")
# a strict router leaves out an operation of one that is not
EACH_ROUTING = pytest.mark.parametrize("routing", mostly(("posterior", "cosine", "strict"), "strict".__ne__))
EACH = pytest.mark.parametrize(("family", "routing"), woven(USED[:3], ("posterior", "cosine", "strict"), among=USED))
LOOKED_UP = ("llama", "gemma3_text", "mistral", "gpt2")
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def logits(model: Any, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    return model(**prompt, **options).logits


@torch.no_grad()
def in_pieces(model: Any, prompt: dict[str, Tensor], sizes: tuple[int, ...], cache: Any = None) -> Tensor:
    """Logits of a prompt that is read piece by piece into one cache."""
    ids, found, start = prompt["input_ids"], [], 0
    mask = prompt.get("attention_mask", torch.ones_like(ids))
    for size in sizes:
        now = slice(start, start + size)
        output = model(
            input_ids=ids[:, now],
            attention_mask=mask[:, : now.stop],
            position_ids=positions_of(mask)[:, now],
            past_key_values=cache,
            use_cache=True,
        )
        cache, start, found = output.past_key_values, now.stop, [*found, output.logits]
    return torch.cat(found, 1)


def assert_same_generation(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, atol=DRIFT, rtol=1e-4)


# ---- pieces


@EACH
def test_pieces_give_what_the_whole_gives(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    model = trio_of(family, "adapt", routing).routed()
    prompt = padded(random_ids(3, 14), (5, 0, 2))
    whole = logits(model, prompt, position_ids=positions_of(prompt["attention_mask"]))
    for sizes in ((1,) * 14, (6, 5, 1, 2), (2, 12), (13, 1)):
        # from the first token on that is no padding in any row
        torch.testing.assert_close(in_pieces(model, prompt, sizes)[:, 5:], whole[:, 5:], atol=DRIFT, rtol=1e-4)


def test_a_router_that_forgets_is_noticed(trio_of: Callable[..., Trio], monkeypatch: Any) -> None:
    model = trio_of("llama").routed()
    prompt = {"input_ids": random_ids(2, 14)}
    whole = logits(model, prompt)
    torch.testing.assert_close(in_pieces(model, prompt, (1,) * 14), whole, atol=DRIFT, rtol=1e-4)
    remembering = RouterState.set
    monkeypatch.setattr(
        RouterState, "set", lambda self, evidence, weights, tokens: remembering(self, evidence, weights * 0, tokens)
    )
    assert (in_pieces(model, prompt, (1,) * 14) - whole).abs().max() > 10 * DRIFT


@EACH_ROUTING
@torch.no_grad()
def test_each_path_is_its_model_at_every_step(trio_of: Callable[..., Trio], routing: str) -> None:
    """Bit for bit, with a cache: pieces have the shapes that they have in the other models."""
    for family, request, dtype in (("llama", "adapt", "float32"), ("gemma3_text", "deep", "bfloat16")):
        base, expanded, model = trio_of(family, request, routing, dtype).trained()
        caches: dict[str, Any] = {"base": None, "expanded": None, "routed": DynamicCache(config=model.config)}
        ids, start = random_ids(3, 20), 0
        for size in (13, 1, 1, 4, 1):
            now, start = ids[:, start : start + size], start + size
            old = base(now, past_key_values=caches["base"], use_cache=True)
            new = expanded(now, past_key_values=caches["expanded"], use_cache=True)
            caches |= {"base": old.past_key_values, "expanded": new.past_key_values}
            preserve, adapt = model.path_logits(now, past_key_values=caches["routed"])
            assert torch.equal(preserve, old.logits), (family, size)
            assert torch.equal(adapt, new.logits), (family, size)
            assert not torch.equal(old.logits, new.logits), "the control"


# ---- generate


@EACH
def test_greedy_generation_with_and_without_a_cache(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    model = trio_of(family, "adapt", routing).routed()
    prompt = padded(random_ids(2, 9), (0, 4))
    cached, uncached = model.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY, use_cache=False)
    assert_same_generation(cached, uncached)
    assert_same_generation(model.generate(**prompt, **GREEDY, prefill_chunk_size=4), uncached)
    with model.routing_disabled():
        assert not torch.equal(model.generate(**prompt, **GREEDY).logits[-1], cached.logits[-1]), "the control"


@pytest.mark.parametrize(("family", "routing"), woven(("llama", "gemma2"), ("posterior", "cosine")))
def test_beam_search_with_and_without_a_cache(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    model = trio_of(family, "adapt", routing).routed()
    prompt = padded(random_ids(2, 7), (3, 0))
    options = GREEDY | {"num_beams": 4, "num_return_sequences": 3, "output_scores": True}
    cached, uncached = model.generate(**prompt, **options), model.generate(**prompt, **options, use_cache=False)
    assert cached.sequences.shape[0] == 6
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, atol=DRIFT, rtol=1e-4)


def test_a_state_that_does_not_follow_its_beam_is_noticed(trio_of: Callable[..., Trio], monkeypatch: Any) -> None:
    model = trio_of("llama").routed()
    options = GREEDY | {"num_beams": 4, "num_return_sequences": 4, "output_scores": True, "max_new_tokens": 16}
    wanted = model.generate(random_ids(1, 7), **options)
    monkeypatch.setattr(RouterState, "reorder_cache", lambda *_: None)
    found = model.generate(random_ids(1, 7), **options)
    same_text = torch.equal(found.sequences, wanted.sequences)
    assert not same_text or (found.sequences_scores - wanted.sequences_scores).abs().max() > 1e-3


@pytest.mark.parametrize("family", mostly(("llama", "gpt2"), "llama".__eq__))
def test_sampling_with_a_seed(trio_of: Callable[..., Trio], family: str) -> None:
    model = trio_of(family).routed()
    options = GREEDY | {"do_sample": True, "num_return_sequences": 4}
    found = []
    for use_cache in (True, False, True):
        torch.manual_seed(11)
        found.append(model.generate(random_ids(1, 6), **options, use_cache=use_cache).sequences)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) > 1, "the control: it is sampled"


@EACH
def test_a_padded_batch_is_each_prompt_alone(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    model = trio_of(family, "adapt", routing).routed()
    ids, counts = random_ids(3, 10), (4, 0, 7)
    batch = model.generate(**padded(ids, counts), **GREEDY)
    for row, count in enumerate(counts):
        alone = model.generate(ids[row : row + 1, count:], **GREEDY)
        own = alone.sequences[0, 10 - count :]
        assert torch.equal(batch.sequences[row, 10 : 10 + len(own)], own)
        # a text that ends alone goes on as padding in a batch
        for one, other in zip(batch.logits, alone.logits, strict=False):
            torch.testing.assert_close(one[row], other[0], atol=DRIFT, rtol=1e-4)


@EACH_ROUTING
def test_padding_behind_changes_nothing_before_it(trio_of: Callable[..., Trio], routing: str) -> None:
    model = trio_of("llama", "adapt", routing).routed()
    ids = random_ids(2, 9)
    whole = logits(model, {"input_ids": ids})
    behind = torch.cat((ids, torch.zeros(2, 4, dtype=torch.long)), 1)
    mask = torch.cat((torch.ones_like(ids), torch.zeros(2, 4, dtype=torch.long)), 1)
    torch.testing.assert_close(
        logits(model, {"input_ids": behind, "attention_mask": mask})[:, :9], whole, atol=DRIFT, rtol=1e-4
    )


@EACH_ROUTING
@pytest.mark.parametrize("family", mostly(("llama", "gemma3_text", "gpt_neox"), "llama".__ne__))
def test_packed_texts_are_texts_of_their_own(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    model = trio_of(family, "adapt", routing).routed()
    ids, lengths = random_ids(2, 17), (6, 1, 10)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = logits(model, {"input_ids": ids}, position_ids=positions, use_cache=False)
    alone = torch.cat([logits(model, {"input_ids": text}) for text in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=DRIFT, rtol=1e-4)
    assert (logits(model, {"input_ids": ids}) - alone).abs().max() > 100 * DRIFT, "the control"


@EACH
def test_logits_to_keep(trio_of: Callable[..., Trio], family: str, routing: str, monkeypatch: Any) -> None:
    model = trio_of(family, "adapt", routing).routed()
    prompt = padded(random_ids(2, 30), (3, 0))
    whole = logits(model, prompt)
    for keep in (1, 4, 30, 99):
        torch.testing.assert_close(logits(model, prompt, logits_to_keep=keep), whole[:, -keep:], atol=DRIFT, rtol=1e-4)
    for places in ([29], [5, 2, 29], [0, 1, 2], [4, 4]):
        keep = torch.tensor(places)
        torch.testing.assert_close(logits(model, prompt, logits_to_keep=keep), whole[:, keep], atol=DRIFT, rtol=1e-4)
    # what is not kept is scored in pieces
    monkeypatch.setattr(expanded_routing, "LOGITS_AT_ONCE", 2 * 7 * 97)
    torch.testing.assert_close(logits(model, prompt, logits_to_keep=2), whole[:, -2:], atol=DRIFT, rtol=1e-4)


@pytest.mark.parametrize("keep", (0, 1, 5, torch.tensor([3, 11])), ids=("all", "last", "a few", "places"))
def test_a_cache_goes_on_whatever_logits_were_kept(trio_of: Callable[..., Trio], keep: Any) -> None:
    model = trio_of("llama").routed()
    ids = random_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :15], use_cache=True, logits_to_keep=keep).past_key_values
        found = model(ids[:, 15:], past_key_values=cache).logits
    torch.testing.assert_close(found, logits(model, {"input_ids": ids})[:, 15:], atol=DRIFT, rtol=1e-4)


@pytest.mark.parametrize("family", ("llama", "mistral"))
def test_generation_goes_on_from_a_returned_cache(trio_of: Callable[..., Trio], family: str) -> None:
    model = trio_of(family).routed()
    ids = random_ids(1, 8)
    first = model.generate(ids, **GREEDY)
    asked = torch.cat((first.sequences, random_ids(1, 5, seed=9)), 1)
    continued = model.generate(asked, past_key_values=first.past_key_values, **GREEDY)
    assert_same_generation(continued, model.generate(asked, **GREEDY))


@pytest.mark.parametrize(("family", "count"), woven(LOOKED_UP[:3], (1, 5, 30), among=LOOKED_UP))
def test_prompt_lookup_gives_what_greedy_gives(trio_of: Callable[..., Trio], family: str, count: int) -> None:
    """Guesses are taken back from the cache where they are wrong."""
    model = trio_of(family).routed()
    prompt = random_ids(1, 10).repeat(1, 2)
    # learned positions end at 64, and guesses reach beyond the text
    options = {"max_new_tokens": 32 if family != "gpt2" or count < 30 else 14, "do_sample": False}
    wanted = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options, prompt_lookup_num_tokens=count), wanted)


@pytest.mark.parametrize("routing", mostly(("posterior", "cosine"), "posterior".__eq__))
def test_assisted_generation(trio_of: Callable[..., Trio], routing: str) -> None:
    base, expanded, model = trio_of("llama", "adapt", routing).trained()
    if routing == "posterior":
        put_router(model, PosteriorRouter((0.1, 0.9), 0.0))
    prompt, options = random_ids(1, 9), {"max_new_tokens": 16, "do_sample": False}
    wanted = model.generate(prompt, **options)
    for assistant in (base, expanded):
        assert torch.equal(model.generate(prompt, **options, assistant_model=assistant), wanted)
    if routing == "cosine":
        assert torch.equal(base.generate(prompt, **options, assistant_model=model), base.generate(prompt, **options))
    else:
        # it writes token by token, and is taken back by several
        with pytest.raises(ValueError, match="from which more were taken back than it remembers"):
            base.generate(prompt, **options, assistant_model=model)


@pytest.mark.parametrize("padding", ((0, 4), pytest.param((0, 0), marks=pytest.mark.slow)), ids=str)
@pytest.mark.parametrize("family", mostly(("llama", "gemma2", "gpt2"), "gpt2".__ne__))
def test_a_static_cache(trio_of: Callable[..., Trio], family: str, padding: tuple[int, int]) -> None:
    """Without padding masks are left out where all layers of a cache grow, and this one's do not."""
    model = trio_of(family).routed()
    prompt = padded(random_ids(2, 9), padding)
    wanted = model.generate(**prompt, **GREEDY)
    assert_same_generation(model.generate(**prompt, **GREEDY, cache_implementation="static"), wanted)
    cache = StaticCache(config=model.config, max_cache_len=30)
    for _ in range(2):
        assert_same_generation(model.generate(**prompt, **GREEDY, past_key_values=cache), wanted)
        cache.reset()


@pytest.mark.parametrize("only_full", (False, True))
@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_an_offloaded_cache_fetches_the_first_layer_after_the_last(
    trio_of: Callable[..., Trio], family: str, only_full: bool
) -> None:
    """On an accelerator a layer that was not fetched fails; here it is seen who is asked."""
    found = []
    for model in trio_of(family).trained()[1:]:
        cache = DynamicCache(config=model.config)
        model(random_ids(1, 6), past_key_values=cache, use_cache=True)
        cache.prefetch_stream, fetched = nullcontext(), []
        for index in range(3):
            cache.layers[index].prefetch = lambda index=index, fetched=fetched: fetched.append(index)
        cache.prefetch(3, only_non_sliding=only_full)
        found.append(fetched)
    assert found[0] == found[1] == [1 if only_full and family == "gemma2" else 0]


@pytest.mark.parametrize("family", ("mistral", "gemma3_text"))
def test_a_cache_without_a_config(trio_of: Callable[..., Trio], family: str) -> None:
    """Its layers are all alike, whatever the model's are."""
    model, prompt = trio_of(family).routed(), {"input_ids": random_ids(2, 14)}
    found = in_pieces(model, prompt, (6, 1, 4, 3), DynamicCache())
    torch.testing.assert_close(found, logits(model, prompt), atol=DRIFT, rtol=1e-4)


def test_a_copied_cache_is_of_its_own(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("llama").routed(), random_ids(2, 12)
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        copied = copy.deepcopy(cache)
        other = model(ids[:, :4], past_key_values=copied).logits
        found = model(ids[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(found, logits(model, {"input_ids": ids})[:, 8:], atol=DRIFT, rtol=1e-4)
    assert (found - other).abs().max() > DRIFT


def test_a_cropped_cache_goes_on(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("llama").routed(), random_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :10], use_cache=True).past_key_values
        for removed in (0, 3, 6):
            before = cache.get_seq_length()
            cache.crop(-removed)
            now = ids[:, before - removed : before + 4]
            # what several logits are asked for is remembered as long
            found = model(now, past_key_values=cache, logits_to_keep=now.shape[1]).logits
            wanted = logits(model, {"input_ids": ids[:, : before + 4]})[:, before - removed :]
            torch.testing.assert_close(found, wanted, atol=DRIFT, rtol=1e-4)


def test_a_cache_that_was_emptied_begins_anew(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("llama").routed(), random_ids(2, 9)
    with torch.no_grad():
        cache = model(random_ids(2, 12, seed=5), use_cache=True).past_key_values
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, use_cache=True).logits)
        cache.crop(-9)
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, use_cache=True).logits)


def test_many_guesses_can_be_taken_back(trio_of: Callable[..., Trio]) -> None:
    """As assisted generation asks: so many logits, and all guesses but the first few were wrong."""
    model, ids = trio_of("llama").routed(), random_ids(1, 60)
    with torch.no_grad():
        cache = model(ids[:, :10], use_cache=True, logits_to_keep=1).past_key_values
        model(ids[:, 10:51], past_key_values=cache, logits_to_keep=41)
        cache.crop(-38)
        found = model(ids[:, 13:20], past_key_values=cache).logits
    torch.testing.assert_close(found, logits(model, {"input_ids": ids})[:, 13:20], atol=DRIFT, rtol=1e-4)


# ---- other ways to load and to run


@pytest.mark.parametrize("routing", mostly(("posterior", "cosine", "strict"), "posterior".__eq__))
def test_a_pipeline_writes_text(stories: Path, tmp_path: Path, routing: str) -> None:
    expanded = expand(stories, REQUESTS["deep"], tmp_path / "expanded").path
    route = PosteriorRouter() if routing == "posterior" else CosineRouter(0.99, strict=routing == "strict")
    model = train(load(route_export(expanded, tmp_path / "routed", route).path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "routed")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["Once upon a time", "Lily and her dog went to the park. They"]
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [write(prompt, **options)[0]["generated_text"] for prompt in prompts]
    assert [found[0]["generated_text"] for found in write(prompts, batch_size=2, **options)] == alone
    assert all(
        text.startswith(prompt) and len(text) > len(prompt) + 5 for text, prompt in zip(alone, prompts, strict=True)
    )
    ids = tokenizer(prompts[0], return_tensors="pt").input_ids
    assert alone[0] == tokenizer.decode(model.generate(ids, **options)[0], skip_special_tokens=True)


def test_without_a_head_it_is_the_adapt_path(trio_of: Callable[..., Trio]) -> None:
    trio, ids = trio_of("llama", "adapt", "cosine"), random_ids(2, 9)
    alone, unrouted = (train(AutoModel.from_pretrained(path).eval()) for path in (trio.path, trio.expanded_path))
    with torch.no_grad():
        assert torch.equal(alone(ids)[0], unrouted(ids)[0])
        assert alone(ids)[0].shape[0] == 2
    assert not alone.is_routing_enabled
    with pytest.raises(ValueError, match="no head"):
        alone.enable_routing()


@EACH_ROUTING
def test_a_copy_is_of_its_own(trio_of: Callable[..., Trio], routing: str) -> None:
    model, prompt = trio_of("llama", "adapt", routing).routed(), {"input_ids": random_ids(2, 13)}
    twin, wanted = copy.deepcopy(model), logits(model, prompt)
    assert torch.equal(logits(twin, prompt), wanted)
    with twin.routing_disabled():
        assert torch.equal(logits(model, prompt), wanted)
        assert not torch.equal(logits(twin, prompt), wanted)
    with torch.no_grad():
        twin.get_parameter("lm_head.expansions.default.up_weight").add_(1.0)
    assert not torch.equal(logits(twin, prompt), wanted)
    assert torch.equal(logits(model, prompt), wanted)


def test_a_tuple_instead_of_an_output(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("llama").routed(), random_ids(2, 12)
    with torch.no_grad():
        found, cache = model(ids[:, :8], use_cache=True, return_dict=False)
        assert torch.equal(found, model(ids[:, :8]).logits)
        assert state_of(cache) is not None
        later = model(ids[:, 8:], past_key_values=cache, return_dict=False)[0]
    torch.testing.assert_close(later, logits(model, {"input_ids": ids})[:, 8:], atol=DRIFT, rtol=1e-4)


def test_the_loss_is_that_of_the_routed_logits(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("gemma2").routed(), random_ids(2, 12)
    with torch.no_grad():
        output = model(ids, labels=ids)
        wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(output.loss, wanted)
        with model.routing_disabled():
            assert not torch.allclose(model(ids, labels=ids).loss, wanted, atol=1e-3)


@EACH_ROUTING
def test_embeddings_instead_of_ids(trio_of: Callable[..., Trio], routing: str) -> None:
    model, ids = trio_of("llama", "deep", routing).routed(), random_ids(2, 9)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        if routing == "posterior":
            with pytest.raises(ValueError, match="inputs_embeds: the router scores tokens, expected input_ids"):
                model(inputs_embeds=embeddings)
        else:
            assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler are its own
@pytest.mark.parametrize("routing", ("posterior", "cosine"))
def test_a_compiled_forward(trio_of: Callable[..., Trio], routing: str) -> None:
    model, prompt = trio_of("llama", "adapt", routing).routed(), {"input_ids": random_ids(2, 13)}
    wanted = logits(model, prompt, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, prompt, use_cache=False), wanted, atol=DRIFT, rtol=1e-4)


# ---- misuse

FOREIGN = "that were not read under this choice of expansions"
TOO_FAR = "that this router has not read, or from which more were taken back than it remembers"


@EACH_ROUTING
@pytest.mark.parametrize("family", ("llama", "mistral"))
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(trio_of: Callable[..., Trio], family: str, routing: str) -> None:
    base, expanded, model = trio_of(family, "adapt", routing).trained()
    ids = random_ids(2, 9)
    for other in (base, expanded):
        cache = other(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=f"^past_key_values: holds 9 tokens {FOREIGN}.*Begin with an empty one"):
            model(ids[:, :1], past_key_values=cache)
    cache = model(ids, use_cache=True).past_key_values
    with model.routing_disabled():
        switched_off = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=FOREIGN):
        model(ids[:, :1], past_key_values=switched_off)
    assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all(), "the control"


@torch.no_grad()
def test_a_preserve_model_refuses_a_cache_without_a_state(trio_of: Callable[..., Trio]) -> None:
    """Its keys and values are those of the model without a router; what it has read is not known."""
    _, expanded, model = trio_of("llama", "preserve").trained()
    ids = random_ids(2, 9)
    with pytest.raises(ValueError, match=FOREIGN):
        model(ids[:, :1], past_key_values=expanded(ids, use_cache=True).past_key_values)
    cache = model(ids, use_cache=True).past_key_values
    with model.routing_disabled(), pytest.raises(ValueError, match=f"holds 9 tokens {FOREIGN}"):
        model(ids, past_key_values=cache)
    assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all(), "the control"


@torch.no_grad()
def test_a_cache_cropped_too_far_is_refused(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("llama").routed(), random_ids(2, 40)
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(-30)
    with pytest.raises(ValueError, match=f"^past_key_values: holds 10 tokens {TOO_FAR}"):
        model(ids[:, :1], past_key_values=cache)


def changed(trio: Trio, folder: Path, router: dict[str, Any]) -> Path:
    """A copy whose config.json was altered by hand."""
    shutil.copytree(trio.path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["scale_surgery"]["router"] = router
    (folder / "config.json").write_text(json.dumps(config))
    return folder


POSTERIOR, COSINE = {"router": "posterior", "switch_rate": 0.01}, {"router": "cosine", "strict": False}


@pytest.mark.parametrize(
    ("router", "wanted"),
    (
        (POSTERIOR | {"router": "oracle"}, " is {"),
        (POSTERIOR | {"router": None}, " is {"),
        (POSTERIOR | {"prior": "0.5"}, " is {"),
        (POSTERIOR | {"prior": [0.0, 1.0]}, ".prior: is [0.0, 1.0], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"prior": [0.5, 0.6]}, ".prior: is [0.5, 0.6], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"prior": [0.5]}, ".prior: is [0.5], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"prior": [0.4, 0.3, 0.3]}, ".prior: is [0.4, 0.3, 0.3], expected 2 positive weights"),
        (POSTERIOR | {"switch_rate": 1.0}, ".switch_rate: is 1.0, expected a share of at least 0 and less than 1"),
        (POSTERIOR | {"switch_rate": -0.1}, ".switch_rate: is -0.1, expected a share"),
        (POSTERIOR | {"switch_rate": float("nan")}, ".switch_rate: is nan, expected a share"),
        (POSTERIOR | {"threshold": 0.5}, " is {"),
        (COSINE | {"threshold": 1.5}, ".threshold: is 1.5, expected a cosine, from -1 to 1"),
        (COSINE | {"threshold": None}, " is {"),
        (COSINE | {"threshold": "0.5"}, " is {"),
        (COSINE | {"threshold": 0.5, "prior": [0.5, 0.5]}, " is {"),
    ),
    ids=str,
)
def test_a_router_altered_by_hand_is_refused(
    trio_of: Callable[..., Trio], tmp_path: Path, router: dict[str, Any], wanted: str
) -> None:
    folder = changed(trio_of("llama"), tmp_path / "changed", router)
    with pytest.raises(ValueError, match=r"^config\.json: scale_surgery\.router") as error:
        load(folder)
    assert f"config.json: scale_surgery.router{wanted}" in str(error.value)
    if wanted == " is {":
        assert "expected one of posterior, cosine with its numbers" in str(error.value)
        assert "Was it made by another release, or by hand?" in str(error.value)


def test_a_router_may_be_altered_by_hand(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    """The control of the test above: a router is data, and another one needs no other tensors."""
    for number, router in enumerate((POSTERIOR, POSTERIOR | {"prior": [0.2, 0.8]}, COSINE | {"threshold": 0.5})):
        model = load(changed(trio_of("llama"), tmp_path / str(number), router))
        assert model.is_routing_enabled and router.items() <= model.choice.router.settings.items()


def test_settings_of_a_call_are_not_said_to_be_of_a_file(trio_of: Callable[..., Trio]) -> None:
    model = load(trio_of("llama").path)
    with pytest.raises(ValueError, match=r"^switch_rate: is 2, expected a share"):
        model.set_expansion(["default"], switch_rate=2)
    with pytest.raises(ValueError, match=r"^router: is .*expected one of posterior, cosine with its numbers"):
        model.set_expansion(["default"], router="oracle")
    assert model.is_routing_enabled, "what was chosen before"


def test_a_model_without_a_router_says_so(trio_of: Callable[..., Trio]) -> None:
    expanded = load(trio_of("llama").expanded_path)
    ids = random_ids(1, 5)
    with pytest.raises(ValueError, match=r"This model has no router\. Write one that has: scale-surgery route-export"):
        expanded.enable_routing()
    model = load(trio_of("llama").path)
    for one, off in ((expanded, nullcontext), (model, model.routing_disabled), (model, model.expansion_disabled)):
        with off(), pytest.raises(ValueError, match=r"One path runs now\. Choose several with set_expansion"):
            one.score_tokens(ids)
    assert model.score_tokens(ids).base.shape == (1, 4)


@torch.no_grad()
def test_logits_of_paths_need_no_router(trio_of: Callable[..., Trio]) -> None:
    """The base, and the expansion that was chosen."""
    base, expanded, model = trio_of("llama", "adapt", "cosine").trained()
    ids = random_ids(1, 5)
    wanted = [one(ids, use_cache=False).logits for one in (base, expanded)]
    for one, off in ((expanded, nullcontext), (model, nullcontext), (model, model.routing_disabled)):
        with off():
            assert all(map(torch.equal, one.path_logits(ids), wanted))
    with model.expansion_disabled():
        assert len(model.path_logits(ids)) == 1 and torch.equal(model.path_logits(ids)[0], wanted[0])


@pytest.mark.slow
def test_several_threads_are_answered_each_for_itself(trio_of: Callable[..., Trio]) -> None:
    model = trio_of("llama").routed()
    prompts = [random_ids(1, length) for length in range(4, 12)]
    with torch.no_grad():
        wanted = [(model(ids).logits, model.path_logits(ids)[0]) for ids in prompts]

    def ask(index: int) -> bool:
        with torch.no_grad():
            ids = prompts[index % len(prompts)]
            found = model(ids).logits, model.path_logits(ids)[0]
        return all(map(torch.equal, found, wanted[index % len(prompts)]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(64)))
    assert model.running.thread.call is None, "nothing is left behind"


@each_way
def test_the_signature_is_the_stock_one(trio_of: Callable[..., Trio], family: str) -> None:
    """Trainers and generate learn from it what a model takes; positional calls work as before."""
    model, base = trio_of(family).routed(), load(trio_of(family).base_path)
    assert signature(type(model).forward) == signature(type(base).forward)
    ids = random_ids(2, 7)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(input_ids=ids).logits)
        with model.expansion_disabled():
            second = list(signature(type(base).forward).parameters)[2]
            given = DynamicCache() if second == "past_key_values" else torch.ones_like(ids)
            again = DynamicCache() if second == "past_key_values" else torch.ones_like(ids)
            assert torch.equal(model(ids, given).logits, base(ids, again).logits)
