"""Several expansions side by side in use: threads, files, caches of all kinds, beams, crops, assistants, gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, DynamicCache, StaticCache

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.modeling import expanded_routing
from tests.composed import LLAMA
from tests.conftest import load
from tests.each import mostly
from tests.modeling.test_routed_generation import DRIFT, assert_same_generation, in_pieces, logits, positions_of
from tests.modeling.test_training_modes import enable_checkpointing
from tests.routed import padded, prompts, random_ids

NAMES = ("medicine", "law", "late")
# full attention, sliding windows, both with a cap on logits
USED = pytest.mark.parametrize("family", mostly(("llama", "mistral", "gemma2"), "gemma2".__eq__))
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def model_of(made_of: Callable[..., Any]) -> Callable[..., Any]:
    """A base with three expansions, all of which are mixed."""

    def make(family: str = "llama", **router: Any) -> Any:
        model = made_of(family, NAMES).composed()
        model.set_expansion(list(NAMES), **({"switch_rate": 0.05} | router))
        return model

    return make


# ---- threads and files


def test_threads_run_their_own_choices(made_of: Callable[..., Any]) -> None:
    """Eight threads, four choices: the bits of one at a time."""
    model = made_of("llama", LLAMA).composed()
    choices = [None, "law", ["medicine", "law"], list(LLAMA)]
    prompt = list(prompts())[-1]

    def run(number: int) -> list[Tensor]:
        with model.use_expansion(choices[number % 4]), torch.no_grad():
            found = [model(**prompt).logits for _ in range(6)]
            found.append(model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0))
            found.append(model(**prompt, expansion_names=["chess", None]).logits)
        return found

    wanted = [run(number) for number in range(4)]
    assert not torch.equal(wanted[0][0], wanted[1][0]), "the control: choices differ"
    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(run, range(8))):
            assert all(map(torch.equal, found, wanted[number % 4])), choices[number % 4]
    assert model.active_expansion == "chess"
    assert model.running.thread.call is None, "nothing is left behind"


@torch.no_grad()
def test_a_forward_ends_as_it_began(made_of: Callable[..., Any]) -> None:
    """Another thread that chooses for the whole model meanwhile is heard by the next forward."""
    model, prompt = made_of("llama", LLAMA).composed(), list(prompts())[-1]
    for name, other in (("medicine", "music"), (["medicine", "music"], "medicine"), (None, "medicine")):
        model.set_expansion(other)
        afterwards = model(**prompt).logits
        model.set_expansion(name)
        wanted = model(**prompt).logits

        def choose(*_: Any, other: Any = other) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(model.set_expansion, other).result()

        hook = model.model.layers[1].register_forward_pre_hook(choose)
        found = model(**prompt).logits
        hook.remove()
        assert torch.equal(found, wanted)
        assert torch.equal(model(**prompt).logits, afterwards) and not torch.equal(wanted, afterwards)


@torch.no_grad()
def test_a_folder_of_many_expansions(made_of: Callable[..., Any], tmp_path: Path) -> None:
    """What is saved and loaded again is the same; what is missing is named; what is taken off is gone for good."""
    model = made_of("llama", LLAMA).composed()
    model.set_expansion(list(LLAMA))
    model.config.scale_surgery["router"] = model.choice.router.settings
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.expansions == list(LLAMA) and again.is_routing_enabled and again.choice == model.choice
    for prompt in prompts():
        # tensors of a file lie elsewhere in memory, which may show in the last bit of a row
        torch.testing.assert_close(again(**prompt).logits, model(**prompt).logits, rtol=0, atol=1e-6)
    trained = {name for name, own in again.named_parameters() if own.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if expansion_of(name)}
    assert list(again.trainable_parameters()) == list(LLAMA)
    again.delete_expansion("law")
    again.save_pretrained(tmp_path / "less")
    less = load(tmp_path / "less")
    assert less.expansions == ["medicine", "music", "chess"]
    assert {expansion_of(name) for name in less.state_dict()} == {None, *less.expansions}
    for one in (model, again, less):
        one.set_expansion(["medicine", "chess"])
    for prompt in prompts():
        for one in (again, less):
            torch.testing.assert_close(one(**prompt).logits, model(**prompt).logits, rtol=0, atol=1e-6)
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if expansion_of(name) == "law")
    save_file({name: own for name, own in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{re.escape(lost)} is missing"):
        load(tmp_path / "saved")


@torch.no_grad()
def test_without_a_head_it_is_the_base_until_an_expansion_is_chosen(
    made_of: Callable[..., Any], tmp_path: Path
) -> None:
    family = made_of("llama", LLAMA)
    family.composed().save_pretrained(tmp_path / "saved")
    model, prompt = AutoModel.from_pretrained(tmp_path / "saved").eval(), {"input_ids": random_ids(2, 13)}
    base = model(**prompt)[0]
    assert model.active_expansion is None and base.shape[-1] == model.config.hidden_size
    with model.use_expansion("law"):
        assert model(**prompt)[0].shape[-1] == model.config.hidden_size + model.stream_widths["law"]


@torch.no_grad()
def test_a_name_that_is_taken_is_not_added_again(model_of: Callable[..., Any]) -> None:
    model, prompt = model_of(), {"input_ids": random_ids(2, 13)}
    before = logits(model, prompt)
    with pytest.raises(ValueError, match="law: is an expansion of this model already"):
        model.add_expansion("law", model.plans["law"])
    assert torch.equal(logits(model, prompt), before) and model.expansions == list(NAMES)


@torch.no_grad()
def test_a_copy_is_of_its_own(model_of: Callable[..., Any]) -> None:
    model, prompt = model_of(), {"input_ids": random_ids(2, 13)}
    twin, wanted = copy.deepcopy(model), logits(model, prompt)
    torch.testing.assert_close(logits(twin, prompt), wanted, atol=1e-6, rtol=1e-5)
    twin.delete_expansion("law")
    with twin.use_expansion("late"):
        assert torch.equal(logits(model, prompt), wanted)
    assert model.expansions == list(NAMES) and twin.expansions == ["medicine", "late"]


# ---- generation, and caches


@USED
def test_greedy_and_beams_with_and_without_a_cache(model_of: Callable[..., Any], family: str) -> None:
    model, prompt = model_of(family), padded(random_ids(2, 9), (0, 4))
    uncached = model.generate(**prompt, **GREEDY, use_cache=False)
    assert_same_generation(model.generate(**prompt, **GREEDY), uncached)
    assert_same_generation(model.generate(**prompt, **GREEDY, prefill_chunk_size=4), uncached)
    beams = GREEDY | {"num_beams": 4, "num_return_sequences": 3, "output_scores": True}
    cached, uncached = model.generate(**prompt, **beams), model.generate(**prompt, **beams, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, atol=DRIFT, rtol=1e-4)
    # rows of one batch, each its own; beams of a row stay that row's
    rows = {"expansion_names": ["law", None], "num_beams": 3}
    found = model.generate(**prompt, **GREEDY | rows)
    assert torch.equal(found.sequences, model.generate(**prompt, **GREEDY | rows, use_cache=False).sequences)


@USED
def test_pieces_and_texts_that_are_packed_or_padded(
    model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model, prompt = model_of(family), padded(random_ids(3, 14), (5, 0, 2))
    whole = logits(model, prompt, position_ids=positions_of(prompt["attention_mask"]))
    with monkeypatch.context() as patch:
        # one call, whose logits are made some positions at a time
        patch.setattr(expanded_routing, "LOGITS_AT_ONCE", 4 * 3 * 5 * 97)
        made = logits(model, prompt, position_ids=positions_of(prompt["attention_mask"]))
    torch.testing.assert_close(made[:, 5:], whole[:, 5:], atol=DRIFT, rtol=1e-4)
    for sizes in ((1,) * 14, (6, 5, 1, 2), (13, 1)):
        # from the first token on that is no padding in any row
        torch.testing.assert_close(in_pieces(model, prompt, sizes)[:, 5:], whole[:, 5:], atol=DRIFT, rtol=1e-4)
    for keep in (1, 4, torch.tensor([5, 2, 13])):
        kept = whole[:, -keep:] if isinstance(keep, int) else whole[:, keep]
        found = logits(model, prompt, position_ids=positions_of(prompt["attention_mask"]), logits_to_keep=keep)
        torch.testing.assert_close(found[1:], kept[1:], atol=DRIFT, rtol=1e-4)
    ids, lengths = random_ids(2, 17), (6, 1, 10)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = logits(model, {"input_ids": ids}, position_ids=positions, use_cache=False)
    alone = torch.cat([logits(model, {"input_ids": text}) for text in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=DRIFT, rtol=1e-4)
    assert (logits(model, {"input_ids": ids}) - alone).abs().max() > 100 * DRIFT, "the control"


@USED
def test_caches_of_other_kinds(model_of: Callable[..., Any], family: str) -> None:
    """Static ones, one that knows nothing of the model's layers, one that is copied, emptied or begun again."""
    model, prompt = model_of(family), padded(random_ids(2, 9), (0, 4))
    wanted = model.generate(**prompt, **GREEDY)
    assert_same_generation(model.generate(**prompt, **GREEDY, cache_implementation="static"), wanted)
    cache = StaticCache(config=model.config, max_cache_len=30)
    for _ in range(2):
        assert_same_generation(model.generate(**prompt, **GREEDY, past_key_values=cache), wanted)
        cache.reset()
    ids = random_ids(2, 14)
    found = in_pieces(model, {"input_ids": ids}, (6, 1, 4, 3), DynamicCache())
    torch.testing.assert_close(found, logits(model, {"input_ids": ids}), atol=DRIFT, rtol=1e-4)
    first = model.generate(ids[:1], **GREEDY)
    asked = torch.cat((first.sequences, random_ids(1, 5, seed=9)), 1)
    continued = model.generate(asked, past_key_values=copy.deepcopy(first.past_key_values), **GREEDY)
    assert_same_generation(continued, model.generate(asked, **GREEDY))


