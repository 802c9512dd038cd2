"""New tokens: rows of embedding and head beside those of the base, whose logits stay what they are."""

from __future__ import annotations

import functools
import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace
from shutil import copytree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma4TextConfig

from scale_surgery import (
    CosineRouter,
    DataError,
    PlanError,
    PosteriorRouter,
    Request,
    RunOptions,
    TokenSource,
    apply,
    compose,
    evaluate,
    expand,
    extract,
    find_new_tokens,
    load_expansion,
    merge,
    plan,
    route_export,
    strip,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.specs import Widths
from scale_surgery.surgery.merge_stock import stock_config
from scale_surgery.text.tokenizing import start_tokens
from tests.conftest import digests, edited, load, problems, refused, shake
from tests.each import mostly, woven
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES as TINY
from tests.tiny import TOKENS as TOKEN_IDS
from tests.tiny import save_tiny

# more than the shipped tokenizer has: rows beyond its ids are left alone
ROWS = 1200
TOKENS = NewTokens(("Xylophone", "birthplace", " Zürich"))
TEXT = "The birthplace of a Xylophone is Zürich."
OLD = torch.tensor([[5, 40, 7, 300, 12, 9]])
ALONE = Request("none", new_tokens=TOKENS)
WIDE = Request("0,2", variant="adapt", collaborate="both", init_w22="random", new_tokens=TOKENS)
PRESERVE = Request("1-2", init_w22="random", new_tokens=TOKENS)
GROWN = Request("1", variant="adapt", up_width=0, new_tokens=TOKENS)
COPIED = Request("1", method="grow", new_tokens=TOKENS)
# tied and untied heads, a scaled embedding, logits capped or scaled, Conv1D, a fused projection, a head with a bias
FAMILIES = ("llama", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi3", "cohere")


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """A tiny model with the shipped tokenizer, made once for each family."""

    @functools.cache
    def make(family):
        path = tmp_path_factory.mktemp(family) / "base"
        if family in TINY:
            save_tiny(path, family, vocab_size=ROWS)
        else:
            config = twin_config(family)
            config.vocab_size = ROWS
            write_base(config, torch.float32, path)
        AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(path)
        return path

    return make


def new_ids(path):
    return AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids


def change(path, names):
    """Shake the tensors of an expansion whose names end so."""
    for file in path.glob("expansion-*.safetensors"):
        generator = torch.Generator().manual_seed(0)
        with edited(file) as tensors:
            for name, tensor in tensors.items():
                if name.endswith(names):
                    tensor += torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) / 2
    return path


@torch.no_grad()
def logits(model, ids=OLD):
    return model(ids).logits


# as they are, scaled and capped, by a Conv1D, and logits that are scaled
@pytest.mark.parametrize(
    ("family", "request_"),
    woven(("llama", "gemma2", "gpt2", "cohere"), (ALONE, WIDE), among=FAMILIES),
    ids=lambda value: value if isinstance(value, str) else "wide" if value == WIDE else "alone",
)
def test_old_vocabulary(base_of, tmp_path, family, request_):
    base = base_of(family)
    model = load(expand(base, request_, tmp_path / "wide").path)
    wanted = logits(load(base))
    assert model.config.get_text_config().vocab_size == ROWS + 3
    assert torch.equal(logits(model)[..., :ROWS], wanted)
    with model.expansion_disabled():
        alone = logits(model)
    assert torch.equal(alone[..., :ROWS], wanted)
    assert (alone.softmax(-1)[..., ROWS:] == 0).all()
    assert (logits(model).softmax(-1)[..., ROWS:] > 0).all()
    ids = new_ids(tmp_path / "wide")
    assert set(ids[0].tolist()) >= {ROWS, ROWS + 1, ROWS + 2}
    model(ids, labels=ids).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if name.endswith("new_rows")]
    assert all(gradient.abs().sum(-1).min() > 0 for gradient in gradients)
    assert all(p.grad is None for name, p in model.named_parameters() if ".expansions." not in name)
    # a control: with another old row nothing is equal
    changed = change(tmp_path / "wide", ("new_rows",))
    assert not torch.equal(logits(load(changed), ids)[..., :ROWS], logits(model, ids)[..., :ROWS])
    assert torch.equal(logits(load(changed))[..., :ROWS], wanted)


