"""The benchmark of texts larger than memory writes what it says, and measures both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import corpus
from scale_surgery.text.documents import read_documents


def test_a_corpus_has_the_size_that_it_should(tmp_path: Path) -> None:
    lines = corpus.write_corpus(tmp_path / "a.jsonl", 200_000)
    plain = corpus.write_corpus(tmp_path / "a.txt", 200_000)
    assert 200_000 <= lines.stat().st_size < 202_000 and 200_000 <= plain.stat().st_size < 202_000
    texts = [document.text for document in read_documents([lines])]
    assert len(texts) > 300 and len(set(texts)) == len(texts), "no two are the same"
    (whole,) = read_documents([plain])
    assert whole.text.startswith("\n".join(texts[:300]))


@pytest.mark.slow
def test_it_measures_what_is_made_and_what_is_found(tmp_path: Path) -> None:
    options = [str(tmp_path / "work"), "--size", "1", "--in-memory", "1", "--form", "txt"]
    run = CliRunner().invoke(corpus.main, options, catch_exceptions=False)
    rows = [line.split() for line in run.stdout.splitlines() if "txt" in line]
    assert [row[3] for row in rows[-3:]] == ["in", "made", "found"]
    assert not (tmp_path / "work").exists()
