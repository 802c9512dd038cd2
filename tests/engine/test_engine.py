"""The new engine beside the old one: the same bits, whatever runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.each import WAYS, each_way, woven
from tests.engine.made import with_expansions
from tests.modeling.test_training_modes import enable_checkpointing
from tests.routed import REQUESTS, ROUTINGS, Trio, prompts, random_ids
from tests.surgery.test_many_expansions import EDGES, GEMMA, MOE

GREEDY = {
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def same(one: Any, other: Any) -> None:
    for prompt in prompts():
        with torch.no_grad():
            assert bool((one(**prompt).logits == other(**prompt).logits).all()), prompt["input_ids"].shape


def same_generation(one: Any, other: Any) -> None:
    for prompt in prompts(((1, 5), (2, 7))):
        a, b = one.generate(**prompt, **GREEDY), other.generate(**prompt, **GREEDY)
        assert torch.equal(a.sequences, b.sequences)
        for x, y in zip(a.logits, b.logits, strict=True):
            assert bool((x == y).all())


def moved(model: Any, like: Any, name: str = "default") -> Any:
    """The model with the very expansion tensors of another: how they lie in memory decides the last bit."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key, tensor in like.named_parameters():
            if tensor.requires_grad:
                place, _, last = key.rpartition(".")
                modules[f"{place}.expansions.{name}"]._parameters[last].data = tensor.data
    return model


@pytest.mark.parametrize("request_name", REQUESTS)
@each_way
def test_one_expansion(trio_of: Callable[..., Trio], family: str, request_name: str) -> None:
    trio = trio_of(family, request_name)
    base, expanded, _ = trio.trained()
    model = moved(with_expansions(trio.base_path, {"default": trio.expanded_path}), expanded)
    assert model.active_expansion == "default"
    same(model, expanded)
    same_generation(model, expanded)
    with model.expansion_disabled():
        same(model, base)
        same_generation(model, base)
    same(model, expanded)


def choose(model: Any, old: Any) -> None:
    """Let the model route as an old one does."""
    own = dict(vars(old.router))
    router = "cosine" if "threshold" in own else "posterior"
    if router == "posterior":
        own["prior"] = (own["prior"], 1 - own["prior"])
    model.set_expansion(["default"], router=router, **own)


@pytest.mark.parametrize(
    ("family", "request_name", "routing"), woven(WAYS, ("adapt", "deep", "without_inner"), tuple(ROUTINGS))
)
def test_base_and_one_expansion(trio_of: Callable[..., Trio], family: str, request_name: str, routing: str) -> None:
    trio = trio_of(family, request_name, routing)
    _, expanded, _ = trio.trained()
    old = trio.routed()
    model = moved(with_expansions(trio.base_path, {"default": trio.expanded_path}), expanded)
    choose(model, old)
    for prompt in prompts():
        with torch.no_grad():
            wanted = old.path_logits(**prompt)
        if routing != "cosine":
            for one, other in zip(model.path_logits(**prompt), wanted, strict=True):
                assert bool((one == other).all())
        with torch.no_grad():
            one, other = model(**prompt).logits, old(**prompt).logits
        torch.testing.assert_close(one, other, rtol=0, atol=0 if routing != "posterior" else 1e-5)
        scores, known = model.score_tokens(**prompt), old.score_tokens(**prompt)
        torch.testing.assert_close(scores.routed, known.routed, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.base, known.base, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.weights[..., 1], known.weight, rtol=0, atol=1e-5)
    for prompt in prompts(((1, 5), (2, 7))):
        a, b = model.generate(**prompt, **GREEDY), old.generate(**prompt, **GREEDY)
        assert torch.equal(a.sequences, b.sequences)
        for x, y in zip(a.logits, b.logits, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


NAMES = ("medicine", "law", "music", "chess")
FAMILY_NAMES = [
    ("llama", NAMES, "float32"),
    *((family, ("medicine", "law", "late"), "float32") for family in WAYS[1:]),
    ("gemma3_text", GEMMA, "bfloat16"),
    ("qwen3_moe", MOE, "float32"),
    ("gptj", EDGES, "float32"),
    # its logits are capped, and a mixture is of capped ones
    ("gemma2", ("late",), "float32"),
]


@torch.no_grad()
@pytest.mark.parametrize(("family", "names", "dtype"), FAMILY_NAMES)
def test_many_expansions(made_of: Callable[..., Any], family: str, names: tuple[str, ...], dtype: str) -> None:
    """Each alone, side by side, mixed and by row: what the old composed model gives."""
    made = made_of(family, names, dtype)
    old, model = made.composed(), with_expansions(made.base, made.folders)
    for name in names:
        moved(model, old.expanded_models[name], name)
    for name in (None, *names):
        old.set_expansion(name), model.set_expansion(name)
        same(model, old)
    old.set_expansion(list(names)), model.set_expansion(list(names))
    for prompt in prompts():
        for one, other in zip(model.path_logits(**prompt), old.path_logits(**prompt), strict=True):
            assert bool((one == other).all())
        with torch.no_grad():
            one, other = model(**prompt).logits, old(**prompt).logits
        one, allowed = one.float().log_softmax(-1), 1e-5 if dtype == "float32" else 0.1
        torch.testing.assert_close(one, other.float(), rtol=0, atol=allowed)
        scores, known = model.score_tokens(**prompt), old.score_tokens(**prompt)
        torch.testing.assert_close(scores.routed, known.mixed, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.weights, known.weights, rtol=0, atol=1e-5)
    for prompt in prompts(((1, 5), (2, 7))):
        a, b = model.generate(**prompt, **GREEDY), old.generate(**prompt, **GREEDY)
        # in bfloat16 the old one rounded log-probabilities, the new one logits, which are smaller
        assert dtype == "bfloat16" or torch.equal(a.sequences, b.sequences)
    ids, rows = random_ids(3, 9), [names[0], None, names[-1]]
    with torch.no_grad():
        assert torch.equal(model(ids, expansion_names=rows).logits, old(ids, expansion_names=rows).logits)
    a = model.generate(ids, expansion_names=rows, **GREEDY)
    assert torch.equal(a.sequences, old.generate(ids, expansion_names=rows, **GREEDY).sequences)


def test_threads_run_their_own_choices(made_of: Callable[..., Any]) -> None:
    """Eight threads, four choices: the bits of one at a time."""
    made = made_of("llama", NAMES)
    model = with_expansions(made.base, made.folders)
    choices = [None, "law", ["medicine", "law"], list(NAMES)]
    prompt = list(prompts())[-1]

    def run(number: int) -> list[torch.Tensor]:
        with model.use_expansion(choices[number % 4]), torch.no_grad():
            found = [model(**prompt).logits for _ in range(6)]
            found.append(model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0))
        return found

    wanted = [run(number) for number in range(4)]
    assert not torch.equal(wanted[0][0], wanted[1][0]), "the control: choices differ"
    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(run, range(8))):
            assert all(map(torch.equal, found, wanted[number % 4])), choices[number % 4]
    assert model.active_expansion == "chess"


