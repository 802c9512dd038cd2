"""compare: the same budget for each method, by PEFT's own code and by expansions; what stops goes on."""

from __future__ import annotations

import importlib.util
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from scale_surgery import CompareSettings, Comparison, Request, compare, expand
from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, biography, people
from scale_surgery.checkpoint.records import read_record
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.comparing.compare import MEASURED, PAGE, RECORD, SAMPLES, CompareStart
from scale_surgery.comparing.comparison import Base, Losses, Refused, Row
from scale_surgery.comparing.methods import METHODS, Place
from scale_surgery.comparing.settings import FOLDERS
from scale_surgery.comparing.tables import advice
from scale_surgery.comparing.texts import read_texts
from scale_surgery.errors import CheckpointError, DataError, PlanError, TrainingError
from scale_surgery.running.loss import Measurement
from scale_surgery.running.options import RunOptions
from scale_surgery.training.chunked_loss import find_pieces
from scale_surgery.training.rehearsal import BaseModel, divergence_from_base
from tests.command import run
from tests.conftest import Bars, refused
from tests.tiny import save_tiny

SETTINGS = CompareSettings(methods=("lora", "preserve"), tokens=512, rates=1, sequence_length=64, batch_size=4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("texts")
    groups = {"new": people(8, start=SHIPPED_PEOPLE), "old": people(8)}
    for side, group in groups.items():
        rows = [json.dumps({"text": biography(person, style)}) for person in group for style in range(4)]
        (place / f"{side}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return {side: place / f"{side}.jsonl" for side in groups}


@pytest.fixture(scope="module")
def done(texts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    folder = tmp_path_factory.mktemp("compared") / "out"
    return compare(SHIPPED_MODEL, texts["new"], texts["old"], folder, SETTINGS), folder


def losses_of(comparison: Comparison) -> list[tuple[str, Losses]]:
    return [(row.method, row.losses) for row in comparison.rows]


def test_each_method_learns_and_is_recorded(done: tuple[Comparison, Path]) -> None:
    comparison, folder = done
    assert [row.method for row in comparison.rows] == ["lora", "preserve"] and not comparison.refused
    assert all(row.learning > 0 for row in comparison.rows)
    assert read_record(json.loads((folder / RECORD).read_text()), Comparison) == comparison
    lora, preserve = comparison.rows
    assert comparison.base is not None
    assert lora.served_bytes == comparison.base.served_bytes < preserve.served_bytes
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert advice(comparison).split(":")[0] in page and "data:image/svg+xml" in page


def test_an_interrupted_comparison_continues_to_the_same_numbers(
    done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    arguments: Any = (SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", SETTINGS)
    # before the base is in the record, and after the first method
    bars = Bars(stop="measure base"), Bars()
    for track, start in zip(bars, (CompareStart(), CompareStart(ends=stop)), strict=True):
        with pytest.raises(TrainingError) as stopped:
            compare(*arguments, start=start, track=track)
        assert stopped.value.problems[0].code == "comparison-interrupted"
    assert ["samples" in track for track in bars] == [True, False], "samples are drawn once"
    kept = read_record(json.loads((tmp_path / "out" / RECORD).read_text()), Comparison)
    assert [row.method for row in kept.rows] == ["lora"]
    ended: list[str] = []
    again = compare(*arguments, start=CompareStart(ends=lambda row, _: ended.append(row.method)))
    assert ended == ["preserve"]
    assert losses_of(again) == losses_of(done[0])
    with pytest.raises(CheckpointError) as other:
        compare(*arguments[:-1], replace(SETTINGS, seed=1))
    assert other.value.problems[0].code == "comparison-of-other-settings"
    # rows of two machines or of two releases cannot be compared
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    for name in ("device", "torch"):
        machine = record["machine"] | {name: "another"}
        (tmp_path / "out" / RECORD).write_text(json.dumps(record | {"machine": machine}))
        with pytest.raises(CheckpointError) as moved:
            compare(*arguments)
        assert moved.value.problems[0].code == "comparison-of-other-settings"


def test_methods_are_added_and_left_out(done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path) -> None:
    arguments: Any = (SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out")
    first = compare(*arguments, replace(SETTINGS, methods=("preserve",)))
    both = compare(*arguments, replace(SETTINGS, methods=("lora",)))
    assert both.rows[:1] == first.rows and [row.method for row in both.rows] == ["preserve", "lora"]
    assert sorted(losses_of(both), key=str) == sorted(losses_of(done[0]), key=str), "in any order"


def test_of_a_long_text_a_bounded_part_is_measured(texts: dict[str, Path], tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    documents = [biography(person, style) for person in people(SHIPPED_PEOPLE) for style in range(3)]
    old = tmp_path / "old.jsonl"
    old.write_text("\n".join(json.dumps({"text": text}) for text in documents), encoding="utf-8")
    with pytest.raises(TrainingError):
        compare(SHIPPED_MODEL, texts["new"], old, tmp_path / "out", SETTINGS, start=CompareStart(forecast=stop))
    for part in ("calibrate", "measure"):
        lines = (tmp_path / "out" / FOLDERS["old"] / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        held_out = sum(len(json.loads(line)["text"]) for line in lines)
        assert MEASURED / 2 < held_out < MEASURED + max(map(len, documents)) < sum(map(len, documents)) / 2


def test_own_samples_begin_as_asked(texts: dict[str, Path], tmp_path: Path) -> None:
    asked = tmp_path / "asked.txt"
    asked.write_text("Once there was\nNobody knows\n", encoding="utf-8")
    settings = replace(SETTINGS, methods=("preserve",), tokens=64, prompts=str(asked))
    arguments: Any = (SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", settings)
    forecasts: list[Any] = []
    done = compare(*arguments, start=CompareStart(forecast=forecasts.append))
    assert forecasts[0].begun == "continuing 2 prompts"
    # one sample is enough for so few tokens
    assert done.begun == "continuing 1 prompt"
    assert "sampled (continuing 1 prompt)" in (tmp_path / "out" / PAGE).read_text("utf-8")
    samples = [json.loads(line)["text"] for line in (tmp_path / "out" / SAMPLES).read_text("utf-8").splitlines()]
    assert len(samples) == 1 and samples[0].startswith(("<s>Once there was", "<s>Nobody knows"))
    assert compare(*arguments) == done
    asked.write_text("Once there was\n", encoding="utf-8")
    with refused("comparison-of-other-settings", tmp_path / "out", CheckpointError):
        compare(*arguments)
    with pytest.raises(DataError, match=r"none\.txt"):
        compare(*arguments[:3], tmp_path / "other", replace(settings, prompts="none.txt"))
    assert not (tmp_path / "other").exists()


def test_a_try_is_measured_on_half_as_much_text_as_it_learns(
    done: tuple[Comparison, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_surgery.comparing.texts.FEWEST_MEASURED", 1)
    settings = CompareSettings(tokens=12_000, sequence_length=16)
    texts = read_texts(Place.open(find_source(SHIPPED_MODEL), done[1], settings, RunOptions()))
    learned = texts.trial(None).tokens
    assert 0.4 * learned < texts.measured("calibrate") < 0.6 * learned < texts.measured("measure")


def test_a_small_budget_has_smaller_steps_and_not_fewer() -> None:
    sizes = {tokens: CompareSettings(tokens=tokens).training(512).batch_size for tokens in (100, 100_000, 1_000_000)}
    assert sizes == {100: 1, 100_000: 4, 1_000_000: 8}
    assert CompareSettings(tokens=100, batch_size=3).training(512).batch_size == 3


def test_a_try_is_long_enough_to_warm_up(done: tuple[Comparison, Path]) -> None:
    settings = CompareSettings(tokens=12_000, sequence_length=16)
    texts = read_texts(Place.open(find_source(SHIPPED_MODEL), done[1], settings, RunOptions()))
    steps = {1: 1, 2: 1, 8: 4, 9: 5, 20: 10, 49: 10, 1000: 60}
    assert {count: replace(texts.lesson(None), steps=count).warm_up for count in steps} == steps
    # eight steps of smaller batches, and a 24th of the tokens all the same
    for tokens, rows, share in ((16 * 4 * 48, 1, 1 / 24), (16 * 8 * 120, 5, 1 / 24), (16 * 10, 1, 8 / 10)):
        shorter = CompareSettings(tokens=tokens, sequence_length=16)
        texts = read_texts(Place.open(find_source(SHIPPED_MODEL), done[1], shorter, RunOptions()))
        trial = texts.trial(None)
        assert trial.steps >= 8 and trial.settings.batch_size == rows
        assert trial.tokens == pytest.approx(share * texts.lesson(None).tokens, rel=0.01)


def test_the_budget_is_of_tokens_that_are_read(done: tuple[Comparison, Path]) -> None:
    """Of a short text, the last window is a large part, and it is short."""
    place = Place.open(find_source(SHIPPED_MODEL), done[1], CompareSettings(tokens=50_000), RunOptions())
    texts = read_texts(place)
    assert len(texts.to_learn) < 20 and texts.to_learn.tokens < len(texts.to_learn) * texts.to_learn.longest
    lesson = texts.lesson(None)
    read = sum(int(lesson.batch(step)["attention_mask"].sum()) for step in range(lesson.steps))
    assert read == pytest.approx(lesson.tokens, rel=0.1) == pytest.approx(50_000, rel=0.1)


@pytest.mark.slow
def test_another_seed_gives_other_numbers(
    done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    """The control of the equality above."""
    other = compare(SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", replace(SETTINGS, seed=1))
    assert losses_of(other) != losses_of(done[0])


@pytest.mark.slow
def test_all_methods_on_the_command_line(texts: dict[str, Path], tmp_path: Path) -> None:
    options = ("--tokens", "512", "--rates", "2", "--sequence-length", "64", "--batch-size", "4", "--json")
    line = ("compare", SHIPPED_MODEL, "--data", texts["new"], "--old", texts["old"], "-o", tmp_path / "out", *options)
    result = run(*map(str, line))
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert [row["method"] for row in done["rows"]] == list(METHODS)
    for row in done["rows"]:
        tried = [each for each in done["tries"] if each["method"] == row["method"]]
        assert [each["factor"] for each in tried] == [1, 1 / 4]
        best = min(tried, key=lambda each: sum(side["nats"] / side["scored"] for side in each["losses"].values()))
        assert row["rate"] == best["rate"]


@pytest.mark.slow
def test_a_method_that_does_not_fit_is_left_out_and_the_others_go_on(texts: dict[str, Path], tmp_path: Path) -> None:
    """An MLP of a mixture has no linear layer of its own, to which PEFT could add an adapter."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixture = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **mixture)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    settings = replace(SETTINGS, methods=("lora", "preserve"), tokens=64)
    comparison = compare(base, texts["new"], texts["old"], tmp_path / "out", settings)
    assert [one.method for one in comparison.refused] == ["lora"]
    assert [row.method for row in comparison.rows] == ["preserve"]


def test_a_method_that_memory_cannot_hold_is_left_out(
    done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory that holds one copy of the base, and not what full fine-tuning takes."""
    assert done[0].base is not None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * done[0].base.parameters))
    settings = replace(SETTINGS, methods=("full", "preserve"), tokens=64)
    comparison = compare(SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", settings)
    assert [(one.method, "bytes of memory" in one.reason) for one in comparison.refused] == [("full", True)]
    assert [row.method for row in comparison.rows] == ["preserve"]
    monkeypatch.undo()
    again = compare(SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", settings)
    assert [row.method for row in again.rows] == ["preserve", "full"] and not again.refused, "memory is free again"


def test_a_comparison_without_a_method_fails(
    texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    words = ["compare", SHIPPED_MODEL, "--data", texts["new"], "--old", texts["old"], "--methods", "full"]
    said = run(*words, "--tokens", 64, "-o", tmp_path / "out", code=1).output
    assert "No method could be trained" in said and "--tokens a higher" not in said


def test_a_text_that_was_too_short_can_be_corrected(texts: dict[str, Path], tmp_path: Path) -> None:
    short = tmp_path / "new.jsonl"
    short.write_text(json.dumps({"text": "One line."}), encoding="utf-8")
    with refused("documents-too-few", short, DataError):
        compare(SHIPPED_MODEL, short, texts["old"], tmp_path / "out", SETTINGS)
    shutil.copy(texts["new"], short)
    only = replace(SETTINGS, methods=("lora",))
    assert compare(SHIPPED_MODEL, short, texts["old"], tmp_path / "out", only).rows
    short.write_text(short.read_text() + "\n" + json.dumps({"text": "One more."}))
    with refused("comparison-of-other-settings", tmp_path / "out", CheckpointError):
        compare(SHIPPED_MODEL, short, texts["old"], tmp_path / "out", only)


def test_text_that_is_learned_is_not_measured_as_old(texts: dict[str, Path], tmp_path: Path) -> None:
    with refused("text-of-two-uses", texts["new"], PlanError):
        compare(SHIPPED_MODEL, texts["new"], [texts["old"], texts["new"]], tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_a_method_that_diverges_is_left_out_for_good(
    texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_surgery.comparing.methods.RATE_TIMES_WIDTH", 1e30)
    arguments: Any = (SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", replace(SETTINGS, rates=2))
    comparison = compare(*arguments)
    assert [tried.losses for tried in comparison.tries if tried.method == "lora"] == [None, None]
    assert [(one.method, "not finite" in one.reason) for one in comparison.refused] == [("lora", True)]
    assert [row.method for row in comparison.rows] == ["preserve"]
    assert compare(*arguments) == comparison, "nothing is trained again"


def test_the_highest_rate_is_tried_only_if_the_lowest_is_not_better(texts: dict[str, Path], tmp_path: Path) -> None:
    settings = replace(SETTINGS, methods=("lora", "full"), tokens=64, rates=3)
    comparison = compare(SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", settings)
    for method in settings.methods:
        middle, low, *high = (one for one in comparison.tries if one.method == method)
        assert (low.rate < middle.rate) and bool(high) == (low.total > middle.total)


def test_a_base_that_changed_is_not_compared_further(
    done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(SHIPPED_MODEL, base)
    settings = replace(SETTINGS, methods=("lora",), tokens=64)
    arguments: Any = (base, texts["new"], texts["old"], out, settings)
    finished = compare(*arguments)
    (tmp_path / "link").hardlink_to(base / "config.json")
    (tmp_path / "backup").hardlink_to(texts["new"])
    texts["new"].chmod(0o600)
    assert compare(*arguments) == finished, "no content changed, and nothing is left to do"
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    with pytest.raises(CheckpointError) as changed:
        compare(*arguments)
    assert changed.value.problems[0].code == "comparison-of-other-settings"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A base with dropout, whose attention has a linear layer of the name of one of the MLP."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    path = save_tiny(tmp_path / "gpt2", "gpt2", vocab_size=len(tokenizer), resid_pdrop=0.3)
    tokenizer.save_pretrained(path)
    return path


def test_a_method_that_finds_no_layer_is_left_out_and_the_others_go_on(
    gpt2: Path, texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OSF knows no layer of GPT-2; another method fails as a class of its own might."""

    def fails(place: Place) -> Any:
        raise ValueError("an error of other code")

    monkeypatch.setitem(METHODS, "lora", replace(METHODS["lora"], make=fails))  # type: ignore[call-overload]
    settings = replace(SETTINGS, methods=("osf", "lora", "preserve"), tokens=64, sequence_length=32)
    forecasts: list[Any] = []
    start = CompareStart(forecast=forecasts.append)
    arguments: Any = (gpt2, texts["new"], texts["old"], tmp_path / "out", settings)
    comparison = compare(*arguments, start=start)
    assert [(one.method, one.is_lasting) for one in comparison.refused] == [("osf", True), ("lora", False)]
    assert "no layer" in comparison.refused[0].reason and "an error of other code" in comparison.refused[1].reason
    assert [row.method for row in comparison.rows] == ["preserve"]
    monkeypatch.undo()
    again = compare(*arguments, start=start)
    assert [row.method for row in again.rows] == ["preserve", "lora"]
    all_methods, one_method = forecasts
    assert 0 < one_method.seconds < all_methods.seconds and one_method.sampled_tokens == 0
    (page := tmp_path / "out" / PAGE).unlink()
    compare(*arguments, start=start)
    assert len(forecasts) == 2 and page.is_file(), "nothing is left but the page"


def test_adapters_are_on_mlps_alone(gpt2: Path, tmp_path: Path) -> None:
    place = Place.open(find_source(str(gpt2), None), tmp_path, SETTINGS, RunOptions())
    with METHODS["lora"].make(place) as made:
        trained = {name.split(".lora_")[0] for name, one in made.model.named_parameters() if one.requires_grad}
    layers = {int(name.split(".h.")[1].split(".")[0]) for name in trained}
    assert {name.split(".h.")[1].split(".", 1)[1] for name in trained} == {"mlp.c_fc", "mlp.c_proj"}
    assert len(trained) == 2 * len(layers) > 2


def test_dropout_does_not_depend_on_what_ran_before(gpt2: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    settings = replace(SETTINGS, methods=("preserve",), tokens=64, sequence_length=32)
    for methods, name in ((("preserve",), "alone"), (("lora", "preserve"), "after")):
        compare(gpt2, texts["new"], texts["old"], tmp_path / name, replace(settings, methods=methods))
    alone, after = (
        read_record(json.loads((tmp_path / name / RECORD).read_text()), Comparison) for name in ("alone", "after")
    )
    assert losses_of(alone) == losses_of(after)[1:]


def test_windows_without_anything_to_learn_are_not_learned(
    done: tuple[Comparison, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    rows = [{"prompt": "Who is it? " * 40, "completion": f"Number {number}."} for number in range(40)]
    asked.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = CompareSettings(tokens=64, sequence_length=16)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(TrainingError):
        compare(SHIPPED_MODEL, asked, texts["old"], tmp_path / "out", settings, start=CompareStart(forecast=stop))
    texts_read = read_texts(Place.open(find_source(SHIPPED_MODEL), tmp_path / "out", settings, RunOptions()))
    learned = texts_read.to_learn
    assert len(learned) > 10 and all((learned[row]["labels"][1:] >= 0).any() for row in range(len(learned)))


def test_a_tokenizer_with_more_tokens_than_the_base_is_refused(texts: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny(base, "llama", vocab_size=40)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
    with pytest.raises(DataError) as refused:
        compare(base, texts["new"], texts["old"], tmp_path / "out", SETTINGS)
    assert [problem.code for problem in refused.value.problems] == ["token-id-too-high"]


def test_an_expanded_model_is_no_base(texts: dict[str, Path], tmp_path: Path) -> None:
    wide, saved = expand(SHIPPED_MODEL, Request("last:1"), tmp_path / "wide").path, tmp_path / "saved"
    # what a trainer saves has no record
    shutil.copytree(wide, saved, ignore=shutil.ignore_patterns("surgery.json"))
    for model in (wide, saved):
        with pytest.raises(CheckpointError) as refused:
            compare(model, texts["new"], texts["old"], tmp_path / "out", SETTINGS)
        assert refused.value.problems[0].code == "form-expanded-not-base" and not (tmp_path / "out").exists()


def test_a_folder_with_other_files_stays(texts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    inside = tmp_path / "out" / "new.jsonl"
    inside.parent.mkdir()
    inside.write_bytes(texts["new"].read_bytes())
    for output, code in ((tmp_path, "output-no-job"), (inside.parent, "output-touches-input")):
        with pytest.raises(CheckpointError) as refused:
            compare(SHIPPED_MODEL, inside, texts["old"], output, SETTINGS, start=CompareStart(overwrite=True))
        assert code in [problem.code for problem in refused.value.problems]
    assert inside.is_file() and (tmp_path / "mine.txt").is_file()


def test_peft_is_needed_for_its_methods_alone(
    texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError) as refused:
        compare(SHIPPED_MODEL, texts["new"], texts["old"], tmp_path / "out", SETTINGS)
    (problem,) = refused.value.problems
    assert problem.code == "peft-missing" and problem.values["names"] == ["lora"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lora", "adapt"])
def test_own_samples_pull_to_the_base_however_it_is_computed(name: str, tmp_path: Path) -> None:
    """The base inside a model, and a second copy of it, give one divergence; another model does not."""
    place = Place.open(find_source(str(SHIPPED_MODEL), None), tmp_path, SETTINGS, RunOptions())
    ids = torch.arange(3, 43).reshape(2, 20)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with METHODS[name].make(place) as made, place.base() as copy:
        with torch.no_grad():
            for parameter in made.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        tail, tail_of_copy = find_pieces(made.model, made.inside, batch), find_pieces(copy, copy, batch)
        inside = BaseModel(made.model, made.inside, made.alone, tail)
        beside = BaseModel(copy, copy, nullcontext, tail_of_copy)
        own, other = (divergence_from_base(made.model, made.inside, batch, tail, base) for base in (inside, beside))
        whole = divergence_from_base(made.model, made.inside, batch, None, inside._replace(tail=None))
        assert own > 0 and torch.equal(own, other)
        torch.testing.assert_close(own, whole)
        with torch.no_grad():
            copy.get_input_embeddings().weight.mul_(1.1)
        assert not torch.equal(divergence_from_base(made.model, made.inside, batch, tail, beside), own), "the control"


def compared(*rows: tuple[str, float, float]) -> Comparison:
    """A comparison of methods by what they learned and forgot."""

    def losses(learned: float, forgot: float) -> Losses:
        return Losses(Measurement(100 * (3 + forgot), 100, 0, 0), Measurement(100 * (4 - learned), 100, 0, 0))

    made = tuple(Row(name, 1e-3, True, 1, 1.0, 1, 1, 1.0, losses(*score), *score) for name, *score in rows)
    return Comparison("base", SETTINGS, {}, {}, Base(losses(0, 0), 1.0, 1, 1, 1.0), rows=made)


@pytest.mark.parametrize(
    ("rows", "begins", "says"),
    [
        # one that learns a little more and forgets far more is not taken, and is named
        (
            [("full", 1.0, 3.0), ("lora", 0.85, 0.05), ("preserve", 0.5, 0.0)],
            "Take lora:",
            ["Learned most: full learned 1.000 and forgot 3.000", "Forgot least: preserve learned 0.500"],
        ),
        ([("full", 1.0, 0.1), ("adapt", 0.95, 0.3)], "Take full:", []),
        ([("lora", 0.5, 0.1), ("grow", 0.5003, 0.1)], "Take grow:", ["As good, within 0.01 nats: lora."]),
        ([("full", 0.1, 3.0), ("lora", 0.09, 2.5)], "No method learned more than it forgot.", ["full learned 0.100"]),
        ([("full", -0.1, 0.5), ("lora", 0.0004, 0.0)], "No method learned the new text:", []),
        ([("lora", 0.5, -0.0247)], "Only lora was trained.", ["learned 0.500 and reads old text better by 0.025 nats"]),
        ([("lora", 0.5, -0.00001), ("full", 0.1, 0.0)], "Take lora:", ["forgot 0.000"]),
        ([("lora", -0.2, -0.9), ("full", 0.1, 0.0)], "Take lora:", ["reads new text worse by 0.200"]),
    ],
)
def test_the_sentence_names_the_lowest_sum_of_losses_and_what_beats_it(
    rows: list[Any], begins: str, says: list[str]
) -> None:
    comparison = compared(*rows)
    said = advice(comparison)
    assert said.startswith(begins) and all(some in said for some in says) and "-0.0" not in said
    assert comparison.chosen == (begins.split()[1].strip(":") if not begins.startswith("No") else None)
    refused = replace(comparison, refused=(Refused("osf", "why", is_lasting=True),))
    assert "Not done: osf." in advice(refused) and "Not done" not in said
