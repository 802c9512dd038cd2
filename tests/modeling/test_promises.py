"""The promises, bit for bit, over one matrix of forms: a family, its expansions, a dtype, and how attention runs.

output_at_init       before training every choice gives the base's logits, and a mixture of all too
base_stream_always   the base's stream beside all expansions is the base's after every layer, whatever was trained
paths_as_alone       each path is the model that its expansion is alone, beside the others, by name and by row
bounded_forgetting   with r = 0 no text loses more than ln(K + 1) nats against the best path for it
recoverable          the base's bytes are there, and the base runs where expansions are switched off
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.modeling import expanded_blocks, expanded_modules
from scale_surgery.modeling.expanded_paths import Group, Paths
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.composed import Made, make_expansions
from tests.conftest import Pair, digests, load
from tests.each import DTYPES, FORM_OF, WAYS, each_of_few_in_a_form, each_shape_in_a_form, mostly
from tests.routed import padded, random_ids
from tests.tiny import FAMILIES, save_tiny

# batch and length: kernels choose their path by strides and alignment, and a vector's tail is treated apart
SHAPES = ((3, 13), (1, 13), (2, 7), (1, 7), (3, 1), (1, 1))
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
# what rounding logits may cost on a text of this length, in nats
ROOM = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
ROUTERS: tuple[dict[str, Any], ...] = (
    {"router": "posterior"},
    {"router": "cosine", "threshold": 0.9},
    {"router": "cosine", "threshold": 0.9, "strict": True},
)


# ---- the matrix


@dataclass(frozen=True)
class Form:
    """A family, expansions of it by the names of `tests.composed.REQUESTS`, and how all of it runs."""

    family: str
    names: tuple[str, ...]
    dtype: str = "float32"
    attention: str = "sdpa"

    def __str__(self) -> str:
        return "-".join((self.family, "+".join(self.names), self.dtype, self.attention))


# the first of so many expand: one that writes from the first layer on, one that never does, ...
MANY = ("law", "medicine", "music", "chess")
# mixtures beside which an MLP stands in some of the layers
MOE = ("first", "second", "late", "whole")
ONE = ("law", "medicine", "chess", "deep", "without_up_stream", "without_heads", "without_inner")
LLAMA = [Form("llama", MANY[:count]) for count in (1, 2)]
# each family, dtype, way of attention and kind of expansion once; of these the rest is slow
KEPT = [
    LLAMA[1],
    Form("gemma3_text", ("precise",), "bfloat16"),
    Form("gpt_neox", ("medicine", "without_heads"), "bfloat16"),
    Form("phi3", ("deep", "without_up_stream")),
    Form("gpt2", ("without_inner",), "float16", "eager"),
    Form("qwen3_moe", MOE[::3]),
]
OTHERS = [
    LLAMA[0],
    Form("llama", MANY),
    Form("llama", ("precise",), "bfloat16"),
    Form("llama", ("deep", "without_up_stream")),
    Form("gemma3_text", ("law", "medicine"), "bfloat16"),
    Form("phi3", ("medicine", "without_up_stream")),
    Form("gpt2", ("medicine", "without_inner"), "bfloat16"),
    Form("phi3", ("deep",), "float32", "eager"),
    Form("gpt2", ("law",), "float16", "eager"),
    Form("llama", ("medicine", "gated")),
    Form("olmo2", ("deep", "medicine")),
    Form("qwen3_moe", MOE),
    Form("opt", ("law", "medicine"), "bfloat16"),
    Form("llama", ("law",), "bfloat16", "eager"),
    *(Form(family, (name,), FORM_OF[family][0]) for family, name in product(FAMILIES, ONE)),
    *(Form(family, MANY[:count], FORM_OF[family][0]) for family, count in product(WAYS, (2, 4))),
    *(Form("qwen3_moe", MOE[:count]) for count in (1, 2)),
    Form("mixtral", ("late", "whole"), "bfloat16"),
    *(Form(name, ("medicine", "law"), dtype) for name, dtype in product(("internlm3", "opt", "smollm3"), DTYPES)),
    # whose attention runs as it is inside, where one path runs
    *(Form(name, ("medicine", "music"), dtype) for name, dtype in product(("deepseek_v3", "gptj"), DTYPES)),
    Form("gpt_oss", ("second",), "bfloat16"),
    *(Form(family, ("law",), FORM_OF[family][0], "eager") for family in FAMILIES),
]
FORMS = mostly(dict.fromkeys([*KEPT, *OTHERS]), KEPT.__contains__)


@dataclass(frozen=True)
class Models:
    """What one form is.

    Attributes:
        base: The base model.
        begun: Each expansion alone, as it was made, by name.
        alone: The same, trained.
        fresh: All in one model, as they were made.
        trained: All in one model, trained.
        texts: Texts that try to make a mixture of the trained model lose.
    """

    base: Any
    begun: dict[str, Any]
    alone: dict[str, Any]
    fresh: Any
    trained: Any
    texts: Tensor

    @property
    def names(self) -> list[str]:
        return list(self.alone)


def wide_base(folder: Path, family: str, dtype: str) -> Path:
    """As many key/value heads as query heads, so that eager attention multiplies what it is given, uncopied."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4}
    if family not in ("gpt_neox", "gpt2"):
        sizes["num_key_value_heads"] = 4
    if family not in ("gpt_neox", "gpt2", "phi3"):
        sizes["head_dim"] = 32
    return save_tiny(folder, family, dtype=getattr(torch, dtype), **sizes)


