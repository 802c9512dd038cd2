"""Expanded checkpoints of any stock model, with specifications that a test writes: no family, no plan, no record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import DEFAULT_NAME, expansion_of
from scale_surgery.checkpoint.names import CODE_FILES, INDEX_FILE
from scale_surgery.modeling.expanded_model import make_blocks
from scale_surgery.modeling.expanded_modules import expand_module
from scale_surgery.modeling.expanded_paths import Call, Paths, Running
from scale_surgery.modeling.expanded_paths import Path as ModelPath

UP = 6
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(3))
SHARD, NEW_SHARD = "model-00001-of-00001.safetensors", "expansion-default-00001-of-00001.safetensors"


@dataclass(frozen=True)
class Names:
    """What the modeling code has to know of an architecture."""

    model_type: str
    config_class: str
    classes: Mapping[str, str]
    own_code: Mapping[str, str] = field(default_factory=dict)


def save_base(path: Path, model: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Save a stock model of random weights, as transformers does."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or name.endswith("bias") else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    model.to(dtype).save_pretrained(path)
    return path


def make_base(path: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Save a stock language model of a config."""
    torch.manual_seed(0)
    return save_base(path, transformers.AutoModelForCausalLM.from_config(config), dtype)


def names_of(config: Any, **classes: str) -> Names:
    """Names of the stock classes of a config; those of its language model where no other are given."""
    own = type(config)
    for auto in () if classes else ("AutoModel", "AutoModelForCausalLM"):
        classes[auto] = getattr(transformers, auto)._model_mapping[own].__name__
    return Names(config.model_type, own.__name__, classes)


def norm(width: int, style: str = "rms") -> dict[str, Any]:
    return {"kind": "norm", "base": width, "up": UP, "style": style, "epsilon": 1e-6}


def reading(width: int) -> dict[str, Any]:
    """A module of a layer that is not expanded: it reads the base stream."""
    return {"kind": "passing", "base": width, "up": 0}


WRITING = {"kind": "passing", "base": None, "up": UP}


def linear(inputs: list[int], *outputs: list[int], group: str = "attn") -> dict[str, Any]:
    return {"kind": "linear", "group": group, "in_features": inputs, "out_features": list(outputs)}


def block(width: int, inner: int = 5) -> dict[str, Any]:
    return {"kind": "block", "base": width, "up": UP, "inner": inner, "group": "ffn"}


def plan_of(width: int, layers: list[int], groups: list[str], **own: Any) -> dict[str, Any]:
    """What all specifications hold."""
    return {
        "format": 1,
        "base_model": "model",
        "layers": "layers",
        "expanded_layers": layers,
        "widths": {"up_width": UP, "up_kv_heads": 0, "up_inner_width": 4},
        "collaborative": {"layers": layers if groups else [], "groups": groups},
        "dtype": None,
        "model": {"embed_tokens": {"kind": "embedding", "up": UP}, "norm": norm(width)},
        "head": {"kind": "head", "base": width, "up": UP},
        "attention": {},
        **own,
    }


def config_key(plan: Mapping[str, Any], base: Any = None, **router: Any) -> dict[str, Any]:
    """Content of scale_surgery in config.json for one expansion.

    Args:
        plan: What is said of the expansion.
        base: What is said of the base; without, what the expansion passes through.
        router: The router and its numbers, if there is one.
    """
    said = {"base": base or base_of(plan), "expansions": [{"name": DEFAULT_NAME, **plan}]}
    return said | ({"router": router} if router else {})


