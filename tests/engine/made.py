"""Models of the new engine, made in memory of folders that the old one wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from scale_surgery.deriving.base import derive_config
from scale_surgery.engine.modeling_scale import expand_in_memory
from scale_surgery.planning.routing_specs import build_paths, path_problems
from tests.conftest import load


def with_expansions(base_path: Path, folders: dict[str, Path], **options: Any) -> Any:
    """The base in the new engine, with the expansions of folders that expand it."""
    model = load(base_path, **options)
    found = derive_config(json.loads((base_path / "config.json").read_text()), str(base_path), 10_000)
    base = build_paths(found.architecture, found.sizes)
    key = base["softcap"]
    cap = getattr(model.config.get_text_config(decoder=True), key) if key else None
    expand_in_memory(model, base | {"softcap": cap, "softcap_key": key})
    for name, folder in folders.items():
        old = load(folder, **options)
        plan = old.config.scale_surgery
        fork = min(plan["collaborative"]["layers"], default=None)
        model.add_expansion(name, plan | {"problems": path_problems(found.architecture, fork)})
        modules = dict(model.named_modules())
        own = {key: tensor for key, tensor in old.named_parameters() if tensor.requires_grad}
        mine = 0
        for key, tensor in own.items():
            place, _, last = key.rpartition(".")
            blocks = modules[f"{place}.expansions.{name}"]
            assert blocks._parameters[last].shape == tensor.shape, key
            blocks._parameters[last] = torch.nn.Parameter(tensor.detach())
            mine += 1
        wanted = sum(f".expansions.{name}." in key for key, _ in model.named_parameters())
        assert mine == wanted
    model.freeze_base()
    model.align()
    return model.eval()
