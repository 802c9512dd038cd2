"""config.json of an expanded folder, in blocks or fused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scale_surgery.checkpoint.expansions import BASE_KEY, EXPANSIONS_KEY, ROUTER_KEY, STOCK_KEY
from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.folder import loaded_dtype
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, SINGLE_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, ORIGIN_KEY
from scale_surgery.checkpoint.reading import differing_keys
from scale_surgery.errors import Problem
from scale_surgery.folder.joining import fork_of, gram_size, own_columns, shares_head
from scale_surgery.folder.record import BaseTensor, Manifest
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning import exported
from scale_surgery.planning.architecture import CONFIG_KEYS
from scale_surgery.planning.depth import deepened_config
from scale_surgery.planning.paths import base_specs, path_problems
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import Widths
from scale_surgery.planning.stock import first_wide_layer

NUMBERED_SINGLE_FILE = "model-00001-of-00001.safetensors"


def stored_shard(shard: str) -> str:
    """Return the name of a base shard in the expanded folder: a single file becomes a numbered one."""
    return NUMBERED_SINGLE_FILE if shard == SINGLE_FILE else shard


def expanded_config(
    config: Mapping[str, Any],
    plans: Sequence[Plan],
    tensors: Mapping[str, TensorInfo | BaseTensor],
    routing: Router | None = None,
) -> dict[str, Any]:
    """Edit the config.json of a base with these tensors: own model type and classes, its expansions, all else as is."""
    facts = plans[0]
    architecture = facts.architecture
    # a model with duplicated layers is a stock one of more layers
    if facts.numbering is not None:
        edited = deepened_config(config, {**facts.specs, ORIGIN_KEY: plain_json(asdict(facts.origin))}, architecture)
    else:
        edited = dict(config) | {
            "architectures": exported.architectures(architecture),
            "model_type": architecture.expanded_type,
            "auto_map": {**(config.get("auto_map") or {}), **exported.auto_map(architecture)},
            CONFIG_KEY: {
                BASE_KEY: {**base_specs(architecture, facts.sizes, config), **_not_loaded(plans)},
                # in the order of the paths
                EXPANSIONS_KEY: [_expansion_specs(plan) for plan in plans],
            },
        }
        new_tokens = sum(plan.widths.new_tokens for plan in plans)
        if new_tokens:
            edited = _with_vocabulary(edited, facts, new_tokens)
    # the first shard that a loader opens may be that of an expansion
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        from scale_surgery.tensors.initialise import TORCH_DTYPES

        edited["torch_dtype"] = str(TORCH_DTYPES[loaded_dtype(tensors)]).removeprefix("torch.")
    return edited if routing is None else with_router(edited, routing)


def _not_loaded(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the base tensors that its class does not load, so that no loader reports them as damage."""
    paths = sorted({path for plan in plans for path in plan.facts.not_loaded})
    return {"not_loaded": paths} if paths else {}


def _with_vocabulary(config: dict[str, Any], plan: Plan, new_tokens: int) -> dict[str, Any]:
    """Edit config.json of an expanded model: a larger vocabulary; the base's is kept, as its modules have that size."""
    before, key = plan.sizes.vocabulary, plan.architecture.keys.get("vocabulary", CONFIG_KEYS["vocabulary"])
    size = {key: before + new_tokens}
    larger = {"text_config": {**config["text_config"], **size}} if "text_config" in config else size
    return {**config, **larger, CONFIG_KEY: {**config[CONFIG_KEY], STOCK_KEY: {key: before}}}


def with_router(config: Mapping[str, Any], routing: Router | None) -> dict[str, Any]:
    """Edit config.json of an expanded model: its router, or none."""
    specs = {name: value for name, value in config[CONFIG_KEY].items() if name != ROUTER_KEY}
    return {**config, CONFIG_KEY: specs if routing is None else {**specs, ROUTER_KEY: routing.settings}}


def _expansion_specs(plan: Plan) -> dict[str, Any]:
    # why it cannot run beside others, as texts: the exported code shows them
    problems = list(map(str, path_problems_of(plan)))
    return {**plan.specs, ORIGIN_KEY: plain_json(asdict(plan.origin)), **({"problems": problems} if problems else {})}


def path_problems_of(plan: Plan) -> list[Problem]:
    """List why the path of an expansion cannot run beside others."""
    return path_problems(plan.architecture, min(plan.collaboration.layers, default=None))


