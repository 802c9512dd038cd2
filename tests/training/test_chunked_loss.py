"""Losses in pieces: loss and gradients are those of whole logits, for every kind of model, and memory stays small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_surgery import (
    CosineRouter,
    EvalData,
    PosteriorRouter,
    Request,
    TrainingSettings,
    expand,
    route_export,
    train,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.running import pieces
from scale_surgery.running.loss import measure
from scale_surgery.running.pieces import Reader, find_tail
from scale_surgery.text.sequences import PROMPT, Sequences
from scale_surgery.training import chunked_loss, trainer
from scale_surgery.training.chunked_loss import find_pieces, loss_in_pieces
from scale_surgery.training.rehearsal import divergence_from_base
from tests.conftest import load, shake
from tests.each import mostly, woven
from tests.surgery.test_new_tokens import ROWS
from tests.surgery.test_new_tokens import TOKENS as NEW_TOKENS
from tests.tiny import LLAMA_LIKE, TOKENS, save_tiny
from tests.training.test_train import expansion, write_lines

# a loss in float32 of the same logits, whose products are cut elsewhere
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}
REQUESTS = {
    "preserve": Request("1-2"),
    "adapt": Request("1-2", variant="adapt"),
    "gated": Request("1-2", variant="gated"),
    "grow": Request("1-2", method="grow"),
    "depth": Request("1", method="depth"),
}
ROUTERS = {"posterior": PosteriorRouter(switch_rate=0.1), "cosine": CosineRouter(threshold=0.9)}
ALTERED = {"granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.2}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two tokens, or of one position of all rows."""
    monkeypatch.setattr(pieces, "LOGITS_AT_ONCE", 2 * 97)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Tiny models as after training, by family and by what was made of them."""
    folder = tmp_path_factory.mktemp("chunked")

    def make(family: str, kind: str) -> Path:
        path = folder / f"{family}-{kind}"
        if path.is_dir():
            return path
        if kind == "base":
            return save_tiny(path, family, tie_word_embeddings=family != "llama")
        if kind in ROUTERS:
            return route_export(make(family, "adapt"), path, ROUTERS[kind]).path
        expand(make(family, "base"), REQUESTS[kind], path)
        return path if kind == "depth" else shake(path)

    return make


def batch() -> dict[str, Tensor]:
    """Three rows: one with a prompt, one whole, one padded."""
    ids = torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :3], labels[2, 5:], mask[2, 5:] = -100, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def learn(model: Any, loss: Tensor) -> dict[str, Tensor | None]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(2 * loss, list(named.values()), allow_unused=True)
    return dict(zip(named, gradients, strict=True))


def check(model: Any, inputs: dict[str, Tensor] | None = None, **given: Any) -> None:
    """Compare the loss in pieces, and all gradients, with those of the model's own forward."""
    inputs = inputs or batch()
    tail = find_pieces(model, model, inputs)
    assert tail is not None
    whole = model(**inputs, **given).loss
    wanted = learn(model, whole)
    with loss_in_pieces(model, tail, inputs):
        loss = model(**inputs, **given)["loss"]
    torch.testing.assert_close(loss, whole, **ROUNDING)
    gradients = learn(model, loss)
    assert {name for name in wanted if wanted[name] is None} == {name for name in gradients if gradients[name] is None}
    assert any(gradient is not None and gradient.abs().max() > 1e-4 for gradient in wanted.values())
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, **ROUNDING, msg=name)
    assert torch.equal(model(**inputs, **given).loss, whole), "the model's own forward stays"


