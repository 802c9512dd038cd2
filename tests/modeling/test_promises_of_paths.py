"""The promises for any number of expansions of one base: one function looks for what does not hold, for K = 1, 2, 4.

output_at_init       before training every choice gives the base's logits, bit for bit, and a mixture of all too
base_stream_always   the base's stream beside all expansions is the base's after every layer, whatever was trained
paths_as_alone       each path is the model that its expansion is alone, beside the others, by name and by row
bounded_forgetting   with r = 0 no text loses more than ln(K + 1) nats against the best path for it
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_surgery.modeling.expanded_mixture import normalizers
from scale_surgery.modeling.expanded_paths import Group, Paths
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.modeling.expanded_state import state_of
from tests.composed import Made, make_expansions
from tests.each import WAYS, mostly
from tests.routed import padded, random_ids

# the first of so many expand: one that writes from the first layer on, one that never does, ...
NAMES = ("law", "medicine", "music", "chess")
# mixtures beside which an MLP stands in some of the layers
MOE = ("first", "second", "late", "whole")
COUNTS = (1, 2, 4)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
# what rounding logits may cost on a text of this length, in nats
ROOM = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Models:
    """A base, what each expansion of it is alone, and all of them in one model; as they were made, and trained.

    Attributes:
        names: Names of the expansions; the base is None.
        alone: The base and each expansion alone, trained, by name.
        fresh: All in one model, as they were made.
        trained: All in one model, trained.
        texts: Texts that try to make a mixture of the trained model lose.
    """

    names: tuple[str, ...]
    alone: dict[str | None, Any]
    fresh: Any
    trained: Any
    texts: Tensor


@pytest.fixture(scope="module")
def models_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Models]:
    """Expand a tiny base several times; each test gets copies, which it may change."""

    @functools.cache
    def made_of(family: str, names: tuple[str, ...], dtype: str, is_trained: bool) -> Made:
        folder = tmp_path_factory.mktemp(f"{family}_{'trained' if is_trained else 'fresh'}")
        return make_expansions(base_of, folder, family, names, dtype, is_trained=is_trained)

    @functools.cache
    def make(family: str, count: int, dtype: str = "float32", device: str = "cpu") -> Models:
        names = (MOE if family == "qwen3_moe" else NAMES)[:count]
        made = (made_of(family, MOE if family == "qwen3_moe" else NAMES, dtype, own) for own in (False, True))
        fresh, trained = made
        alone = {name: trained.alone(name).to(device) for name in (None, *names)}
        both = fresh.composed(*names).to(device), trained.composed(*names).to(device)
        with torch.no_grad(), both[1].use_expansion(list(names)):
            return Models(names, alone, *both, torch.cat(hostile_texts(both[1])))

    return lambda *key: copy.deepcopy(make(*key))


def prompts(model: Any) -> tuple[dict[str, Tensor], ...]:
    """Prompts where a model is: a batch, a single token, and a batch that is padded on the left."""
    device = model.device
    padding = padded(random_ids(3, 13).to(device), (5, 2, 0))
    return {"input_ids": random_ids(2, 9).to(device)}, {"input_ids": random_ids(1, 1).to(device)}, padding


# ---- the one function


@torch.no_grad()
def broken(models: Models, **router: Any) -> set[str]:
    """Names of the promises that do not hold; of `paths_as_alone` with the path for which it does not.

    Args:
        models: The models.
        router: Numbers of the router that bounds forgetting; by default equal weights that never switch.
    """
    names, trained = list(models.names), models.trained
    router = {"switch_rate": 0.0} | router
    found = set()
    if not all(is_base(models.alone[None], models.fresh, choice) for choice in (None, *names, names)):
        found.add("output_at_init")
    for settings in ROUTERS if len(names) == 1 else ROUTERS[:1]:
        trained.set_expansion(names, **settings)
        if not all(has_base_stream(models.alone[None], trained, prompt) for prompt in prompts(trained)):
            found.add("base_stream_always")
        side_by_side = [(prompt, trained.path_logits(**prompt)) for prompt in prompts(trained)]
        for number, (name, own) in enumerate(models.alone.items()):
            if not (
                all(is_alone(own, trained, name, number, *both) for both in side_by_side)
                and is_alone_in_pieces(own, trained, number)
            ):
                found.add(f"paths_as_alone: {name}")
    trained.set_expansion(names, **router)
    if most_lost(trained, models.texts) > math.log(1 + len(names)) + ROOM[trained.dtype]:
        found.add("bounded_forgetting")
    return found


ROUTERS: tuple[dict[str, Any], ...] = (
    {"router": "posterior"},
    {"router": "cosine", "threshold": 0.9},
    {"router": "cosine", "threshold": 0.9, "strict": True},
)


def is_base(base: Any, model: Any, choice: Any) -> bool:
    """Whether a choice gives the base's logits, whole and token by token with a cache."""
    with model.use_expansion(choice):
        for prompt in prompts(model):
            if not torch.equal(base(**prompt).logits, model(**prompt).logits):
                return False
        options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
        one, other = (own.generate(**prompts(model)[-1], **options) for own in (base, model))
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def has_base_stream(base: Any, model: Any, prompt: dict[str, Tensor]) -> bool:
    """Whether the first features, and the first path's logits, are the base's beside all others."""
    options = {"output_hidden_states": True, "use_cache": False}
    wanted = base(**prompt, **options)
    # after the last norm, base streams lie one after the other along the batch
    found = [own[: len(prompt["input_ids"])] for own in model(**prompt, **options).hidden_states]
    states = zip(wanted.hidden_states, found, strict=True)
    if not all(torch.equal(old, new[..., : old.shape[-1]]) for old, new in states):
        return False
    return torch.equal(model.path_logits(**prompt)[0], wanted.logits)