def code_texts(plan: Plan, *, is_fused: bool = False) -> dict[str, str]:
    """Return the texts of the code files of an expanded or fused folder, by their names."""
    return exported.code_texts(plan.architecture, plan.architecture.fused_code_files if is_fused else plan.code_files)


def hash_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the sha256 of each text, by the same names."""
    return {name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in texts.items()}


def fused_config(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Edit an expanded model's config.json: classes of a fused model, and sizes of base and expansion together."""
    plan = manifest.plan
    architecture, specs = plan.architecture, config[CONFIG_KEY]
    fork = fork_of(manifest)
    wide = _wide_values(config, manifest, fork)
    is_shared = shares_head(manifest)
    if plan.widths.up_width:
        wide["tie_word_embeddings"] = is_shared
    fused = {
        **({} if fork is None else {ROUTER_KEY: specs[ROUTER_KEY], "gram": gram_size(manifest)}),
        BASE_KEY: specs[BASE_KEY],
        EXPANSIONS_KEY: [
            {
                **spec,
                "fused": True,
                "first_wide_layer": first_wide_layer(architecture, plan.layers),
                "own_columns": own_columns(manifest) if is_shared else None,
                "fork": fork,
            }
            for spec in specs[EXPANSIONS_KEY]
        ],
        STOCK_KEY: {key: config.get(key) for key, value in wide.items() if config.get(key) != value},
    }
    return {
        **config,
        **wide,
        "architectures": exported.architectures(architecture, "fused"),
        "model_type": architecture.fused_type,
        "auto_map": {**config["auto_map"], **exported.auto_map(architecture, "fused")},
        CONFIG_KEY: fused,
    }


def _wide_values(config: Mapping[str, Any], manifest: Manifest, fork: int | None) -> dict[str, Any]:
    """Return the sizes of hidden state and heads with the expansion, by keys of config.json."""
    plan = manifest.plan
    # where a model sees images, what serves its language model reads them from the modules
    if "text_config" in config or plan.widths == Widths(new_tokens=plan.widths.new_tokens):
        return {}
    key = {name: plan.architecture.keys.get(name, common) for name, common in CONFIG_KEYS.items()}
    sizes, widths = plan.sizes, plan.widths
    paths = [1 + (fork is not None and layer >= fork) for layer in range(sizes.layers)]
    heads = [(count * q, count * kv) for layer, count in enumerate(paths) for q, kv in [_heads(plan, layer)]]
    most = max(heads)
    per_layer = {
        str(layer): {key["query_heads"]: counts[0], key["key_value_heads"]: counts[1]}
        for layer, counts in enumerate(heads)
        if counts != most
    }
    layers = dict(config.get("per_layer_config") or {})
    layers |= {number: {**layers.get(number, {}), **values} for number, values in per_layer.items()}
    # an attention that is not split keeps its heads
    of_heads = {key["query_heads"]: most[0], key["key_value_heads"]: most[1], key["head_size"]: sizes.head_size}
    return {
        # that which the head reads
        key["hidden"]: sizes.hidden + widths.up_width + (own_columns(manifest) if shares_head(manifest) else 0),
        **(of_heads if sizes.query_heads else {}),
        **({"per_layer_config": layers} if per_layer else {}),
    }


def _heads(plan: Plan, layer: int) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads in a layer of the fused model."""
    split = [block for block in plan.architecture.kind(layer).blocks if block.query_heads]
    if not split:
        return plan.sizes.query_heads, plan.sizes.key_value_heads
    block, new = split[0], plan.widths.up_kv_heads * (layer in plan.layers)
    return block.query_heads + new * block.queries_per_key_value, block.key_value_heads + new


def written_config(manifest: Manifest, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of an expanded folder, made of its base's: expanded, routed and fused as surgery.json says."""
    written = expanded_config(base, list(manifest.plans.values()), manifest.base_tensors, manifest.routing)
    return written if manifest.fused is None else fused_config(written, manifest)


def config_problems(manifest: Manifest, config: Mapping[str, Any]) -> list[Problem]:
    """List keys of config.json that changed since it was written; none without expansions."""
    if not manifest.expansions:
        return []
    written = written_config(manifest, manifest.base_config)
    return [Problem("config-key-changed", f"{CONFIG_FILE}: {key}") for key in differing_keys(written, config)]