def held(verification):
    return {promise.name for promise in verification.promises if promise.claimed and promise.holds}


@pytest.mark.parametrize(
    "request_",
    mostly([ALONE, WIDE, PRESERVE, GROWN, COPIED], [ALONE, WIDE, GROWN].__contains__),
    ids=lambda r: f"{r.layers}-{r.method}",
)
def test_everything_that_follows(base_of, tmp_path, request_):
    base = base_of("llama")
    wide = expand(base, request_, tmp_path / "wide").path
    assert {"recoverable", "output_at_init", "old_vocabulary"} <= held(verify(wide, base))
    assert digests(strip(wide, tmp_path / "base").path) == digests(base)
    apply(extract(wide, tmp_path / "extract").path, tmp_path / "applied", base=base)
    assert digests(tmp_path / "applied") == digests(wide)
    shake(wide)
    ids, model = new_ids(wide), load(wide)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    if request_.method == "scale":
        fused = merge(wide, tmp_path / "fused").path
        torch.testing.assert_close(logits(load(fused), ids), logits(model, ids))
        assert digests(merge(fused, tmp_path / "blocks", "blocks").path) == digests(wide)
    if model.config.scale_surgery["expansions"][0]["widths"]["up_width"] == 0:
        stock = merge(wide, tmp_path / "stock", "stock").path
        torch.testing.assert_close(logits(load(stock), ids), logits(model, ids))
        assert type(load(stock)).__name__ == "LlamaForCausalLM" and torch.equal(new_ids(stock), ids)


def test_a_changed_row_of_the_base_breaks_it(base_of, tmp_path):
    base = base_of("llama")
    wide = expand(base, ALONE, tmp_path / "wide", base_weights="copy").path
    assert "old_vocabulary" in held(verify(wide, base))
    (shard,) = wide.glob("model-*.safetensors")
    with edited(shard) as tensors:
        tensors["lm_head.weight"][40] *= 2
    verification = verify(wide, base, required=("old_vocabulary",))
    (promise,) = [promise for promise in verification.promises if promise.name == "old_vocabulary"]
    assert promise.holds is False and not verification.passed
    assert any(line.startswith("lm_head.weight: ") for line in promise.problems)


def test_other_logits_of_the_base_s_tokens_break_it(base_of, tmp_path):
    """The base's tensors are whole; the model computes otherwise."""
    wide = expand(base_of("llama"), ALONE, tmp_path / "wide").path
    with edited(wide / "config.json") as config:
        config["rms_norm_eps"] = 0.5
    trusting = RunOptions(trust_remote_code=True)
    found = verify(wide, base_of("llama"), required=("old_vocabulary",), run=trusting, record=False)
    (promise,) = [promise for promise in found.promises if promise.name == "old_vocabulary"]
    assert not found.passed and any(line.startswith("logits of the base's tokens: drift") for line in promise.problems)


def test_after_training(base_of, tmp_path):
    base = base_of("llama")
    for name, request, kept in (("alone", ALONE, True), ("wide", WIDE, False)):
        wide = shake(expand(base, request, tmp_path / name).path)
        assert ("old_vocabulary" in held(verify(wide, base))) == kept
        assert torch.equal(logits(load(wide))[..., :ROWS], logits(load(base))) == kept


