"""A token at a time, each of several expansions stays bit for bit what it is alone."""

from __future__ import annotations

import copy

import pytest
import torch

from scale_surgery import Request, expand, extract
from scale_surgery.modeling.expanded_routing import normalizers, state_of
from tests.composed import LLAMA, Made
from tests.conftest import shake
from tests.each import mostly
from tests.routed import random_ids
from tests.tiny import save_tiny

PRESERVE = Request("all", init_w22="random")
ADAPT = Request("1,2", variant="adapt", collaborative_layers="2", init_w22="random")
REQUESTS = {"medicine": PRESERVE, "music": PRESERVE, "late": ADAPT, "chess": PRESERVE}


@pytest.fixture(params=mostly([1, 3], (3).__eq__))
def threads(request):
    """How many threads compute: which of them takes a head can change its bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "dtype", "head"),
    [("llama", torch.float32, 16), pytest.param("gemma3_text", torch.bfloat16, 32, marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_each_path_reads_a_token_as_alone(tmp_path, family, dtype, head, threads):
    base = save_tiny(tmp_path / "base", family, dtype=dtype, head_dim=head, hidden_size=64)
    folders = {
        name: shake(expand(base, request, tmp_path / name).path, len(name)) for name, request in REQUESTS.items()
    }
    extracts = {name: extract(folder, tmp_path / f"{name}.x").path for name, folder in folders.items()}
    made = Made(base, folders, extracts)
    model, alone = made.composed(), [made.alone(name) for name in (None, *REQUESTS)]
    model.set_expansion(list(REQUESTS))
    ids = random_ids(1, 30)
    caches = [reader(ids[:, :20], use_cache=True).cache for reader in (model, *alone)]
    for token in ids[:, 20:].unbind(1):
        model(token[:, None], cache=caches[0])
        keys = state_of(caches[0]).keys[:, :, -1].unbind(1)
        logits = [reader(token[:, None], cache=kept).logits for reader, kept in zip(alone, caches[1:], strict=True)]
        expected = [(path_logits.float() - normalizers(path_logits)[..., None])[:, -1] for path_logits in logits]
        assert all(map(torch.equal, keys, expected))
        assert not any(torch.equal(keys[1], key) for key in expected[2:]), "the negative control: they differ"


@pytest.mark.parametrize("give", ["assign", "part", "dtype"])
@torch.no_grad()
def test_parameters_that_are_exchanged_are_those_that_compute(made_of, give):
    model, token = made_of("llama", LLAMA).composed("medicine", "music"), random_ids(1, 2)
    model.set_expansion(model.expansions)
    cache = model(token[:, :1], use_cache=True).cache
    model(token[:, 1:], cache=cache)
    before = model(token[:, :1], use_cache=False).logits
    if give == "assign":
        model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()}, assign=True)
    elif give == "part":
        part = {name: 0.5 * tensor for name, tensor in model.state_dict().items() if ".expansions.medicine." in name}
        model.load_state_dict(part, assign=True, strict=False)
    else:
        model.double()
    after = model(token[:, :1], use_cache=False).logits
    assert not torch.equal(after, before), "the control: other parameters compute something else"
    with model.use_expansion(None):
        model(token)
    assert torch.equal(after, model(token[:, :1], use_cache=False).logits)
    fresh = copy.deepcopy(model)
    fresh.set_expansion(fresh.expansions)
    # a copy lies elsewhere in memory, which may show in the last bit of a row
    torch.testing.assert_close(fresh(token[:, :1], use_cache=False).logits, after)
