"""Export expanded tiny models of every family, with what they compute here; run by `make test-compat`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery import (
    CosineRouter,
    NewTokens,
    PosteriorRouter,
    Request,
    compose,
    expand,
    extract,
    merge,
    plan,
    register,
    route_export,
)
from scale_surgery.biographies import SHIPPED_MODEL
from tests.by_hand import make_base
from tests.composed import OTHERS
from tests.tiny import FAMILIES, save_tiny

REQUESTS = {
    "preserve": Request("1-2", init_w22="random"),
    "adapt": Request("0,2", variant="adapt", collaborate="both"),
    "heads": Request("1", variant="adapt", up_width=0),
    "grow": Request("0,2", method="grow", variant="grow-train"),
}
# of what is routed, and how
ROUTED = {
    "posterior": ("adapt", PosteriorRouter()),
    "cosine": ("adapt", CosineRouter(threshold=0.9)),
    "head": ("preserve", PosteriorRouter(switch_rate=0)),
    "grown": ("grow", PosteriorRouter(switch_rate=0)),
}
# what is fused: of the shaken ones
FUSED = ("preserve", "for_posterior", "cosine")
# what becomes a plain checkpoint; not every family can have heads there
STOCK = {
    "stock_inner": Request("0,2", variant="adapt", up_width=0, up_kv_heads=0),
    "stock_heads": Request("1", variant="adapt", up_width=0),
    "stock_grow": Request("0,2", method="grow", variant="grow-train"),
}


# a stock checkpoint of more layers; "stock" in the name: it is loaded without remote code
DEPTH = {"stock_depth": Request("0,2", method="depth"), "stock_depth_trained": Request("all", method="depth")}
# what is composed: unrouted ones, shaken, by the names that they get
COMPOSED = {"law": "for_posterior", "medicine": "for_head", "chess": "for_grown"}
# mixtures, latent attention, and positions that read a mask
OTHER_MAKES = ("qwen3_moe", "deepseek_v3", "opt")


# what gets new tokens: tied and untied heads, a cap after the head
WITH_TOKENS = ("llama", "gemma2", "gpt2")
TOKENS = NewTokens((" Xylophone", " birthplace"))
ROWS = 1200


def shake(path: Path) -> None:
    """Change every expansion tensor on disk, as training does, so that the two paths differ."""
    for file in path.glob("expansion-*.safetensors"):
        tensors = {name: tensor + torch.randn_like(tensor) * 0.1 for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def add_old_names(config: Path) -> None:
    """Name the number of experts as published models do; transformers 5 saves it under another name, which 4 lacks."""
    content = json.loads(config.read_text())
    if "num_local_experts" in content:
        config.write_text(json.dumps(content | {"num_experts": content["num_local_experts"]}))


def compute(path: Path, ids: torch.Tensor) -> None:
    """Write what a checkpoint computes beside it."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
        beams = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2)
    expected = {"ids": ids, "logits": logits, "tokens": tokens, "beams": beams}
    content = {name: tensor.tolist() for name, tensor in expected.items()}
    (path.parent / f"{path.name}.expected.json").write_text(json.dumps(content))


def main(folder: Path) -> None:
    """Write base and expanded models under `folder`, each expanded one with what it computes beside it."""
    register()
    torch.manual_seed(0)
    ids = torch.randint(3, 97, (2, 7))
    for family in FAMILIES:
        base = save_tiny(folder / family / "base", family, tie_word_embeddings=family in ("gpt2", "gemma2"))
        for name, request in REQUESTS.items():
            compute(expand(base, request, folder / family / name).path, ids)
        for name, (request_name, routing) in ROUTED.items():
            unrouted = expand(base, REQUESTS[request_name], folder / family / f"for_{name}").path
            shake(unrouted)
            compute(route_export(unrouted, folder / family / name, routing).path, ids)
        extracts = {
            name: extract(folder / family / source, folder / family / name).path for name, source in COMPOSED.items()
        }
        compute(compose(base, extracts, folder / family / "composed").path, ids)
        for name in FUSED:
            compute(merge(folder / family / name, folder / family / f"fused_{name}").path, ids)
        for name, request in STOCK.items():
            if plan(base, request).costs.stock is not None:
                grown = expand(base, request, folder / family / f"for_{name}").path
                shake(grown)
                compute(merge(grown, folder / family / name, "stock").path, ids)
        for name, request in DEPTH.items():
            deepened = expand(base, request, folder / family / name).path
            if name.endswith("trained"):
                shake(deepened)
            compute(deepened, ids)
    for name in OTHER_MAKES:
        base = make_base(folder / name / "base", OTHERS[name]())
        add_old_names(base / "config.json")
        request = Request("1", variant="adapt", collaborate="both", init_w22="random")
        compute(expand(base, request, folder / name / "adapt").path, ids)
    export_new_tokens(folder)
    print(f"exported {len(list(folder.rglob('*.expected.json')))} checkpoints")


def export_new_tokens(folder: Path) -> None:
    """Write models with tokens that their base lacks, which stand among the ids."""
    ids = torch.tensor([[5, ROWS, 7, ROWS + 1, 9]])
    for family in WITH_TOKENS:
        inside = folder / f"{family}_tokens"
        base = save_tiny(inside / "base", family, vocab_size=ROWS, tie_word_embeddings=family != "llama")
        AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
        for name, request in (("alone", Request("none")), ("wide", REQUESTS["adapt"])):
            wide = expand(base, replace(request, new_tokens=TOKENS), inside / f"new_tokens_{name}").path
            compute(wide, ids)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