def is_alone(
    own: Any, model: Any, name: str | None, number: int, prompt: dict[str, Tensor], side_by_side: Tensor
) -> bool:
    """Whether a path is its model: by name, beside the others, and in one row of a batch."""
    uncached = own(**prompt, use_cache=False).logits
    found = torch.equal(side_by_side[number], uncached)
    with model.use_expansion(name):
        found &= torch.equal(model(**prompt).logits, own(**prompt).logits)
    others = [None, *model.choice.names]
    rows = [name, *(others[(number + row) % len(others)] for row in range(1, len(uncached)))]
    found &= torch.equal(model(**prompt, expansion_names=rows, use_cache=False).logits[0], uncached[0])
    return found


def is_alone_in_pieces(own: Any, model: Any, number: int) -> bool:
    """The same of what the router remembers of a path, by pieces with a cache, where it reads tokens."""
    if not model.choice.router.reads_tokens:
        return True
    ids, caches, start = random_ids(2, 9).to(model.device), [None, None], 0
    for size in (6, 1, 2):
        now, start = ids[:, start : start + size], start + size
        outputs = [
            one(now, past_key_values=cache, use_cache=True) for one, cache in zip((own, model), caches, strict=True)
        ]
        caches = [output.past_key_values for output in outputs]
        wanted = outputs[0].logits[:, -1:].float()
        if not torch.equal(state_of(caches[1]).keys[:, number, -1:], wanted - normalizers(wanted)[..., None]):
            return False
    return True


def most_lost(model: Any, ids: Tensor) -> float:
    """What the worst of many texts loses against the best path for it, in nats."""
    best = torch.stack([nats(logits, ids) for logits in model.path_logits(ids)]).amin(0)
    return float((nats(model(ids).logits, ids) - best).max())


def hostile_texts(model: Any) -> list[Tensor]:
    """Texts that each path writes, halves of them put together, random ones, and some that are made to mislead."""
    names, starts = model.choice.names, random_ids(2, 1, seed=5).to(model.device)
    found = [random_ids(4, 24, seed=6).to(model.device)]
    for name in (None, *names):
        with model.use_expansion(name):
            found.append(model.generate(starts, max_new_tokens=23, min_new_tokens=23, do_sample=False))
    found += [torch.cat((one[:2, :12], other[:2, :12]), 1) for one, other in pairwise(found)]
    return [*found, misleading(model, 1 + len(names))]


