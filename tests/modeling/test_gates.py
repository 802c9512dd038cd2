"""Gates: what an expansion writes passes through them; where they are shut a model is its base, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor
from transformers import AutoModel

from scale_surgery import (
    CosineRouter,
    PosteriorRouter,
    Promise,
    Request,
    RunOptions,
    apply,
    expand,
    extract,
    merge,
    route_export,
    strip,
    verify,
)
from scale_surgery.modeling.expanded_stock import gate_scores, opened
from scale_surgery.modeling.modeling_fused import Deciding
from tests.conftest import digests, edited, load, shake
from tests.each import DTYPES, FORM_OF, mostly
from tests.routed import random_ids
from tests.tiny import FAMILIES

REQUEST = Request("all", variant="gated", collaborate="both", init_w22="random")
IDS = random_ids(2, 9)
# of a bias, beside weights of zero
SHUT, OPEN = -9.0, 9.0


@pytest.fixture(scope="module")
def gated_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """The base of a family, and a folder of an expansion with gates that has learned."""

    def make(family: str, dtype: str = "float32", tied: bool = False) -> tuple[Any, Path]:
        base = base_of(family, dtype, tied)
        made = expand(base, REQUEST, tmp_path_factory.mktemp("gated") / base.name).path
        return load(base), shake(made)

    return make


def set_gates(model: Any, bias: float) -> list[tuple[str, Tensor]]:
    """Give every gate a bias alone."""
    gates = [(name, parameter) for name, parameter in model.named_parameters() if name.endswith(".gate")]
    for _, gate in gates:
        gate.data.zero_()
        gate.data[-1] = bias
    return gates


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


def test_decisions_are_float32_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    base, up, other = (torch.randn(2, 3, size, generator=generator) for size in (40, 8, 40))
    gate, gram = torch.randn(49, generator=generator), torch.randn(40, 40, generator=generator)
    gram = gram @ gram.T
    scores, cosine = gate_scores(gate, base, up), Deciding.cosine(SimpleNamespace(gram=gram), base, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate_scores(gate, base, up), scores)
        assert torch.equal(Deciding.cosine(SimpleNamespace(gram=gram), base, other), cosine)
        assert (base @ gram).dtype is torch.bfloat16, "the control"


@pytest.mark.parametrize("routing", (None, PosteriorRouter()))
def test_offloaded_gates_come_with_their_blocks(
    gated_of: Callable[..., tuple[Any, Path]], tmp_path: Path, routing: PosteriorRouter | None
) -> None:
    """Tensors lie elsewhere, as by device_map="auto", and are there for the forward of their module alone."""
    _, path = gated_of("llama")
    path = path if routing is None else route_export(path, tmp_path / "routed", routing).path
    model = load(path).eval()
    expected = logits(model)
    cpu_offload(model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), expected)


def test_a_gate_reaches_zero_and_one() -> None:
    assert opened(torch.tensor([-1.2, 0.0, 0.5, 1.2])).tolist() == [0.0, 0.5, pytest.approx(0.7449, abs=1e-4), 1.0]


@pytest.mark.parametrize("family", mostly(FAMILIES, ("gemma3_text", "gpt2").__contains__))
def test_with_shut_gates_a_model_that_learned_is_its_base(family: str, gated_of: Callable[..., Any]) -> None:
    base, folder = gated_of(family, *FORM_OF[family])
    model = load(folder)
    learned = logits(model)
    gates = set_gates(model, SHUT)
    shut = logits(model)

    assert torch.equal(shut, logits(base))
    assert not torch.equal(learned, shut)
    # the control: any single gate that is open lets something through
    for _, gate in gates:
        gate.data[-1] = OPEN
        assert not torch.equal(logits(model), shut)
        gate.data[-1] = SHUT


@pytest.mark.parametrize("dtype", mostly(DTYPES, "float32".__eq__))
def test_with_open_gates_a_model_is_that_without_gates(dtype: str, gated_of: Callable[..., Any]) -> None:
    _, folder = gated_of("llama", dtype)
    model = load(folder)
    set_gates(model, OPEN)
    without = load(folder)
    for module in without.modules():
        if "gate" in module._parameters:
            module._parameters["gate"] = None

    assert torch.equal(logits(model), logits(without))


def test_a_text_is_the_bases_up_to_the_first_token_that_opens_a_gate(gated_of: Callable[..., Any]) -> None:
    base, folder = gated_of("llama")
    model = load(folder)
    set_gates(model, SHUT)
    _open_at(model, 5)
    here, before = logits(model, IDS[:1]), logits(base, IDS[:1])

    assert torch.equal(here[:, :5], before[:, :5])
    assert not torch.equal(here[:, 5], before[:, 5])


@pytest.mark.parametrize("family", mostly(FAMILIES, ("llama", "gpt_neox").__contains__))
def test_a_fused_model_has_the_gates_and_gives_every_file_back(
    family: str, gated_of: Callable[..., Any], tmp_path: Path
) -> None:
    _, folder = gated_of(family, "float32", FORM_OF[family][1])
    model = load(folder)
    fused = merge(folder, tmp_path / "fused").path

    torch.testing.assert_close(logits(load(fused)), logits(model), rtol=1e-4, atol=1e-4)
    set_gates(model, SHUT)
    # the control
    assert not torch.allclose(logits(load(fused)), logits(model), rtol=1e-4, atol=1e-4)
    assert digests(merge(fused, tmp_path / "blocks", to="blocks").path) == digests(folder)


def test_a_server_that_has_a_head_of_its_own_finds_the_gate_of_the_head(
    gated_of: Callable[..., Any], tmp_path: Path
) -> None:
    _, folder = gated_of("llama")
    fused = merge(folder, tmp_path / "fused").path
    model, body = load(fused), AutoModel.from_pretrained(fused, trust_remote_code=True).eval()
    with torch.no_grad():
        served = model.get_output_embeddings()(body(input_ids=IDS).last_hidden_state)
        body.norm.gate.data[-1] = SHUT
        shut_logits = model.get_output_embeddings()(body(input_ids=IDS).last_hidden_state)

    assert torch.equal(served, logits(model))
    # the control
    assert not torch.equal(shut_logits, served)


def test_modules_of_one_class_are_split_alike(gated_of: Callable[..., Any], tmp_path: Path) -> None:
    # a server looks at one of a class and rewrites all
    _, folder = gated_of("llama")
    kinds: dict[str, set[tuple[str, ...]]] = {}
    model = load(merge(folder, tmp_path / "fused").path)
    for module in model.modules():
        kinds.setdefault(type(module).__name__, set()).add(tuple(type(child).__name__ for child in module.children()))

    attention = type(model.model.layers[0].self_attn).__name__
    assert kinds[attention] == {("PathLinear",) * 4}
    assert all(hasattr(projection, "gate") for projection in model.model.layers[0].self_attn.children())


def test_without_an_up_stream_what_reads_none_has_no_gate(base_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = shake(expand(base_of("llama"), replace(REQUEST, up_width=0), tmp_path / "wide").path)
    fused = merge(folder, tmp_path / "fused").path

    torch.testing.assert_close(logits(load(fused)), logits(load(folder)), rtol=1e-4, atol=1e-4)
    assert digests(merge(fused, tmp_path / "blocks", to="blocks").path) == digests(folder)


def store_gates(folder: Path, bias: float) -> None:
    """Give every gate on disk a bias alone."""
    for file in folder.glob("expansion-*.safetensors"):
        with edited(file) as tensors:
            for name, tensor in tensors.items():
                if name.endswith(".gate"):
                    tensor.zero_()
                    tensor[-1] = bias


def promise_of(folder: Path, base: Path, **run: Any) -> Promise:
    verification = verify(folder, base, required=("shut_gates",), **run)
    return next(promise for promise in verification.promises if promise.name == "shut_gates")


def test_verify_counts_the_tokens_up_to_which_gates_are_shut(
    base_of: Callable[..., Path], gated_of: Callable[..., Any], tmp_path: Path
) -> None:
    base = base_of("llama")
    _, folder = gated_of("llama")
    store_gates(folder, OPEN)
    opened_all = promise_of(folder, base)
    store_gates(folder, SHUT)
    shut_all = promise_of(folder, base)

    assert (opened_all.claimed, opened_all.holds) == (True, None)
    assert (shut_all.claimed, shut_all.holds) == (True, True)
    tokens = re.search(r"all gates shut so far at (\d+) of (\d+) tokens, logits there bit-equal", shut_all.evidence)
    assert tokens is not None and tokens[1] == tokens[2]
    assert opened_all.evidence == (
        f"all gates shut so far at 0 of {tokens[2]} tokens; give --prompts with text that the base knows"
    )
    # the controls: code that lets a thousandth through a shut gate, a base that was changed, and one without gates
    stock = folder / "expanded_stock.py"
    kept = stock.read_text()
    stock.write_text(kept.replace("- STRETCH).clamp(0, 1)", "- STRETCH).clamp(1e-3, 1)"))
    leaking = promise_of(folder, base, run=RunOptions(trust_remote_code=True))
    stock.write_text(kept)
    tokens = re.search(r"shut so far at (\d+) of (\d+) tokens, logits there differ by", leaking.evidence)
    assert leaking.holds is False and tokens is not None and tokens[1] == tokens[2]
    (shard,) = folder.glob("model-*.safetensors")
    copied = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(copied)
    with edited(shard) as tensors:
        tensors["model.norm.weight"] *= 2
    broken = promise_of(folder, base)
    assert broken.holds is False
    assert any(line.startswith("logits where all gates were shut so far: drift ") for line in broken.problems)
    ungated = promise_of(expand(base, Request("all", variant="adapt"), tmp_path / "adapt").path, base)
    assert (ungated.claimed, ungated.problems) == (False, ("this model has no gates.",))


def test_what_follows_an_expansion_follows_one_with_gates(gated_of: Callable[..., Any], tmp_path: Path) -> None:
    base, folder = gated_of("llama")
    extracted = extract(folder, tmp_path / "extract").path
    bare = strip(folder, tmp_path / "base").path
    applied = apply(extracted, tmp_path / "applied", base=bare).path

    assert torch.equal(logits(load(bare)), logits(base))
    assert digests(applied) == digests(folder)


ROUTERS = {
    "posterior": PosteriorRouter(),
    "cosine": CosineRouter(0.9),
    "strict": CosineRouter(0.9, strict=True),
}


@pytest.mark.parametrize("name", mostly(ROUTERS, ("posterior", "cosine").__contains__))
def test_a_router_follows_an_expansion_with_gates(gated_of: Callable[..., Any], tmp_path: Path, name: str) -> None:
    _, folder = gated_of("llama")
    model, routed = load(folder), route_export(folder, tmp_path / "routed", ROUTERS[name]).path
    twin = load(routed)
    with twin.routing_disabled():
        assert torch.equal(logits(twin), logits(model))
    if name == "cosine":  # a posterior router is not fused
        fused = merge(routed, tmp_path / "fused").path
        torch.testing.assert_close(logits(load(fused)), logits(twin), rtol=1e-4, atol=1e-4)
    assert verify(routed, strip(folder, tmp_path / "base").path).passed


def _open_at(model: Any, place: int) -> None:
    """Let a gate of the first layer open at one place of the first text, and at none before it."""
    gate = dict(model.named_parameters())["model.layers.0.mlp.down_proj.expansions.default.gate"]
    seen: list[Tensor] = []
    module = model.model.layers[0].mlp.down_proj
    hook = module.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    logits(model, IDS[:1])
    hook.remove()
    width = module.in_features
    streams = seen[0][0, :, :width].float()
    scaled = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + 1e-6)
    direction = scaled[place] - scaled[:place].mean(0)
    scores = scaled @ direction
    middle = (scores[place] + scores[:place].max()) / 2
    factor = 60 / (scores[place] - scores[:place].max())
    gate.data[:width] = factor * direction
    gate.data[-1] = -3 - factor * middle
