"""What is proved on a twin: each kind of layer with W12, without it and passed by, before a plan relies on it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.deriving.derive import derive, find_twins, read_real, twin_of
from scale_surgery.deriving.facts import agree_twins, watch_twin
from scale_surgery.deriving.prove import FORMS, Twin, expanded_twin, expansion_tensors, expansions, failure_of, prove
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.specs import Collaboration, Widths, build_specs
from tests.conftest import problems
from tests.each import mostly

# edges and a block; norms that several blocks read; several kinds; every layer of another kind
SHAPES = ("gpt_oss", "granitemoehybrid", "deepseek_v3", "nemotron_h")
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": SMALL
    | {"shared_intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    | {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16},
    "flex_olmo": SMALL | {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2},
    "llama": SMALL | {"num_hidden_layers": 3},
}


def config_of(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type](**CONFIGS.get(model_type, {}))


@cache
def twin(model_type: str) -> Twin:
    """A twin with the facts that are proved on it."""
    config = config_of(model_type)
    real, *twins = find_twins(read_real(config))
    subject = twin_of(
        twins[0], real.twin_kinds, agree_twins(*(watch_twin(twin_config, real.shown) for twin_config in twins))
    )
    proved = derive(config).architecture
    # the treatments are those of the proof, the numbers the twin's
    assert [treatments(subject.architecture), subject.architecture.enters] == [treatments(proved), proved.enters]
    return subject


def treatments(architecture: Architecture) -> list[list[str]]:
    return [[block.treatment for block in kind.blocks] for kind in architecture.kinds]


def states(specs: dict[str, Any]) -> list[str]:
    """What each layer is in an expansion."""
    layers = range(len(specs.get("kind_of_layer", (0, 0, 0))))
    w12 = specs["collaborative"]["layers"]
    return [
        "passing" if layer not in specs["expanded_layers"] else "with W12" if layer in w12 else "without"
        for layer in layers
    ]


@pytest.mark.parametrize("model_type", mostly(SHAPES, "gpt_oss".__eq__))
def test_each_kind_of_layer_is_proved_in_every_state(model_type):
    subject = twin(model_type)
    kinds, made = subject.architecture.kind_of_layer, list(expansions(subject))
    assert [specs["variant"] for specs in made] == ["adapt", "preserve", "adapt"]
    pairs = {(number, state) for specs in made for number, state in zip(kinds, states(specs), strict=True)}
    # where no two layers are of one kind, the first is passed by in no expansion
    alone = {(0, "passing")} if len(set(kinds)) == len(kinds) else set()
    assert pairs | alone == {(number, state) for number in kinds for state in ("passing", "with W12", "without")}
    assert bool(alone) or {"with W12", "without"} <= set(states(made[2]))
    assert FORMS in derive(config_of(model_type)).proof["checks"]


def test_no_more_expansions_are_proved_than_say_something():
    """One where every layer is split alike; and of two kinds by turns the second is expanded where it stands."""
    assert len(list(expansions(twin("llama")))) == 1 and FORMS not in derive(config_of("llama")).proof["checks"]
    assert twin("gpt_oss").kinds == (0, 1, 0)
    assert next(expansions(twin("gpt_oss")))["expanded_layers"] == [0, 1]


def without_norms(subject: Twin, *treatment: str) -> Twin:
    """The same twin with facts that do not say which norm a block reads."""
    kinds = tuple(
        replace(
            kind,
            blocks=tuple(replace(block, norm="") if block.treatment in treatment else block for block in kind.blocks),
        )
        for kind in subject.architecture.kinds
    )
    return replace(subject, architecture=replace(subject.architecture, kinds=kinds))


@pytest.mark.parametrize("model_type", mostly(("gpt_oss", "granitemoehybrid"), "gpt_oss".__eq__))
def test_what_fails_without_w12_alone_fails(model_type, monkeypatch):
    """With W12 a norm before edges learns; where it is expanded without, its gain never does."""
    subject = twin(model_type)
    assert failure_of(subject) is None
    spoiled = without_norms(subject, "edges")
    failure = failure_of(spoiled)
    assert failure is not None and failure.code == "gradient-missing"
    assert failure.where.endswith(tensor_name("input_layernorm", "default", "up_weight"))
    monkeypatch.setattr("scale_surgery.deriving.prove.MOST_TRIES", 1)
    broken = Problem("promises-not-kept", spoiled.architecture.config_class, failure, ways=1)
    assert problems(prove, spoiled.architecture, spoiled, error=UnsupportedFamilyError) == [broken]


@pytest.mark.slow
def test_what_fails_in_a_layer_that_is_passed_by_alone_fails():
    """A mixture is passed by where another expansion than the first leaves its layer out."""
    subject = twin("deepseek_v3")
    assert states(next(expansions(subject)))[-1] == "with W12"
    dense, sparse = subject.architecture.kinds
    # what is said of layers that are passed by is made of these, and of no others
    spoiled = replace(sparse, direct=("mlp.shared_experts.down_proj",))
    failure = failure_of(replace(subject, architecture=replace(subject.architecture, kinds=(dense, spoiled))))
    assert failure is not None


WIDTHS = {"all": {}, "the stream alone": {"up_kv_heads": 0, "up_inner_width": 0}}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("variant", ("preserve", "upper", "attention", "ffn"))
@pytest.mark.parametrize("model_type", mostly(("llama", "granitemoehybrid", "flex_olmo"), "granitemoehybrid".__ne__))
def test_no_tensor_is_made_that_nothing_reads(model_type, variant, widths):
    subject = twin(model_type)
    every = tuple(range(subject.sizes.layers))
    collaboration = {
        "preserve": Collaboration(),
        "upper": Collaboration(every[1:], ("attn", "ffn")),
        "attention": Collaboration(every, ("attn",)),
        "ffn": Collaboration(every[:1], ("ffn",)),
    }[variant]
    width = replace(
        Widths(2 * max(8, subject.sizes.head_size), int(bool(subject.sizes.key_value_heads)), 24), **WIDTHS[widths]
    )
    specs = build_specs(subject.architecture, subject.sizes, width, every, collaboration) | {
        "variant": "",
        "dtype": None,
    }
    model = expanded_twin(subject, specs)
    with torch.no_grad():
        for parameter in expansion_tensors(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, use_cache=False).logits.float().pow(2).mean().backward()
    idle = [name for name, tensor in expansion_tensors(model).items() if tensor.grad is None or not tensor.grad.any()]
    assert not idle
