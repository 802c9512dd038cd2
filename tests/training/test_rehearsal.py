"""Rehearsal: the divergence and its gradient, samples of the base, and that a model stays what its base is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import kl_div
from transformers import PreTrainedTokenizerFast

from scale_surgery import (
    DataError,
    EvalData,
    PosteriorRouter,
    Request,
    TrainingError,
    TrainingSettings,
    TrainingStart,
    expand,
    route_export,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.names import SAMPLES_FILE
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.progress import no_track
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.text.beginnings import begin_prompts, begin_texts
from scale_surgery.text.sequences import Sequences, concatenate
from scale_surgery.text.tokenizing import pack, start_tokens
from scale_surgery.training import rehearsal
from scale_surgery.training.base_samples import (
    as_documents,
    as_learned,
    read_samples,
    sample_base,
)
from scale_surgery.training.rehearsal import (
    Divergence,
    Rehearsal,
    base_inside,
    carries_base_logits,
    divergence_from_base,
    logits_beside_base,
    make_rehearsal,
)
from scale_surgery.training.sampling import Sampling
from scale_surgery.training.settings import check_settings
from tests.conftest import digests, load, problems, refused, shake
from tests.training.test_own_text import asking
from tests.training.test_train import ask, expansion, same, stopping_at, write_lines

ITSELF = {"rehearse": ("self",), "rehearsal_samples": 12, "rehearsal_length": 24}
NOTHING = {name: getattr(TrainingSettings(), name) for name in ITSELF}
SETTINGS = TrainingSettings(
    steps=4, sequence_length=32, batch_size=2, learning_rate=3e-3, save_every=2, log_every=1, **ITSELF
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the shipped model expanded in every way."""
    folder = tmp_path_factory.mktemp("rehearsal")
    new = [{"text": biography(person, 3)} for person in people(8, start=400)]
    for name, rows in (("new", new + ask(400, 8)), ("old", ask(0, 8)), ("old-asked", ask(0, 12))):
        write_lines(folder / f"{name}.jsonl", rows)
    expand(SHIPPED_MODEL, Request("all", variant="adapt", collaborate="both"), folder / "adapt")
    expand(SHIPPED_MODEL, Request("2-3"), folder / "preserve")
    expand(SHIPPED_MODEL, Request("2-3", method="grow"), folder / "grow")
    expand(SHIPPED_MODEL, Request("1,3", method="depth"), folder / "depth")
    route_export(folder / "adapt", folder / "routed", PosteriorRouter())
    return folder


@pytest.fixture(scope="module")
def shaken(place: Path) -> Path:
    """The adaptation as after training."""
    return shake(Path(shutil.copytree(place / "adapt", place / "shaken")))


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Any:
    return need_tokenizer(SHIPPED_MODEL, "biographies")


# the divergence


