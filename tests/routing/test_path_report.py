"""Route reports of composed models: numbers against each path alone, colours, page, terminal, JSON."""

from __future__ import annotations

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from scale_surgery.drawing.palette import DARK, LIGHT, PATH_COLOURS
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.routing.records import DocumentRoute, FileRoute, RouteReport, TokenRoute, Totals
from scale_surgery.routing.report import route_report
from scale_surgery.show.pages.routing import render_page
from scale_surgery.show.path_colours import choose_colours, leading
from scale_surgery.show.tables_route_report import render_route_report
from tests.composed import Made
from tests.conftest import load, shown
from tests.routing.test_report import COLOUR_VISION, STORY, contrast, parse, seen_by, strictly, tokens_of

NAMES = ("base", "medicine", "law", "music")


@pytest.fixture(scope="module")
def report(speaking: tuple[Made, Path], tmp_path_factory: pytest.TempPathFactory) -> RouteReport:
    file = tmp_path_factory.mktemp("texts") / "story.txt"
    file.write_text(STORY, encoding="utf-8")
    report = route_report(speaking[1], file, sequence_length=40, step=16)
    assert report.paths == NAMES
    return report


@torch.no_grad()
def test_every_token_is_scored_as_each_path_alone_gives_it(speaking: tuple[Made, Path], report: RouteReport) -> None:
    """In the first window that holds it, each path as the model that apply writes, the mixture as the folder loads."""
    made, folder = speaking
    alone, model = [made.alone(name) for name in (None, *made.extracts)], load(folder)
    tokens: Any = tokens_of(report)
    ids = torch.tensor([[token.id for token in tokens]])
    for at in range(1, len(tokens), 23):
        left = next(left for left in range(0, len(tokens), 16) if at < left + 40)
        # each window begins as a text does
        window, place = torch.cat((ids[:, :1], ids[:, left + 1 : left + 40]), 1), at - left - 1
        given = [module(window).logits[0, place].log_softmax(-1)[tokens[at].id] for module in (*alone, model)]
        assert torch.allclose(torch.tensor(tokens[at].log_probabilities), torch.stack(given[:-1]), rtol=1e-4)
        assert math.isclose(tokens[at].routed_log_probability, float(given[-1]), rel_tol=1e-4)
        weights = model.score_tokens(window).weights[0, place]
        assert torch.allclose(torch.tensor(tokens[at].weights), weights, atol=1e-5)
    assert report.routing == PosteriorRouter((0.25,) * 4, 0.05) and report.base == "base"
    assert tokens[0].weights is None and tokens[0].log_probabilities is None


def test_totals_are_means_over_the_tokens_that_count(report: RouteReport) -> None:
    (file,) = report.files
    counted = [token for document in file.documents for token in document.tokens if token.is_counted]
    assert len(counted) == file.totals.tokens == len(tokens_of(report)) - 1
    for path in range(len(NAMES)):
        loss, share = (
            sum((getattr(token, name) or ())[path] for token in counted) / len(counted)
            for name in ("log_probabilities", "weights")
        )
        assert math.isclose(file.totals.nats_per_token[path], -loss, rel_tol=1e-5)
        assert math.isclose(file.totals.shares[path], share, rel_tol=1e-5)
    assert math.isclose(sum(file.totals.shares), 1, rel_tol=1e-6) and report.shares == file.totals.shares
    assert len(set(file.totals.nats_per_token)) == len(NAMES), "the control: the paths differ"
    content = strictly(json.dumps(report.to_json()))
    assert content["routing"] == {"router": "posterior", "prior": [0.25] * 4, "switch_rate": 0.05}
    assert list(content["files"][0]["shares"]) == list(content["tokens"][5]["weights"]) == list(NAMES)
    assert content["tokens"][0]["weights"] is None


def token(position: int, text: str, *weights: float, best: int = 0) -> TokenRoute:
    logs = tuple(-1.0 if path == best else -3.0 for path in range(len(weights)))
    known: tuple[Any, ...] = (logs[0], logs, weights, -1.0) if weights else ()
    return TokenRoute(position, text, text, 7, position > 0, *known)


def handmade(*tokens: TokenRoute, names: tuple[str, ...] = NAMES[:3]) -> RouteReport:
    even = (1 / len(names),) * len(names)
    totals = Totals(1, len(tokens), 2.0, (2.0, 1.0, 3.0, *[3.0] * (len(names) - 3)), even, 1.5)
    files = (FileRoute("a.txt", totals, (DocumentRoute("a.txt", tokens),)),)
    return RouteReport("composed", "base", PosteriorRouter(even, 0.01), names, 64, 32, None, files, 1000)


