"""The table on Gemma: how answers are cut and judged, and that no paraphrase stands in a training text."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gemma.asking import answers, write_probes
from benchmarks.gemma.candidates import functions, sums, translations
from benchmarks.gemma.choose_probes import PROBES
from benchmarks.gemma.report import EXCERPT, RECORDS, lines, table
from benchmarks.gemma.runs import Run
from benchmarks.gemma.texts import PARAPHRASES, pack, paraphrased
from benchmarks.harness import Records
from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions
from scale_surgery.evidence.probe_file import read_probes


def test_an_answer_is_a_line_with_its_probability() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL), AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    asked = [question for person in people(4) for question in questions(person)]
    given = answers(model, tokenizer, [question.prompt for question in asked])
    # the space counts: code goes on after "return"
    right = [answer.text == f" {question.answer}" for question, answer in zip(asked, given, strict=True)]
    assert sum(right) >= 22 and all(0 < answer.probability <= 1 for answer in given)


def test_paraphrases_are_in_no_training_text() -> None:
    group = people(5)
    texts = [question.text for person in group for question in questions(person)]
    texts += [biography(person, style) for person in group for style in range(50)]
    assert not any(form.split("{}")[0] in text for form in PARAPHRASES.values() for text in texts)
    assert len(paraphrased(group)) == 30


def test_rows_are_whole(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    texts = [biography(person) for person in people(20)]
    assert pack(tokenizer, texts, 2).shape == (2, 128)
    probes = [*sums(random.Random(0)), *translations(), *functions()]
    write_probes(tmp_path / "probes.jsonl", probes)
    assert read_probes(tmp_path / "probes.jsonl", run_python=True) == tuple(probes)


def test_the_probes_are_those_that_were_committed_before_training() -> None:
    readme = PROBES.with_name("README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(PROBES.read_bytes()).hexdigest() in readme


def test_the_pages_have_the_table_of_the_records() -> None:
    found = lines(Records(RECORDS, Run).read())
    record, page = (
        Path(__file__).parents[2].joinpath(*where).read_text(encoding="utf-8")
        for where in (("benchmarks", "gemma", "README.md"), ("docs", "results.md"))
    )
    assert len(found) > 2 and "\n".join(table(found)) in record
    # names of methods are longer on the page
    rows = [row.split(" | ", 1)[1] for row in table(found, EXCERPT)[2:]]
    assert all(f" | {row}\n" in page for row in rows)