@torch.no_grad()
def test_rows_of_the_cache_move_together(model_of: Callable[..., Any]) -> None:
    """Reordered, repeated and cropped: as if each row had been read so from its beginning."""
    model, ids, rows = model_of(), random_ids(3, 10, seed=1), torch.tensor([2, 0, 0])
    cache = model(ids[:, :7], use_cache=True).past_key_values
    cache.reorder_cache(rows)
    moved = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    for own, picked in ((moved, rows), (cache, rows[[0, 1, 2]])):
        found = model(ids[:, 7:], past_key_values=own).logits
        whole = logits(model, {"input_ids": torch.cat((ids[picked, :7], ids[:, 7:]), 1)})
        torch.testing.assert_close(found, whole[:, 7:], atol=DRIFT, rtol=1e-4)
    assert (found[0] - found[1]).abs().max() > DRIFT, "the control: rows differ"


@torch.no_grad()
def test_a_cropped_cache_goes_on(model_of: Callable[..., Any]) -> None:
    model, ids = model_of(), random_ids(2, 20)
    cache = model(ids[:, :10], use_cache=True).past_key_values
    for removed in (0, 3, 6):
        before = cache.get_seq_length()
        cache.crop(-removed)
        now = ids[:, before - removed : before + 4]
        # what several logits are asked for is remembered as long
        found = model(now, past_key_values=cache, logits_to_keep=now.shape[1]).logits
        wanted = logits(model, {"input_ids": ids[:, : before + 4]})[:, before - removed :]
        torch.testing.assert_close(found, wanted, atol=DRIFT, rtol=1e-4)
    cache.crop(-12)
    with pytest.raises(ValueError, match="from which more were taken back than it remembers"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, use_cache=True).logits)


