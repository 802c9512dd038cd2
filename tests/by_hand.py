"""Stock models of random weights from a config, and modules that are expanded alone: no plan, no record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.modeling.expanded_modules import expand_module, make_blocks
from scale_surgery.modeling.expanded_paths import ActiveExpansions, Context, Paths
from scale_surgery.modeling.expanded_paths import Path as ModelPath


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


def expand_alone(module: Any, kind: str, fork: int | None = 0, **sizes: Any) -> Any:
    """Expand a module by itself, in place, as in a model of one layer with one expansion, which runs."""
    # `fork` is the first layer with W12, None where there is none; `sizes` are what a specification of that kind says,
    # `collaborative` where W12 exists, and `dtype`
    paths = Paths((ModelPath(DEFAULT_NAME),), {DEFAULT_NAME: fork}, 1)
    expand_module(module, kind, ActiveExpansions(Context(paths)), 0)
    plan = {"widths": {"up_inner_width": sizes.get("up_in", 0), "up_width": 0}, "dtype": sizes.get("dtype")}
    spec = {"kind": kind, "group": kind * bool(sizes.get("collaborative")), **sizes}
    module.expansions[DEFAULT_NAME] = make_blocks(module, plan, spec, {}, [kind])
    sections = [base for base, _ in sizes.get("out_features", ())]
    module.sections = tuple(sections) if len(sections) > 1 else ()
    return module
