import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Records
from benchmarks.language import base, new_tokens
from benchmarks.language.base import SIZES, Size
from benchmarks.language.methods import methods_for
from benchmarks.language.parallel import read_pairs, write_pairs
from benchmarks.language.report import at_equal, downstream, ended, perplexities, routed
from benchmarks.language.runs import Key, Place, Point, Run, Subject, run, run_base
from benchmarks.language.text import documents, is_in, part_of, read_text, write_text
from scale_surgery import plan

HELP = {"en": "libreoffice-help-en-us", "de": "libreoffice-help-de"}
ENGLISH = "The {} of the document is shown in the window, and it can be changed if you click on it with the mouse."
GERMAN = "Die {} des Dokuments wird in dem Fenster angezeigt, und sie kann mit der Maus geändert werden, wenn es geht."
PAGE = """<html><body><nav>The menu of the window is for the reader.</nav><h1>Short</h1>
<p id="par_1">{}</p><p id="par_2">{}</p><pre>the code of the for and to</pre>
<ul><li>{}<p>{}</p></li></ul></body></html>"""
TEXTS = {"en": ENGLISH, "de": GERMAN}
PARTS = ("train", "dev", "test")


def write_help(work: Path, files: int = 200) -> None:
    for language, package in HELP.items():
        folder = work / "packages" / package / "usr/share/help/text"
        folder.mkdir(parents=True)
        for number in range(files):
            paragraphs = [TEXTS[language].format(f"size{number}x{place}") for place in range(3)]
            # the last is not translated
            content = PAGE.format(*paragraphs, ENGLISH.format(f"note{number}"))
            (folder / f"page{number}.html").write_text(content, encoding="utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    write_help(folder)
    for language in HELP:
        write_text(folder, language)
    write_pairs(folder, "de")
    return folder


def test_paragraphs_are_read_once_in_their_language_and_held_out_with_their_translations(
    work: Path, tmp_path: Path
) -> None:
    (page,) = [paragraphs for _, file, paragraphs in documents(work, "en") if file.name == "page7.html"]
    # code and menus are left out
    assert page == [*(ENGLISH.format(f"size7x{place}") for place in range(3)), ENGLISH.format("note7")]
    held = {}
    for language in HELP:
        lines = (work / "text" / f"{language}.test.jsonl").read_text().splitlines()
        held[language] = {json.loads(line)["file"] for line in lines}
    assert held["en"] == held["de"] == {f"page{n}.html" for n in range(200) if part_of(Path(f"page{n}.html")) == "test"}
    lines_by_part = {
        part: [line for text in read_text(work, "de", part) for line in text.split("\n")] for part in PARTS
    }
    assert sum(map(len, lines_by_part.values())) == 3 * 200, "what nobody translated is not of the second language"
    assert all(is_in("de", line) and not is_in("en", line) for lines in lines_by_part.values() for line in lines)
    pairs = read_pairs(work, "de")
    assert pairs and {pair.new for pair in pairs} <= set(lines_by_part["test"])
    assert all(pair.new == GERMAN.format(pair.old.split()[1]) for pair in pairs)
    write_help(tmp_path, 3)
    folder = tmp_path / "packages" / HELP["en"] / "usr/share/help/text"
    (folder / "zz.html").write_text((folder / "page1.html").read_text())
    assert [file.name for _, file, _ in documents(tmp_path, "en")] == ["page0.html", "page1.html", "page2.html"]


def point(tokens: int, old: float, new: float) -> Point:
    return Point(tokens, old, new)


def test_forgetting_at_equal_learning_is_read_between_two_points() -> None:
    key = Key(Subject("6m", "de"), "full", "none", 1e-3, 100, 0)
    learned = Run(key, 1, 1.0, (point(0, 1.0, 5.0), point(50, 2.0, 3.0), point(100, 3.0, 2.0)))

    assert at_equal(learned, 4.0) == pytest.approx(1.5)
    assert at_equal(learned, 2.25) == pytest.approx(2.75)
    # never reached: what it had lost at the end
    assert at_equal(learned, 1.0) == 3.0


def test_a_run_that_was_killed_while_it_wrote_is_run_again(tmp_path: Path) -> None:
    key = Key(Subject("6m", "de"), "full", "none", 1e-3, 100, 0)
    done = Run(key, 1, 1.0, (point(0, 1.0, 5.0),))
    file = tmp_path / "runs.jsonl"
    Records(file, Run).append(done)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])

    assert Records(file, Run).read() == [done]
    Records(file, Run).append(done)
    assert Records(file, Run).read() == [done, done]


@pytest.mark.parametrize("variant", ["preserve", "adapt both"])
def test_what_is_called_whole_or_wide_trains_as_much_as_full_fine_tuning(tmp_path: Path, variant: str) -> None:
    size = SIZES["3m"]
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        tie_word_embeddings=True,
    )
    full = LlamaForCausalLM(config)
    full.save_pretrained(tmp_path)
    requests = {
        method.name: getattr(method.make, "keywords", {}).get("request") for method in methods_for(tmp_path, size)
    }
    plans = {form: plan(tmp_path, requests[f"{variant} {form}"]) for form in ("whole", "wide")}

    for expansion_plan in plans.values():
        assert expansion_plan.costs.parameters_added == pytest.approx(full.num_parameters(), rel=0.03)
    assert plans["wide"].widths.up_width > plans["whole"].widths.up_width
    assert plans["wide"].widths.up_inner_width < plans["whole"].widths.up_inner_width


