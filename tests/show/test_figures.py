"""Figures: what is drawn, that labels can be read, and that matplotlib is left as it was."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from scale_surgery import DataError
from scale_surgery.drawing.figures import plot_training, running_mean, training_figure
from scale_surgery.evidence.evaluate import Evaluation
from scale_surgery.evidence.evaluate_models import MeterKind, Score
from scale_surgery.running.loss import Measurement
from scale_surgery.show.figure_plane import plane_figure, plot_plane
from tests.conftest import refused

BASE = "model (base)"


def log(steps: int, *, accuracies: bool = True) -> list[dict[str, Any]]:
    """What a run logs: a loss a step, and a measurement at every fourth."""
    records: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if step:
            records.append({"step": step, "loss": 3 / step, "learning_rate": 1e-3})
        if step % 4 == 0:
            measured = {"old_nats_per_token": 1.0, "new_nats_per_token": 3.0, "forgetting": 0.0, "learning": step / 9}
            both = {"old_accuracy": 1.0, "new_accuracy": None} if accuracies else {}
            records.append({"step": step} | measured | both)
    return records


def score(name: str, kind: MeterKind, base: str | None, old: float | None, new: float | None) -> Score:
    sides = (None if loss is None else Measurement(loss * 100, 100, 0, 0) for loss in (old, new))
    return Score(name, kind, base, *sides)


def evaluation(*scores: Score) -> Evaluation:
    return Evaluation(scores, ("old.txt",), ("new.txt",), 64, 32, None, ())


THREE = (
    score(BASE, "base", None, 0.4, 2.1),
    score("wide", "expanded", BASE, 0.43, 0.35),
    score("wide, expansion disabled", "disabled", BASE, 0.4, 2.1),
)
CROWD = (
    *THREE,
    score("adapted", "expanded", BASE, 0.46, 0.34),
    score("adapted, expansion disabled", "disabled", BASE, 0.4, 2.1),
    score("all parameters trained", "other", BASE, 1.3, 0.31),
    score("low rank 64", "other", BASE, 0.9, 0.33),
    score("low rank 8", "other", BASE, 0.7, 0.5),
    score("low rank 16", "other", BASE, 0.71, 0.48),
    score("a model with a name that is rather long", "expanded", BASE, 0.47, 0.36),
)


def numbers_of(figure: Any) -> list[Any]:
    """What is written beside points."""
    return [text for text in figure.axes[0].texts if text.get_text()]


def names_of(figure: Any) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


# a training run


def test_a_run_has_a_panel_for_each_kind_of_number() -> None:
    loss, change, accuracy = training_figure(log(8)).axes
    (line,) = loss.get_lines()
    assert list(line.get_xdata()) == list(range(1, 9))
    assert [line.get_label() for line in change.get_lines()] == ["forgetting (old text)", "learning (new text)"]
    assert [list(line.get_xdata()) for line in change.get_lines()] == [[0, 4, 8]] * 2
    assert [line.get_label() for line in accuracy.get_lines()] == ["old questions"]
    assert accuracy.get_xlabel() == "optimizer steps"
    # a panel without data is left out
    assert len(training_figure(log(8, accuracies=False)).axes) == 2
    assert len(training_figure([record for record in log(8) if "loss" in record]).axes) == 1
    assert len(training_figure([]).axes) == 1


def test_a_long_curve_is_smoothed_and_shown_as_it_was() -> None:
    mean, line = training_figure(log(300)).axes[0].get_lines()
    assert list(line.get_ydata()) == [3 / step for step in range(1, 301)]
    assert len(mean.get_ydata()) == 300 and max(mean.get_ydata()) < 3
    flat = running_mean([1.0, 3.0] * 100)
    assert len(flat) == 200 and all(1.5 < value < 2.5 for value in flat[10:-10])


def test_a_run_and_the_plane_are_written_as_png(tmp_path: Path) -> None:
    plot_training(log(80), tmp_path / "new" / "curves.png")
    height, width, _ = imread(tmp_path / "new" / "curves.png").shape
    assert (width, height) == (1120, 1056)
    before = (tmp_path / "new" / "curves.png").read_bytes()
    plot_training(log(80), tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes() == before
    plot_plane(evaluation(*CROWD), tmp_path / "new" / "plane.png")
    height, width, _ = imread(tmp_path / "new" / "plane.png").shape
    assert (width, height) == (1024, 808)
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["curves.png", "plane.png"]


# the plane


def test_the_plane_has_a_point_for_each_model() -> None:
    (axes,) = plane_figure(evaluation(*THREE).scores).axes
    assert [tuple(points.get_offsets()[0]) for points in axes.collections] == [(0.4, 2.1), (0.43, 0.35), (0.4, 2.1)]
    assert [number.get_text() for number in numbers_of(axes.figure)] == ["1, 3", "2"]
    assert [number.xy for number in numbers_of(axes.figure)] == [(0.4, 2.1), (0.43, 0.35)]
    assert names_of(axes.figure) == [f"1  {BASE}", "2  wide", "3  wide, expansion disabled"]
    guides = [list(line.get_xdata()) for line in axes.get_lines()]
    assert guides == [[0.4, 0.4], [0, 1]], "where the base stands"
    (arrow,) = (text for text in axes.texts if not text.get_text())
    assert (arrow.xyann, arrow.xy) == ((0.4, 2.1), (0.43, 0.35))
    broken = score("broken", "other", None, math.nan, 1.0)
    (axes,) = plane_figure(evaluation(*THREE, broken).scores).axes
    assert len(axes.collections) == 3, "a loss that is not finite is left out"


TWENTY = (
    CROWD[0],
    *(score(f"model {place}", "other", BASE, 0.4 + 0.01 * place**1.6, 2.1 / place) for place in range(1, 20)),
)


@pytest.mark.parametrize("scores", [THREE, CROWD, TWENTY], ids=["three", "crowd", "twenty"])
def test_numbers_of_a_crowd_can_be_read(scores: tuple[Score, ...]) -> None:
    figure = plane_figure(evaluation(*scores).scores)
    FigureCanvasAgg(figure).draw()
    numbers = numbers_of(figure)
    written = [int(number) for text in numbers for number in text.get_text().replace("\n", " ").split(", ")]
    assert sorted(written) == list(range(1, len(scores) + 1))
    assert names_of(figure) == [f"{place}  {point.name}" for place, point in enumerate(scores, start=1)]
    boxes = [text.get_window_extent() for text in numbers]
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    (axes,) = figure.axes
    assert all(axes.bbox.count_contains(box.corners()) == 4 for box in boxes)
    markers = axes.transData.transform([(point.old.nats_per_token, point.new.nats_per_token) for point in scores])
    assert not any(box.contains(*marker) for box in boxes for marker in markers)
    names = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert not any(first.overlaps(second) for first, second in itertools.combinations(names, 2))
    assert all(figure.bbox.count_contains(box.corners()) == 4 and not box.overlaps(axes.bbox) for box in names)


def test_models_on_one_point_share_a_number_and_a_plane() -> None:
    same = [score(name, "other", None, 0.003, 2.0) for name in ("one", "two")]
    (axes,) = plane_figure(evaluation(*same).scores).axes
    assert [number.get_text() for number in numbers_of(axes.figure)] == ["1, 2"]
    assert names_of(axes.figure) == ["1  one", "2  two"]
    assert axes.get_xlim()[0] < 0.003 < axes.get_xlim()[1]
    assert not axes.get_lines()
    # a name may have any character
    names = ["_hidden", "a$b$c", r"$\frac{$"]
    figure = plane_figure(evaluation(*(score(name, "other", None, 1.0, 2.0) for name in names)).scores)
    FigureCanvasAgg(figure).draw()
    assert names_of(figure) == [f"{place}  {name}" for place, name in enumerate(names, start=1)]


def test_the_plane_needs_old_and_new_text(tmp_path: Path) -> None:
    without_old = evaluation(score("one", "other", None, 1.0, None))
    with refused("plane-without-side", "", DataError):
        plot_plane(without_old, tmp_path / "plane.png")
    assert not (tmp_path / "plane.png").exists()


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_plane(evaluation(*THREE), tmp_path / "plane.png")
    plot_training(log(8), tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys; from pathlib import Path; from scale_surgery.drawing.figures import plot_training\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_training([{'step': 1, 'loss': 2.0}], Path(sys.argv[1]))\n"
        "import matplotlib\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.get_backend(auto_select=False) is None\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "fresh.png")]
    environment = {"PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
