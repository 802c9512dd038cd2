"""Load exported checkpoints under another transformers release, without scale-surgery; run by `make test-compat`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

# two releases may order float32 operations differently, so logits are compared with a tolerance, tokens exactly
TOLERANCE = 1e-5


def check(path: Path) -> list[str]:
    """Problems of one checkpoint; an empty list means that it works here."""
    expected = json.loads(path.with_name(f"{path.name}.expected.json").read_text())
    ids = torch.tensor(expected["ids"])
    # eager: the releases differ in the kernel that they choose for gemma2
    options = {"attn_implementation": "eager"}
    is_stock = path.name.startswith("stock")
    model, info = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=not is_stock, output_loading_info=True, **options
    )
    problems = [f"{kind}: {sorted(map(str, names))[:3]}" for kind, names in info.items() if names]
    with torch.no_grad():
        logits = model.eval()(ids).logits
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
        beams = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2)
        uncached = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    drift = float((logits - torch.tensor(expected["logits"])).abs().max())
    if drift > TOLERANCE:
        problems.append(f"logits differ by {drift:.3g} from those of the exporting release")
    if tokens.tolist() != expected["tokens"] or uncached.tolist() != expected["tokens"]:
        problems.append("greedy continuation differs")
    if beams.tolist() != expected["beams"]:
        problems.append("continuation with beams differs")
    AutoConfig.from_pretrained(path, trust_remote_code=True)
    if path.name == "composed":
        return problems + check_composed(model, path, ids)
    problems += check_without_head(path)
    if (is_stock and path.name != "stock_depth") or path.name.startswith("fused"):
        return problems
    base = AutoModelForCausalLM.from_pretrained(path.with_name("base"), **options)
    if path.name.startswith("new_tokens"):
        return problems + check_old_vocabulary(model, base.eval())
    if is_stock:
        with torch.no_grad():
            same = torch.equal(base.eval()(ids).logits, logits)
        return problems if same else [*problems, "logits are not bit-equal to the base model's in this release"]
    return problems + check_expanded(model, base.eval(), ids)


def check_without_head(path: Path) -> list[str]:
    """Problems of a checkpoint that is loaded without its head: refused only where the stock class finds nothing."""
    try:
        AutoModel.from_pretrained(path, trust_remote_code=True)
    except ValueError as error:
        # transformers 4 looks for gemma3_text's tensors under names without a prefix, and initialises them anew
        _, info = AutoModel.from_pretrained(path.with_name("base"), output_loading_info=True)
        return [] if info["missing_keys"] else [f"without a head: {error}"]
    return []


@torch.no_grad()
def check_old_vocabulary(model: Any, base: Any) -> list[str]:
    """Problems of a model with new tokens on a text without them."""
    ids = torch.tensor([[5, 40, 7, 300, 12, 9]])
    wanted, known = base(ids).logits, base.config.vocab_size
    problems = []
    with model.expansion_disabled():
        alone = model(ids).logits
    for name, logits in (("", model(ids).logits), (" of the base alone", alone)):
        if not torch.equal(logits[..., :known], wanted):
            problems.append(f"logits{name} of the base's tokens are not bit-equal to the base model's")
    if not bool((alone.softmax(-1)[..., known:] == 0).all()):
        problems.append("the base alone gives new tokens a probability")
    return problems


@torch.no_grad()
def check_composed(model: Any, path: Path, ids: torch.Tensor) -> list[str]:
    """Problems of a composed folder: each path has to be its model alone, bit for bit."""
    alone = {None: "base", "law": "for_posterior", "medicine": "for_head", "chess": "for_grown"}
    problems = []
    for name, folder in alone.items():
        path_model = AutoModelForCausalLM.from_pretrained(
            path.with_name(folder), trust_remote_code=name is not None, attn_implementation="eager"
        ).eval()
        with model.use_expansion(name):
            if not torch.equal(model(ids).logits, path_model(ids).logits):
                problems.append(f"the path {name or 'base'} is not its model alone")
    return problems


@torch.no_grad()
def check_expanded(model: Any, base: Any, ids: torch.Tensor) -> list[str]:
    """Problems of what only an expanded model has."""
    problems = []
    # without a cache, as path_logits runs: with one, keys lie otherwise in memory, and the base may differ from itself
    logits = model.path_logits(ids)[0] if model.is_routing_enabled else model(ids, use_cache=False).logits
    same_as_base = torch.equal(base(ids, use_cache=False).logits, logits)
    if not same_as_base:
        problems.append("logits are not bit-equal to the base model's in this release")
    if any(p.requires_grad != (".expansions." in n) for n, p in model.named_parameters()):
        problems.append("requires_grad is not that of the variant")
    if not model.is_routing_enabled:
        problems += check_whole_head(model, ids)
    return problems


def check_whole_head(model: Any, ids: torch.Tensor) -> list[str]:
    """Problems where a forward in place of the model's own multiplies by the head's weight itself, as in TRL."""
    name = model.config.scale_surgery["base"]["base_model"]
    model_logits, base_model = model(ids, use_cache=False).logits, model.get_submodule(name)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        hidden, head = base_model(ids, use_cache=False).last_hidden_state, model.get_output_embeddings()
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    model.forward = forward
    drift = float((model(ids) - model_logits).abs().max())
    return [] if drift <= TOLERANCE else [f"logits by the whole head differ by {drift:.3g}"]


def main(folder: Path) -> int:
    """Check every checkpoint under `folder`; the number of those with problems."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    paths = sorted(file.with_name(file.name.removesuffix(".expected.json")) for file in folder.rglob("*.expected.json"))
    for path in paths:
        problems = check(path)
        failed += bool(problems)
        print(f"{path.parent.name:12} {path.name:20} {'; '.join(problems) or 'ok'}", flush=True)
    print(f"transformers {transformers.__version__}: {len(paths) - failed} passed, {failed} failed")
    return failed if paths else 1


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1])) else 0)