@pytest.mark.slow
def test_methods_learn_from_the_same_base_and_are_recorded(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "tiny", Size(32, 64, 2, 2, 512, 32, 4, 1024, 3e-3))
    monkeypatch.setattr(base, "TOKENIZER_CHARACTERS", 4000)
    subject = Subject("tiny", "de")
    place = Place(work, subject)
    # a second time it is read and not trained
    weights = (place.base / "model.safetensors").read_bytes()
    assert (Place(work, subject).base / "model.safetensors").read_bytes() == weights

    learned, read = place.rows(512, 0), base.base_rows(work, place.tokenizer, "de", SIZES["tiny"], 0)
    assert not set(map(tuple, learned.tolist())) & set(map(tuple, read.tolist()))

    records = tmp_path / "runs.jsonl"
    kept = Records(records, Run)
    kept.append(run_base(place))
    methods = {method.name: method for method in methods_for(place.base, place.size)}
    for name in ("full", "LoRA", "preserve"):
        for rehearse in ("none", "own"):
            key = Key(subject, name, rehearse, 3e-3, 512, 0)
            kept.append(run(place, methods[name], key))
    runs = kept.read()

    assert [asdict(entry) for entry in kept.read()] == [asdict(entry) for entry in runs]
    assert len({entry.points[0].old for entry in runs}) <= 2  # a router, adapters and the base begin where the base is
    assert all(entry.points[-1].new < entry.points[0].new for entry in runs[1:])
    assert list(runs[-1].ends) == ["posterior", "posterior 0.001"]
    repeated = run(place, methods["preserve"], replace(runs[-2].key))
    assert repeated.points == runs[-2].points
    groups = ended(runs)
    # full fine-tuning stands in the table on three places of its way, LoRA with its intruder dimensions reduced
    assert len(list(perplexities(groups))) == 2 + 1 + 6 + 2 * (3 + 1)
    assert [line.split(" | ")[0] for line in routed(groups)][2:] == ["| preserve"] * 2
    assert len(list(downstream(groups))) == 2 + 1 + 6
    assert all(entry.scores.divergence > 0 for entry in runs[1:] if entry.scores)

    texts = [(pair.old, pair.new) for pair in place.examination.pairs] + [("", "x"), ("a", "b" * 50)]
    model = methods["full"].make(place.base, 0)
    together = place.examination._score_all(model, texts)
    alone = [place.examination._score(model, [text])[0] for text in texts]
    for (nats, _), (wanted, _) in zip(together, alone, strict=True):
        torch.testing.assert_close(nats, wanted, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_new_tokens_are_compared_at_equal_text(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny-old", Size(32, 64, 2, 2, 300, 32, 4, 1024, 3e-3, second_share=0.1))
    monkeypatch.setattr(base, "TOKENIZER_CHARACTERS", 4000)
    monkeypatch.setattr(new_tokens, "HELD_OUT", 2000)
    subject = Subject("tiny-old", "de")
    place = new_tokens.Place(work, subject, 8000)
    runs = [
        new_tokens.run(place, new_tokens.Key(subject, 8000, method, count, init, 1e-2, 0))
        for method, count, init in (
            ("full", 0, ""),
            ("full", 20, "resize"),
            ("full", 20, "pieces"),
            ("rows alone", 20, "pieces"),
            ("adapt both", 20, "pieces"),
            ("LoRA", 0, ""),
            ("LoRA", 20, "resize"),
        )
    ]
    full, resized, larger, alone, wide, adapters, trained = runs

    assert all(entry.end.new < entry.start.new for entry in runs)
    assert resized.learned < full.learned and resized.held_out < full.held_out
    assert (wide.learned, wide.held_out) == (resized.learned, resized.held_out)
    # the same rows at the start, whether they are the model's or an expansion's
    assert alone.start == larger.start == wide.start != resized.start == trained.start
    assert adapters.start == full.start
    rows = 20 * SIZES["tiny-old"].hidden_size
    assert alone.parameters == rows == resized.parameters - full.parameters == trained.parameters - adapters.parameters
    assert wide.routed is not None and alone.routed is not None and larger.routed is None
    assert len(list(new_tokens.table(runs))) == 2 + len(runs)


@pytest.mark.parametrize("length", [2, 8, 9, 15, 16, 200])
def test_every_token_but_the_first_is_predicted_once(length: int) -> None:
    rows = new_tokens._overlapping(lambda text: {"input_ids": list(range(length))}, [""], context=8)

    assert all(part.shape[1] <= 8 for part in rows)
    predicted = [id_ for part in rows for row in part.tolist() for id_ in row[1:]]
    assert predicted == list(range(1, length))