@pytest.mark.parametrize("family", mostly(("llama", "mistral"), "mistral".__eq__))
def test_assisted_generation(made_of: Callable[..., Any], model_of: Callable[..., Any], family: str) -> None:
    """Guesses are taken back from the cache where they are wrong."""
    model, made = model_of(family), made_of(family, NAMES)
    options = {"max_new_tokens": 16, "do_sample": False}
    for prompt in (random_ids(1, 9), random_ids(1, 6).repeat(1, 2)):
        wanted = model.generate(prompt, **options)
        for count in (1, 5):
            assert torch.equal(model.generate(prompt, **options, prompt_lookup_num_tokens=count), wanted)
        if family == "llama":
            for name in (None, "law"):
                assert torch.equal(model.generate(prompt, **options, assistant_model=made.alone(name)), wanted)


def test_sampling_with_a_seed(model_of: Callable[..., Any]) -> None:
    model, found = model_of(), []
    for use_cache in (True, False):
        torch.manual_seed(11)
        options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 4, "use_cache": use_cache}
        found.append(model.generate(random_ids(1, 6), **options))
    assert torch.equal(*found) and len({tuple(row) for row in found[0].tolist()}) > 1


# ---- gradients


def trained(model: Any) -> Any:
    """The model in training, without what would be random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}


@pytest.mark.parametrize("rate", (0.0, 0.05))
@pytest.mark.parametrize(
    ("family", "count"), mostly((("llama", 2), ("llama", 3), ("gemma2", 3)), lambda own: own[1] == 3)
)
def test_training_on_the_mixture(model_of: Callable[..., Any], family: str, count: int, rate: float) -> None:
    """Equal to autograd through the definition, where the base's path and the weights are constants."""
    model, prompt = trained(model_of(family)), padded(random_ids(3, 13), (0, 3, 0))
    model.set_expansion(list(NAMES[:count]), switch_rate=rate)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    found = gradients(model, model(**prompt, labels=labels, use_cache=False).loss)
    paths = model.path_logits(**prompt)
    assert not paths[0].requires_grad and all(own.requires_grad for own in paths[1:])
    log_p = torch.stack([own.log_softmax(-1) for own in paths], -1)
    weights = torch.stack(list(followed(log_p.detach().double(), ids, mask, rate)), 1)
    mixture = (log_p + weights.float()[:, :, None].log()).logsumexp(-1)
    loss = functional.cross_entropy(mixture[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    wanted = gradients(model, loss)
    largest = max(float(own.abs().max()) for own in wanted.values())
    assert {expansion_of(name) for name in wanted} == set(NAMES[:count])
    for name in found.keys() | wanted.keys():
        one, other = (own.get(name, torch.zeros(())) for own in (found, wanted))
        torch.testing.assert_close(*torch.broadcast_tensors(one, other), atol=1e-4 * largest, rtol=1e-3, msg=name)
    # the control: with equal weights everywhere the gradient is another
    equal = torch.stack([own.log_softmax(-1) for own in model.path_logits(**prompt)], -1).logsumexp(-1)
    other = gradients(model, functional.cross_entropy(equal[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    assert max((other[name] - wanted[name]).abs().max() for name in wanted) > 1e-4


def followed(log_p: Tensor, ids: Tensor, mask: Tensor, rate: float) -> Iterator[Tensor]:
    """Weights of the paths after each token by their formula, token by token (b, k) each; log_p (b, t, v, k)."""
    count = log_p.shape[-1]
    weights = torch.full((len(ids), count), 1 / count, dtype=torch.float64)
    for step in range(ids.shape[1]):
        if step:
            likely = log_p[:, step - 1].gather(1, ids[:, step, None, None].expand(-1, 1, count))[:, 0].exp()
            after = weights * likely
            after = after / after.sum(-1, keepdim=True)
            after = (1 - rate) * after + rate / (count - 1) * (1 - after)
            is_inside = (mask[:, step] * mask[:, step - 1]).bool()[:, None]
            weights = torch.where(is_inside, after, torch.full_like(after, 1 / count))
        yield weights


@pytest.mark.parametrize("options", ({"use_reentrant": False}, {"use_reentrant": True}), ids=("hooks", "reentrant"))
@pytest.mark.parametrize("family", mostly(("llama", "gemma2"), "gemma2".__eq__))
def test_gradient_checkpointing(model_of: Callable[..., Any], family: str, options: dict[str, Any]) -> None:
    """What is computed again runs the paths that ran before, whatever was chosen meanwhile."""
    ids, found = random_ids(2, 11), []
    for is_checkpointed in (False, True):
        model = trained(model_of(family))
        if is_checkpointed:
            enable_checkpointing(model, options)
        with model.use_expansion(["law", "medicine"]):
            loss = model(ids, labels=ids, use_cache=False).loss
        model.set_expansion("late")
        found.append(gradients(model, loss))
    assert found[0].keys() == found[1].keys() and {expansion_of(name) for name in found[0]} == {"law", "medicine"}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_gradients_of_rows_reach_their_own_expansion(model_of: Callable[..., Any]) -> None:
    model, ids = trained(model_of()), random_ids(2, 11)
    found = gradients(model, model(ids, labels=ids, expansion_names=["law", None], use_cache=False).loss)
    reached = {expansion_of(name) for name, own in found.items() if own.any()}
    assert reached == {"law"}
    with model.use_expansion("law"):
        alone = gradients(model, model(ids[:1], labels=ids[:1], use_cache=False).loss)
    largest = max(float(own.abs().max()) for own in alone.values())
    for name, own in alone.items():
        # the loss is the mean over both rows
        torch.testing.assert_close(2 * found[name], own, atol=1e-4 * largest, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler are its own
@torch.no_grad()
def test_a_compiled_forward(model_of: Callable[..., Any]) -> None:
    """A graph for each choice, without a break."""
    model, prompt = model_of(), {"input_ids": random_ids(2, 13)}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for choice in (list(NAMES), "late"):
        model.set_expansion(choice)
        wanted = logits(model, prompt, use_cache=False)
        torch.testing.assert_close(logits(compiled, prompt, use_cache=False), wanted, atol=DRIFT, rtol=1e-4)
    # also one that a thread chose for itself, whatever the model is for others
    with compiled.use_expansion("law"):
        wanted = logits(model, prompt, use_cache=False)
        torch.testing.assert_close(logits(compiled, prompt, use_cache=False), wanted, atol=DRIFT, rtol=1e-4)
    assert (logits(compiled, prompt, use_cache=False) - wanted).abs().max() > 0.1, "the control: it was for that block"
