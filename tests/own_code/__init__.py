"""A model whose classes lie in its own folder, as people publish theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

AUTO_MAP = {
    "AutoConfig": "configuration_pine.PineConfig",
    "AutoModel": "modeling_pine.PineModel",
    "AutoModelForCausalLM": "modeling_pine.PineForCausalLM",
}


def save_pine(path: Path, *, marker: Path | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model as people publish theirs: code, config and weights in one folder."""
    from tests.own_code.configuration_pine import PineConfig
    from tests.own_code.modeling_pine import PineForCausalLM

    path.mkdir(parents=True)
    for file in ("configuration_pine.py", "modeling_pine.py", "needles.py"):
        shutil.copy(Path(__file__).parent / file, path)
    torch.manual_seed(0)
    model = PineForCausalLM(PineConfig(**changes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    save_file({name: tensor.detach() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    config = model.config.to_dict() | {"auto_map": AUTO_MAP, "architectures": ["PineForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if marker is not None:
        with (path / "needles.py").open("a") as file:
            file.write(f"\n\n__import__('pathlib').Path({str(marker)!r}).touch()\n")
    return path
