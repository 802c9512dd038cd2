"""Models of several paths as they are loaded, copied, saved, called and shared by threads, and what they refuse."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, DynamicCache, pipeline

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.modeling.expanded_releases import CACHE
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.modeling.expanded_routing import state_of
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from tests import routed
from tests.composed import LLAMA
from tests.conftest import edited, load
from tests.each import mostly
from tests.modeling.test_generation import DRIFT, logits
from tests.routed import REQUESTS, Trio, prompts, random_ids, train
from tests.tiny import FAMILIES

trio_of = routed.trio_of
PROMPT = {"input_ids": random_ids(2, 13)}


@pytest.fixture
def many(made_of: Callable[..., Any]) -> Any:
    """Four expansions of one base, none of them chosen."""
    return made_of("llama", LLAMA).composed()


# ---- threads, files and copies


def test_threads_run_their_own_choices(many: Any) -> None:
    """Eight threads, four choices: the bits of one at a time."""
    choices = [None, "law", ["medicine", "law"], list(LLAMA)]
    prompt = list(prompts())[-1]

    def run(number: int) -> list[Tensor]:
        with many.use_expansion(choices[number % 4]), torch.no_grad():
            outputs = [many(**prompt).logits for _ in range(3)]
            outputs.append(many.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0))
            outputs += [many(**prompt, expansion_names=["chess", None]).logits, many.path_logits(**prompt)[0]]
        return outputs

    wanted = [run(number) for number in range(4)]
    assert not torch.equal(wanted[0][0], wanted[1][0]), "the control: choices differ"
    with ThreadPoolExecutor(8) as pool:
        for number, outputs in enumerate(pool.map(run, range(8))):
            assert all(map(torch.equal, outputs, wanted[number % 4])), choices[number % 4]
    assert many.active_expansion == "chess"
    assert many.active.thread.context is None, "nothing is left behind"


@torch.no_grad()
def test_a_forward_ends_as_it_began(many: Any) -> None:
    """Another thread that chooses for the whole model meanwhile is heard by the next forward."""
    prompt = list(prompts())[-1]
    for name, next_name in (("medicine", "music"), (["medicine", "music"], "medicine"), (None, "medicine")):
        many.set_expansion(next_name)
        afterwards = many(**prompt).logits
        many.set_expansion(name)
        wanted = many(**prompt).logits

        def choose(*_: Any, next_name: Any = next_name) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(many.set_expansion, next_name).result()

        hook = many.model.layers[1].register_forward_pre_hook(choose)
        hooked_logits = many(**prompt).logits
        hook.remove()
        assert torch.equal(hooked_logits, wanted)
        assert torch.equal(many(**prompt).logits, afterwards) and not torch.equal(wanted, afterwards)


@torch.no_grad()
def test_a_folder_of_many_expansions(many: Any, tmp_path: Path) -> None:
    """What is saved and loaded again is the same; what is missing is named; what is taken off is gone for good."""
    many.set_expansion(list(LLAMA))
    many.config.scale_surgery["router"] = many.choice.router.settings
    many.save_pretrained(tmp_path / "saved")
    reloaded = load(tmp_path / "saved")
    assert reloaded.expansions == list(LLAMA) and reloaded.is_routing_enabled and reloaded.choice == many.choice
    # tensors of a file lie elsewhere in memory, which may show in the last bit of a row
    torch.testing.assert_close(reloaded(**PROMPT).logits, many(**PROMPT).logits, rtol=0, atol=1e-6)
    trained = {name for name, parameter in reloaded.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in many.named_parameters() if expansion_of(name)}
    headless = AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert headless.active_expansion is None and headless(**PROMPT)[0].shape[-1] == many.config.hidden_size
    with headless.use_expansion("law"):
        assert headless(**PROMPT)[0].shape[-1] == many.config.hidden_size + many.stream_widths["law"]
    reloaded.delete_expansion("law")
    reloaded.save_pretrained(tmp_path / "less")
    less = load(tmp_path / "less")
    assert less.expansions == ["medicine", "music", "chess"]
    assert {expansion_of(name) for name in less.state_dict()} == {None, *less.expansions}
    with pytest.raises(ValueError, match="chess: is an expansion of this model already"):
        less.add_expansion("chess", many.plans["chess"])
    wanted, *reduced_logits = (
        model.set_expansion(["medicine", "chess"]) or model(**PROMPT).logits for model in (many, reloaded, less)
    )
    for tensor in reduced_logits:
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-6)
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if expansion_of(name) == "law")
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{re.escape(lost)} is missing"):
        load(tmp_path / "saved")


def test_a_copy_is_of_its_own(many: Any, trio_of: Callable[..., Trio]) -> None:
    many.set_expansion(list(LLAMA))
    for model, name in ((trio_of("llama", "adapt", "cosine").routed(), "default"), (many, "law")):
        twin, wanted = copy.deepcopy(model), logits(model, PROMPT)
        torch.testing.assert_close(logits(twin, PROMPT), wanted, atol=1e-6, rtol=1e-5)
        with twin.use_expansion(name):
            assert torch.equal(logits(model, PROMPT), wanted)
            assert not torch.equal(logits(twin, PROMPT), wanted)
        with torch.no_grad():
            twin.get_parameter(f"lm_head.expansions.{name}.up_weight").add_(1.0)
        assert (logits(twin, PROMPT) - wanted).abs().max() > 0.1
        assert torch.equal(logits(model, PROMPT), wanted)
    twin.delete_expansion("law")
    assert many.expansions == list(LLAMA) and "law" not in twin.expansions


# ---- other ways to call


@pytest.mark.parametrize("routing", mostly(("posterior", "cosine", "strict"), "posterior".__eq__))
def test_a_pipeline_writes_text(tmp_path: Path, routing: str) -> None:
    expanded = expand(SHIPPED_MODEL, REQUESTS["deep"], tmp_path / "expanded").path
    route = PosteriorRouter() if routing == "posterior" else CosineRouter(0.99, strict=routing == "strict")
    model = train(load(route_export(expanded, tmp_path / "routed", route).path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "routed")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = ["Once upon a time", "Lily and her dog went to the park. They"]
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [write(prompt, **options)[0]["generated_text"] for prompt in asked]
    assert [completions[0]["generated_text"] for completions in write(asked, batch_size=2, **options)] == alone
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text, prompt in zip(alone, asked, strict=True))
    ids = tokenizer(asked[0], return_tensors="pt").input_ids
    assert alone[0] == tokenizer.decode(model.generate(ids, **options)[0], skip_special_tokens=True)


def test_without_a_head_it_is_the_adapt_path(trio_of: Callable[..., Trio]) -> None:
    trio, ids = trio_of("llama", "adapt", "cosine"), random_ids(2, 9)
    alone, unrouted = (train(AutoModel.from_pretrained(path).eval()) for path in (trio.path, trio.expanded_path))
    with torch.no_grad():
        assert torch.equal(alone(ids)[0], unrouted(ids)[0])
    assert not alone.is_routing_enabled
    with pytest.raises(ValueError, match="no head"):
        alone.enable_routing()


def test_a_tuple_and_a_loss(trio_of: Callable[..., Trio]) -> None:
    model, ids = trio_of("gemma2").routed(), random_ids(2, 12)
    with torch.no_grad():
        first_logits, cache = model(ids[:, :8], use_cache=True, return_dict=False)
        assert torch.equal(first_logits, model(ids[:, :8]).logits)
        assert state_of(cache) is not None
        later = model(ids[:, 8:], cache=cache, return_dict=False)[0]
        output = model(ids, labels=ids)
        torch.testing.assert_close(later, output.logits[:, 8:], atol=DRIFT, rtol=1e-4)
        wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(output.loss, wanted)
        with model.routing_disabled():
            assert not torch.allclose(model(ids, labels=ids).loss, wanted, atol=1e-3)


@pytest.mark.parametrize("routing", ("posterior", "cosine"))
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
@torch.no_grad()
def test_a_compiled_forward(many: Any) -> None:
    """A graph for each choice, without a break."""
    compiled = torch.compile(many, backend="aot_eager", fullgraph=True)
    for choice, router in (
        (["law", "music"], {}),
        (["law"], {"router": "cosine", "threshold": 0.9}),
        ("music", {}),
        (None, {}),
    ):
        many.set_expansion(choice, **router)
        wanted = logits(many, PROMPT, use_cache=False)
        torch.testing.assert_close(logits(compiled, PROMPT, use_cache=False), wanted, atol=DRIFT, rtol=1e-4)
    # also one that a thread chose for itself, whatever the model is for others
    with compiled.use_expansion("law"):
        wanted = logits(many, PROMPT, use_cache=False)
        torch.testing.assert_close(logits(compiled, PROMPT, use_cache=False), wanted, atol=DRIFT, rtol=1e-4)
    assert (logits(compiled, PROMPT, use_cache=False) - wanted).abs().max() > 0.1, "the control: it was for that block"


@pytest.mark.parametrize("family", mostly(FAMILIES, ("llama", "gpt2").__contains__))
def test_the_signature_is_the_stock_one(trio_of: Callable[..., Trio], family: str) -> None:
    """Trainers and generate learn from it what a model takes; positional calls work as before."""
    model, base = trio_of(family).routed(), load(trio_of(family).base_path)
    assert signature(type(model).forward) == signature(type(base).forward)
    ids = random_ids(2, 7)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(input_ids=ids).logits)
        with model.expansion_disabled():
            second = list(signature(type(base).forward).parameters)[2]
            given, repeated = (DynamicCache() if second == CACHE else torch.ones_like(ids) for _ in range(2))
            assert torch.equal(model(ids, given).logits, base(ids, repeated).logits)


# ---- misuse


POSTERIOR, COSINE = {"router": "posterior", "switch_rate": 0.01}, {"router": "cosine", "strict": False}


def changed(trio: Trio, folder: Path, router: dict[str, Any]) -> Path:
    """A copy whose config.json was altered by hand."""
    shutil.copytree(trio.path, folder)
    with edited(folder / "config.json") as config:
        config["scale_surgery"]["router"] = router
    return folder


@pytest.mark.parametrize(
    ("router", "wanted"),
    (
        (POSTERIOR | {"router": "oracle"}, " is {"),
        (POSTERIOR | {"router": None}, " is {"),
        (POSTERIOR | {"prior": "0.5"}, " is {"),
        (POSTERIOR | {"prior": [0.0, 1.0]}, ".prior: is [0.0, 1.0], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"prior": [0.5, 0.6]}, ".prior: is [0.5, 0.6], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"prior": [0.5]}, ".prior: is [0.5], expected 2 positive weights of sum 1"),
        (POSTERIOR | {"switch_rate": 1.0}, ".switch_rate: is 1.0, expected a share of at least 0 and less than 1"),
        (POSTERIOR | {"switch_rate": -0.1}, ".switch_rate: is -0.1, expected a share"),
        (POSTERIOR | {"switch_rate": float("nan")}, ".switch_rate: is nan, expected a share"),
        (POSTERIOR | {"threshold": 0.5}, " is {"),
        (COSINE | {"threshold": 1.5}, ".threshold: is 1.5, expected a cosine, from -1 to 1"),
        (COSINE | {"threshold": None}, " is {"),
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
    # settings of a call are not said to be of a file
    with pytest.raises(ValueError, match=r"^switch_rate: is 2, expected a share"):
        model.set_expansion(["default"], switch_rate=2)
    with pytest.raises(ValueError, match=r"^router: is .*expected one of posterior, cosine with its numbers"):
        model.set_expansion(["default"], router="oracle")
    assert model.choice.router == CosineRouter(0.5), "what was chosen before"


@torch.no_grad()
def test_without_a_router_there_are_paths_and_no_scores(trio_of: Callable[..., Trio]) -> None:
    base, expanded, model = trio_of("llama", "adapt", "cosine").trained()
    ids = random_ids(1, 5)
    wanted = [reference(ids, use_cache=False).logits for reference in (base, expanded)]
    with pytest.raises(ValueError, match=r"This model has no router\. Write one that has: scale-surgery route-export"):
        expanded.enable_routing()
    for unrouted, off in ((expanded, nullcontext), (model, model.routing_disabled)):
        with off():
            assert all(map(torch.equal, unrouted.path_logits(ids), wanted))
            with pytest.raises(ValueError, match=r"One path runs now\. Choose several with set_expansion"):
                unrouted.score_tokens(ids)
    with model.expansion_disabled():
        assert len(model.path_logits(ids)) == 1 and torch.equal(model.path_logits(ids)[0], wanted[0])
    assert model.score_tokens(ids).base.shape == (1, 4)