@pytest.mark.parametrize("family", mostly(("llama", "gemma2"), "llama".__eq__))
def test_routed(base_of, tmp_path, family):
    base = base_of(family)
    wide = shake(expand(base, WIDE, tmp_path / "wide").path)
    routed = load(route_export(wide, tmp_path / "routed", PosteriorRouter(switch_rate=0.0)).path)
    ids = new_ids(wide)
    first = int((ids[0] >= ROWS).nonzero()[0])
    scores = routed.score_tokens(ids)
    # the base gives a new token probability 0, and the posterior leaves it for good
    assert (scores.weights[0, :first, 0] > 0.001).all() and (scores.weights[0, first:, 0] == 0).all()
    assert torch.isfinite(scores.routed).all() and torch.isfinite(logits(routed, ids)).all()
    paths = routed.path_logits(ids)
    with routed.use_expansion("default"):
        assert torch.equal(paths[1], logits(routed, ids))
    old = routed.path_logits(OLD)
    assert torch.equal(old[0][..., :ROWS], logits(load(base)))
    assert {"base_stream_always", "paths_as_alone", "bounded_forgetting"} <= held(verify(tmp_path / "routed", base))
    step = routed.generate(ids, max_new_tokens=4, do_sample=False)
    uncached = routed.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(step, uncached)


def test_cosine_is_fused(base_of, tmp_path):
    wide = shake(expand(base_of("llama"), WIDE, tmp_path / "wide").path)
    routed = route_export(wide, tmp_path / "routed", CosineRouter(threshold=0.9)).path
    fused = merge(routed, tmp_path / "fused").path
    ids = new_ids(wide)
    torch.testing.assert_close(logits(load(fused), ids), logits(load(routed), ids))


# a config that takes what transformers sets on any, a tensor that files call otherwise, layers of unlike heads
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ("mellum", "laguna", "axk1", "dots3_note_text"))
def test_fused_where_layers_cannot_be(base_of, tmp_path, model_type):
    base = base_of(model_type)
    wide = shake(expand(base, ALONE, tmp_path / "wide").path)
    fused, ids = merge(wide, tmp_path / "fused").path, new_ids(wide)
    torch.testing.assert_close(logits(load(fused), ids), logits(load(wide), ids))
    assert digests(merge(fused, tmp_path / "blocks", "blocks").path) == digests(wide)
    # a control: one with new blocks in a layer is refused
    wider = expand(base, Request("last:1", new_tokens=TOKENS), tmp_path / "wider").path
    found = problems(merge, wider, tmp_path / "refused", error=PlanError)
    assert {(problem.code, problem.where) for problem in found} == {("block-not-fused", "--to fused")}


def test_stock_forms(base_of, tmp_path):
    """Of a head with another name in files, of one that is tied with a copy in the files, and of a nested config."""
    tied = save_tiny(tmp_path / "tied", "llama", vocab_size=ROWS, tie_word_embeddings=True)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(tied)
    with edited(tied / "model.safetensors") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name, base in (("named", base_of("gpt_neox")), ("tied", tied)):
        wide = shake(expand(base, ALONE, tmp_path / f"{name}-wide").path)
        stock, ids = merge(wide, tmp_path / f"{name}-stock", "stock").path, new_ids(wide)
        torch.testing.assert_close(logits(load(stock), ids), logits(load(wide), ids))
        assert load(stock).get_output_embeddings().weight.shape[0] == ROWS + 3
        # a control: the rows are not the base's
        assert not torch.equal(
            logits(load(stock), ids), logits(load(expand(base, ALONE, tmp_path / f"{name}-other").path), ids)
        )
    facts, sizes = stored_facts(wide)
    nested = stock_config({"text_config": {"vocab_size": ROWS}}, facts, sizes, Widths(new_tokens=3))
    assert nested == {"text_config": {"vocab_size": ROWS + 3}}


def stored_facts(path):
    plan = read_manifest(path).plan
    return plan.architecture, plan.sizes


@pytest.mark.parametrize("family", mostly(("llama", "gemma2", "gpt_neox"), ("llama", "gpt_neox").__contains__))
def test_streamed(base_of, tmp_path, family):
    """A model that memory does not hold: rows of new tokens come with the module that has them."""
    path = shake(expand(base_of(family), WIDE, tmp_path / "wide").path)
    whole, streamed = (
        verify(path, run=RunOptions(**memory), record=False).numbers for memory in ({}, {"memory_bytes": 60_000})
    )
    assert streamed is not None and streamed.drift > 0 and streamed == whole


