"""Many expansions of one base in memory: each alone is what apply writes, and all share the weights of the base."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import modeling_utils

from scale_surgery import Request, compose, expand, extract, load_expansion
from scale_surgery.checkpoint import expansions
from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.errors import CheckpointError, PlanError
from tests.composed import LLAMA, Made
from tests.conftest import load, refusal
from tests.routed import padded, random_ids

PROMPTS = ({"input_ids": random_ids(2, 9)}, padded(random_ids(3, 13), (5, 2, 0)))
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def llama(made_of) -> Made:
    return made_of("llama", LLAMA)


@pytest.mark.parametrize("name", (*LLAMA, None))
def test_one_name_is_the_model_that_apply_writes(llama, name):
    """Logits, greedy text and gradients, bit for bit."""
    model, alone = llama.composed(), llama.alone(name)
    assert model.active_expansion == "chess", "the last that was loaded"
    with model.use_expansion(name):
        for prompt in PROMPTS:
            assert torch.equal(model(**prompt).logits, alone(**prompt).logits)
            assert torch.equal(model.generate(**prompt, **GREEDY), alone.generate(**prompt, **GREEDY))
        with model.use_expansion("medicine" if name is None else None):
            assert not torch.equal(model(**PROMPTS[0]).logits, alone(**PROMPTS[0]).logits), "the negative control"
        if name is None:
            return
        for network in (model, alone):
            network(PROMPTS[0]["input_ids"], labels=PROMPTS[0]["input_ids"]).loss.backward()
    gradients = {
        key: parameter.grad for key, parameter in model.named_parameters() if expansion_of(key) in (name, None)
    }
    expected = {
        key if expansion_of(key) is None else expansions.renamed(key, name): parameter.grad
        for key, parameter in alone.named_parameters()
    }
    assert gradients.keys() == expected.keys() and any(gradient is not None for gradient in gradients.values())
    for key, gradient in expected.items():
        assert gradient is None if gradients[key] is None else torch.equal(gradient, gradients[key]), key


@torch.no_grad()
def test_a_name_for_each_row(llama):
    """Rows of one batch, and their beams, are as by themselves; the cache holds the heads of all, apart."""
    model, prompt, rows = llama.composed(), PROMPTS[1], ["law", None, "medicine"]
    tokens = model.generate(**prompt, **GREEDY, num_beams=3, expansion_names=rows)
    for row, name in enumerate(rows):
        assert torch.equal(tokens[row], llama.alone(name).generate(**prompt, **GREEDY, num_beams=3)[row])
    model.set_expansion(list(LLAMA))
    keys = model(random_ids(2, 5), use_cache=True).cache.layers[1].keys
    assert keys.shape[1] == 4 + 1 + 1 + 4 + 4, "the base's, new ones of medicine and music, those of law and chess"


def test_all_share_the_weights_of_the_base(llama):
    base = model = load(llama.base)
    for name in LLAMA:
        model = load_expansion(model, llama.extracts[name], name=name)
    shared = {parameter.data_ptr() for parameter in base.parameters()}

    def pointers() -> set[int]:
        return {parameter.data_ptr() for parameter in model.parameters() if not parameter.requires_grad}

    assert pointers() == shared, "not a copy"
    assert all(parameter.requires_grad for parameter in base.parameters())
    elements = sum(each.numel() for name in LLAMA for each in llama.alone(name).parameters() if each.requires_grad)
    assert sum(each.numel() for each in model.parameters()) == elements + sum(
        each.numel() for each in base.parameters()
    )
    # moved or cast together, they still share
    model.to(torch.bfloat16)
    assert len(pointers()) == len(shared) and {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert pointers().isdisjoint(shared)


def test_choices(llama):
    model, ids = llama.composed("medicine", "law"), random_ids(2, 5)
    law = model(ids).logits
    assert model.active_expansion == "law"
    with model.use_expansion(["law", "medicine"]), torch.no_grad():
        log_probabilities = model(ids).logits.log_softmax(-1)
        with model.use_expansion(["medicine", "law"]):
            assert torch.allclose(log_probabilities, model(ids).logits.log_softmax(-1), atol=1e-5)
        assert model.active_expansion == ["law", "medicine"]
    with model.expansion_disabled():
        assert model.active_expansion is None
        assert torch.equal(model(ids).logits, llama.alone(None)(ids).logits)
    assert torch.equal(model(ids).logits, law)
    assert torch.equal(model(ids, expansion_names=["law", "law"]).logits, law)
    embedded = model.get_input_embeddings()(random_ids(4, 5))
    text = refusal(model, inputs_embeds=embedded, input_ids=None, expansion_names=["law", None], error=ValueError)
    assert text.startswith("expansion_names: ")
    with model.use_expansion("law"):
        text = refusal(model.delete_expansion, "law", error=ValueError)
    assert text == "law: runs inside a with block, expected none that chooses it. Delete it behind the block."
    model.delete_expansion("law")
    assert model.expansions == ["medicine"]
    assert torch.equal(model(ids).logits, llama.alone(None)(ids).logits), "what was chosen is no more"
    assert torch.equal(load_expansion(model, llama.extracts["law"], name="law")(ids).logits, law)


def test_choices_that_make_no_sense_are_refused(llama):
    model = llama.composed("medicine", "law")
    for choice, options, expected in (
        (
            ["medicin", "law", "law"],
            {},
            "medicin: is no expansion of this model, expected medicine.\nlaw: is named 2 times, expected once.",
        ),
        ("x", {}, "x: is no expansion of this model, expected medicine or law."),
        ([None, "law"], {}, "None: is no expansion of this model, expected medicine or law."),
        (3, {}, "3: is no choice of expansions, expected a name, a list of names, or None."),
        ([], {}, "A list of no names: expected at least one. None gives the base."),
        (
            ["law"],
            {"prior": [0.5], "switch_rate": 1.0},
            "prior: is [0.5], expected 2 positive weights of sum 1, the base's first.\n"
            "switch_rate: is 1.0, expected a share of at least 0 and less than 1.",
        ),
        (["law"], {"router": "cosine", "threshold": 2}, "threshold: is 2, expected a cosine, from -1 to 1."),
        (
            ["law", "medicine"],
            {"router": "cosine", "threshold": 0.5},
            "cosine: decides between the base and one expansion, not 2.",
        ),
        ("law", {"switch_rate": 0.1}, "switch_rate: is for a list of expansions, but 'law' is none. Leave it out."),
    ):
        assert refusal(model.set_expansion, choice, **options, error=ValueError) == expected
    for wrong in ({"router": "best"}, {"lag": 2}):
        text = refusal(model.set_expansion, ["law"], **wrong, error=ValueError)
        assert text.startswith("router: is {") and "expected one of posterior, cosine with its numbers" in text
    ids = random_ids(3, 4)
    for names, expected in (
        (["law", None], "expansion_names: 2 names for 3 rows, expected one for each, None for the base."),
        ("law", "expected a list, a name or None for each"),
    ):
        assert expected in refusal(model, ids, expansion_names=names, error=ValueError)
    # beams of a row lie one after the other, so a divisor of the rows would fit later
    for names in (["law"], ["law", "law"], ["law", None], ["law"] * 8):
        expected = f"expansion_names: {len(names)} names for 4 rows, expected one for each, None for the base."
        for prompts in ({"input_ids": random_ids(4, 3)}, {"inputs": random_ids(4, 3)}):
            assert refusal(model.generate, **prompts, expansion_names=names, error=ValueError) == expected
        assert refusal(model.generate, random_ids(4, 3), expansion_names=names, error=ValueError) == expected
    assert "One path runs now" in refusal(model.score_tokens, ids, error=ValueError)
    cache = model(ids, use_cache=True).cache
    with model.use_expansion("medicine"):
        assert refusal(model, ids, cache=cache, error=ValueError).startswith(
            "The KV cache holds 4 tokens that were not read under this choice and strength of expansions (medicine), "
        )
    for name in ("load_adapter", "add_adapter", "set_adapter", "delete_adapter", "disable_adapters"):
        assert refusal(getattr(model, name), "law", error=NotImplementedError).startswith(
            f"{name}: is of transformers' adap"
        )
    assert model.expansions == ["medicine", "law"] and model.choice.names == ("law",)


def test_what_cannot_be_loaded_beside_it_is_refused(llama, made_of):
    model, law = llama.composed("medicine", "law"), llama.extracts["law"]
    assert refusal(load_expansion, model, law, name="law", error=PlanError) == (
        "name: law is an expansion of this model already, expected a new name. Choose another, or take that one off "
        "first: compose --remove, or model.delete_expansion."
    )
    for name in ("a b", "3d", "a.b", "", "base", "keys"):
        assert refusal(load_expansion, model, law, name=name, error=PlanError).startswith(
            f"name: is {name!r}, expected"
        )
    foreign_extract = made_of("gemma3_text", ("music", "late"), "bfloat16").extracts["music"]
    assert "expected Gemma3" in refusal(load_expansion, model, foreign_extract, name="music", error=CheckpointError)
    assert model.expansions == ["medicine", "law"]


def test_a_model_without_a_head_is_switched_and_not_mixed(llama):
    for known in [known for known in modeling_utils._CAN_RECORD_REGISTRY if "ScaleLlamaModel" in known]:
        dict.pop(modeling_utils._CAN_RECORD_REGISTRY, known)  # as in a new process
    model = load_expansion(transformers.AutoModel.from_pretrained(llama.base), llama.extracts["law"], name="law")
    states = model(random_ids(2, 5), output_hidden_states=True).hidden_states
    expected = transformers.AutoModel.from_pretrained(llama.folders["law"])
    assert type(model) is type(expected)
    assert len(states) == len(expected(random_ids(2, 5), output_hidden_states=True).hidden_states) > 1
    assert torch.equal(model(random_ids(2, 5)).last_hidden_state, expected(random_ids(2, 5)).last_hidden_state)
    assert "has no head" in refusal(model.set_expansion, ["law"], error=ValueError)


@torch.no_grad()
def test_several_that_cannot_be_mixed_are_saved_and_switched_by_name(made_of, tmp_path):
    made, ids = made_of("deepseek_v3", ("late",)), random_ids(2, 5)
    model = load_expansion(made.composed(), made.extracts["late"], name="later")
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.active_expansion is None and torch.equal(again(ids).logits, made.alone(None)(ids).logits)
    again.set_expansion("later")
    assert torch.equal(again(ids).logits, made.alone("late")(ids).logits)


def test_a_name_that_begins_another_decides_nothing_of_it(base_of, tmp_path):
    base, extracts = base_of("llama", "bfloat16"), {}
    for name, dtype in (("law", "float32"), ("lawyer", None)):
        folder = expand(base, Request("1", name=name, dtype=dtype), tmp_path / name).path
        extracts[name] = extract(folder, tmp_path / f"{name}.extract").path
    model = load(compose(base, extracts, tmp_path / "both").path)
    dtypes = {
        name: {tensor.dtype for key, tensor in model.named_parameters() if f".expansions.{name}." in key}
        for name in extracts
    }
    assert dtypes == {"law": {torch.float32}, "lawyer": {torch.bfloat16}}


@pytest.mark.slow
def test_several_that_a_block_has_no_room_for_are_refused(made_of):
    """Edges hold one path: what writes into the base stream there is switched by name, and not mixed."""
    made = made_of("deepseek_v3", ("late",))
    model, alone = made.composed(), made.alone("late")
    assert torch.equal(model(random_ids(2, 5)).logits, alone(random_ids(2, 5)).logits)
    assert refusal(model.set_expansion, ["late"], error=ValueError).startswith(
        "late: the block self_attn (DeepseekV3Attention) stays as"
    )
    assert "late: the block self_attn" in refusal(
        model, random_ids(2, 5), expansion_names=["late", None], error=ValueError
    )
