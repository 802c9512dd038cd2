"""The model card takes whatever a record holds as text: no heading, link, row, HTML or metadata comes from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from scale_surgery.evidence.verify import verify
from scale_surgery.hub import markdown
from scale_surgery.hub.card import make_card
from scale_surgery.hub.markdown import code, plain
from scale_surgery.hub.repository import Contents, is_written_card, read_contents
from scale_surgery.surgery.expand import expand
from scale_surgery.visible import visible_line
from tests.conftest import REQUESTS

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
PIECES = [
    *"\n\r\t`*_[]()<>&|~$@#!\\-=+.:;'\"x1 \x1b\u202e\x9b\ud800\u2028",
    *("\n# heading\n", "\n---\n", "](http://x.y)", "<img src=x onerror=y>", "<!--", "&lt;", "https://a.b", "www.a.b"),
    *("``", "| a | b |", "\n\n", "![x](y)", "<http://x.y>", "[a]: b", "yes", "null", "license: mit", "$$x$$", "{{x}}"),
]
hostile = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
COMMIT = "0" * 40
RUN = {"begun": "then", "steps": 4, "trained_parameters": 5, "settings": {"learning_rate": 0.1}}


@pytest.fixture(scope="module")
def made(base_of, tmp_path_factory) -> tuple[Contents, dict[str, Any]]:
    """An expanded folder, and the certificate of it."""
    path = expand(base_of("llama"), REQUESTS["adapt"], tmp_path_factory.mktemp("card") / "wide").path
    return read_contents(path), json.loads(json.dumps(verify(path, probes=None, record=False).to_json()))


def parts_of(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from parts_of(token.children or [])


def structure(text: str) -> list[tuple[str, str, str]]:
    """What a page is made of, and where its links go; code in a line reads as text."""
    parts = parts_of(PARSER.parse(text))
    same = ("inline", "text", "text_special", "code_inline", "softbreak")
    return [(part.type, part.tag, str(part.attrs)) for part in parts if part.type not in same]


def reading(text: str) -> str:
    """What a page reads as, in one line."""
    return " ".join("".join(part.content for part in parts_of(PARSER.parse(text)) if not part.children).split())


def card_of(made: tuple[Contents, dict[str, Any]], value: str, base_text: str | None = None) -> str:
    """A card of records that hold a value in all their texts."""
    contents, certificate = made
    record = contents.record | {
        "base_name": "org/base",
        "base_revision": value,
        "base_fingerprint": value,
        "tool": {"torch": value, value: "1"},
        "training": [RUN | {"begun": value[:10]}],
        "fused": {"drift": {"is_bit_equal": False, "drift": 0.1, "tokens": 1, "dtype": value}},
    }
    promises = [promise | {"name": value, "evidence": value} for promise in certificate["promises"]]
    filled_certificate = certificate | {
        "promises": promises,
        "date": value,
        "machine": value,
        "versions": {value: value},
    }
    return make_card(replace(contents, record=record), "lab/wide", base_text, None, filled_certificate).text


@pytest.fixture(scope="module")
def plain_structure(made):
    """The structure of a card with a value that holds no markup."""
    return structure(card_of(made, "x").split("---\n", 2)[2])


@settings(max_examples=50, deadline=None)
@given(hostile)
@example("\n# Owned\n\n[click](http://evil)\n<script>alert(1)</script>\n")
@example("a | b | c")
@example("`x` ``y")
@example("\\")
@example("\\|")
def test_a_record_changes_no_structure(made, plain_structure, value):
    text = card_of(made, value or "x")
    assert is_written_card(text)
    _, metadata, body = text.split("---\n", 2)
    assert structure(body) == plain_structure
    assert yaml.safe_load(metadata)["base_model"] == "org/base"
    text.encode("utf-8")
    shown = " ".join(visible_line(value).split())
    assert shown in reading(body), "and it can be read"


@pytest.mark.parametrize("value", ("<b>x</b>", "[a](b)", "*a*", "\n# x\n"))
def test_without_escapes_it_would(made, value, monkeypatch):
    plainly = structure(card_of(made, "x").split("---\n", 2)[2])
    monkeypatch.setattr(markdown, "visible_line", lambda text: text)
    monkeypatch.setattr(markdown, "SPECIAL", markdown.re.compile("(?!)"))
    assert structure(card_of(made, value).split("---\n", 2)[2]) != plainly


@settings(max_examples=100, deadline=None)
@given(hostile)
def test_a_cell_holds_a_value_and_no_more(value):
    page = f"| a | b |\n|---|---|\n| {plain(value)} | {code(value)} |\n| {plain(value)} | 1 |\n"
    assert [part for part in structure(page) if part[0] == "td_open"] == [("td_open", "td", "{}")] * 4
    shown = " ".join(visible_line(value).split())
    assert shown in reading(page)
    # what begins a link by itself, where a page is shown on a Hub
    assert not re.search(r"(?<!\\)://|www\.|(?<!\\)@", plain(value), re.IGNORECASE)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["license", "license_name", "license_link"]), hostile.filter(bool), max_size=3))
def test_metadata_parse_to_the_values_that_were_given(made, licence):
    """The licence comes from the base's own card, whose metadata may hold any text."""
    base_text = f"---\n{yaml.safe_dump(licence)}---\n# Base\n" if licence else None
    text = card_of(made, COMMIT, base_text)
    front = text.split("\n---\n", 1)[0].removeprefix("---\n")
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **licence,
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "tags": ["scale-surgery", "continual-learning", "model-expansion", "adapt"],
    }


def test_names_of_files_are_no_markup(made, tmp_path):
    contents, _ = made
    names = ("a`b.py", "<i>.py", "x|y.py", "# [a](b).py")
    record = contents.record | {
        "request": contents.record["expansions"]["default"]["request"],
        "base_fingerprint": "0",
        "padding": 0,
        "parameters": 5,
    }
    (place := tmp_path / "stock").mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}')
    for name in names:
        (place / name).write_text("")
    stock = replace(contents, form="stock", manifest=None, record=record, path=place)
    with_code, without = (
        make_card(replace(stock, files=files), "lab/wide", None, None, None).text for files in (names, ())
    )
    assert structure(with_code) == structure(without)
    assert all(name in reading(with_code) for name in names)