def base_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the paths pass through: every module of which the expansion says something."""
    kinds = plan.get("kinds") or [plan]
    return {
        **{key: plan[key] for key in ("base_model", "layers")},
        "hidden": plan["head"]["base"],
        "last": next(reversed(plan["model"])),
        "softcap": None,
        "softcap_key": None,
        "kinds": [{"modules": _passed(kind), "attention": kind["attention"]} for kind in kinds],
        "kind_of_layer": plan.get("kind_of_layer", [0] * 3),
    }


def _passed(kind: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, spec in (kind["passing"] | kind["expanded"]).items():
        own = spec["kind"] if spec["kind"] in ("block", "activation", "head_norm") else "passing"
        found[name] = spec if own == "activation" else {**spec, "kind": own, "up": 0}
    return found


def write_expanded(
    base: Path,
    path: Path,
    plan: Mapping[str, Any],
    names: Names,
    load: Any = None,
    *,
    base_specs: Any = None,
    router: Mapping[str, Any] | None = None,
) -> Path:
    """Expand a base: its file as it is, new tensors beside it, zero where the output must stay the base's.

    Args:
        base: Folder of the base, of one shard.
        path: Folder to be.
        plan: What config.json says of the expansion.
        names: Names of its stock classes.
        load: Auto class that loads it.
        base_specs: What config.json says of the base, where that is not what the expansion passes through.
        router: The router and its numbers, if there is one.
    """
    load = load or transformers.AutoModelForCausalLM
    shutil.copytree(base, path)
    (path / "model.safetensors").rename(path / SHARD)
    config = json.loads((base / "config.json").read_text()) | {
        "architectures": modeling.architectures(names),
        "model_type": f"scale_{names.model_type}",
        "auto_map": modeling.auto_map(names),
        "scale_surgery": config_key(plan, base_specs, **(router or {})),
    }
    (path / "config.json").write_text(json.dumps(config))
    for file in CODE_FILES:
        (path / file).write_text(modeling.code_text(file))
    places = dict.fromkeys(load_file(path / SHARD), SHARD)
    write_index(path, places)
    empty = load.from_pretrained(path, strict_loading=False)
    torch.manual_seed(1)
    tensors = {name: fresh(name, own) for name, own in empty.named_parameters() if is_new(name)}
    # as the base's tensors beside them are called on disk
    stored = revert_weight_conversion(empty, tensors)
    save_file(stored, path / NEW_SHARD, metadata={"format": "pt"})
    write_index(path, places | dict.fromkeys(stored, NEW_SHARD))
    return path


def is_new(name: str) -> bool:
    return expansion_of(name) is not None


# the part of the head that an expansion adds, by the end of its name
HEAD_UP = f"lm_head.expansions.{DEFAULT_NAME}.up_weight"


def fresh(name: str, like: torch.Tensor) -> torch.Tensor:
    """A new tensor: W12 and the head are zero."""
    if name.endswith((".w12", HEAD_UP)):
        return torch.zeros_like(like).detach()
    return (torch.randn_like(like) * 0.2 + (like.dim() == 1)).detach()


def expand_alone(module: Any, kind: str, fork: int | None = 0, **sizes: Any) -> Any:
    """Expand a module by itself, in place, as in a model of one layer with one expansion, which runs.

    Args:
        module: A stock module.
        kind: Key of KINDS.
        fork: The first layer with W12; None where there is none.
        sizes: What a specification says of a module of that kind; `collaborative` where W12 exists, and `dtype`.
    """
    paths = Paths((ModelPath(DEFAULT_NAME),), {DEFAULT_NAME: fork}, 1)
    expand_module(module, kind, Running(Call(paths)), 0)
    plan = {"widths": {"up_inner_width": sizes.get("up_in", 0), "up_width": 0}, "dtype": sizes.get("dtype")}
    spec = {"kind": kind, "group": kind * bool(sizes.get("collaborative")), **sizes}
    module.expansions[DEFAULT_NAME] = make_blocks(module, plan, spec, {}, [kind])
    sections = [base for base, _ in sizes.get("out_features", ())]
    module.sections = tuple(sections) if len(sections) > 1 else ()
    return module


def write_index(path: Path, places: Mapping[str, str]) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": dict(places)}))


def same_logits(base: Any, model: Any, **inputs: Any) -> bool:
    """Whether logits are equal bit for bit, for a batch and for one row."""
    inputs = inputs or {"input_ids": IDS}
    with torch.no_grad():
        whole = torch.equal(base(**inputs).logits, model(**inputs).logits)
        row = {name: value[:1] for name, value in inputs.items()}
        return whole and torch.equal(base(**row).logits, model(**row).logits)


def same_generation(base: Any, model: Any, **inputs: Any) -> bool:
    """Whether greedy continuations with a cache are equal, and their logits bit for bit."""
    inputs = inputs or {"input_ids": IDS}
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    one, other = (own.generate(**inputs, **options, pad_token_id=0) for own in (base, model))
    pairs = zip(one.logits, other.logits, strict=True)
    return torch.equal(one.sequences, other.sequences) and all(torch.equal(a, b) for a, b in pairs)


def shaken(model: Any, *ends: str) -> Any:
    """The model with other values in its new tensors of these names."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_new(name) and name.endswith(ends):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
