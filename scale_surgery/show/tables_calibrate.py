"""Tables of the calibration of a router."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.command_lines import command
from scale_surgery.errors import counted
from scale_surgery.folder.routers import is_default, is_even, weights_of
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.show.commands import verify_command
from scale_surgery.show.layout import NEXT, Facts, PlainTable
from scale_surgery.show.tables import format_nats

if TYPE_CHECKING:
    from scale_surgery.routing.calibration import Calibration
    from scale_surgery.routing.outcome import Outcome
    from scale_surgery.running.loss import Measurement

# a setting is shown if it differs from the one above by this share of the range, in forgetting or in learning
DIFFERENT = 0.1


def render_calibration(result: Calibration, *, details: bool = False) -> RenderableType:
    """Render a sweep: base, adapt path, and the candidates with the present and the best setting."""
    shown = list(result.outcomes) if details else choose_shown(result)
    some = f"{len(shown)} of {counted(len(result.outcomes), 'setting')}"
    return Group(
        _render_heading(result),
        _render_outcomes(result, shown),
        Text(some if details else f"{some}, the candidates; --details lists all", style="dim"),
        Text(),
        _render_choice(result),
    )


def choose_shown(result: Calibration) -> list[Outcome]:
    """Return the settings sorted by forgetting.

    Settings that are beaten in both losses are omitted, and those that hardly differ from the one before.
    """
    named = (result.present, result.proposed, result.best)
    always = [outcome for outcome in result.outcomes if outcome in named]
    always += [
        outcome for outcome in result.outcomes if outcome.routing and is_default(outcome.routing, len(result.paths) - 1)
    ]
    best = list(_unbeaten(result.outcomes))
    reach = [DIFFERENT * (max(values) - min(values)) for values in zip(*map(_place, best), strict=True)]
    kept: list[Outcome] = []
    for outcome in sorted({*best, *always}, key=_place):
        if outcome in always or not kept or _differs(outcome, kept[-1], reach):
            kept.append(outcome)
    return kept


def _unbeaten(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    most: float | None = None
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.forgetting, -outcome.learning)):
        if most is None or outcome.learning > most:
            most = outcome.learning
            yield outcome


def _place(outcome: Outcome) -> tuple[float, float]:
    return outcome.forgetting, outcome.learning


def _differs(outcome: Outcome, last: Outcome, reach: Sequence[float]) -> bool:
    return any(abs(a - b) > least for a, b, least in zip(_place(outcome), _place(last), reach, strict=True))


def _render_heading(result: Calibration) -> RenderableType:
    sides = [
        f"{side} text: {counted(score.scored, 'token')}"
        + (f", {counted(score.questions, 'question')}" if score.questions else "")
        for side, score in (("old", result.base.old), ("new", result.base.new))
    ]
    router = result.present.routing
    assert router is not None
    kind = f"{router.router} router"
    if result.has_several:
        kind += f" over {len(result.paths)} paths: {', '.join(result.paths)}"
    kind += "".join(f", {name}" for name, value in router.settings.items() if value is True)
    return Group(Text(f"{result.name}: {kind}", style="bold"), Text("; ".join(sides)))


def _render_outcomes(result: Calibration, shown: Sequence[Outcome]) -> Table:
    numbers = list(_number_cells(result.present))
    sides = [side for side in ("old", "new") if getattr(result.base, side).questions]
    scores = ["forgets", "first 8\nforgets", "learns", "routed\nold", "routed\nnew"]
    names = [*numbers, *scores, *(f"right\n{side}" for side in sides)]
    table = PlainTable()
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    path = "best path" if result.has_several else "adapt"
    for name, outcome in (("base", result.base), (path, result.adapt)):
        table.add_row(name, *_cells(outcome, numbers, sides))
    for outcome in shown:
        name = "now" if outcome == result.present else "best" if outcome == result.proposed else ""
        style = "bold" if outcome == result.proposed else None
        table.add_row(name, *_cells(outcome, numbers, sides), style=style)
    return table


def _number_cells(outcome: Outcome) -> dict[str, str]:
    """Return the numbers of a setting, by column."""
    routing = outcome.routing
    if routing is None:
        return {}
    if not isinstance(routing, PosteriorRouter):
        numbers = {name: value for name, value in routing.settings.items() if type(value) in (int, float)}
        return {name.replace("_", "\n"): f"{value:.10g}" for name, value in numbers.items()}
    base, *others = weights_of(routing)
    rate = {"rate": f"{routing.switch_rate:.3g}"}
    if len(others) == 1:
        return {"prior": f"{base:.3g}", **rate}
    least, most = (f"{weight:.3g}" for weight in (min(others), max(others)))
    return {"base": f"{base:.3g}", "others": least if is_even(others) else f"{least}-{most}", **rate}


def _cells(outcome: Outcome, numbers: Sequence[str], sides: Sequence[str]) -> list[str]:
    values = _number_cells(outcome)
    accuracies: list[Measurement] = [getattr(outcome, side) for side in sides]
    return [
        *(values.get(name, "") for name in numbers),
        *map(format_nats, (outcome.forgetting, outcome.short.value, outcome.learning)),
        *map(_share, (outcome.routed_old, outcome.routed_new)),
        *(_share(measured.accuracy) for measured in accuracies),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.{1 if abs(value) < 10 else 0}%}"


def _render_choice(result: Calibration) -> RenderableType:
    best = result.proposed
    path = "best" if result.has_several else "adapt"
    kept = "" if best.kept is None else f", {_share(best.kept)} of the learning of the {path} path"
    rows = [
        ("rule", f"learns most, and forgets at most {result.most_forgetting:g}, also on first 8 tokens"),
        ("best", f"{best.numbers}: forgets {format_nats(best.forgetting)}, learns {format_nats(best.learning)}{kept}"),
        *_gain_rows(result),
        *_bound_rows(result),
        *_written_rows(result),
    ]
    rows += [] if result.plot is None else [("drawn", str(result.plot))]
    return Facts("", [*rows, (NEXT, _next(result))])


def _written_rows(result: Calibration) -> Iterator[tuple[str, str]]:
    """Yield the former setting, or why none is written."""
    if not result.is_within:
        few = "" if math.isfinite(result.best.short.error) else ", and one old text gives no standard error"
        yield "written", f"nothing: every allowed setting may forget more{few}; this one forgets least"
    elif result.proposed == result.present:
        yield "written", "nothing: the model has this setting"
    elif result.written:
        yield "written", f"before: {result.present.numbers}"


def _next(result: Calibration) -> str:
    if result.written or not result.is_within or result.proposed == result.present:
        return verify_command(result.path)
    texts = [word for side in ("old", "new") for file in getattr(result, side) for word in (f"--{side}", file)]
    return command("route-calibrate", result.path, *texts, *result.options, "--write")


def _gain_rows(result: Calibration) -> Iterator[tuple[str, str]]:
    """Yield the gain of the best allowed setting, if it is not the present one."""
    best = result.best
    if best == result.present:
        return
    error = f"standard error {best.gain.error:.4f} over texts"
    if math.isinf(best.gain.error):
        error = "no standard error from one text: give more texts"
    gain = f"{format_nats(best.gain.value)} nats per token, {error}"
    yield "gain", gain if best == result.proposed else f"too small for a change: {best.numbers} gains {gain}"


def _bound_rows(result: Calibration) -> Iterator[tuple[str, str]]:
    """Yield the bound on the loss of any text relative to the base, before and after."""
    if result.present.bound is None:
        return
    before, after = (
        f"{outcome.bound:.3g} nats, and {outcome.bound_per_token:.3g} for each further token"
        for outcome in (result.present, result.proposed)
    )
    yield "bound", f"a text may lose {after}" + (f"; now {before}" if before != after else "")