def misleading(model: Any, count: int) -> Tensor:
    """A text for each path, in which each token is the one that it expects most beside what all others expect."""
    ids = torch.cat([random_ids(1, 1, seed=number).to(model.device) for number in range(count)])
    for _ in range(23):
        log_p = torch.stack([own[:, -1].double().log_softmax(-1) for own in model.path_logits(ids)])
        more = []
        for number in range(count):
            of_row = log_p[:, number]
            others = torch.cat((of_row[:number], of_row[number + 1 :])).amax(0)
            more.append((of_row[number] - others).argmax(-1, keepdim=True))
        ids = torch.cat((ids, torch.stack(more)), 1)
    return ids


def nats(logits: Tensor, ids: Tensor) -> Tensor:
    """What each text costs, but for its first token."""
    return -logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))


# ---- what has to hold


CASES = [
    *((family, "bfloat16" if family == "gemma3_text" else "float32", count) for family in WAYS for count in COUNTS),
    *(("qwen3_moe", "float32", count) for count in COUNTS),
]


@pytest.mark.parametrize(
    ("family", "dtype", "count"),
    mostly(
        CASES, lambda own: own[0] == "llama" or own in (("gemma3_text", "bfloat16", 2), ("qwen3_moe", "float32", 4))
    ),
)
def test_nothing_is_broken(models_of: Callable[..., Models], family: str, dtype: str, count: int) -> None:
    assert broken(models_of(family, count, dtype)) == set()


# ---- the negative controls: each spoils one thing, and the function says which promise is gone

each_count = pytest.mark.parametrize("count", mostly(COUNTS, (2).__eq__))


@each_count
def test_one_number_of_w12_breaks_the_output_at_init(models_of: Callable[..., Models], count: int) -> None:
    models = models_of("llama", count)
    with torch.no_grad():
        models.fresh.get_parameter("model.layers.2.mlp.down_proj.expansions.law.w12")[0, 0] = 1.0
    assert broken(models) == {"output_at_init"}


@each_count
def test_one_bit_of_an_expansion_breaks_its_path(models_of: Callable[..., Models], count: int) -> None:
    models = models_of("llama", count)
    weight = models.trained.get_parameter(f"lm_head.expansions.{NAMES[0]}.up_weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert broken(models) == {f"paths_as_alone: {NAMES[0]}"}


@each_count
def test_one_bit_of_the_base_breaks_every_path(models_of: Callable[..., Models], count: int) -> None:
    models = models_of("llama", count)
    for model in (models.fresh, models.trained):
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.data = weight.data.clone()
        weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    wanted = {f"paths_as_alone: {name}" for name in (None, *models.names)}
    assert broken(models) == wanted | {"output_at_init", "base_stream_always"}


@contextmanager
def never_parted() -> Iterator[None]:
    """Let all paths read and write one base stream, inside a `with` block."""

    def together(self: Paths, layer: int, forks: dict[str, int | None]) -> tuple[Group, ...]:
        ups = tuple(dict.fromkeys(path.expansion for path in self.paths if path.expansion))
        writers = [own for own in ups if forks[own] is not None and forks[own] <= layer]
        return (Group(writers[0] if writers else "", ups),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Paths, "_at", together)
        patch.setattr(
            Paths,
            "place_of",
            lambda self, path, layer: (
                0,
                self.groups(layer)[0].ups.index(path.expansion) if path.expansion else None,
            ),
        )
        yield


@each_count
def test_a_base_stream_that_is_written_into_is_noticed(models_of: Callable[..., Models], count: int) -> None:
    models = models_of("llama", count)
    models.trained.known_paths.clear()  # which have been parted, for the texts
    with never_parted():
        found = broken(models)
    # what writes alone is right by itself; whoever reads what it wrote is not
    assert {"base_stream_always", "paths_as_alone: None"} <= found


@each_count
def test_weights_that_do_not_follow_break_the_bound(
    models_of: Callable[..., Models], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    models = models_of("llama", count)
    rare = [0.999 / count] * count
    assert broken(models, prior=[0.001, *rare]) == {"bounded_forgetting"}, "a path that begins with less loses more"
    assert broken(models, switch_rate=0.9) == {"bounded_forgetting"}, "and so does one that gives its weight away"

    def stuck(self: PosteriorRouter, evidence: Any) -> Tensor:
        return torch.tensor(self.prior).log().expand_as(evidence.log_likelihoods)

    monkeypatch.setattr(PosteriorRouter, "weights", stuck)
    assert broken(models) == {"bounded_forgetting"}
