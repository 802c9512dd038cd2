"""A report as a page, as charts, in the terminal and from the command line."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import UndefinedError

from scale_surgery import PosteriorRouter, Report, Request, expand, report
from scale_surgery.drawing.figures import MOST_MARKERS, Curve
from scale_surgery.drawing.palette import BLUE, DARK, GREY, LIGHT, VERMILION, Palette
from scale_surgery.evidence.probes import Layer
from scale_surgery.evidence.report_records import Norms, Streams, TensorChange, by_layer
from scale_surgery.learning.tables import COLUMNS
from scale_surgery.show.pages.charts import chart_figure, render_chart
from scale_surgery.show.pages.filling import fill
from scale_surgery.show.pages.report import Cells, Section, render_headed, render_page, write_page
from scale_surgery.show.tables_report import render_report
from tests.command import run
from tests.conftest import Bars, shake, shown
from tests.routing.test_report import CHROMIUM, COLOUR_VISION, contrast, parse, seen_by
from tests.test_docs import COMMANDS
from tests.tiny import save_tiny

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show the page")
EVIL = "<script>alert(1)</script>&\"'{{ facts }}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a changed adapt model, and one that nobody trained."""
    place = tmp_path_factory.mktemp("report_page")
    base = save_tiny(place / "base", "llama")
    request = Request("0-2", variant="adapt", collaborate="both", collaborative_layers="1-2")
    shake(expand(base, request, place / "adapt").path)
    expand(base, Request("1"), place / "untrained")
    return place


@pytest.fixture(scope="module")
def drawn(place: Path) -> Report:
    return report(place / "adapt")


def tensor(layer: int, role: str = "q", block: str = "w12", **changes: Any) -> TensorChange:
    """A tensor made by hand."""
    norms = Norms(2.0, 0.0, 2.0, 8.0) if block == "w12" else Norms(5.0, 4.0, 1.0, 8.0)
    group = "ffn" if role in ("gate", "up_proj", "down") else "attn"
    name = f"model.layers.{layer}.{role}.{block}"
    made = TensorChange(name, layer, role, group, block, "svd", (9, 4), norms, True)
    return replace(made, **changes)


def handmade(*tensors: TensorChange, **changes: Any) -> Report:
    state: Any = "trained" if any(change.is_trained for change in tensors) else "initial"
    made = Report(
        Path("wide"), "base", "scale", "adapt", None, state, 100, tensors, by_layer(tensors), None, (), (), ()
    )
    return replace(made, **changes)


# the page


def test_page_needs_nothing_else_and_runs_nothing(drawn: Report, tmp_path: Path) -> None:
    write_page(drawn, tmp_path / "out" / "report.html")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page = parse(html)
    assert not [attributes for tag, attributes in page.tags if tag in ("link", "iframe", "object", "base", "script")]
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) > 3 and all(
        attributes["alt"] and attributes["src"].startswith("data:image/svg+xml;base64,") for attributes in images
    )
    assert not [
        attributes for tag, attributes in page.tags if "href" in attributes or ("src" in attributes and tag != "img")
    ]
    assert not re.search(r"https?:|@import|url\(|\{\{|\{%", html)
    assert "default-src 'none'; img-src data:;" in html and "script-src" not in html
    with pytest.raises(UndefinedError):
        fill("report.html", title="a gap that nothing fills")


def test_page_shows_every_section_and_every_tensor(drawn: Report, place: Path) -> None:
    html = render_page(drawn)
    assert re.findall("<h2>(.*?)</h2>", html) == [
        "W12, layer by layer", "The base stream, layer by layer", "W12, from zeros", "W21, from initial values",
        "W22, from zeros", "Every tensor",
    ]  # fmt: skip
    assert len(re.findall("<tr title=", html)) == len(drawn.tensors)
    (w12,) = (
        change for change in drawn.tensors if change.name == "model.layers.1.mlp.down_proj.expansions.default.w12"
    )
    assert f"{w12.norms.relative_norm:.1%}" in html
    untrained = report(place / "untrained")
    html = render_page(untrained)
    assert re.findall("<h2>(.*?)</h2>", html) == ["The base stream, layer by layer", "Every tensor"]
    assert "Nothing was trained" in html and f"0 of {len(untrained.tensors)}" in html
    assert not any("stroke-dasharray" in svg for svg in images_of(html))
    assert "Bit-equal to the base model's after every layer." in parse(html).text


