"""Export expanded tiny models of every family, with what they compute here; run by `make test-compat`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from scale_surgery import Request, expand, register
from tests.tiny import FAMILIES, save_tiny

REQUESTS = {
    "preserve": Request("1-2", init_w22="random"),
    "adapt": Request("0,2", variant="adapt", collaborate="both"),
    "heads": Request("1", variant="adapt", up_width=0),
}


def main(folder: Path) -> None:
    """Write base and expanded models under `folder`, each expanded one with what it computes beside it."""
    register()
    torch.manual_seed(0)
    ids = torch.randint(3, 97, (2, 7))
    for family in FAMILIES:
        base = save_tiny(folder / family / "base", family, tie_word_embeddings=family in ("gpt2", "gemma2"))
        for name, request in REQUESTS.items():
            path = expand(base, request, folder / family / name).path
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
            with torch.no_grad():
                logits = model(ids).logits
                tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
            expected = {"ids": ids.tolist(), "logits": logits.tolist(), "tokens": tokens.tolist()}
            (path.parent / f"{name}.expected.json").write_text(json.dumps(expected))
    print(f"exported {len(FAMILIES) * len(REQUESTS)} checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
