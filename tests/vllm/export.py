"""Export tiny models in the forms that vLLM serves, each with what `generate` makes of twenty prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery import CosineRouter, NewTokens, Request, compose, expand, extract, merge, register, route_export
from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.checkpoint.folder import open_checkpoint
from tests.conftest import shake
from tests.routed import between
from tests.tiny import save_tiny

# heads of 32 features, the fewest that vLLM's attention takes on a CPU
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3", "gpt_neox")
NEW_TOKENS, PROMPTS, LONGEST = 16, 20, 40
# logits of the two most likely tokens are further apart
CLEAR = 1e-3
ALL = Request("all", variant="adapt", up_width=64, up_kv_heads=1, init_w22="random")
# layers that differ in heads and widths, below and above the one that is expanded
MIDDLE = replace(ALL, layers="1")
GATED = replace(ALL, variant="gated", collaborate="both")
GROWN = Request("all", variant="adapt", up_width=0, up_kv_heads=0)


# two expansions of one base, which differ in layers, widths and heads
WIDE = replace(ALL, name="wide")
NARROW = replace(MIDDLE, name="narrow", up_width=32, up_kv_heads=2, collaborate="both")
GROUPS = {"num_key_value_heads": 2, "head_dim": 32}
# the window is shorter than some prompts, and reaches into the cached prefix of others
BY_REQUEST = {"llama": GROUPS, "gemma3_text": GROUPS | {"sliding_window": 48}, "gpt_neox": {}}
# tokens that several prompts begin with: more than two blocks of a KV cache
PREFIX = 70


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids of prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + number * LONGEST // PROMPTS for number in range(PROMPTS)] * 3
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def route(expanded: Path, folder: Path) -> None:
    """Fuse with a router that parts the tokens in two, and with one whose threshold is another."""
    probe = AutoModelForCausalLM.from_pretrained(route_export(expanded, folder / "probe", CosineRouter()).path).eval()
    with torch.no_grad():
        middle = between(probe.score_tokens(torch.tensor([prompts(97)[-1]])).observed)
    for name, threshold in (("routed", middle), ("other-threshold", 1.0)):
        routed = route_export(expanded, folder / f"{name}-blocks", CosineRouter(threshold=threshold)).path
        merge(routed, folder / name)


def answer(model: Any, token_ids: list[int]) -> tuple[list[int], bool]:
    """Return what `generate` makes of a prompt, and whether each token is clearly more likely than the next one."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.tensor([token_ids])
    # said, since a prompt may begin with the token that pads
    seen = torch.ones_like(prompt)
    with torch.no_grad():
        made = model.generate(prompt, attention_mask=seen, **options, output_logits=True, return_dict_in_generate=True)
    best = torch.stack(made.logits).topk(2).values
    is_clear = float((best[..., 0] - best[..., 1]).min()) > CLEAR
    return made.sequences[0, len(token_ids) :].tolist(), is_clear


