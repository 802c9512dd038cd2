"""Route reports: numbers against `evaluate` and plain computations, texts of tokens, page, terminal, refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    DataError,
    PosteriorRouter,
    Request,
    RunOptions,
    evaluate,
    expand,
    route_export,
)
from scale_surgery.errors import Problem
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.routing.records import DocumentRoute, FileRoute, RouteReport, TokenRoute, Totals
from scale_surgery.routing.report import route_report, write_tokens
from scale_surgery.routing.token_texts import TextReader, token_texts
from scale_surgery.show.pages.routing import render_page, write_page
from scale_surgery.show.tables_route_report import MOST_SHOWN, render_route_report
from scale_surgery.surgery.merge import merge
from scale_surgery.text.documents import Document
from scale_surgery.text.tokenizing import tokenize
from scale_surgery.visible import visible, visible_line, visible_text
from tests.command import run
from tests.conftest import edited, problems, refused, shake, shown
from tests.each import mostly
from tests.text.test_tokenizing import letters, lines
from tests.tiny import save_tiny

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START, END = 256, 257
# what a page or a terminal could take for something else than text
EVIL = "</script><script>alert(1)</script><!-- &amp; \"'@@DATA@@ [bold]\x1b[31m\x07\u202e 東 🙂\n\n\t\n"
QUESTIONS = ({"question": "Who, Anna?", "answer": "Berg"}, {"question": "ß?", "answer": "naïve 東京"})
STORY = "Anna Berg was born in Lyon.\nShe studied at Dunmere, and left — twice.\n" * 3


def bytes_tokenizer(*, starts: bool = True, first: str = "") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: a token for each byte, that of `first` in the first place."""
    pieces = {spelt for spelt, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(first)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda character: (character not in pieces, character))
    names = [*alphabet, "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if starts:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if starts else None, eos_token="</s>", pad_token="</s>"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a trained expansion of it, routed in three ways, and texts."""
    place = tmp_path_factory.mktemp("route_report")
    base = save_tiny(place / "base", "llama", vocab_size=258)
    bytes_tokenizer().save_pretrained(base)
    shake(expand(base, Request("0-2", variant="adapt", collaborative_layers="1-2"), place / "wide").path)
    routers = {"posterior": PosteriorRouter(), "cosine": CosineRouter(threshold=0.9)}
    routers["strict"] = replace(routers["cosine"], strict=True)
    for name, routing in routers.items():
        route_export(place / "wide", place / name, routing)
    (place / "story.txt").write_text(STORY, encoding="utf-8")
    (place / "evil.txt").write_text(EVIL, encoding="utf-8")
    lines(place / "asked.jsonl", *QUESTIONS)
    return place


@pytest.fixture(scope="module")
def report_of(place: Path) -> Callable[[str], RouteReport]:
    files = [place / name for name in ("story.txt", "asked.jsonl", "evil.txt")]
    reports = {
        name: route_report(place / name, files, run=RunOptions(batch_size=2))
        for name in ("posterior", "cosine", "strict")
    }
    return reports.__getitem__


def tokens_of(report: RouteReport) -> list[TokenRoute]:
    return [token for file in report.files for document in file.documents for token in document.tokens]


def handmade(*tokens: TokenRoute, routing: Router | None = None) -> RouteReport:
    """A report of one document."""
    totals = Totals(1, len(tokens), 1.0, (1.0, 2.0), (0.75, 0.25), 1.5)
    files = (FileRoute("a.txt", totals, (DocumentRoute("a.txt", tokens),)),)
    return RouteReport(
        "routed", "base", routing or PosteriorRouter().for_expansions(1), ("base", "law"), 64, 32, None, files, 1000
    )


def token(position: int, text: str, weight: float | None = None, **changes: Any) -> TokenRoute:
    numbers: tuple[Any, ...] = () if weight is None else (-1.0, (-1.0, -2.0), (1 - weight, weight), -1.5, 0.5)
    return replace(TokenRoute(position, text, text, 7, position > 0, *numbers), **changes)


# numbers


@pytest.mark.parametrize("router", mostly(["posterior", "cosine", "strict"], "posterior".__eq__))
def test_totals_are_the_losses_of_evaluate(place: Path, report_of: Callable[[str], RouteReport], router: str) -> None:
    scores = evaluate([place / router, place / "wide"], place / "story.txt", place / "asked.jsonl").scores
    base, routed, adapt = (next(s for s in scores if is_it(s)) for is_it in (
        lambda score: score.kind == "base",
        lambda score: score.name == router,
        lambda score: score.name == "wide",
    ))  # fmt: skip
    for file, side in zip(report_of(router).files, ("old", "new"), strict=False):
        totals = file.totals
        assert totals.tokens == getattr(base, side).scored
        losses = (totals.base_nats_per_token, totals.routed_nats_per_token, totals.nats_per_token[1])
        for loss, score in zip(losses, (base, routed, adapt), strict=True):
            assert math.isclose(loss, getattr(score, side).nats_per_token, rel_tol=1e-5)
        assert not math.isclose(losses[0], losses[2], rel_tol=1e-3)


def test_batches_change_nothing(place: Path, report_of: Callable[[str], RouteReport]) -> None:
    files = [place / name for name in ("story.txt", "asked.jsonl", "evil.txt")]
    tokens = tokens_of(route_report(place / "posterior", files, run=RunOptions(batch_size=1)))
    for single, batched in zip(tokens, tokens_of(report_of("posterior")), strict=True):
        assert single.id == batched.id
        if single.position:
            assert math.isclose(single.routed_log_probability, batched.routed_log_probability, rel_tol=1e-4)
            assert math.isclose(single.weights[1], batched.weights[1], rel_tol=1e-3, abs_tol=1e-6)


def test_prompts_are_shown_and_do_not_count(report_of: Callable[[str], RouteReport]) -> None:
    document = report_of("posterior").files[1].documents[0]
    assert [token.text for token in document.tokens] == ["<s>", *"Who, Anna?", " ", *"Berg", "</s>"]
    assert [token.is_counted for token in document.tokens] == [False] * 11 + [True] * 6
    first, *rest = document.tokens
    assert first.routed_log_probability is None and first.weights is None and first.cosine is None
    assert all(token.routed_log_probability is not None for token in rest)
    assert [token.position for token in document.tokens] == list(range(17))


def test_cosine_decides_and_its_preserve_side_is_not_the_base(report_of: Callable[[str], RouteReport]) -> None:
    report: Any = report_of("cosine")
    assert report.paths == ("preserve side", "default") and report_of("strict").paths == ("base", "default")
    tokens: Any = [token for token in tokens_of(report) if token.position]
    assert {token.weights for token in tokens} == {(1, 0), (0, 1)}
    for token_ in tokens:
        is_adapt = token_.cosine <= 0.9
        assert token_.weights == (not is_adapt, is_adapt)
        assert token_.routed_log_probability == token_.log_probabilities[is_adapt]
    assert any(token_.log_probabilities[0] != token_.base_log_probability for token_ in tokens)
    strict: Any = [token for token in tokens_of(report_of("strict")) if token.position]
    assert all(token_.log_probabilities[0] == token_.base_log_probability for token_ in strict)


# JSON


def strictly(text: str) -> Any:
    """Parse JSON that holds no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_jsonl_is_a_line_a_token(report_of: Callable[[str], RouteReport], tmp_path: Path) -> None:
    report = report_of("cosine")
    write_tokens(report, tmp_path / "out" / "tokens.jsonl")
    rows = [strictly(line) for line in (tmp_path / "out" / "tokens.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert rows == report.records() and len(rows) == len(tokens_of(report))
    assert list(rows[0]) == [
        "file", "document", "position", "text", "piece", "id", "is_counted", "base_log_probability",
        "log_probabilities", "weights", "routed_log_probability", "cosine",
    ]  # fmt: skip
    assert list(rows[1]["weights"]) == list(rows[1]["log_probabilities"]) == ["preserve side", "default"]
    assert [row["document"] for row in rows if row["file"].endswith("asked.jsonl") and not row["position"]] == [0, 1]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tokens.jsonl"]


def test_a_model_that_gives_nan_gives_json(place: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(place / "cosine", tmp_path / "broken"))
    (shard,) = broken.glob("expansion-*.safetensors")
    with edited(shard) as tensors:
        next(tensors[name] for name in tensors if name.endswith("w12")).fill_(math.nan)
    report = route_report(broken, place / "asked.jsonl")
    content = strictly(json.dumps(report.to_json()))
    scores = (content["tokens"][1]["log_probabilities"], content["files"][0]["nats_per_token"])
    assert [numbers["default"] for numbers in scores] == ["NaN", "NaN"]
    assert isinstance(content["tokens"][1]["base_log_probability"], float)
    assert strictly(parse(render_page(report)).data)["tokens"][1][4][1] == "NaN"
    assert "nan" in shown(render_route_report(report))


# texts of tokens


def texts_of(document: Document, tokenizer: Any) -> list[str]:
    return token_texts(document, tokenize([document], tokenizer).ids.tolist(), tokenizer)


@pytest.mark.parametrize("text", [STORY, EVIL, "  東京 🙂👩‍👧 naïve", "\ufffd \ufffd"])
@pytest.mark.parametrize(
    ("tokenizer", "start", "end"),
    [(bytes_tokenizer(), "<s>", "</s>"), (bytes_tokenizer(starts=False), "", "</s>"), (ByT5Tokenizer(), "", "</s>")],
    ids=["fast", "fast without start", "slow"],
)
def test_texts_join_to_the_document(tokenizer: Any, start: str, end: str, text: str) -> None:
    for prompt in ("", "Wer, Äsop?"):
        texts = texts_of(Document(prompt, text, ""), tokenizer)
        assert "".join(texts) == start + prompt + text + end


def test_a_tokenizer_without_spaces_or_with_its_own_ends_loses_nothing() -> None:
    document = Document("who", " is it? ", "")
    for tokenizer in (letters(), letters(closes=True), letters(starts=False, ends=False)):
        texts = texts_of(document, tokenizer)
        assert "".join(text for text in texts if not text.startswith("<")) == "who is it? "
    words = Tokenizer(models.WordLevel({"<unk>": 0, "is": 1, "it": 2, "?": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert texts_of(document, tokenizer) == ["who", " is", " it", "? "]


def fallback_tokenizer(first: str = "▁") -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 had: it begins a text with a space, and knows few characters but all bytes."""
    names = sorted(["▁", *"ahi", *(f"<0x{byte:02X}>" for byte in range(256))], key=lambda name: name != first)
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_text_may_begin_with_a_space_that_decodes_to_nothing() -> None:
    tokenizer = fallback_tokenizer()
    for text in ("😀 hi", "hi 😀", "東 a", "🇩🇪 a"):
        reader, ids = TextReader(tokenizer), tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids)[0] == "▁"
        assert "".join(map(reader.read, ids)) == text


