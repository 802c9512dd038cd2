"""Names on disk are those of a checkpoint, found by what transformers makes of them; names as published models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.core_model_loading import WeightRenaming

from scale_surgery.deriving.derive import read_real
from scale_surgery.deriving.disk import with_stored_names
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture, Block, Kind, Linear, Norm
from scale_surgery.planning.stored import find_prefix, module_path
from scale_surgery.running.stored_names import Reading, reading_of
from tests.conftest import problems


def kind(norm: str, *linears: str, whole: str = "") -> Kind:
    """A kind of layer with some linears, and perhaps a block that runs as it is."""
    blocks = [Block("", "", "attn", "edges", linears=tuple(Linear(name, ("read",), 4, (4,)) for name in linears))]
    blocks += [Block(whole, "", "ffn", "block")] if whole else []
    return Kind(tuple(blocks), (Norm(norm),))


def architecture(*kinds: Kind) -> Architecture:
    """Facts of a model that has one layer of each kind."""
    names: dict[str, Any] = {"model_type": "", "config_class": "", "classes": {}, "head": "lm_head"}
    around: dict[str, Any] = {"base_model": "model", "layers": "layers", "embedding": "embed_tokens"}
    return Architecture(**names, **around, final_norm=Norm("norm"), kinds=kinds, kind_of_layer=tuple(range(len(kinds))))


def reading(model_type: str, **sizes: Any) -> Reading:
    return reading_of(read_real(CONFIG_MAPPING[model_type](**sizes)).model)


def named(about: Architecture, how: Reading, *names: str, prefix: str = "model.") -> Architecture:
    """The facts with names on disk, of a checkpoint that holds an embedding, a norm, and so on."""
    stored = [f"{prefix}{name}.weight" for name in ("norm", *names)]
    return with_stored_names(about, how, how.places(stored))


def renamed(about: Architecture) -> list[Mapping[str, str]]:
    return [layer_kind.stored_as for layer_kind in about.kinds]


def test_kimi_linear():
    """The dense layer of the published model has its own name, where transformers would write that of experts."""
    dense = kind("input_layernorm", "self_attn.forget_gate.f_a_proj", "self_attn.o_proj", "mlp.gate_proj")
    sparse = kind("input_layernorm", "self_attn.o_proj", whole="mlp")
    how, shared = reading("kimi_linear"), ("layers.0.self_attn.f_a_proj", "layers.0.self_attn.o_proj")
    experts = ("layers.1.self_attn.o_proj", "layers.1.block_sparse_moe.experts.3.w1", "layers.1.block_sparse_moe.gate")
    about = architecture(dense, sparse)
    layout = named(about, how, "embed_tokens", *shared, "layers.0.mlp.gate_proj", *experts)
    gate = {"self_attn.forget_gate.f_a_proj": "self_attn.f_a_proj"}
    assert renamed(layout) == [gate, {"mlp": "block_sparse_moe"}] and layout.stored_as == {}
    # and as transformers writes it
    layout = named(about, how, "embed_tokens", *shared, "layers.0.block_sparse_moe.gate_proj", *experts)
    assert renamed(layout)[0] == gate | {"mlp.gate_proj": "block_sparse_moe.gate_proj"}
    assert module_path(layout, "model.", 0, "mlp.gate_proj") == "model.layers.0.block_sparse_moe.gate_proj"


def test_bailing_hybrid():
    """Around the layers, too."""
    about = architecture(kind("input_layernorm", "self_attn.o_proj", "self_attn.forget_gate.f_proj"))
    names = ("layers.0.attention.dense", "layers.0.attention.f_proj", "layers.0.input_layernorm")
    layout = named(about, reading("bailing_hybrid"), "word_embeddings", *names)
    assert (
        layout.stored_as == {"embed_tokens": "word_embeddings"} and layout.embedding_weight == "word_embeddings.weight"
    )
    assert renamed(layout) == [
        {"self_attn.o_proj": "attention.dense", "self_attn.forget_gate.f_proj": "attention.f_proj"}
    ]
    assert find_prefix(layout, [f"model.{name}.weight" for name in ("word_embeddings", *names)]) == "model."


def test_hy_v3():
    """A part inside a block that is renamed says nothing of the block itself."""
    about = architecture(kind("input_layernorm", "self_attn.o_proj", whole="mlp"))
    names = ("mlp.router.gate", "mlp.shared_mlp.up_proj", "mlp.experts.0.up_proj", "self_attn.o_proj")
    layout = named(about, reading("hy_v3"), "embed_tokens", *(f"layers.0.{name}" for name in names))
    assert renamed(layout) == [{}]


def test_lfm3():
    about = architecture(kind("operator_norm", "self_attn.g_proj", "self_attn.q_proj"))
    names = ("layers.0.self_attn.gate_proj", "layers.0.self_attn.q_proj", "layers.0.operator_norm")
    assert renamed(named(about, reading("lfm3"), "embed_tokens", *names)) == [
        {"self_attn.g_proj": "self_attn.gate_proj"}
    ]


def test_what_stands_before_all_names_is_no_name_of_a_module():
    about = architecture(kind("norm", "mixer.in_proj"))
    about = Architecture(**vars(about) | {"embedding": "embeddings"})
    layout = named(
        about, reading("nemotron_h"), "embeddings", "layers.0.mixer.in_proj", "layers.0.norm", prefix="backbone."
    )
    assert (renamed(layout), layout.stored_as) == ([{}], {})
    assert find_prefix(layout, ["backbone.embeddings.weight", "backbone.layers.0.norm.weight"]) == "backbone."


def test_layers_of_one_kind_with_other_names_are_several_kinds():
    sparse, how = kind("input_layernorm", whole="mlp"), reading("mixtral")
    about = Architecture(**vars(architecture(sparse)) | {"kind_of_layer": (0, 0, 0)})
    names = ("layers.0.block_sparse_moe.gate", "layers.1.mlp.gate", "layers.2.block_sparse_moe.gate")
    layout = named(about, how, "embed_tokens", *names)
    assert renamed(layout) == [{"mlp": "block_sparse_moe"}, {}] and layout.kind_of_layer == (0, 1, 0)
    # one that lacks a tensor is called as the others are, so that it is missed by its name
    layout = named(about, how, "embed_tokens", "layers.0.block_sparse_moe.gate", "layers.2.input_layernorm")
    assert renamed(layout) == [{"mlp": "block_sparse_moe"}] and layout.kind_of_layer == (0, 0, 0)


def test_a_checkpoint_of_another_model_changes_nothing():
    about, how = architecture(kind("input_layernorm", whole="mlp")), reading("mixtral")
    assert with_stored_names(about, how, how.places(["wte.weight", "h.0.ln.weight"])) == about


def test_what_is_renamed_alone_cannot_be_expanded():
    """Were one tensor of a module renamed, and no other, what stands beside it would be unexpected on load."""
    renaming = WeightRenaming("self_attn.wq.weight", "self_attn.q_proj.weight")
    tensors = frozenset({"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"})
    how, about = Reading((renaming,), "model", tensors), architecture(kind("norm", "self_attn.q_proj"))
    where, name = "model.layers.0.self_attn.wq.weight", "model.layers.0.self_attn.q_proj.weight"
    assert problems(named, about, how, "layers.0.self_attn.wq", error=UnsupportedFamilyError) == [
        Problem("tensor-renamed-alone", where, name=name)
    ]
    # the negative control: a module that is renamed as a whole
    how = Reading((WeightRenaming("self_attn.wq.", "self_attn.q_proj."),), "model", tensors)
    layout = named(about, how, "layers.0.self_attn.wq")
    assert renamed(layout) == [{"self_attn.q_proj": "self_attn.wq"}]
