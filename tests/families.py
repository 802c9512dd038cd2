"""Facts about ten architectures, written by hand: what a layer is made of and how wide its parts are.

Names are those of the stock transformers modules, which are the names on disk. `tests/deriving/test_oracles.py`
compares with them what is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scale_surgery.planning.architecture import CONFIG_KEYS as KEYS
from scale_surgery.planning.architecture import STREAMS, Group, InnerNorm, Role, Sizes, Stream

CONFIG_KEYS = KEYS | {"epsilon": "rms_norm_eps", "is_tied": "tie_word_embeddings"}


@dataclass(frozen=True)
class Linear:
    """A linear of a layer; several roles are one fused projection, by sections of rows or head by head."""

    name: str
    roles: tuple[Role, ...]
    fused_by: Literal["section", "head"] = "section"

    @property
    def group(self) -> Group:
        return "ffn" if self.roles[0] in ("gate", "up_proj", "down") else "attn"

    @property
    def reads(self) -> Stream:
        return STREAMS[self.roles[0]][0]

    def writes(self) -> tuple[Stream, ...]:
        """Names of the streams it writes, one for each role."""
        return tuple(STREAMS[role][1] for role in self.roles)


@dataclass(frozen=True)
class Family:
    """What is known about one architecture.

    Attributes:
        model_type: `model_type` of the base model's config.json.
        base_model: Attribute of the language model that holds the model without its head.
        layers: Module list of the layers, inside the base model, as are the embeddings and the final norm.
        position_embedding: Learned position embedding, where there is one.
        pre_norms: Norms of a layer that read the residual stream.
        post_norms: Norms of a layer whose output is added to the residual stream.
        inner_norms: Norms on queries or keys.
        activation: The activation module of the feed-forward network.
        transposed: Linears store (inputs, outputs), as transformers' Conv1D does.
        keys: Our name of a size to its key in config.json, where that is not the usual one.
        defaults: Values that config.json may leave out.
        attention: The attention module of a layer.
        attention_attributes: Attributes that its stock forward reads, each to the name of a size.
        attention_config: Keys of its config that its stock forward reads, each to the name of a size.
        softcap: Key of config.json that caps the logits after the head, and its default.
        fixed_heads: Why the stock class has no form with more heads, all else equal; None where it has one.
        heads_divide_hidden: Whether the stock config wants a number of query heads that divides the hidden size.
    """

    model_type: str
    linears: tuple[Linear, ...]
    activation: str
    pre_norms: tuple[str, ...]
    base_model: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    position_embedding: str | None = None
    final_norm: str = "norm"
    head: str = "lm_head"
    post_norms: tuple[str, ...] = ()
    inner_norms: tuple[InnerNorm, ...] = ()
    norm_style: Literal["rms", "rms_plus_one", "layer"] = "rms"
    transposed: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "self_attn"
    attention_attributes: Mapping[str, str] = field(default_factory=dict)
    attention_config: Mapping[str, str] = field(default_factory=dict)
    softcap: tuple[str, float | None] | None = None
    fixed_heads: str | None = None
    heads_divide_hidden: bool = False

    def key(self, size: str) -> str:
        """Key of a size in config.json."""
        return self.keys.get(size, CONFIG_KEYS[size])

    @property
    def mute_gain(self) -> int:
        """What its norms store where they give zeros."""
        return -1 if self.norm_style == "rms_plus_one" else 0


def read_sizes(family: Family, config: Mapping[str, Any]) -> Sizes:
    """Sizes by a parsed config.json, as transformers fills in what it leaves out."""
    sizes = {name: config.get(family.key(name), family.defaults.get(name)) for name in CONFIG_KEYS}
    sizes["key_value_heads"] = sizes["key_value_heads"] or sizes["query_heads"]
    sizes["head_size"] = sizes["head_size"] or sizes["hidden"] // sizes["query_heads"]
    sizes["inner"] = sizes["inner"] or 4 * sizes["hidden"]
    return Sizes(**sizes)


LLAMA_LINEARS = (
    Linear("self_attn.q_proj", ("q",)),
    Linear("self_attn.k_proj", ("k",)),
    Linear("self_attn.v_proj", ("v",)),
    Linear("self_attn.o_proj", ("o",)),
    Linear("mlp.gate_proj", ("gate",)),
    Linear("mlp.up_proj", ("up_proj",)),
    Linear("mlp.down_proj", ("down",)),
)
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_PRE_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
GEMMA_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
LAYER_NORM_KEYS = {"epsilon": "layer_norm_eps"}
HEADS_SHARE_HIDDEN = "its head size is the hidden size over the query heads, so more heads are smaller heads"


def _llama_like(model_type: str, **facts: Any) -> Family:
    common = {"linears": LLAMA_LINEARS, "activation": "mlp.act_fn", "pre_norms": LLAMA_NORMS}
    return Family(model_type, **{**common, **facts})


def _head_norms(axis: int) -> tuple[InnerNorm, ...]:
    return (InnerNorm("self_attn.q_norm", "query", axis), InnerNorm("self_attn.k_norm", "key_value", axis))


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _llama_like("llama", defaults={"epsilon": 1e-6, "is_tied": False}, heads_divide_hidden=True),
        _llama_like("mistral", defaults={"epsilon": 1e-6, "is_tied": False, "key_value_heads": 8}),
        _llama_like("qwen2", defaults={"epsilon": 1e-6, "is_tied": False, "key_value_heads": 32}),
        _llama_like(
            "qwen3",
            inner_norms=_head_norms(-2),
            defaults={"epsilon": 1e-6, "is_tied": False, "key_value_heads": 32, "head_size": 128},
        ),
        _llama_like(
            "gemma2",
            pre_norms=GEMMA_PRE_NORMS,
            post_norms=GEMMA_POST_NORMS,
            norm_style="rms_plus_one",
            defaults={"epsilon": 1e-6, "is_tied": True, "key_value_heads": 4, "head_size": 256},
            softcap=("final_logit_softcapping", 30.0),
            heads_divide_hidden=True,
        ),
        _llama_like(
            "gemma3_text",
            pre_norms=GEMMA_PRE_NORMS,
            post_norms=GEMMA_POST_NORMS,
            inner_norms=_head_norms(1),
            norm_style="rms_plus_one",
            defaults={
                "epsilon": 1e-6,
                "is_tied": True,
                "key_value_heads": 4,
                "head_size": 256,
                "vocabulary": 262_208,
                "query_heads": 8,
            },
            softcap=("final_logit_softcapping", None),
            heads_divide_hidden=True,
        ),
        _llama_like(
            "olmo2",
            pre_norms=(),
            post_norms=GEMMA_POST_NORMS,
            inner_norms=(InnerNorm("self_attn.q_norm", "query"), InnerNorm("self_attn.k_norm", "key_value")),
            defaults={"epsilon": 1e-5, "is_tied": False},
            fixed_heads="its queries and keys are normalised over all heads at once, and new heads by themselves",
        ),
        Family(
            "gpt_neox",
            linears=(
                Linear("attention.query_key_value", ("q", "k", "v"), fused_by="head"),
                Linear("attention.dense", ("o",)),
                Linear("mlp.dense_h_to_4h", ("up_proj",)),
                Linear("mlp.dense_4h_to_h", ("down",)),
            ),
            activation="mlp.act",
            pre_norms=LLAMA_NORMS,
            attention="attention",
            base_model="gpt_neox",
            embedding="embed_in",
            final_norm="final_layer_norm",
            head="embed_out",
            norm_style="layer",
            keys=LAYER_NORM_KEYS,
            defaults={"epsilon": 1e-5, "is_tied": False},
            fixed_heads=HEADS_SHARE_HIDDEN,
        ),
        _llama_like(
            "phi3",
            linears=(
                Linear("self_attn.qkv_proj", ("q", "k", "v")),
                Linear("self_attn.o_proj", ("o",)),
                Linear("mlp.gate_up_proj", ("gate", "up_proj")),
                Linear("mlp.down_proj", ("down",)),
            ),
            activation="mlp.activation_fn",
            defaults={"epsilon": 1e-5, "is_tied": False},
            attention_attributes={"num_key_value_heads": "key_value_heads"},
            attention_config={"num_attention_heads": "query_heads"},
        ),
        Family(
            "gpt2",
            linears=(
                Linear("attn.c_attn", ("q", "k", "v")),
                Linear("attn.c_proj", ("o",)),
                Linear("mlp.c_fc", ("up_proj",)),
                Linear("mlp.c_proj", ("down",)),
            ),
            activation="mlp.act",
            pre_norms=("ln_1", "ln_2"),
            base_model="transformer",
            layers="h",
            embedding="wte",
            position_embedding="wpe",
            final_norm="ln_f",
            norm_style="layer",
            transposed=True,
            keys={
                "hidden": "n_embd",
                "layers": "n_layer",
                "query_heads": "n_head",
                "inner": "n_inner",
                "epsilon": "layer_norm_epsilon",
            },
            defaults={"epsilon": 1e-5, "is_tied": True},
            attention="attn",
            attention_attributes={"split_size": "query_features", "num_heads": "query_heads"},
            fixed_heads=HEADS_SHARE_HIDDEN,
        ),
    )
}