def compute(path: Path, ids: list[list[int]], wanted: int = PROMPTS) -> None:
    """Write what `generate` makes of so many prompts beside a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts, tokens = [], []
    for token_ids in ids:
        made, is_clear = answer(model, token_ids)
        # left out where two tokens are about as likely: sums in another order may take the other
        if len(prompts) < wanted and is_clear:
            prompts.append(token_ids)
            tokens.append(made)
    assert len(prompts) == wanted, f"{path}: {len(prompts)} prompts are clear"
    path.with_name(f"{path.name}.expected.json").write_text(json.dumps({"prompts": prompts, "tokens": tokens}))


def export_by_request(folder: Path, family: str) -> None:
    """Write a folder of two expansions, and what `generate` makes of prompts for each of them and for the base."""
    # a server needs a tokenizer
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    sizes = SIZES | BY_REQUEST[family] | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    base = save_tiny(folder / "base", family, **sizes)
    tokenizer.save_pretrained(base)
    extracts = []
    for seed, request in enumerate((WIDE, NARROW), 1):
        made = shake(expand(base, request, folder / f"{request.name}-blocks").path, seed, 0.3)
        extracts.append(extract(made, folder / request.name).path)
    both = compose(base, extracts, folder / "both").path
    # "eager" applies the cap on attention scores that some configs set, as vLLM does
    model = AutoModelForCausalLM.from_pretrained(both, dtype=torch.float32, attn_implementation="eager").eval()
    shared = prompts(97)[PROMPTS - 1] * 2
    ids = [*prompts(97)[:PROMPTS:2], *(shared[:PREFIX] + ending for ending in prompts(97)[:4])]
    found: dict[str, list[list[int]]] = {"": [], "wide": [], "narrow": []}
    kept = []
    for token_ids in ids:
        answers = {}
        for name in found:
            with model.use_expansion(name or None):
                answers[name] = answer(model, token_ids)
        if all(is_clear for _, is_clear in answers.values()):
            kept.append(token_ids)
            for name, (made, _) in answers.items():
                found[name].append(made)
    assert len(kept) >= PROMPTS // 2 and len(kept[-1]) > PREFIX, f"{folder}: {len(kept)} prompts are clear"
    both.with_name("both.by-request.json").write_text(json.dumps({"prompts": kept, "tokens": found}))


def main(folder: Path) -> None:
    """Write the models, and beside each what it is to answer."""
    register()
    torch.manual_seed(0)
    for family in FAMILIES:
        subfolder = folder / family
        heads = {} if family == "gpt_neox" else {"num_key_value_heads": 2, "head_dim": 32}
        base = save_tiny(subfolder / "stock", family, **SIZES, **heads)
        wide = shake(expand(base, ALL, subfolder / "all-blocks").path)
        # so much that a routed model answers otherwise than one with another threshold
        middle = shake(expand(base, MIDDLE, subfolder / "middle-blocks").path, by=0.3)
        gated = shake(expand(base, GATED, subfolder / "gated-blocks").path)
        for made, name in ((wide, "fused"), (middle, "fused-middle"), (gated, "gated")):
            merge(made, subfolder / name)
        merge(shake(expand(base, GROWN, subfolder / "grown-blocks").path), subfolder / "stock-grown", "stock")
        route(middle, subfolder)
        for name in ("stock", "stock-grown", "fused", "fused-middle", "gated", "routed", "other-threshold"):
            compute(subfolder / name, prompts(97))
        tied = {open_checkpoint(made).config["tie_word_embeddings"] for made in (base, subfolder / "fused")}
        assert tied == {family.startswith("gemma")}, "of each kind there is one"
    for family in BY_REQUEST:
        export_by_request(folder / "by-request" / family, family)
    export_text(folder / "text")
    export_new_tokens(folder / "new-tokens")


def export_text(folder: Path) -> None:
    """A model with a tokenizer, and text for the client of OpenAI."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(tokenizer)}
    base = save_tiny(folder / "base", "llama", **SIZES, **sizes)
    tokenizer.save_pretrained(base)
    fused = merge(shake(expand(base, MIDDLE, folder / "blocks").path), folder / "fused").path
    texts = {
        tuple(tokenizer(question.prompt).input_ids): question.prompt
        for person in people(8)
        for question in questions(person)
    }
    compute(fused, [list(ids) for ids in texts])
    expected = json.loads((folder / "fused.expected.json").read_text())
    expected["texts"] = [texts[tuple(ids)] for ids in expected["prompts"]]
    (folder / "fused.expected.json").write_text(json.dumps(expected))


def export_new_tokens(folder: Path) -> None:
    """Models with tokens that the base lacks, which stand in the prompts."""
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1200}
    base = save_tiny(folder / "base", "llama", **SIZES, **sizes)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
    words = NewTokens(tuple(f"Word{number}" for number in range(100)))
    ids = [[1100 + number for number in prompt] for prompt in prompts(200)]
    for request, form in ((replace(MIDDLE, new_tokens=words), "fused"), (Request("none", new_tokens=words), "stock")):
        wide = shake(expand(base, request, folder / f"{form}-blocks").path)
        merge(wide, folder / form, form)
        compute(folder / form, ids)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
