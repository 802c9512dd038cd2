"""Many expansions of one base in memory: each alone is what apply writes, and all share the weights of the base."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from scale_surgery import Request, apply, expand, extract, load_expansion
from scale_surgery.checkpoint import expansions
from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.surgery.route import route_export
from tests.composed import LLAMA, Made
from tests.conftest import load, shake
from tests.routed import padded, random_ids
from tests.surgery.test_images import inputs, logits, twin_config, write_base
from tests.surgery.test_images import load as load_image_model

GEMMA = ("music", "late")
# experts and split attention; parts that are stock inside, behind a norm that two of them read
MOE, EDGES = ("whole", "late"), ("medicine", "whole")
PROMPTS = ({"input_ids": random_ids(2, 9)}, padded(random_ids(3, 13), (5, 2, 0)))
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def llama(made_of) -> Made:
    return made_of("llama", LLAMA)


def renamed(tensor: str, name: str) -> str:
    return tensor if expansion_of(tensor) is None else expansions.renamed(tensor, name)


def weighed(
    paths: list[torch.Tensor], ids: torch.Tensor, starts: list[int], rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture and its weights by their formula, token by token, in float64; rows begin where padding ends."""
    probabilities = torch.stack([own.double().softmax(-1) for own in paths])
    found, count = torch.zeros_like(probabilities[0]), len(paths)
    known = torch.zeros(*found.shape[:2], count, dtype=torch.float64)
    for row, start in enumerate(starts):
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        for step in range(start, ids.shape[1]):
            if step > start:
                after = weights * probabilities[:, row, step - 1, ids[row, step]]
                after = after / after.sum()
                weights = (1 - rate) * after + rate / (count - 1) * (1 - after)
            found[row, step] = (weights[:, None] * probabilities[:, row, step]).sum(0)
            known[row, step] = weights
    return found.log(), known


def test_one_name_is_the_model_that_apply_writes(llama, tmp_path):
    model, base = llama.composed(), load(llama.base)
    assert model.expansions == list(LLAMA) and type(model).__name__ == "ScaleLlamaForCausalLM"
    assert isinstance(model, transformers.LlamaForCausalLM)
    outputs = []
    for name in (*LLAMA, None):
        alone = llama.alone(name)
        if name == "law":
            alone = load(apply(llama.extracts[name], tmp_path / "applied", llama.base).path)
        with model.use_expansion(name):
            for prompt in PROMPTS:
                outputs.append(model(**prompt).logits)
                assert torch.equal(outputs[-1], alone(**prompt).logits)
                assert torch.equal(model.generate(**prompt, **GREEDY), alone.generate(**prompt, **GREEDY))
            if name is not None:
                for own in (model, alone):
                    own(PROMPTS[0]["input_ids"], labels=PROMPTS[0]["input_ids"]).loss.backward()
                found = {key: own.grad for key, own in model.named_parameters() if expansion_of(key) in (name, None)}
                expected = {renamed(key, name): own.grad for key, own in alone.named_parameters()}
                assert found.keys() == expected.keys() and any(own is not None for own in found.values())
                for key, gradient in expected.items():
                    assert gradient is None if found[key] is None else torch.equal(gradient, found[key]), key
    assert model.choice.names == ("chess",), "the last that was loaded, as before the blocks"
    assert not any(torch.equal(one, outputs[-2]) for one in outputs[:-2:2]), "the negative control: they speak"
    assert all(own.requires_grad for own in base.parameters())