@pytest.mark.parametrize(("kind", "family"), woven(list(REQUESTS), ["llama", "gemma2"]))
def test_loss_and_gradients_are_those_of_whole_logits(made: Any, family: str, kind: str) -> None:
    """gemma2 caps its logits and ties its head; one head is not tied."""
    model = load(made(family, kind)).train()
    for blocks in model.modules():
        if getattr(blocks, "gate", None) is not None:
            blocks.requires_grad_(True)
    check(model)
    check(model, num_items_in_batch=torch.tensor(31))


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_reads_piece_by_piece(made: Any, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(made("gemma2", router)).train()
    model.enable_routing()
    check(model)
    inputs = batch()
    tail = find_pieces(model, model, inputs)
    assert tail is not None
    model.enable_routing(False)
    alone = model(**inputs).loss
    model.enable_routing()
    whole = model(**inputs).loss
    assert (alone - whole).abs() > 1e-3, "the control: routing changes the loss"
    if router == "posterior":
        monkeypatch.setattr(Reader, "state", property(lambda reader: None, lambda reader, state: None), raising=False)
        with loss_in_pieces(model, tail, inputs):
            forgetful = model(**inputs)["loss"]
        assert (forgetful - whole).abs() > 1e-4, "the control: a router that forgets what it read"


@pytest.mark.parametrize("family", mostly(ALTERED, "granite".__eq__))
def test_logits_that_the_model_scales_after_its_head(tmp_path: Path, family: str) -> None:
    config = getattr(transformers, f"{family.capitalize()}Config")(**LLAMA_LIKE, **TOKENS, **ALTERED[family])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = load(shake(expand(tmp_path / "base", Request("1-2", variant="adapt"), tmp_path / "wide").path)).train()
    check(model)
    before = model(**batch()).loss
    setattr(model.config, next(iter(ALTERED[family])), 1.0)
    for name in ALTERED[family]:
        if hasattr(model, name):
            setattr(model, name, 1.0)
    assert (model(**batch()).loss - before).abs() > 1e-3, "the control: the scale counts"


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_learn(tmp_path: Path, tied: bool) -> None:
    base = save_tiny(tmp_path / "base", "llama", vocab_size=ROWS, tie_word_embeddings=tied)
    transformers.AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
    asked = Request("1-2", variant="adapt", new_tokens=NEW_TOKENS)
    model = load(shake(expand(base, asked, tmp_path / "wide").path)).train()
    inputs = batch()
    inputs["input_ids"][1, 2], inputs["labels"][1, 2] = ROWS, ROWS
    check(model, inputs)
    learned = learn(model, model(**inputs).loss)
    assert any("new_rows" in name and gradient is not None for name, gradient in learned.items())


def test_a_loss_with_a_term_of_its_own_is_left_to_the_model(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    config = transformers.MixtralConfig(**LLAMA_LIKE, **TOKENS, **sizes, output_router_logits=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert find_pieces(model, model, batch()) is None
    model.config.output_router_logits = False
    tail = find_pieces(model, model, batch())
    assert tail is not None and tail.name == "model", "the control: without the term it is read in pieces"
    embedding = model.get_input_embeddings()
    model.get_input_embeddings = lambda: None
    assert find_tail(model, batch()["input_ids"][0]) is None, "nobody says where the decoder is"
    model.get_input_embeddings = lambda: embedding
    assert find_tail(model, batch()["input_ids"][0]) is not None
    model.lm_head.register_forward_hook(lambda module, args, output: output * args[0].shape[1])
    assert find_tail(model, batch()["input_ids"][0]) is None, "logits that depend on how many are asked for"


@pytest.mark.parametrize("name", ["OPT", "Bloom"])
def test_a_model_that_calls_what_is_inside_of_its_decoder(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=97, hidden_size=16, num_attention_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert (find_tail(model, torch.arange(3, 9)) is None) is (name == "OPT"), "the other one is the control"


@pytest.mark.parametrize("kind", ["preserve", "adapt", "gated", "grow", "depth", "posterior"])
def test_the_divergence_from_the_base_is_that_of_whole_logits(made: Any, kind: str) -> None:
    model = load(made("gemma2", kind)).train()
    if kind == "posterior":
        model.enable_routing()
    if kind == "depth":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
    inputs = {name: tensor for name, tensor in batch().items() if name != "labels"}
    tail = find_tail(model, inputs["input_ids"][0])
    assert tail is not None
    whole, loss = (divergence_from_base(model, model, inputs, each) for each in (None, tail))
    torch.testing.assert_close(loss, whole, **ROUNDING)
    wanted, gradients = learn(model, whole), learn(model, loss)
    assert whole > 1e-3
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, **ROUNDING, msg=name)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("kind", mostly(["adapt", "posterior"], "posterior".__eq__))
def test_no_tensor_grows_with_tokens_and_vocabulary(tmp_path: Path, kind: str) -> None:
    words, rows, length = 4099, 2, 60
    base = save_tiny(tmp_path / "base", "llama", vocab_size=words)
    path = shake(expand(base, Request("1-2", variant="adapt"), tmp_path / "adapt").path)
    if kind in ROUTERS:
        path = route_export(path, tmp_path / kind, ROUTERS[kind]).path
    model = load(path).train()
    ids = torch.randint(3, words, (rows, length))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    tail = find_pieces(model, model, inputs)
    assert tail is not None
    with Largest() as whole:
        model(**inputs).loss.backward()
    assert whole.numbers >= words * rows * length, "the control"
    weights = max(parameter.numel() for parameter in model.parameters())
    with Largest() as largest, loss_in_pieces(model, tail, inputs):
        model(**inputs)["loss"].backward()
    # pieces of one position of all rows, and of both paths of a router
    assert largest.numbers <= max(weights, 4 * words * rows)
    text = Sequences(ids.flatten().int(), ids.flatten().int(), (0, length, 2 * length))
    with Largest() as measured:
        measure(model, text, rows)
    assert measured.numbers <= max(weights, 4 * words * rows), "measurements too"


@pytest.mark.parametrize("kind", ["adapt", "posterior", "cosine", "depth"])
def test_measurements_are_those_of_whole_logits(made: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(made("gemma2", kind))
    ids = batch()["input_ids"].int()
    labels = ids.clone()
    labels[0, :3] = PROMPT
    text = Sequences(ids.flatten(), labels.flatten(), (0, 7, 14, 19, 21))
    assert find_tail(model, ids[0].long()) is not None
    read = measure(model, text, 3)
    monkeypatch.setattr("scale_surgery.running.loss.find_tail", lambda *_: None)
    whole = measure(model, text, 3)
    assert (read.scored, read.questions, read.answered) == (whole.scored, whole.questions, whole.answered)
    assert read.questions == 1 and read.nats == pytest.approx(whole.nats, rel=1e-6)
    other = measure(shake_more(model), text, 3)
    assert other.nats != pytest.approx(whole.nats, rel=1e-4), "the control"


def shake_more(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def test_a_run_learns_what_it_learns_from_whole_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation, padding, own losses of gates and rehearsal at once."""
    write_lines(tmp_path / "new.jsonl", [{"text": biography(person, 3)} for person in people(3, start=400)])
    write_lines(tmp_path / "old.jsonl", [{"text": biography(person, 3)} for person in people(2)])
    wide = expand(SHIPPED_MODEL, Request("2-3", variant="gated"), tmp_path / "wide").path
    settings = TrainingSettings(
        sequence_length=64,
        packing=False,
        steps=3,
        batch_size=2,
        gradient_accumulation=2,
        learning_rate=1e-3,
        log_every=1,
        schedule="constant",
        warmup=0.0,
        rehearse=(str(tmp_path / "old.jsonl"),),
    )
    run = {"data": [tmp_path / "new.jsonl"], "eval_data": EvalData(old=[tmp_path / "old.jsonl"])}
    calls: list[int] = []
    cross_entropy = chunked_loss.cross_entropy
    monkeypatch.setattr(chunked_loss, "cross_entropy", lambda *given: (calls.append(1), cross_entropy(*given))[1])
    done = train(wide, output=tmp_path / "pieces", settings=settings, **run)
    assert len(calls) == 6, "a piece is read in each forward"
    monkeypatch.setattr(trainer, "find_pieces", lambda *_: None)
    whole = train(wide, output=tmp_path / "whole", settings=settings, **run)
    assert len(calls) == 6
    assert done.loss == pytest.approx(whole.loss, rel=1e-5)
    ours, theirs = expansion(tmp_path / "pieces"), expansion(tmp_path / "whole")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    assert any(
        not torch.equal(tensor, start) for tensor, start in zip(ours.values(), expansion(wide).values(), strict=True)
    )