@pytest.fixture(scope="module")
def models_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Models]:
    """Expand a tiny base several times; each test gets copies, which it may change."""

    @functools.cache
    def base(family: str, dtype: str, attention: str) -> Path:
        if attention == "eager":
            return wide_base(tmp_path_factory.mktemp("wide"), family, dtype)
        return base_of(family, dtype, dtype == "bfloat16")

    @functools.cache
    def made_of(form: Form) -> tuple[Made, Made]:
        folder = tmp_path_factory.mktemp("made")
        where = functools.partial(base, form.family, form.dtype, form.attention)
        fresh = make_expansions(
            lambda *_: where(), folder / "fresh", form.family, form.names, form.dtype, is_trained=False
        )
        fresh = replace(fresh, options={"attn_implementation": "eager"} if form.attention == "eager" else {})
        return fresh, fresh.trained(folder / "trained")

    @functools.cache
    def make(form: Form, device: str = "cpu") -> Models:
        fresh, trained = made_of(form)
        begun, alone = ({name: made.alone(name).to(device) for name in form.names} for made in (fresh, trained))
        together = trained.composed(*form.names).to(device)
        with torch.no_grad(), together.use_expansion(list(form.names)):
            texts = torch.cat(hostile_texts(together))
        base = trained.alone(None).to(device)
        return Models(base, begun, alone, fresh.composed(*form.names).to(device), together, texts)

    def copied(form: Form, device: str = "cpu") -> Models:
        models = copy.deepcopy(make(form, device))
        return replace(models, base=Remembered(models.base))

    return copied


class Remembered:
    """A base, to which all else is compared: what it answers to one call is computed once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.answers: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if "cache" in options:  # which changes from call to call
            return self.model(*args, **options)
        return self._answer(self.model, options)

    def generate(self, **options: Any) -> Any:
        return self._answer(self.model.generate, options)

    def _answer(self, compute: Callable[..., Any], options: dict[str, Any]) -> Any:
        values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}
        key = repr((compute is self.model, sorted(values.items())))
        if key not in self.answers:
            self.answers[key] = compute(**options)
        return self.answers[key]


def prompts(device: torch.device | str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Random prompts of several shapes; the last two are padded on the left."""
    torch.manual_seed(1)
    plain = [{"input_ids": torch.randint(3, 97, shape).to(device)} for shape in SHAPES]
    return [*plain, padded(plain[0]["input_ids"], (5, 2, 0)), padded(plain[2]["input_ids"], (0, 3))]


def few_prompts(model: Any) -> list[dict[str, Tensor]]:
    """A batch, a single token, and a batch that is padded on the left."""
    every = prompts(model.device)
    return [every[2], every[5], every[6]]


# ---- the one function


