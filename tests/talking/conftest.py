"""Tiny models of every kind that answers, all made from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from tests.conftest import load, shake
from tests.routed import between, random_ids
from tests.routing.test_report import bytes_tokenizer
from tests.tiny import save_tiny

# longer than any answer, so that a key that is pressed while one comes is never too late
CONTEXT = 10**6
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stock model, expansions of it that stand for trained ones, and other forms of them."""
    place = tmp_path_factory.mktemp("talking")
    # sizes of which random blocks make both paths win tokens
    sizes = {"vocab_size": 258, "max_position_embeddings": CONTEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = save_tiny(place / "base", "llama", **sizes)
    bytes_tokenizer().save_pretrained(base)
    widths = {"up_width": 20, "up_kv_heads": 1}
    request = Request("0-2", variant="adapt", collaborative_layers="1-2", init_w22="random", **widths)
    expand(base, request, place / "wide")
    shake(place / "wide")
    route_export(place / "wide", place / "posterior", PosteriorRouter(switch_rate=0.05))
    # a threshold that sends tokens to both sides
    model = load(place / "wide")
    model.set_expansion(["default"], router="cosine", threshold=0.0)
    cosines = model.score_tokens(random_ids(4, 64)).observed
    route_export(place / "wide", place / "cosine", CosineRouter(threshold=between(cosines)))
    merge(place / "cosine", place / "fused")
    shake(expand(base, Request("0,2", method="depth"), place / "deep").path)
    return place


@pytest.fixture(scope="session")
def templated(place: Path) -> Path:
    """The stock model with a chat template."""
    tokenizer = bytes_tokenizer(starts=False)
    tokenizer.chat_template = TEMPLATE
    folder = save_tiny(place / "templated", "llama", vocab_size=258, max_position_embeddings=256)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def escaping(place: Path) -> Path:
    """A model that says nothing but the character that begins what moves a terminal's cursor."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_tiny(place / "escaping", "llama", vocab_size=258)
    bytes_tokenizer(first="\x1b").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # where all logits are equal, the first token is taken
    save_file(weights | {"lm_head.weight": torch.zeros(258, 40)}, folder / "model.safetensors", {"format": "pt"})
    return folder
