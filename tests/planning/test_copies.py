"""What of a copied layer begins mute is known by its names in memory, whatever they are on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.planning.architecture import Architecture, Block, Kind, Norm, Sizes
from scale_surgery.planning.base import Base, BaseFacts
from scale_surgery.planning.depth import depth_tensors

# on disk and in memory, as of a mixture whose experts are joined when it is loaded
NAMES = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.0.pre.weight": "model.layers.0.pre_norm.weight",
    "model.layers.0.post.weight": "model.layers.0.post_norm.weight",
    "model.layers.0.moe.experts.0.w1.weight": "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.moe.experts.0.w2.weight": "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.moe.experts.1.w2.weight": "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.moe.extra.0.w2.weight": "model.layers.0.mlp.extra.0.down_proj.weight",
}


def base_of(path: Path, post_norms: tuple[Norm, ...], weightless: tuple[str, ...]) -> Base:
    save_file({name: torch.zeros(2, 2) for name in NAMES}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "any"}))
    mute = ("mlp.experts.down_proj", "mlp.extra.*.down_proj.weight")
    block = Block("mlp", "", "ffn", "block", mute=mute, post_norm="".join(norm.name for norm in post_norms))
    stored = {"pre_norm": "pre", "post_norm": "post", "mlp": "moe"}
    kind = Kind((block,), (Norm("pre_norm"),), post_norms, stored_as=stored)
    about = Architecture("any", "", {}, "model", "layers", "embed_tokens", Norm("norm"), "lm_head", (kind,), (0,))
    about = replace(about, weightless=weightless)
    sizes, checkpoint = Sizes(2, 1, 0, 0, 0, 0, 2, 1e-6, True), open_checkpoint(path)
    return Base(checkpoint, BaseFacts(about, sizes, in_memory=NAMES))


WRITERS, AFTER = ("experts.0.w2", "experts.1.w2", "extra.0.w2"), (Norm("post_norm"),)


@pytest.mark.parametrize(
    ("post_norms", "weightless", "silent"),
    [((), (), WRITERS), (AFTER, (), ("post",)), (AFTER, ("layers.0.post_norm",), WRITERS)],
)
def test_what_writes_begins_mute(tmp_path, post_norms, weightless, silent):
    tensors = list(depth_tensors(base_of(tmp_path, post_norms, weightless), [0]))
    assert {tensor.source for tensor in tensors} == {*NAMES} - {"model.embed_tokens.weight"}
    mute = {tensor.source for tensor in tensors if not tensor.is_copy}
    assert mute == {name for name in NAMES if name.removesuffix(".weight").endswith(silent)}
    norms = {tensor.source for tensor in tensors if tensor.kind == "norm"}
    assert norms == {"model.layers.0.pre.weight"} | ({"model.layers.0.post.weight"} if post_norms else set())
