"""Plan and expand a mixture of experts that is larger than memory. Linux only.

    python -m benchmarks.mixture --work FOLDER

A checkpoint of the shape of Qwen3-30B-A3B is made first: 48 layers of 128 experts, 61 GB. Attention, norms, embedding
and head hold random numbers; experts are holes of sparse files, which take no room and are read as zeros. `expand`
reads them to hash them, and takes them over as hard links.

seconds, peak   as benchmarks/pipeline.py measures them
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import Measurement, measure

HIDDEN, INNER, EXPERTS, HEADS, KEY_VALUE_HEADS, HEAD, VOCABULARY = 2048, 768, 128, 32, 4, 128, 151936
SPREAD = 0.02
ROWS = 4096
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
Shapes = dict[str, tuple[int, ...]]


def layer_shapes(layer: int) -> Shapes:
    """Shapes of the tensors of a layer, as the model is published."""
    path = f"model.layers.{layer}."
    shapes: Shapes = {
        f"{path}input_layernorm.weight": (HIDDEN,),
        f"{path}post_attention_layernorm.weight": (HIDDEN,),
        f"{path}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{path}self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        f"{path}self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        f"{path}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{path}self_attn.q_norm.weight": (HEAD,),
        f"{path}self_attn.k_norm.weight": (HEAD,),
        f"{path}mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        expert_path = f"{path}mlp.experts.{expert}."
        shapes |= {f"{expert_path}{name}.weight": (INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"{expert_path}down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def write_shard(file: Path, shapes: Shapes) -> None:
    """Write random numbers, and holes in place of experts."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
        for name, shape in shapes.items():
            if ".experts." not in name:
                stream.seek(8 + len(text) + header[name]["data_offsets"][0])
                # a child process inherits the peak of its parent: nothing large is held here
                for rows in torch.ones(shape).split(ROWS) if len(shape) == 1 else torch.empty(shape[0]).split(ROWS):
                    values = rows if len(shape) == 1 else torch.randn(len(rows), shape[1]) * SPREAD
                    stream.write(values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())


def make_mixture(folder: Path, layers: int) -> int:
    """Write the checkpoint; returns the bytes of its shards."""
    folder.mkdir()
    parts: list[Shapes] = [dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, HIDDEN))]
    parts += [layer_shapes(layer) for layer in range(layers)]
    parts[0]["model.norm.weight"] = (HIDDEN,)
    places = {}
    for number, shapes in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_shard(folder / name, shapes)
        places |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run_commands(base: Path, made: Path, chosen: str) -> Iterator[Measurement]:
    """Plan and expand, each in a process of its own."""
    program = [sys.executable, "-m", "scale_surgery"]
    options = ["--layers", chosen, "--json", "--quiet"]
    yield measure([*program, "inspect", str(base), "--json", "--quiet"], "inspect")
    yield measure([*program, "plan", str(base), *options], "plan")
    yield measure([*program, "expand", str(base), *options, "--base-weights", "link", "-o", str(made)], "expand")


@click.command()
@click.option("--layers", default=48, show_default=True, help="Layers of the model.")
@click.option("--expand", "chosen", default="last:4", show_default=True, help="Layers to expand.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmark-work"))
def main(layers: int, chosen: str, work: Path) -> None:
    """Plan and expand a mixture of experts that is larger than memory."""
    work.mkdir(parents=True)
    try:
        size = make_mixture(work / "base", layers)
        table = Table("command", "seconds", "processor", "peak anonymous", "peak RSS")
        for done in run_commands(work / "base", work / "made", chosen):
            if done.exit_code:
                raise click.ClickException(f"{done.command} ended with {done.exit_code}")
            seconds = (f"{done.seconds:.1f}", f"{done.processor_seconds:.1f}")
            table.add_row(
                done.command,
                *seconds,
                *(f"{peak / 2**30:.2f} GiB" for peak in (done.peak_anonymous_bytes, done.peak_rss_bytes)),
            )
    finally:
        shutil.rmtree(work)
    console = Console(width=100)
    console.print(f"{layers} layers, {size / 2**30:.1f} GiB")
    console.print(table)


if __name__ == "__main__":
    main()