@pytest.mark.parametrize(
    ("family", "names", "dtype"),
    [
        ("llama", LLAMA, "float32"),
        ("gemma3_text", GEMMA, "bfloat16"),
        ("qwen3_moe", MOE, "float32"),
        pytest.param("gptj", EDGES, "float32", marks=pytest.mark.slow),
        # its logits are capped, and a mixture is of capped ones
        pytest.param("gemma2", ("late",), "float32", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_paths_side_by_side_are_the_models_alone(made_of, family, names, dtype):
    """Every path bit for bit, the mixture by its formula, and a name for each row; prompts with padding, too."""
    made = made_of(family, names, dtype)
    model, alone = made.composed(), [made.alone(name) for name in (None, *names)]
    for prompt, starts in zip(PROMPTS, ([0, 0], [5, 2, 0]), strict=True):
        # without a cache as path_logits: some models read keys from it in another order of memory
        expected = [own(**prompt, use_cache=False).logits for own in alone]
        model.set_expansion(list(names), switch_rate=0.05)
        for found, each in zip(model.path_logits(**prompt), expected, strict=True):
            assert torch.equal(found, each)
        logits, own = model(**prompt).logits, prompt["input_ids"]
        routed = logits.log_softmax(-1)
        reference, weights = weighed(expected, own, starts, 0.05)
        scores, following = model.score_tokens(**prompt), own[:, 1:, None]
        for row, start in enumerate(starts):
            error = (routed[row, start:].double() - reference[row, start:]).abs().max()
            assert error < (2e-5 if dtype == "float32" else 0.07)
            assert (reference - torch.stack(expected).log_softmax(-1)).abs().amax((1, 2, 3)).min() > 0.1, "the control"
            wanted = [each.log_softmax(-1)[row, start:-1].gather(-1, following[row, start:]) for each in expected]
            mixed = reference[row, start:-1].gather(-1, following[row, start:])[..., 0]
            pairs = (
                (scores.sides[row, start:], torch.cat(wanted, -1)),
                (scores.routed[row, start:], mixed),
                (scores.weights[row, start:], weights[row, start:-1]),
            )
            for given, right in pairs:
                assert (given.double() - right).abs().max() < (2e-5 if dtype == "float32" else 0.07)
            assert weights[row, -1].max() - weights[row, -1].min() > 0.01, "the control: they are not all alike"
        last = model(**prompt, logits_to_keep=1).logits
        assert torch.allclose(last, logits[:, -1:], atol=1e-5 if dtype == "float32" else 0.07)
        rows = [*reversed(names), None, None][: len(own)]
        found = model(**prompt, expansion_names=rows, use_cache=False).logits
        for row, name in enumerate(rows):
            numbers = [torch.equal(found[row], each[row]) for each in expected]
            assert [number for number, is_it in enumerate(numbers) if is_it] == [(None, *names).index(name)]


@torch.no_grad()
def test_generation_keeps_its_state_in_the_cache(llama):
    """Greedy and beams, a prompt with padding: as without a cache, for a mixture and for a name for each row."""
    model, prompt = llama.composed(), PROMPTS[1]
    rows = ["law", None, "medicine"]
    for options in ({"expansion_names": rows}, {}):
        if not options:
            model.set_expansion(list(LLAMA), switch_rate=0.05)
        for beams in (1, 3):
            own = {**prompt, **GREEDY, "num_beams": beams, **options}
            assert torch.equal(model.generate(**own), model.generate(**own, use_cache=False))
    # rows of one batch as by themselves; beams of a row stay that row's
    found = model.generate(**prompt, **GREEDY, num_beams=3, expansion_names=rows)
    for row, name in enumerate(rows):
        assert torch.equal(found[row], llama.alone(name).generate(**prompt, **GREEDY, num_beams=3)[row])
    # several tokens are tried at once, and some of them are taken back
    one = {"input_ids": random_ids(1, 4).repeat(1, 3), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(**one, prompt_lookup_num_tokens=3), model.generate(**one))
    # a text in parts: several tokens into a cache
    whole = model(random_ids(2, 12)).logits
    first = model(random_ids(2, 12)[:, :5], use_cache=True)
    rest = model(random_ids(2, 12)[:, 5:], past_key_values=first.past_key_values).logits
    assert torch.allclose(rest, whole[:, 5:], atol=1e-5)
    heads = first.past_key_values.layers[1].keys.shape[1]
    assert heads == 2 + 1 + 1 + 2 + 2, "the base's, new ones of medicine and music, those of law and chess, apart"


@torch.no_grad()
def test_two_paths_are_those_of_a_routed_model(llama, tmp_path):
    """K = 1: the same log-probabilities as the model that route-export writes, whole and cached."""
    folder = route_export(llama.folders["law"], tmp_path / "routed", PosteriorRouter(prior=0.3, switch_rate=0.02)).path
    routed, model = load(folder), llama.composed("law")
    model.set_expansion(["law"], prior=[0.3, 0.7], switch_rate=0.02)
    for prompt in PROMPTS:
        kept = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"])).bool()
        found, expected = (own(**prompt).logits.log_softmax(-1)[kept] for own in (model, routed))
        assert torch.allclose(found, expected, atol=2e-5)
        assert torch.equal(model.generate(**prompt, **GREEDY), routed.generate(**prompt, **GREEDY))
    model.set_expansion(["law"], switch_rate=0.02)
    assert not torch.allclose(model(**PROMPTS[0]).logits.log_softmax(-1), routed(**PROMPTS[0]).logits.log_softmax(-1))


def nats(log_probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What each text costs, but for its first token."""
    own = log_probabilities.double().log_softmax(-1)
    return -own[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))


@pytest.mark.slow
@torch.no_grad()
def test_no_text_loses_more_than_its_share(llama):
    """At r = 0 at most ln(K + 1) nats against the best path for it, also where a text goes from one to the other."""
    model, bound = llama.composed(), math.log(len(LLAMA) + 1)
    starts = random_ids(8, 1, seed=5)
    texts = [random_ids(8, 24, seed=6)]
    for name in (None, *LLAMA):
        with model.use_expansion(name):
            texts.append(model.generate(starts, max_new_tokens=23, min_new_tokens=23, do_sample=False))
    # whatever has come to be trusted, another goes on
    texts += [torch.cat((one[:, :12], other[:, :12]), 1) for one, other in itertools.pairwise(texts)]
    ids = torch.cat(texts)

    def lost(**options: Any) -> torch.Tensor:
        model.set_expansion(list(LLAMA), **options)
        best = torch.stack([nats(own, ids) for own in model.path_logits(ids)]).amin(0)
        return nats(model(ids).logits, ids) - best

    found = lost(switch_rate=0)
    assert 0.5 < found.max() <= bound + 1e-4
    rare = [[0.001 if own == each else 0.999 / len(LLAMA) for own in range(5)] for each in range(5)]
    worst = max(float(lost(switch_rate=0, prior=prior).max()) for prior in rare)
    assert worst > bound + 1, "the negative control: who begins with less loses more"


def test_all_share_the_weights_of_the_base(llama):
    base = load(llama.base)
    model = base
    for name in LLAMA:
        model = load_expansion(model, llama.extracts[name], name=name)
    composed = load_expansion(llama.base, llama.extracts["law"], name="law")
    shared = {own.data_ptr() for own in base.parameters()}

    def pointers() -> set[int]:
        return {own.data_ptr() for own in model.parameters() if not own.requires_grad}

    assert pointers() == shared, "not a copy"
    own = sum(each.numel() for name in LLAMA for each in llama.alone(name).parameters() if each.requires_grad)
    total = sum(each.numel() for each in model.parameters())
    assert total == own + sum(each.numel() for each in base.parameters())
    assert composed.expansions == ["law"]
    # moved or cast together, they still share
    count = len(shared)
    model.to(torch.bfloat16)
    assert len(pointers()) == count and {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert pointers().isdisjoint(shared)


@torch.no_grad()
def test_it_is_saved_and_loaded_as_one_model(llama, tmp_path):
    model = llama.composed()
    model.save_pretrained(tmp_path / "saved")
    found, prompt = load(tmp_path / "saved"), PROMPTS[1]
    assert found.expansions == list(LLAMA) and found.active_expansion == list(LLAMA)
    model.set_expansion(list(LLAMA))
    assert torch.equal(found(**prompt).logits, model(**prompt).logits)
    for name in (None, *LLAMA):
        with found.use_expansion(name):
            assert torch.equal(found(**prompt).logits, llama.alone(name)(**prompt).logits)


def test_training_under_a_mixture(llama):
    """The loss of the mixture reaches every expansion, and nothing of the base; one step makes it smaller."""
    model, ids = llama.composed("medicine", "law"), random_ids(2, 9)
    model.set_expansion(["medicine", "law"])
    before = model(ids, labels=ids).loss
    before.backward()
    trained = [own for own in model.parameters() if own.requires_grad]
    assert all(own.grad is None for own in model.parameters() if not own.requires_grad)
    for name in model.expansions:
        own = [tensor for key, tensor in model.named_parameters() if expansion_of(key) == name]
        assert any(tensor.grad is not None and tensor.grad.any() for tensor in own)
    torch.optim.SGD(trained, lr=0.05).step()
    assert model(ids, labels=ids).loss < before


def test_choices(llama):
    model = llama.composed("medicine", "law")
    ids = random_ids(2, 5)
    law = model(ids).logits
    with model.use_expansion(["law", "medicine"]), torch.no_grad():
        one = model(ids).logits.log_softmax(-1)
        with model.use_expansion(["medicine", "law"]):
            assert torch.allclose(one, model(ids).logits.log_softmax(-1), atol=1e-5)
        assert model.active_expansion == ["law", "medicine"]
    assert torch.equal(model(ids).logits, law)
    assert torch.equal(model(ids, expansion_names=["law", "law"]).logits, law)
    with pytest.raises(ValueError, match="One path runs now"):
        model.score_tokens(ids)
    model.delete_expansion("law")
    assert model.expansions == ["medicine"]
    assert torch.equal(model(ids).logits, llama.alone(None)(ids).logits), "what was chosen is no more"
    assert torch.equal(load_expansion(model, llama.extracts["law"], name="law")(ids).logits, law)


def message(call: Callable[..., Any], error: type[Exception], *args: Any, **options: Any) -> str:
    with pytest.raises(error) as found:
        call(*args, **options)
    return str(found.value)


def test_what_cannot_be_asked_for_is_refused(llama, made_of):
    model, law = llama.composed("medicine", "law"), llama.extracts["law"]
    assert message(model.set_expansion, ValueError, ["medicin", "law", "law"]).splitlines() == [
        "medicin: is no expansion of this model, expected medicine.",
        "law: is named 2 times, expected once.",
    ]
    assert message(model.set_expansion, ValueError, "x") == (
        "x: is no expansion of this model, expected medicine or law."
    )
    assert message(model.set_expansion, ValueError, []) == (
        "A list of no names: expected at least one. None gives the base."
    )
    assert message(model.set_expansion, ValueError, ["law"], prior=[0.5], switch_rate=1.0).splitlines() == [
        "prior: is [0.5], expected 2 positive weights of sum 1, the base's first.",
        "switch_rate: is 1.0, expected a share of at least 0 and less than 1.",
    ]
    assert message(model.set_expansion, ValueError, ["law"], router="cosine", threshold=2).splitlines() == [
        "threshold: is 2, expected a cosine, from -1 to 1.",
    ]
    assert message(model.set_expansion, ValueError, ["law", "medicine"], router="cosine", threshold=0.5) == (
        "cosine: decides between the base and one expansion, not 2."
    )
    for wrong in ({"router": "best"}, {"lag": 2}):
        found = message(model.set_expansion, ValueError, ["law"], **wrong)
        assert found.startswith("router: is {") and "expected one of posterior, cosine with its numbers" in found
    # numbers that one name has no use for
    assert message(model.set_expansion, ValueError, "law", switch_rate=0.1) == (
        "switch_rate: is for a list of expansions, but 'law' is none. Leave it out."
    )
    assert message(load_expansion, PlanError, model, law, name="law") == (
        "name: law is an expansion of this model already, expected a new name. Choose another, or take that one off "
        "first: compose --remove, or model.delete_expansion."
    )
    for name in ("a b", "3d", "a.b", "", "base", "keys"):
        assert message(load_expansion, PlanError, model, law, name=name).startswith(f"name: is {name!r}, expected")
    named = load_expansion(load(llama.base), law)
    assert message(load_expansion, PlanError, named, law).startswith("name: default is an expansion of this model alre")
    other = made_of("gemma3_text", GEMMA, "bfloat16").extracts["music"]
    assert "expected Gemma3" in message(load_expansion, CheckpointError, model, other, name="music")
    ids = random_ids(3, 4)
    assert message(model, ValueError, ids, expansion_names=["law", None]) == (
        "expansion_names: 2 names for 3 rows, expected one for each, None for the base."
    )
    cache = model(ids, use_cache=True).past_key_values
    with model.use_expansion("medicine"):
        assert message(model, ValueError, ids, past_key_values=cache).startswith(
            "past_key_values: holds 4 tokens that were not read under this choice of expansions (medicine), expected a"
        )
    for name in ("load_adapter", "add_adapter", "set_adapter", "delete_adapter", "disable_adapters"):
        assert message(getattr(model, name), NotImplementedError, "law").startswith(f"{name}: is of transformers' adap")
    assert model.expansions == ["medicine", "law"] and model.choice.names == ("law",)


@pytest.mark.slow
def test_several_that_a_block_has_no_room_for_are_refused(made_of):
    """Edges hold one path: what writes into the base stream there is switched by name, and not mixed."""
    made = made_of("gptj", ("late",))
    model, alone = made.composed(), made.alone("late")
    assert torch.equal(model(random_ids(2, 5)).logits, alone(random_ids(2, 5)).logits)
    assert message(model.set_expansion, ValueError, ["late"]).startswith(
        "late: the block attn (GPTJAttention) stays as"
    )
    assert "late: the block attn" in message(model, ValueError, random_ids(2, 5), expansion_names=["late", None])


@pytest.mark.slow
@torch.no_grad()
def test_images_go_to_every_path(tmp_path):
    """Features of images that are added again between layers, where streams are zeros first and then part."""
    config = twin_config("qwen3_vl")
    base = write_base(config, torch.float32, tmp_path / "base")
    requests = {"law": Request("0,1", variant="adapt", collaborate="both"), "medicine": Request("last:2")}
    folders = {name: shake(expand(base, own, tmp_path / name).path) for name, own in requests.items()}
    model: Any = base
    for name, folder in folders.items():
        model = load_expansion(model, extract(folder, tmp_path / f"{name}.extract").path, name=name)
    model.eval().set_expansion(list(folders))
    prompt = inputs("qwen3_vl", config, torch.float32)
    expected = [logits(load_image_model(own), **prompt) for own in (base, *folders.values())]
    assert all(map(torch.equal, model.path_logits(**prompt), expected))
    assert not torch.equal(expected[0], expected[1])
    assert torch.isfinite(model(**prompt).logits).all()


def test_a_model_without_a_head_is_switched_and_not_mixed(llama):
    model = load_expansion(transformers.AutoModel.from_pretrained(llama.base), llama.extracts["law"], name="law")
    expected = transformers.AutoModel.from_pretrained(llama.folders["law"])
    assert torch.equal(model(random_ids(2, 5)).last_hidden_state, expected(random_ids(2, 5)).last_hidden_state)
    assert "has no head" in message(model.set_expansion, ValueError, ["law"])


@torch.no_grad()
def test_what_people_who_come_from_peft_look_for(llama, capsys):
    model, ids = llama.composed("medicine", "law"), random_ids(2, 5)
    assert model.active_expansion == "law"
    with model.use_expansion(["medicine", "law"]):
        assert model.active_expansion == ["medicine", "law"]
    with model.expansion_disabled():
        assert model.active_expansion is None
        assert torch.equal(model(ids).logits, load(llama.base)(ids).logits)
    assert model.active_expansion == "law"

    counts, wanted = model.trainable_parameters(), sum(own.numel() for own in model.parameters() if own.requires_grad)
    assert list(counts) == ["medicine", "law"] and sum(sum(row.values()) for row in counts.values()) == wanted > 0
    model.print_trainable_parameters()
    printed = capsys.readouterr().out
    assert "\nmedicine " in printed and f"trains {wanted:,} of " in printed

    for run in (model, model.generate):
        assert message(run, ValueError, ids, adapter_names=["law", None]) == (
            "adapter_names: is PEFT's, and this model has expansions. Give expansion_names=, a name or None for each "
            "row."
        )