def test_other_tokens_than_the_tokenizer_s_are_decoded() -> None:
    ids = [START, *"ab 東".encode()]
    tokenizer = bytes_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("ab 東"))
    assert token_texts(Document("", "something else", ""), ids, tokenizer) == ["a", "b", " ", "", "", "東"]
    # a character that never ends is given up
    assert "".join(token_texts(Document("", "x", ""), ids[3:4] * 6, tokenizer)).count("\ufffd") == 6


@pytest.mark.parametrize(
    ("text", "piece", "expected"),
    [
        (" word", "Ġword", " word"),
        (" ", "Ġ", "·"),
        ("\n\n", "ĊĊ", "↵↵"),
        ("\tif", "ĉif", "→if"),
        (" \n", "ĠĊ", "·↵"),
        ("", "±", "⟨B1⟩"),
        ("", "<0xE6>", "⟨E6⟩"),
        ("", "æĿ", "⟨E6 9D⟩"),
        ("", "▁", "⟨▁⟩"),
        ("", "", "⟨?⟩"),
        ("\x1b[31m", "", "␛[31m"),
        ("a\u202eb\x9b", "", "a⟨U+202E⟩b⟨U+009B⟩"),
        ("👩\u200d👧", "", "👩\u200d👧"),
    ],
)
def test_nothing_of_a_token_is_invisible(text: str, piece: str, expected: str) -> None:
    assert visible(text, piece) == expected