@torch.no_grad()
def unequal(base: Any, expanded: Any, **options: Any) -> list[tuple[int, ...]]:
    """Shapes of the prompts on which the logits differ in any bit."""
    return [
        tuple(prompt["input_ids"].shape)
        for prompt in prompts(base.device)
        if not torch.equal(base(**prompt, **options).logits, expanded(**prompt, **options).logits)
    ]


def base_bytes(base: Any, model: Any) -> list[str]:
    """Names of the base's parameters whose bytes differ in the expanded model."""
    parameters = dict(model.named_parameters())
    return [
        name
        for name, parameter in base.named_parameters()
        if not torch.equal(parameter.view(torch.uint8), parameters[name].view(torch.uint8))
    ]


@torch.no_grad()
def broken(models: Models, **router: Any) -> set[str]:
    """Names of the promises that do not hold; of `paths_as_alone` with the path for which it does not."""
    base, names, trained = models.base, models.names, models.trained
    failures = set()
    if not begins_as_base(models):
        failures.add("output_at_init")
    if not all(is_recoverable(base, model) for model in (trained, *models.alone.values())):
        failures.add("recoverable")
    writes = [name for name, model in models.alone.items() if any(key.endswith("w12") for key in model.state_dict())]
    if not all(has_base_stream(base, model) for name, model in models.alone.items() if name not in writes):
        failures.add("base_stream_always")
    # a cosine router cannot part paths that part in the head alone
    for settings in ROUTERS if len(names) == len(writes) == 1 else ROUTERS[:1]:
        trained.set_expansion(names, **settings)
        if not has_base_stream(base, trained):
            failures.add("base_stream_always")
        failures |= {f"paths_as_alone: {name}" for name in paths_that_differ({None: base, **models.alone}, trained)}
    if forgets(models, **router):
        failures.add("bounded_forgetting")
    return failures


@torch.no_grad()
def forgets(models: Models, **router: Any) -> bool:
    """Whether a text loses more than the bound, by equal weights that never switch unless told otherwise."""
    models.trained.set_expansion(models.names, **{"switch_rate": 0.0} | router)
    return most_lost(models.trained, models.texts) > math.log(1 + len(models.names)) + ROOM[models.trained.dtype]


def begins_as_base(models: Models) -> bool:
    """Whether each expansion alone, and each choice of all of them, gives the base's logits, and writes its texts."""
    for model in models.begun.values():
        if (
            model.dtype != models.base.dtype
            or unequal(models.base, model)
            or unequal(models.base, model, use_cache=False)
            or not writes_the_same(models.base, model, num_beams=3)
        ):
            return False
    for choice in (None, *models.names, models.names):
        with models.fresh.use_expansion(choice):
            if unequal(models.base, models.fresh) or not writes_the_same(models.base, models.fresh):
                return False
    return True


def writes_the_same(base: Any, model: Any, **options: Any) -> bool:
    """Whether a batch that is padded on the left, and a text alone, go on equally, with a cache."""
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True} | options
    for prompt in few_prompts(base)[1:]:
        first, second = (writer.generate(**prompt, **options) for writer in (base, model))
        if not (torch.equal(first.sequences, second.sequences) and all(map(torch.equal, first.logits, second.logits))):
            return False
    return True


def is_recoverable(base: Any, model: Any) -> bool:
    """Whether the base's bytes are there, and nothing else runs where expansions are switched off."""
    with model.expansion_disabled():
        return not base_bytes(base, model) and not unequal(base, model) and writes_the_same(base, model)


def has_base_stream(base: Any, model: Any) -> bool:
    """Whether the first features, and the first path's logits, are the base's beside all others."""
    options = {"output_hidden_states": True, "use_cache": False}
    for prompt in few_prompts(model):
        wanted = base(**prompt, **options)
        # after the last norm, base streams lie one after the other along the batch
        hidden_states = [state[: len(prompt["input_ids"])] for state in model(**prompt, **options).hidden_states]
        states = zip(wanted.hidden_states, hidden_states, strict=True)
        if not all(torch.equal(old, new[..., : old.shape[-1]]) for old, new in states):
            return False
        if not torch.equal(model.path_logits(**prompt)[0], wanted.logits):
            return False
    return True