def test_an_expansion_with_tokens_is_replaced_by_itself(base_of, tmp_path):
    """The tokenizer of the folder has the tokens already; that of the base counts."""
    folder = expand(base_of("llama"), replace(ALONE, name="ko"), tmp_path / "wide").path
    piece = extract(folder, tmp_path / "piece").path
    compose(folder, {"ko": piece}, tmp_path / "out", remove="ko")
    assert verify(tmp_path / "out", record=False).passed


def test_two_embeddings_are_refused(tmp_path):
    sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 52}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(vocab_size=ROWS, vocab_size_per_layer_input=ROWS, layer_types=kinds, **sizes, **TOKEN_IDS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(tmp_path / "base")
    (problem,) = problems(plan, tmp_path / "base", ALONE, error=PlanError)
    assert (problem.code, problem.where) == ("vocabulary-fixed", "--new-tokens")
    assert problem.values["reason"].startswith("model.embed_tokens_per_layer reads token ids too")
    assert plan(tmp_path / "base", Request("1")).layers == (1,)


PLACE = "--new-tokens"


@pytest.mark.parametrize(
    ("new", "code", "where"),
    [
        (NewTokens(()), "value-empty", f"{PLACE}: tokens"),
        (NewTokens(("Xylophone", "Xylophone")), "token-given-twice", PLACE),
        (NewTokens((" ",)), "token-blank", f"{PLACE}: ' '"),
        (NewTokens("Xylophone"), "value-unfit", f"{PLACE}: tokens"),
        (NewTokens(("\ud800",)), "value-unfit", f"{PLACE}: tokens"),
        (("Xylophone",), "value-unfit", "new_tokens"),
        (NewTokens(("a",)), "token-known", PLACE),
        (NewTokens(("Zürich",)), "token-read-otherwise", "'Zürich'"),
        (NewTokens(("qqq",), ("qq q",)), "merge-of-no-token", PLACE),
        (NewTokens(("qq", "qqq"), ("qq q",)), "merges-unlike-tokens", PLACE),
    ],
)
def test_tokens_of_no_use(base_of, tmp_path, new, code, where):
    for make in (plan, lambda *given: expand(*given, tmp_path / "wide")):
        found = problems(make, base_of("llama"), Request("none", new_tokens=new))
        assert (code, where) in [(problem.code, problem.where) for problem in found]
    assert not (tmp_path / "wide").exists()


def test_every_path_reads_new_tokens(base_of, tmp_path):
    base = base_of("llama")
    wide = shake(expand(base, WIDE, tmp_path / "wide").path)
    # widens the embedding, and knows the base's tokens
    low = shake(expand(base, Request("0", variant="adapt", name="low"), tmp_path / "low").path)
    parts = {name: extract(path, tmp_path / f"{name}-extract").path for name, path in (("default", wide), ("low", low))}
    model = load(compose(base, parts, tmp_path / "both").path)
    ids = new_ids(tmp_path / "both")
    paths = model.path_logits(ids)
    for name, of_path in zip((None, "default", "low"), paths, strict=True):
        with model.use_expansion(name):
            alone = logits(model, ids)
        assert torch.equal(alone[..., :ROWS], of_path[..., :ROWS])
        assert ((alone.softmax(-1)[..., ROWS:] == 0).all()) == (name != "default")
    assert torch.isfinite(logits(model, ids)).all()
    # a control: they are read
    changed = load(change(tmp_path / "both", ("new_rows",)))
    for before, after in zip(paths, changed.path_logits(ids), strict=True):
        assert not torch.equal(before[..., :ROWS], after[..., :ROWS])


def test_strict_cosine_is_not_fused(base_of, tmp_path):
    wide = expand(base_of("llama"), WIDE, tmp_path / "wide").path
    routed = route_export(wide, tmp_path / "routed", CosineRouter(threshold=0.9, strict=True)).path
    with refused("fused-router-and-tokens", "--to fused"):
        merge(routed, tmp_path / "fused")


def test_beside_others(base_of, tmp_path):
    base = base_of("llama")
    wide = shake(expand(base, WIDE, tmp_path / "wide").path)
    law = shake(expand(base, Request("1", init_w22="random", name="law"), tmp_path / "law").path)
    words = expand(base, Request("none", new_tokens=TOKENS, name="words"), tmp_path / "words").path
    parts = [extract(path, tmp_path / f"{path.name}-extract").path for path in (wide, law, words)]
    both = compose(base, {"default": parts[0], "law": parts[1]}, tmp_path / "both").path
    model, ids = load(both), new_ids(both)
    assert torch.equal(ids, new_ids(wide))
    for name, path in (("default", wide), ("law", law)):
        with model.use_expansion(name):
            assert torch.equal(logits(model)[..., :ROWS], logits(load(path))[..., :ROWS])
    with model.use_expansion("default"):
        assert torch.equal(logits(model, ids), logits(load(wide), ids))
    rows = model(OLD.repeat(2, 1), expansion_names=["law", None]).logits
    assert (rows.softmax(-1)[..., ROWS:] == 0).all()
    assert digests(strip(both, tmp_path / "base").path) == digests(base)
    with_tokens = {"default": parts[0], "words": parts[2]}
    assert problems(compose, base, with_tokens, tmp_path / "two", error=PlanError) == [
        Problem("expansions-add-tokens", "expansions", names=["default", "words"])
    ]
    # one more in a folder that has one, with new tokens and without
    extended = expand(law, Request("none", new_tokens=TOKENS, name="words"), tmp_path / "again").path
    assert torch.equal(new_ids(extended), ids)
    assert digests(strip(extended, tmp_path / "base2").path) == digests(base)


def test_another_tokenizer_of_the_base(base_of, tmp_path):
    """The base's tensors with another tokenizer: new tokens are written into that one, or refused."""
    base = base_of("llama")
    taken = extract(expand(base, ALONE, tmp_path / "wide").path, tmp_path / "taken").path
    sibling = copytree(base, tmp_path / "other")
    with edited(sibling / "tokenizer.json") as content:
        content["normalizer"] = {"type": "Lowercase"}
    applied = apply(taken, tmp_path / "applied", base=sibling).path
    assert verify(applied, sibling, probes=None).problems == ()
    assert digests(strip(applied, tmp_path / "stripped").path) == digests(sibling)
    written = json.loads((applied / "tokenizer.json").read_text("utf-8"))
    assert written["normalizer"] and written["added_tokens"][-1]["content"] == " Zürich"
    with edited(sibling / "tokenizer.json") as content:
        content["added_tokens"].append(
            {**content["added_tokens"][-1], "content": "Xylophone", "id": len(content["model"]["vocab"])}
        )
    with pytest.raises(DataError, match="the base has 'Xylophone' already, with the id"):
        apply(taken, tmp_path / "again", base=sibling)
    with pytest.raises(DataError, match="the base has 'Xylophone' already, with the id"):
        compose(sibling, taken, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert compose(base, taken, tmp_path / "again").path.is_dir(), "the control"


def test_in_memory(base_of, tmp_path):
    base = base_of("llama")
    wide = shake(expand(base, WIDE, tmp_path / "wide").path)
    law = shake(expand(base, Request("1", init_w22="random", name="law"), tmp_path / "law").path)
    taken, law_extract = (extract(path, tmp_path / f"{path.name}-extract").path for path in (wide, law))
    model, ids = load_expansion(load(base), taken), new_ids(wide)
    assert torch.equal(logits(model, ids), logits(load(wide), ids))
    # one more beside it, and none with tokens of its own
    assert load_expansion(model, law_extract, name="law") is model
    for name, path in (("default", wide), ("law", law)):
        with model.use_expansion(name):
            assert torch.equal(logits(model)[..., :ROWS], logits(load(path))[..., :ROWS])
    with refused("tokens-of-two-expansions", taken.name, PlanError):
        load_expansion(model, taken, name="again")
    copy = deepcopy(model)
    model.delete_expansion("default")
    assert model.config.vocab_size == model.vocab_size == ROWS and logits(model).shape[-1] == ROWS
    with copy.use_expansion("default"):
        assert torch.equal(logits(copy, ids), logits(load(wide), ids))
    assert torch.equal(logits(load_expansion(model, taken, name="again"), ids), logits(load(wide), ids))


def test_verify_reads_the_tokenizer(base_of, tmp_path):
    wide = expand(base_of("llama"), ALONE, tmp_path / "wide").path
    with edited(wide / "tokenizer.json") as content:
        content["added_tokens"][-1]["content"] = "Xylophones"
    other = Problem("tokenizer-key-changed", "tokenizer.json: added_tokens")
    assert verify(wide, probes=None).problems == (str(other),)


def test_evaluate_reads_each_by_its_tokenizer(base_of, tmp_path):
    base = base_of("llama")
    wide = shake(expand(base, ALONE, tmp_path / "wide").path)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    result = evaluate(wide, new=tmp_path / "text.txt")
    of_base, of_wide, disabled = (score.new for score in result.scores)
    (alone,) = evaluate(base, new=tmp_path / "text.txt").scores
    assert of_base == disabled == alone.new
    assert of_wide.scored < of_base.scored and of_wide.bytes == of_base.bytes == len(TEXT.encode())
    assert of_base.bits_per_byte == of_base.nats / math.log(2) / of_base.bytes
    assert result.scores[1].learning == (of_base.nats - of_wide.nats) / of_base.scored
    assert "wide: reads other tokens than base (base). Compare bits/byte" in result.notes[0]


def test_models_that_share_a_base_are_compared_on_the_same_text(base_of, tmp_path):
    """Without a start token, the end token stands before each text for all of them, so its first token is predicted."""
    base = copytree(base_of("llama"), tmp_path / "base")
    with edited(base / "tokenizer.json") as content:
        content["post_processor"] = None
    wide = shake(expand(base, ALONE, tmp_path / "wide").path)
    plain = expand(base, Request("1"), tmp_path / "plain").path
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    asked = {"old": tmp_path / "text.txt", "new": tmp_path / "text.txt"}
    assert not start_tokens(AutoTokenizer.from_pretrained(base))
    alone = {score.name: score for score in evaluate(wide, **asked).scores}
    for beside in ([base, wide], [plain, wide], [wide, plain, base]):
        scores = {score.name: score for score in evaluate(beside, **asked).scores}
        for name in ("wide", "wide, expansion disabled"):
            assert scores[name].forgetting == alone[name].forgetting and scores[name].learning == alone[name].learning
        assert scores["wide, expansion disabled"].forgetting == 0 != scores["wide"].forgetting
        if plain in beside:
            assert scores["plain"].forgetting == 0
    (lonely,) = evaluate(base, **asked).scores
    assert lonely.old.scored < scores["base (base)"].old.scored, "the negative control"


def test_a_character_in_bytes_becomes_a_token_without_a_merge(stories, tmp_path):
    (tmp_path / "text.txt").write_text("Die Straße führt über Brücken. Größe und Süße. " * 20, "utf-8")
    choice = find_new_tokens(stories, TokenSource(token_texts=(str(tmp_path / "text.txt"),), token_count=30))
    new = choice.new_tokens
    assert {"ß", "ü"} <= set(new.tokens) and len(new.merges) < len(new.tokens)
    wide = expand(stories, Request("none", new_tokens=new), tmp_path / "wide").path
    assert "old_vocabulary" in held(verify(wide, stories))
    tokenizer = AutoTokenizer.from_pretrained(wide)
    ids = tokenizer("Große Füße", add_special_tokens=False).input_ids
    assert max(ids) >= 512 and tokenizer.decode(ids).strip() == "Große Füße"


def test_a_file_of_the_tokenizer_that_stays_keeps_its_line_ends(base_of, tmp_path):
    base = shutil.copytree(base_of("llama"), tmp_path / "base")
    config = base / "tokenizer_config.json"
    config.write_bytes(config.read_bytes().replace(b"\n", b"\r\n"))
    wide = expand(base, ALONE, tmp_path / "wide").path
    stock = merge(wide, tmp_path / "stock", "stock").path
    for folder in (wide, stock):
        assert (folder / config.name).read_bytes() == config.read_bytes()