TOKENS = (
    token(0, "<s>"),
    token(1, "An", 0.9, 0.05, 0.05),
    token(2, "na", 0.1, 0.8, 0.1, best=1),
    token(3, " Berg", 0.1, 0.7, 0.2, best=2),
    token(4, " is", 0.4, 0.3, 0.3),
    token(5, "\n", 0.0, 0.0, 1.0, best=2),
    token(6, "[b]new", 0.0, 0.1, 0.9, best=2),
)


def test_the_terminal_names_paths_where_it_has_no_colours() -> None:
    text = shown(render_route_report(handmade(*TOKENS))).splitlines()
    assert [line.rstrip() for line in text[:2]] == [
        "in ⟦name: ⟧: tokens of that expansion, which has most of the weight. Other",
        "tokens: base, or no path alone",
    ]
    assert text[3:7] == ["a.txt", "<s>An⟦medicine: na Berg⟧ is⟦law: ↵⟧", "⟦law: [b]new⟧", ""]
    assert text[7].startswith("routing  (posterior, all paths alike, switch rate 0.01;")
    assert [line.split() for line in text[-5:]] == [
        ["a.txt", "7"], ["base", "2.0000", "33.3%"], ["medicine", "1.0000", "33.3%"], ["law", "3.0000", "33.3%"],
        ["routed", "1.5000"],
    ]  # fmt: skip


def coloured(colours: str) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=colours, force_terminal=True)
    console.print(render_route_report(handmade(*TOKENS)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_colours_paths() -> None:
    text = coloured("truecolor")
    numbers = [";".join(map(str, bytes.fromhex(colour[1:]))) for colour in PATH_COLOURS]
    first, second = numbers[1:3]
    assert text.index(f"48;2;{first}") < text.index("medicine") < text.index(f"48;2;{second}") < text.index("law")
    assert f"48;2;{first}mna" in text and f"48;2;{second}m[b]new" in text
    few = coloured("standard")
    assert "\x1b[30;43mna" in few and "48;2" not in few


def test_the_page_colours_by_weight_and_by_evidence() -> None:
    page = parse(render_page(handmade(*TOKENS)))
    assert page.tokens == [
        ["t n", "<s>"],
        ["t w0 s e0 f", "An"],
        ["t w1 s e1 f", "na"],
        ["t w1 e2 f", "Berg"],
        ["t e0 f", "is"],
        ["t w2 s e2 f", "↵"],
        ["t w2 e2", "[b]new"],
    ]
    data = strictly(page.data)
    assert data["paths"] == list(NAMES[:3]) and data["places"] == [0, 1, 2]
    assert data["tokens"][2] == ["na", "na", 7, 2, [-3.0, -1.0, -3.0], [0.1, 0.8, 0.1], -1.0, None, None]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert all(name in page.text for name in (*NAMES[:3], "routed", "33.3%", "1.5000"))


def test_of_too_many_paths_the_smallest_share_a_pattern() -> None:
    names = ("base", *(f"own{place}" for place in range(1, 11)))
    shares = [0.0, 0.01, 0.3, *[0.08] * 6, 0.02, 0.19]
    colouring = choose_colours(names, shares)
    assert colouring.places == (0, 8, 1, 2, 3, 4, 5, 6, 8, 8, 7)
    assert list(colouring.named_places())[-1] == (8, "others (own1, own8, own9)")
    assert choose_colours(names).places == (*range(8), 8, 8, 8)
    page = render_page(handmade(token(0, "<s>"), names=names))
    assert "others (own8, own9, own10)" in parse(page).text
    assert leading([0.2, 0.5, 0.3]) == 1 and leading([0.4, 0.3, 0.3]) is None and leading(None) is None


def seen_apart(first: str, second: str, vision: str | None) -> float:
    """Distance of two colours in Oklab (Ottosson 2020) as somebody sees them."""
    matrix = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]] if vision is None else COLOUR_VISION[vision]
    cones = torch.tensor([
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ])  # fmt: skip
    opponent = torch.tensor([
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ])  # fmt: skip
    places = [opponent @ (cones @ seen_by(colour, matrix).clamp(0, 1)) ** (1 / 3) for colour in (first, second)]
    return float((places[0] - places[1]).norm())


@pytest.mark.parametrize("vision", [None, *COLOUR_VISION])
def test_paths_are_told_apart_with_any_colour_vision(vision: str | None) -> None:
    pairs = list(itertools.combinations(PATH_COLOURS, 2))
    assert min(seen_apart(*pair, vision) for pair in pairs) > 0.09
    assert min(contrast(LIGHT.text, colour) for colour in PATH_COLOURS) >= 5.5
    assert contrast(DARK.text, DARK.line) >= 5.5
    # the test can fail: Okabe and Ito's own green and purple, each as light as text on it needs
    assert vision != "deutan" or seen_apart("#2bb384", "#cf8fbf", vision) < 0.09