def test_charts_of_a_page() -> None:
    log = [{"step": 0, "forgetting": 0.0, "learning": 0.0}, {"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0}]
    html = render_page(handmade(tensor(0), log=(*log, {"step": 20, "forgetting": 0.5, "learning": 1.5})))
    assert 'alt="Training loss: nats over step"' in html and "Questions answered" not in html
    assert "learning (new text)</text>" in images_of(html)[1]
    losses = tuple({"step": step, "loss": loss} for step, loss in enumerate((3.0, 2.0, math.nan, 2.0, 1.0)))
    html = render_page(handmade(tensor(0), log=losses))
    assert [len(path) for path in paths_of(images_of(html)[0])] == [2, 2], "a loss that is no number breaks the line"
    page = render_page(handmade(*(tensor(layer, block=block) for layer in range(2) for block in ("w12", "w21"))))
    marked = [bool(re.search(r"<g clip-path[^>]*>\s*<use", svg)) for svg in images_of(page)]
    assert marked == [True, True], "norm and its share have markers"


def test_only_what_scale_found_is_said_of_its_w12() -> None:
    finding = "SCALE (arXiv 2511.03270) finds forgetting nearly linear in this norm."
    scale, grow = (handmade(tensor(0, "down"), method=method) for method in ("scale", "grow"))
    assert finding in render_page(scale)
    page = render_page(grow)
    assert "SCALE" not in page and "<figcaption>Change, FFN<" in page and "<figcaption>Norm, FFN<" in render_page(scale)
    assert "W12, the copies' part of the down projection" in parse(page).text


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_texts_are_seen_by_day_and_by_night(palette: Palette) -> None:
    assert contrast(GREY, palette.background) >= 4 and contrast(palette.text, palette.heat) >= 4.5
    assert min(contrast(palette.text, colour) for colour in (palette.background, palette.surface)) >= 5.5
    assert contrast(palette.muted, palette.background) >= 4.5 and contrast(palette.accent, palette.background) >= 3
    for vision in COLOUR_VISION.values():
        first, second = (seen_by(colour, vision) for colour in (BLUE, VERMILION))
        assert float((first - second).abs().max() / torch.maximum(first, second).abs().max()) > 0.5


def on_a_telephone(page: str, numbers: str, tmp_path: Path) -> list[int]:
    """What JavaScript says of a page, in a frame, since a window of Chromium is 500 pixels wide at least."""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (
        tmp_path / "frame.html"
    ).write_text(f"""<iframe src="page.html" style="width: 400px; height: 900px"></iframe><script>
    onload = () => {{ const page = frames[0].document.documentElement;
      document.body.textContent = "RESULT" + [{numbers}].join(" ") + "END"; }};
    </script>""")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (text,) = re.findall("RESULT(.*)END", done.stdout)
    return [int(number) for number in text.split()]


@needs_chromium
def test_all_is_seen_on_a_telephone(drawn: Report, tmp_path: Path) -> None:
    """A page is no wider, tables scroll in themselves, and a text has a width in which words need not break."""
    width, needed = on_a_telephone(render_page(drawn), "page.clientWidth, page.scrollWidth", tmp_path)
    assert 380 <= width <= 400 and needed <= width
    losses = [Cells(("", *head), [("learned", "3.2928", "-0.5374", "100.0%")]) for head in COLUMNS.values()]
    promise = ("base_stream_always", "not claimed", "47 base tensors, 1,040,128 bytes, sha256 compared")
    promises = Cells(("promise", "result", "evidence"), [promise], True)
    sections = [*(Section("Learned", "", cells=cells) for cells in losses), Section("Promises", "", cells=promises)]
    page = render_headed(drawn, "Title", (), [], sections)
    numbers = """...[...page.querySelectorAll(".scroll:has(.cells)")].map(own => own.scrollWidth - own.clientWidth),
      page.querySelector(".cells.text td:last-child").clientWidth"""
    *hidden, width = on_a_telephone(page, numbers, tmp_path)
    assert hidden == [0, 0, 0] and width > 300


# charts


def test_axes_hold_their_values_and_reach_what_they_have_to() -> None:
    for low, high in ((0, 3.7), (-2, 5), (0.61, 1), (0, 1e-7), (3, 3), (0, 0), (1e6, 3e6)):
        (axes,) = chart_figure([curve(low, high)], reaches=None).axes
        bottom, top = axes.get_ylim()
        assert len(shown_ticks(axes.yaxis)) >= 2 and bottom < low <= high < top
    least, most = (chart_figure([curve(5, 6)], reaches=reaches).axes[0].get_ylim() for reaches in (0, 9))
    assert least[0] <= 0 and most[1] >= 9
    # steps and layers are whole numbers
    for places, wanted in (((0, 3), [0, 1, 2, 3]), ((1, 2), [1, 2]), ((5,), None), ((0, 79), None)):
        ticks = shown_ticks(chart_figure([Curve("", [(place, 1.0) for place in places], BLUE)]).axes[0].xaxis)
        assert all(tick == int(tick) for tick in ticks) and wanted in (None, ticks)


def curve(*values: float, name: str = "one", colour: str = BLUE) -> Curve:
    return Curve(name, list(enumerate(values)), colour)


def shown_ticks(axis: Any) -> list[float]:
    """Ticks that are drawn: those inside the axis."""
    axis.get_figure().draw_without_rendering()
    low, high = axis.get_view_interval()
    return [float(tick) for tick in axis.get_majorticklocs() if low <= tick <= high]


def draw(*curves: Curve, title: str = "", **options: Any) -> str:
    """The SVG of a chart."""
    return "".join(_decoded(chart.image) for chart in render_chart(title, curves, "x", "y", **options))


def images_of(html: str) -> list[str]:
    """The SVG of every image of a page."""
    return list(map(_decoded, re.findall('src="(data:[^"]*)"', html)))


def _decoded(image: str) -> str:
    return base64.b64decode(image.partition(",")[2]).decode()


def paths_of(svg: str) -> list[list[tuple[float, float]]]:
    """Points of each line of each curve of a chart, that of one point left out; lines of the grid are transparent."""
    paths = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #\w{6}; stroke-width', svg)
    pieces = [re.findall(r"([-0-9.]+) ([-0-9.]+)", piece) for path in paths for piece in path.split("M")[1:]]
    return [[(float(across), float(down)) for across, down in piece] for piece in pieces if len(piece) > 1]


@pytest.mark.parametrize("colour", [BLUE, GREY], ids=["with markers", "without"])
def test_a_line_breaks_where_a_value_cannot_be_drawn(colour: str) -> None:
    """No straight line across, neither of NaN nor of infinity."""
    plain = [paths_of(draw(curve(*values, colour=colour))) for values in ((1, 2, 3, 4, 5), (1, 2, 0, 4, 5))]
    assert [[len(path) for path in paths] for paths in plain] == [[5], [5]]
    for hole in (math.nan, math.inf, -math.inf):
        before, after = paths_of(draw(curve(1, 2, hole, 4, 5, colour=colour)))
        assert len(before) == len(after) == 2 and before[-1][0] < after[0][0]
    # a run that ends in NaN ends before the axis does
    (path,) = paths_of(draw(curve(1, 2, math.nan, math.nan, colour=colour)))
    assert path[-1][0] < 4.4 * 72 / 2
    assert draw(curve(math.nan, colour=colour)) == ""


def test_few_points_have_markers_and_one_curve_has_no_legend() -> None:
    def markers(*values: float) -> int:
        (line,) = chart_figure([curve(*values)]).axes[0].get_lines()
        return len(values) if line.get_marker() == "o" else 0

    assert markers(*range(MOST_MARKERS)) == MOST_MARKERS and markers(*range(MOST_MARKERS + 1)) == 0
    first, second = curve(1, 2, name="first"), curve(2, 1, name="second", colour=VERMILION)
    assert ">first</text>" in draw(first, second) and ">first</text>" not in draw(first)
    assert ">first</text>" not in draw(first, replace(second, points=[]))
    assert ">first</text>" not in draw(first, replace(second, in_legend=False))


def test_names_are_escaped_in_pages_and_charts() -> None:
    streams = Streams((Layer(-1, 0.0, 1.0, True), Layer(0, 1.0, 0.5, False)), EVIL, 3, "float32", "expanded")
    evil = handmade(
        tensor(0, EVIL, name=EVIL), path=Path(EVIL.replace("/", "_")), base_name=EVIL, streams=streams, notes=(EVIL,)
    )
    page = parse(render_page(evil))
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.text.count("<script>alert(1)") >= 6
    assert EVIL in page.text and EVIL in [attributes.get("title") for _, attributes in page.tags]
    curves = curve(1, 2, name=EVIL), curve(2, 1, name=EVIL, colour=VERMILION)
    svg = draw(*curves, title=EVIL)
    page = parse(svg)
    assert not [tag for tag, _ in page.tags if tag == "script"] and page.text.count(EVIL) == 2
    assert svg == draw(*curves, title=EVIL), "the same each time"


# the terminal


def test_terminal_fits_eighty_columns(drawn: Report) -> None:
    for details in (False, True):
        text = shown(render_report(drawn, details=details))
        assert max(map(len, text.splitlines())) <= 80
        assert ("tensors  (" in text) == details
    assert "W12 attention  norm " in text and "embedding" in text
    large = Norms(123456.0, 98765.0, 99999.0, 123456.0)
    rows = [tensor(99, "up_proj", "up_weight", norms=large, shape=(128000, 4096))]
    routed = handmade(*rows, tensor(98), routing=PosteriorRouter().for_expansions(1), variant="grow-freeze")
    text = shown(render_report(routed, details=True))
    assert max(map(len, text.splitlines())) <= 80 and "123456" in text


def test_layers_show_norms_of_zeros_and_changes_of_the_rest() -> None:
    text = shown(render_report(handmade(tensor(1), tensor(1, "k"), tensor(1, block="w21"))))
    row = next(line for line in text.splitlines() if line.startswith("1 "))
    assert row.split() == ["1", "2.83", "25.0%"]
    assert "no model was run" in text
    # a role that alone started as zeros has a column of its own
    copied = [tensor(1, "o", block="weight", norms=Norms(2.0, 0.0, 2.0, 8.0)), tensor(1, block="weight")]
    lines = shown(render_report(handmade(*copied))).splitlines()
    heads = [line.split() for line in lines]
    assert heads.index(["weight", "weight"]) + 1 == heads.index(["layer", "attn", "o"])
    assert next(line for line in lines if line.startswith("1 ")).split() == ["1", "25.0%", "2.00"]


def test_terminal_counts_what_is_trained_and_says_that_separations_are_means_over_layers() -> None:
    text = shown(render_report(handmade(tensor(0), tensor(1), tensor(2, is_trained=False))))
    assert "2 of 3 expansion tensors (100 parameters in all)" in text and "copies apart" not in text
    copies = [tensor(0, "gate", "w21", separation=0.25), tensor(1, "gate", "w21", separation=0.75)]
    text = shown(render_report(handmade(*copies, tensor(1, "up_proj", "w21", separation=0.1), method="grow")))
    assert "copies apart  gate 50.0%, up_proj 10.0%, mean over layers" in text


def test_terminal_says_which_layer_a_row_of_a_copy_is() -> None:
    streams = Streams((Layer(-1, 0.0, 1.0, True), Layer(0, 1.0, 0.5, False)), "text", 3, "float32", "expanded")
    copied = [tensor(0, block="weight")]
    row = "Each row is the copy after that base layer"
    depth = handmade(*copied, method="depth")
    assert f"{row}." in shown(render_report(depth)) and row in render_page(depth)
    read = shown(render_report(replace(depth, streams=streams), details=True))
    assert f"{row}; cosine and" in read and read.count(row) == 2 and max(map(len, read.splitlines())) <= 80
    for method in ("scale", "grow"):
        method_report = handmade(*copied, method=method)
        assert row not in shown(render_report(method_report, details=True)) and row not in render_page(method_report)


# the command line


def test_command_writes_table_page_and_json(place: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = run("report", place / "adapt", "-o", page, "--json")
    assert page.read_text().startswith("<!doctype html>")
    content = json.loads(done.stdout)
    assert content["path"].endswith("adapt") and content["state"] == "trained"
    assert len(content["streams"]["layers"]) == 4
    lines = "".join(page.read_text(encoding="utf-8") for page in COMMANDS).splitlines()
    row = next(line for line in lines if line.startswith("| `report` |"))
    documented = re.search("for each role: (.*); `layers`", re.sub(r"\(.*?\)", "", row))
    assert documented is not None
    assert content["tensors"][0].keys() == set(re.findall("`(.*?)`", documented[1]))
    # each norm once
    norms = {"norm", "start_norm", "change", "base_norm", "relative_change", "relative_norm", "change_of_base"}
    assert all(layer.keys() == {"layer", "group", "block"} | norms for layer in content["layers"])


def test_tracks_what_it_does(place: Path) -> None:
    bars = Bars()
    report(place / "adapt", track=bars)
    assert list(bars) == ["blocks", "base stream"] and all(total == done > 0 for total, done in bars.values())
