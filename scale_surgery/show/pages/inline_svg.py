"""A figure as SVG inside a page: in the page's colours and font, so that it is right in light and in dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from scale_surgery.show.figures import make_visible
from scale_surgery.show.visible import visible_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOUR = re.compile("#[0-9a-f]{6}")
FONT = re.compile("font-(size|family): [^;]*(; |$)")
# the page has a style of its own, and nothing is drawn outside the axes
DROPPED = {"metadata", "style", "clipPath"}


def inline_svg(figure: Figure, label: str, variables: Mapping[str, str]) -> str:
    """Write a figure as an element of a page; lines and their points say on hover what they are.

    Args:
        figure: What to write.
        label: What it shows, for who cannot see it; no two figures of a page have the same one.
        variables: Names of the page's variables that stand for the colours of the figure.

    Returns:
        The element; equal figures with equal labels give equal texts.

    Raises:
        KeyError: If the figure has a colour that no variable stands for.
    """
    make_visible(figure)
    label = visible_line(label)
    lines = {f"line{number}": line for number, line in enumerate(_lines(figure))}
    for name, line in lines.items():
        line.set_gid(name)
    root = ElementTree.fromstring(_draw(figure, label))
    for group in root.iter():
        _simplify(group, variables)
        if group.get("id") in lines:
            _add_titles(group, lines[group.attrib["id"]])
        if group.tag == "g":
            group.attrib.pop("id", None)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _lines(figure: Figure) -> Iterator[Line2D]:
    for axes in figure.axes:
        yield from axes.get_lines()


def _draw(figure: Figure, label: str) -> str:
    """The file that matplotlib writes: text as text, and ids of shapes that depend on the shape and on the label."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _simplify(element: Element, variables: Mapping[str, str]) -> None:
    """Leave of an element what a page needs."""
    for child in list(element):
        child.tag = _plain(child.tag)
        if child.tag in DROPPED:
            element.remove(child)
    element.tag = _plain(element.tag)
    element.attrib = {_plain(name): value for name, value in element.attrib.items() if name != "clip-path"}
    if style := element.attrib.pop("style", ""):
        style = COLOUR.sub(lambda found: f"var(--{variables[found[0]]})", FONT.sub("", style))
        element.set("style", style)


def _plain(name: str) -> str:
    """A name without its namespace, which HTML does not write."""
    return name.rpartition("}")[2]


def _add_titles(group: Element, line: Line2D) -> None:
    name = visible_line(str(line.get_label()))
    assert line.axes is not None
    markers = [element for element in group.iter() if _plain(element.tag) == "use"]
    for marker, (x, y) in zip(markers, _marked(line), strict=True):
        _title(marker, f"{name}, {line.axes.get_xlabel()} {x:g}: {y:.4g}")
    _title(group, name)


def _marked(line: Line2D) -> list[tuple[float, float]]:
    """Points that have a marker, in the order in which matplotlib draws them."""
    if line.get_marker() == "None":
        return []
    points: Any = line.get_xydata()
    return [(x, y) for x, y in points[line.get_markevery()] if math.isfinite(x) and math.isfinite(y)]


def _title(element: Element, text: str) -> None:
    title = Element("title")
    title.text = text
    element.insert(0, title)