# the page


class Page(HTMLParser):
    """What a browser would make of a page: its elements, the text of each token, the embedded data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[list[str]] = []
        self.data, self.inside, self.text = "", "", ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append((tag, values))
        self.inside = (
            "data" if values.get("id") == "data" else "token" if (values.get("class") or "").startswith("t ") else tag
        )
        if self.inside == "token":
            self.tokens.append([values["class"] or "", ""])

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "data":
            self.data += data
        elif self.inside == "token":
            self.tokens[-1][1] += data
        elif self.inside not in ("script", "style"):
            self.text += data


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page


def test_page_holds_every_token_and_needs_nothing_else(report_of: Callable[[str], RouteReport], tmp_path: Path) -> None:
    report = report_of("cosine")
    write_page(report, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page, tokens = parse(html), tokens_of(report)
    assert [element[1] for element in page.tokens] == [
        visible(token.text, token.piece).removeprefix(" ") for token in tokens
    ]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [
        attributes
        for tag, attributes in page.tags
        if tag in ("link", "img", "iframe", "object", "base") or "src" in attributes
    ]
    assert all(attributes["href"].startswith("#") for _, attributes in page.tags if "href" in attributes)
    assert not re.search(r"https?:|@import|url\(", html) and "default-src 'none'" in html
    assert not re.search(r"\{\{|\{%", html)
    data = strictly(page.data)
    named = [[visible_text(token.text), visible_line(token.piece), token.id, token.position] for token in tokens]
    assert [row[:4] for row in data["tokens"]] == named
    assert data["paths"] == ["preserve side", "default"]
    second_token = tokens[1]
    numbers: Any = [second_token.log_probabilities, second_token.weights]
    assert data["tokens"][1][4:] == [
        *map(list, numbers),
        second_token.routed_log_probability,
        second_token.cosine,
        second_token.base_log_probability,
    ]
    for file in report.files:
        assert Path(file.file).name in page.text and f"{file.totals.shares[1]:.1%}" in page.text


def test_names_and_texts_cannot_leave_the_page() -> None:
    text = "</script><script>alert(1)</script><!--"
    report = handmade(token(0, "a"), token(1, text, 0.5))
    documents = (DocumentRoute('<i>"q"', report.files[0].documents[0].tokens),)
    file = replace(report.files[0], file='<b onclick="x">&', documents=documents)
    page = parse(render_page(replace(report, model="<u>model", base="<s>base", files=(file,))))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert strictly(page.data)["tokens"][1][0] == text == page.tokens[1][1]
    assert not [tag for tag, _ in page.tags if tag in ("b", "u", "s")]
    assert 'Tokens of <i>"q"; arrow keys move' in [attributes.get("aria-label") for _, attributes in page.tags]
    assert "<u>model" in page.text and "<s>base" in page.text and '<b onclick="x">&' in page.text


def luminance(colour: str) -> float:
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def seen_by(colour: str, matrix: list[list[float]]) -> torch.Tensor:
    """A colour as somebody with a colour vision deficiency sees it (Machado and others 2009), linear light."""
    linear = [((part / 255 + 0.055) / 1.055) ** 2.4 for part in bytes.fromhex(colour[1:])]
    return torch.tensor(matrix) @ torch.tensor(linear)


COLOUR_VISION = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show the page")
def test_page_in_a_browser(report_of: Callable[[str], RouteReport], tmp_path: Path) -> None:
    """Numbers on hover and on focus, arrow keys, and no script of a text's runs."""
    probe = """<script>
    const found = [], type = key => new KeyboardEvent("keydown", { key, bubbles: true });
    const press = key => document.activeElement.dispatchEvent(type(key));
    const card_ = document.getElementById("card"), all = [...document.querySelectorAll(".t")];
    all[3].dispatchEvent(new PointerEvent("pointerover", { bubbles: true })); found.push(card_.hidden, card_.innerText);
    all[3].dispatchEvent(new PointerEvent("pointerout", { bubbles: true })); found.push(card_.hidden);
    // a window in the background gets no event of its own
    all[0].focus(); all[0].dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
    found.push(card_.hidden, card_.innerText.split("\\n").pop());
    press("ArrowRight"); found.push(all.indexOf(document.activeElement));
    press("End"); press("ArrowRight"); found.push(all.indexOf(document.activeElement));
    press("Escape"); found.push(card_.hidden);
    const colours = () => all.map(span => getComputedStyle(span).backgroundColor).join(), before = colours();
    document.querySelector("input[value=evidence]").click();
    found.push(before !== colours());
    document.body.textContent = "RESULT" + JSON.stringify(found) + "END";
    </script></body>"""
    report = report_of("posterior")
    html = render_page(report).replace("<script>", "<script>window.alert = () => { document.title = 'alert'; };", 1)
    (tmp_path / "page.html").write_text(html.replace("</body>", probe), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    (line,) = re.findall("RESULT(.*)END", done.stdout)
    hover, text, out, focus, first, right, end, escape, recoloured = json.loads(line)
    tokens = report.files[0].documents[0].tokens
    assert hover is False and f"{tokens[3].routed_log_probability:.4f}" in text and f"id {tokens[3].id}" in text
    assert out is True and focus is False and first == "The first token has no prediction."
    assert (right, end, escape, recoloured) == (1, len(tokens) - 1, True, True)
    assert "<title>alert" not in done.stdout


# the terminal


def test_terminal_fits_80_columns_and_is_not_written_to_by_texts(report_of: Callable[[str], RouteReport]) -> None:
    text = shown(render_route_report(report_of("cosine")))
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold]␛[31m␇⟨U+202E⟩" in re.sub("⟦default: |[⟧\n]", "", text)


def test_terminal_shows_so_many_tokens_and_counts_the_rest() -> None:
    report = handmade(token(0, "a"), *(token(place, "b", 0.5) for place in range(1, MOST_SHOWN + 25)))
    text = shown(render_route_report(report))
    head = "in ⟦name: ⟧: tokens of that expansion, which has most of the weight. Other tokens: base a.txt a"
    assert " ".join(text.split()).startswith(head) and "  law                 2.0000  25.0%\n" in text
    assert text.count("b") == MOST_SHOWN - 1 + 2  # and one in each "base"
    assert "... 25 more tokens; -o FILE.html or FILE.jsonl shows all" in text


# refusals


def test_models_and_texts_that_are_refused(place: Path, tmp_path: Path) -> None:
    text, none = place / "story.txt", tmp_path / "none.txt"
    for name in ("base", "wide"):
        with refused("model-unrouted", place / name, CheckpointError):
            route_report(place / name, text)
    fused = merge(place / "cosine", tmp_path / "fused").path
    with refused("form-fused-not-expanded", fused, CheckpointError):
        route_report(fused, text)
    (tmp_path / "empty.txt").write_text(" \n")
    texts = [none, tmp_path / "empty.txt", text]
    assert problems(route_report, place / "posterior", texts, error=DataError) == [
        Problem("text-not-found", none),
        Problem("text-empty", tmp_path / "empty.txt"),
    ]
    assert problems(route_report, place / "posterior", [], error=DataError) == [Problem("report-without-text")]


def test_a_text_of_one_token_is_shown_beside_longer_ones_without_numbers(place: Path, tmp_path: Path) -> None:
    single = Path(shutil.copytree(place / "posterior", tmp_path / "single"))
    tokenizer = bytes_tokenizer(starts=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(single)
    lines(tmp_path / "two.jsonl", {"text": "x"}, {"text": "yz"})
    tokens = tokens_of(route_report(single, tmp_path / "two.jsonl", run=RunOptions(batch_size=1)))
    assert [(token_.text, token_.routed_log_probability is None) for token_ in tokens] == [
        ("x", True), ("y", True), ("z", False)
    ]  # fmt: skip


# the command


def test_the_command_shows_tokens_writes_files_and_gives_json(
    place: Path, tmp_path: Path, report_of: Callable[[str], RouteReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [part for name in ("story.txt", "asked.jsonl", "evil.txt") for part in ("--text", str(place / name))]
    words = ["route-report", place / "cosine", *texts, "--batch-size", "2"]
    report = report_of("cosine")
    text = run(*words, "-o", "report.html", "-o", "tokens.jsonl").stdout
    assert text.startswith(shown(render_route_report(report)))
    assert text.endswith("\nwritten to report.html and tokens.jsonl\n")
    assert Path("report.html").read_text(encoding="utf-8") == render_page(report)
    assert len(Path("tokens.jsonl").read_text(encoding="utf-8").splitlines()) >= len(report.records())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "tokens.jsonl"]
    assert strictly(run(*words, "--json").stdout) == report.to_json()