@pytest.mark.parametrize("together", [1, 3, 1000])
def test_the_divergence_and_its_gradient_are_those_of_torch(together, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ours, base = (3 * torch.randn(7, 50, generator=generator) for _ in range(2))
    monkeypatch.setattr(rehearsal, "CHUNK", 50 * together)
    logits, reference_logits = (ours.clone().requires_grad_() for _ in range(2))
    divergence = Divergence.apply(logits, base)
    wanted = kl_div(reference_logits.log_softmax(-1), base.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(divergence, wanted)
    (2 * divergence).backward()
    (2 * wanted).backward()
    torch.testing.assert_close(logits.grad, reference_logits.grad)
    assert logits.grad.abs().max() > 0.01
    assert Divergence.apply(base, base) == 0
    half = ours.bfloat16().requires_grad_()
    Divergence.apply(half, base.bfloat16()).backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.isfinite().all()


def test_what_is_padded_does_not_count_and_the_base_stays(shaken):
    model = load(shaken, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    divergence = divergence_from_base(model, model, {"input_ids": ids, "attention_mask": mask})
    alone = [
        divergence_from_base(model, model, {"input_ids": row, "attention_mask": torch.ones_like(row)})
        for row in (ids[:1], ids[1:, :2])
    ]
    torch.testing.assert_close(divergence, (4 * alone[0] + 2 * alone[1]) / 6)
    divergence.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained and trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with expansion_disabled(model):
        assert divergence_from_base(model, model, {"input_ids": ids, "attention_mask": mask}) == 0, "the control"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_logits_of_the_base_stream_are_those_of_the_base(pair_of, tmp_path, family, dtype):
    """gemma2 caps its logits after the head; sizes are odd, so that kernels have tails."""
    expanded = shake(Path(shutil.copytree(pair_of(family).path, tmp_path / "shaken")))
    model = load(expanded, dtype=dtype).train()
    batch = {"input_ids": torch.randint(3, 97, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    assert carries_base_logits(model)
    stream_logits, ours = logits_beside_base(model, model, batch, base_inside(model, model))
    with torch.no_grad(), expansion_disabled(model):
        base = model(**batch).logits
    alone = model(**batch).logits
    assert (
        stream_logits.equal(base)
        and ours.equal(alone)
        and not stream_logits.equal(ours)
        and not stream_logits.requires_grad
    )
    assert model.active.thread.context is None, "nothing of the call stays"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    both, reference = (torch.autograd.grad(logits.float().square().sum(), trained) for logits in (ours, alone))
    torch.testing.assert_close(both, reference)
    assert any(gradient.any() for gradient in reference)


def test_where_the_base_stream_is_not_the_bases_it_runs_by_itself(place, pair_of):
    """W12 writes into it, it routes, or something is dropped from it: then the base needs a forward of its own."""
    assert carries_base_logits(load(place / "preserve"))
    assert not any(carries_base_logits(load(place / name)) for name in ("adapt", "grow", "depth", "routed"))
    dropping = load(pair_of("gpt2").path)
    assert carries_base_logits(dropping.eval()) and not carries_base_logits(dropping.train())


# its batches


def test_batches_go_through_the_text_again_and_again_in_other_orders():
    parts = [torch.tensor([row, row], dtype=torch.int32) for row in range(6)]
    text = concatenate(Sequences(part, part, (0, 2)) for part in parts)
    batches = Rehearsal(text, 4, 1.0, 0)
    rows = [int(row) for number in range(6) for row in batches.batch(number)["input_ids"][:, 0]]
    passes = [rows[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(order) == list(range(6)) for order in passes) and len({tuple(order) for order in passes}) > 1
    assert "labels" not in batches.batch(0)
    # two processes of half the rows read together what one reads
    half = replace(batches, rows=2)
    assert torch.cat([half.batch(2)["input_ids"], half.batch(3)["input_ids"]]).equal(batches.batch(1)["input_ids"])


@pytest.mark.parametrize(("share", "rows"), [(0.5, 8), (1 / 3, 4), (0.01, 1), (0.9, 72)])
def test_rows_are_a_share_of_both_together(share, rows):
    made = make_rehearsal(concatenate([_one()]), TrainingSettings(batch_size=8, rehearsal_share=share))
    assert made.rows == rows
    assert make_rehearsal(None, TrainingSettings()) is None


def _one() -> Any:
    return Sequences(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32), (0, 2))


# samples of the base


def test_the_base_writes_samples_whatever_was_trained(place, shaken, tokenizer):
    state = torch.get_rng_state()
    sampling = Sampling(10, 24, 1.0, seed=3)
    begins = begin_texts(tokenizer, "biographies")
    ours, base = load(shaken, dtype=torch.float32), load(place / "adapt", dtype=torch.float32)
    samples, base_samples = (sample_base(model, begins, sampling, no_track) for model in (ours, base))
    assert len(samples) == 10 and samples.fingerprint() == base_samples.fingerprint()
    assert torch.get_rng_state().equal(state) and ours.is_expansion_enabled
    rows = [samples[place]["input_ids"].tolist() for place in range(10)]
    assert all(row[0] == tokenizer.bos_token_id and len(row) <= 24 for row in rows)
    assert all(tokenizer.eos_token_id not in row[1:-1] for row in rows)
    assert any(row[-1] == tokenizer.eos_token_id for row in rows), "the model ends what it says"
    another = sample_base(base, begins, replace(sampling, seed=4), no_track)
    assert another.fingerprint() != samples.fingerprint()


def test_samples_go_on_from_prompts_in_turn(place, tokenizer):
    begins = begin_prompts(tokenizer, asking("Q: What is", "The"), "biographies", 12)
    made = sample_base(load(place / "preserve"), begins, Sampling(5, 12, 1.0, 0), no_track)
    texts = [tokenizer.decode(made[row]["input_ids"], skip_special_tokens=True) for row in range(5)]
    assert [text.startswith("Q: What is") for text in texts] == [True] * 3 + [False] * 2
    assert all(text.startswith("The") for text in texts[3:])


def test_samples_have_the_form_of_the_texts_to_learn(place, tokenizer):
    """Packed as they are; without a begin token where no document has one, to tell the two apart."""
    begins = begin_texts(tokenizer, "biographies")
    samples = sample_base(load(place / "preserve"), begins, Sampling(9, 24, 1.0, 0), no_track)
    checkpoint = open_checkpoint(place / "preserve")
    packed, alone = (
        as_learned(samples, TrainingSettings(sequence_length=32, packing=packing), checkpoint, tokenizer)
        for packing in (True, False)
    )
    assert alone is samples and packed.ids.equal(pack(samples, 32, start_tokens(tokenizer)).ids)
    assert {len(packed[row]["input_ids"]) for row in range(len(packed) - 1)} == {32}
    assert as_documents(samples, tokenizer) is samples
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_without_start(tokenizer)), bos_token="<s>")
    assert bare("hello")["input_ids"] == tokenizer("hello")["input_ids"][1:]
    begun = as_documents(samples, bare)
    assert [begun[row]["input_ids"].tolist() for row in range(9)] == [
        samples[row]["input_ids"].tolist()[1:] for row in range(9)
    ]


def test_samples_that_never_end_do_not_each_begin_a_sequence(place, tokenizer):
    rows = torch.arange(1, 5).repeat_interleave(8).view(4, 8)
    rows[:, 0] = 0
    samples = Sequences(rows.flatten().int(), rows.flatten().int(), tuple(range(0, 40, 8)))
    packed = as_learned(samples, TrainingSettings(sequence_length=8), open_checkpoint(place / "preserve"), tokenizer)
    sequences = [packed[row]["input_ids"].tolist() for row in range(len(packed))]
    assert sequences == [
        [0] + [1] * 3 + [0] + [2] * 3,
        [0] + [2] * 3 + [0] + [3] * 3,
        [0] + [3] * 3 + [0] + [4] * 3,
        [0] + [4] * 3,
    ]


@pytest.mark.parametrize("asked", [{"repetition_penalty": 3.0}, {"min_p": 0.9}, {"no_repeat_ngram_size": 1}])
def test_what_a_base_asks_of_generation_does_not_change_its_samples(place, tokenizer, asked):
    begins, sampling = begin_texts(tokenizer, "biographies"), Sampling(4, 24, 1.0, 0)
    model = load(place / "preserve")
    plain = sample_base(model, begins, sampling, no_track)
    model.generation_config.update(**asked)
    config = model.generation_config
    asking = sample_base(model, begins, sampling, no_track)
    assert asking.fingerprint() == plain.fingerprint() and model.generation_config is config


def _without_start(tokenizer: Any) -> str:
    return json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None})


def test_without_a_token_that_begins_texts_it_says_what_to_give():
    class Bare:
        bos_token_id = eos_token_id = None

    with refused("first-token-missing", "bare", DataError):
        begin_texts(Bare(), "bare")


# training


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A short run that nobody stopped."""
    return train(place / "adapt", [place / "new.jsonl"], place / "trained", SETTINGS).path


def test_a_run_keeps_its_samples_and_its_base(place, trained, tokenizer):
    samples = trained / "training" / SAMPLES_FILE
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 12 and all(len(row["ids"]) <= 24 and row["text"] for row in rows)
    (record,) = read_manifest(trained).training
    assert record["settings"]["rehearse"] == ["self"]
    packed = pack(read_samples(samples), 32, start_tokens(tokenizer))
    assert record["texts"]["rehearsal"] == packed.fingerprint(), "packed as the texts are"
    assert verify(trained).passed
    # what is rehearsed decides what is learned
    plain = train(place / "adapt", [place / "new.jsonl"], place / "plain", replace(SETTINGS, **NOTHING)).path
    assert not same(expansion(plain), expansion(trained)) and not (plain / "training" / SAMPLES_FILE).exists()


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(place, trained, tmp_path):
    with refused("training-interrupted", tmp_path / "out", TrainingError):
        train(place / "adapt", [place / "new.jsonl"], tmp_path / "out", SETTINGS, track=stopping_at(3))
    start = TrainingStart(resume=True)
    samples = tmp_path / "out" / "training" / SAMPLES_FILE
    spoiled = samples.read_text()
    samples.write_text(spoiled.replace("ids", "idx"))
    with refused("samples-unreadable", samples, TrainingError):
        train(place / "adapt", [place / "new.jsonl"], tmp_path / "out", SETTINGS, start=start)
    samples.write_text(spoiled)
    done = train(place / "adapt", [place / "new.jsonl"], tmp_path / "out", SETTINGS, start=start).path
    assert same(expansion(done), expansion(trained))


# an adaptation that is not routed is what the other tests train
@pytest.mark.slow
@pytest.mark.parametrize("name", ["preserve", "grow", "depth", "routed"])
def test_every_expansion_rehearses(place, tmp_path, name):
    settings = replace(SETTINGS, steps=4, save_every=None, routed=name == "routed")
    done = train(place / name, [place / "new.jsonl"], tmp_path / name, settings)
    assert done.loss is not None and verify(done.path).passed
    plain = train(place / name, [place / "new.jsonl"], tmp_path / "plain", replace(settings, **NOTHING))
    # records say what was asked for; what was learned is in the weights
    ours, without = (
        {file: digest for file, digest in digests(path).items() if file.endswith(".safetensors")}
        for path in (done.path, plain.path)
    )
    assert ours.keys() == without.keys() and ours != without


@pytest.mark.slow
def test_it_forgets_less(place, tmp_path):
    """Without old text: questions about people that the base knows, which nobody asks during training."""
    long = {"steps": 40, "sequence_length": 128, "save_every": 40, "eval_every": 40}
    rehearsed = replace(SETTINGS, rehearsal_samples=200, rehearsal_length=32, **long)
    usual = {name: value for name, value in vars(TrainingSettings()).items() if name.startswith("rehears")}
    sides = EvalData(old=[place / "old-asked.jsonl"], new=[place / "new.jsonl"])
    forgot = {}
    for name, asked in (("plain", replace(rehearsed, **usual)), ("rehearsed", rehearsed)):
        forgot[name] = train(place / "adapt", [place / "new.jsonl"], tmp_path / name, asked, eval_data=sides).measured
    assert forgot["rehearsed"]["forgetting"] < forgot["plain"]["forgetting"] / 2
    assert forgot["rehearsed"]["old_accuracy"] > forgot["plain"]["old_accuracy"] + 0.1
    assert forgot["rehearsed"]["learning"] > forgot["plain"]["learning"] / 2


# what is said


def test_how_to_rehearse_is_refused_where_nothing_is_rehearsed(place, tmp_path):
    settings = TrainingSettings(rehearsal_weight=5.0, rehearsal_samples=7, steps=1)
    assert problems(train, place / "adapt", [place / "new.jsonl"], tmp_path / "out", settings) == [
        Problem("setting-without-rehearsal", "rehearsal_weight", value=5.0),
        Problem("setting-without-rehearsal", "rehearsal_samples", value=7),
    ]
    # a weight is that of texts too
    with refused("setting-without-samples", "rehearsal_samples", TrainingError):
        check_settings(replace(settings, rehearse=("old.txt",)))
    check_settings(replace(settings, rehearse=("self",)))


def test_wrong_wishes_are_refused(place, tmp_path):
    for settings, error, name in (
        (replace(SETTINGS, rehearse=("self", "a.txt")), TrainingError, "--rehearse"),
        (TrainingSettings(rehearse=("none.txt",)), DataError, "none.txt"),
        (replace(SETTINGS, rehearsal_share=1.0), TrainingError, "rehearsal_share"),
        (replace(SETTINGS, rehearsal_weight=0.0), TrainingError, "rehearsal_weight"),
        (replace(SETTINGS, rehearsal_prompts="none.txt"), DataError, "none.txt"),
        (replace(SETTINGS, rehearsal_length=10**6), DataError, "rehearsal_length"),
    ):
        given = (place / "adapt", [place / "new.jsonl"], tmp_path / "out", settings)
        found = problems(train, *given, error=error)[0]
        assert found.phrase.startswith(name)
    assert not (tmp_path / "out").exists()
