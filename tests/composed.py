"""Expansions of one tiny base that have learned: the folders that they are alone, and their extracts, by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from scale_surgery import PosteriorRouter, Request, compose, expand, extract, load_expansion
from tests import routed
from tests.by_hand import make_base
from tests.conftest import load, shake
from tests.surgery.test_mixtures_in_memory import CONFIGS
from tests.tiny import LLAMA_LIKE, TINY, TOKENS

SMALL: dict[str, Any] = TINY | TOKENS
MLA = {
    "intermediate_size": 52,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
REQUESTS = {
    "medicine": Request("1-2", init_w22="random"),
    # it writes into the base stream from the first layer on; layer 1 was not chosen
    "law": Request("0,2", variant="adapt", collaborate="both", init_w22="random"),
    # wider than the others
    "music": Request("0-1", up_width=60, init_w22="random"),
    "chess": Request("1-2", method="grow"),
    "checkers": Request("1-2", method="grow", variant="grow-train"),
    "whole": Request("all", init_w22="random"),
    "late": Request("all", variant="adapt", collaborative_layers="1", init_w22="random"),
    # of two layers one
    "first": Request("0", variant="adapt", collaborate="both", init_w22="random"),
    "second": Request("1", init_w22="random", seed=1),
    # the other ways through a layer, by the names that they have there
    **{name: routed.REQUESTS[name] for name in ("deep", "without_up_stream", "without_heads", "without_inner")},
    "gated": Request("all", variant="gated", collaborate="both", init_w22="random"),
    "precise": replace(routed.REQUESTS["adapt"], dtype="float32"),
}
# other makes: a latent of keys and values beside experts, positions that read a mask, classes of another type, ...
OTHERS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SMALL | MLA),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=97, pad_token_id=0, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, n_positions=64, n_inner=48
    ),
    "gpt2_upcasting": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=40, n_layer=3, n_head=4, n_positions=64, reorder_and_upcast_attn=True
    ),
    "internlm3": lambda: transformers.InternLM3Config(**LLAMA_LIKE, **TOKENS),
    "opt": lambda: transformers.OPTConfig(
        **SMALL, word_embed_proj_dim=40, ffn_dim=52, max_position_embeddings=64, dropout=0.0
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**LLAMA_LIKE, **TOKENS),
    **CONFIGS,
}
LLAMA = ("medicine", "law", "music", "chess")


def mixed(weights: tuple[float, ...] | None = None, switch_rate: float = 0.01) -> PosteriorRouter:
    """A posterior router with these weights of the base and of each expansion, or with all alike."""
    return PosteriorRouter(weights, switch_rate)


@dataclass(frozen=True)
class Made:
    """A base, expansions of it that have learned, and their extracts, by name; options with which all are loaded."""

    base: Path
    folders: dict[str, Path]
    extracts: dict[str, Path]
    options: dict[str, Any] = field(default_factory=dict)

    def composed(self, *names: str) -> Any:
        """A composed model of some expansions, or of all."""
        model = load(self.base, **self.options)
        for name in names or self.extracts:
            model = load_expansion(model, self.extracts[name], name=name)
        return model

    def alone(self, name: str | None) -> Any:
        """The model that one expansion is by itself, as apply writes it, or the base."""
        return load(self.base if name is None else self.folders[name], **self.options)

    def trained(self, folder: Path) -> Made:
        """Copies of these expansions, of which all that trains has moved."""
        folders = {
            name: shake(Path(shutil.copytree(path, folder / name)), seed)
            for seed, (name, path) in enumerate(self.folders.items())
        }
        extracts = {name: extract(path, folder / f"{name}.extract").path for name, path in folders.items()}
        return replace(self, folders=folders, extracts=extracts)


def make_expansions(
    base_of: Callable[..., Path],
    folder: Path,
    family: str,
    names: tuple[str, ...],
    dtype: str = "float32",
    *,
    is_trained: bool = True,
) -> Made:
    """Expand a base as some of REQUESTS say, and let all that trains move, unless they are to be as they were made."""
    if family in OTHERS:
        base = make_base(folder / "base", OTHERS[family](), getattr(torch, dtype))
    else:
        base = base_of(family, dtype, dtype == "bfloat16")
    folders, extracts = {}, {}
    for seed, name in enumerate(names):
        folders[name] = expand(base, replace(REQUESTS[name], name=name), folder / name).path
        if is_trained:
            shake(folders[name], seed)
        extracts[name] = extract(folders[name], folder / f"{name}.extract").path
    return Made(base, folders, extracts)


def make_speaking(folder: Path) -> tuple[Made, Path]:
    """Expansions of a base with a byte-level tokenizer, and a composed folder of them."""
    from tests.routing.test_report import bytes_tokenizer
    from tests.tiny import save_tiny

    base = save_tiny(folder / "base", "llama", vocab_size=258)
    bytes_tokenizer().save_pretrained(base)
    made = make_expansions(lambda *_: base, folder, "llama", ("medicine", "law", "music"))
    return made, compose(made.base, made.extracts, folder / "composed", routing=mixed(switch_rate=0.05)).path