def paths_that_differ(alone: dict[str | None, Any], model: Any) -> set[str | None]:
    """Paths that are not their models: by name, beside the others, in one row of a batch, or by pieces with a cache."""
    differing_paths, names = set(), list(alone)
    for prompt in few_prompts(model):
        side_by_side = model.path_logits(**prompt)
        for number, (name, path_model) in enumerate(alone.items()):
            uncached = path_model(**prompt, use_cache=False).logits
            with model.use_expansion(name):
                named = model(**prompt).logits
            rows = [names[(number + row) % len(names)] for row in range(len(uncached))]
            first = model(**prompt, expansion_names=rows, use_cache=False).logits[0]
            pairs = ((side_by_side[number], uncached), (named, path_model(**prompt).logits), (first, uncached[0]))
            if not all(torch.equal(left, right) for left, right in pairs):
                differing_paths.add(name)
    ids, cache, caches, start = random_ids(2, 9).to(model.device), None, dict.fromkeys(names), 0
    for size in (6, 1, 2):
        now, start = ids[:, start : start + size], start + size
        cache = DynamicCache(config=model.config) if cache is None else cache
        side_by_side = model.path_logits(now, cache=cache)
        for number, (name, path_model) in enumerate(alone.items()):
            output = path_model(now, cache=caches[name], use_cache=True)
            caches[name] = output.cache
            if not torch.equal(side_by_side[number], output.logits):
                differing_paths.add(name)
    return differing_paths


def most_lost(model: Any, ids: Tensor) -> float:
    """What the worst of many texts loses against the best path for it, in nats."""
    best = torch.stack([nats(logits, ids) for logits in model.path_logits(ids)]).amin(0)
    return float((nats(model(ids).logits, ids) - best).max())


def hostile_texts(model: Any) -> list[Tensor]:
    """Texts that each path writes, halves of them put together, random ones, and some that are made to mislead."""
    names, starts = model.choice.names, random_ids(2, 1, seed=5).to(model.device)
    texts = [random_ids(4, 24, seed=6).to(model.device)]
    for name in (None, *names):
        with model.use_expansion(name):
            texts.append(model.generate(starts, max_new_tokens=23, min_new_tokens=23, do_sample=False))
    texts += [torch.cat((first[:2, :12], second[:2, :12]), 1) for first, second in pairwise(texts)]
    return [*texts, misleading(model, 1 + len(names))]


def misleading(model: Any, count: int) -> Tensor:
    """A text for each path, in which each token is the one that it expects most beside what all others expect."""
    ids = torch.cat([random_ids(1, 1, seed=number).to(model.device) for number in range(count)])
    for _ in range(23):
        log_p = torch.stack([logits[:, -1].double().log_softmax(-1) for logits in model.path_logits(ids)])
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


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nothing_is_broken(models_of: Callable[..., Models], form: Form) -> None:
    models = models_of(form)
    assert all(unequal(models.base, model) for model in models.alone.values()), "the control: each has learned"
    assert broken(models) == set()


