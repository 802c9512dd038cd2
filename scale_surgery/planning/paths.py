"""The modules that every path of a model passes through, and why a model cannot run two paths.

The result is `base` under the key `scale_surgery` of config.json, which the exported modeling code executes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_surgery.errors import Problem
from scale_surgery.planning.architecture import Architecture, Block, Kind, Sizes
from scale_surgery.planning.specs import Spec, attention_values


def base_specs(architecture: Architecture, sizes: Sizes, config: Mapping[str, Any]) -> Spec:
    """Names, sizes and modules of the base, which hold whatever expansions a model has."""
    kinds = [
        {
            "modules": _modules(kind, sizes),
            "attention": {
                block.name: {"heads": block.query_heads, "kv_heads": block.key_value_heads}
                | attention_values(block, block.query_heads)
                for block in kind.blocks
                if block.query_heads
            },
        }
        for kind in architecture.kinds
    ]
    return {
        "hidden": sizes.hidden,
        "base_model": architecture.base_model,
        "layers": architecture.layers,
        "last": architecture.final_norm.name,
        "softcap": None if architecture.softcap is None else _text_part(config).get(*architecture.softcap),
        "softcap_key": None if architecture.softcap is None else architecture.softcap[0],
        "kinds": kinds,
        "kind_of_layer": list(architecture.kind_of_layer),
    }


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json about the language model: `text_config`, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def path_problems(architecture: Architecture, fork: int | None) -> list[Problem]:
    """List why a model cannot be routed: blocks through which two paths cannot pass, or logits that change later."""
    problems, family = list[Problem](), architecture.model_type
    if architecture.alters_logits:
        problems.append(Problem("logits-changed-later", family))
    if fork is None:
        return problems
    if architecture.keeps_batch:
        problems.append(Problem("batch-kept", family))
    kinds = [architecture.kind(layer) for layer in range(fork, len(architecture.kind_of_layer))]
    blocks = {block.kind: block for kind in kinds for block in kind.blocks if not _takes_two_paths(block)}
    problems += [
        Problem("block-of-one-path", block=block.name, kind=block.kind, reason=block.reason)
        for block in blocks.values()
    ]
    return problems


def _takes_two_paths(block: Block) -> bool:
    return block.treatment == "split" or (block.is_whole and block.group == "ffn")


def _stock(sections: tuple[int, ...] = ()) -> Spec:
    """A module without a block of its own."""
    return {"kind": "passing", "base": None, "up": 0} | ({"sections": list(sections)} if sections else {})


def _modules(kind: Kind, sizes: Sizes) -> Spec:
    """Modules of a layer through which a base stream passes."""
    specs = {
        linear.name: _stock(linear.outputs if len(linear.roles) > 1 and linear.fused_by == "section" else ())
        for linear in kind.linears
    }
    specs |= {norm.name: _stock() for norm in (*kind.pre_norms, *kind.post_norms)}
    for block in kind.blocks:
        for norm in block.inner_norms:
            by_head = {"kind": "head_norm", "heads": block.heads_through(norm), "axis": norm.head_axis}
            specs[norm.name] = _stock() if norm.head_axis is None else by_head
        specs |= {name: {"kind": "activation", "base": block.inner} for name in block.activations}
        if block.is_whole:
            specs[block.name] = {"kind": "block", "base": sizes.hidden, "up": 0}
    return specs
