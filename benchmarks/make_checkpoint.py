"""Write a random Llama checkpoint of any shape, in shards, without holding more than a slice of a tensor.

    python benchmarks/make_checkpoint.py FOLDER --shape 8b
    python benchmarks/make_checkpoint.py FOLDER --shape tiny --hidden 128 --layers 6
    python benchmarks/make_checkpoint.py FOLDER --shape 7b --holes     # for inspect and plan

The values mean nothing; sizes, names, dtypes and shards are those of a real checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch
from torch import Tensor

SLICE_ELEMENTS = 1 << 23
SPREAD = 0.02
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool = False


SHAPES = {
    "tiny": Shape(hidden=64, inner=176, layers=4, heads=4, key_value_heads=2, vocabulary=256),
    # few parameters, and logits of a usual vocabulary: what a first try on a laptop is like
    "d96": Shape(hidden=96, inner=256, layers=4, heads=6, key_value_heads=6, vocabulary=32000),
    # an eighth of the width of Llama 3.1 8B: the head has its share of the whole there, 7 %, and an eighth is added
    "eighth": Shape(hidden=512, inner=1792, layers=16, heads=8, key_value_heads=8, vocabulary=9216),
    "d768": Shape(hidden=768, inner=2048, layers=12, heads=12, key_value_heads=12, vocabulary=32000),
    # half of the width and half of the layers of Llama 3.2 1B
    "h1024": Shape(hidden=1024, inner=2816, layers=8, heads=16, key_value_heads=8, vocabulary=32000),
    "100m": Shape(hidden=768, inner=2048, layers=12, heads=12, key_value_heads=4, vocabulary=16000),
    "1b": Shape(hidden=2048, inner=8192, layers=16, heads=32, key_value_heads=8, vocabulary=128256, tied=True),
    "7b": Shape(hidden=4096, inner=14336, layers=32, heads=32, key_value_heads=8, vocabulary=32768),
    "8b": Shape(hidden=4096, inner=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256),
}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name every tensor of the checkpoint, in the order in which it is stored."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in _layer_shapes(shape).items()}
    shapes["model.norm.weight"] = (shape.hidden,)
    return shapes if shape.tied else shapes | {"lm_head.weight": (shape.vocabulary, shape.hidden)}


def _layer_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    key_value = shape.hidden // shape.heads * shape.key_value_heads
    return {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (shape.hidden, shape.hidden),
        "self_attn.k_proj": (key_value, shape.hidden),
        "self_attn.v_proj": (key_value, shape.hidden),
        "self_attn.o_proj": (shape.hidden, shape.hidden),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }


def make_config(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Write config.json as transformers would."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def slices(size: tuple[int, ...], dtype: torch.dtype, decay: float, generator: torch.Generator) -> Iterator[Tensor]:
    """Make a random tensor a few rows at a time, in order, on the CPU."""
    # a vector is a norm's gain
    if len(size) == 1:
        yield torch.ones(size, dtype=dtype)
        return
    rows, columns = size
    # the device that the generator is on makes the numbers
    place = {"generator": generator, "device": generator.device}
    # column j is scaled as j^-decay, so that singular values fall about as fast; 0 leaves them flat
    scale = torch.arange(1, columns + 1, device=generator.device).float().pow(-decay)
    scale *= SPREAD / scale.square().mean().sqrt()
    step = max(1, SLICE_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield (torch.randn(min(step, rows - start), columns, **place) * scale).to(dtype).cpu()


def split_shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Fill shards with tensors in their order, none above `shard_bytes` unless one tensor alone is."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in shapes.items():
        needed = prod(size) * dtype.itemsize
        if shards[-1] and filled + needed > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += needed
    return shards


def write_header(stream: BinaryIO, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Write what stands before the tensors of a safetensors file: 8 bytes of length, then JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        begin, end = end, end + prod(size) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)


def make_checkpoint(
    folder: Path,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    decay: float = 0.0,
    seed: int = 0,
    shard_bytes: int = 5 * 10**9,
    device: str = "cpu",
    holes: bool = False,
) -> int:
    """Write config.json, shards and index of a random Llama model, and give the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    # equal seeds give equal files, on one kind of device; a GPU takes a hundredth of the time
    generator = torch.Generator(device).manual_seed(seed)
    shapes = tensor_shapes(shape)
    shards = split_shards(shapes, dtype, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, held in zip(names, shards, strict=True):
        with (folder / file).open("wb") as stream:
            write_header(stream, {name: shapes[name] for name in held}, dtype)
            # a sparse file: its header, and zeros that take no room
            if holes:
                stream.truncate(stream.tell() + sum(prod(shapes[name]) * dtype.itemsize for name in held))
                continue
            for name in held:
                for part in slices(shapes[name], dtype, decay, generator):
                    stream.write(part.view(torch.uint8).numpy().data)
    total = sum(prod(size) * dtype.itemsize for size in shapes.values())
    weight_map = {name: file for file, held in zip(names, shards, strict=True) for name in held}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", make_config(shape, dtype))
    return total


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True)
@click.option("--hidden", type=int, help="Instead of the shape's.")
@click.option("--inner", type=int, help="Instead of the shape's.")
@click.option("--layers", type=int, help="Instead of the shape's.")
@click.option("--heads", type=int, help="Instead of the shape's.")
@click.option("--key-value-heads", type=int, help="Instead of the shape's.")
@click.option("--vocabulary", type=int, help="Instead of the shape's.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--decay", default=0.0, show_default=True, help="Exponent by which singular values fall; 0 is flat.")
@click.option("--shard-gb", default=5.0, show_default=True, help="Size that a shard is filled to, in GB.")
@click.option("--seed", default=0, show_default=True)
@click.option("--holes", is_flag=True, help="Sparse files without numbers: enough for inspect and plan.")
def main(
    folder: Path, shape: str, dtype: str, decay: float, shard_gb: float, seed: int, holes: bool, **sizes: int | None
) -> None:
    """Write a random Llama checkpoint into FOLDER."""
    chosen = replace(SHAPES[shape], **{name: size for name, size in sizes.items() if size is not None})
    settings = {"decay": decay, "seed": seed, "shard_bytes": int(shard_gb * 1e9), "holes": holes}
    total = make_checkpoint(folder, chosen, dtype=getattr(torch, dtype), **settings)
    click.echo(f"{folder}: {chosen.layers} layers, {total:,} bytes")


if __name__ == "__main__":
    main()