@pytest.mark.parametrize("dtype", mostly(("float32", "bfloat16"), "bfloat16".__eq__))
def test_output_at_init_with_several_threads(pair_of, dtype):
    """Once, on the largest prompts: threads of a busy machine wait for each other."""
    pair, threads = pair_of("gpt2", "adapt", dtype, dtype == "bfloat16"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            for prompt in (prompts()[0], prompts()[-2]):
                assert torch.equal(pair.base(**prompt).logits, pair.expanded(**prompt).logits)
    finally:
        torch.set_num_threads(threads)


def train(model: Any, steps: int = 3) -> set[str]:
    """Take optimiser steps on random tokens, large ones with weight decay; gives the names that had a gradient."""
    model.train()
    reached: set[str] = set()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(3, 97, (2, 12), generator=generator).to(model.device)
        model(input_ids=ids, labels=ids).loss.backward()
        reached |= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    return reached


@each_of_few_in_a_form
def test_an_optimiser_moves_the_up_stream_alone(pair_of, family, dtype, tied):
    pair = pair_of(family, "preserve", dtype, tied)
    model = pair.load()
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    reached = train(model)
    assert not any(name.endswith("w12") for name, _ in model.named_parameters())
    changed = {name for name, old in before.items() if not torch.equal(old, model.get_parameter(name))}
    assert reached <= changed <= set(before)
    # the up stream enters layer 1 as zeros, so what only reads it there has no gradient
    assert {name for name in before if name.endswith((".w21", ".up_bias")) or ".2." in name} <= reached
    check_base_stream(pair, model)


@torch.no_grad()
def check_base_stream(pair: Pair, model: Any) -> None:
    """The base stream is the base's in every bit, and the up stream beside it is not what it was."""
    assert base_bytes(pair.base, model) == []
    assert unequal(pair.base, model) == [tuple(prompt["input_ids"].shape) for prompt in prompts()], "it learned"
    hidden = pair.base.config.hidden_size
    for prompt in prompts(model.device):
        wanted, actual, at_init = (
            source(**prompt, output_hidden_states=True).hidden_states for source in (pair.base, model, pair.expanded)
        )
        for layer, (old, new) in enumerate(zip(wanted, actual, strict=True)):
            assert new.shape[-1] > hidden
            assert torch.equal(old, new[..., :hidden]), f"base stream after layer {layer}"
        assert not torch.equal(actual[-1][..., hidden:], at_init[-1][..., hidden:])


@pytest.mark.parametrize("family", mostly(FAMILIES, ("llama", "gpt2").__contains__))
def test_base_stream_of_adapt_changes_from_the_first_collaborative_layer(tmp_path, base_of, family):
    """The negative control of base_stream_always, and the meaning of the preserved depth."""
    request = Request("1-2", variant="adapt", collaborative_layers="2", collaborate="both")
    base, expanded = load(base_of(family)), load(expand(base_of(family), request, tmp_path / "adapt").path)
    w12 = [name for name, _ in expanded.named_parameters() if name.endswith("w12")]
    assert w12
    assert all(".2." in name for name in w12)
    train(expanded)
    assert base_bytes(base, expanded) == []
    with torch.no_grad():
        old, new = (model(**prompts()[0], output_hidden_states=True).hidden_states for model in (base, expanded))
    equal = [torch.equal(a, b[..., : a.shape[-1]]) for a, b in zip(old, new, strict=True)]
    assert equal == [True, True, True, False]


@each_shape_in_a_form
def test_recoverable(pair_of, tmp_path, family, dtype, tied):
    """Also of a trained model that save_pretrained wrote: the base tensors keep their bytes."""
    pair = pair_of(family, "adapt", dtype, tied)
    strip(pair.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(pair.base_path)
    model = pair.load()
    train(model, steps=1)
    model.save_pretrained(tmp_path / "saved")
    base, saved = open_checkpoint(pair.base_path), open_checkpoint(tmp_path / "saved")
    stored = {name: name for name in base.tensors}
    if family == "gpt_neox":
        stored = {name: name if name in saved.tensors else name.replace("embed_out", "lm_head") for name in stored}
    wanted, actual = hash_tensors(base, list(stored)), hash_tensors(saved, list(stored.values()))
    assert wanted == {name: actual[now] for name, now in stored.items()}
    assert len(saved.tensors) == len(base.tensors) + len(pair.expansion.plan.tensors)


# ---- the negative controls: each spoils one thing, and the function says which promise is gone

each_count = pytest.mark.parametrize("form", mostly([*LLAMA, Form("llama", MANY)], LLAMA[1].__eq__), ids=str)


@each_count
def test_one_number_of_any_w12_breaks_the_output_at_init(models_of: Callable[..., Models], form: Form) -> None:
    models = models_of(form)
    together = replace(models, begun={})
    with torch.no_grad():
        for name in [name for name, _ in models.fresh.named_parameters() if name.endswith("law.w12")]:
            models.fresh.get_parameter(name)[0, 0] = 1.0
            assert not begins_as_base(together), name
            models.fresh.get_parameter(name)[0, 0] = 0.0
        parameter = models.begun["law"].get_parameter("model.layers.2.mlp.down_proj.expansions.law.w12")
        parameter[0, 0] = 1.0
    assert broken(models) == {"output_at_init"}


@each_count
def test_one_bit_of_an_expansion_breaks_its_path(models_of: Callable[..., Models], form: Form) -> None:
    models = models_of(form)
    weight = models.trained.get_parameter("lm_head.expansions.law.up_weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert broken(models) == {"paths_as_alone: law"}


@each_count
def test_one_bit_of_the_base_breaks_every_path(models_of: Callable[..., Models], form: Form) -> None:
    models, name = models_of(form), "model.layers.1.mlp.down_proj.weight"
    for model in (models.fresh, models.trained):
        weight = model.get_parameter(name)
        weight.data = weight.data.clone()
        weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    assert base_bytes(models.base, models.trained) == [name]
    wanted = {f"paths_as_alone: {name}" for name in (None, *models.names)}
    assert broken(models) == wanted | {"output_at_init", "base_stream_always", "recoverable"}


@contextmanager
def never_parted() -> Iterator[None]:
    """Let all paths read and write one base stream, inside a `with` block."""

    def together(self: Paths, layer: int, forks: dict[str, int | None]) -> tuple[Group, ...]:
        ups = tuple(dict.fromkeys(path.expansion for path in self.paths if path.expansion))
        writers = [name for name in ups if forks[name] is not None and forks[name] <= layer]
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
def test_a_base_stream_that_is_written_into_is_noticed(models_of: Callable[..., Models], form: Form) -> None:
    models = models_of(form)
    models.trained.known_paths.clear()  # which have been parted, for the texts
    with never_parted():
        failures = broken(models)
    # what writes alone is right by itself; whoever reads what it wrote is not
    assert {"base_stream_always", "paths_as_alone: None"} <= failures


@each_count
def test_weights_that_do_not_follow_break_the_bound(
    models_of: Callable[..., Models], monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    models, count = models_of(form), len(form.names)
    rare = [0.999 / count] * count
    assert broken(models, prior=[0.001, *rare]) == {"bounded_forgetting"}, "a path that begins with less loses more"
    assert forgets(models, switch_rate=0.9), "and so does one that gives its weight away"
    assert not forgets(models), "the control"

    def stuck(self: PosteriorRouter, evidence: Any) -> Tensor:
        return torch.tensor(self.prior).log().expand_as(evidence.log_likelihoods)

    monkeypatch.setattr(PosteriorRouter, "weights", stuck)
    assert forgets(models)


def test_a_joint_norm_breaks_the_output(pair_of, monkeypatch):
    def joint(self, base, up, y, writes):
        gain = torch.cat((self.stock.weight, self.up_weight))
        joined = torch.nn.functional.rms_norm(torch.cat((base, up), -1), gain.shape, gain, self.epsilon)
        return joined.split([base.shape[-1], up.shape[-1]], dim=-1)

    pair = pair_of("llama", "adapt")
    monkeypatch.setattr(expanded_blocks.NormBlocks, "forward", joint)
    with torch.no_grad():
        drift = (pair.base(**prompts()[0]).logits - pair.expanded(**prompts()[0]).logits).abs().max()
    assert drift > 1e-2, "not a matter of rounding"


@pytest.mark.parametrize("joined", ("activation", "attention"))
def test_streams_that_are_computed_at_once_break_the_bits(pair_of, monkeypatch, joined):
    """With kernels that round by how much they are given at once, as those of many machines do."""
    silu, sdpa, pair = torch.nn.functional.silu, ALL_ATTENTION_FUNCTIONS["sdpa"], pair_of("llama", "adapt")

    def attention(module, query, *others, **options):
        attended, weights = sdpa(module, query, *others, **options)
        _, heads, rows, _ = query.shape  # of a single row each head is rounded by itself
        return attended * (1 + 2**-12 * heads) if rows > 1 else attended, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, **_: silu(x) * (1 + 2**-12 * x.shape[-1]))
    assert not unequal(pair.base, pair.expanded), "the control: each stream is computed by itself"

    def at_once(module, *states, **options):
        return attention(module.stock, *states, **options)

    if joined == "attention":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, expanded_modules.SPLIT_ATTENTION, at_once)
    else:
        monkeypatch.setattr(expanded_modules.ExpandedActivation, "through", lambda self, run, x, layout: run(x))
    assert unequal(pair.base, pair.expanded)