def gradients(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of what trains, by the names that the old engine gives."""
    ids = random_ids(3, 17)
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    model(ids, labels=ids, **options).loss.backward()
    model.eval()
    own = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.requires_grad}
    return {name.replace(".expansions.default", ""): own[name].clone() for name in own}


@pytest.mark.parametrize("request_name", REQUESTS)
@each_way
def test_gradients_of_one_expansion(trio_of: Callable[..., Trio], family: str, request_name: str) -> None:
    trio = trio_of(family, request_name)
    _, expanded, _ = trio.trained()
    model = moved(with_expansions(trio.base_path, {"default": trio.expanded_path}), expanded)
    wanted, found = gradients(expanded), gradients(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for one in (expanded, model):
        enable_checkpointing(one, {"use_reentrant": False})
    wanted, found = gradients(expanded), gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("family", "request_name", "routing"), woven(WAYS, ("adapt", "deep", "without_heads"), tuple(ROUTINGS))
)
def test_gradients_through_a_router(trio_of: Callable[..., Trio], family: str, request_name: str, routing: str) -> None:
    trio = trio_of(family, request_name, routing)
    _, expanded, _ = trio.trained()
    old = trio.routed()
    model = moved(with_expansions(trio.base_path, {"default": trio.expanded_path}), expanded)
    choose(model, old)
    wanted, found = gradients(old), gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_folder_of_many_expansions(made_of: Callable[..., Any], tmp_path: Path) -> None:
    """What is saved and loaded again is the same; what is missing is named."""
    made = made_of("llama", NAMES)
    model = with_expansions(made.base, made.folders)
    model.set_expansion(list(NAMES))
    model.config.scale_surgery["router"] = model.choice.router.settings
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert again.expansions == list(NAMES) and again.is_routing_enabled
    for prompt in prompts():
        # tensors of a file lie elsewhere in memory, which may show in the last bit of a row
        torch.testing.assert_close(model(**prompt).logits, again(**prompt).logits, rtol=0, atol=1e-6)
    assert {name for name, own in again.named_parameters() if own.requires_grad} == {
        name for name, _ in model.named_parameters() if ".expansions." in name
    }
    assert list(again.trainable_parameters()) == list(NAMES)
    again.delete_expansion("law")
    again.set_expansion(["medicine", "chess"])
    model.set_expansion(["medicine", "chess"])
    for prompt in prompts():
        torch.testing.assert_close(model(**prompt).logits, again(**prompt).logits, rtol=0, atol=1e-6)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    lost = next(name for name in tensors if ".expansions.law." in name)
    save_file({name: own for name, own in tensors.items() if name != lost}, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{re.escape(lost)} is missing"):
        type(model).from_pretrained(tmp_path / "saved")
