"""The models of the inference benchmark: a random Llama, its expansions as blocks and fused, and stock dense ones.

A dense model has as many layers as the base and, within 1 %, as many parameters as the expanded model it stands for.
Its residual stream and its heads grow by whole groups of query heads with the key/value head they share, head size
unchanged, and its inner width is what is then missing; of these models it is the one whose inner width is nearest to
that of the base, as a multiple of the hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.device import Place, settle
from benchmarks.make_checkpoint import SPREAD, Shape, make_checkpoint, tensor_shapes
from scale_surgery import Request, RunOptions, expand, register
from scale_surgery.surgery.merge import merge

# with new heads, which are no default
RANDOM: Any = {"up_kv_heads": 1, "init_w21": "random", "init_w22": "random", "init_embedding": "zero"}
REQUESTS = {
    "preserve": Request("all", **RANDOM),
    "adapt": Request("all", variant="adapt", collaborate="both", **RANDOM),
}
INNER_STEP = 8


@dataclass(frozen=True)
class Variant:
    """A model to measure.

    Attributes:
        name: Of its folder.
        form: "base", "blocks", "fused" or "dense".
        dense: Name of the dense model that it is compared with; that of adapt for the base.
    """

    name: str
    form: str
    dense: str


def count_parameters(shape: Shape) -> int:
    """Number of parameters of a stock Llama."""
    return sum(map(prod, tensor_shapes(shape).values()))


def with_inner(shape: Shape, parameters: int) -> Shape:
    """Choose the inner width with which a Llama has about so many parameters."""
    rest = count_parameters(replace(shape, inner=0))
    steps = round((parameters - rest) / (3 * shape.hidden * shape.layers * INNER_STEP))
    return replace(shape, inner=INNER_STEP * max(1, steps))


def wider(shape: Shape) -> Iterator[Shape]:
    """List a Llama with the same and with more heads, up to twice as many."""
    for key_value_heads in range(shape.key_value_heads, 2 * shape.key_value_heads + 1):
        heads = shape.heads // shape.key_value_heads * key_value_heads
        hidden = shape.hidden // shape.heads * heads
        yield replace(shape, hidden=hidden, heads=heads, key_value_heads=key_value_heads)


def dense_shape(shape: Shape, parameters: int) -> Shape:
    """Shape of the dense model of so many parameters: see above."""
    candidates = [with_inner(candidate, parameters) for candidate in wider(shape)]
    return min(candidates, key=lambda candidate: abs(candidate.inner / candidate.hidden - shape.inner / shape.hidden))


def shake(folder: Path) -> None:
    """Add random numbers to all expansion tensors, so that none is zero."""
    generator = torch.Generator().manual_seed(0)
    for file in sorted(folder.glob("expansion-*.safetensors")):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor += (torch.randn(tensor.shape, generator=generator) * SPREAD).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def make_models(folder: Path, shape: Shape, place: Place, layers: str) -> list[Variant]:
    """Write the base, expansions of these layers, their fused forms and dense models into a folder."""
    how = {"dtype": getattr(torch, place.dtype), "device": place.device}
    make_checkpoint(folder / "base", shape, **how)
    variants = [Variant("base", "base", "dense (adapt)")]
    for name, request in REQUESTS.items():
        made = expand(folder / "base", replace(request, layers=layers), folder / name, base_weights="link")
        shake(made.path)
        merged = merge(made.path, folder / f"{name} fused", "fused", run=RunOptions(device=place.device))
        make_checkpoint(folder / f"dense ({name})", dense_shape(shape, merged.parameters_before), **how)
        variants += [Variant(name, "blocks", f"dense ({name})"), Variant(f"{name} fused", "fused", "dense (adapt)")]
    return variants + [Variant(f"dense ({name})", "dense", f"dense ({name})") for name in REQUESTS]


def load(folder: Path, variant: Variant, device: str) -> Any:
    """Load a model, its weights in memory of their own: how they lie in files is not to be measured."""
    register()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder / variant.name).eval().to(device)
    settle(model)
    return model


def count_multiply_adds(model: Any) -> int:
    """Multiplications with additions for one token, as the shapes of the weights have them: all but the embedding's."""
    # attention is not counted: it is the same in all models but for the number of heads
    embedding = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    tied = {id(model.get_output_embeddings().weight)}
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return sum(matrix.numel() for matrix in matrices if id(matrix) not in embedding - tied)
